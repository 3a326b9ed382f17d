"""What FSDP2's shards send: pure numbers."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from natgrad.distributed import make_plan, resolve
from tests.placement.layers import models
from tests.placement.test_choice import candidates

pure = settings(max_examples=60, deadline=None, derandomize=True)
small_ranks = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 64])


def even(works, S):
    """The same layers, sharded over S ranks without a remainder: of S times as many elements."""
    return {
        key: replace(work, gradients=S * work.gradients, shards=(work.gradients,) * S if S > 1 else ())
        for key, work in works.items()
    }


def uneven(works, S):
    """The same layers, whose elements ``torch.chunk`` has spread."""

    def shards(n):
        size = -(-n // S)
        return tuple(max(0, min(n, size * (s + 1)) - size * s) for s in range(S))

    return {
        key: replace(work, shards=shards(work.gradients) if S > 1 and work.gradients else ())
        for key, work in works.items()
    }


@pure
@given(small_ranks, models)
def test_volumes_of_even_shards(P, works):
    sharded = even(works, P)
    N = sum(work.gradients for work in sharded.values())
    sent = {name: make_plan(resolve(name), sharded, P).traffic()["step"] for name in ("comm-opt", "mem-opt", "dp")}
    assert sent["comm-opt"]["gradients"] == (P - 1) * N
    assert sent["mem-opt"]["gradients"] * P == sent["dp"]["gradients"] * P == 2 * (P - 1) * N


@pure
@given(small_ranks, models, st.sampled_from([1, 2, 4]))
def test_volumes_by_hand(P, works, copies):
    """A worker lacks the rows of the other shards of its copy; whom it serves lack their own of what it makes."""
    S = P // copies if P % copies == 0 else P
    sharded = uneven(works, S)
    for placement in candidates(P):
        plan = make_plan(placement, sharded, P)
        expected = 0
        for key, work in sharded.items():
            workers = plan.assignments[key].workers
            if not work.shards and plan.columns > 1 and not any(own.shards for own in sharded.values()):
                return  # `test_plan` tells of those
            if not work.shards:
                expected += (P - len(workers)) * work.gradients
                continue
            for rank in range(P):
                own = work.shards[rank % S]
                expected += sum(work.shards) - own if rank in workers else own
        assert plan.traffic()["step"]["gradients"] == expected
