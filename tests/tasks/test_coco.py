"""Reading COCO's annotations and pictures."""

import json
import shutil

import numpy as np
import pytest
import torch

from natgrad import NatgradWarning, tasks
from natgrad.tasks import DataError
from natgrad.tasks.layouts import coco
from tests.tasks import folders

pytest.importorskip("pycocotools")


def load(folder):
    with pytest.warns(NatgradWarning, match=r"instances_train2017.json: 1 box without width or height is left out"):
        return tasks.get("maskrcnn-coco", data=str(folder)).load()


def test_pictures_have_their_objects_with_classes_without_gaps(tmp_path):
    written = folders.coco(tmp_path)["train2017"]
    train, test = load(tmp_path)
    assert (len(train), len(test), train.classes) == (6, 3, 4)
    (pictures, objects), targets = train[:]
    assert all(first is second for first, second in zip(objects, targets, strict=True))
    assert [len(each["labels"]) for each in objects] == [0, 1, 2, 2, 2, 2]
    labels = {1: 1, 3: 2, 90: 3}
    for index, (picture, found) in enumerate(zip(pictures, objects, strict=True)):
        described = written["images"][index]
        assert picture.shape == (3, described["height"], described["width"])
        assert picture.dtype == torch.uint8
        own = [
            each
            for each in written["annotations"]
            if each["image_id"] == described["id"] and each["bbox"][2] and not each["iscrowd"]
        ]
        assert found["labels"].tolist() == [labels[each["category_id"]] for each in own]
        for number, each in enumerate(own):
            left, top, width, height = each["bbox"]
            assert found["boxes"][number].tolist() == [left, top, left + width, top + height]
            mask = torch.zeros(picture.shape[1:], dtype=torch.uint8)
            mask[top : top + height, left : left + width] = 1
            assert torch.equal(found["masks"][number], mask)
    assert torch.equal(pictures[3][0], pictures[3][2])  # grey


def test_crowds_are_in_the_test_set_only(tmp_path):
    folders.coco(tmp_path)
    _, test = load(tmp_path)
    (_, objects), _ = test[[1]]
    assert objects[0]["iscrowd"].tolist() == [0, 1]
    mask = objects[0]["masks"][1]
    assert mask[:, :2].all()
    assert not mask[:, 2:].any()


def test_masks_are_read_from_compressed_run_lengths_and_several_polygons(tmp_path):
    from pycocotools import mask  # noqa: PLC0415

    expected = np.zeros((12, 9), np.uint8)
    expected[2:5, 1:4] = expected[6:9, 5:8] = 1
    squares = [[left, top, left + 3, top, left + 3, top + 3, left, top + 3] for left, top in ((1, 2), (5, 6))]
    encoded = mask.encode(np.asfortranarray(expected))
    outlines = [squares, {"size": [12, 9], "counts": encoded["counts"].decode()}, []]
    instances = [
        coco.Instance(box=(0, 0, 9, 12), label=1, outline=json.dumps(each), is_crowd=False) for each in outlines
    ]
    found = coco.masks(coco.Picture(path=tmp_path, height=12, width=9, instances=instances))
    assert np.array_equal(found, [expected, expected, np.zeros_like(expected)])


def test_mirrored_pictures_keep_their_boxes_on_their_masks(tmp_path):
    folders.coco(tmp_path, count=12)
    train, _ = load(tmp_path)
    (plain, _), _ = train[:]
    (changed, objects), _ = train.augmented(0, 1)[:]
    mirrored = [not torch.equal(*pair) for pair in zip(plain, changed, strict=True)]
    assert 0 < sum(mirrored) < len(mirrored)
    (again, _), _ = train.augmented(0, 1)[[9, 3]]
    assert all(torch.equal(*pair) for pair in zip(again, (changed[9], changed[3]), strict=True))
    for found in objects:
        for box, mask in zip(found["boxes"].int().tolist(), found["masks"], strict=True):
            left, top, right, bottom = box
            assert mask[top:bottom, left:right].all()
            assert mask.sum() == (right - left) * (bottom - top)


def change(**fields):
    def damage(folder):
        path = folder / "annotations" / "instances_train2017.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return damage


