"""The parts of the sums that leave early: what is expected, guessed and measured, and the messages cut from it."""

from random import Random

import pytest
import torch
from torch import nn

import natgrad
from natgrad.habit import Caution, Expected
from natgrad.sums.clock import Clock
from natgrad.sums.forms import form
from natgrad.sums.guesses import Guesses
from natgrad.sums.messages import Message, Tally, neighbours

CPU = torch.device("cpu")


class Use:
    """Stands for one use of a layer."""


# --- Guesses ----------------------------------------------------------------------------------------------------


def test_what_is_expected_is_what_mostly_came():
    expected = Expected(["a"])
    assert expected.totals == {"a": -1}
    assert not expected.last("a")
    for count, usual in [(3, 3), (1, 3), (1, 1), (0, 1), (0, 1), (0, 0)]:
        expected.counts["a"] = count
        expected.learn()
        expected.begin()
        assert expected.totals == {"a": usual}, count
        assert expected.counts == {"a": 0}


def test_the_last_gradient_is_told_before_and_when_it_comes():
    expected = Expected(["a"])
    expected.counts["a"] = 2
    expected.learn()
    expected.begin()
    told = []
    for _ in range(3):
        told.append((expected.last("a"), expected.complete("a")))
        expected.counts["a"] += 1
    assert told == [(False, False), (True, False), (False, True)]


def test_caution_grows_with_every_wrong_guess_and_fades_with_right_ones():
    caution, pauses = Caution(), []
    for _ in range(8):
        caution.learn(wrong=True)
        pause = 0
        while caution.waits:
            caution.learn(wrong=False)
            pause += 1
        pauses.append(pause)
    assert pauses == [1, 3, 7, 15, 31, 63, 64, 64]
    for _ in range(7):
        caution.learn(wrong=False)
    caution.learn(wrong=True)
    caution.learn(wrong=False)
    assert not caution.waits


def test_a_guess_is_that_of_its_use_alone():
    guesses, use, other = Guesses(), Use(), Use()
    sums = {"A": torch.ones(3)}
    guesses.make("a", use, sums)
    assert guesses.pending("a")
    assert guesses.of("a") is sums
    assert guesses.prove("a", other) == {}
    assert guesses.proven == set()
    assert guesses.prove("a", use) is sums
    assert guesses.proven == {"a"}
    assert guesses.prove("a", use) == {}
    assert guesses.of("a") == {}
    assert not guesses.pending("a")


def test_a_guess_whose_use_is_gone_waits_for_nothing():
    guesses, use = Guesses(), Use()
    guesses.make("a", use, {"A": torch.ones(3)})
    del use
    assert not guesses.pending("a")
    assert guesses.drop() == {"a"}
    assert guesses.drop() == set()


# --- The clock --------------------------------------------------------------------------------------------------


def test_times_are_told_from_the_first_gradient_on(monkeypatch):
    times = iter([10.0, 11.0, 15.0, 18.0, 18.5])
    monkeypatch.setattr("natgrad.sums.clock.perf_counter", lambda: next(times))
    clock = Clock()
    for item in (("a", "early"), ("b", "early"), ("b", "whole"), ("a", "whole"), ("b", "whole")):
        clock.stamp(item, CPU)
    clock.forget(("b", "early"))
    clock.forget(("c", "early"))
    told = clock.read()
    assert told == {("a", "early"): -8.0, ("a", "whole"): 0.0, ("b", "whole"): 0.5}
    assert clock.read() == {}


# --- Messages ---------------------------------------------------------------------------------------------------


def stacks():
    """Two stacks of equal layers, one of a convolution in groups: three blocks a layer."""
    torch.manual_seed(0)
    layers = [nn.Linear(3, 3) for _ in range(5)] + [nn.Conv1d(6, 6, 1, groups=3) for _ in range(3)]
    model = nn.Sequential(*layers, nn.BatchNorm1d(6)).double()
    return [s for s in natgrad.Preconditioner(model)._stacks if s.curvature.early]


