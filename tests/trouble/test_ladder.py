"""Every rung of the ladder, down and up again, against what the last rungs are written out to be."""

import math

import pytest
import torch
from torch import nn

import natgrad
import natgrad.preconditioner.guard.fallback
from natgrad.preconditioner.guard.fallback import dots
from tests.dense import reference as dense

DAMPING = 0.3


EVERY_STEP = natgrad.Refresh(factors=1, inverses=1)


LAYERS = ("0", "2")


RUNGS = ("stale", "diagonal", "grafted")


class Failing(natgrad.KFAC):
    """K-FAC whose decompositions fail on demand, of the factor A of blocks with `inputs` inputs."""

    inputs = None

    def compute(self, task, averages, damping, previous=None):
        written, fine = super().compute(task, averages, damping, previous)
        broken = task == "A" and averages["A"].shape[-1] == self.inputs
        return written, torch.zeros_like(fine) if broken else fine


class Blind(natgrad.KFAC):
    """K-FAC whose statistics of layers with `outputs` outputs are not finite, on demand."""

    outputs = None

    def accumulate(self, sums, inputs, gradients, scale, computed=None):
        super().accumulate(sums, inputs, gradients, scale, computed)
        if sums["G"].shape[-1] == self.outputs:
            sums["G"].fill_(math.nan)


class Undiagonal(Failing):
    """The same without the third rung."""

    diagonal_reads = None


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(5, 3, generator=generator, dtype=torch.float64) for _ in range(count)]


def total_loss(model, x):
    return model(x).pow(3).sum() / 3


class Reference:
    """K-FAC with running averages, and the rungs below, of a model that stands still."""

    def __init__(self):
        self.kfac = dense.KFAC(damping=DAMPING)
        self.norms = {}
        self.W = {}

    def see(self, x, *, without=()):
        """Fold what a batch shows, but for some layers; return what fresh curvature makes of its gradients."""
        rows = dense.capture(dense.twin(network()), lambda model: total_loss(model, x))
        self.W = {name: seen.gradient() for name, seen in rows.items()}
        known = {name: self.kfac.held.get(name) for name in without}
        V = self.kfac.step({name: seen for name, seen in rows.items() if name not in without})
        self.kfac.held.update({name: held for name, held in known.items() if held is not None})
        for name, own in V.items():
            self.remember(name, own)
        return V

    def remember(self, name, V):
        norm = float(V.norm())
        self.norms[name] = 0.9 * self.norms[name] + 0.1 * norm if name in self.norms else norm

    def diagonal(self, name):
        A, G = (own / (1 - 0.95 ** self.kfac.updates[name]) for own in self.kfac.sums[name])
        D = G.diagonal(dim1=1, dim2=2)[:, :, None] * A.diagonal(dim1=1, dim2=2)[:, None, :]
        return self.W[name] / (D + DAMPING)

    def grafted(self, name):
        return self.W[name] * self.norms[name] / self.W[name].norm()


def make(curvature=None, *, model=None, **options):
    model = network() if model is None else model
    options = {"damping": DAMPING, "refresh": EVERY_STEP, **options}
    return model, natgrad.Preconditioner(model, curvature, **options)


def take(model, preconditioner, x):
    model.zero_grad()
    (total_loss(model, x) / len(x)).backward()
    preconditioner.step()
    return dense.gradients(model)


def fallbacks(preconditioner):
    metrics = preconditioner.metrics()
    return tuple(int(metrics[f"fallbacks/{rung}"]) for rung in RUNGS)


def told(preconditioner):
    return {row.parameter: row.fallback for row in preconditioner.explain().rows}


def poison(preconditioner, layer):
    """Spoil what the last renewal has made of a layer."""
    for stack in preconditioner.parts.groups:
        for member in stack.members:
            if member.layer.key.startswith(layer):
                for name in stack.results:
                    if name not in ("samples", "damping", "epoch gradient"):
                        stack.results[name][member.blocks] = math.nan


def near(actual, expected):
    dense.assert_equal(actual, expected)


