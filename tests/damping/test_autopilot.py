"""The damping that nobody chooses: by the sizes of Fisher and parameters, whatever the scale of the loss."""

import copy
import math
import warnings

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


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 2, 4, generator=generator, dtype=F64), torch.randint(3, (8,), generator=generator)


def trained(curvature=None, *, steps=5, scale=1.0, rate=0.1, damping=None, model=None, state=None, **options):
    """Train with the loss times `scale`, and a learning rate that undoes it; return the preconditioner and the γs."""
    model = Net().double() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=rate * scale, momentum=0.0)
    options = {"kl_clip": None, "refresh": REFRESH, **options}
    damping = Autopilot() if damping is None else damping
    preconditioner = natgrad.Preconditioner(model, curvature, optimizer=optimizer, damping=damping, **options)
    if state is not None:
        model.load_state_dict(state[0])
        preconditioner.load_state_dict(state[1])
    gammas = []
    for step in range(preconditioner.metrics()["step"], steps):
        x, y = batch(step)
        optimizer.zero_grad()
        (nn.functional.cross_entropy(model(x), y) * scale).backward()
        preconditioner.step()
        optimizer.step()
        gammas.append(preconditioner.metrics()["damping"])
    return preconditioner, gammas


def sizes_by_key(preconditioner):
    """Return the mean eigenvalue of each layer's Fisher, from what a preconditioner saves."""
    found = {}
    for key, own in preconditioner.state_dict()["blocks"].items():
        weight = own["weight"]
        if "F" in own:  # two mean squares and their product for each channel
            sizes = own["F"][..., :2].flatten(1).mean(1) / weight
        else:
            trace = [torch.stack([f.trace() for f in own[name] / weight[0]]) for name in ("A", "G") if name in own]
            widths = [own[name].shape[-1] for name in ("A", "G") if name in own]
            sizes = torch.stack(trace).prod(0) / math.prod(widths)
        assert len(sizes) == (2 if key == "convolution.weight" else 1)
        found[key] = float(sizes.mean())
    return found


@pytest.mark.parametrize("curvature", [natgrad.KFAC(form="inverse"), natgrad.EKFAC(), natgrad.KFAC(sides="a")])
def test_it_goes_by_the_lower_quartile_of_the_mean_eigenvalues(curvature):
    preconditioner, gammas = trained(curvature, steps=1)
    sizes = torch.tensor(list(sizes_by_key(preconditioner).values()), dtype=F64)
    assert len(sizes) == 4
    assert gammas[0] == pytest.approx(150 * math.exp(sizes.log().quantile(0.25)), rel=1e-12)


def test_of_one_layer_it_is_its_own():
    preconditioner, gammas = trained({"first": natgrad.KFAC(), "*": None}, steps=1)
    (size,) = sizes_by_key(preconditioner).values()
    assert gammas[0] == pytest.approx(150 * size, rel=1e-12)


def test_it_goes_with_the_learning_rate_beside_the_clip():
    """Whatever warm-up makes of the rate: what counts is where it goes."""
    damping = Autopilot(stride=1e-9)
    _, plain = trained(damping=damping, kl_clip=None, steps=1)
    for rate, clip in ((0.1, 1e-3), (1.0, 1e-3), (0.1, 4e-3)):
        _, gammas = trained(damping=damping, rate=rate, kl_clip=clip, steps=1)
        assert gammas[0] == pytest.approx(plain[0] * (rate**2 / (1e3 * clip)) ** 0.375, rel=1e-12)

    def first(schedule):
        model = Net().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        preconditioner = natgrad.Preconditioner(model, optimizer=optimizer, damping=damping)
        schedule(optimizer)
        x, y = batch(0)
        nn.functional.cross_entropy(model(x), y).backward()
        preconditioner.step()
        return optimizer.param_groups[0]["lr"], preconditioner.metrics()["damping"]

    schedulers = torch.optim.lr_scheduler
    rate, gamma = first(lambda optimizer: None)
    assert rate == 0.1
    for schedule in (
        lambda optimizer: schedulers.LinearLR(optimizer, 0.01, total_iters=5),
        lambda optimizer: schedulers.OneCycleLR(optimizer, max_lr=0.1, total_steps=9),
    ):
        warm, same = first(schedule)
        assert warm < 0.01
        assert same == gamma


