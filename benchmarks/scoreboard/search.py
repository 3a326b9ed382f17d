"""The protocol: who trains what, in which order, and what follows from it.

For each method and task, on one seed: five learning rates times two values of the second parameter. While the best of
all has the lowest or the highest learning rate, one more learning rate is added there, with both values, at most
`EXTENSIONS` times. Then come fresh seeds of the best setting.

The one setting for all tasks is, among the method's settings that ran on every task, the one with the least mean over
the tasks of its rank among them, by the loss on the seed of the search. Equal losses have equal ranks. If two settings
have the same mean rank, the geometric mean of their losses over AdamW's best decides. A loss counts as at most that
before training. Its grid is not extended where it is at an edge. Fresh seeds follow on every task.

The first version of the board chose the one setting by the geometric mean alone. The losses on `poisson` span five
orders of magnitude, those on the other tasks less than one, so that `poisson` decided: without it nine of thirteen
methods would have had another setting. The rule was changed for that reason, after the results were known.

At the long horizon there are the best five methods of the short one, by the mean over the tasks of their rank, and in
any case natural Muon, which this board is about, and AdamW, which sets a target. They are searched anew.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing import get_context
from statistics import mean, median

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks.scoreboard.journal import Journal
from benchmarks.scoreboard.methods import FACTOR, METHODS
from benchmarks.scoreboard.run import Result, Spec, train

SEARCH_SEED = 0
FRESH_SEEDS = (101, 102, 103, 104, 105)
EXTENSIONS = 4  # at most, of a grid
LONG_HORIZON, LONG_METHODS, ALWAYS_LONG = 4, 5, ("adamw", "natural-muon")

Setting = tuple[float, float]
Campaign = Generator[list[Spec], list[Result], None]


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large a board is.

    Attributes:
        tasks: Names.
        methods: Names.
        seeds: Fresh seeds.
        rates: Learning rates that a search begins with, at most five.
        extensions: Of a grid, at most.
        steps: Steps of every run, in place of the tasks' own.
    """

    tasks: tuple[str, ...]
    methods: tuple[str, ...]
    seeds: tuple[int, ...] = FRESH_SEEDS
    rates: int = 5
    extensions: int = EXTENSIONS
    steps: int | None = None

    def spec(self, task: str, method: str, setting: Setting, horizon: int, seed: int) -> Spec:
        """Return a run."""
        steps = None if self.steps is None else self.steps * horizon
        rate, second = setting
        return Spec(task=task, method=method, rate=rate, second=second, horizon=horizon, seed=seed, steps=steps)

    def grid(self, method: str) -> list[Setting]:
        """Return the settings that the search of a method begins with."""
        rates = METHODS[method].rates()
        skipped = (len(rates) - self.rates) // 2
        return [(rate, second) for rate in rates[skipped : skipped + self.rates] for second in METHODS[method].values]


def extension(known: dict[Setting, float]) -> float | None:
    """Return the learning rate that is to be tried beside those known; None: the best is not at an edge."""
    best = min(known, key=lambda setting: known[setting])
    if not math.isfinite(known[best]):  # all have diverged
        return min(rate for rate, _ in known) / FACTOR
    rates = [rate for rate, _ in known]
    if best[0] == max(rates):
        return best[0] * FACTOR
    return best[0] / FACTOR if best[0] == min(rates) else None


def tuned(scale: Scale, task: str, method: str, horizon: int) -> Campaign:
    """Search the best setting on a task, then run it with fresh seeds."""
    known: dict[Setting, float] = {}
    wanted: Sequence[Setting] = scale.grid(method)
    for _ in range(scale.extensions + 1):
        results = yield [scale.spec(task, method, setting, horizon, SEARCH_SEED) for setting in wanted]
        known |= {setting: result.final for setting, result in zip(wanted, results, strict=True)}
        rate = extension(known)
        if rate is None:
            break
        wanted = [(rate, second) for second in METHODS[method].values]
    best = min(known, key=lambda setting: known[setting])
    yield [scale.spec(task, method, best, horizon, seed) for seed in scale.seeds]


def fixed(scale: Scale, task: str, method: str, horizon: int, setting: Setting) -> Campaign:
    """Run a given setting with fresh seeds."""
    yield [scale.spec(task, method, setting, horizon, seed) for seed in scale.seeds]


