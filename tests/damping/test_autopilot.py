"""The damping that nobody chooses: by the sizes of Fisher and parameters, whatever the scale of the loss."""

import copy
import math

import pytest
import torch
from torch import nn

import natgrad
from natgrad import Autopilot
from natgrad.damping import ByKind
from tests.dense import reference as dense

F64 = torch.float64
REFRESH = natgrad.Refresh(factors=1, inverses=3)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.convolution, self.norm = nn.Conv1d(2, 4, 2, groups=2), nn.GroupNorm(2, 4)
        self.first, self.head = nn.Linear(12, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.first(self.norm(self.convolution(x)).tanh().flatten(1)).tanh())


def trained(curvature=None, *, steps=5, scale=1.0, damping=None, model=None, state=None, **options):
    """Train with the loss times `scale`, and a learning rate that undoes it; return the preconditioner and the γs."""
    model = Net().double() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * scale, momentum=0.0)
    options = {"kl_clip": None, "refresh": REFRESH, **options}
    damping = Autopilot() if damping is None else damping
    preconditioner = natgrad.Preconditioner(model, curvature, optimizer=optimizer, damping=damping, **options)
    if state is not None:
        model.load_state_dict(state[0])
        preconditioner.load_state_dict(state[1])
    gammas = []
    for step in range(preconditioner.metrics()["step"], steps):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(8, 2, 4, generator=generator, dtype=F64), torch.randint(3, (8,), generator=generator)
        optimizer.zero_grad()
        (nn.functional.cross_entropy(model(x), y) * scale).backward()
        preconditioner.step()
        optimizer.step()
        gammas.append(preconditioner.metrics()["damping"])
    return preconditioner, gammas


@pytest.mark.parametrize("curvature", [natgrad.KFAC(form="inverse"), natgrad.EKFAC(), natgrad.KFAC(sides="a")])
def test_it_is_the_geometric_mean_of_the_mean_eigenvalues(curvature):
    preconditioner, gammas = trained(curvature, steps=1)
    logs = []
    for key, own in preconditioner.state_dict()["blocks"].items():
        weight = own["weight"]
        if "F" in own:  # two mean squares and their product for each channel
            sizes = own["F"][..., :2].flatten(1).mean(1) / weight
        else:
            trace = [torch.stack([f.trace() for f in own[name] / weight[0]]) for name in ("A", "G") if name in own]
            widths = [own[name].shape[-1] for name in ("A", "G") if name in own]
            sizes = torch.stack(trace).prod(0) / math.prod(widths)
        assert len(sizes) == (2 if key == "convolution.weight" else 1)
        logs.append(float(sizes.mean().log()))
    assert len(logs) == 4
    assert gammas[0] == pytest.approx(20 * math.exp(sum(logs) / 4), rel=1e-12)


def test_it_is_read_off_once_before_its_first_use():
    preconditioner, gammas = trained(damping=Autopilot(share=2.0))
    assert len(set(gammas)) == 1
    plain, _ = trained(damping=gammas[0])
    for one, other in zip(preconditioner.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)
    twice, more = trained(damping=ByKind(Autopilot(share=4.0), layers={"head": 0.5}))
    assert more[0] == pytest.approx(2 * gammas[0], rel=1e-12)
    assert {stack.factor for stack in twice._stacks} == {1.0, 0.5}


@pytest.mark.parametrize("form", ["eigen", "inverse"])
@pytest.mark.parametrize("clip", [None, 1e-3])
def test_it_means_the_same_however_the_loss_is_scaled(form, clip):
    """A loss times c has c² times the Fisher and c times the gradient: natural gradients become 1 / c of them."""
    one, gammas = trained(natgrad.KFAC(form=form), kl_clip=clip)
    other, scaled = trained(natgrad.KFAC(form=form), scale=64.0, kl_clip=clip and 64.0**2 * clip)
    assert scaled[0] == pytest.approx(64.0**2 * gammas[0], rel=1e-10)
    names = [name for name, _ in Net().named_parameters()]
    assert len(names) == 8
    pairs = list(zip(one._root.parameters(), other._root.parameters(), strict=True))
    dense.assert_equal(
        {name: mine.detach() for name, (mine, _) in zip(names, pairs, strict=True)},
        {name: theirs.detach() for name, (_, theirs) in zip(names, pairs, strict=True)},
    )


def test_less_where_less_keeps_every_step_short():
    model = Net().double()
    square = sum(float(p.detach().square().sum()) for p in model.parameters())
    _, gammas = trained(damping=Autopilot(share=1e9, stride=0.2), kl_clip=1e-3, model=model)
    assert gammas == [pytest.approx(1e-3 / (0.2**2 * square), rel=1e-12)] * 5
    wide, _ = trained(damping=Autopilot(stride=1e-9), kl_clip=1e-3, steps=1)
    plain, _ = trained(damping=Autopilot(), kl_clip=None, steps=1)
    assert wide.metrics()["damping"] == plain.metrics()["damping"]  # the size alone


