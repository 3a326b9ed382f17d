"""What one rank does for the layers of a block group."""

from __future__ import annotations

from dataclasses import dataclass

from natgrad.distributed import Assignment, Plan


@dataclass(frozen=True)
class RankRole:
    """What a rank does for some layers, all of which have the same workers.

    Attributes:
        seat: Their workers, and where their statistics are summed; without owners.
        server: The worker that sends this rank the preconditioned gradients.
        is_gradient_worker: Whether this rank is a worker.
        keeps_averages: Whether this rank receives the sums, and keeps their running averages.
        captures: Whether the samples of this rank count in the sums.
    """

    seat: Assignment
    server: int
    is_gradient_worker: bool
    keeps_averages: bool
    captures: bool

    @classmethod
    def of(cls, plan: Plan[str], key: str, rank: int) -> RankRole:
        """Return the role of a rank for a layer of a plan."""
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
        """A key that is equal for layers whose blocks may be stored together."""
        return self.seat.workers, self.seat.sums
