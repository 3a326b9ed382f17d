"""Tensors of several groups processed as one: which are, and that the results are those of one by one."""

import pytest
import torch

from natgrad.linalg import joined as room
from natgrad.linalg.joined import joined, parted, together, write_
from natgrad.preconditioner import gradient_step
from natgrad.preconditioner.gradients import clip
from natgrad.preconditioner.guard import fallback, guard
from tests.every import EVERY, Training, batch

CPU, GPU, OTHER = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)


def test_those_of_a_place_go_together():
    places = [(GPU, 1), (OTHER, 1), (GPU, 2), (GPU, 1), (CPU, 1), (OTHER, 1), (CPU, 1)]
    groups = list(together(range(7), lambda item: places[item]))
    assert groups == [[0, 3], [1, 5], [2], [4, 6]]


@pytest.mark.parametrize("device", [CPU, GPU])
def test_a_group_holds_no_more_than_it_may(device, monkeypatch):
    monkeypatch.setattr(room, "_HOST" if device == CPU else "_ACCELERATOR", 10)
    sizes = [4, 6, 1, 20, 3, 3, 3, 2]
    groups = list(together(range(8), lambda _: (device, None), lambda item: sizes[item]))
    assert groups == [[0, 1], [2], [3], [4, 5, 6], [7]]


def test_parts_are_joined_and_written_back():
    one, other = torch.arange(3.0), torch.arange(3.0, 8.0)
    assert joined([one]) is one
    whole = joined([one, other])
    assert whole.tolist() == list(range(8))
    assert [part.tolist() for part in parted(whole, [one, other])] == [one.tolist(), other.tolist()]
    targets = [(torch.zeros(4), slice(1, 4)), (torch.zeros(6), torch.tensor([5, 0, 2, 1, 3]))]
    write_(targets, whole)
    assert targets[0][0].tolist() == [0, 0, 1, 2]
    assert targets[1][0].tolist() == [4, 6, 5, 7, 0, 3]


@pytest.mark.parametrize("make", EVERY.values(), ids=EVERY)
def test_stacks_together_are_stacks_one_by_one(make, monkeypatch):
    """With layers whose gradients are not finite in one step."""

    def gradients():
        training = Training(make)
        found = []

        def spoil(module, inputs, output):
            if len(found) == 1 and output.requires_grad:
                output.register_hook(lambda gradient: gradient * torch.nan)

        training.model.positions.register_forward_hook(spoil)
        for step in range(4):
            training.step(batch(step))
            found.append(training.gradients)
        return [own for each in found for own in each.values()], training.preconditioner.metrics()

    def regardless(items, place, nbytes=lambda _: 0):
        groups = {}
        for item in items:
            groups.setdefault(place(item), []).append(item)
        taken.append(max(map(len, groups.values()), default=0))
        yield from groups.values()

    monkeypatch.setattr(room, "_HOST", 0)
    alone, counted = gradients()
    taken = []
    for each in (gradient_step, clip, guard):
        monkeypatch.setattr(each, "together", regardless)
    monkeypatch.setattr(fallback, "on_host", lambda place: False)
    monkeypatch.setattr(guard.FailureCounters, "_PATIENCE", 1)
    both, others = gradients()
    assert max(taken) > 1
    for left, right in zip(both, alone, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-12, equal_nan=True)
    assert counted["skipped_gradients"] > 0
    kinds = [kind for kind in counted if kind.startswith(("skipped", "fallbacks"))]
    assert {kind: float(others[kind]) for kind in kinds} == {kind: float(counted[kind]) for kind in kinds}