def fill(message, tallies):
    """Write numbers that tell the layer and the statistic, and the counters."""
    message.allocate()
    for layer, views in message.views.items():
        for name, view in views.items():
            base = 100.0 * int(layer) + (1 if name == "A" else 2)
            for block in range(len(view)):
                view[block] = base + 10 * block
    message.close(tallies, {}, 1.0)


@pytest.mark.parametrize("seed", range(20))
def test_what_traveled_apart_arrives_together(seed):
    """However early and other statistics were cut into messages."""
    chance, own = Random(seed), stacks()
    members = [(stack, member) for stack in own for member in stack.members]
    tallies = {member.layer.name: Tally(samples=5 + i, rows=7 + i) for i, (_, member) in enumerate(members)}
    apart = [chance.random() < 0.8 for _ in members]

    def cut(layers):
        chance.shuffle(layers)
        places = sorted(chance.sample(range(1, len(layers)), min(len(layers) - 1, chance.randrange(4))))
        return [
            Message(neighbours(layers[a:b])) for a, b in zip([0, *places], [*places, len(layers)], strict=True) if b > a
        ]

    early = cut([(*place, "early") for place, split in zip(members, apart, strict=True) if split])
    rest = cut([(*place, "rest" if split else "whole") for place, split in zip(members, apart, strict=True)])
    for message in (*early, *rest):
        fill(message, tallies)
    assert (
        sum(message.numel for message in (*early, *rest)) == Message(neighbours([(*m, "whole") for m in members])).numel
    )
    assert all(message.kinds["counters"] == 0 for message in early)
    found = {}
    homes = {layer: message for message in early for layer in message.places}
    for message in (*early, *rest):
        for piece in message.arrived(homes):
            places = {m.start: m for m in piece.stack.members}
            assert piece.sums.keys() == {"A", "G"}
            for offset in range(piece.blocks.stop - piece.blocks.start):
                block = piece.blocks.start + offset
                start = max(s for s in places if s <= block)
                layer = places[start].layer.name
                found[layer] = found.get(layer, 0) + 1
                base = 100.0 * int(layer) + 10 * (block - start)
                assert set(piece.sums["A"][offset].tolist()) == {base + 1}
                assert set(piece.sums["G"][offset].tolist()) == {base + 2}
                assert (piece.samples[offset], piece.rows[offset]) == (tallies[layer].samples, tallies[layer].rows)
    assert found == {member.layer.name: member.stop - member.start for _, member in members}


def messages_of(ready, **options):
    own = stacks()
    members = {member.layer.name: (stack, member) for stack in own for member in stack.members}
    link = natgrad.Link(**{"latency": 0.0, "bandwidth": 1e3} | options)
    placement = natgrad.Placement(name="pipelined", link=link, bucket=1)
    forms = form(members, ready, placement=placement, ranks=2, wire=None)
    return [[(message.early, *message.places) for message in messages] for messages in forms]


def test_messages_leave_in_the_order_in_which_they_are_ready():
    ready = {(str(layer), "whole"): 1.0 - layer / 10 for layer in range(8)}
    ready |= {(str(layer), "early"): layer / 10 - 2.0 for layer in range(8)}
    ready["3", "early"] = float("inf")  # never guessed: it leaves as a whole
    together, apart = messages_of(ready)
    backwards = [(False, str(layer)) for layer in range(7, -1, -1)]
    assert together == backwards
    assert apart == [(True, str(layer)) for layer in range(8) if layer != 3] + backwards


def test_a_layer_leaves_first_what_is_ready_first():
    """Where clocks of other devices or ranks disagree too."""
    ready = {(str(layer), portion): 1.0 for layer in range(8) for portion in ("whole", "early")}
    ready["5", "early"] = 3.0
    _, apart = messages_of(ready)
    assert apart.index((True, "5")) < apart.index((False, "5"))


def test_nothing_is_split_where_latency_alone_costs():
    ready = {(str(layer), "whole"): 0.0 for layer in range(8)} | {(str(layer), "early"): -1.0 for layer in range(8)}
    together, apart = messages_of(ready, latency=9.0, bandwidth=1e12)
    assert apart == together
    assert not any(early for early, *_ in apart)