@pytest.mark.parametrize(("sums", "times"), [({"reduction": "sum"}, 4), ({"accumulation": "sum"}, 2)])
@pytest.mark.parametrize("clip", [None, 1e-3])
def test_it_means_the_same_however_the_loss_is_summed_up(sums, times, clip):
    """With the learning rate that goes with the loss."""
    found = []
    for options in ({}, sums):
        model = Net().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 / (times if options else 1))
        preconditioner = natgrad.Preconditioner(
            model, natgrad.KFAC(), optimizer=optimizer, damping=Autopilot(stride=1e-9), kl_clip=clip, **options
        )
        for step in range(3):
            optimizer.zero_grad()
            for x, y in zip(*(tensor.split(4) for tensor in batch(step)), strict=True):
                loss = nn.functional.cross_entropy(model(x), y, reduction=options.get("reduction", "mean"))
                (loss if "accumulation" in options else loss / 2).backward()
            preconditioner.step()
            optimizer.step()
        found.append((preconditioner.metrics()["damping"], dict(model.named_parameters())))
    (one, mine), (other, theirs) = found
    assert one == pytest.approx(other, rel=1e-10)
    if clip is None:  # which takes every gradient for that of the mean loss, whatever the learning rate
        dense.assert_equal(*({name: p.detach() for name, p in each.items()} for each in (mine, theirs)), 1e-9)