def test_down_all_rungs_and_up_again():
    curvature = Failing()
    model, preconditioner = make(curvature, guard=natgrad.Guard(patience=2))
    reference, xs = Reference(), batches(7)
    V = reference.see(xs[0])
    near(take(model, preconditioner, xs[0]), V)
    last = reference.kfac.held["0"]

    curvature.inputs = 4  # the first layer, with its bias
    for x in xs[1:3]:  # the last good one, for two renewals
        fresh = reference.see(x)["2"]
        stale = dense.solve_eigen(
            reference.W["0"], last[0][0], reference.kfac.held["0"][0][1], DAMPING
        )  # of G all is well
        near(take(model, preconditioner, x), {"0": stale, "2": fresh})
        assert told(preconditioner) == {"0.weight": "last good", "0.bias": "last good", "2.weight": "", "2.bias": ""}
    assert fallbacks(preconditioner) == (2, 0, 0)

    for x in xs[3:5]:  # then the diagonal, of averages that go on
        fresh = reference.see(x)["2"]
        near(take(model, preconditioner, x), {"0": reference.diagonal("0"), "2": fresh})
        assert told(preconditioner)["0.weight"] == "diagonal"
    assert fallbacks(preconditioner) == (2, 2, 0)
    assert "now: diagonal" in " ".join(str(preconditioner.explain()).split())

    curvature.inputs = None
    for x in xs[5:]:
        near(take(model, preconditioner, x), reference.see(x))
    assert fallbacks(preconditioner) == (2, 2, 0)
    assert not any(told(preconditioner).values())
    assert preconditioner.metrics()["failed_decompositions"] == 4


def test_without_a_diagonal_the_gradient_takes_the_norm_that_v_has_had():
    curvature = Undiagonal()
    model, preconditioner = make(curvature, guard=natgrad.Guard(patience=0))
    reference, xs = Reference(), batches(5)
    for x in xs[:3]:
        near(take(model, preconditioner, x), reference.see(x))
    curvature.inputs = 4
    norm = reference.norms["0"]
    for x in xs[3:]:
        fresh = reference.see(x)["2"]
        reference.norms["0"] = norm  # of natural gradients only
        solved = take(model, preconditioner, x)
        near(solved, {"0": reference.grafted("0"), "2": fresh})
        assert float(solved["0"].norm()) == pytest.approx(norm)
    assert fallbacks(preconditioner) == (0, 0, 2)


def test_a_layer_that_fails_from_the_start():
    """The diagonal at once, and without one the plain gradient: there is no norm to give it."""
    for curvature, rung in ((Failing(), "diagonal"), (Undiagonal(), "grafted")):
        curvature.inputs = 4
        model, preconditioner = make(curvature)
        reference, xs = Reference(), batches(3)
        for x in xs[:2]:
            fresh = reference.see(x)["2"]
            expected = reference.diagonal("0") if rung == "diagonal" else reference.W["0"]
            near(take(model, preconditioner, x), {"0": expected, "2": fresh})
        assert int(preconditioner.metrics()[f"fallbacks/{rung}"]) == 2
        curvature.inputs = None
        near(take(model, preconditioner, xs[2]), reference.see(xs[2]))


@pytest.mark.cpu
@pytest.mark.parametrize("values", [{"QA": math.nan}, {"vG": math.inf}, {"vA": -1e3, "vG": 1.0}])
def test_curvature_that_is_unusable_falls_in_the_same_step_until_the_next_renewal(values):
    """V is not finite, or zero, or leads uphill."""
    model, preconditioner = make(refresh=natgrad.Refresh(factors=1, inverses=4))
    reference, xs = Reference(), batches(6)
    reference.kfac.inverses = lambda step: 4
    near(take(model, preconditioner, xs[0]), reference.see(xs[0]))
    held = preconditioner.parts.groups[1].results
    good = {name: own.clone() for name, own in held.items()}
    for name, value in values.items():
        held[name].fill_(value)
    for index, x in enumerate(xs[1:4]):
        fresh = reference.see(x)["0"]
        near(take(model, preconditioner, x), {"0": fresh, "2": reference.diagonal("2")})
        if index == 1:  # what has failed stays out, even if it looks well again
            held.update(good)
    assert fallbacks(preconditioner) == (0, 3, 0)
    for x in xs[4:]:
        near(take(model, preconditioner, x), reference.see(x))
    metrics = preconditioner.metrics()
    assert fallbacks(preconditioner) == (0, 3, 0)
    assert metrics["skipped_gradients"] == metrics["failed_decompositions"] == 0


def test_statistics_that_are_not_finite_for_long():
    curvature = Blind()
    model, preconditioner = make(curvature, guard=natgrad.Guard(patience=1))
    reference, xs = Reference(), batches(5)
    near(take(model, preconditioner, xs[0]), reference.see(xs[0]))
    curvature.outputs = 2  # the last layer
    last = reference.kfac.held["2"]
    for index, x in enumerate(xs[1:4]):
        sums, updates = reference.kfac.sums["2"], reference.kfac.updates["2"]
        fresh = reference.see(x)["0"]
        reference.kfac.sums["2"], reference.kfac.updates["2"] = sums, updates
        stale = dense.solve_eigen(reference.W["2"], *last[0], DAMPING)
        near(take(model, preconditioner, x), {"0": fresh, "2": reference.diagonal("2") if index else stale})
    assert fallbacks(preconditioner) == (1, 2, 0)
    assert preconditioner.metrics()["skipped_factors"] == 3
    curvature.outputs = None
    near(take(model, preconditioner, xs[4]), reference.see(xs[4]))
    assert fallbacks(preconditioner) == (1, 2, 0)


