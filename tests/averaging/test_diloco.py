"""How Streaming DiLoCo cuts parameters, and its outer optimizer."""

import copy

import pytest
import torch

import natgrad
from natgrad.averaging.diloco import cut


@pytest.mark.parametrize(("sizes", "fragments"), [((5, 1, 7), 3), ((4,), 1), ((1, 1), 3), ((3, 0, 2), 2)])
def test_fragments_are_equal_and_cover_every_element_once(sizes, fragments):
    pieces = cut(sizes, fragments)
    assert len(pieces) == fragments
    totals = [sum(piece.stop - piece.start for piece in own) for own in pieces]
    assert max(totals) - min(totals) <= 1
    covered = [(piece.index, element) for own in pieces for piece in own for element in range(piece.start, piece.stop)]
    assert covered == [(index, element) for index, size in enumerate(sizes) for element in range(size)]


def averager(model, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    given = {"batches_between": 1, "outer_learning_rate": 0.5, "outer_momentum": 0.5, **options}
    return natgrad.DiLoCo(model, optimizer, **given)


def scalar(value, dtype=torch.float32):
    model = torch.nn.Linear(1, 1, bias=False, dtype=dtype)
    torch.nn.init.constant_(model.weight, value)
    return model


def move(own, gradient):
    """Step the inner optimizer by `gradient`, and then the outer one; return the parameter."""
    own.model.weight.grad = torch.full_like(own.model.weight, gradient)
    own.step()
    return own.model.weight.item()


def test_the_outer_optimizer_is_nesterovs():
    own = averager(scalar(1.0))
    # Momentum 1, step 1 + 0.5 · 1; then momentum 0.5 · 1 + 2, step 2 + 0.5 · 2.5.
    assert move(own, 1.0) == 1 - 0.5 * 1.5
    assert move(own, 2.0) == 0.25 - 0.5 * 3.25


def test_the_outer_optimizer_goes_on_from_a_state():
    first = averager(scalar(1.0, torch.bfloat16))
    assert all(parameter.dtype == torch.float32 for parameter in first.state_dict()["outer"]["parameters"].values())
    move(first, 2.0)
    second = averager(copy.deepcopy(first.model))
    state = copy.deepcopy(first.state_dict())
    second.load_state_dict(state)
    assert move(first, 2.0) == move(second, 2.0)
    state["outer"]["parameters"]["0"] = torch.zeros(2)
    with pytest.raises(ValueError, match="of parameters shaped"):
        second.load_state_dict(state)


@pytest.mark.parametrize("part", ["parameters", "momenta"])
@pytest.mark.parametrize(("value", "allowed"), [(torch.nan, "finite"), (torch.inf, "finite"), (1, "shaped"), ("x", "")])
def test_an_outer_state_that_is_not_finite_or_of_another_kind_is_refused_and_nothing_changes(part, value, allowed):
    own = averager(scalar(1.0))
    move(own, 1.0)
    before = copy.deepcopy(own.state_dict())
    bad = copy.deepcopy(before)
    bad["batches"] += 1
    bad["outer"][part]["0"] = value if isinstance(value, str) else torch.tensor([value])
    with pytest.raises(ValueError, match=rf"state\['outer'\]=.*{allowed}"):
        own.load_state_dict(bad)
    after = own.state_dict()
    assert after["batches"] == before["batches"]
    assert all(torch.equal(after["outer"][name]["0"], before["outer"][name]["0"]) for name in ("parameters", "momenta"))


@pytest.mark.parametrize("settings", [(0.0, 0.9), (0.7, 1.0), (0.7, -0.1), ("1", 0.5)])
def test_the_outer_optimizer_checks_its_settings(settings):
    learning_rate, momentum = settings
    with pytest.raises(ValueError, match="outer_"):
        averager(scalar(1.0), outer_learning_rate=learning_rate, outer_momentum=momentum)
