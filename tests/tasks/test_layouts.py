"""Data sets are read in each layout in which they are distributed, and a wrong file is named with what was expected."""

import gzip
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from natgrad import tasks
from natgrad.tasks import DataError
from tests.tasks import folders

CASES = {
    "cifar10": (folders.cifar10, "bin", "cifar-10-batches-bin"),
    "cifar10 pickled": (folders.cifar10, "py", "cifar-10-batches-py"),
    "cifar100": (folders.cifar100, "bin", "cifar-100-binary"),
    "cifar100 pickled": (folders.cifar100, "py", "cifar-100-python"),
    "mnist": (folders.idx, "raw", "MNIST/raw"),
    "mnist zipped": (folders.idx, "gz", "MNIST/raw"),
    "fashion-mnist": (folders.idx, "gz", "FashionMNIST/raw"),
}


def load(name: str, folder: Path, **options: object) -> tuple[tasks.Task, tuple]:
    task = tasks.get(f"3c1f-{name.partition(' ')[0]}", data=str(folder), **options)
    return task, task.load()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("is_below", [False, True])
def test_images_and_labels_are_those_of_the_files(tmp_path: Path, case: str, is_below: bool) -> None:
    write, kind, subfolder = CASES[case]
    *train, test = write(tmp_path / subfolder if is_below else tmp_path, kind)
    task, parts = load(case, tmp_path)
    source = task.data_set
    for part, expected in zip(parts, ([np.concatenate(each) for each in zip(*train, strict=True)], test), strict=True):
        images, labels = part[:]
        assert labels.tolist() == expected[1].tolist()
        assert labels.dtype == torch.int64
        mean, deviation = (np.array(each)[:, None, None] for each in (source.mean, source.deviation))
        torch.testing.assert_close(
            images.double(), torch.from_numpy((expected[0] / 255 - mean) / deviation).double(), atol=1e-5, rtol=1e-5
        )
    assert task.image_classes == (100 if "100" in case else 10)
    assert task.model()(parts[0][:2][0]).shape == (2, task.image_classes)


def cut(name: str, size: int) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, size)


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def copy(name: str, to: str) -> Callable[[Path], None]:
    return lambda folder: shutil.copy(folder / name, folder / to)


