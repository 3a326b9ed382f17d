"""One layer as a rule decides on it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from math import isnan, nan

import torch
from torch import Tensor

from natgrad.refresh.rule import By, Rule, Verdict
from natgrad.renewal.measure import Unit, measurable, measured, units
from natgrad.renewal.record import KEPT, RENEWED, STOPPED, Record
from natgrad.stacks.blocks import Member, Stack


@dataclass
class Judged:
    """A layer that is decided on, and what is known of it.

    Attributes:
        stack: Its stack.
        member: Its place there.
        index: Its number there.
        record: What is remembered of it.
        units: What of it is decided on apart.
        values: What was measured of these.
        seen: What of it is of the statistics alone, without damping.
        parts: The names of the parts to renew.
        change: By how much it has changed: that of its units that has most.
        verdict: What becomes of it.
    """

    stack: Stack
    member: Member
    index: int
    record: Record
    units: Sequence[Unit] = ()
    values: Sequence[float] = ()
    seen: float = nan
    parts: frozenset[str] = field(default=frozenset())
    change: float = nan
    verdict: float = KEPT

    @property
    def key(self) -> str:
        """Its key in the state."""
        return self.member.layer.key

    @property
    def begins(self) -> bool:
        """Whether it has nothing to go on with: it was never renewed as a whole, or what it has was found unusable."""
        rungs = self.stack.rungs
        sunk = rungs.suspected and rungs.sunk is not None and bool(rungs.sunk[self.member.blocks].any())
        return not self.stack.ready[self.index] or sunk

    @property
    def value(self) -> float:
        """The largest of what was measured; no number if any is none."""
        return nan if any(map(isnan, self.values)) else max(self.values)

    @property
    def share(self) -> float:
        """The share of the work of a renewal that is to be done."""
        costs = {part.name: part.cost for part in self.stack.parts}
        return sum(costs[name] for name in self.parts) / (sum(costs.values()) or 1.0)

    @property
    def kept(self) -> set[tuple[str, str]]:
        """Its parts that stay as they are, by its key and their names."""
        return {(self.key, part.name) for part in self.stack.parts if part.name not in self.parts}

    def judge(self, rule: Rule) -> None:
        """Have the rule decide: each unit is renewed or not, and the layer stopped where all are."""
        last = self.record.last(self.index)
        changes = [rule.change(value, last) for value in self.values]
        self.change = max(changes)
        begins = self.begins
        verdicts: list[Verdict] = ["renew" if begins else rule.verdict(change) for change in changes]
        due = [unit.parts for unit, verdict in zip(self.units, verdicts, strict=True) if verdict == "renew"]
        self.parts = frozenset().union(*due)
        # Where nothing was captured since the last decision, nobody knows what has settled.
        news = self.seen != self.record.seen(self.index)
        stops = news and all(verdict == "stop" for verdict in verdicts)
        self.verdict = RENEWED if self.parts else STOPPED if stops else KEPT

    def begin(self) -> None:
        """Note that what is to be renewed is, of the statistics as they are now."""
        read = (unit.statistics for unit in self.units if unit.parts <= self.parts)
        self.record.begin(self.index, frozenset().union(*read))


def judged(stacks: Sequence[Stack], keys: Collection[str] | None = None) -> Iterator[Judged]:
    """Yield the layers of some `keys` that this rank works for; None: all layers."""
    for stack in stacks:
        if stack.record is None or (keys is not None and not stack.role.works):
            continue
        for index, member in enumerate(stack.members):
            if keys is None or member.layer.key in keys:
                yield Judged(stack, member, index, stack.record)


def measure(layers: Sequence[Judged], rule: Rule, by: By, damping: float) -> None:
    """Measure layers, in one go for each device; those that cannot be measured have no numbers."""
    own_units = {id(one.stack): units(one.stack, by) for one in layers}
    stacks = {id(one.stack): one.stack for one in layers if measurable(one.stack.curvature, rule.measure)}
    found: dict[torch.device, list[tuple[Stack, Tensor]]] = {}
    for stack in stacks.values():
        if stack.weight is not None and (stack.held or rule.measure != "basis"):
            found.setdefault(stack.device, []).append((stack, measured(stack, rule.measure, by)))
    values: dict[int, list[list[float]]] = {}
    for pairs in found.values():
        numbers = iter(torch.cat([own.double().flatten() for _, own in pairs]).tolist())
        for stack, own in pairs:
            values[id(stack)] = [[next(numbers) for _ in stack.members] for _ in own]
    damped = damping if rule.measure == "trace" else 0.0
    for one in layers:
        one.units = own_units[id(one.stack)]
        rows = values.get(id(one.stack))
        one.values = [nan] * len(one.units) if rows is None else [row[one.index] for row in rows]
        one.seen = one.value
        more = damped * one.stack.factor * one.stack.parameters(one.member)
        one.values = [value + more for value in one.values]
