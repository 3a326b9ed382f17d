"""Layers that read the very same tensor have its Gram product made once, and nothing else changes, to the last bit."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.autograd.graph import allow_mutation_on_saved_tensors, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint

import natgrad
from natgrad.capture.sightings import Sightings
from natgrad.curvature.narrow_sides import Diagonal
from natgrad.curvature.sides import Full
from natgrad.layers.linear import LinearLayer

WIDTH = 6


class Block(nn.Module):
    """Attention with grouped queries, then a gated map: two tensors that three and two layers read."""

    def __init__(self, *, bias=True, key_bias=None, groups=2, rounds=1, change=None):
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.key = nn.Linear(WIDTH, WIDTH // groups, bias=bias if key_bias is None else key_bias)
        self.value = nn.Linear(WIDTH, WIDTH // groups, bias=bias)
        self.gate, self.up = nn.Linear(WIDTH, 8, bias=bias), nn.Linear(WIDTH, 8, bias=bias)
        self.down = nn.Linear(8, WIDTH)
        self.groups, self.rounds, self.change = groups, rounds, change

    def forward(self, x):
        for _ in range(self.rounds):
            x = self.block(torch.tanh(x))
        return x

    def block(self, x):
        query = self.query(x)
        if self.change is not None:
            self.change(x)
        key, value = (part(x).repeat(1, 1, self.groups) for part in (self.key, self.value))
        attended = torch.tanh(scaled_dot_product_attention(query, key, value))
        return self.down(silu(self.gate(attended)) * self.up(attended))


class Attending(nn.Module):
    """Torch's own attention, whose packed projections are three layers."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x)[0]


class Branches(nn.Module):
    """Convolutions of one tensor: two that see the same patches, two that do not, and a transposed pair."""

    def __init__(self):
        super().__init__()
        kinds = [{"padding": 1}, {"padding": 1}, {"padding": 1, "stride": 2}, {"padding": 1, "padding_mode": "reflect"}]
        self.branches = nn.ModuleList(nn.Conv1d(WIDTH, 2, 3, **kind) for kind in kinds)
        self.turned = nn.ModuleList(nn.ConvTranspose1d(WIDTH, 2, 3, stride=2, output_padding=p) for p in (0, 1))

    def forward(self, x):
        x = torch.tanh(x).mT
        return torch.cat([branch(x) for branch in (*self.branches, *self.turned)], -1)


def train(model, *, curvature=None, micro=1, steps=3, context=nullcontext, forward=None, mask=None, **options):
    """Train some steps; return all gradients and the state, and how many factors of inputs were summed up."""
    model.double()
    torch.manual_seed(3)
    refresh = natgrad.Refresh(factors=1, inverses=2)
    curvature = natgrad.KFAC() if curvature is None else curvature
    preconditioner = natgrad.Preconditioner(model, curvature, damping=0.1, refresh=refresh, **options)
    found, products = [], 0
    for _ in range(steps):
        for _ in range(micro):
            x = torch.randn(4, 5, WIDTH, dtype=torch.float64)
            with context(), Counting() as counts:
                outputs = (forward or (lambda model, x: model(x)))(model, x)
                losses = outputs.square().sum(-1) if mask is None else outputs.square().sum(-1) * mask
                (losses.sum() / (len(x) if mask is None else mask.sum()) / micro).backward()
            products += len(counts)
        preconditioner.step(**({} if mask is None else {"count": int(mask.sum()) * micro}))
        found += [p.grad.clone() for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.05 * p.grad)
                p.grad = None
    blocks = preconditioner.state_dict()["blocks"]
    return found + [blocks[key][name] for key in sorted(blocks) for name in sorted(blocks[key])], products


class Counting:
    """Notes every product of rows with themselves that is a factor of inputs: of gradients they come with a scale."""

    def __enter__(self):
        self.before, counts = (Full.add_, Diagonal.add_), []

        def counted(original):
            def add_(side, out, rows, *, scale, overwrite):
                if scale == 1.0:
                    counts.append(out.shape)
                original(side, out, rows, scale=scale, overwrite=overwrite)

            return add_

        Full.add_, Diagonal.add_ = map(counted, self.before)
        return counts

    def __exit__(self, *error):
        Full.add_, Diagonal.add_ = self.before


