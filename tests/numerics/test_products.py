"""Products in full, and the user's settings as they were."""

import pytest
import torch
from torch import nn

import natgrad
from natgrad.linalg.device import full_products

BF16, FP32 = torch.bfloat16, torch.float32
CPU, GPU = torch.device("cpu"), torch.device("cuda")
MATMUL = torch.backends.mkldnn.matmul


@pytest.fixture(params=["highest", "high", "medium"])
def allowed(request):
    """What the user allows float32 products to be."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(request.param)
    yield request.param
    torch.set_float32_matmul_precision(before)


def error():
    """The relative error of products of numbers that neither bfloat16 nor TF32 can hold."""
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for shape in ((8, 8), (100, 300), (300, 300), (3, 200, 150)):
        x = torch.randn(shape, generator=generator)
        exact = x.double().mT @ x.double()
        worst = max(worst, float(((x.mT @ x).double() - exact).norm() / exact.norm()))
        out = torch.ones_like(exact, dtype=FP32)
        (torch.baddbmm if x.ndim == 3 else torch.addmm)(out, x.mT, x, beta=1.0, alpha=0.5, out=out)
        worst = max(worst, float((out.double() - 1 - exact / 2).norm() / exact.norm()))
    return worst


@pytest.mark.cpu
def test_products_are_full_and_settings_return(allowed):
    places = (MATMUL, torch.backends.cuda.matmul, torch.backends.cudnn.conv)
    chosen = [place.fp32_precision for place in places]
    with full_products(CPU):
        assert MATMUL.fp32_precision in ("none", "ieee")
        assert [place.fp32_precision for place in places[1:]] == chosen[1:]
        assert error() < 1e-6
    assert [place.fp32_precision for place in places] == chosen
    with full_products(GPU):
        assert [place.fp32_precision for place in places] == [chosen[0], "ieee", "ieee"]
    with pytest.raises(RuntimeError), full_products(CPU):
        raise RuntimeError
    assert [place.fp32_precision for place in places] == chosen


@pytest.mark.cpu
def test_no_autocast_inside():
    with torch.autocast("cpu", BF16):
        with full_products(CPU):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == FP32
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == BF16


@pytest.mark.cpu
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_gram_products_are_full(sharing, allowed):
    model = nn.Linear(256, 128)
    preconditioner = natgrad.Preconditioner(model, natgrad.KFAC(sharing=sharing, factor_decay=0.0))
    inputs = 1 + 2.0**-12 * torch.randn(300, 256, generator=torch.Generator().manual_seed(0))
    model(inputs).square().mean().backward()
    preconditioner.step()
    (block,) = preconditioner.state_dict()["blocks"].values()
    rows = torch.cat((inputs, torch.ones(300, 1)), 1).double()
    exact = rows.T @ rows / 300
    assert (block["A"].double() - exact).abs().max() < 1e-5  # bfloat16: 2e-4
