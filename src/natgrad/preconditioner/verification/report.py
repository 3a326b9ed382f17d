"""The report of a verification: how far each layer's result is from the plain one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn

from natgrad.preconditioner.verification.first_step import Outcome
from natgrad.printed import Printed
from natgrad.state.block_group import BlockGroup


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far the result for one layer is from the plain one.

    Attributes:
        layer: Its qualified name; of what is left to the optimizer, the parameter's.
        curvature: What approximates its Fisher block; empty when it is left to the optimizer.
        gradient: max |V - V'| / max |V'| of its preconditioned gradients V, V' being the plain ones; of raw gradients
            when it is left to the optimizer.
        factors: The same of its factors; None when it has none.
    """

    layer: str
    curvature: str
    gradient: float
    factors: float | None = None


class Verification(Printed):
    """A table that Rich renders, ``str()`` prints, and ``rows`` holds as data.

    Attributes:
        rows: One for each layer.
        worst: The largest relative difference of all; infinite where something is not finite.
        note: What was compared.
    """

    def __init__(self, rows: list[Difference], note: str) -> None:
        """Wrap `rows`."""
        self.rows, self.note = rows, note
        self.worst = max((max(row.gradient, row.factors or 0.0) for row in rows), default=0.0)

    def __rich__(self) -> Table:
        """Return the table."""
        table = Table(title="natgrad: against one process", caption=f"{self.note}; worst {self.worst:.1e}")
        table.add_column("layer", overflow="fold")
        table.add_column("curvature", overflow="fold")
        table.add_column("gradient", justify="right")
        table.add_column("factors", justify="right")
        for row in self.rows:
            factors = "" if row.factors is None else f"{row.factors:.1e}"
            curvature = escape(row.curvature) or "[dim]optimizer[/dim]"
            table.add_row(escape(row.layer), curvature, f"{row.gradient:.1e}", factors)
        return table

    def __repr__(self) -> str:
        """Say the worst."""
        return f"<Verification of {len(self.rows)} layers: worst {self.worst:.1e}; {self.note}>"


def compare(groups: Sequence[BlockGroup], root: nn.Module, placed: Outcome, plain: Outcome) -> list[Difference]:
    """Return the differences of all layers, and of what is left to the optimizer, in the order of the model."""
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    apart = {name: _difference(value, plain.gradients[name]) for name, value in placed.gradients.items()}
    rows: dict[str, Difference] = {}
    for group in groups:
        for member in group.members:
            layer = member.layer
            own = list(dict.fromkeys(names[id(slot.parameter)] for slot in layer.slots))
            gradient = max(apart.pop(name, 0.0) for name in own)
            known = plain.factors[layer.key]  # none where rows are kept
            factors = max((_difference(v, known[name]) for name, v in placed.factors[layer.key].items()), default=0.0)
            rows[own[0]] = Difference(
                layer=layer.name, curvature=repr(group.curvature), gradient=gradient, factors=factors
            )
    rows |= {name: Difference(layer=name, curvature="", gradient=value) for name, value in apart.items()}
    return [rows[name] for name in placed.gradients if name in rows]


def _difference(actual: Tensor | None, expected: Tensor | None) -> float:
    if actual is None or expected is None:
        return 0.0 if actual is expected else float("inf")
    actual, expected = actual.double(), expected.double()
    apart, size = float((actual - expected).abs().max()), float(expected.abs().max())
    if not size:
        return float("inf") if apart else 0.0
    return float("inf") if math.isnan(apart) else apart / size
