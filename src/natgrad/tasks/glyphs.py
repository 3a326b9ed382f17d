"""Characters of bundled fonts over photographs, recognised by a residual network.

The fonts are matplotlib's, the photographs scikit-learn's. Test images use other fonts and other parts of the photos.
"""

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import matplotlib
import torch
from PIL import Image, ImageDraw, ImageFont
from sklearn.datasets import load_sample_images
from torch import Generator, Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from natgrad.errors import NatgradError
from natgrad.tasks import facts
from natgrad.tasks.base import Evaluator, Task
from natgrad.tasks.evaluators import accuracy
from natgrad.tasks.facts import CHARACTERS, GLYPHS_TEST_SHARE
from natgrad.tasks.resnet import ResNet

# One style of each family is held back for testing. Symbol fonts, and cmmi10 with its old-style figures, are left out.
TRAIN_FONTS = (
    *("DejaVuSans", "DejaVuSans-Oblique", "DejaVuSans-BoldOblique"),
    *("DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSansMono-BoldOblique"),
    *("DejaVuSerif", "DejaVuSerif-Italic", "DejaVuSerif-BoldItalic"),
    *("STIXGeneral", "STIXGeneralItalic", "STIXGeneralBol"),
    *("cmr10", "cmb10", "cmti10", "cmtt10"),
)
TEST_FONTS = ("DejaVuSans-Bold", "DejaVuSansMono-Oblique", "DejaVuSerif-Bold", "STIXGeneralBolIta", "cmss10")
TRAIN_COLUMNS = 480  # of the photographs' 640; the others are backgrounds of the test set

IMAGE, STENCIL, FONT = 32, 64, 48  # pixels: an image's usual side, a stencil's side, an em of the letter in the stencil
SCALE = (0.8, 1.3)  # of a stencil, whose side is an image's at scale 1
SHIFT = 0.25  # of half an image's side, either way
TILT = math.radians(20)  # either way
CONTRAST = 0.35  # least distance between the luma of the ink and the mean luma behind it
LUMA = torch.tensor((0.299, 0.587, 0.114))  # of red, green and blue (ITU-R BT.601)
CHUNK = 1000  # images rendered at once, of the usual size


@cache
def stencils(fonts: tuple[str, ...]) -> Tensor:
    """Return every character of every font, centred, as ink coverage [fonts, 36, 64, 64] in [0, 1].

    Raises:
        NatgradError: The installed matplotlib lacks one of the fonts.
    """
    loaded = [_font(font) for font in fonts]
    return torch.stack([torch.stack([_stencil(font, character) for character in CHARACTERS]) for font in loaded])


def _font(name: str) -> ImageFont.FreeTypeFont:
    path = Path(matplotlib.get_data_path(), "fonts", "ttf", f"{name}.ttf")
    if not path.exists():
        raise NatgradError(
            f"the glyphs task needs the font {name}, which this matplotlib does not bundle", "missing-package"
        )
    return ImageFont.truetype(path, FONT)


def _stencil(font: ImageFont.FreeTypeFont, character: str) -> Tensor:
    left, top, right, bottom = font.getbbox(character)
    canvas = Image.new("L", (STENCIL, STENCIL))
    corner = ((STENCIL - left - right) / 2, (STENCIL - top - bottom) / 2)
    ImageDraw.Draw(canvas).text(corner, character, fill=255, font=font)
    return torch.frombuffer(bytearray(canvas.tobytes()), dtype=torch.uint8).view(STENCIL, STENCIL) / 255


def photographs() -> tuple[Tensor, Tensor]:
    """Return scikit-learn's two photographs [2, 3, 427, W] in [0, 1], cut into (train, test)."""
    photos = torch.stack([torch.from_numpy(image.copy()) for image in load_sample_images().images])
    train, test = (photos.permute(0, 3, 1, 2) / 255).tensor_split([TRAIN_COLUMNS], dim=-1)
    return train, test


def render(
    fonts: tuple[str, ...], photos: Tensor, count: int, generator: Generator, side: int = IMAGE
) -> tuple[Tensor, Tensor]:
    """Render characters, each with a random font, place, size, tilt, ink and background.

    Args:
        fonts: Names of the fonts to draw from.
        photos: Photographs for the backgrounds [photos, 3, H, W], in [0, 1].
        count: The number of images.
        generator: The random number generator.
        side: Pixels of a side, at most those of the photographs and 1000.

    Returns:
        Images [count, 3, side, side] in [0, 1], and labels [count], indices into `CHARACTERS`.
    """
    shapes = stencils(fonts)
    labels = torch.randint(len(CHARACTERS), (count,), generator=generator)
    styles = torch.randint(len(fonts), (count,), generator=generator)
    images = []
    chunk = CHUNK * IMAGE**2 // side**2
    for style, label in zip(torch.split(styles, chunk), torch.split(labels, chunk), strict=True):
        backgrounds = crops(photos, len(label), side, generator)
        coverage = _place(shapes[style, label], side, generator)[:, None]
        ink = inks(backgrounds.mean(dim=(2, 3)) @ LUMA, generator)[:, :, None, None]
        images.append(torch.lerp(backgrounds, ink, coverage))
    return torch.cat(images), labels


