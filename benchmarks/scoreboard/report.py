"""The result file, and the page with tables and plots that is made from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

from benchmarks.common import conditions
from benchmarks.scoreboard.methods import METHODS
from benchmarks.scoreboard.run import EVALUATIONS, WARM_UP, Result
from benchmarks.scoreboard.scores import Score, geometric, middle, score, targets
from benchmarks.scoreboard.search import EXTENSIONS, LONG_HORIZON, LONG_METHODS, Board
from benchmarks.scoreboard.tasks import TASKS

OURS = "natural-muon"
VARIANTS = (
    "Before this board some 70 variants of natural Muon were tried on a tanh autoencoder, a character GPT and a "
    "convolutional net on glyphs, against few of the rivals'. Tasks of the same three kinds are on the board. "
    "Four choices for the last layer were then tried on three tasks that are not (`benchmarks/open_questions.py`), and "
    "one became the default. After the results at N steps were known, momentum .95, intervals of 10 and 100 steps, and "
    "half powers without a polar factor on convolutions were tried on the same three tasks; no default changed "
    "(`docs/measurements.md`). After those at 4N, running averages over more batches (three decays), power 1/8, "
    "damping .1 and products in bfloat16 were tried there. Later seven forms of long sides and of the polar factor "
    "were tried on three such tasks. With the one chosen there six tasks of this board ended up to 6 % higher than "
    "before. So twelve more forms were tried on eleven other tasks (`benchmarks/muon_factors.py`), and, after this "
    "board's seconds were known, nine intervals and numbers of Newton-Schulz steps (`benchmarks/muon_refresh.py`). "
    "Then twelve changes of momentum, of second moments and of what AdamW moves were tried on the same tasks, and "
    "three Newton-Schulz steps, also on this whole board (at N 0.85 of the best rival's steps and 0.96 of its seconds, "
    "at 4N 0.90 and 1.00, steps timed on an Intel Xeon; not kept). Last, seven powers and dampings "
    "(`benchmarks/muon_damping.py`) and thirteen other changes (`docs/measurements.md`) were tried off the board, "
    "and damping .003 on this whole board at N, where the geometric means change by at most 0.01; no default changed. "
    "The default has Nesterov momentum in AdamW, whole factors of sides of at most 256 columns, diagonals of longer "
    "long sides, the channels' factors of convolutions, four Polar Express steps, refreshes at steps 0, 1, 2, 4... "
    "and every 100, roots spread over steps, and bfloat16 for large matrices where the device is fast. How large was "
    "set by the time of products."
)
"""How many variants of ours were tried. Whoever tries more changes this text."""

MODES = {"tuned": "tuned per task", "one": "one setting for all tasks"}
PROFILE_TO = 4.0
Scores = dict[str, dict[str, Score]]  # by task and method


class IncompleteError(Exception):
    """Runs or measurements are missing."""


def collect(board: Board, horizons: Sequence[int]) -> dict[str, Any]:
    """Gather what the journal has into one result, without the runs of one setting if any of them is missing.

    Raises:
        IncompleteError: Something is missing.
    """
    found: dict[str, Any] = {
        **conditions("cpu"),
        "seeds": len(board.scale.seeds),
        "reference": board.reference,
        "tasks": {
            name: {
                "steps": board.scale.steps or TASKS[name].steps,
                "batch": TASKS[name].batch,
                "validation": len(TASKS[name].data()[2]),
                "frozen": TASKS[name].frozen,
            }
            for name in board.scale.tasks
        },
        "methods": {name: METHODS[name].kind for name in board.scale.methods},
        "horizons": {},
    }
    for kind in ("timing", "memory"):
        missing = [task for task in board.scale.tasks if (kind, task) not in board.journal.measures]
        if missing:
            raise IncompleteError(f"no {kind} of {', '.join(missing)}")
        found[kind] = {task: board.journal.measures[kind, task] for task in board.scale.tasks}
    for horizon in horizons:
        methods = list(board.scale.methods) if horizon == 1 else board.long_methods()
        one = {method: board.one_setting(method, horizon) for method in methods}
        modes: dict[str, dict[str, Any]] = {mode: {} for mode in MODES}
        lacking: set[str] = set()
        for task in board.scale.tasks:
            for mode in MODES:
                modes[mode][task] = {}
                for method in methods:
                    setting = board.best(task, method, horizon) if mode == "tuned" else one[method]
                    results = board.fresh(task, method, horizon, setting)
                    if len(results) < len(board.scale.seeds):
                        if mode == "tuned":
                            raise IncompleteError(f"{method} on {task}, {horizon}N")
                        lacking.add(mode)
                    modes[mode][task][method] = {"setting": setting, "runs": [_compact(each) for each in results]}
            for method in methods:
                searched = board.searched(task, method, horizon)
                tried = [[*setting, _short(result.final)] for setting, result in searched.items()]
                modes["tuned"][task][method]["searched"] = tried
        found["horizons"][str(horizon)] = {mode: own for mode, own in modes.items() if mode not in lacking}
    return found


def _short(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None


def _compact(result: Result) -> dict[str, Any]:
    return {
        "validation": [_short(value) for value in result.validation],
        "training": _short(result.training[-1]) if result.training else None,
        "diverged": result.diverged,
    }


def _restored(run: Mapping[str, Any]) -> Result:
    training = [math.inf if run["training"] is None else run["training"]]
    return Result(validation=run["validation"], training=training, seconds=0.0, diverged=run["diverged"])


def scores_of(data: Mapping[str, Any], horizon: str, mode: str, target_mode: str = "tuned") -> Scores:
    """Return the scores of a result, with targets from the runs of a mode."""
    modes, found = data["horizons"][horizon], Scores()
    for task, methods in modes[mode].items():
        timing, steps = data["timing"][task], data["tasks"][task]["steps"] * int(horizon)
        curves = {
            name: middle([run["validation"] for run in own["runs"]]) for name, own in modes[target_mode][task].items()
        }
        rivals = [name for name in curves if data["methods"][name] == "rival"]
        target = targets(curves, rivals, data["reference"])
        found[task] = {
            name: score(list(map(_restored, own["runs"])), target, steps, timing["ratios"][name], timing["block"])
            for name, own in methods.items()
        }
    return found


def shares_of_best_rival(
    scores: Scores, kinds: Mapping[str, str], method: str, unit: str, which: str
) -> dict[str, tuple[float, str]]:
    """Return, by task, a method's steps or seconds to a target over those of the rival that needs least, and its name.

    Rivals that miss the target do not count, unless all of them do. Of rivals that need the same, the one that ends
    lowest counts.

    Args:
        scores: Of one horizon and mode.
        kinds: "rival" or "ours" by method.
        method: Whose shares.
        unit: "steps" or "seconds".
        which: "first" or "second".
    """
    found = {}
    for task, own in scores.items():
        need = {name: getattr(own[name], which) for name in own}
        rivals = [name for name in own if kinds[name] == "rival" and name != method]
        best = min(rivals, key=lambda name: (need[name].missed, getattr(need[name], unit), own[name].final))
        found[task] = getattr(need[method], unit) / getattr(need[best], unit), best
    return found


def profile(scores: Scores, unit: str, which: str) -> dict[str, list[float]]:
    """Return, for each method, what it needed to a target over the least that any needed, by task; infinite: missed."""
    found: dict[str, list[float]] = {}
    for own in scores.values():
        need = {
            name: math.inf if getattr(each, which).missed else getattr(getattr(each, which), unit)
            for name, each in own.items()
        }
        least = min(need.values())
        for name, value in need.items():
            found.setdefault(name, []).append(value / least if math.isfinite(value) else math.inf)
    return found


def number(value: float) -> str:
    """Return a number with three significant digits."""
    return "diverged" if math.isinf(value) else f"{value:.3g}"


def row(cells: Sequence[object]) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table whose first column alone is aligned to the left."""
    return "\n".join([row(head), row(["---", *["---:"] * (len(head) - 1)]), *map(row, rows), ""])