class Board:
    """The protocol over a journal.

    Args:
        scale: How large it is.
        journal: What is known, and where new results go.
        workers: Processes that train; 0: this one.
    """

    def __init__(self, scale: Scale, journal: Journal, workers: int) -> None:
        """Start no process yet."""
        self.scale, self.journal, self.workers = scale, journal, workers
        self._pool: ProcessPoolExecutor | None = None

    def known(self, specs: Iterable[Spec]) -> list[Result]:
        """Return results that the journal has."""
        return [self.journal.runs[spec.key] for spec in specs]

    def searched(self, task: str, method: str, horizon: int) -> dict[Setting, Result]:
        """Return the results of the search seed by setting, as far as the search has come."""
        found: dict[Setting, Result] = {}
        campaign = tuned(self.scale, task, method, horizon)
        specs = next(campaign)
        while all(spec.key in self.journal.runs for spec in specs) and specs[0].seed == SEARCH_SEED:
            results = self.known(specs)
            found |= {(spec.rate, spec.second): result for spec, result in zip(specs, results, strict=True)}
            specs = campaign.send(results)
        return found

    def best(self, task: str, method: str, horizon: int) -> Setting:
        """Return the setting that the search has found."""
        found = self.searched(task, method, horizon)
        return min(found, key=lambda setting: found[setting].final)

    def fresh(self, task: str, method: str, horizon: int, setting: Setting) -> list[Result]:
        """Return the results of the fresh seeds that are known."""
        specs = [self.scale.spec(task, method, setting, horizon, seed) for seed in self.scale.seeds]
        return [self.journal.runs[spec.key] for spec in specs if spec.key in self.journal.runs]

    def one_setting(self, method: str, horizon: int) -> Setting:
        """Return the setting with the least mean rank over the tasks (see the module)."""
        searches = [self.searched(task, method, horizon) for task in self.scale.tasks]
        everywhere = [setting for setting in searches[0] if all(setting in search for search in searches)]
        ranks, logs = dict.fromkeys(everywhere, 0), dict.fromkeys(everywhere, 0.0)
        for search in searches:
            losses = {setting: min(search[setting].final, search[setting].validation[0]) for setting in everywhere}
            ordered = sorted(losses.values())
            for setting, loss in losses.items():
                ranks[setting] += ordered.index(loss)
                logs[setting] += math.log(loss)  # AdamW's best is the same for all settings of a task
        return min(everywhere, key=lambda setting: (ranks[setting], logs[setting]))

    @property
    def reference(self) -> str:
        """AdamW, or where it is left out the first method."""
        return "adamw" if "adamw" in self.scale.methods else self.scale.methods[0]

    def long_methods(self) -> list[str]:
        """Return the methods of the long horizon."""
        finals: dict[str, dict[str, float]] = {}
        for task in self.scale.tasks:
            for method in self.scale.methods:
                results = self.fresh(task, method, 1, self.best(task, method, 1))
                finals.setdefault(task, {})[method] = median(result.final for result in results)
        ranks = {
            method: mean(sorted(each.values()).index(each[method]) for each in finals.values())
            for method in self.scale.methods
        }
        chosen = sorted(ranks, key=lambda method: ranks[method])[:LONG_METHODS]
        return [each for each in self.scale.methods if each in chosen or each in ALWAYS_LONG]

    def run(self, horizon: int) -> None:
        """Run the protocol at a horizon; the short one must be there before the long one."""
        methods = list(self.scale.methods) if horizon == 1 else self.long_methods()
        self._drive(
            f"{horizon}N, tuned per task",
            [tuned(self.scale, task, method, horizon) for task in self.scale.tasks for method in methods],
        )
        self._drive(
            f"{horizon}N, one setting",
            [
                fixed(self.scale, task, method, horizon, self.one_setting(method, horizon))
                for task in self.scale.tasks
                for method in methods
            ],
        )

    def _drive(self, title: str, campaigns: list[Campaign]) -> None:
        """Run campaigns to their ends, as many runs at once as there are workers."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns) as progress:
            bar = progress.add_task(title, total=0)
            pending: dict[Future[Result], Spec] = {}
            waiting: list[tuple[Campaign, list[Spec]]] = []
            asked: set[str] = set()

            def advance(campaign: Campaign, results: list[Result] | None) -> None:
                """Bring a campaign to where it needs runs that are not known."""
                try:
                    specs = next(campaign) if results is None else campaign.send(results)
                    while all(spec.key in self.journal.runs for spec in specs):
                        specs = campaign.send(self.known(specs))
                except StopIteration:
                    return
                waiting.append((campaign, specs))
                for spec in specs:
                    if spec.key not in self.journal.runs and spec.key not in asked:
                        asked.add(spec.key)
                        pending[self._submit(spec)] = spec
                        progress.update(bar, total=len(asked))

            for campaign in campaigns:
                advance(campaign, None)
            while pending:
                for future in wait(pending, return_when=FIRST_COMPLETED).done:
                    spec = pending.pop(future)
                    self.journal.add(spec, future.result())
                    what = f"{spec.method} on {spec.task}, {spec.rate:.3g}"
                    progress.update(bar, advance=1, description=f"{title}: {what}")
                ready = [each for each in waiting if all(spec.key in self.journal.runs for spec in each[1])]
                for each in ready:
                    waiting.remove(each)
                    advance(each[0], self.known(each[1]))

    def _submit(self, spec: Spec) -> Future[Result]:
        if self.workers == 0:
            done: Future[Result] = Future()
            done.set_result(train(spec))
            return done
        if self._pool is None:
            context = get_context("spawn")
            self._pool = ProcessPoolExecutor(self.workers, mp_context=context, initializer=one_thread)
        return self._pool.submit(train, spec)

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None


def one_thread() -> None:
    """Set a worker up."""
    torch.set_num_threads(1)