def compare(make, monkeypatch, **options):
    """Return how many products are made, and how many without sharing; all else must be equal to the last bit."""

    def run():
        torch.manual_seed(0)
        return train(make(), **options)

    shared, products = run()
    with monkeypatch.context() as patch:
        patch.setattr(Sightings, "number", lambda *_: None)
        alone, every = run()
    assert len(shared) == len(alone)
    for left, right in zip(shared, alone, strict=True):
        assert torch.equal(left, right)
    return products, every


CURVATURES = {
    "eigen": natgrad.KFAC(),
    "inverse": natgrad.KFAC(form="inverse"),
    "inputs alone": natgrad.KFAC(sides="a"),
    "ekfac": natgrad.EKFAC(),
    "diagonal": natgrad.KFAC(max_factor_size=2),
}


@pytest.mark.parametrize("name", CURVATURES)
def test_queries_keys_and_values_share_one_product(name, monkeypatch):
    """So do gate and up; stacks do not matter, for keys are narrower than queries."""
    assert compare(Block, monkeypatch, curvature=CURVATURES[name]) == (9, 18)


def test_blocks_of_a_wide_side_share_each(monkeypatch):
    curvature = natgrad.KFAC(max_factor_size=4, wide="blocks")
    made, every = compare(lambda: Block(groups=1), monkeypatch, curvature=curvature)
    assert made == every  # what is counted are the diagonals and the full ones, and there are none
    assert made == 0


def test_packed_projections_share_too(monkeypatch):
    assert compare(Attending, monkeypatch) == (6, 12)


def test_convolutions_share_where_they_see_the_same(monkeypatch):
    assert compare(Branches, monkeypatch) == (15, 18)


def test_another_bias_is_another_product(monkeypatch):
    """Queries have one and keys do not, nor gate and up."""
    assert compare(lambda: Block(key_bias=False), monkeypatch) == (12, 18)
    assert compare(lambda: Block(bias=False, key_bias=True), monkeypatch) == (12, 18)


@pytest.mark.parametrize("micro", [2, 3])
def test_accumulated(micro, monkeypatch):
    assert compare(Block, monkeypatch, micro=micro) == (9 * micro, 18 * micro)


@pytest.mark.parametrize("micro", [1, 2])
def test_layers_used_again_and_again(micro, monkeypatch):
    """In one backward pass, as in a model whose blocks share their weights."""
    assert compare(lambda: Block(rounds=3), monkeypatch, micro=micro) == (27 * micro, 54 * micro)


def test_a_tensor_changed_in_between_is_another(monkeypatch):
    """Keys and values still see the same, and so do gate and up."""
    options = {"context": allow_mutation_on_saved_tensors}
    assert compare(lambda: Block(change=lambda x: x.mul_(2)), monkeypatch, **options) == (12, 18)
    assert compare(Block, monkeypatch, **options) == (9, 18)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(reentrant, monkeypatch):
    def forward(model, x):
        return checkpoint(model, x.requires_grad_(), use_reentrant=reentrant)

    assert compare(Block, monkeypatch, forward=forward) == (9, 18)


def test_tensors_that_are_kept_elsewhere_come_back_one_by_one(monkeypatch):
    def context():
        return saved_tensors_hooks(torch.clone, lambda kept: kept)

    assert compare(Block, monkeypatch, context=context) == (18, 18)


@pytest.mark.cpu
def test_token_losses_share_where_all_positions_count(monkeypatch):
    """Masks may differ from layer to layer: only gradients tell."""
    every = torch.ones(4, 5, dtype=torch.float64)
    assert compare(Block, monkeypatch, reduction="tokens", mask=every) == (9, 18)
    some = every.clone()
    some[:, 3:] = 0
    made, alone = compare(
        lambda: nn.ModuleList([nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)]),
        monkeypatch,
        forward=lambda model, x: torch.cat([part(x) for part in model], -1),
        reduction="tokens",
        mask=some,
    )
    assert made == alone == 6