def need(value: float, *, missed: bool) -> str:
    """Return a share of a budget; what was missed is marked."""
    return f"*{value:.2f} missed*" if missed else f"{value:.2f}"


def headline(scores: Scores, titles: Mapping[str, str]) -> str:
    """Return the table of the worst task and the geometric mean for every method and target."""
    rows = []
    for name in next(iter(scores.values())):
        cells: list[object] = [titles[name]]
        for which in ("first", "second"):
            each = [getattr(own[name], which) for own in scores.values()]
            for unit in ("steps", "seconds"):
                values = [getattr(one, unit) for one in each]
                cells.append(f"{max(values):.2f} / {geometric(values):.2f}")
            cells.append(sum(one.missed for one in each))
        rows.append(cells)
    rows.sort(key=lambda cells: float(str(cells[4]).split("/")[1]))
    heads = [f"{part} {target}" for target in ("T1", "T2") for part in ("steps to", "seconds to", "missed")]
    return table(["worst task / geometric mean", *heads], rows)


def beside_rivals(scores: Scores, kinds: Mapping[str, str], titles: Mapping[str, str]) -> str:
    """Return, for each method of ours, steps and seconds to T2 over those of each task's best rival."""
    rows = []
    for name in next(iter(scores.values())):
        if kinds[name] == "ours":
            for unit in ("steps", "seconds"):
                found = shares_of_best_rival(scores, kinds, name, unit, "second")
                values = [value for value, _ in found.values()]
                cells = [
                    f"{need(value, missed=scores[task][name].second.missed)} ({titles[best]})"
                    for task, (value, best) in found.items()
                ]
                rows.append([f"{titles[name]}, {unit}", f"{max(values):.2f}", f"{geometric(values):.2f}", *cells])
    return table(["over the best rival's to T2", "worst", "geo. mean", *scores], rows)


