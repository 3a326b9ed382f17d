"""What each dtype costs in accuracy, against float64; and what no choice may touch."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import natgrad
from natgrad.distributed import WireFormat
from natgrad.linalg import damped_inverse
from natgrad.specs import TensorSpec
from natgrad.state.tensors import StateTensors
from tests import device

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 8, 3, groups=2), nn.Tanh(), nn.Flatten(1), nn.Linear(128, 24),
        nn.Tanh(), nn.Linear(24, 10),
    )  # fmt: skip


def natural_gradients(precision, form="eigen", *, steps=4, scale=1.0, model=None, decay=0.95, dtype=FP32):
    """The last preconditioned gradients of some steps over fixed weights, by parameter; the loss times `scale`."""
    model = (network() if model is None else copy.deepcopy(model)).to(dtype)
    preconditioner = natgrad.Preconditioner(
        model,
        natgrad.KFAC(form=form, factor_decay=decay),
        damping=0.01 * scale**2,
        precision=precision,
        refresh=natgrad.Refresh(factors=1, inverses=1),
    )
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(64, 3, 8, 8, generator=generator, dtype=FP64).to(dtype)
        y = torch.randint(10, (64,), generator=generator)
        model.zero_grad()
        (cross_entropy(model(x), y) * scale).backward()
        preconditioner.step()
    return {name: p.grad.double() for name, p in model.named_parameters()}, preconditioner


def worst(actual, expected):
    return max(float((actual[name] - value).norm() / value.norm()) for name, value in expected.items())


# Bounds on the relative error (Frobenius) of the natural gradient, the worst parameter's (docs/measurements.md).
CHOICES = {
    "float32": (natgrad.Precision(), 1e-4),
    "factors bfloat16": (natgrad.Precision(factors="bfloat16"), 0.04),
    "factors float16": (natgrad.Precision(factors=FP16), 0.005),
    "solve bfloat16": (natgrad.Precision(solve=BF16), 0.04),
    "solve float16": (natgrad.Precision(solve=FP16), 0.005),
    "both bfloat16": (natgrad.Precision(factors=BF16, solve=BF16), 0.06),
    "both float16": (natgrad.Precision(factors=FP16, solve=FP16), 0.01),
}


FORMS = ("eigen", "inverse")


@pytest.fixture(scope="module")
def references():
    return {form: natural_gradients(natgrad.Precision(factors=FP64, solve=FP64), form, dtype=FP64)[0] for form in FORMS}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("choice", CHOICES)
def test_accuracy(references, form, choice):
    precision, tolerance = CHOICES[choice]
    error = worst(natural_gradients(precision, form)[0], references[form])
    assert error < tolerance
    # What is narrow does round: a choice that changed nothing would be one that is not heeded.
    assert choice == "float32" or error > 1e-4


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("scale", [1e-5, 1e4])
def test_tiny_and_huge_gradients_lose_nothing(references, form, choice, scale):
    """Entries of G near 1e-14 or 1e+4, far outside of what float16 holds."""
    precision, tolerance = CHOICES[choice]
    solved, preconditioner = natural_gradients(precision, form, scale=scale)
    # (G ⊗ A + γI)⁻¹ W of c² G, c² γ and c W.
    assert worst({name: value * scale for name, value in solved.items()}, references[form]) < tolerance
    assert preconditioner.metrics()["failed_decompositions"] == 0


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("narrow", [BF16, FP16])
def test_accumulation_and_decompositions_are_never_narrow(monkeypatch, form, narrow):
    seen = []

    def watched(function):
        def call(matrices, *args, **kwargs):
            seen.append(matrices.dtype)
            return function(matrices, *args, **kwargs)

        return call

    for name in ("eigh", "cholesky_ex"):
        monkeypatch.setattr(torch.linalg, name, watched(getattr(torch.linalg, name)))
    for name in ("addmm_", "baddbmm_"):
        monkeypatch.setattr(torch.Tensor, name, watched(getattr(torch.Tensor, name)))
    _, preconditioner = natural_gradients(
        natgrad.Precision(factors=narrow, solve=narrow, wire=narrow), form, model=network(), dtype=BF16, steps=1
    )
    assert set(seen) == {FP32}
    kept = preconditioner.state_dict()["blocks"]["5.weight"]
    matrices = [value for value in kept.values() if value.ndim == 3]
    assert {value.dtype for value in matrices} == ({BF16} if narrow == BF16 else {FP32})  # float16 ones are scaled back
    assert all(value.dtype in (FP32, torch.bool, torch.int32) for value in kept.values() if value.ndim < 3)


def test_what_rounding_leaves_indefinite_is_inverted_all_the_same():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(500, 16, generator=generator) @ torch.randn(16, 300, generator=generator)
    factor = (rows.relu().T @ rows.relu() / 500)[None]
    kept = factor.to(BF16).float()
    values, vectors = torch.linalg.eigh(kept[0].double())
    damping = torch.tensor([1e-3 * float(factor[0].diagonal().mean())])
    assert values[0] < -damping[0]
    inverse, fine = damped_inverse(kept.clone(), damping)
    expected = vectors @ torch.diag(1 / (values.clamp(min=0) + damping[0])) @ vectors.T
    assert bool(fine)
    assert float((inverse[0] - expected).norm() / expected.norm()) < 1e-4
    broken, fine = damped_inverse(torch.full((1, 3, 3), float("nan")), torch.ones(1))
    assert not fine
    assert not broken.any()


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_narrow_factors_take_half_the_memory(dtype):
    wide, narrow = (
        natgrad.Preconditioner(network(), precision=natgrad.Precision(factors=d, solve=d)) for d in (FP32, dtype)
    )
    memory = [sum(row.bytes for row in each.explain().rows) for each in (wide, narrow)]
    assert 0.5 < memory[1] / memory[0] < 0.52  # eigenvalues stay wide


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", [FP64, FP32, BF16, FP16])
@pytest.mark.parametrize("size", [1e-25, 1e-10, 1.0, 1e10, 1e25])
def test_what_is_kept_comes_back(dtype, size):
    specs = [TensorSpec("A", (5, 7)), TensorSpec("v", (7,))]
    kept = StateTensors(specs, 3, dtype)
    values = {spec.name: torch.randn(2, *spec.shape, dtype=FP64) * size for spec in specs}
    for name, value in values.items():
        kept.write(name, slice(1, 3), value)
    tolerances = {FP64: 0, FP32: 1e-7, BF16: 4e-3, FP16: 5e-4}
    for name, value in values.items():
        error = (kept.read(name, slice(1, 3)).double() - value).abs().max() / value.abs().max()
        assert error <= (tolerances[dtype] if name == "A" else min(tolerances[dtype], 1e-7))
        assert not kept.read(name, torch.tensor([0])).any()
    again = StateTensors(specs, 3, dtype)
    for name in kept:
        again.write(name, slice(None), kept.read(name, slice(None)))
        assert torch.equal(again.read(name, slice(None)), kept.read(name, slice(None)))


@pytest.mark.parametrize(
    ("dtype", "wire"),
    [(FP64, FP64), (FP64, FP32), (FP64, BF16), (FP64, FP16), (FP32, FP32), (FP32, BF16), (FP32, FP16)],
)
def test_messages(dtype, wire):
    layout = WireFormat(wide=3, narrow=1300, dtype=dtype, wire=wire)
    wide = torch.rand(2, 3, dtype=dtype) * 1e30
    # The rows of a message may differ by any factor: each has a scale.
    sizes = torch.tensor([[1e-25], [1e25]], dtype=dtype)
    values = torch.randn(2, 1300, dtype=dtype) * sizes
    message = layout.empty(2, torch.device(device.name()))
    layout.write(message, values, wide)
    arrived, numbers = layout.read(message.clone())
    assert torch.equal(arrived, wide)
    error = ((numbers - values).abs() / sizes).max()
    assert error <= (0 if wire == dtype else {FP32: 1e-6, BF16: 2e-2, FP16: 2e-3}[wire])
    expected = 3 * dtype.itemsize + 1300 * wire.itemsize + (4 if wire == FP16 else 0)
    assert 0 <= layout.size - expected < 8


def test_what_is_not_finite_arrives_as_such_and_harms_no_neighbour():
    layout = WireFormat(wide=1, narrow=512, dtype=FP32, wire=FP16)
    values = torch.full((1, 512), 1e-10)
    values[0, 3], values[0, 4] = float("nan"), float("inf")
    message = layout.empty(1, torch.device(device.name()))
    layout.write(message, values, torch.zeros(1, 1))
    _, numbers = layout.read(message)
    assert not numbers[0, 3].isfinite()
    assert not numbers[0, 4].isfinite()
    assert torch.allclose(numbers[0, 5:], values[0, 5:], rtol=1e-3, atol=0)


def test_state_moves_between_precisions():
    model = network()
    _, fine = natural_gradients(natgrad.Precision(), model=model)
    for precision in (natgrad.Precision(factors=BF16, solve=BF16), natgrad.Precision(factors=FP16, solve=FP16)):
        other, back = (natgrad.Preconditioner(copy.deepcopy(model), precision=precision) for _ in range(2))
        other.load_state_dict(fine.state_dict())
        there = other.state_dict()
        back.load_state_dict(there)
        for key, block in fine.state_dict()["blocks"].items():
            for name, value in block.items():
                stored = there["blocks"][key][name].double()
                assert (stored - value.double()).abs().max() <= 5e-3 * value.double().abs().max()
                assert torch.equal(back.state_dict()["blocks"][key][name], there["blocks"][key][name])


if __name__ == "__main__":  # the table of docs/measurements.md
    exact = {
        form: natural_gradients(natgrad.Precision(factors=FP64, solve=FP64), form, dtype=FP64)[0] for form in FORMS
    }
    for choice, (precision, _) in CHOICES.items():
        errors = [f"{worst(natural_gradients(precision, form)[0], exact[form]):.0e}" for form in FORMS]
        print(f"| {choice} | {' | '.join(errors)} |")
