"""Scenes show their objects where masks and boxes say; training and testing share no fonts and parts of photographs."""

import pytest
import torch
from torch import Generator

from natgrad.tasks import glyphs, scenes
from natgrad.tasks.scenes import Scenes


@pytest.fixture(scope="module")
def train() -> Scenes:
    return scenes.scenes(96, side=64)[0]


def test_an_object_is_where_its_mask_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """On black every pixel of ink is in the mask, except for the edges of strokes, and no other."""
    monkeypatch.setattr(scenes, "LEAST_PIXELS", 0)
    drawn = scenes.render(glyphs.TRAIN_FONTS, torch.zeros(1, 3, 64, 64), 64, 64, Generator().manual_seed(0))
    brightness = drawn.pictures.amax(dim=1)
    assert (brightness[drawn.owners > 0] > 40).all()
    beside = torch.nn.functional.max_pool2d((drawn.owners > 0).float(), 3, stride=1, padding=1) > 0
    assert (brightness[~beside] < 140).all()
    assert (drawn.owners > 0).any(dim=2).any(dim=1).sum() > 40


def test_a_label_is_the_digit_that_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenes, "OBJECTS", 1)
    for name, value in (("SCALE", (1.0, 1.0)), ("TILT", 0.0), ("SHIFT", 0.0)):
        monkeypatch.setattr(scenes, name, value)
    drawn = scenes.render(("DejaVuSans",), torch.zeros(1, 3, 64, 64), 40, 64, Generator().manual_seed(0))
    expected = glyphs.stencils(("DejaVuSans",))[0] > 0.5
    seen = drawn.labels[:, 0] > 0
    assert seen.sum() > 10
    differing = (drawn.owners[seen] > 0) != expected[drawn.labels[seen, 0] - 1]
    assert differing.float().mean() < 0.01
    assert torch.equal(drawn.classes().amax(dim=(1, 2)), drawn.labels[:, 0])


def test_instances_agree_with_the_classes_of_pixels(train: Scenes) -> None:
    numbers = set()
    for index, classes in enumerate(train.classes()):
        found = train.instances(index)
        boxes, labels, masks = found["boxes"], found["labels"], found["masks"]
        numbers.add(len(labels))
        assert boxes.shape == (len(labels), 4)
        assert masks.sum(dim=0).le(1).all()
        assert torch.equal((labels[:, None, None] * masks).sum(dim=0), classes)
        for (left, top, right, bottom), mask in zip(boxes.int().tolist(), masks, strict=True):
            inside = mask[top:bottom, left:right]
            assert inside.sum() == mask.sum() >= scenes.LEAST_PIXELS
            assert all(edge.any() for edge in (inside[0], inside[-1], inside[:, 0], inside[:, -1]))
    assert numbers == {0, 1, 2, 3, 4}


def test_an_object_of_few_pixels_counts_as_background(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = [], []
    for least, found in ((1, few), (60, many)):
        monkeypatch.setattr(scenes, "LEAST_PIXELS", least)
        found.append(scenes.scenes(32, side=64)[0])
    pixels = torch.stack([(few[0].owners == owner).sum(dim=(1, 2)) for owner in range(1, 5)], dim=1)
    assert ((pixels > 0) & (pixels < 60)).any()
    assert torch.equal(many[0].labels, few[0].labels * (pixels >= 60))
    assert torch.equal(many[0].pictures, few[0].pictures)


def test_seed_and_part_decide_the_scenes() -> None:
    (train, test), (again, _), (other, _) = (scenes.scenes(16, side=32, seed=seed) for seed in (3, 3, 4))
    assert (len(train), len(test)) == (16, 4)
    assert torch.equal(train.pictures, again.pictures)
    assert torch.equal(train.owners, again.owners)
    assert not torch.equal(train.pictures, other.pictures)