def defeats(scores: Scores, kinds: Mapping[str, str], titles: Mapping[str, str], reference: str) -> list[str]:
    """Say where methods of ours end behind rivals, in validation and training loss and at equal seconds, or AdamW."""

    def behind(name: str, value: Callable[[Score], float]) -> str:
        found = []
        for task, own in scores.items():
            rival = min((each for each in own if kinds[each] == "rival"), key=lambda each: value(own[each]))
            if value(own[name]) > value(own[rival]):
                losses = f"{number(value(own[name]))} against {number(value(own[rival]))}"
                found.append(f"{task} ({titles[rival]}: {losses})")
        return ", ".join(found) or "no task"

    lines = []
    for name in next(iter(scores.values())):
        if kinds[name] != "ours":
            continue
        adamw = [task for task, own in scores.items() if own[name].final > own[reference].final]
        lines.append(f"- **{titles[name]}** ends behind the best rival on {behind(name, lambda each: each.final)}.")
        lines.append(f"  Ends behind AdamW on {', '.join(adamw) or 'no task'}.")
        lines.append(f"  Ends behind the best rival in training loss on {behind(name, lambda each: each.training)}.")
        equal = behind(name, lambda each: each.equal_seconds)
        lines.append(f"  After AdamW's seconds, before the end of its own schedule, behind the best rival on {equal}.")
    return lines


def details(data: Mapping[str, Any], horizon: str, mode: str, scores: Scores, titles: Mapping[str, str]) -> list[str]:
    """Return a table for each task."""
    lines = []
    for task, own in scores.items():
        rows = []
        for name, each in sorted(own.items(), key=lambda item: item[1].final):
            rate, second = data["horizons"][horizon][mode][task][name]["setting"]
            rows.append(
                [
                    titles[name],
                    f"{rate:.3g}, {METHODS[name].second} {second:g}",
                    number(each.final),
                    f"{number(each.spread[0])} to {number(each.spread[1])}",
                    number(each.training),
                    number(each.equal_seconds),
                    *(
                        need(getattr(reach, unit), missed=reach.missed)
                        for reach in (each.first, each.second)
                        for unit in ("steps", "seconds")
                    ),
                    f"{each.step:.2f}",
                    f"{data['memory'][task]['bytes'][name] / 2**20:.1f}",
                ]
            )
        about = data["tasks"][task]
        frozen = ", frozen" if about["frozen"] else ""
        adamw = f"AdamW's takes {1e3 * data['timing'][task]['seconds']:.2g} ms"
        lines += [f"**{task}** ({about['steps'] * int(horizon)} steps of {about['batch']}{frozen}; {adamw})", ""]
        heads = ["method", "setting", "final loss", "seeds", "training loss", "at equal seconds"]
        heads += ["steps to T1", "seconds to T1", "steps to T2", "seconds to T2", "cost of a step", "MiB"]
        lines.append(table(heads, rows))
    return lines


def horizon_name(horizon: str) -> str:
    """Return what to call the length of the runs at a horizon."""
    return "N" if horizon == "1" else f"{horizon}N"


