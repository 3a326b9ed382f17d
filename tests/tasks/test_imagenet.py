"""ImageNet's tasks read folders of classes and tar shards; their models are torchvision's and timm's."""

import io
import itertools
import os
import shutil
import tarfile
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
from natgrad.errors import NatgradWarning
from natgrad.tasks import DataError
from natgrad.tasks.pictures import Picture
from natgrad.training.build import rehearse
from natgrad.training.display import Silent
from natgrad.training.job import Job
from natgrad.training.loop import Training
from natgrad.training.result import read_points
from natgrad.training.world import World

ALONE = World(rank=0, size=1, device=torch.device("cpu"))
SMALL = "test_resnet"  # of timm
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


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def write_shards(data: Path, names: dict[str, str]) -> None:
    """Write the pictures of folders of classes into shards with the names `names[part]`, two for each part."""
    for part, name in names.items():
        paths = sorted((data / part).rglob("*.*"))
        (data.parent / "shards" / name).parent.mkdir(parents=True, exist_ok=True)
        for number in range(2):
            with tarfile.open(data.parent / "shards" / name.format(number), "w") as tar:
                for path in paths[number::2]:
                    sample = f"{path.parent.name}/{path.stem}"
                    add(tar, f"{sample}.cls", path.parent.name[-1].encode())
                    add(tar, f"{sample}.json", b"{}")
                    add(tar, f"{sample}{path.suffix}", path.read_bytes())


@pytest.fixture
def shards(tmp_path):
    write(tmp_path / "folders")
    write_shards(tmp_path / "folders", {"train": "train/{}.tar", "val": "val/{}.tar"})
    return tmp_path / "shards"


# Those of torchvision's and timm's documentation, for 1000 classes.
PARAMETERS = {
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "densenet201": 20_013_928,
    "inception": 27_161_264,
    "timm": 5_717_416,
}


def test_every_model_has_the_published_number_of_parameters(tmp_path):
    assert {f"{name}-imagenet" for name in PARAMETERS} == {name for name in tasks.names() if "-imagenet" in name}
    for name, parameters in PARAMETERS.items():
        # Without a folder there the number of classes is that of ImageNet.
        task = tasks.get(f"{name}-imagenet", data=str(tmp_path / "nowhere"))
        with torch.device("meta"):
            model = task.model()
        assert sum(parameter.numel() for parameter in model.parameters()) == parameters, name


@pytest.mark.parametrize(
    ("name", "options", "side"),
    [
        ("densenet201", {}, 64),
        ("inception", {}, 299),
        ("timm", {}, 224),
        ("timm", {"network": "test_resnet.r160_in1k"}, 160),
    ],
)
def test_embedded_pictures_have_the_size_that_the_model_needs(name, options, side):
    task = tasks.get(f"{name}-imagenet", **options)
    train, test = task.datasets()
    images, labels = train[:2]
    assert (len(train), len(test)) == (1024, 256)
    assert images.shape == (2, 3, side, side)
    assert test[[0]][0].shape == (1, 3, side, side)
    model = task.model()
    task.loss(model(images), labels).backward()
    assert model.eval()(images).shape == (2, 36)


def test_inceptions_loss_is_that_of_both_heads_in_training():
    task = tasks.get("inception-imagenet")
    first, second, targets = torch.randn(3, 36), torch.randn(3, 36), torch.tensor([0, 35, 4])
    entropy = torch.nn.functional.cross_entropy
    expected = entropy(first, targets) + 0.4 * entropy(second, targets)
    torch.testing.assert_close(task.loss((first, second), targets), expected)
    torch.testing.assert_close(task.loss(first, targets), entropy(first, targets))


def test_inception_takes_no_sampled_fisher():
    job = Job(task="inception-imagenet", optimizer="sgd", curvature="kfac", fisher="sampled", batch_size=4)
    with pytest.raises(ValueError, match=r"fisher='sampled'.*several terms"):
        rehearse(job.resolved())


def test_kfac_has_the_inverse_form_where_none_is_given():
    for given, expected in ((None, "inverse"), ("eigen", "eigen")):
        job = Job(task="resnet18-imagenet", curvature="kfac", form=given)
        assert job.resolved().form == expected
    assert Job(task="resnet18-imagenet", curvature="ekfac").resolved().form is None
    assert Job(task="vgg16-mnist", curvature="kfac").resolved().form == "inverse"
    assert Job(task="3c1f-mnist", curvature="kfac").resolved().form is None


