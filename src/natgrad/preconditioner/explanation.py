"""What is preconditioned, by whom, at what cost; and what is not, and why."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod

from rich.markup import escape
from rich.table import Table

from natgrad.capture.reductions import Reductions
from natgrad.distributed import Plan
from natgrad.preconditioner.coverage import Coverage
from natgrad.printed import Printed
from natgrad.state.block_group import BlockGroup


@dataclass(frozen=True, kw_only=True)
class Row:
    """One parameter.

    Attributes:
        parameter: Its qualified name.
        shape: Its shape.
        curvature: What approximates its Fisher block; empty when it is left to the optimizer.
        owners: The rank that does each part of its renewal; None: all do it.
        share: Its layer's share of the work of a renewal, given on the layer's first parameter.
        time: The share of the time of all steps so far that its layer's curvature took on this rank's host; likewise.
            None before the second step.
        bytes: What its layer keeps on this rank: factors and what is made of them; likewise.
        reason: Why it is left to the optimizer; empty when it is preconditioned.
        verdict: What the last decision of a rule of renewal was: "kept", "stopped" or "waiting"; empty where it was
            renewed, or there is no rule.
        preconditioned: Whether its layer's curvature has preconditioned it in any step of this object so far.
        fallback: What has served its layer in place of fresh curvature in the last step; empty when nothing had to.
        reduction: How the loss combines the terms of its layer, where that is not the same for all layers; else empty.
    """

    parameter: str
    shape: tuple[int, ...]
    curvature: str = ""
    owners: dict[str, int | None] | None = None
    share: float = 0.0
    time: float | None = None
    bytes: int = 0
    reason: str = ""
    verdict: str = ""
    preconditioned: bool = False
    fallback: str = ""
    reduction: str = ""


class Explanation(Printed):
    """A table that Rich renders, ``str()`` prints, and ``rows`` holds as data.

    Attributes:
        rows: One for each parameter.
        covered: The share of all parameter elements that can be preconditioned.
        preconditioned: The share of them that was, in any step of this object so far.
        note: The state of the KL clip, and the placement.
    """

    def __init__(self, rows: list[Row], note: str) -> None:
        """Wrap `rows`."""
        self.rows, self.note = rows, note
        total = max(1, sum(prod(row.shape) for row in rows))
        self.covered = sum(prod(row.shape) for row in rows if not row.reason) / total
        self.preconditioned = sum(prod(row.shape) for row in rows if row.preconditioned) / total

    def __rich__(self) -> Table:
        """Return the table."""
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
        table.add_column("time", justify="right")
        table.add_column("memory", justify="right")
        for row in self.rows:
            named = {part: "all" if owner is None else owner for part, owner in (row.owners or {}).items()}
            owners = " ".join(f"{part}:{owner}" for part, owner in named.items())
            table.add_row(
                escape(row.parameter),
                "x".join(map(str, row.shape)),
                (escape(row.curvature) or f"[dim]optimizer: {escape(row.reason)}[/dim]")
                + ("" if row.reason or row.preconditioned else " [dim]not yet[/dim]")
                + (f" [dim]{row.verdict}[/dim]" if row.verdict else "")
                + (f" [red]now: {row.fallback}[/red]" if row.fallback else ""),
                *([row.reduction] if shows_reduction else []),
                owners,
                f"{row.share:.1%}" if row.owners else "",
                f"{row.time:.1%}" if row.time is not None else "",
                f"{row.bytes / 2**20:.2f} MiB" if row.owners else "",
            )
        return table

    def __repr__(self) -> str:
        """Say how much was preconditioned and how much is covered."""
        return f"<Explanation of {len(self.rows)} parameters: {self._summary()}; {self.note}>"

    def _summary(self) -> str:
        return f"{self.preconditioned:.1%} of the parameters preconditioned so far, {self.covered:.1%} covered"


def explain(
    stacks: list[BlockGroup],
    coverage: Coverage,
    reasons: Mapping[str, str],
    plan: Plan[str],
    seconds: float,
    served: Collection[str],
    note: str,
    reductions: Reductions | None = None,
) -> Explanation:
    """Describe all parameters of a model.

    Args:
        stacks: What is preconditioned.
        coverage: What else there is, and the order of the model.
        reasons: Why layers stay plain although they are covered, by their keys.
        plan: The owners.
        seconds: What all steps have taken so far.
        served: The keys of the layers that were preconditioned so far.
        note: The state of the KL clip and the placement, in words.
        reductions: Those of the layers; None: the same for all.
    """
    rows = []
    total = sum(task.cost * stack.size for stack in stacks for task in stack.tasks) or 1.0
    for stack in stacks:
        work = sum(task.cost for task in stack.tasks)
        fallbacks = stack.failures.fallbacks
        for member in stack.members:
            layer = member.layer
            if layer.key in reasons:
                plain = reasons[layer.key]
                rows += [Row(parameter=slot.label, shape=slot.shape, reason=plain) for slot in layer.slots]
                continue
            for first, slot in zip((True, *[False] * len(layer.slots)), layer.slots, strict=False):
                rows.append(
                    Row(
                        parameter=slot.label,
                        shape=slot.shape,
                        curvature=repr(stack.curvature),
                        verdict="" if stack.decisions is None else stack.decisions.describe(layer),
                        owners=dict(plan.seats[layer.key].owners) if first else None,
                        share=work * layer.blocks / total if first else 0.0,
                        time=layer.seconds / seconds if first and seconds else None,
                        bytes=stack.bytes_per_block() * layer.blocks if first else 0,
                        preconditioned=layer.key in served,
                        fallback=fallbacks.get(layer.key, ""),
                        reduction="" if reductions is None else reductions.of(layer.name),
                    )
                )
    rows += [Row(parameter=one.parameter, shape=one.shape, reason=one.reason) for one in coverage.left]
    return Explanation(sorted(rows, key=lambda row: coverage.order[row.parameter]), note)