def _parts(data: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the horizons and modes that were run: horizon, mode and what to call the mode."""
    return [
        (horizon, mode, MODES[mode]) for horizon, modes in data["horizons"].items() for mode in MODES if mode in modes
    ]


def at_edge(data: Mapping[str, Any], mode: str) -> str:
    """Name the methods and tasks whose setting has the lowest or the highest learning rate of its search.

    Args:
        data: As `collect` returns it.
        mode: "tuned", or "one", for which the learning rates that ran on every task count.
    """
    found = []
    for horizon, modes in data["horizons"].items():
        for task, methods in modes.get(mode, {}).items():
            for name, own in methods.items():
                searches = [modes["tuned"][task]] if mode == "tuned" else modes["tuned"].values()
                rates = set.intersection(*({rate for rate, *_ in each[name]["searched"]} for each in searches))
                if own["setting"][0] in (min(rates), max(rates)):
                    where = f" on `{task}`" if mode == "tuned" else ""
                    found.append(f"{METHODS[name].title}{where} at {horizon_name(horizon)} ({own['setting'][0]:.3g})")
            if mode == "one":
                break  # it is the same on all tasks
    return ", ".join(found) or "none"


def _missing(data: Mapping[str, Any]) -> list[str]:
    """Return a line that names what a part of the board has left out."""
    methods = [METHODS[name].title for name in METHODS if name not in data["methods"]]
    tasks = [f"`{name}`" for name in TASKS if name not in data["tasks"]]
    horizon = [] if str(LONG_HORIZON) in data["horizons"] else [f"the horizon of {LONG_HORIZON}N"]
    modes = [
        f"{what} at {horizon_name(each)}"
        for each, own in data["horizons"].items()
        for mode, what in MODES.items()
        if mode not in own
    ]
    parts = [*methods, *tasks, *modes, *horizon]
    return [f"- Not run yet: {', '.join(parts)}."] if parts else []


def page(data: Mapping[str, Any], images: str) -> str:
    """Return the page in Markdown.

    Args:
        data: As `collect` returns it.
        images: Path of the plots from the page.
    """
    titles, kinds = {name: METHODS[name].title for name in data["methods"]}, data["methods"]
    ran = any("one" in modes for modes in data["horizons"].values())
    edges = f": {at_edge(data, 'one')}" if ran else ""
    machine, frozen = data["machine"], [f"`{name}`" for name, task in data["tasks"].items() if task["frozen"]]
    lines = [
        "# Scoreboard",
        "",
        "Made by `python -m benchmarks.scoreboard`; raw results in `benchmarks/results/scoreboard.json`.",
        "",
        "## Rules",
        "",
        f"- Tasks: {', '.join(f'`{name}`' for name in data['tasks'])}. "
        f"Frozen, never used to choose a default: {', '.join(frozen) or 'none'}. "
        "Validation sets have at least 2,000 rows or positions. Data are embedded or generated; see "
        "`benchmarks/scoreboard/tasks.py`.",
        *_missing(data),
        "- Budget of every method: five learning rates, a factor of two apart, times two values of one other "
        "parameter, on one seed. While the best is at an edge, one learning rate more is added there, at most "
        f"{EXTENSIONS} times. Still at the edge then: {at_edge(data, 'tuned')}. "
        f"Then {data['seeds']} fresh seeds of the best setting. All numbers are medians of the fresh seeds.",
        "- The learning rates, second parameters and rules were last changed before the first published result, but "
        "after trial runs: AdamW's second parameter was chosen by runs on three tasks. The rule for the one setting "
        "(below) and the timing of whole cycles were changed later. The steps of all methods were timed anew when "
        "natural Muon's had become cheaper, the last time on an Intel Xeon without instructions for bfloat16, in which "
        "`torch.optim.Muon` multiplies; most trainings ran on an AMD EPYC, which has them. With torch's Muon as it was "
        "timed before, on a Xeon that has them, natural Muon's seconds over the best rival's to T2 are 0.94 tuned at "
        f"N and at {LONG_HORIZON}N (below 0.91 and 0.92), and 0.98 and 0.99 with one setting and its own targets "
        "(below 0.97 and 0.97).",
        f"- The same schedule for all: {WARM_UP:.0%} linear warm-up, then a cosine to zero. No weight decay. float32, "
        "one thread.",
        f"- Two horizons: N steps and {LONG_HORIZON}N. At {LONG_HORIZON}N: the {LONG_METHODS} methods of the best mean "
        "rank at N, AdamW and natural Muon, searched anew.",
        "- T1 is AdamW's median final validation loss when tuned for the task, T2 the best rival's. The same targets "
        "hold for one setting. Crossings are interpolated on the median curve, smoothed over three of "
        f"{EVALUATIONS} evaluations. A missed target scores the whole run: its steps, and as seconds the method's own "
        "or AdamW's, whichever are more.",
        "- The best rival to a target is the one that needs least. Rivals that miss it do not count, unless all of "
        "them do. Of rivals that need the same, the one that ends lowest counts.",
        "- Steps are shares of the run, seconds shares of AdamW's run. Seconds are steps times their cost, which is "
        "timed in turn with AdamW's over whole cycles of refreshes.",
        "- The loss at equal seconds is read when a method has used AdamW's seconds. Its schedule is not at its end "
        "then, if its steps cost more.",
        "- The one setting for all tasks has the least mean over the tasks of its rank, by final loss on the seed of "
        "the search, among the method's settings that ran on every task. Equal mean ranks: the least geometric mean "
        f"of losses. The grid is not extended for it, even where it is at the edge{edges}.",
        "- The first version of this board chose the one setting by the geometric mean of losses over AdamW's best. "
        "`poisson`, whose losses span five orders of magnitude, decided that mean: without it nine of thirteen methods "
        "would have had another setting. The rule was changed for this reason, after the results were known.",
        f"- Machine of the step times: {machine['processor']}, {machine['cores']} cores, torch "
        f"{data['versions']['torch']}.",
        "",
        f"Variants of ours that were tried: {data.get('variants', VARIANTS)}",
        "",
    ]
    for horizon, mode, what in _parts(data):
        scores = scores_of(data, horizon, mode)
        lines += [
            f"## {horizon_name(horizon)} steps, {what}",
            "",
            headline(scores, titles),
            beside_rivals(scores, kinds, titles),
        ]
        if mode == "one":
            own = scores_of(data, horizon, mode, target_mode="one")
            lines += [
                "With targets by the same rule from the runs with one setting:",
                "",
                headline(own, titles),
                beside_rivals(own, kinds, titles),
            ]
        lines += [*defeats(scores, kinds, titles, data["reference"]), ""]
        lines += [f"![Performance profile]({images}/scoreboard-profile-{horizon}-{mode}.png)", ""]
        if mode == "tuned":
            lines += [f"![Validation curves]({images}/scoreboard-curves-{horizon}.png)", ""]
        lines += details(data, horizon, mode, scores, titles)
    return "\n".join(lines)


def style(data: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the look of each method's lines: ours thick, rivals thin."""
    colours = plt.get_cmap("tab20")
    return {
        name: {
            "color": "black" if name == OURS else colours(place % 20),
            "linewidth": 2.4 if name == OURS else 1.6 if kind == "ours" else 1.1,
            "linestyle": "-" if kind == "rival" or name == OURS else "--",
            "label": METHODS[name].title,
        }
        for place, (name, kind) in enumerate(data["methods"].items())
    }


def plot_profile(data: Mapping[str, Any], scores: Scores, title: str, path: Path) -> None:
    """Draw the share of tasks on which a method reaches T2 within so many times the least of all."""
    looks = style(data)
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), sharey=True)
    for axis, unit in zip(axes, ("steps", "seconds"), strict=True):
        for name, ratios in profile(scores, unit, "second").items():
            within = sorted(each for each in ratios if each <= PROFILE_TO)
            shares = [place / len(ratios) for place in range(len(within) + 1)]
            axis.step([1.0, *within, PROFILE_TO], [shares[0], *shares[1:], shares[-1]], where="post", **looks[name])
        axis.set(xscale="log", xlim=(1, PROFILE_TO), ylim=(0, 1.03), xlabel=f"{unit} to T2 over the least of all")
        axis.set_xticks([1, 1.5, 2, 3, 4], ["1", "1.5", "2", "3", "4"])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("share of the tasks")
    axes[1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)
    figure.suptitle(title)
    figure.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(figure)


