"""What is summed ahead in forward passes is a guess: models and trainings that make it a wrong one."""

import gc
import weakref
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import natgrad
from natgrad.sums.guesses import Guesses
from tests.distributed import jobs
from tests.distributed.jobs import place
from tests.distributed.test_pipelined import SINGLY
from tests.distributed.test_pipelined_forward import LAYERS, WARM, Trainer, compare, data, train


def train_two_players(placement):
    """A discriminator sees true and made samples, and made ones again for the generator's loss alone."""
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    trainer = Trainer(
        placement, nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double(), gradients="reduce"
    )
    for step in range(8):
        draw = torch.Generator().manual_seed(10 * step + place()[0])
        x, z = (torch.randn(4, width, generator=draw, dtype=torch.float64) for width in (3, 2))
        labels = torch.zeros(4, dtype=torch.long)
        generator.zero_grad()
        cross_entropy(trainer.model(generator(z)), 1 - labels).backward()
        trainer.model.zero_grad()
        made = generator(z).detach()
        if step % 2:  # in one pass or in two
            trainer.backward(cross_entropy(trainer.model(made), labels))
            trainer.backward(cross_entropy(trainer.model(x), 1 - labels))
        else:
            losses = [cross_entropy(trainer.model(made), labels), cross_entropy(trainer.model(x), 1 - labels)]
            trainer.backward(sum(losses))
        trainer.finish()
    return trainer.result()


def test_two_players(ranks):
    compare(ranks, 2, train_two_players)


def train_again(placement):
    """Losses that share a forward pass, differentiated one by one; now and then one of them only."""
    trainer = Trainer(placement, gradients="reduce")
    for step in range(8):
        x, y = data(step)
        outputs = trainer.model(x)
        trainer.backward(cross_entropy(outputs, y), retain_graph=step % 3 != 2)
        if step % 3 != 2:
            trainer.backward(outputs.pow(2).mean())
        trainer.finish()
    return trainer.result()


def test_a_retained_graph(ranks):
    compare(ranks, 2, train_again)


class Checkpointed(nn.Module):
    """The network, recomputed: all of it, or a first part."""

    def __init__(self, how):
        super().__init__()
        self.layers, self.how = jobs.network(), how

    def forward(self, x):
        first, rest = (self.layers[:4], self.layers[4:]) if self.how == "reentrant" else (self.layers, nn.Identity())
        if self.how == "reentrant":
            return rest(checkpoint(first, x.requires_grad_(), use_reentrant=True))
        if self.how == "selective":
            contexts = partial(create_selective_checkpoint_contexts, _keep_products)
            return rest(checkpoint(first, x, use_reentrant=False, context_fn=contexts))
        return rest(checkpoint(first, x, use_reentrant=False))


def _keep_products(context, operation, *args, **options):
    kept = operation.__name__.split(".")[0] in ("addmm", "addmm_", "baddbmm_", "convolution")
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def unnoticed_products():
    """Check that nothing of the pass around it changes the products of inputs, nor sees them."""
    original = natgrad.KFAC.observe_inputs

    def observe_inputs(self, sums, inputs):
        assert not torch.is_autocast_enabled("cpu")
        assert not torch.is_grad_enabled()
        assert _get_current_dispatch_mode() is None
        original(self, sums, inputs)

    natgrad.KFAC.observe_inputs = observe_inputs
    try:
        yield
    finally:
        natgrad.KFAC.observe_inputs = original


def recompute(placement, how):
    with unnoticed_products():
        return train(placement, model=Checkpointed(how)).result()


@pytest.mark.parametrize(("how", "early"), [("reentrant", 1), ("plain", LAYERS), ("selective", LAYERS)])
def test_checkpointing(ranks, how, early):
    """What is recomputed is not guessed twice; reentrant checkpoints show nothing before they are recomputed."""
    ahead, left, _ = compare(ranks, 2, recompute, how)
    assert all(own[WARM:] == [early] * 4 for own in ahead)
    assert all(own[WARM:] == [LAYERS + early] * 4 for own in left)


