"""The models are those of the papers, and images are augmented by seed, epoch and sample."""

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from natgrad import tasks
from natgrad.errors import NatgradError
from natgrad.tasks.images import Images
from natgrad.tasks.networks import NETWORKS
from tests.tasks import folders


@pytest.mark.parametrize(
    ("name", "layers", "parameters"),
    [
        ("resnet20", 20, 269_722),
        ("resnet32", 32, 464_154),
        ("resnet56", 56, 853_018),
        ("resnet110", 110, 1_727_962),
        ("densenet", 100, 769_162),
        ("vgg16", 14, 14_728_266),
    ],
)
def test_layers_and_parameters_are_the_published_ones(name: str, layers: int, parameters: int) -> None:
    model = NETWORKS[name](3, 32, 10)
    assert sum(isinstance(module, nn.Conv2d | nn.Linear) for module in model.modules()) == layers
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(("channels", "side", "classes"), [(3, 32, 100), (1, 28, 10), (1, 8, 10)])
def test_every_model_fits_every_data_set(name: str, channels: int, side: int, classes: int) -> None:
    model = NETWORKS[name](channels, side, classes).eval()
    assert model(torch.zeros(2, channels, side, side)).shape == (2, classes)


def test_every_model_goes_with_every_data_set() -> None:
    assert {f"{model}-{data}" for model in NETWORKS for data in ("cifar10", "cifar100", "mnist", "fashion-mnist")} <= {
        *tasks.names()
    }


def test_without_a_folder_the_data_are_embedded() -> None:
    task = tasks.get("vgg16-cifar100")
    train, test = task.datasets()
    assert (len(train), len(test), task.image_classes, task.epochs) == (2048, 512, 36, 5)
    images, _ = train[:]
    assert images.shape[1:] == (3, 32, 32)
    torch.testing.assert_close(images.mean(dim=(0, 2, 3)), torch.zeros(3), atol=1e-4, rtol=0)
    torch.testing.assert_close(images.std(dim=(0, 2, 3)), torch.ones(3), atol=1e-3, rtol=0)
    assert task.summary == "embedded glyphs, VGG-16 with batch norm"


def source(*, flip: bool) -> Images:
    pixels, labels = folders.images(64, (3, 8, 8), 10, 0)
    return Images(
        pixels=torch.from_numpy(pixels),
        labels=torch.from_numpy(labels),
        mean=(0.0, 0.0, 0.0),
        deviation=(1 / 255,) * 3,
        padding=2,
        flip=flip,
    )


def views(image: Tensor) -> Tensor:
    """Return all 5 x 5 parts of the padded image, then the same mirrored."""
    parts = functional.pad(image, [2] * 4).unfold(1, 8, 1).unfold(2, 8, 1).permute(1, 2, 0, 3, 4).flatten(0, 1)
    return torch.cat((parts, parts.flip(-1)))


@pytest.mark.parametrize("flip", [False, True])
def test_an_augmented_image_is_a_part_of_the_padded_one_mirrored_or_not(flip: bool) -> None:
    images = source(flip=flip)
    augmented, labels = images.augmented(seed=1, epoch=2)[:]
    assert torch.equal(labels, images.labels)
    found = [
        (views(image) == part.round()).all(dim=(1, 2, 3)).nonzero()
        for image, part in zip(images.pixels, augmented, strict=True)
    ]
    assert all(len(each) == 1 for each in found)
    chosen = torch.cat(found).flatten()
    assert len(chosen.unique()) > 15  # many places
    assert (chosen >= 25).sum() == 0 if not flip else 16 < (chosen >= 25).sum() < 48


def test_augmentation_follows_from_seed_epoch_and_sample_alone() -> None:
    images = source(flip=True)
    whole = images.augmented(3, 4)[:][0]
    assert torch.equal(images.augmented(3, 4)[[9, 40, 2]][0], whole[[9, 40, 2]])
    for other in ((3, 5), (4, 4)):
        assert not torch.equal(images.augmented(*other)[:][0], whole)


def test_mnist_is_not_augmented_and_cifar_can_be_without(tmp_path: Path) -> None:
    folders.idx(tmp_path, "raw")
    folders.cifar10(tmp_path, "bin")
    for name, options, same in (("mnist", {}, True), ("cifar10", {}, False), ("cifar10", {"augment": False}, True)):
        task = tasks.get(f"3c1f-{name}", data=str(tmp_path), **options)
        train, _ = task.datasets()
        assert torch.equal(task.augmented(train, seed=0, epoch=0)[:][0], train[:][0]) == same


@pytest.mark.parametrize(
    ("name", "options", "named"),
    [
        ("3c1f-mnist", {"augment": 1}, "augment=1.*True or False"),
        ("3c1f-mnist", {"data": 3}, "data=3.*folder with MNIST"),
        ("3c1f-mnist", {"architecture": "vgg16"}, "option='architecture'.*'data', 'augment' or 'label_smoothing'"),
        ("resnet21-mnist", {}, "name='resnet21-mnist'.*3c1f, densenet"),
    ],
)
def test_a_wrong_name_or_option_is_named(name: str, options: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        tasks.get(name, **options)


def test_without_torchvision_imagenet_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision.models", None)
    with pytest.raises(NatgradError, match=r"needs torchvision, as installed by: pip install 'natgrad\[vision\]'"):
        tasks.get("resnet18-imagenet").model()