def test_pooled_rows_are_as_they_were(monkeypatch):
    assert compare(Block, monkeypatch, curvature=natgrad.KFAC(sharing="reduce"))[0] == 18


def test_two_passes_through_one_graph(monkeypatch):
    """Each pass shows all uses again, and they share again."""

    def run():
        torch.manual_seed(0)
        model = Block().double()
        preconditioner = natgrad.Preconditioner(model, natgrad.KFAC(), damping=0.1)
        outputs = model(torch.randn(4, 5, WIDTH, dtype=torch.float64))
        with Counting() as counts:
            outputs.square().sum().backward(retain_graph=True)
            outputs.sum().backward()
        preconditioner.step()
        return [p.grad for p in model.parameters()], len(counts)

    shared, products = run()
    monkeypatch.setattr(Sightings, "number", lambda *_: None)
    alone, every = run()
    assert all(map(torch.equal, shared, alone))
    assert (products, every) == (6, 12)


def test_a_pass_that_was_thrown_away_leaves_nothing_behind(monkeypatch):
    def forward(model, x):
        model(x).sum().backward()
        model.zero_grad()
        return model(x)

    compare(Block, monkeypatch, forward=forward)


def test_no_memory_is_held():
    model = Block().double()
    preconditioner = natgrad.Preconditioner(model, natgrad.KFAC(), damping=0.1)
    seen = []
    handle = model.query.register_forward_pre_hook(
        lambda _, args: seen.append(StorageWeakRef(args[0].untyped_storage()))
    )
    loss = model(torch.randn(4, 5, WIDTH, dtype=torch.float64)).sum()
    assert not seen[0].expired()
    loss.backward()
    assert seen[0].expired()
    handle.remove()
    preconditioner.step()


# --- What is the same -------------------------------------------------------------------------------------------


def test_a_tensor_is_known_by_its_memory_version_and_view():
    sightings, layer = Sightings(), LinearLayer("a", nn.Linear(4, 2))
    x = torch.randn(3, 4)
    number = sightings.number(x, layer, 3, 7)
    assert sightings.number(x.detach(), layer, 3, 7) == number
    others = [(x[:2], 3), (x.view(1, 3, 4), 3), (x.mT, 3), (x, 1), (x.clone(), 3), (x.view(torch.int32), 3)]
    numbers = {number, *(sightings.number(tensor, layer, samples, 7) for tensor, samples in others)}
    assert len(numbers) == 1 + len(others)
    assert sightings.number(x, LinearLayer("b", nn.Linear(4, 2, bias=False)), 3, 7) not in numbers
    x.add_(1)
    assert sightings.number(x, layer, 3, 7) not in numbers


def test_the_address_of_a_tensor_that_is_gone_says_nothing():
    sightings, layer, numbers = Sightings(), LinearLayer("a", nn.Linear(4, 2)), set()
    for _ in range(50):
        numbers.add(sightings.number(torch.randn(3, 4), layer, 3, 7))
    assert len(numbers) == 50


def test_no_number_outlives_its_pass():
    sightings, layer, x = Sightings(), LinearLayer("a", nn.Linear(4, 2)), torch.randn(3, 4)
    numbers = [sightings.number(x, layer, 3, task) for task in (7, 7, 8, 7)]
    assert numbers[0] == numbers[1]
    assert len(set(numbers)) == 3


def test_what_has_no_version_or_shows_more_than_itself_has_no_number():
    sightings, layer = Sightings(), LinearLayer("a", nn.Linear(4, 2))
    with torch.inference_mode():
        x = torch.randn(3, 4)
    assert sightings.number(x, layer, 3, 7) is None
    found = []
    torch.vmap(lambda own: found.append(sightings.number(own, layer, 3, 7)) or own)(torch.randn(3, 4))
    assert found == [None]
