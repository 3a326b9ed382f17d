import pytest
import torch

from natgrad.recipes import ZeroErasing


def drawn(erasing, count, height, width, seed=0):
    return erasing.boxes(count, height, width, torch.Generator().manual_seed(seed))


def test_rectangles_have_the_areas_ratios_and_places_of_the_paper():
    boxes = drawn(ZeroErasing(), 20000, 200, 200).double()
    top, left, height, width = boxes[boxes[:, 2] > 0].T
    assert abs(len(top) / 20000 - 0.5) < 0.02
    area = height * width / 200**2
    assert area.min() > 0.019
    assert area.max() < 0.253
    assert abs(area.mean() - 0.135) < 0.003
    ratio = height / width
    narrow = torch.where(ratio < 1, ratio, 1 / ratio)
    assert narrow.min() > 0.28
    assert abs(narrow.mean() - 0.65) < 0.01
    assert abs((ratio < 1).double().mean() - 0.5) < 0.03  # both orders alike
    for start, size in ((top, height), (left, width)):
        assert start.min() >= 0
        assert (start + size).max() <= 200
        place = start / (200 - size)
        assert abs(place.mean() - 0.5) < 0.02
        assert (start == 0).any()
        assert (start + size == 200).any()


def test_exactly_the_rectangles_are_zero_in_all_channels():
    erasing, inputs = ZeroErasing(seed=3), torch.rand(16, 3, 12, 10) + 1
    given = inputs.clone()
    erased = erasing(inputs)
    assert torch.equal(inputs, given)
    zero = erased == 0
    assert torch.equal(zero, zero[:, :1].expand_as(zero))
    assert torch.equal(torch.where(zero, given, erased), given)
    touched = 0
    for mask in zero[:, 0]:
        rows, columns = (mask.any(axis).nonzero()[:, 0] for axis in (1, 0))
        if len(rows):
            touched += 1
            assert mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].all()
            assert len(rows) * len(columns) == mask.sum()
    assert 0 < touched < 16


def test_steps_seeds_and_ranks_draw_apart_and_a_resumed_one_the_same():
    inputs = torch.ones(32, 1, 9, 9)
    erasing = ZeroErasing(seed=1, rank=0)
    first, second = erasing(inputs), erasing(inputs)
    resumed = ZeroErasing(seed=1, rank=0)
    resumed.load_state_dict({"steps": 1})
    assert torch.equal(resumed(inputs), second)
    assert erasing.state_dict() == {"steps": 2}
    for other in (second, ZeroErasing(seed=2, rank=0)(inputs), ZeroErasing(seed=1, rank=1)(inputs)):
        assert not torch.equal(first, other)


@pytest.mark.parametrize("wrong", [-0.1, 1.5])
def test_a_probability_is_a_share(wrong):
    with pytest.raises(ValueError, match="probability"):
        ZeroErasing(wrong)
