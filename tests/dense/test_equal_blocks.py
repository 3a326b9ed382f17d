"""Blocks whose running averages are equal to the last bit are decomposed once, and no other ones."""

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import natgrad
from natgrad import cusolver
from natgrad.capture.sightings import Sightings
from natgrad.renewal import equal
from tests import device

WIDTH = 32


class Attention(nn.Module):
    """Queries, keys and values of one tensor; keys and values are narrower, in a stack of their own.

    Without biases each matrix of a stack begins where vectors of a processor do: elsewhere MKL rounds in another way.
    """

    def __init__(self, *, key_bias=False):
        super().__init__()
        self.query, self.output = nn.Linear(WIDTH, 16, bias=False), nn.Linear(16, 4, bias=False)
        self.key, self.value = (nn.Linear(WIDTH, 8, bias=bias) for bias in (key_bias, False))

    def forward(self, x):
        x = torch.tanh(x)
        key, value = (part(x).repeat(1, 1, 2) for part in (self.key, self.value))
        return self.output(torch.tanh(scaled_dot_product_attention(self.query(x), key, value)))


class Counts:
    """How many matrices of a size have been decomposed, from scratch or beginning with the last result."""

    def __init__(self, monkeypatch, size=WIDTH):
        self.made = 0
        linalg, iterative = natgrad.linalg, natgrad.numerics.iterative
        for name in ("eigh", "damped_inverse"):
            monkeypatch.setattr(linalg, name, self.counted(getattr(linalg, name), size, 0))
            monkeypatch.setattr(iterative.Warm, name, self.counted(getattr(iterative.Warm, name), size, 1))

    def counted(self, original, size, place):
        def function(*args):
            if args[place].shape[-1] == size:
                self.made += len(args[place])
            return original(*args)

        return function


def build(curvature, model=None, **options):
    torch.manual_seed(0)
    model = (Attention() if model is None else model).double()
    refresh = natgrad.Refresh(factors=1, inverses=2)
    return model, natgrad.Preconditioner(model, curvature, **{"damping": 0.1, "refresh": refresh} | options)


def train(model, preconditioner, steps=range(4)):
    """Train some steps, and return all gradients."""
    found = []
    for step in steps:
        torch.manual_seed(step)
        x = torch.randn(8, 3, WIDTH, dtype=torch.float64).to(next(model.parameters()).dtype)
        model.zero_grad()
        model(x).square().sum(-1).mean().backward()
        preconditioner.step()
        found += [p.grad.clone() for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.05 * p.grad)
    return found


def apart(patch):
    patch.setattr(equal, "_is_worth", lambda job: False)


def state(preconditioner):
    blocks = preconditioner.state_dict()["blocks"]
    return [blocks[key][name] for key in sorted(blocks) for name in sorted(blocks[key])]


# An accelerator rounds otherwise in batches of another size.
ROUNDING = {"rtol": 0, "atol": 0} if device.name() == "cpu" else {"rtol": 1e-9, "atol": 1e-12}
FORMS = {
    "eigen": ({}, 1, 3),
    "iterative": ({"form": "iterative"}, 1, 3),
    "newton-schulz": ({"form": "newton-schulz", "pi": False}, 1, 3),
    "inverse": ({"form": "inverse", "pi": False}, 1, 3),
    "inverse, balanced with G": ({"form": "inverse"}, 3, 3),
    "inputs alone": ({"sides": "a"}, 1, 3),
}


