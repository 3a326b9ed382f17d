"""ImageNet's tasks read folders of classes with torchvision."""

import itertools
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("torchvision")

from PIL import Image
from torchvision.transforms import functional
from typer.testing import CliRunner

from natgrad import tasks
from natgrad.cli import app
from natgrad.tasks import DataError
from natgrad.training.display import Silent
from natgrad.training.job import Job
from natgrad.training.loop import Training
from natgrad.training.world import World

ALONE = World(rank=0, size=1, device=torch.device("cpu"))
MODES = {"red.JPEG": "RGB", "grey.jpg": "L", "print.jpeg": "CMYK", "clear.png": "RGBA"}


def write(folder: Path) -> None:
    """Write four pictures for training and two for testing of each of three classes."""
    generator = np.random.default_rng(0)
    for name, count in (("train", 4), ("val", 2)):
        for number in range(3):
            place = folder / name / f"n0{number}"
            place.mkdir(parents=True)
            for file, mode in list(MODES.items())[:count]:
                height, width = generator.integers(40, 90, 2)
                pixels = generator.integers(256, size=(height, width, 3), dtype=np.uint8)
                Image.fromarray(pixels).convert(mode).save(place / file)


@pytest.fixture
def data(tmp_path):
    write(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("name", "parameters"), [("resnet18", 11_689_512), ("resnet50", 25_557_032)])
def test_models_are_torchvisions(name, parameters, tmp_path):
    # Without a folder there the number of classes is that of ImageNet.
    model = tasks.get(f"{name}-imagenet", data=str(tmp_path / "nowhere")).model()
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_pictures_of_all_kinds_become_colours_and_test_pictures_the_middle(data):
    task = tasks.get("resnet18-imagenet", data=str(data))
    train, test = task.load()
    assert (len(train), len(test), task.image_classes) == (12, 6, 3)
    images, labels = train[:]
    assert images.shape == (12, 3, 224, 224)
    assert labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    images, _ = test[[1]]
    with Image.open(data / "val" / "n00" / "red.JPEG") as picture:
        middle = functional.center_crop(functional.resize(picture.convert("RGB"), 256), 224)
    expected = functional.normalize(functional.to_tensor(middle), task.data_set.mean, task.images.deviation)
    torch.testing.assert_close(images[0], expected)


def test_augmentation_follows_from_seed_epoch_and_sample_alone(data):
    train, _ = tasks.get("resnet18-imagenet", data=str(data)).load()
    before = torch.get_rng_state()
    whole = train.augmented(3, 4)[:][0]
    assert torch.equal(train.augmented(3, 4)[[9, 2]][0], whole[[9, 2]])
    for other in ((3, 5), (4, 4)):
        assert not torch.equal(train.augmented(*other)[[0]][0][0], whole[0])
    assert torch.equal(torch.get_rng_state(), before)


def test_an_interrupted_run_with_readers_equals_a_whole_one_without(data):
    def training(readers, **arguments):
        options = {"readers": readers}
        job = Job(
            task="resnet18-imagenet", task_options=options, data=str(data), optimizer="sgd", batch_size=4, epochs=2
        )
        return Training(job.resolved(), ALONE, observer=Silent(), **arguments)

    whole = training(0, stop=lambda: False)
    expected = whole.run()
    asked, states = itertools.count(1), []
    first = training(2, stop=lambda: next(asked) >= 4, save=lambda run: states.append(run.state_dict()))
    assert first.run().status == "stopped"
    assert first.position.step == 5  # the second of the second epoch
    second = training(2, stop=lambda: False)
    second.load_state_dict(states[0])
    points = second.run().points
    assert [(point.step, point.loss, point.metric) for point in points] == [
        (point.step, point.loss, point.metric) for point in expected.points
    ]
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name])


WRONG = {
    "no val": (lambda data: shutil.rmtree(data / "val"), r"val is missing: ImageNet has train/CLASS/PICTURE"),
    "flat val": (
        lambda data: [shutil.move(path, data / "val" / f"{number}.jpg") for number, path in enumerate(pictures(data))],
        "val has no folders: its pictures belong into one folder for each class",
    ),
    "no pictures": (lambda data: [path.unlink() for path in (data / "train" / "n01").iterdir()], "train: .*n01"),
    "another class": (lambda data: (data / "val" / "n01").rename(data / "val" / "n9"), "class n01 is in train alone"),
}


def pictures(data):
    paths = sorted((data / "val").rglob("*.*"))
    moved = [path.rename(data / f"{number}.jpg") for number, path in enumerate(paths)]
    for place in list((data / "val").iterdir()):
        place.rmdir()
    return moved


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_folder_is_named_with_what_was_expected(data, case):
    damage, named = WRONG[case]
    damage(data)
    with pytest.raises(DataError, match=named):
        tasks.get("resnet18-imagenet", data=str(data)).load()


@pytest.mark.parametrize(("size", "readers"), [(0, 0), (300, 1)])
def test_a_damaged_picture_is_named_in_one_line(data, size, readers):
    os.truncate(data / "train" / "n02" / "red.JPEG", size)
    arguments = ("train", "resnet18-imagenet", "--data", data, "--set", f"readers={readers}", "--batch-size", 12)
    done = CliRunner().invoke(app, [*map(str, arguments), "--out", str(data / "run")])
    assert done.exit_code == 2
    assert done.stderr.startswith(f"error: {data / 'train' / 'n02' / 'red.JPEG'} is no picture that can be read")
    assert done.stderr.count("\n") == 1
