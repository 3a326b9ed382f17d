"""How Streaming DiLoCo cuts parameters, and its outer optimizer."""

import pytest
import torch

from natgrad.averaging.diloco import OuterOptimizer, cut


@pytest.mark.parametrize(("sizes", "fragments"), [((5, 1, 7), 3), ((4,), 1), ((1, 1), 3), ((3, 0, 2), 2)])
def test_fragments_are_equal_and_cover_every_element_once(sizes, fragments):
    pieces = cut(sizes, fragments)
    assert len(pieces) == fragments
    totals = [sum(piece.numel for piece in own) for own in pieces]
    assert max(totals) - min(totals) <= 1
    covered = [(piece.index, element) for own in pieces for piece in own for element in range(piece.start, piece.stop)]
    assert covered == [(index, element) for index, size in enumerate(sizes) for element in range(size)]


def test_the_outer_optimizer_is_nesterovs_for_each_tensor_apart():
    outer = OuterOptimizer(0.5, 0.5)
    outer.start([torch.tensor([1.0]), torch.tensor([2.0])])
    gone = outer.gradients([torch.tensor([0.0])], [0])
    assert torch.equal(gone[0], torch.tensor([1.0]))
    # Momentum 1, step 1 + 0.5 · 1; then momentum 0.5 · 1 + 2, step 2 + 0.5 · 2.5.
    assert outer.step(gone, [0])[0].item() == 1 - 0.5 * 1.5
    assert outer.step([torch.tensor([2.0])], [0])[0].item() == 0.25 - 0.5 * 3.25
    assert outer.parameters[1].item() == 2.0
    assert outer.step([torch.tensor([4.0])], [1])[0].item() == 2 - 0.5 * 6


def test_the_outer_optimizer_goes_on_from_a_state():
    def stepped(outer):
        return outer.step([torch.tensor([2.0])], [0])[0]

    one, other = OuterOptimizer(0.5, 0.5), OuterOptimizer(0.5, 0.5)
    for each in (one, other):
        each.start([torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([2.0])])
    assert one.parameters[0].dtype == torch.float32
    stepped(one)
    other.load_state_dict(one.state_dict())
    assert torch.equal(stepped(one), stepped(other))
    bad = one.state_dict()
    bad["parameters"]["0"] = torch.zeros(2)
    with pytest.raises(ValueError, match="of parameters shaped"):
        other.load_state_dict(bad)


@pytest.mark.parametrize("settings", [(0.0, 0.9), (0.7, 1.0), (0.7, -0.1), ("1", 0.5)])
def test_the_outer_optimizer_checks_its_settings(settings):
    with pytest.raises(ValueError, match="outer_"):
        OuterOptimizer(*settings)
