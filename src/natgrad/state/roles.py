"""What one rank has to do with the layers of a stack."""

from __future__ import annotations

from dataclasses import dataclass

from natgrad.distributed import Plan, Seat


@dataclass(frozen=True)
class Role:
    """What a rank has to do with some layers, all of which have the same workers.

    Attributes:
        seat: Their workers, and where their sums go; without owners.
        server: The worker that gives this rank their preconditioned gradients.
        works: Whether it is this rank itself.
        receives: Whether this rank receives their sums, and keeps their running averages.
        captures: Whether its samples count in them.
    """

    seat: Seat
    server: int
    works: bool
    receives: bool
    captures: bool

    @classmethod
    def of(cls, plan: Plan[str], key: str, rank: int) -> Role:
        """Read it off a plan."""
        seat = Seat(plan.seats[key].workers, {}, plan.seats[key].sums)
        works, receives, captures = (ask(key, rank) for ask in (plan.works, plan.receives, plan.captures))
        return cls(seat, plan.server(key, rank), works, receives, captures)

    @property
    def shape(self) -> tuple[object, ...]:
        """What is equal for layers whose blocks may be stored together."""
        return self.seat.workers, self.seat.sums