@pytest.mark.parametrize("placement", ["comm-opt", "background"])
@pytest.mark.parametrize("name", FORMS)
def test_equal_factors_are_decomposed_once(name, placement, monkeypatch):
    """In each of two renewals."""
    options, fewer, every = FORMS[name]
    counts = Counts(monkeypatch)
    model, preconditioner = build(natgrad.KFAC(**options), placement=placement)
    found, products = train(model, preconditioner), counts.made
    with monkeypatch.context() as patch:
        apart(patch)
        model, twin = build(natgrad.KFAC(**options), placement=placement)
        expected = train(model, twin)
    assert (products, counts.made - products) == (2 * fewer, 2 * every)
    for left, right in zip(found + state(preconditioner), expected + state(twin), strict=True):
        torch.testing.assert_close(left, right, **ROUNDING)


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_equal_factors_in_narrow_dtypes(dtype, monkeypatch):
    precision = natgrad.Precision(factors=dtype, solve=dtype)
    model, preconditioner = build(natgrad.KFAC(form="inverse", pi=False), precision=precision)
    found = train(model, preconditioner)
    apart(monkeypatch)
    model, twin = build(natgrad.KFAC(form="inverse", pi=False), precision=precision)
    expected = train(model, twin)
    assert all(map(torch.equal, found + state(preconditioner), expected + state(twin)))


def test_it_is_enough_that_averages_are_equal(monkeypatch):
    """However they came to be: sums that were not shared, and a checkpoint, make no difference."""
    counts = Counts(monkeypatch)
    monkeypatch.setattr(Sightings, "number", lambda *_: None)
    model, preconditioner = build(natgrad.KFAC())
    train(model, preconditioner)
    assert counts.made == 2
    preconditioner.detach()
    model, resumed = build(natgrad.KFAC(), model)
    resumed.load_state_dict(preconditioner.state_dict())
    train(model, resumed, range(4, 6))
    assert counts.made == 3


@pytest.mark.parametrize("entry", ["A", "weight"])
def test_what_differs_in_one_bit_is_made_by_itself(entry, monkeypatch):
    """Here between keys and values, off the diagonal; queries still are as keys."""
    model, preconditioner = build(natgrad.KFAC())
    train(model, preconditioner, range(4))
    saved = preconditioner.state_dict()
    preconditioner.detach()
    changed = saved["blocks"]["value.weight"][entry]
    place = (0, 1, 0) if entry == "A" else (0,)
    changed[place] = torch.nextafter(changed[place], torch.ones_like(changed[place]) * 9)
    if entry == "A":
        changed[0, 0, 1] = changed[place]
    counts = Counts(monkeypatch)
    model, resumed = build(natgrad.KFAC(), model)
    resumed.load_state_dict(saved)
    train(model, resumed, range(4, 5))
    assert counts.made == 2


def test_another_damping_or_bias_is_another_inverse(monkeypatch):
    counts = Counts(monkeypatch)
    by_kind = natgrad.damping.ByKind(0.1, layers={"value": 2.0})
    train(*build(natgrad.KFAC(form="inverse", pi=False), damping=by_kind), range(1))
    assert counts.made == 2
    train(*build(natgrad.KFAC(), Attention(key_bias=True)), range(1))
    assert counts.made == 2 + 1


def test_blocks_equal_to_one_that_fails_keep_what_they_had(monkeypatch):
    model, preconditioner = build(natgrad.KFAC(), guard=natgrad.Guard(limit=9))
    train(model, preconditioner, range(2))
    before = state(preconditioner)
    eigh = torch.linalg.eigh

    def failing(matrices, **options):
        if matrices.shape[-1] == WIDTH:
            raise torch.linalg.LinAlgError("did not converge")
        return eigh(matrices, **options)

    monkeypatch.setattr(torch.linalg, "eigh", failing)
    monkeypatch.setattr(cusolver, "eigh", lambda matrices: None)
    train(model, preconditioner, range(2, 3))
    blocks = preconditioner.state_dict()["blocks"]
    names = [(key, name) for key in sorted(blocks) for name in sorted(blocks[key])]
    kept = dict(zip(names, before, strict=True))
    equal = {key for key in blocks if torch.equal(blocks[key]["QA"], kept[key, "QA"])}
    assert equal == {"query.weight", "key.weight", "value.weight"}
    assert not any(torch.equal(blocks[key]["QG"], kept[key, "QG"]) for key in blocks)
    assert preconditioner.metrics()["failed_decompositions"] == 3