def test_an_unknown_model_of_timm_is_named_with_those_like_it():
    with pytest.raises(ValueError, match=r"network='resnet81'.*one of timm.list_models.*, such as .*resnet18"):
        tasks.get("timm-imagenet", network="resnet81")


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
    expected = functional.normalize(functional.to_tensor(middle), task.data_set.mean, task.data_set.deviation)
    torch.testing.assert_close(images[0], expected)


def test_augmentation_follows_from_seed_epoch_and_sample_alone(data):
    train, _ = tasks.get("resnet18-imagenet", data=str(data)).load()
    before = torch.get_rng_state()
    whole = train.augmented(3, 4)[:][0]
    assert torch.equal(train.augmented(3, 4)[[9, 2]][0], whole[[9, 2]])
    for other in ((3, 5), (4, 4)):
        assert not torch.equal(train.augmented(*other)[[0]][0][0], whole[0])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("layout", ["data", "shards"])
def test_an_interrupted_run_with_readers_equals_a_whole_one_without(layout, request):
    data = request.getfixturevalue(layout)

    def training(readers, **arguments):
        options = {"readers": readers, "network": SMALL}
        job = Job(task="timm-imagenet", task_options=options, data=str(data), optimizer="sgd", batch_size=4, epochs=2)
        return Training(job.resolved(), ALONE, observer=Silent(), **arguments)

    whole = training(0, stop=lambda: False)
    expected = whole.run()
    asked, states = itertools.count(1), []
    first = training(2, stop=lambda: next(asked) >= 4, save=lambda run: states.append(run.state_dict()))
    assert first.run().status == "stopped"
    assert first.position.step == 5  # the second of the second epoch
    second = training(2, stop=lambda: False)
    second.load_state_dict(states[-1])
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


def test_shards_hold_what_the_folders_hold(shards):
    task = tasks.get("resnet18-imagenet", data=str(shards))
    assert task.image_classes == 1000
    expected = tasks.get("resnet18-imagenet", data=str(shards.parent / "folders")).load()
    for found, folders in zip(task.load(), expected, strict=True):
        order = [*range(0, len(folders), 2), *range(1, len(folders), 2)]
        for one, other in zip(found[:], folders[order], strict=True):
            assert torch.equal(one, other)


def test_shards_can_lie_in_the_folder_itself(shards):
    for path in sorted(shards.rglob("*.tar")):
        path.rename(shards / f"imagenet1k-{path.parent.name}-{path.stem}.tar")
    train, test = tasks.get("resnet18-imagenet", data=str(shards)).load()
    assert (len(train), len(test)) == (12, 6)


def test_archives_beside_folders_of_classes_are_left_alone(data):
    for place in (data / "ILSVRC2012_img_train.tar", data / "ILSVRC2012_img_val.tar", data / "train" / "n00.tar"):
        with tarfile.open(place, "w") as tar:
            add(tar, "n00.tar", b"")
    train, test = tasks.get("resnet18-imagenet", data=str(data)).load()
    assert (len(train), len(test)) == (12, 6)


def change(path, **contents):
    """Write a shard with one picture, whose members have other contents; None leaves one out."""
    picture = io.BytesIO()
    Image.new("RGB", (8, 8)).save(picture, "PNG")
    members = {"cls": b"1", "png": picture.getvalue(), **contents}
    with tarfile.open(path, "w") as tar:
        for kind, content in members.items():
            if content is not None:
                add(tar, f"a.{kind}", content)


