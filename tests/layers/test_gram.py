"""The Gram products against what they mean: explicit rows and explicit patches, in float64."""

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from natgrad.layers import gram
from natgrad.layers.gram.lags import add_lag_gram_
from natgrad.layers.gram.windows import Window


@dataclass(frozen=True)
class Convolution:
    """A convolution to draw: groups of channels over maps of some sizes."""

    batch: int
    groups: int
    per_group: int
    sizes: tuple[int, ...]
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]

    @property
    def geometry(self) -> dict[str, tuple]:
        names = ("kernel_size", "stride", "padding", "dilation")
        return {name: getattr(self, name) for name in names}

    def maps(self, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        shape = (self.batch, self.groups * self.per_group, *self.sizes)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


@st.composite
def convolutions(draw: st.DrawFn, strides: tuple[int, ...] = (1, 2, 3)) -> Convolution:
    ndim = draw(st.integers(1, 3))
    most = {1: 9, 2: 7, 3: 5}[ndim]
    dims = []
    while len(dims) < ndim:
        size, kernel, step = draw(st.integers(1, most)), draw(st.integers(1, 4)), draw(st.sampled_from(strides))
        sides, spread = (draw(st.integers(0, 3)), draw(st.integers(0, 3))), draw(st.integers(1, 3))
        short = spread * (kernel - 1) + 1 - size - sum(sides)
        if short > 0:  # the window must fit in somewhere
            sides = (sides[0], sides[1] + short)
        dims.append((size, kernel, step, sides, spread))
    sizes, kernel_size, stride, padding, dilation = zip(*dims, strict=True)
    groups, per_group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    batch = draw(st.integers(0, 3))
    return Convolution(batch, groups, per_group, sizes, kernel_size, stride, padding, dilation)


def explicit_patches(maps: Tensor, case: Convolution) -> Tensor:
    """Every patch, element by element: [n, B T, i]. (torch's unfold knows two dimensions and equal padding only.)"""
    padded = F.pad(maps, [side for sides in reversed(case.padding) for side in sides])
    starts = [
        range(0, size - spread * (kernel - 1), step)
        for size, kernel, step, spread in zip(
            padded.shape[2:], case.kernel_size, case.stride, case.dilation, strict=True
        )
    ]
    offsets = list(itertools.product(*(range(kernel) for kernel in case.kernel_size)))
    patches = [
        torch.stack(
            [
                padded[(..., *(at + spread * by for at, spread, by in zip(start, case.dilation, offset, strict=True)))]
                for offset in offsets
            ],
            2,
        )
        for start in itertools.product(*starts)
    ]  # T times [B, C, Πk]
    return (
        torch.stack(patches, 1)  # [B, T, C, Πk]
        .unflatten(2, (case.groups, case.per_group))
        .movedim(2, 0)
        .reshape(case.groups, len(maps) * len(patches), case.per_group * len(offsets))
    )


def with_ones(rows: Tensor, bias: bool) -> Tensor:
    return torch.cat((rows, torch.ones_like(rows[..., :1])), -1) if bias else rows


settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def symmetric(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
    return values + values.mT


def mirrored(out: Tensor) -> Tensor:
    """What is above the diagonal is undefined."""
    return out.tril() + out.tril(-1).mT


def assert_gram(out: Tensor, start: Tensor, rows: Tensor, scale: float) -> None:
    out = mirrored(out)
    expected = scale * rows.mT @ rows + start
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


@given(
    stack=st.sampled_from([(), (1,), (3,)]),
    count=st.integers(0, 5),
    width=st.sampled_from([1, 2, 7, 64, 65, 130]),
    bias=st.booleans(),
    layout=st.sampled_from(["rows", "columns", "strided"]),
    scale=st.sampled_from([1.0, 0.25, -2.0]),
)
def test_row_gram_is_the_product_of_the_rows(stack, count, width, bias, layout, scale):
    values = torch.randn((*stack, count, 2 * width), dtype=torch.float64)
    rows = values[..., ::2] if layout == "strided" else values[..., :width]
    if layout == "columns":
        rows = rows.mT.contiguous().mT
    start = symmetric(*stack, width + bias, width + bias)
    out = start.clone()
    gram.add_row_gram_(out, rows, scale=scale, bias=bias)
    assert_gram(out, start, with_ones(rows, bias), scale)


@given(
    batch=st.integers(0, 3),
    groups=st.integers(1, 3),
    channels=st.sampled_from([1, 3, 66]),
    sizes=st.lists(st.integers(1, 4), max_size=3),
    channels_last=st.booleans(),
)
def test_channel_gram_sums_over_samples_and_positions(batch, groups, channels, sizes, channels_last):
    maps = torch.randn(batch, groups * channels, *sizes, dtype=torch.float64)
    if channels_last:
        maps = maps.movedim(1, -1).contiguous().movedim(-1, 1)
    rows = maps.reshape(batch, groups, channels, math.prod(sizes)).permute(1, 0, 3, 2).flatten(1, 2)
    start = symmetric(groups, channels, channels)
    out = start.clone()
    gram.add_channel_gram_(out, maps, scale=0.5)
    assert_gram(out, start, rows, 0.5)


LAYOUTS = st.sampled_from(["contiguous", "channels_last", "strided"])


def laid_out(maps: Tensor, layout: str) -> Tensor:
    if layout == "channels_last":
        return maps.movedim(1, -1).contiguous().movedim(-1, 1)
    return maps.repeat_interleave(2, -1)[..., ::2] if layout == "strided" else maps


@given(case=convolutions(), bias=st.booleans(), layout=LAYOUTS, seed=st.integers(0, 9))
def test_patch_gram_is_the_product_of_the_patches(case, bias, layout, seed):
    maps = case.maps(seed)
    patches = with_ones(explicit_patches(maps, case), bias)
    start = symmetric(case.groups, patches.shape[-1], patches.shape[-1])
    out = start.clone()
    gram.add_patch_gram_(out, laid_out(maps, layout), Window(**case.geometry), bias=bias, scale=0.25)
    assert_gram(out, start, patches, 0.25)


@given(
    case=convolutions(strides=(1,)),
    layout=LAYOUTS,
    piece=st.sampled_from([1, 50, 1 << 18]),
    seed=st.integers(0, 9),
)
def test_lags_give_the_product_of_the_patches(case, layout, piece, seed):
    assume(case.batch > 0)
    maps = case.maps(seed)
    patches = explicit_patches(maps, case)
    start = symmetric(case.groups, patches.shape[-1], patches.shape[-1])
    out = start.clone()
    add_lag_gram_(out, laid_out(maps, layout), Window(**case.geometry), case.groups, scale=-0.5, piece=piece)
    assert_gram(out, start, patches, -0.5)


@given(case=convolutions(), piece=st.sampled_from([1, 50, 1 << 18]), seed=st.integers(0, 9))
def test_columns_are_the_patches_and_come_in_pieces(case, piece, seed):
    maps, window = case.maps(seed), Window(**case.geometry)
    expected = explicit_patches(maps, case)
    columns = list(window.columns(maps, case.groups, piece))
    positions = window.positions(case.sizes)
    line = expected[0, :1].numel() * case.groups * math.prod(positions[1:])
    assert max(piece_of.numel() for piece_of in columns) <= max(2 * piece, line)
    # The pieces may cut a sample in lines: as a set, and so as a sum of products, they are the patches.
    found = torch.cat(columns, 2).mT
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(sorted_rows(got), sorted_rows(wanted), rtol=0, atol=0)


def sorted_rows(rows: Tensor) -> Tensor:
    return torch.tensor(sorted(rows.tolist())).view(rows.shape)


@pytest.fixture
def multiplied(monkeypatch):
    """The dtypes of the products, and a GPU's products with sums in float32, which torch does not have for the CPU."""
    seen = []

    def with_sums_in_float32(plain):
        def product(left, right, out_dtype):
            seen.append(left.dtype)
            return plain(left.to(out_dtype), right.to(out_dtype))

        return product

    def noted(plain):
        def product(out, left, right, *, alpha):
            seen.append(left.dtype)
            return plain(out, left, right, alpha=alpha)

        return product

    for name in ("mm", "bmm"):
        monkeypatch.setattr(torch, name, with_sums_in_float32(getattr(torch, name)))
    for name in ("addmm_", "baddbmm_"):
        monkeypatch.setattr(Tensor, name, noted(getattr(Tensor, name)))
    monkeypatch.setattr("natgrad.layers.gram.rows.adds_in_float32", lambda rows: rows.dtype.itemsize == 2)
    monkeypatch.setattr("natgrad.layers.gram.patches.on_host", lambda place: False)
    return seen


NARROW = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@NARROW
@pytest.mark.parametrize("stack", [(), (3,)], ids=str)
def test_rows_of_16_bits_are_multiplied_as_they_are(dtype, stack, multiplied):
    rows = torch.randn(*stack, 40, 130).to(dtype)
    out = torch.zeros(*stack, 131, 131)
    gram.add_row_gram_(out, rows, scale=0.25, bias=True)
    assert set(multiplied) == {dtype}
    exact = with_ones(rows.double(), True)
    torch.testing.assert_close(mirrored(out).double(), 0.25 * exact.mT @ exact, rtol=1e-5, atol=1e-5)


@NARROW
@pytest.mark.parametrize("groups", [1, 2])
def test_patches_of_16_bits_are_multiplied_as_they_are(dtype, groups, multiplied):
    case = Convolution(2, groups, 3, (7, 5), (3, 2), (2, 1), ((1, 1), (0, 2)), (1, 2))
    maps = case.maps(0, dtype)
    out = symmetric(groups, 18, 18).float().zero_()
    gram.add_patch_gram_(out, maps, Window(**case.geometry), scale=0.5)
    assert set(multiplied) == {dtype}
    exact = explicit_patches(maps.double(), case)
    torch.testing.assert_close(mirrored(out).double(), 0.5 * exact.mT @ exact, rtol=1e-5, atol=1e-5)
    out = torch.zeros(groups, 19, 19)
    gram.add_patch_gram_(out, maps, Window(**case.geometry), bias=True)  # the bias's row is of sums in float32
    exact = with_ones(exact, True)
    torch.testing.assert_close(mirrored(out).double(), exact.mT @ exact, rtol=1e-5, atol=1e-5)


def test_other_rows_and_sums_in_float64_are_not(multiplied):
    gram.add_row_gram_(torch.zeros(4, 4), torch.randn(3, 4))
    gram.add_row_gram_(torch.zeros(4, 4, dtype=torch.float64), torch.randn(3, 4).half())
    assert multiplied == [torch.float32, torch.float64]