@pytest.mark.parametrize("trouble", ["gradient", "functional"])
def test_layers_of_which_fisher_or_gradient_is_not_known_do_not_count(trouble):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.odd, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            h = self.first(x).tanh()
            return self.head(nn.functional.linear(h, self.odd.weight, self.odd.bias) if trouble == "functional" else h)

    x, y = batch(0)
    model, found = Odd().double(), []
    for curvature in ({"*": natgrad.KFAC()}, {"odd": None, "*": natgrad.KFAC()}):
        own = copy.deepcopy(model)
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
        options = {"damping": Autopilot(share=1e9), "guard": natgrad.Guard(limit=None)}
        preconditioner = natgrad.Preconditioner(own, curvature, optimizer=optimizer, **options)
        nn.functional.cross_entropy(own(x[:, 0]), y).backward()
        if trouble == "gradient":
            own.odd.weight.grad = torch.full_like(own.odd.weight, math.nan)
        square = sum(float(p.detach().square().sum()) for name, p in own.named_parameters() if "odd" not in name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            preconditioner.step()
        odd = sum(float(p.detach().square().sum()) for p in own.odd.parameters())
        length = square if found else square + odd
        found.append(preconditioner.metrics()["damping"] * length)
    assert found[0] == pytest.approx(found[1], rel=1e-9)


def test_the_learning_rate_is_that_of_layers_with_curvature():
    def gamma(groups, **options):
        model = Net().double()
        groups = groups(model)
        optimizer = torch.optim.SGD(groups, lr=0.1)
        for group in optimizer.param_groups:
            group.update(options)
        curvature = {"head": None, "*": natgrad.KFAC()}
        damping = Autopilot(stride=1e-9)
        preconditioner = natgrad.Preconditioner(model, curvature, optimizer=optimizer, damping=damping)
        nn.functional.cross_entropy(model(batch(0)[0]), batch(0)[1]).backward()
        preconditioner.step()
        return preconditioner.metrics()["damping"]

    def apart(model):
        rest = [p for name, p in model.named_parameters() if "head" not in name]
        return [{"params": rest}, {"params": model.head.parameters(), "lr": 10.0}]

    plain = gamma(lambda model: model.parameters())
    assert gamma(apart) == plain
    assert gamma(lambda model: model.parameters(), initial_lr=0.01) == plain  # a rate that has grown
    assert gamma(lambda model: model.parameters(), max_lr=torch.tensor(0.2)) == pytest.approx(plain * 2**0.75)
    slow = gamma(lambda model: model.parameters(), lr=1e-9)
    assert slow == pytest.approx(plain * (0.1 / 10) ** 0.375)
    assert gamma(lambda model: model.parameters(), lr=1e-12) == slow


def test_without_a_learning_rate_it_is_by_the_size_alone():
    class Own(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {})

        def step(self):
            pass

    model = Net().double()
    preconditioner = natgrad.Preconditioner(model, optimizer=Own(model.parameters()), damping=Autopilot(), kl_clip=None)
    nn.functional.cross_entropy(model(batch(0)[0]), batch(0)[1]).backward()
    preconditioner.step()
    assert preconditioner.metrics()["damping"] == trained(steps=1)[1][0]


def trace_of(preconditioner):
    """Return the trace of the Fisher of layers with two factors."""
    traces = []
    for own in preconditioner.state_dict()["blocks"].values():
        A, G = (own[name].diagonal(0, -2, -1).sum(-1) / own["weight"][0] for name in ("A", "G"))
        traces.append(float((A * G).sum()))
    return sum(traces)


def test_less_the_more_samples_agree_about_the_gradient():
    """What the gradient's square is of the Fisher's trace: all of it, where all samples are the same."""
    model, damping = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double(), Autopilot(share=1e9)
    square = sum(float(p.detach().square().sum()) for p in model.parameters())
    found = []
    for alike in (True, False):
        own, x = copy.deepcopy(model), batch(0)[0][:, 0]
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
        preconditioner = natgrad.Preconditioner(own, natgrad.KFAC(), optimizer=optimizer, damping=damping)
        own(x[:1].expand(8, 4) if alike else x).square().sum(1).mean().backward()
        gradient = sum(float(p.grad.square().sum()) for p in own.parameters())
        preconditioner.step()
        trace = trace_of(preconditioner)
        found.append(gradient / trace)
        expected = 1e-3 / (0.015**2 * square * found[-1])
        assert preconditioner.metrics()["damping"] == pytest.approx(expected, rel=1e-10)
    assert found[0] == pytest.approx(1.0, rel=1e-10)
    assert found[1] < 0.9


def test_it_is_read_off_once_before_its_first_use():
    preconditioner, gammas = trained(damping=Autopilot(share=2.0))
    assert len(set(gammas)) == 1
    plain, _ = trained(damping=gammas[0])
    for one, other in zip(preconditioner.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)
    twice, more = trained(damping=ByKind(Autopilot(share=4.0), layers={"head": 0.5}))
    assert more[0] == pytest.approx(2 * gammas[0], rel=1e-12)
    assert {stack.factor for stack in twice.parts.groups} == {1.0, 0.5}


@pytest.mark.parametrize("form", ["eigen", "inverse"])
@pytest.mark.parametrize("clip", [None, 1e-3])
def test_it_means_the_same_however_the_loss_is_scaled(form, clip):
    """A loss times c has c² times the Fisher and c times the gradient: natural gradients become 1 / c of them."""
    one, gammas = trained(natgrad.KFAC(form=form), kl_clip=clip)
    other, scaled = trained(natgrad.KFAC(form=form), scale=64.0, kl_clip=clip and 64.0**2 * clip)
    assert scaled[0] == pytest.approx(64.0**2 * gammas[0], rel=1e-10)
    names = [name for name, _ in Net().named_parameters()]
    assert len(names) == 8
    pairs = list(zip(one.parts.structure.root.parameters(), other.parts.structure.root.parameters(), strict=True))
    dense.assert_equal(
        {name: mine.detach() for name, (mine, _) in zip(names, pairs, strict=True)},
        {name: theirs.detach() for name, (_, theirs) in zip(names, pairs, strict=True)},
    )


def coherence(preconditioner, model):
    """Return the squared gradient of the first batch over the trace of the Fisher that has been saved."""
    nn.functional.cross_entropy(model(batch(0)[0]), batch(0)[1]).backward()
    layers = [model.get_submodule(key.removesuffix(".weight")) for key in sizes_by_key(preconditioner)]
    counted = [p for layer in layers for p in layer.parameters()]
    found = sizes_by_key(preconditioner).values()
    trace = sum(size * sum(p.numel() for p in layer.parameters()) for size, layer in zip(found, layers, strict=True))
    return sum(float(p.grad.square().sum()) for p in counted) / trace, counted


def test_less_where_less_keeps_every_step_short():
    first, gammas = trained(damping=Autopilot(share=1e9, stride=0.2), kl_clip=1e-3, steps=1)
    agreed, counted = coherence(first, Net().double())
    square = sum(float(p.detach().square().sum()) for p in counted)
    assert gammas == [pytest.approx(1e-3 / (0.2**2 * square * agreed), rel=1e-10)]
    _, more = trained(damping=Autopilot(share=1e9, stride=0.2), kl_clip=1e-3)
    assert more == gammas * 5
    wide, _ = trained(damping=Autopilot(stride=1e-9), kl_clip=1e-5, steps=1)  # such that lr² = 1000 κ
    plain, _ = trained(damping=Autopilot(), kl_clip=None, steps=1)
    assert wide.metrics()["damping"] == pytest.approx(plain.metrics()["damping"], rel=1e-12)  # the size alone


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
    nn.functional.cross_entropy(model(batch(0)[0]), batch(0)[1]).backward()
    gradient = sum(float(p.grad.square().sum()) for p in counted)
    curvature = {"norm": None, "convolution": None, "*": natgrad.KFAC()}
    found, gammas = trained(curvature, damping=Autopilot(share=1e9, stride=0.5), kl_clip=2.0, model=model, steps=1)
    trace = trace_of(found)
    assert gammas[0] == pytest.approx(2.0 * trace / (0.25 * square * gradient), rel=1e-10)


@pytest.mark.parametrize("curvature", [natgrad.KFAC(), natgrad.KFAC(form="inverse"), natgrad.EKFAC()])
def test_no_gradient_moves_the_parameters_further_than_the_stride(curvature):
    """At a learning rate far too large for a loss that is almost flat; by as much of it as samples agree about."""
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
    allowed = math.sqrt(1e-3 / preconditioner.metrics()["damping"])
    assert allowed <= 0.1 * length
    assert max(moved) <= allowed
    assert max(moved) > 0.3 * allowed  # the bound is not idle


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
    state = copy.deepcopy(half.parts.structure.root.state_dict()), half.state_dict()
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
