"""The glyphs show what their labels say, visibly, in fonts and places that training and testing do not share."""

import pytest
import torch
from torch import Generator, Tensor
from torch.nn import functional

from natgrad import tasks
from natgrad.errors import NatgradError
from natgrad.tasks import glyphs

FONTS = (*glyphs.TRAIN_FONTS, *glyphs.TEST_FONTS)


def test_training_and_testing_share_no_font_and_no_part_of_a_photograph() -> None:
    assert not set(glyphs.TRAIN_FONTS) & set(glyphs.TEST_FONTS)
    train, test = glyphs.photographs()
    assert train.shape[-1] + test.shape[-1] == 640
    assert 0 <= min(train.min(), test.min()) < max(train.max(), test.max()) <= 1


def test_every_character_of_every_font_differs_from_the_others_and_fits_its_stencil() -> None:
    shapes = glyphs.stencils(FONTS)
    assert shapes.shape == (len(FONTS), 36, glyphs.STENCIL, glyphs.STENCIL)
    assert shapes.min() == 0
    assert shapes.max() == 1
    frame = torch.ones(glyphs.STENCIL, glyphs.STENCIL, dtype=torch.bool)
    frame[1:-1, 1:-1] = False
    assert not shapes[:, :, frame].any()
    distances = torch.cdist(shapes.flatten(2), shapes.flatten(2), p=1) + 1e9 * torch.eye(36)
    assert distances.min() > 20  # pixels of ink


@pytest.fixture
def upright(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Place every stencil untouched in the middle."""
    monkeypatch.setattr(glyphs, "SCALE", (1.0, 1.0))
    monkeypatch.setattr(glyphs, "TILT", 0.0)
    monkeypatch.setattr(glyphs, "SHIFT", 0.0)
    return monkeypatch


@pytest.mark.usefixtures("upright")
def test_labels_say_which_character_is_drawn() -> None:
    black = torch.zeros(1, 3, 64, 64)
    images, labels = glyphs.render(("DejaVuSans-Bold",), black, 200, Generator().manual_seed(0))
    expected = functional.avg_pool2d(glyphs.stencils(("DejaVuSans-Bold",))[0], 2)[labels]
    coverage = images.amax(dim=1) / images.amax(dim=(1, 2, 3))[:, None, None] * expected.amax(dim=(1, 2))[:, None, None]
    torch.testing.assert_close(coverage, expected, atol=1e-4, rtol=0)


@pytest.mark.usefixtures("upright")
@pytest.mark.parametrize("side", [64, 224])
def test_labels_say_which_character_is_drawn_in_larger_images(side: int) -> None:
    black = torch.zeros(1, 3, side, side)
    images, labels = glyphs.render(("DejaVuSans-Bold",), black, 60, Generator().manual_seed(0), side)
    assert images.shape == (60, 3, side, side)
    ink = functional.adaptive_avg_pool2d(images.amax(dim=1) / images.amax(dim=(1, 2, 3))[:, None, None], 64)
    shapes = glyphs.stencils(("DejaVuSans-Bold",))[0]
    distances = torch.cdist(ink.flatten(1), shapes.flatten(1))
    assert torch.equal(distances.argmin(1), labels)


@pytest.mark.parametrize(
    ("constant", "value", "area"), [("SCALE", (0.8, 0.8), 0.64), ("TILT", 0.5, 1), ("SHIFT", 0.2, 1)]
)
def test_placement_scales_tilts_and_shifts(
    upright: pytest.MonkeyPatch, constant: str, value: object, area: float
) -> None:
    shapes = glyphs.stencils(("DejaVuSans",))[0]
    before = glyphs._place(shapes, glyphs.IMAGE, Generator().manual_seed(0))
    upright.setattr(glyphs, constant, value)
    after = glyphs._place(shapes, glyphs.IMAGE, Generator().manual_seed(0))
    torch.testing.assert_close(after.sum(dim=(1, 2)), area * before.sum(dim=(1, 2)), rtol=0.02, atol=0)

    def centre(images: Tensor) -> Tensor:
        ticks = torch.arange(glyphs.IMAGE) + 0.5
        ink = images.sum(dim=(1, 2))
        return torch.stack((images.sum(dim=1) @ ticks / ink, images.sum(dim=2) @ ticks / ink), 1)

    moved = (centre(after) - centre(before)).abs().max()
    limit = 0.2 * glyphs.IMAGE / 2
    assert moved <= limit + 0.1 if constant == "SHIFT" else moved < 2
    assert (constant == "SHIFT") == (moved > 0.8 * limit)


def test_seed_decides_the_images_and_depth_does_not() -> None:
    first, depth, seed = (
        tasks.get("glyphs", images=64, **options).datasets()[0] for options in ({}, {"depth": 32}, {"seed": 1})
    )
    assert torch.equal(first.tensors[0], depth.tensors[0])
    assert not torch.equal(first.tensors[1], seed.tensors[1])


def test_a_font_that_matplotlib_lacks_is_named() -> None:
    with pytest.raises(NatgradError, match="NoSuchFont"):
        glyphs.stencils(("NoSuchFont",))
