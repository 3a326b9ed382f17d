"""A `PreconditionedOptimizer` is assigned to, copied and pickled as torch's optimizers are."""

import copy
import pickle

import pytest
import torch
from torch.nn.functional import cross_entropy

import natgrad


def warm_up(step):
    return 1e-2 / (step + 1)


def build(curvature=None, inner=torch.optim.Adam, gives_optimizer=True, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
    optimizer = inner(model.parameters(), lr=1e-2)
    options = {"refresh": natgrad.Refresh(factors=2, inverses=3), **options}
    own = {"optimizer": optimizer} if gives_optimizer else {}
    preconditioner = natgrad.Preconditioner(model, curvature, **own, **options)
    return model, natgrad.PreconditionedOptimizer(optimizer, preconditioner)


def train(model, optimizer, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(8, 5, generator=generator), torch.randint(3, (8,), generator=generator)
        optimizer.zero_grad()
        outputs = model(x)
        optimizer.preconditioner.backward(cross_entropy(outputs, y), outputs)
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def pickled(both):
    return pickle.loads(pickle.dumps(both))


OPTIONS = {
    "kfac": {},
    "ekfac": {"curvature": natgrad.EKFAC()},
    "hylo": {"curvature": natgrad.HyLo()},
    "sampled": {"curvature": natgrad.KFAC(fisher="sampled", likelihood="categorical")},
    "patterns": {"curvature": {"0": natgrad.KFAC(), "*": None}},
    "schedule": {"damping": warm_up},
    "adaptive": {"refresh": natgrad.Adaptive(natgrad.DriftRule())},
    "momentum": {"inner": torch.optim.SGD},
    "without an optimizer": {"gives_optimizer": False},
}


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_copy_trains_on_as_the_original_does(name, duplicate):
    model, optimizer = build(**OPTIONS[name])
    train(model, optimizer, range(4))
    other, twin = duplicate((model, optimizer))
    expected = train(model, optimizer, range(4, 9))
    found = train(other, twin, range(4, 9))
    assert all(torch.equal(p, q) for p, q in zip(found, expected, strict=True))
    assert twin.preconditioner is not optimizer.preconditioner
    assert twin.preconditioner.metrics()["step"] == optimizer.preconditioner.metrics()["step"] == 9


def test_the_copy_holds_the_copied_parameters():
    model, optimizer = build()
    other, twin = copy.deepcopy((model, optimizer))
    own = {id(parameter) for parameter in other.parameters()}
    assert {id(parameter) for group in twin.param_groups for parameter in group["params"]} == own
    assert {id(parameter) for parameter in twin.preconditioner.parameters()} == own


def test_training_the_copy_leaves_the_original_alone():
    model, optimizer = build()
    other, twin = copy.deepcopy((model, optimizer))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    train(other, twin, range(2))
    assert all(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))
    assert optimizer.preconditioner.metrics()["step"] == 0


def test_a_copy_keeps_class_and_count():
    class Own(natgrad.PreconditionedOptimizer):
        pass

    _, optimizer = build(reduction="tokens")
    optimizer = Own(optimizer.optimizer, optimizer.preconditioner)
    optimizer.count = 5
    twin = copy.deepcopy(optimizer)
    assert type(twin) is Own
    assert twin.count == 5


def test_a_model_of_a_process_group_is_not_copied(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=(tmp_path / "group").as_uri(), rank=0, world_size=1)
    try:
        model = torch.nn.Linear(3, 2)
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        given = {"process_group": torch.distributed.group.WORLD}
        for own, options, match in ((wrapped, {}, "DistributedDataParallel"), (model, given, "process_group")):
            preconditioner = natgrad.Preconditioner(own, optimizer=optimizer, **options)
            both = natgrad.PreconditionedOptimizer(optimizer, preconditioner)
            with pytest.raises(TypeError, match=rf"{match}.*gather=True"):
                copy.deepcopy(both)
            preconditioner.detach()
    finally:
        torch.distributed.destroy_process_group()


def test_groups_state_and_defaults_can_be_assigned():
    model, optimizer = build()
    train(model, optimizer, range(2))
    groups = [{**group, "lr": 0.5} for group in optimizer.param_groups]
    optimizer.param_groups = groups
    assert optimizer.optimizer.param_groups is groups
    state = dict(optimizer.state)
    optimizer.state = state
    assert optimizer.optimizer.state is state
    optimizer.defaults = {"lr": 0.25}
    assert optimizer.optimizer.defaults == {"lr": 0.25}
    assert optimizer.defaults == {"lr": 0.25}


def test_a_group_is_added_to_the_inner_optimizer():
    _, optimizer = build()
    added = torch.nn.Parameter(torch.zeros(2))
    optimizer.add_param_group({"params": [added], "lr": 0.5})
    assert optimizer.optimizer.param_groups[-1]["params"] == [added]
    assert optimizer.param_groups[-1]["lr"] == 0.5