def crops(photos: Tensor, count: int, side: int, generator: Generator) -> Tensor:
    """Cut squares [count, 3, side, side] out of the photographs."""
    squares = photos.unfold(2, side, 1).unfold(3, side, 1)
    photo, row, column = (torch.randint(squares.shape[axis], (count,), generator=generator) for axis in (0, 2, 3))
    return squares[photo, :, row, column]


def _place(shapes: Tensor, side: int, generator: Generator) -> Tensor:
    """Tilt, scale and shift stencils [n, 64, 64] into images [n, side, side]."""
    scale, tilt, right, down = torch.rand(4, len(shapes), generator=generator)
    scale = SCALE[0] + (SCALE[1] - SCALE[0]) * scale
    tilt = TILT * (2 * tilt - 1)
    return place(shapes, side, scale, tilt, SHIFT * (2 * torch.stack((right, down), 1) - 1))


def place(shapes: Tensor, side: int, scale: Tensor, tilt: Tensor, shift: Tensor) -> Tensor:
    """Tilt, scale and shift stencils [n, 64, 64] into images [n, side, side].

    Args:
        shapes: The stencils.
        side: Pixels of an image's side.
        scale: Side of each stencil, in sides of an image [n].
        tilt: Angle of each in radians [n].
        shift: Columns and rows of its middle from the image's, in half sides [n, 2].
    """
    cosine, sine = tilt.cos() / scale, tilt.sin() / scale
    # affine_grid needs the inverse map, from pixels of the image to the stencil.
    inverse = torch.stack((torch.stack((cosine, sine), 1), torch.stack((-sine, cosine), 1)), 1)
    offset = -inverse @ shift[:, :, None]
    # Averaging four points per pixel keeps thin strokes.
    grid = functional.affine_grid(
        torch.cat((inverse, offset), dim=2), [len(shapes), 1, 2 * side, 2 * side], align_corners=False
    )
    sampled = functional.grid_sample(shapes[:, None], grid, align_corners=False)
    return functional.avg_pool2d(sampled, 2)[:, 0]


def inks(behind: Tensor, generator: Generator) -> Tensor:
    """Draw colours [n, 3] that stand out from a mean luma [n] behind them: bright on dark, dark on bright."""
    bright = behind < 0.5
    room = torch.where(bright, 1 - behind, behind)
    distance = CONTRAST + (room - CONTRAST) * torch.rand(len(behind), generator=generator)
    wanted = torch.where(bright, behind + distance, behind - distance)[:, None]
    colour = torch.rand(len(behind), 3, generator=generator)
    luma = (colour @ LUMA)[:, None]
    # Luma is linear in the colour: mixing it with black or white in the right proportion gives the wanted luma exactly.
    return torch.where(wanted < luma, colour * wanted / luma, 1 - (1 - colour) * (1 - wanted) / (1 - luma))


def pictures(count: int, seed: int, side: int = IMAGE) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return `count` images [N, 3, side, side] in [0, 1] for training, a quarter as many for testing, and labels."""
    train_photos, test_photos = photographs()
    # Even and odd seeds: no test set uses the random numbers of another seed's training set.
    train_generator, test_generator = (Generator().manual_seed(2 * seed + part) for part in range(2))
    return (
        render(TRAIN_FONTS, train_photos, count, train_generator, side),
        render(TEST_FONTS, test_photos, count // GLYPHS_TEST_SHARE, test_generator, side),
    )


@dataclass(frozen=True, kw_only=True)
class Glyphs(facts.Glyphs, Task):
    """The data, model and loss of the task."""

    def load(self) -> tuple[TensorDataset, TensorDataset]:
        """Return images [3, 32, 32], standardised by the training images' channels, with their character."""
        (train, train_labels), (test, test_labels) = pictures(self.images, self.seed)
        deviation, mean = torch.std_mean(train, dim=(0, 2, 3), keepdim=True)
        return (
            TensorDataset((train - mean) / deviation, train_labels),
            TensorDataset((test - mean) / deviation, test_labels),
        )

    def model(self) -> nn.Module:
        """Build a network from [B, 3, 32, 32] to logits [B, 36]."""
        return ResNet(self.depth, len(CHARACTERS))

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats."""
        return functional.cross_entropy(outputs, targets)

    def evaluator(self) -> Evaluator:
        """Return a metric of the accuracy."""
        return accuracy(len(CHARACTERS))