WRONG_SHARDS = {
    "cut in a picture": (lambda path: os.truncate(path, path.stat().st_size // 2), "0.tar .*damaged"),
    # The end is two blocks of zeros, filled up to 20 blocks.
    "cut between two": (lambda path: os.truncate(path, _end(path)), "0.tar is cut or damaged: at byte"),
    "compressed": (lambda path: tarfile.open(path, "w:gz").close(), "0.tar is no tar file, or it is compressed"),
    "empty": (lambda path: path.write_bytes(b""), "0.tar is no tar file"),
    "no label": (lambda path: change(path, cls=None), "0.tar: a.png has no label a.cls"),
    "a word": (lambda path: change(path, cls=b"cat"), "0.tar: a.cls holds 'cat', .* from 0 to 999"),
    "too large": (lambda path: change(path, cls=b"1000"), "0.tar: a.cls holds '1000', .* from 0 to 999"),
    "no pictures": (lambda path: change(path, png=None), "0.tar has no pictures"),
    "no val": (lambda path: shutil.rmtree(path.parents[1] / "val"), r"has no shards val/\*.tar or \*val\*.tar"),
}


def _end(path):
    with tarfile.open(path) as tar:
        tar.getmembers()
        return tar.offset


@pytest.mark.parametrize("case", WRONG_SHARDS)
def test_a_wrong_shard_is_named_with_what_was_expected(shards, case):
    damage, named = WRONG_SHARDS[case]
    damage(shards / "train" / "0.tar")
    with pytest.raises(DataError, match=named):
        tasks.get("resnet18-imagenet", data=str(shards)).load()


def damage_picture(picture: Picture) -> None:
    with open(picture.path, "r+b") as file:
        file.seek(picture.offset)
        file.write(b"no picture")


@pytest.mark.parametrize("layout", ["data", "shards"])
def test_the_next_picture_takes_the_place_of_one_that_cannot_be_read(layout, request):
    task = tasks.get("resnet18-imagenet", data=str(request.getfixturevalue(layout)))
    train, _ = task.datasets()
    for index in (3, 4, 11):
        damage_picture(train.pictures[index])
    with pytest.warns(NatgradWarning) as warned:
        images, labels = train[:]
    assert [str(each.message) for each in warned] == [
        f"{train.pictures[index]} is no picture that can be read: {str(each.message).partition('read: ')[2]}"
        for index, each in zip((3, 4, 11), warned, strict=True)
    ]
    assert torch.equal(labels[[3, 4, 11]], labels[[5, 5, 0]])
    assert torch.equal(images[[3, 4, 11]], images[[5, 5, 0]])
    assert task.unreadable() == [str(train.pictures[index]) for index in (3, 4, 11)]
    train.augmented(0, 1)[:]  # without another warning


@pytest.mark.parametrize("size", [0, 300])
def test_pictures_that_are_empty_or_cut_are_not_read(data, size):
    os.truncate(data / "train" / "n00" / "red.JPEG", size)
    train, _ = tasks.get("resnet18-imagenet", data=str(data)).load()
    with pytest.warns(NatgradWarning, match="red.JPEG is no picture that can be read"):
        train[[3]]


@pytest.mark.filterwarnings("default::natgrad.NatgradWarning")
def test_without_any_picture_that_can_be_read_the_run_ends(data):
    for path in (data / "train").rglob("*.*"):
        path.write_bytes(b"no picture")
    arguments = ("train", "timm-imagenet", "--set", f"network={SMALL}", "--data", str(data), "--batch-size", "4")
    done = CliRunner().invoke(app, [*arguments, "--set", "readers=1", "--out", str(data / "run")])
    assert done.exit_code == 2
    assert "error: no sample of 12 in a row can be read, from sample" in done.stderr


@pytest.mark.filterwarnings("default::natgrad.NatgradWarning")
@pytest.mark.parametrize(("readers", "workers"), [(1, 1), (0, 2)])
def test_a_run_counts_what_cannot_be_read_in_readers_and_on_all_ranks(data, readers, workers):
    for index, name in enumerate(("train/n00/red.JPEG", "train/n02/grey.jpg", "val/n01/red.JPEG")):
        os.truncate(data / name, 100 * index)
    epochs = 2 if workers == 1 else 1
    arguments = ("--data", data, "--set", f"readers={readers}", "--batch-size", 4, "--epochs", epochs)
    command = (
        "train",
        "timm-imagenet",
        "--set",
        f"network={SMALL}",
        "--optimizer",
        "sgd",
        *arguments,
        "--workers",
        workers,
    )
    done = CliRunner().invoke(app, [str(each) for each in (*command, "--out", data / "run")])
    assert done.exit_code == 0, done.output
    points = read_points(data / "run" / "metrics.jsonl")
    assert [(point.step, point.unreadable) for point in points] == [(3, 3), (6, 3)][:epochs]
    if workers == 1:  # other ranks print where the test does not read
        assert done.output.count("3 samples unreadable") == 2
