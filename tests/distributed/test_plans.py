"""Ranks whose plans differ say so at once, and what no hook has seen is averaged all the same."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import natgrad
from tests.distributed.jobs import place


def step(model, **options):
    preconditioner = natgrad.Preconditioner(model, gradients="reduce", **options)
    model(torch.randn(4, 3)).square().mean().backward()
    preconditioner.step()


def plan_differently():
    costs = {"0.weight": 1.0, "1.weight": 2.0} if place()[0] else {"0.weight": 2.0, "1.weight": 1.0}
    placement = natgrad.Placement(name="mem-opt", costs=costs)
    with pytest.raises(natgrad.NatgradError, match="different plans"):
        step(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)), placement=placement)


def have_other_models():
    with pytest.raises(natgrad.NatgradError, match="different plans"):
        step(nn.Linear(3, 4 + place()[0]))


def take_curvatures_of_other_types():
    with pytest.raises(natgrad.NatgradError, match="models or curvatures differ"):
        step(nn.Linear(3, 4), curvature=(natgrad.SNGD, natgrad.RankOne)[place()[0]]())


def have_other_weights():
    torch.manual_seed(place()[0])
    with pytest.raises(natgrad.NatgradError, match="begin with different weights"):
        step(nn.Linear(3, 4))


@pytest.mark.parametrize(
    "job", [plan_differently, have_other_models, have_other_weights, take_curvatures_of_other_types]
)
def test_ranks_that_would_do_different_things_all_raise(ranks, job):
    ranks.run(2, job)


DIFFERENT = {
    "state": {},
    "curvature": {"curvature": natgrad.KFAC(form="inverse")},
    "dtypes": {},
    "damping": {"damping": lambda step: 0.2},
    "kl_clip": {"kl_clip": None},
    "reduction": {"reduction": "sum"},
    "gradients": {"gradients": "averaged"},
    "scaling": {"accumulation": "sum"},
    "refresh": {"refresh": natgrad.Refresh(factors=2)},
    "precision": {"precision": natgrad.Precision(wire=torch.bfloat16)},
    "guard": {"guard": natgrad.Guard(limit=3)},
}
"""Arguments, by what an error calls them, that only one rank has."""


def differ(name, placement):
    """The messages of such ranks would not fit, or their parameters would drift apart."""
    own = place()[0] == 1
    model = nn.Linear(3, 2, dtype=torch.float64 if own and name == "dtypes" else torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {
        "gradients": "reduce",
        "placement": placement,
        "optimizer": optimizer,
        **(DIFFERENT[name] if own else {}),
    }
    preconditioner = natgrad.Preconditioner(model, **options)
    if own and name == "state":
        preconditioner.load_state_dict({**preconditioner.state_dict(), "step": 3, "last_factors": 2})
    model(torch.randn(4, 3, dtype=model.weight.dtype)).square().mean().backward()
    with pytest.raises(natgrad.NatgradError, match=f"the ranks differ in {name}"):
        preconditioner.step()


@pytest.mark.some(1)
@pytest.mark.parametrize("placement", ["comm-opt", "reduce-scatter"])
def test_ranks_with_other_options_all_raise(ranks, placement):
    for name in DIFFERENT:
        ranks.run(2, differ, name, placement, limit=30)


def reduce_on_some(names):
    """Such ranks would wait for each other in the first backward pass; afterwards the wrapper is as it was."""
    rank, _ = place()
    torch.manual_seed(0)
    replica = DistributedDataParallel(nn.Linear(3, 2).double())
    before = [p.clone() for p in replica.parameters()]
    told = f"the ranks differ in gradients .*{names[0]} and {next(name for name in names if name != names[0])}"
    with pytest.raises(natgrad.NatgradError, match=told):
        natgrad.Preconditioner(replica, gradients=names[rank])
    assert all(torch.equal(p, old) for p, old in zip(replica.parameters(), before, strict=True))
    steps = []
    for gradients in ("averaged", "reduce"):
        preconditioner = natgrad.Preconditioner(replica, gradients=gradients, placement="comm-opt")
        assert not any(preconditioner.traffic().values())
        replica.zero_grad()
        replica(torch.full((4, 3), 1.0 + rank, dtype=torch.float64)).square().mean().backward()
        preconditioner.step()
        steps.append(replica.module.weight.grad.clone())
        preconditioner.detach()
    return steps


@pytest.mark.parametrize("names", [("averaged", "reduce"), ("reduce", "averaged"), ("reduce", "reduce", "averaged")])
def test_wrapped_ranks_that_leave_gradients_to_others_all_raise(ranks, names):
    for averaged, reduced in ranks.run(len(names), reduce_on_some, names, limit=30):
        torch.testing.assert_close(averaged, reduced)


"""Curvatures of two ranks, by what an error calls the difference, of a linear layer or of another kind."""


def test_work_of_unknown_layers():
    with pytest.raises(ValueError, match=r"costs=\['nobody'\]"):
        natgrad.Preconditioner(nn.Linear(3, 2), placement=natgrad.Placement(name="mem-opt", costs={"nobody": 1.0}))
