"""Segmentation reads the layouts of LGG MRI and Cityscapes, and its loss, metrics and curvature are those of pixels."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn import functional

from natgrad import NatgradWarning, NaturalMuon, tasks
from natgrad.tasks import DataError
from natgrad.tasks.applications.segmentation import IGNORED
from natgrad.tasks.layouts import cityscapes, lgg
from natgrad.tasks.segmentation import Cut, Segmentation
from tests.dense.methods import Run
from tests.dense.reference import Rows
from tests.tasks import folders

# Of the Cityscapes scripts, labels.py: the trainId of each id from 0 on.
TRAIN_IDS = [255] * 7 + [0, 1, 255, 255, 2, 3, 4, 255, 255, 255, 5, 255] + list(range(6, 16)) + [255, 255, 16, 17, 18]


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_unet_is_that_of_the_brain_scans() -> None:
    model = tasks.get("unet-lgg").model()
    assert parameters(model) == 7_763_041  # of Buda's hubconf.py
    assert model(torch.zeros(1, 3, 32, 48)).shape == (1, 32, 48, 1)


@pytest.mark.parametrize(("name", "classes"), [("multiscale-lgg", 1), ("multiscale-cityscapes", 11)])
def test_the_multi_scale_net_is_resnet50_with_two_heads(name: str, classes: int) -> None:
    pytest.importorskip("torchvision")
    model = tasks.get(name).model()
    head = 9 * 2048 * 256 + 9 * 256 * 256 + 2 * 2 * 256
    assert parameters(model) == 25_557_032 - 2_049_000 + 2 * head + 256 * (classes + 1)
    images = torch.rand(2, 3, 32, 48)
    assert model(images).shape == (2, 32, 48, classes)


def test_attention_chooses_between_the_scales() -> None:
    pytest.importorskip("torchvision")
    model = tasks.get("multiscale-cityscapes").model().eval()
    images = torch.rand(1, 3, 32, 32)

    def logits(picture: torch.Tensor) -> torch.Tensor:
        found = functional.interpolate(model.segment(model.trunk(picture)), picture.shape[2:], mode="bilinear")
        return functional.interpolate(found, (32, 32), mode="bilinear").movedim(1, -1)

    half = functional.interpolate(images, (16, 16), mode="bilinear")
    for bias, expected in ((-1e9, logits(images)), (1e9, logits(half))):
        model.attend[-1] = nn.Conv2d(256, 1, 1)
        nn.init.constant_(model.attend[-1].bias, bias)
        torch.testing.assert_close(model(images), expected, rtol=1e-4, atol=1e-5)


def test_lgg_holds_out_the_patients_that_its_authors_do(tmp_path: Path) -> None:
    masks = folders.lgg(tmp_path / "kaggle_3m", patients=24, slices=1)
    for folder in (tmp_path, tmp_path / "kaggle_3m"):
        train, test = lgg.read(folder)
        assert {picture for picture, _ in [*train, *test]} == masks.keys()
        random.seed(42)
        held = random.sample(sorted(path.parent.name for path in masks), k=10)
        assert {picture.parent.name for picture, _ in test} == {*held}
        assert len(train) == 14


def test_masks_of_lgg_are_read_with_their_pictures(tmp_path: Path) -> None:
    masks = folders.lgg(tmp_path)
    task = tasks.get("unet-lgg", data=str(tmp_path))
    assert (task.metric.name, task.likelihood, task.batch_size) == ("Dice", "bernoulli", 16)
    for part, files in zip(task.datasets(), lgg.read(tmp_path), strict=True):
        assert len(part) == 4
        pictures, classes = part[:]
        for picture, found, (path, _) in zip(pictures, classes, files, strict=True):
            assert torch.equal(found, torch.from_numpy(masks[path] // 255).long())
            pixels = torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1) / 255
            mean, deviation = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]])[..., None, None]
            torch.testing.assert_close(picture, (pixels - mean) / deviation)


def test_the_ids_of_cityscapes_become_its_19_classes(tmp_path: Path) -> None:
    ids = folders.cityscapes(tmp_path)
    task = tasks.get("unet-cityscapes", data=str(tmp_path))
    assert (task.metric.name, task.likelihood, task.evaluation_batch) == ("mIoU", "categorical", 1)
    train, test = task.datasets()
    assert (len(train), len(test)) == (4, 2)
    for part, files in zip((train, test), cityscapes.read(tmp_path), strict=True):
        for index, (path, _) in enumerate(files):
            assert torch.equal(part[[index]][1][0], torch.tensor(TRAIN_IDS)[torch.from_numpy(ids[path]).long()])
    assert task.model()(train[:][0]).shape == (4, 32, 64, 19)


def first(folder: Path, pattern: str) -> Path:
    return sorted(folder.glob(pattern))[0]


def save(path: Path, size: tuple[int, int], mode: str, value: int = 0) -> None:
    Image.new(mode, size, value).save(path)


@pytest.mark.parametrize(
    ("write", "change", "named"),
    [
        (folders.lgg, lambda folder: first(folder, "*/*_1_mask.tif").unlink(), r"_1_mask.tif is missing: .*_1.tif"),
        (folders.lgg, lambda folder: first(folder, "*/*_1.tif").unlink(), r"_1.tif is missing: .*_1_mask.tif belongs"),
        (folders.lgg, lambda folder: save(first(folder, "*/*_2.tif"), (32, 48), "RGB"), "_2.tif has 32 x 48 pixels"),
        (folders.lgg, lambda folder: save(first(folder, "*/*_mask.tif"), (32, 32), "RGB"), "mode RGB, and a mask has"),
        (folders.lgg, lambda folder: first(folder, "*/*_2.tif").write_text("a"), "_2.tif is no picture"),
        (lambda folder: folders.lgg(folder, patients=1), lambda _: None, "has one patient, TCGA_XX_0000_19990101"),
        (lambda folder: folders.lgg(folder, size=(30, 32)), lambda _: None, "32 x 30 pixels.*multiples of 16"),
        (lambda folder: folder.mkdir(), lambda _: None, r"data has no LGG MRI: expected PATIENT/PATIENT_1.tif"),
        (
            folders.cityscapes,
            lambda folder: first(folder, "gtFine/val/*/*").unlink(),
            r"val0_000000_000019_gtFine_labelIds.png is missing: .*_leftImg8bit.png belongs",
        ),
        (
            folders.cityscapes,
            lambda folder: (folder / "gtFine" / "val").rename(folder / "other"),
            "gtFine/val is missing: Cityscapes has leftImg8bit and gtFine",
        ),
        (
            lambda folder: [(folder / kind / "train").mkdir(parents=True) for kind in ("leftImg8bit", "gtFine")],
            lambda _: None,
            r"leftImg8bit/train has no CITY/\*_leftImg8bit.png",
        ),
    ],
)
def test_a_wrong_file_is_named_before_training(tmp_path: Path, write, change, named: str) -> None:
    folder = tmp_path / "data"
    write(folder)
    change(folder)
    name = "unet-cityscapes" if "Cityscapes" in named or "Img8bit" in named else "unet-lgg"
    with pytest.raises(DataError, match=named):
        tasks.get(name, data=str(folder)).load()


def test_a_pair_that_cannot_be_read_is_named_and_the_next_one_takes_its_place(tmp_path: Path) -> None:
    """A mask has a value that is no class, and a picture is cut after its header."""
    folders.cityscapes(tmp_path)
    mask, picture = first(tmp_path, "gtFine/train/*/*"), first(tmp_path, "leftImg8bit/val/*/*")
    ids = np.array(Image.open(mask))
    ids[3, 5] = 34
    Image.fromarray(ids).save(mask)
    picture.write_bytes(picture.read_bytes()[:60])
    task = tasks.get("unet-cityscapes", data=str(tmp_path))
    train, test = task.datasets()
    assert task.unreadable() == []
    with pytest.warns(
        NatgradWarning, match=r"_labelIds.png has 34 in row 3, column 5, and its values are 0, 1, .*, 33; the next"
    ):
        pictures, _ = train[[0, 1]]
    assert torch.equal(pictures[0], pictures[1])
    with pytest.warns(NatgradWarning, match=r"_leftImg8bit.png is no picture that can be read"):
        test[[0]]
    assert task.unreadable() == [str(train.files[0][0]), str(picture)]


def test_options_are_checked(tmp_path: Path) -> None:
    for options, named in (
        ({"side": 40}, "side=40.*multiple of 16 from 32 to 160"),
        ({"side": 176}, "side=176"),
        ({"side": 2064, "data": str(tmp_path)}, "side=2064.*to 2048"),
        ({"sync_norm": 1}, "sync_norm=1"),
        ({"augment": "no"}, "augment='no'"),
        ({"data": str(tmp_path / "nowhere")}, "data=.*nowhere.*existing folder"),
    ):
        with pytest.raises(ValueError, match=named):
            tasks.get("unet-lgg", **options).load()


@pytest.mark.parametrize("name", ["unet-lgg", "unet-cityscapes"])
def test_without_a_folder_the_data_are_scenes(name: str) -> None:
    task = tasks.get(name, side=32)
    train, test = task.datasets()
    assert (len(train), len(test)) == (256, 64)
    pictures, classes = train[:]
    assert pictures.shape == (256, 3, 32, 32)
    assert classes.unique().tolist() == list(range(2 if name == "unet-lgg" else 11))
    assert task.augmented(train, seed=0, epoch=0) is train


def blocks(side: int) -> tuple[Image.Image, Image.Image]:
    """Return a picture of grey and white squares, and a mask of the white ones."""
    classes = (
        np.random.default_rng(1).integers(2, size=(side // 8, side // 8), dtype=np.uint8).repeat(8, 0).repeat(8, 1)
    )
    return Image.fromarray(200 * classes + 50).convert("RGB"), Image.fromarray(classes)


@pytest.mark.parametrize("scales", [(0.5, 0.5), (1.0, 1.0), (2.0, 2.0), (0.5, 2.0)])
@pytest.mark.parametrize("degrees", [0, 30])
def test_a_picture_and_its_mask_are_cut_alike(scales: tuple[float, float], degrees: float) -> None:
    cut = Cut(side=32, scales=scales, degrees=degrees, outside=IGNORED)
    for draws in np.random.default_rng(0).random((20, 5)).tolist():
        picture, mask = (np.array(each).astype(int) for each in cut(*blocks(48), draws))
        assert picture.shape == (32, 32, 3)
        inside = mask != IGNORED
        assert inside.all() or degrees or scales[0] < 1
        # Away from the edges between squares.
        exact = inside & np.isin(picture[..., 0], (50, 250))
        assert exact.sum() > 0.3 * inside.sum() > 50
        assert (picture[exact][:, 0] == 200 * mask[exact] + 50).all()


def test_a_cut_is_scaled_turned_mirrored_and_moved() -> None:
    whole = Image.fromarray(np.arange(64 * 64).reshape(64, 64).astype(np.uint32) % 251).convert("L")
    pixels = np.array(whole)

    def part(draws: tuple[float, ...], scale: float = 1.0, degrees: float = 0.0, side: int = 32) -> np.ndarray:
        cut = Cut(side=side, scales=(scale, scale), degrees=degrees, outside=0)
        return np.array(cut(whole, whole, draws)[1])

    assert (part((0, 0, 0, 0, 0.9)) == pixels[:32, :32]).all()
    assert (part((0, 0, 0.5, 0.99999, 0.9)) == pixels[32:, 16:48]).all()
    assert (part((0, 0, 0.5, 0, 0.1)) == pixels[:32, 16:48][:, ::-1]).all()
    assert (part((0, 0, 0, 0, 0.9), degrees=-90, side=64) == np.rot90(pixels, 1)).all()
    assert (part((0, 0, 0, 0, 0.9), degrees=90, side=64) == np.rot90(pixels, -1)).all()
    assert (part((0, 0, 0, 0, 0.9), scale=2.0)[::2, ::2] == pixels[:16, :16]).all()
    assert (part((0, 0, 0, 0, 0.9), scale=0.5)[8:24, 8:24] == part((0, 0, 0.5, 0.5, 0.9), scale=0.5)[8:24, 8:24]).all()


def test_augmentation_follows_from_seed_epoch_and_sample_alone(tmp_path: Path) -> None:
    folders.cityscapes(tmp_path)
    task = tasks.get("unet-cityscapes", data=str(tmp_path), side=32)
    train, test = task.datasets()
    pictures, classes = task.augmented(train, seed=3, epoch=4)[:]
    assert pictures.shape == (4, 3, 32, 32)
    assert classes.shape == (4, 32, 32)
    again = task.augmented(train, seed=3, epoch=4)[[2, 0]]
    assert torch.equal(again[0], pictures[[2, 0]])
    assert torch.equal(again[1], classes[[2, 0]])
    for seed, epoch in ((3, 5), (4, 4)):
        assert not torch.equal(task.augmented(train, seed=seed, epoch=epoch)[:][0], pictures)
    whole = tasks.get("unet-cityscapes", data=str(tmp_path), augment=False)
    assert whole.augmented(train, seed=3, epoch=4)[:][0].shape == test[:1][0].shape[:0] + (4, 3, 32, 64)


def segmentation(name: str) -> Segmentation:
    task = tasks.get(name, side=32)
    assert isinstance(task, Segmentation)
    return task


def test_ignored_pixels_are_no_terms_of_the_loss() -> None:
    task = segmentation("unet-cityscapes")
    outputs, targets = torch.randn(2, 4, 4, 11), torch.randint(11, (2, 4, 4))
    targets[0, 1:] = IGNORED
    expected = functional.cross_entropy(outputs[targets != IGNORED], targets[targets != IGNORED])
    torch.testing.assert_close(task.loss(outputs, targets), expected)
    assert task.count(targets) == 20
    assert torch.equal(task.mask(targets), targets != IGNORED)
    assert task.loss(outputs, torch.full_like(targets, IGNORED)) == 0
    binary = segmentation("unet-lgg")
    outputs, targets = torch.randn(2, 4, 4, 1), torch.randint(2, (2, 4, 4))
    expected = -torch.where(targets == 1, outputs[..., 0].sigmoid(), 1 - outputs[..., 0].sigmoid()).log().mean()
    torch.testing.assert_close(binary.loss(outputs, targets), expected)
    assert (binary.reduction, binary.count(targets), binary.mask(targets)) == ("mean", None, None)


def test_metrics_are_those_of_all_pixels_together() -> None:
    dice = segmentation("unet-lgg").evaluator()
    dice.update(torch.tensor([0.2, 0.3, -0.1, 0.4])[:, None], torch.tensor([1, 0, 1, 1]))
    dice.update(torch.tensor([0.9, -3.0])[:, None], torch.tensor([0, 0]))
    assert dice.compute().item() == pytest.approx(2 * 2 / (4 + 3))
    union = segmentation("unet-cityscapes").evaluator()
    union.update(10.0 * functional.one_hot(torch.tensor([0, 0, 1, 2]), 11), torch.tensor([0, 1, 1, IGNORED]))
    union.update(10.0 * functional.one_hot(torch.tensor([2]), 11), torch.tensor([2]))
    assert union.compute().item() == pytest.approx((1 / 2 + 1 / 2 + 1) / 3)


class Pixels(nn.Sequential):
    """Two convolutions; the second sees a class for each pixel, or for `zoom` x `zoom` of them."""

    def __init__(self, zoom: int) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Conv2d(1, 3, 3, stride=zoom, padding=1), nn.Tanh(), nn.Conv2d(3, 4, 1))
        self.zoom = zoom
        self.double()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return functional.interpolate(super().forward(images), scale_factor=self.zoom).movedim(1, -1)


@pytest.mark.parametrize("method", ["eigen", "inverse", "ekfac"])
def test_curvature_is_that_of_the_mean_over_the_pixels_that_count(method: str) -> None:
    task, run = segmentation("unet-cityscapes"), Run(method, Pixels(1), reduction="tokens")
    for _ in range(3):
        images, targets = torch.randn(2, 1, 4, 4).double(), torch.randint(4, (2, 4, 4))
        targets[torch.rand(2, 4, 4) < 0.4] = IGNORED
        mask = (targets != IGNORED).flatten(1)

        def total(model: nn.Module, images: torch.Tensor = images, targets: torch.Tensor = targets) -> torch.Tensor:
            return task.loss(model(images), targets) * task.count(targets)

        rows = {name: seen.positions(mask) for name, seen in run.rows(total).items()}
        run.step(
            rows,
            lambda model, images=images, targets=targets: task.loss(model(images), targets),
            count=task.count(targets),
        )


def test_a_layer_with_fewer_positions_than_pixels_has_the_scale_of_pixels() -> None:
    """A is the sum over positions divided by the number of pixels, and G the mean over positions."""
    task, run = segmentation("unet-cityscapes"), Run("eigen", Pixels(2), reduction="tokens")
    images, targets = torch.randn(2, 1, 8, 8).double(), torch.randint(4, (2, 8, 8))

    def loss(model: nn.Module) -> torch.Tensor:
        return task.loss(model(images), targets)

    pixels, positions = task.count(targets), 2 * 4 * 4
    seen = run.rows(lambda model: loss(model) * pixels)
    run.model.zero_grad()
    loss(run.model).backward()
    run.preconditioner.step(count=pixels)
    raw = {name: torch.einsum("nbto,nbti->noi", rows.g, rows.a) / pixels for name, rows in seen.items()}
    share = (positions / pixels) ** 0.5
    run.compare({name: Rows(share * rows.a, rows.g).positions() for name, rows in seen.items()}, raw)


@pytest.mark.parametrize("name", ["unet-lgg", "unet-cityscapes"])
def test_a_few_steps_of_adamw_lower_the_loss(name: str) -> None:
    torch.manual_seed(0)
    task = tasks.get(name, side=32)
    train, _ = task.datasets()
    inputs, targets = train[:8]
    model, losses = task.model(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(8):
        optimizer.zero_grad()
        loss = task.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_natural_muon_finds_the_last_layer_of_each_model() -> None:
    """Otherwise it warns in the first forward pass."""
    pytest.importorskip("torchvision")
    for name in ("multiscale-cityscapes", "multiscale-lgg", "unet-cityscapes"):
        model = tasks.get(name).model()
        NaturalMuon(model, lr=0.01)
        assert model(torch.rand(2, 3, 32, 32)).requires_grad
