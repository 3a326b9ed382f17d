"""Bytes from each rank to each other, under way beside other work."""

import pytest
import torch
import torch.distributed as dist

from natgrad.placement import Exchange, Runtime
from tests.distributed.jobs import place
from tests.distributed.test_early_reduction import FIRST, Trainer, Way

CPU = torch.device("cpu")


def sizes(sender, ranks):
    """How many bytes a rank sends to each: none to some, and some to itself."""
    return [(3 * sender + 5 * receiver) % 7 * 1000 for receiver in range(ranks)]


def content(sender, receiver, number, size):
    generator = torch.Generator().manual_seed(100 * number + 10 * sender + receiver)
    return torch.randint(256, (size,), dtype=torch.uint8, generator=generator)


def begin(runtime, rank, ranks):
    return Exchange(runtime, [sizes(sender, ranks)[rank] for sender in range(ranks)], CPU, runtime.group)


def exchange_some(abandoned):
    """Expect several exchanges, abandon the first of them, send the others; return what is wrong."""
    rank, ranks = place()
    runtime = Runtime(dist.group.WORLD)
    if abandoned:
        begin(runtime, rank, ranks)
    exchanges = [begin(runtime, rank, ranks) for _ in range(3)]
    splits = sizes(rank, ranks)
    for number, exchange in enumerate(exchanges):
        pieces = [content(rank, receiver, number, size) for receiver, size in enumerate(splits)]
        exchange.send(torch.cat(pieces), splits)
    return [
        (number, sender)
        for number, exchange in enumerate(exchanges)
        for sender, piece in enumerate(exchange.wait())
        if not torch.equal(piece, content(sender, rank, number, sizes(sender, ranks)[rank]))
    ]


@pytest.mark.parametrize("abandoned", [False, True])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_bytes_of_each_rank_to_each(ranks, count, abandoned):
    """What nobody has sent, after an error, receives nothing of the others."""
    assert ranks.run(count, exchange_some, abandoned) == [[]] * count


def watched():
    """What happens in a step whose gradients leave early, in the queue that is theirs."""
    trainer, events = Trainer(Way()), []
    for step in range(FIRST + 1):
        trainer.step(step)
    begins, sends = Exchange.__init__, Exchange.send
    queue = trainer.preconditioner._runtime.background

    def expect(self, runtime, sizes, device, group):
        events.extend(["expect"] * (group is queue))
        begins(self, runtime, sizes, device, group)

    def send(self, sent, splits):
        events.extend(["send"] * (self._group is queue))
        sends(self, sent, splits)

    Exchange.__init__, Exchange.send = expect, send
    try:
        trainer.step(FIRST + 1)
    finally:
        Exchange.__init__, Exchange.send = begins, sends
    return events


def test_all_gradients_are_expected_before_the_first_leaves(ranks):
    """A rank of gloo that expects something tells so behind what it has sent."""
    for events in ranks.run(2, watched):
        count = events.count("send")
        assert count > 1
        assert events == ["expect"] * count + ["send"] * count