def test_a_bad_batch_between_two_renewals_makes_nothing_stale():
    curvature = Blind()
    model, preconditioner = make(curvature, refresh=natgrad.Refresh(factors=1, inverses=3))
    for index, x in enumerate(batches(8)):
        curvature.outputs = 2 if index in (2, 3) else None  # the last of them in the step of a renewal
        take(model, preconditioner, x)
    assert fallbacks(preconditioner) == (0, 0, 0)
    assert preconditioner.metrics()["skipped_factors"] == 2


def test_a_gradient_that_is_not_finite_gives_no_update_on_any_rung():
    curvature = Failing()
    model, preconditioner = make(curvature, guard=natgrad.Guard(patience=0))
    xs = batches(3)
    take(model, preconditioner, xs[0])
    for skip_step, broken in ((xs[1], None), (xs[2], 4)):
        curvature.inputs = broken
        model.zero_grad()
        (total_loss(model, skip_step) / len(skip_step)).backward()
        model[0].weight.grad[0, 0] = math.inf
        preconditioner.step()
        solved = dense.gradients(model)
        assert not solved["0"].any()
        assert solved["2"].any()
        assert solved["2"].isfinite().all()
    assert preconditioner.metrics()["skipped_gradients"] == 2


def test_no_gradient_is_no_trouble():
    model, preconditioner = make()
    for x in batches(3):
        model.zero_grad()
        (total_loss(model, x) * 0).backward()
        preconditioner.step()
        assert not any(own.any() for own in dense.gradients(model).values())
    assert fallbacks(preconditioner) == (0, 0, 0)


def test_the_clip_counts_what_stands_in():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    curvature = Failing()
    model, preconditioner = make(
        curvature, model=model, optimizer=optimizer, kl_clip=1e-4, guard=natgrad.Guard(patience=0)
    )
    reference, xs = Reference(), batches(2)
    reference.see(xs[0])
    take(model, preconditioner, xs[0])
    curvature.inputs = 4
    V = {"2": reference.see(xs[1])["2"], "0": reference.diagonal("0")}
    scale = dense.kl_scale(reference.W, V, dict.fromkeys(LAYERS, 1.0), 1e-4)
    assert scale < 1
    near(take(model, preconditioner, xs[1]), {name: scale * V[name] for name in LAYERS})
    assert float(preconditioner.metrics()["kl_scale"]) == pytest.approx(scale)


def test_without_the_ladder():
    """The last good one for ever, nothing of what is unusable, and plain gradients of what never succeeded."""
    off = natgrad.Guard(ladder=False, patience=0)
    curvature, reference, xs = Failing(), Reference(), batches(4)
    curvature.inputs = 4
    refresh = natgrad.Refresh(factors=1, inverses=lambda step: 1 if step < 3 else 100)
    model, preconditioner = make(curvature, guard=off, refresh=refresh)
    fresh = reference.see(xs[0])["2"]
    near(take(model, preconditioner, xs[0]), {"0": reference.W["0"], "2": fresh})
    curvature.inputs = None
    near(take(model, preconditioner, xs[1]), reference.see(xs[1]))
    curvature.inputs, last = 4, reference.kfac.held["0"]
    fresh = reference.see(xs[2])["2"]
    stale = dense.solve_eigen(reference.W["0"], last[0][0], reference.kfac.held["0"][0][1], DAMPING)
    near(take(model, preconditioner, xs[2]), {"0": stale, "2": fresh})
    poison(preconditioner, "2")
    solved = take(model, preconditioner, xs[3])
    assert solved["0"].any()
    assert not solved["2"].any()
    assert preconditioner.metrics()["skipped_gradients"] == 1
    assert fallbacks(preconditioner)[1:] == (0, 0)


@pytest.mark.parametrize("options", [{"patience": -1}, {"patience": 1.5}, {"patience": True}, {"ladder": 1}])
def test_what_a_guard_may_be(options):
    name = next(iter(options))
    with pytest.raises(ValueError, match=f"{name}={options[name]!r} is not allowed"):
        natgrad.Guard(**options)


@pytest.mark.parametrize("shape", [(3, 4, 5), (1, 4, 5), (2, 64, 128), (1, 64, 128), (3, 91, 91)])
@pytest.mark.parametrize("strided", [False, True])
def test_inner_products_of_blocks(shape, strided):
    X, Y = (torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(k)) for k in (0, 1))
    X = X.mT.contiguous().mT if strided else X
    torch.testing.assert_close(dots(X, Y), (X * Y).sum((1, 2)))
    Y[0, 1, 2] = torch.inf
    assert dots(X, Y).isfinite().tolist() == [False] + [True] * (shape[0] - 1)