def test_only_parameters_with_curvature_count_each_once():
    class Attention(Net):
        def __init__(self):
            super().__init__()
            self.attention, self.twice = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 4)

        def forward(self, x):
            y = self.first(self.norm(self.convolution(x)).tanh().flatten(1)).tanh()[:, None]
            return self.head(self.twice(self.twice(self.attention(y, y, y, need_weights=False)[0]))[:, 0])

    model = Attention().double()
    counted = [p for name, p in model.named_parameters() if not name.startswith(("norm", "convolution"))]
    square = sum(float(p.detach().square().sum()) for p in counted)
    curvature = {"norm": None, "convolution": None, "*": natgrad.KFAC()}
    _, gammas = trained(curvature, damping=Autopilot(share=1e9, stride=0.5), kl_clip=2.0, model=model, steps=1)
    assert gammas[0] == pytest.approx(2.0 / (0.25 * square), rel=1e-12)


@pytest.mark.parametrize("curvature", [natgrad.KFAC(), natgrad.KFAC(form="inverse"), natgrad.EKFAC()])
def test_no_gradient_moves_the_parameters_further_than_the_stride(curvature):
    """At a learning rate far too large for a loss that is almost flat."""
    model = Net().double()
    parameters = list(model.parameters())
    length = math.sqrt(sum(float(p.detach().square().sum()) for p in parameters))
    optimizer = torch.optim.SGD(parameters, lr=1e3)
    damping = Autopilot(share=1e9, stride=0.1)
    preconditioner = natgrad.Preconditioner(model, curvature, optimizer=optimizer, damping=damping, refresh=REFRESH)
    moved = []
    for step in range(4):
        x = torch.randn(8, 2, 4, generator=torch.Generator().manual_seed(step), dtype=F64)
        before = [p.detach().clone() for p in parameters]
        optimizer.zero_grad()
        (1e-2 * nn.functional.cross_entropy(model(x), torch.arange(8) % 3)).backward()
        preconditioner.step()
        optimizer.step()
        steps = [p.detach() - old for p, old in zip(parameters, before, strict=True)]
        moved.append(math.sqrt(sum(float(step.square().sum()) for step in steps)))
    assert max(moved) <= 0.1 * length
    assert max(moved) > 0.05 * length  # the bound is not idle


def test_layers_that_see_no_gradient_yet_count_for_nothing():
    model, reference = Net().double(), Net().double()
    nn.init.zeros_(model.head.weight)
    _, gammas = trained(model=model, steps=1)
    only = {"head": natgrad.KFAC(), "*": None}
    nn.init.zeros_(reference.head.weight)
    _, expected = trained(only, model=reference, steps=1)
    assert gammas[0] == pytest.approx(expected[0], rel=1e-12)


def test_a_poisoned_first_batch_is_not_what_it_goes_by():
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    preconditioner = natgrad.Preconditioner(model, optimizer=optimizer, damping=Autopilot())
    model(torch.full((8, 2, 4), math.nan, dtype=F64)).sum().backward()
    preconditioner.step()
    assert preconditioner.state_dict()["damping"] == {"rule": "Autopilot", "gamma": 1e-3, "known": 0}
    optimizer.zero_grad()
    model(torch.randn(8, 2, 4, dtype=F64)).square().mean().backward()
    preconditioner.step()
    assert preconditioner.state_dict()["damping"]["known"] == 1


def test_it_resumes_to_the_last_bit_and_verify_leaves_it_alone():
    whole, gammas = trained(natgrad.KFAC(form="inverse"), steps=8)
    half, _ = trained(natgrad.KFAC(form="inverse"), steps=4)
    state = copy.deepcopy(half._root.state_dict()), half.state_dict()
    batch = torch.randn(8, 2, 4, dtype=F64)
    assert half.verify(batch, lambda model, x: model(x).square().mean()).worst < 1e-9
    assert half.state_dict()["damping"] == state[1]["damping"]
    resumed, more = trained(natgrad.KFAC(form="inverse"), steps=8, state=state)
    assert more[0] == gammas[0]
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("option", ["share", "stride"])
@pytest.mark.parametrize("value", [0, -1.0, math.inf, "10"])
def test_an_option_that_is_not_allowed(option, value):
    with pytest.raises(ValueError, match=option):
        Autopilot(**{option: value})


@pytest.mark.parametrize("curvature", [natgrad.SNGD(), natgrad.HyLo(), natgrad.KBFGS()])
def test_curvatures_that_do_not_tell_their_size(curvature):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"curvature=.*trace"):
        natgrad.Preconditioner(model, curvature, optimizer=optimizer, damping=Autopilot(), kl_clip=None)
