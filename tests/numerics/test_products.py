"""Products in full, by whatever routine, and the user's settings as they were."""

import pytest
import torch
from torch import nn

import natgrad
from natgrad.numerics import products
from natgrad.numerics.products import full_products, plain_products, quick_products

BF16, FP32 = torch.bfloat16, torch.float32
CPU, GPU = torch.device("cpu"), torch.device("cuda")
MATMUL = torch.backends.mkldnn.matmul


@pytest.fixture(params=["found", "none"])
def quicker(request, monkeypatch):
    """Whether a routine quicker than torch's own is taken, where this processor has one."""
    if request.param == "none":
        monkeypatch.setattr(products, "_onednn_is_full", lambda: False)
    return products._onednn_is_full()


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
def test_products_are_full_and_settings_return(quicker, allowed):
    places = (MATMUL, torch.backends.cuda.matmul, torch.backends.cudnn.conv)
    chosen = [place.fp32_precision for place in places]
    with full_products(CPU):
        assert MATMUL.fp32_precision in ("none", "ieee")
        assert [place.fp32_precision for place in places[1:]] == chosen[1:]
        assert error() < 1e-6
        with quick_products(CPU):
            assert MATMUL.fp32_precision == "bf16" or not quicker
            assert error() < 1e-6
        assert MATMUL.fp32_precision in ("none", "ieee")
    assert [place.fp32_precision for place in places] == chosen
    with full_products(GPU):
        assert [place.fp32_precision for place in places] == [chosen[0], "ieee", "ieee"]
    with pytest.raises(RuntimeError), full_products(CPU):
        raise RuntimeError
    assert [place.fp32_precision for place in places] == chosen


def test_quick_products_are_what_the_user_allows(quicker, allowed):
    before = MATMUL.fp32_precision
    with quick_products(CPU):
        assert MATMUL.fp32_precision == ("bf16" if quicker and allowed == "highest" else before)
        if allowed == "highest":
            assert error() < 1e-6
    assert MATMUL.fp32_precision == before
    for there, size in ((GPU, 1e9), (CPU, 1e5)):  # elsewhere, and where the call would cost more than it saves
        with quick_products(there, size):
            assert MATMUL.fp32_precision == before


@pytest.mark.parametrize("there", [CPU, GPU])
def test_small_products_among_large_ones_are_left_to_torch(there, quicker, allowed):
    before = MATMUL.fp32_precision
    for outer, inner in ((1e9, 1e5), (1e9, 1e8), (1e5, 1e4)):
        with quick_products(CPU, outer):
            around = MATMUL.fp32_precision
            with plain_products(there, inner):
                plain = inner < 1e6 and there == CPU and quicker and around == "bf16"
                assert MATMUL.fp32_precision == ("ieee" if plain else around)
                assert error() < 1e-6 or allowed != "highest"
            assert MATMUL.fp32_precision == around
    assert MATMUL.fp32_precision == before


@pytest.mark.cpu
def test_no_autocast_inside():
    with torch.autocast("cpu", BF16):
        with full_products(CPU):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == FP32
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == BF16


@pytest.mark.cpu
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_gram_products_are_full(sharing, quicker, allowed):
    model = nn.Linear(256, 128)
    preconditioner = natgrad.Preconditioner(model, natgrad.KFAC(sharing=sharing, factor_decay=0.0))
    inputs = 1 + 2.0**-12 * torch.randn(300, 256, generator=torch.Generator().manual_seed(0))
    model(inputs).square().mean().backward()
    preconditioner.step()
    (block,) = preconditioner.state_dict()["blocks"].values()
    rows = torch.cat((inputs, torch.ones(300, 1)), 1).double()
    exact = rows.T @ rows / 300
    assert (block["A"].double() - exact).abs().max() < 1e-5  # bfloat16: 2e-4


def test_a_processor_that_does_use_bfloat16_is_found_out(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert not products._onednn_is_full.__wrapped__()


def test_the_users_defaults_do_not_mislead_the_trial(monkeypatch):
    trials, full = [], torch.full

    def seen(*args, **options):
        trials.append(full(*args, **options))
        return trials[-1]

    monkeypatch.setattr(torch, "full", seen)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    found = products._onednn_is_full.__wrapped__()
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        assert products._onednn_is_full.__wrapped__() == found
    finally:
        torch.set_default_dtype(FP32)
        torch.set_default_device(None)
    assert {(trial.dtype, trial.device) for trial in trials} == {(FP32, CPU)}


def test_settings_return_where_threads_overlap(quicker):
    before = MATMUL.fp32_precision
    one, other = quick_products(CPU), quick_products(CPU)
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    other.__exit__(None, None, None)
    assert MATMUL.fp32_precision == before


def test_what_multiplies_in_a_thread_is_left_alone():
    """A renewal in the background would else take the routine that the steps beside it happen to set."""
    model = nn.Linear(8, 4)
    preconditioner = natgrad.Preconditioner(
        model,
        natgrad.KFAC(form="iterative"),
        placement=natgrad.Placement(name="background", staleness=2),
        refresh=natgrad.Refresh(factors=1, inverses=4),
    )
    before, quick = MATMUL.fp32_precision, []
    for _ in range(10):
        model.zero_grad()
        model(torch.randn(16, 8)).square().mean().backward()
        preconditioner.step()
        with quick_products(CPU):
            quick.append(MATMUL.fp32_precision != before)
    assert any(quick) == products._onednn_is_full()
    assert not all(quick)
    assert MATMUL.fp32_precision == before
