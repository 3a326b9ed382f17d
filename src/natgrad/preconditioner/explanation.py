"""The table of `Preconditioner.explain`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from rich.markup import escape
from rich.table import Table

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
    """A table that Rich renders, ``str()`` prints, and ``rows`` holds as data.

    Attributes:
        rows: One for each parameter.
        covered: The share of all parameter elements that can be preconditioned.
        preconditioned: The share of them that has been, in any step so far.
        note: The KL clip and the placement, in words.
    """

    def __init__(self, rows: list[Row], note: str) -> None:
        self.rows, self.note = rows, note
        total = max(1, sum(prod(row.shape) for row in rows))
        self.covered = sum(prod(row.shape) for row in rows if not row.reason) / total
        self.preconditioned = sum(prod(row.shape) for row in rows if row.preconditioned) / total

    def __rich__(self) -> Table:
        caption = f"{self._summary()}; {self.note}"
        table = Table(title="natgrad", caption=caption)
        table.add_column("parameter", overflow="fold")
        table.add_column("shape")
        table.add_column("curvature", overflow="fold")
        shows_reduction = any(row.reduction for row in self.rows)
        if shows_reduction:
            table.add_column("reduction")
        table.add_column("owners")
        table.add_column("work", justify="right")
        table.add_column("memory", justify="right")
        for row in self.rows:
            owners = " ".join(f"{part}:{owner}" for part, owner in (row.owners or {}).items())
            table.add_row(
                escape(row.parameter),
                "x".join(map(str, row.shape)),
                (escape(row.curvature) or f"[dim]optimizer: {escape(row.reason)}[/dim]")
                + ("" if row.reason or row.preconditioned else " [dim]not yet[/dim]")
                + (" [dim]kept[/dim]" if row.kept else "")
                + (f" [red]now: {row.fallback}[/red]" if row.fallback else ""),
                *([row.reduction] if shows_reduction else []),
                owners,
                f"{row.share:.1%}" if row.owners else "",
                f"{row.bytes / 2**20:.2f} MiB" if row.owners else "",
            )
        return table

    def __repr__(self) -> str:
        return f"<Explanation of {len(self.rows)} parameters: {self._summary()}; {self.note}>"

    def _summary(self) -> str:
        return f"{self.preconditioned:.1%} of the parameters preconditioned so far, {self.covered:.1%} covered"


def explain(
    structure: Structure,
    reductions: Reductions,
    failures: FailureCounters,
    inspection: Inspection,
    note: str,
) -> Explanation:
    """Describe all parameters of a model. Synchronizes with the device."""
    reasons, preconditioned, stale = inspection.reasons, failures.preconditioned(), failures.stale()
    total = sum(task.cost * group.size for group in structure.groups for task in group.tasks) or 1.0
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
    return Explanation(sorted(rows, key=lambda row: structure.coverage.order[row.parameter]), note)


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