def plot_curves(data: Mapping[str, Any], scores: Scores, title: str, path: Path) -> None:
    """Draw the median validation loss of each method over the steps, a panel a task."""
    looks, columns = style(data), min(4, len(scores))
    rows = math.ceil(len(scores) / columns)
    figure, axes = plt.subplots(rows, columns, figsize=(3.6 * columns, 3 * rows), squeeze=False)
    for axis in axes.flat[len(scores) :]:
        axis.set_visible(False)
    for axis, (task, own) in zip(axes.flat, scores.items(), strict=False):
        finals = [each.final for each in own.values() if math.isfinite(each.final)]
        for name, each in own.items():
            axis.plot([at / EVALUATIONS for at in range(EVALUATIONS + 1)], each.curve, **looks[name])
        start = next(iter(own.values())).curve[0]
        low = min(finals, default=start)
        axis.set(yscale="log", title=task, ylim=(0.97 * low, max(low * (start / low) ** 0.7, 1.02 * low)))
    for axis in axes[-1]:
        axis.set_xlabel("share of the steps")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=7, fontsize=8, bbox_to_anchor=(0.5, -0.06))
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(figure)


def plot_short(data: Mapping[str, Any], scores: Scores, path: Path) -> None:
    """Draw the curves of natural Muon, Muon and AdamW on each task, and below them what they cost."""
    looks: dict[str, dict[str, Any]] = {
        OURS: {"color": "black", "linewidth": 2.0, "marker": "o", "markersize": 5},
        "muon": {"color": "#D55E00", "linewidth": 1.5, "linestyle": "--", "marker": "s", "markersize": 8},
        "adamw": {"color": "#0072B2", "linewidth": 1.5, "linestyle": ":", "marker": "^", "markersize": 7},
    }
    looks = {name: {**look, "mfc": "none"} for name, look in looks.items() if name in data["methods"]}
    looks[OURS]["mfc"] = "black"
    columns = math.ceil(len(scores) / 2)
    figure = plt.figure(figsize=(8.6, 5.6), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=[1.15, 1.0])
    above.suptitle("Validation loss (log scale) over the steps, each method tuned, median of five seeds", fontsize=10)
    panels = above.subplots(2, columns, squeeze=False)
    for axis in panels.flat[len(scores) :]:
        axis.set_visible(False)
    for axis, (task, own) in zip(panels.flat, scores.items(), strict=False):
        for name, look in looks.items():
            axis.plot(own[name].curve, **{**look, "marker": ""})
        finals = [own[name].final for name in looks]
        low, start = min(finals), own[OURS].curve[0]
        top = max(low * (start / low) ** 0.6, 1.15 * max(finals))
        axis.set(yscale="log", ylim=(low / (top / low) ** 0.07, top))
        axis.set_title(task, fontsize=9)
        axis.set_xticks([0, EVALUATIONS], ["0", str(data["tasks"][task]["steps"])], fontsize=8)
        axis.set_yticks([])
        axis.minorticks_off()
    costs: dict[str, Callable[[Score], float]] = {
        "Time of a step": lambda each: each.step,
        "Time to AdamW's final loss": lambda each: each.first.seconds,
    }
    for axis, (what, value) in zip(below.subplots(1, 2, sharey=True), costs.items(), strict=True):
        for name, look in looks.items():
            axis.plot([value(own[name]) for own in scores.values()], list(scores), **{**look, "linestyle": ""})
        axis.set_xlim(left=0.0)
        axis.set_title(f"{what}, AdamW's = 1", fontsize=10)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3)
    axis.invert_yaxis()
    lines = [plt.Line2D([], [], **look, label=METHODS[name].title) for name, look in looks.items()]
    below.legend(handles=lines, loc="outside lower center", ncols=len(lines), fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def write(data: Mapping[str, Any], path: Path, images: Path) -> None:
    """Write the page and its plots."""
    images.mkdir(parents=True, exist_ok=True)
    for horizon, mode, what in _parts(data):
        title = f"{horizon_name(horizon)} steps, {what}"
        scores = scores_of(data, horizon, mode)
        plot_profile(data, scores, title, images / f"scoreboard-profile-{horizon}-{mode}.png")
        if mode == "tuned":
            plot_curves(data, scores, title, images / f"scoreboard-curves-{horizon}.png")
            if horizon == "1":
                plot_short(data, scores, images / "scoreboard-short.png")
    relative = images.relative_to(path.parent) if images.is_relative_to(path.parent) else images
    path.write_text(page(data, str(relative)))


def summary(data: Mapping[str, Any]) -> str:
    """Return the headline of natural Muon in a few lines."""
    lines = []
    for horizon, mode, what in _parts(data):
        scores = scores_of(data, horizon, mode)
        if OURS not in next(iter(scores.values())):
            continue
        parts = []
        for unit in ("steps", "seconds"):
            values = [v for v, _ in shares_of_best_rival(scores, data["methods"], OURS, unit, "second").values()]
            parts.append(f"{unit} worst {max(values):.2f}, geometric mean {geometric(values):.2f}")
        ranks = mean(sorted(each.final for each in own.values()).index(own[OURS].final) + 1 for own in scores.values())
        lines.append(f"{horizon}N, {what}: over the best rival's to T2: {'; '.join(parts)}; mean rank {ranks:.1f}")
    return "\n".join(lines)
