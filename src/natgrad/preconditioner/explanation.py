"""The summary and the table of `Preconditioner.explain`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from natgrad.capture.counts import Reductions
from natgrad.preconditioner.guard.guard import FailureCounters
from natgrad.preconditioner.guard.inspection import Inspection
from natgrad.preconditioner.structure import Structure
from natgrad.printed import Printed
from natgrad.state.block_group import BlockGroup
from natgrad.state.decisions import DecisionState
from natgrad.state.results import written
from natgrad.state.tensors import packed_shape, spec_dtype


@dataclass(frozen=True, kw_only=True)
class Row:
    """One parameter.

    Attributes:
        parameter: Its qualified name.
        shape: Its shape.
        curvature: The approximation of its Fisher block. Empty if it is left to the optimizer.
        owners: The owner of each part of its refresh. None: it has none.
        share: Its layer's share of the work of a refresh, on the layer's first parameter.
        bytes: The bytes of curvature that this rank keeps for its layer, on the layer's first parameter.
        reason: Why it is left to the optimizer. Empty if it is preconditioned.
        kept: Whether the refresh rule kept its layer's results at the last decision.
        preconditioned: Whether its layer's curvature has preconditioned it in any step so far.
        fallback: "last good" if an earlier result preconditioned its layer in the last step, because a decomposition
            failed. Otherwise empty.
        reduction: The reduction of its layer, if layers have different ones; else empty.
    """

    parameter: str
    shape: tuple[int, ...]
    curvature: str = ""
    owners: dict[str, int] | None = None
    share: float = 0.0
    bytes: int = 0
    reason: str = ""
    kept: bool = False
    preconditioned: bool = False
    fallback: str = ""
    reduction: str = ""


class Explanation(Printed):
    """A summary, or a table of all parameters, that Rich renders and ``str()`` prints. ``rows`` holds it as data.

    Attributes:
        rows: One for each parameter.
        covered: The share of all parameter elements that can be preconditioned.
        preconditioned: The share of them that has been, in any step so far.
        note: The KL clip and the placement, in words.
        full: Whether the table is printed, not the summary.
        work: The work of one refresh, as the curvatures estimate it: d³ for a decomposition of d columns.
        refresh: The refresh rule, in words.
        mover: What moves the parameters that are left out.
    """

    def __init__(
        self,
        rows: list[Row],
        note: str,
        *,
        full: bool = True,
        work: float = 0.0,
        refresh: str = "",
        mover: str = "the optimizer",
    ) -> None:
        self.rows, self.note, self.full, self.work, self.refresh, self.mover = rows, note, full, work, refresh, mover
        total = max(1, sum(prod(row.shape) for row in rows))
        self.covered = sum(prod(row.shape) for row in rows if not row.reason) / total
        self.preconditioned = sum(prod(row.shape) for row in rows if row.preconditioned) / total

    def __rich__(self) -> RenderableType:
        return self._table() if self.full else Group(summary_table(self), *map(Text, self._lines()))

    def _table(self) -> Table:
        caption = f"{self._summary()}; {self.note}"
        table = Table(title="natgrad", caption=caption)
        longest = max((len(row.parameter) for row in self.rows), default=0)
        table.add_column("parameter", no_wrap=True, min_width=longest)
        table.add_column("shape", no_wrap=True)
        table.add_column("curvature", overflow="fold", min_width=30)
        shows_reduction = any(row.reduction for row in self.rows)
        if shows_reduction:
            table.add_column("reduction")
        table.add_column("owners")
        table.add_column("work", justify="right", no_wrap=True)
        table.add_column("memory", justify="right", no_wrap=True)
        for row in self.rows:
            owners = " ".join(f"{part}:{owner}" for part, owner in (row.owners or {}).items())
            table.add_row(
                escape(row.parameter),
                "x".join(map(str, row.shape)),
                (escape(row.curvature) or f"[dim]{escape(self._left_to(row))}[/dim]")
                + ("" if row.reason or row.preconditioned else " [dim]not yet[/dim]")
                + (" [dim]kept[/dim]" if row.kept else "")
                + (f" [red]now: {row.fallback}[/red]" if row.fallback else ""),
                *([row.reduction] if shows_reduction else []),
                owners,
                f"{row.share:.1%}" if row.owners else "",
                f"{row.bytes / 2**20:.2f} MiB" if row.owners else "",
            )
        return table

    def _left_to(self, row: Row) -> str:
        return row.reason if row.reason == "frozen" else f"{self.mover}: {row.reason}"

    def _lines(self) -> list[str]:
        """Return the lines below the table of the summary."""
        work = [(row, row.share) for row in self.rows if row.owners is not None]
        largest = " and ".join(f"{share:.0%} of them for {name}" for name, share in _largest(work))
        cost = f"A refresh takes about {self.work:.1e} multiplications, {largest}; " if work else ""
        pending = [row for row in self.rows if not (row.reason or row.preconditioned)] if self.preconditioned else []
        special = {
            "Not preconditioned yet": pending,
            "Kept by the last refresh": [row for row in self.rows if row.kept],
            "With an earlier result, because a decomposition failed": [row for row in self.rows if row.fallback],
        }
        return [
            f"{self._summary()}",
            f"{cost}curvature takes {_memory(sum(row.bytes for row in self.rows))} on this rank",
            *(f"{what}: {shortened(names_of(found, self.rows))}" for what, found in special.items() if found),
            "; ".join(filter(None, (self.refresh, self.note))),
            "elements: the share of all parameters; names such as layers.0-3 stand for layers 0 to 3; "
            "multiplications: d³ for a decomposition of d columns",
            "explain(full=True) lists every parameter with its rank, work and memory",
        ]

    def __repr__(self) -> str:
        return f"<Explanation of {len(self.rows)} parameters: {self._summary()}; {self.note}>"

    def _summary(self) -> str:
        return f"{self.covered:.1%} of the parameters can be preconditioned, {self.preconditioned:.1%} have been so far"


# The rows of the summary for covered parameters and for others, and the characters of curvatures or reasons, and names.
_COVERED_ROWS, _LEFT_ROWS, _WORDS, _CHARACTERS = 5, 4, 56, 48
_COLUMNS: dict[str, Literal["left", "right"]] = {"elements": "right", "preconditioned by": "left", "which": "left"}


def summary_table(explanation: Explanation) -> Table:
    """Return the table of the summary: which curvature preconditions which layers, and what is left out and why."""
    rows = explanation.rows
    covered, left = [row for row in rows if not row.reason], [row for row in rows if row.reason]
    total = max(1, sum(prod(row.shape) for row in rows))
    short = _short_names([row.curvature for row in covered])
    kinds = _joined_kinds([(short[row.curvature], row) for row in covered], _COVERED_ROWS, "curvatures")
    reasons = _joined_kinds([(row.reason, row) for row in left], _LEFT_ROWS, "reasons")
    cells = []
    for index, (kind, found) in enumerate(kinds + reasons):
        if index == len(kinds):
            cells.append(("", f"moved by {explanation.mover} alone, unless frozen:", ""))
        share = sum(prod(row.shape) for row in found) / total
        words = kind if len(kind) <= _WORDS else f"{kind[: _WORDS - 1]}…"
        cells.append((f"{share:.1%}", words, shortened(names_of(found, rows))))
    table = Table(box=SIMPLE_HEAD)
    for place, (header, justify) in enumerate(_COLUMNS.items()):
        width = max(map(len, (header, *(row[place] for row in cells))))
        table.add_column(header, justify=justify, no_wrap=True, min_width=width)
    for row in cells:
        table.add_row(*map(escape, row))
    return table


def _joined_kinds(rows: list[tuple[str, Row]], most: int, what: str) -> list[tuple[str, list[Row]]]:
    """Return the rows by their kind, the kinds with the most elements first; those after the first `most` as one."""
    kinds: dict[str, list[Row]] = {}
    for kind, row in rows:
        kinds.setdefault(kind, []).append(row)
    ordered = sorted(kinds.items(), key=lambda each: -sum(prod(row.shape) for row in each[1]))
    if len(ordered) <= most + 1:
        return ordered
    others = [row for _, found in ordered[most:] for row in found]
    return [*ordered[:most], (f"{len(ordered) - most} other {what}", others)]


def _short_names(curvatures: list[str]) -> dict[str, str]:
    """Return curvatures with those arguments alone in which others of the same class differ."""
    arguments = {text: text.partition("(")[2].removesuffix(")").split(", ") for text in curvatures}
    short = {}
    for text, own in arguments.items():
        name = text.partition("(")[0]
        alike = [found for other, found in arguments.items() if other.partition("(")[0] == name]
        differing = [argument for argument in own if not all(argument in found for found in alike)]
        short[text] = f"{name}({', '.join(differing)})" if differing else name
    return short


def names_of(found: list[Row], rows: list[Row]) -> list[str]:
    """Return the names of parameters, largest first: of whole modules where possible, and of repeated ones in one."""
    modules: dict[str, int] = {}
    for row in rows:
        modules[_module(row)] = modules.get(_module(row), 0) + 1
    inside: dict[str, list[Row]] = {}
    for row in found:
        inside.setdefault(_module(row), []).append(row)
    sizes: dict[str, int] = {}
    for module, members in inside.items():
        is_whole = module and len(members) == modules[module]
        is_whole = is_whole and (len(members) > 1 or members[0].parameter.endswith("weight"))
        for row in members:
            name = module if is_whole else row.parameter
            sizes[name] = sizes.get(name, 0) + prod(row.shape)
    collapsed = collapse(sizes)
    return sorted(collapsed, key=lambda name: -collapsed[name])


def collapse(sizes: Mapping[str, float]) -> dict[str, float]:
    """Join names that differ in one number, such as ``blocks.0.q`` and ``blocks.1.q`` to ``blocks.0-1.q``.

    Args:
        sizes: The size of each; sizes of joined names are added.
    """
    names = {tuple(name.split(".")): size for name, size in sizes.items()}
    for place in range(max((len(pieces) for pieces in names), default=0)):
        alike: dict[tuple[str, ...], dict[int, float]] = {}
        others: dict[tuple[str, ...], float] = {}
        for pieces, size in names.items():
            if place < len(pieces) and pieces[place].isdecimal():
                alike.setdefault((*pieces[:place], "", *pieces[place + 1 :]), {})[int(pieces[place])] = size
            else:
                others[pieces] = size
        joined = {
            (*pieces[:place], _ranges(sorted(numbers)), *pieces[place + 1 :]): sum(numbers.values())
            for pieces, numbers in alike.items()
        }
        names = others | joined
    return {".".join(pieces): size for pieces, size in names.items()}


def _ranges(numbers: list[int]) -> str:
    """Return ascending numbers as ranges: ``0-2,5``."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    return ",".join(str(one[0]) if len(one) == 1 else f"{one[0]}-{one[-1]}" for one in ranges)


