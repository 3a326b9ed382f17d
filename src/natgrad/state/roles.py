"""What one rank has to do with the layers of a stack."""

from __future__ import annotations

from dataclasses import dataclass

from natgrad.distributed import Assignment, Plan


@dataclass(frozen=True)
class RankRole:
    """What a rank has to do with some layers, all of which have the same workers.

    Attributes:
        seat: Their workers, and where their sums go; without owners.
        server: The worker that gives this rank their preconditioned gradients.
        is_gradient_worker: Whether it is this rank itself.
        keeps_averages: Whether this rank receives their sums, and keeps their running averages.
        captures: Whether its samples count in them.
    """

    seat: Assignment
    server: int
    is_gradient_worker: bool
    keeps_averages: bool
    captures: bool

    @classmethod
    def of(cls, plan: Plan[str], key: str, rank: int) -> RankRole:
        """Read it off a plan."""
        seat = plan.seats[key]
        return cls(
            seat=Assignment(seat.workers, {}, seat.sums),
            server=plan.server(key, rank),
            is_gradient_worker=plan.is_gradient_worker(key, rank),
            keeps_averages=plan.keeps_averages(key, rank),
            captures=plan.captures(key, rank),
        )

    @property
    def shape(self) -> tuple[object, ...]:
        """What is equal for layers whose blocks may be stored together."""
        return self.seat.workers, self.seat.sums
