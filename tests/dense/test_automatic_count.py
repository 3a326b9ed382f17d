"""``count="auto"``: positions whose gradient is zero at the layer nearest to the loss do not count."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import natgrad
from tests.dense.methods import METHODS

VOCABULARY = 7


class Words(nn.Module):
    """A small model of tokens, with options for its head."""

    def __init__(self, *, tied=False, pieces=1, checkpointed=False):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(VOCABULARY, 5)
        self.mix, self.norm = nn.Linear(5, 5), nn.LayerNorm(5)
        self.head = nn.Linear(5, VOCABULARY, bias=not tied)
        if tied:
            self.head.weight = self.table.weight
        self.pieces, self.checkpointed = pieces, checkpointed

    def forward(self, x):
        y = self.table(x)
        y = checkpoint(self.trunk, y, use_reentrant=False) if self.checkpointed else self.trunk(y)
        return torch.cat([self.head(part) for part in y.chunk(self.pieces, 1)], 1)

    def trunk(self, y):
        return self.norm(y + self.mix(y).tanh() + self.mix(y.mean(1, keepdim=True)).tanh())


def batch(length, seed):
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randint(VOCABULARY, (2, 2, length), generator=generator)
    return x, y.masked_fill(torch.rand(2, length, generator=generator) < 0.5, -100)


def train(method, lengths, *, model=None, count="auto", by_attribute=False, accumulation="mean"):
    """Three steps on a loss that the number of all positions divides; `count` "explicit" is this number."""
    model = (model or Words()).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    curvature = METHODS[method].curvature(**METHODS[method].options)
    preconditioner = natgrad.Preconditioner(
        model, curvature, optimizer=optimizer, damping=0.05, reduction="tokens", accumulation=accumulation, refresh=1
    )
    both = natgrad.PreconditionedOptimizer(optimizer, preconditioner)
    if by_attribute:
        both.count = count
    for step in range(3):
        both.zero_grad()
        parts = [batch(length, 10 * step + index) for index, length in enumerate(lengths)]
        number = sum(int((y >= 0).sum()) for _, y in parts)
        for x, y in parts:
            factor = len(parts) if accumulation == "sum" else 1
            (cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum") * factor / number).backward()
        both.step(count=number if count == "explicit" else None if by_attribute else count)
        assert both.count == ("auto" if by_attribute else None)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def assert_equal(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("method", ["eigen", "reduce", "ekfac", "rank one", "hylo kid"])
def test_auto_is_the_right_number(method):
    assert_equal(train(method, [6]), train(method, [6], count="explicit"))
    for accumulation in ("mean", "sum"):
        explicit = train(method, [6, 6], count="explicit", accumulation=accumulation)
        assert_equal(train(method, [6, 6], accumulation=accumulation), explicit)


@pytest.mark.parametrize(
    "options", [{"tied": True}, {"pieces": 2}, {"tied": True, "pieces": 3}, {"checkpointed": True}]
)
def test_other_heads(options):
    explicit = train("eigen", [6, 6], model=Words(**options), count="explicit")
    assert_equal(train("eigen", [6, 6], model=Words(**options)), explicit)


class Rowwise(nn.Sequential):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Embedding(VOCABULARY, 5), nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, VOCABULARY))


@pytest.mark.parametrize("method", ["eigen", "ekfac", "sngd"])
def test_micro_batches_of_different_lengths_are_one_batch(method):
    """All passes have the same scale if the attribute is set before the first one."""

    def whole():
        model = Rowwise().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        curvature = METHODS[method].curvature(**METHODS[method].options)
        preconditioner = natgrad.Preconditioner(
            model, curvature, optimizer=optimizer, damping=0.05, reduction="tokens", refresh=1
        )
        for step in range(3):
            optimizer.zero_grad()
            parts = [batch(length, 10 * step + index) for index, length in enumerate((3, 8, 5))]
            x, y = (torch.cat(some, 1) for some in zip(*parts, strict=True))
            cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
            preconditioner.step(count=int((y >= 0).sum()))
            optimizer.step()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    assert_equal(train(method, [3, 8, 5], model=Rowwise(), by_attribute=True), whole())


def test_losses_of_one_forward_pass_count_what_any_of_them_counts():
    def gradients(backward, count):
        model = Words().double()
        preconditioner = natgrad.Preconditioner(model, damping=0.05, reduction="tokens", refresh=1)
        x, first = batch(6, 0)
        _, second = batch(6, 1)
        logits = model(x).flatten(0, 1)
        backward(*(cross_entropy(logits, y.flatten(), reduction="sum") / 9 for y in (first, second)))
        preconditioner.step(count=count or int(((first >= 0) | (second >= 0)).sum()))
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    def in_turn(first, second):
        first.backward(retain_graph=True)
        second.backward()

    explicit = gradients(lambda first, second: (first + second).backward(), None)
    assert_equal(gradients(in_turn, "auto"), explicit)


def test_sampled_labels():
    def gradients(count):
        model = Words().double()
        curvature = natgrad.KFAC(fisher="sampled", likelihood="categorical")
        preconditioner = natgrad.Preconditioner(model, curvature, damping=0.05, reduction="tokens", refresh=1)
        x, y = batch(6, 0)
        logits = model(x)
        preconditioner.backward(cross_entropy(logits.flatten(0, 1), y.flatten()), logits, mask=y >= 0)
        preconditioner.step(count=count or int((y >= 0).sum()))
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    assert_equal(gradients("auto"), gradients(None))


def test_every_term_of_a_loss_has_its_own_positions():
    def gradients(counts):
        torch.manual_seed(0)
        trunk, first, second = nn.Linear(3, 4).double(), nn.Linear(4, VOCABULARY).double(), nn.Linear(4, 2).double()
        model = nn.ModuleDict({"trunk": trunk, "first": first, "second": second})
        reduction = {"first": "tokens", "second": "tokens"}
        preconditioner = natgrad.Preconditioner(model, damping=0.05, reduction=reduction, refresh=1)
        (_, y), (_, z) = batch(6, 0), batch(6, 1)
        hidden = trunk(torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(0)).double()).tanh()
        loss = cross_entropy(first(hidden).flatten(0, 1), y.flatten())
        (loss + cross_entropy(second(hidden).flatten(0, 1), z.flatten().clamp(max=1))).backward()
        numbers = {"first": int((y >= 0).sum()), "second": int((z >= 0).sum())}
        preconditioner.step(count=counts or numbers)
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", natgrad.NatgradWarning)  # the model itself is not called
        assert_equal(gradients("auto"), gradients(None))


def step_of(y, count, *, reduction="tokens", factor=1.0):
    model = Rowwise().double()
    preconditioner = natgrad.Preconditioner(model, damping=0.05, reduction=reduction, refresh=1)
    x, _ = batch(6, 0)
    (factor * cross_entropy(model(x).flatten(0, 1), y.flatten())).backward()
    preconditioner.step(count=count)
    return preconditioner


def test_masked_positions_without_a_count_are_warned_of():
    _, y = batch(6, 0)
    message = rf"{int((y >= 0).sum())} of {y.numel()} positions.*count=\"auto\""
    with pytest.warns(natgrad.NatgradWarning, match=message):
        step_of(y, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step_of(y.clamp(min=0), None)
        step_of(y, y.numel())
        step_of(y, "auto")


def test_a_count_may_be_a_fraction():
    """The loss divides by 2.5: its gradient times 2.5 is that of a position's loss."""
    _, y = batch(6, 0)
    number = int((y >= 0).sum())
    found = step_of(y, 2.5, factor=number / 2.5).state_dict()["blocks"]["1.weight"]
    expected = step_of(y, number).state_dict()["blocks"]["1.weight"]
    for name in ("A", "G"):
        assert_equal(found[name] * 2.5, expected[name] * number)


@pytest.mark.parametrize("count", [-0.5, float("nan"), float("inf"), "automatic", True])
def test_other_counts_are_refused(count):
    _, y = batch(6, 0)
    with pytest.raises(ValueError, match=r"count=.*'auto', a number >= 0"):
        step_of(y, count)


def test_auto_needs_tokens():
    _, y = batch(6, 0)
    with pytest.raises(ValueError, match=r"count='auto'.*reduction='tokens'"):
        step_of(y.clamp(min=0), "auto", reduction="mean")
    step_of(y, "auto", reduction="auto")  # which is "tokens" here