def entry(kind, **fields):
    def damage(folder):
        path = folder / "annotations" / "instances_train2017.json"
        found = json.loads(path.read_text())
        found[kind][1] |= fields
        path.write_text(json.dumps(found))

    return damage


def cut(folder):
    path = folder / "annotations" / "instances_val2017.json"
    path.write_bytes(path.read_bytes()[:-9])


WRONG = {
    "no annotations": (
        lambda folder: (folder / "annotations" / "instances_val2017.json").unlink(),
        "instances_val2017.json is missing: COCO has annotations/instances_train2017.json",
    ),
    "a file cut short": (cut, "instances_val2017.json is no JSON that can be read"),
    "captions": (change(categories=[]), "instances_train2017.json has no list of categories"),
    "a list": (change(images={}), "has no list of images"),
    "no size": (entry("images", height="80"), "entry 1 of images has no height, or one of another kind"),
    "no outline": (entry("annotations", segmentation=3), "entry 1 of annotations has no segmentation"),
    "another picture": (entry("annotations", image_id=8), "annotation 1 has image_id 8, which the file does not have"),
    "another category": (entry("annotations", category_id=2), "annotation 1 has category_id 2, which the file"),
    "half a box": (entry("annotations", bbox=[1, 2]), r"annotation 1 has bbox \[1, 2\], which is not left, top"),
    "an endless box": (entry("annotations", bbox=[1, 2, 3, float("nan")]), "annotation 1 has bbox"),
    "other categories": (entry("categories", id=2), "category 1 is in the annotations of only one of train2017"),
    "no pictures": (
        lambda folder: shutil.rmtree(folder / "val2017"),
        "val2017 is missing: it has the pictures",
    ),
    "a picture less": (
        lambda folder: (folder / "train2017" / "train2017-2.png").unlink(),
        "train2017-2.png is missing, one of 1 pictures that instances_train2017.json names",
    ),
}


@pytest.mark.filterwarnings("ignore:.*left out:natgrad.NatgradWarning")
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_folder_is_named_before_training(tmp_path, case):
    damage, named = WRONG[case]
    folders.coco(tmp_path)
    damage(tmp_path)
    with pytest.raises(DataError, match=named):
        tasks.get("maskrcnn-coco", data=str(tmp_path)).load()


@pytest.mark.parametrize("outline", [{"counts": [3, 5], "size": [7, 7]}, {"size": [7, 7]}, ["square"]])
def test_a_damaged_outline_is_named_with_its_picture(tmp_path, outline):
    folders.coco(tmp_path)
    entry("annotations", segmentation=outline, iscrowd=0)(tmp_path)
    train, _ = load(tmp_path)
    with pytest.warns(NatgradWarning, match=r"train2017-1.png: the outline of object 1 is neither polygons nor run le"):
        _ = train[:]


def test_others_take_the_place_of_pictures_of_another_size_or_that_cannot_be_read(tmp_path):
    folders.coco(tmp_path)
    shutil.copy(tmp_path / "train2017" / "train2017-1.png", tmp_path / "train2017" / "train2017-4.png")
    (tmp_path / "train2017" / "train2017-5.png").write_bytes(b"")
    task = tasks.get("maskrcnn-coco", data=str(tmp_path))
    with pytest.warns(NatgradWarning, match="1 box without"):
        train, _ = task.datasets()
    (first, *_), _ = train[[0]]
    with pytest.raises(DataError, match=r"train2017-4.png has \d+ x \d+ pixels, and \d+ x \d+ in its annotation"):
        train.source.picture(4)
    with pytest.raises(DataError, match=r"train2017-5.png is no picture that can be read"):
        train.source.picture(5)
    for index, named in ((5, "5.png is no picture that can be read: .*"), (4, "4.png has .*")):
        with pytest.warns(NatgradWarning, match=rf"train2017-{named}; the next sample takes its place"):
            (pictures, _), _ = train[[index]]
        assert torch.equal(pictures[0], first[0])
    assert [name[-15:] for name in task.unreadable()] == ["train2017-4.png", "train2017-5.png"]
