"""Every layer type and option: the natural gradient equals the dense solve with explicit Kronecker products."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

import natgrad
from tests.dense import reference as dense
from tests.dense.drawn import (
    DAMPING,
    DRAWN,
    TOLERANCE,
    assert_preconditioned,
    convolutions,
    curvatures,
    drawn_model,
    dtypes,
    linears,
    total_loss,
    transposed,
)
from tests.dense.methods import Run
from tests.device import here

sharings = st.sampled_from(["expand", "reduce"])
# What is drawn for each curvature, beside the options that it has in `METHODS`.
OPTIONS = {
    "eigen": curvatures,
    "diagonal": st.builds(lambda options, most: options | {"max_factor_size": most}, curvatures, st.integers(1, 9)),
    "iterative": st.builds(lambda sharing: {"sharing": sharing}, sharings),
    "inputs": st.builds(
        lambda options, most: options | {"max_factor_size": most}, curvatures, st.sampled_from([None, 2])
    ),
    "ekfac": st.builds(lambda sharing: {"sharing": sharing}, sharings),
    "rank one": st.builds(lambda sharing: {"sharing": sharing}, sharings),
    "sngd": st.just({}),
    "hylo kid": st.just({}),
}
every_method = pytest.mark.parametrize("method", OPTIONS)


def follow(drawn, method, options, dtype, seed):
    """Three steps of a drawn layer beside the reference; the first of K-FAC also in float32."""
    dtype = dtype if method in ("eigen", "inverse", "diagonal") else torch.float64
    model, shape, samples = drawn_model(drawn, seed, dtype)
    run = Run(method, model, drawn=options, damping=DAMPING[dtype])
    for _ in range(3 if dtype == torch.float64 else 1):
        x = torch.randn(shape, dtype=dtype)
        if isinstance(drawn[0], dense.TRANSPOSED):
            assume(model(x).any())  # else its positions meet the zeros of the stride only
        model.zero_grad()
        (total_loss(model(x), samples) / samples).backward()
        raw = {name: W.clone() for name, W in dense.gradients(model).items()}
        run.preconditioner.step()
        rows = run.rows(lambda model, x=x: total_loss(model(x.double()), samples))
        run.compare(rows, raw, tolerance=1e-8 if dtype == torch.float64 else TOLERANCE[dtype])


def drawn_test(method, layers):
    @DRAWN
    @given(layers, OPTIONS[method], dtypes, st.integers(0, 99))
    def run(drawn, options, dtype, seed):
        follow(drawn, method, options, dtype, seed)

    run()


@every_method
def test_linear(method):
    drawn_test(method, linears())


@every_method
def test_convolution(method):
    drawn_test(method, convolutions())


@every_method
def test_transposed_convolution(method):
    drawn_test(method, transposed())


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.Conv3d])
def test_a_convolution_without_a_batch_dimension_is_one_sample(kind):
    torch.manual_seed(0)
    ndim = (nn.Conv1d, nn.Conv2d, nn.Conv3d).index(kind) + 1
    model = kind(2, 3, 2).double()
    assert_preconditioned(model, torch.randn(2, *[4] * ndim).double(), {}, samples=1)


def test_inplace_activations_do_not_spoil_the_rows():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 1)).double()
    reference, x = dense.twin(model), torch.randn(3, 2, 5, 5).double()
    reference[1].inplace = False
    preconditioner = natgrad.Preconditioner(model, natgrad.KFAC(), damping=0.3)
    (total_loss(model(x), 3) / 3).backward()
    preconditioner.step()
    rows = dense.capture(reference, lambda model: total_loss(model(x), 3))
    dense.assert_equal(dense.gradients(model), dense.KFAC(damping=0.3).step(rows))


@pytest.mark.parametrize("form", ["eigen", "inverse"])
def test_bfloat16_models_have_float32_factors(form):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(1), nn.Linear(36, 3)).bfloat16()
    assert_preconditioned(model, torch.randn(16, 2, 5, 5).bfloat16(), {"form": form}, tolerance=0.03)
    assert model[0].weight.grad.dtype == torch.bfloat16


def test_float64_factors_and_solves_of_a_float32_model():
    errors = {}
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
        reference, x = dense.twin(model), torch.randn(20, 8)
        precision = natgrad.Precision(factors=dtype, solve=dtype)
        preconditioner = natgrad.Preconditioner(model, damping=1e-7, precision=precision)
        (total_loss(model(x), 20) / 20).backward()
        raw = {name: W.clone() for name, W in dense.gradients(model).items()}
        preconditioner.step()
        rows = dense.capture(reference, lambda model, x=x: total_loss(model(x.double()), 20))
        expected = dense.KFAC(damping=1e-7).step(rows, raw)["2"]
        errors[dtype] = dense.relative_error(dense.gradients(model)["2"], expected)
        assert model[2].weight.grad.dtype == torch.float32
    assert errors[torch.float64] < errors[torch.float32] / 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layer", [lambda: nn.Linear(2, 2), lambda: nn.Conv1d(1, 2, 2)])
def test_positions_are_pooled_in_full_precision(dtype, layer):
    """70,000 positions are more than float16 holds, and bfloat16 rounds their number."""
    model = layer().to(dtype)
    x = torch.ones(1, 70_000, 2) if isinstance(model, nn.Linear) else torch.ones(1, 1, 70_000)
    preconditioner = natgrad.Preconditioner(model, natgrad.KFAC(sharing="reduce", factor_decay=0.0))
    model(x.to(dtype)).mean().backward()
    preconditioner.step()
    assert torch.allclose(here(preconditioner.state_dict()["blocks"])["weight"]["A"], torch.ones(1, 3, 3), rtol=1e-6)


def test_a_lazy_layer_is_covered_once_its_sizes_are_known():
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.Linear(4, 2))
    preconditioner = natgrad.Preconditioner(model)
    assert "lazy" in preconditioner.explain().rows[0].reason
    for _ in range(2):
        model(torch.randn(5, 3)).square().mean().backward()
        preconditioner.step()
    assert not any(row.reason for row in preconditioner.explain().rows)
    assert preconditioner.metrics()["factor_updates"] == 1


@pytest.mark.parametrize("elements", [0, 1])
def test_degenerate_batches(elements):
    model = nn.Linear(3, 2).double()
    preconditioner = natgrad.Preconditioner(model, damping=0.3)
    if elements:
        assert_preconditioned(nn.Linear(3, 2).double(), torch.randn(1, 3).double(), {})
    else:
        model(torch.randn(0, 3).double()).sum().backward()
        preconditioner.step()
        assert all(not p.grad.any() for p in model.parameters())


def test_nested_tensors_are_refused_in_the_forward_pass():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    natgrad_of_it = natgrad.Preconditioner(model)
    x = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(5, 3)], layout=torch.jagged)
    with pytest.raises(natgrad.NatgradError, match=r"the input of 0 is a nested tensor"):
        model(x)
    with torch.no_grad():
        assert model(x).is_nested
    assert natgrad_of_it.metrics()["step"] == 0