class Branching(nn.Module):
    """A layer is used twice, or once, or its output is not used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = (nn.Linear(*sizes).double() for sizes in ((3, 4), (4, 4), (4, 2)))

    def forward(self, x, way):
        hidden = self.first(x).tanh()
        seen = self.middle(hidden).tanh()
        if way == "twice":
            seen = self.middle(seen).tanh()
        return self.last(hidden if way == "unused" else seen)


def branch(placement):
    trainer = Trainer(placement, Branching(), gradients="reduce")
    for step, way in enumerate(["once"] * 4 + ["twice", "once", "once", "unused", "once", "once", "twice", "unused"]):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + place()[0]), dtype=torch.float64)
        trainer.backward(trainer.model(x, "once" if place()[0] else way).pow(2).mean())
        trainer.finish()
    return trainer.result()


def test_layers_that_are_used_otherwise_than_before(ranks):
    ahead, *_ = compare(ranks, 2, branch)
    assert ahead[0][:7] == [0, 0, LAYERS, LAYERS, LAYERS, 0, LAYERS]


def throw_away(placement):
    trainer = Trainer(placement)
    for step in range(7):
        x, y = data(step)
        if step in (2, 5):  # between the forward pass and its gradients, or after them
            loss, _ = trainer.forward(x + 1, y)
            if step == 5:
                loss.backward()
                trainer.model.zero_grad()
            trainer.preconditioner.discard()
        trainer.backward(*trainer.forward(x, y))
        trainer.finish()
    return trainer.result()


def test_passes_that_are_discarded(ranks):
    compare(ranks, 2, throw_away)


def round_products(placement):
    """Float32, and autocast that would round the products of what is not rounded itself."""
    trainer = Trainer(placement, jobs.network().float())
    for step in range(5):
        x, y = data(step)
        with torch.autocast("cpu", torch.bfloat16), unnoticed_products():
            loss, outputs = trainer.forward(x.float(), y)
        trainer.backward(loss, outputs)
        trainer.finish()
    parameters, *rest = trainer.result()
    return {name: p.double() for name, p in parameters.items()}, *rest


def test_autocast_does_not_round_what_leaves(ranks):
    ahead, *_ = compare(ranks, 2, round_products, tolerance=1e-5)
    assert all(own[WARM:] == [LAYERS] * 3 for own in ahead)


# --- Nothing is kept --------------------------------------------------------------------------------------------


def keep(placement):
    """Tell how many of the guessed sums live on after each pass, and after each step."""
    alive, original = [], Guesses.make

    def make(self, layer, use, sums):
        alive.extend(weakref.ref(tensor) for tensor in sums.values())
        original(self, layer, use, sums)

    def count():
        gc.collect()
        return sum(tensor() is not None for tensor in alive)

    Guesses.make = make
    try:
        trainer, counts = Trainer(placement), []
        for step in range(6):
            x, y = data(step)
            loss, outputs = trainer.forward(x, y)
            before = count()
            if step == 4:
                del loss, outputs  # never differentiated, and no other pass either
            else:
                trainer.backward(loss)
            after = count()
            if step == 4:
                for p in trainer.model.parameters():
                    p.grad = torch.zeros_like(p)
            trainer.finish()
            counts.append((before, after, count()))
        return counts, len(alive)
    finally:
        Guesses.make = original


def test_guesses_are_dropped(ranks):
    for counts, made in ranks.run(2, keep, SINGLY):
        assert counts[0] == (0, 0, 0)
        assert counts[1:4] == [(LAYERS, 0, 0)] * 3
        assert counts[4] == (LAYERS, LAYERS, 0)
        assert counts[5] == (0, 0, 0)  # after a wrong one there is none
        assert made == 4 * LAYERS