def shortened(names: list[str]) -> str:
    """Return the first names and the number of the others."""
    count = min(len(names), _CHARACTERS)
    while count > 1 and len(", ".join(names[:count])) > _CHARACTERS:
        count -= 1
    rest = len(names) - count
    return ", ".join(names[:count]) + (f" and {rest} more" if rest else "")


def _module(row: Row) -> str:
    """Return the name of the module of a parameter."""
    return row.parameter.partition("[")[0].rpartition(".")[0]


def _largest(shares: list[tuple[Row, float]]) -> list[tuple[str, float]]:
    """Return the names of the two layers with the largest shares, repeated ones in one, and their shares."""
    modules: dict[str, float] = {}
    for row, share in shares:
        name = _module(row) or row.parameter
        modules[name] = modules.get(name, 0.0) + share
    sizes = collapse(modules)
    return sorted(sizes.items(), key=lambda each: -each[1])[:2]


def _memory(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"


def explain(
    structure: Structure,
    reductions: Reductions,
    failures: FailureCounters,
    inspection: Inspection,
    note: str,
    *,
    full: bool,
    refresh: str,
    mover: str,
) -> Explanation:
    """Describe all parameters of a model, as the arguments of `Explanation` say. Synchronizes with the device."""
    reasons, preconditioned, stale = inspection.reasons, failures.preconditioned(), failures.stale()
    cost = sum(task.cost * group.size for group in structure.groups for task in group.tasks)
    total = cost or 1.0
    rows = [Row(parameter=left.parameter, shape=left.shape, reason=left.reason) for left in structure.coverage.left]
    for group in structure.groups:
        work, decisions = sum(task.cost for task in group.tasks), structure.decisions.get(group)
        for layer in (member.layer for member in group.members):
            if layer.key in reasons:
                reason = reasons[layer.key]
                rows += [Row(parameter=slot.label, shape=slot.shape, reason=reason) for slot in layer.slots]
                continue
            for index, slot in enumerate(layer.slots):
                first = index == 0
                rows.append(
                    Row(
                        parameter=slot.label,
                        shape=slot.shape,
                        curvature=repr(group.curvature),
                        kept=decisions is not None and decisions.keeps(layer),
                        owners=dict(structure.plan.assignments[layer.key].owners) if first else None,
                        share=work * layer.blocks / total if first else 0.0,
                        bytes=_bytes_per_block(group, decisions) * layer.blocks if first else 0,
                        preconditioned=layer.key in preconditioned,
                        fallback="last good" if layer.key in stale else "",
                        reduction=reductions.of(layer.name) if reductions.is_mapping else "",
                    )
                )
    rows.sort(key=lambda row: structure.coverage.order[row.parameter])
    return Explanation(rows, note, full=full, work=cost, refresh=refresh, mover=mover)


def _bytes_per_block(group: BlockGroup, decisions: DecisionState | None) -> int:
    """Return the bytes on this rank for one block: running averages, results and state."""
    kept = [
        *(
            (packed_shape(spec), spec_dtype(spec, group.factor_dtype))
            for spec in group.statistics
            if group.role.keeps_averages
        ),
        *(
            (spec.shape, spec_dtype(spec, group.solve_dtype))
            for spec in (*written(group, group.state.rows), *group.memory_specs)
            if group.role.is_gradient_worker
        ),
    ]
    compared = 0 if decisions is None else decisions.bytes_per_block
    return compared + sum(prod(shape) * dtype.itemsize for shape, dtype in kept)


def describe_damping(damping: float, groups: Iterable[BlockGroup]) -> str:
    """Return the damping γ, with its values for the curvatures if a factor makes them differ."""
    kinds: dict[float, list[str]] = {}
    for group in groups:
        names, kind = kinds.setdefault(damping * group.factor, []), type(group.curvature).__name__
        names += [] if kind in names else [kind]
    if len(kinds) < 2:
        return f"damping {next(iter(kinds), damping):g}"
    return "damping " + ", ".join(f"{value:g} ({' and '.join(names)})" for value, names in kinds.items())