def change(name: str, act: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(act((folder / name).read_bytes()))


def repickle(name: str, **entries: object) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        pixels, labels = folders.images(4, (3072,), 10, 9)
        batch = {"batch_label": "training batch 2 of 5", "labels": labels.tolist(), "data": pixels, **entries}
        batch = {key: value for key, value in batch.items() if value is not None}
        folders.write_pickle(folder / name, batch)

    return act


class Command:
    """Creates a file when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


WRONG = [
    ("cifar10", remove("data_batch_3.bin"), "data_batch_3.bin is missing: CIFAR-10 has data_batch_1.bin, "),
    ("cifar10", cut("data_batch_3.bin", 5000), "data_batch_3.bin has 5000 bytes, and CIFAR-10 3073 for each image"),
    ("cifar10", cut("test_batch.bin", 0), "test_batch.bin has 0 bytes"),
    ("cifar10", cut("data_batch_3.bin", 3073), "data_batch_3.bin has 1 images, and other training files have 4"),
    ("cifar10", copy("data_batch_1.bin", "data_batch_4.bin"), "data_batch_4.bin has the same images as .*data_batch_1"),
    ("cifar10", copy("data_batch_1.bin", "test_batch.bin"), "test_batch.bin has the same images as"),
    ("cifar10", change("data_batch_2.bin", lambda old: b"\x0a" + old[1:]), "2.bin: label 10 of sample 0, .* 0 to 9"),
    ("cifar10 pickled", remove("test_batch"), "test_batch is missing"),
    ("cifar10 pickled", cut("data_batch_2", 1000), "data_batch_2 is not a batch of CIFAR-10"),
    ("cifar10 pickled", repickle("data_batch_3"), "data_batch_3 calls itself 'training batch 2 of 5', .* '.* 3 of 5'"),
    (
        "cifar10 pickled",
        repickle("data_batch_2", labels=None),
        "data_batch_2 has batch_label, data, .* data and labels",
    ),
    ("cifar10 pickled", repickle("data_batch_2", labels=[1, 2]), r"has 4 images and labels \[2\]"),
    ("cifar10 pickled", repickle("data_batch_2", labels=[0, 1, -1, 3]), "label -1 of sample 2"),
    ("cifar10 pickled", repickle("data_batch_2", data=np.zeros((4, 3072))), r"bytes \[N, 3072\]"),
    ("cifar100", change("train.bin", lambda old: b"\x14" + old[1:]), r"label 20 of sample 0, .*coarse.* 0 to 19"),
    ("cifar100", copy("train.bin", "test.bin"), "test.bin has the same images as"),
    ("mnist", remove("t10k-labels-idx1-ubyte"), "t10k-labels-idx1-ubyte is missing"),
    ("mnist", cut("train-images-idx3-ubyte", 999), r"has 999 bytes, and its header says 9424 for \[12, 28, 28\]"),
    ("mnist", cut("train-images-idx3-ubyte", 3), "is no idx file"),
    ("mnist", copy("train-labels-idx1-ubyte", "train-images-idx3-ubyte"), "is labels, and MNIST has images there"),
    ("mnist", copy("train-images-idx3-ubyte", "t10k-images-idx3-ubyte"), "has the same images as"),
    ("mnist", change("train-labels-idx1-ubyte", lambda old: old[:-1] + b"\x0a"), "label 10 of sample 11"),
    (
        "mnist",
        lambda folder: (folder / "t10k-labels-idx1-ubyte").write_bytes(folders.idx_bytes(np.zeros(5, np.uint8))),
        "has 12 images, and .*t10k-labels-idx1-ubyte 5 labels",
    ),
    ("mnist zipped", cut("train-images-idx3-ubyte.gz", 500), "train-images-idx3-ubyte.gz is damaged"),
    (
        "mnist",
        change("train-labels-idx1-ubyte", lambda old: old[:8] + bytes([9, 0, 0, 3, 0, 2, 7, 2]) + old[16:]),
        "has Fashion-MNIST, and the task is for MNIST",
    ),
]


@pytest.mark.parametrize(("case", "damage", "named"), WRONG, ids=lambda value: value if isinstance(value, str) else "")
def test_a_wrong_file_is_named_with_what_was_expected(
    tmp_path: Path, case: str, damage: Callable[[Path], None], named: str
) -> None:
    write, kind, _ = CASES[case]
    write(tmp_path, kind)
    damage(tmp_path)
    with pytest.raises(DataError, match=named) as caught:
        load(case, tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_pickle_that_calls_a_function_is_refused_and_does_nothing(tmp_path: Path) -> None:
    folders.cifar10(tmp_path, "py")
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps({b"data": Command(tmp_path / "made")}))
    with pytest.raises(DataError, match=r"data_batch_1 .* names \w+\.mkdir, and may have arrays and plain types only"):
        load("cifar10", tmp_path)
    assert not (tmp_path / "made").exists()


def test_a_folder_with_another_data_set_or_an_archive_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data=.*nowhere.*existing folder"):
        load("mnist", tmp_path / "nowhere")
    with pytest.raises(DataError, match="no MNIST: expected train-images-idx3-ubyte"):
        load("mnist", tmp_path)
    (tmp_path / "cifar-100-binary.tar.gz").write_bytes(gzip.compress(b""))
    folders.cifar10(tmp_path, "bin")
    with pytest.raises(DataError, match=r"no CIFAR-100: .*it has CIFAR-10; unpack cifar-100-binary\.tar\.gz first"):
        load("cifar100", tmp_path)
