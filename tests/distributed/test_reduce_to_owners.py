"""``gradients="reduce"`` with one worker a layer: gradients go to it alone, and no more travels than with plain SGD."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import natgrad
from natgrad.distributed import Slices
from tests.distributed.deep_models import train_model
from tests.distributed.jobs import (
    Job,
    Training,
    assert_bit_identical,
    assert_close,
    batch,
    network,
    place,
    share,
    train,
)
from tests.distributed.test_traffic import BYTES

STEPS = range(7)
PLACEMENTS = ["mem-opt", "reduce-scatter"]


def options(placement):
    return {"placement": placement, "gradients": "reduce"}


@pytest.mark.some(2)
@pytest.mark.values
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_ranks_equal_one_process(ranks, placement, count, wrapped):
    results = ranks.run(count, train, Job(options=options(placement), wrapped=wrapped), STEPS)
    assert_bit_identical(results)
    assert_close(results[0], train(Job(), STEPS))


@pytest.mark.parametrize("count", [2, 4])
def test_a_sum_loss_and_its_clip(ranks, count):
    job = Job(reduction="sum", ragged=True, wrapped=False, options=options("reduce-scatter"), lr=0.1 / 12, kl_clip=1e-5)
    results = ranks.run(count, train, job, STEPS)
    assert_bit_identical(results)
    expected = train(Job(reduction="sum", options={"gradients": "reduce"}, lr=0.1 / 12, kl_clip=1e-5), STEPS)
    assert expected.metrics["kl_scale"] < 0.9
    assert results[-1].metrics["kl_scale"] == pytest.approx(expected.metrics["kl_scale"])
    assert_close(results[0], expected)


@pytest.mark.some(3)
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("name", ["resnet", "transformer"])
def test_models_with_parameters_that_are_left_to_the_optimizer(ranks, name, count):
    left = {"resnet": "1.first", "transformer": "encoder.linear1"}[name]
    curvature = {left: None, "*norm*": None, "*": natgrad.KFAC()}
    expected = train_model(name, STEPS, {"curvature": curvature})
    results = ranks.run(count, train_model, name, STEPS, options("mem-opt") | {"curvature": curvature})
    for result in results:
        for key, value in result.items():
            assert torch.equal(value, results[0][key])
            assert float((value - expected[key]).norm()) <= 1e-10 * max(1e-3, float(expected[key].norm())), key


class Odd(nn.Module):
    """Parameters of two dtypes, one without dimensions, tied, packed, frozen and unused ones, and a branch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gain = nn.Parameter(torch.ones(5))  # float32, before all float64: what follows it is not aligned
        self.shift = nn.Parameter(torch.tensor(0.1, dtype=torch.float64))
        self.embedding = nn.Embedding(7, 4).double()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True).double()
        self.trunk, self.branch, self.spare = (nn.Linear(*size).double() for size in ((4, 5), (5, 5), (5, 2)))
        self.stray = nn.Bilinear(2, 2, 3).double()
        self.back = nn.Linear(5, 4).double()
        self.head = nn.Linear(4, 7, bias=False).double()
        self.head.weight = self.embedding.weight
        self.trunk.bias.requires_grad_(False)
        self.stray.bias.requires_grad_(False)

    def forward(self, tokens, use):
        y = self.embedding(tokens)
        y = self.trunk(self.attention(y, y, y, need_weights=False)[0]).tanh() * self.gain + self.shift
        return self.head(self.back((self.branch(y).tanh() if use else y).mean(1)))


def train_odd(how, steps):
    """The samples that pass through the branch are those of one rank of four, and in step 2 nobody's."""
    rank, ranks = place()
    model = Odd()
    curvature = {"attention.out_proj": None, "stray": None, "*": natgrad.KFAC()}
    preconditioner = natgrad.Preconditioner(
        model, curvature, damping=0.3, refresh=natgrad.Refresh(factors=100, inverses=100), **how
    )
    parts = 4 // ranks
    for step in range(steps):
        model.zero_grad()
        for part in range(rank * parts, rank * parts + parts):
            generator = torch.Generator().manual_seed(10 * step + part)
            tokens = torch.randint(7, (3, 4), generator=generator)
            y = torch.randint(7, (3,), generator=generator)
            use = part == 1 and step != 2
            (cross_entropy(model(tokens, use), y) / parts).backward()
        assert model.spare.weight.grad is None
        before = [name for name, p in model.named_parameters() if p.grad is None]
        preconditioner.step()
        lacking = [name for name, p in model.named_parameters() if p.grad is None]
        assert all((name in lacking) == (step == 2) for name in before if name.startswith("branch"))
        assert {name.partition(".")[0] for name in lacking} - {"branch"} == {"trunk", "spare", "stray"}
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.sub_(0.1 * p.grad)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("count", [2, 4])
def test_odd_parameters(ranks, count):
    """Equal to those of the all-reduce, of one process but for what one rank alone has used."""
    results, plain = (ranks.run(count, train_odd, how, 4) for how in (options("mem-opt"), {"gradients": "reduce"}))
    alone = train_odd({}, 4)
    for result in results:
        for name, value in result.items():
            assert torch.equal(value, results[0][name]), name
            torch.testing.assert_close(value, plain[0][name], rtol=1e-5, atol=1e-7, msg=name)
            torch.testing.assert_close(value, alone[name], rtol=1e-5, atol=1e-7, msg=name)


def poisoned():
    training = Training(Job(options=options("mem-opt"), wrapped=False))
    for step in range(2):
        training.step(step)
    x, y = (share(tensor) for tensor in batch(2))
    training.optimizer.zero_grad()
    cross_entropy(training.model(x), y).backward()
    if place()[0] == 1:
        training.model[3].weight.grad[0, 0] = float("nan")
    training.preconditioner.step()
    return training.result()


@pytest.mark.parametrize("count", [2, 4])
def test_a_gradient_that_is_not_finite_on_one_rank(ranks, count):
    results = ranks.run(count, poisoned)
    assert_bit_identical(results)
    for result in results:
        zero = [not bool(gradient.any()) for gradient in result.gradients]
        assert zero == [False, False, True, True, False, False]
        assert result.metrics["skipped_gradients"] == 1


# --- What travels ---------------------------------------------------------------------------------------------------


def count_messages(placement, left):
    """A step without a refresh: its messages, and the bytes of gradients."""
    calls = []
    training = Training(Job(options=options(placement), wrapped=False, refresh={"factors": 100, "inverses": 100}))
    if left:
        curvature = {"3": None, "*": natgrad.KFAC()}
        training.preconditioner = natgrad.Preconditioner(
            training.model,
            curvature,
            optimizer=training.optimizer,
            refresh=natgrad.Refresh(factors=100, inverses=100),
            **options(placement),
        )
    for step in range(2):
        training.step(step)
    before = training.preconditioner.traffic()
    names = [name for name in dir(dist) if name.startswith(("all_", "reduce", "broadcast", "send", "isend", "gather"))]
    originals = {name: getattr(dist, name) for name in names if callable(getattr(dist, name))}
    for name, original in originals.items():

        def counted(*args, original=original, name=name, **kwargs):
            calls.append(name)
            return original(*args, **kwargs)

        setattr(dist, name, counted)
    try:
        training.step(2)
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    after, plan = training.preconditioner.traffic(), training.preconditioner.plan
    owned, shared = [0] * plan.ranks, [0] * plan.ranks
    for key, work in plan.layers.items():
        owned[plan.column_of(key)] += work.gradients
        # Back with <V, W> of each block, whether there is curvature, and how it fares.
        shared[plan.column_of(key)] += work.gradients + work.blocks + 2
    rest = sum(p.numel() for p in training.model.parameters()) - sum(owned)
    return calls, {kind: sent - before.get(kind, 0) for kind, sent in after.items()}, (owned, shared, rest)


@pytest.mark.values
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("placement", [*PLACEMENTS, "dp"])
def test_traffic_is_about_that_of_one_all_reduce(ranks, placement, count, left):
    """A reduce-scatter and an all-gather of even slices, and twice the surplus of ranks that own more than a slice.

    What has no curvature is summed on all ranks.
    """
    results = ranks.run(count, count_messages, placement, left)
    gather = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    for calls, _, (_, _, rest) in results:
        sums = 3 if rest else 2  # counters, and whether the pass has sent what it should
        assert (calls.count("all_reduce"), calls[-1]) == (sums, gather)
        moves = [call for call in calls[:-1] if call != "all_reduce"]
        assert set(moves) <= {"all_to_all_single", "isend"}  # slices, and what some ranks own beside them
        assert moves.count("all_to_all_single") == 1
        assert moves.count("isend") <= 2 * (count - 1)
    sent = {kind: sum(sent[kind] for _, sent, _ in results) for kind in results[0][1]}
    owned, shared, rest = results[0][2]
    elements = sum(Slices(tuple(sizes)).sent(rank) for sizes in (owned, shared) for rank in range(count))
    assert sent["gradients"] == (elements + 2 * (count - 1) * rest) * BYTES
    assert sent["factors"] == sent["inverses"] == sent.get("padding", 0) == 0
    assert sent["counters"] >= 2 * (count - 1) * (1 + 6) * 8  # the samples, and whether there is each gradient


def train_uncovered(placement, parts):
    """Ragged batches in `parts` of a model of whose layers none is covered; an evaluation counts for nothing."""
    model = network()
    preconditioner = natgrad.Preconditioner(model, {"*": None}, gradients="reduce", placement=placement)
    for step in range(3):
        x, y = (share(tensor, ragged=True) for tensor in batch(step))
        model.zero_grad()
        with torch.no_grad():
            model(x)
        for xs, ys in zip(x.chunk(parts), y.chunk(parts), strict=True):
            (cross_entropy(model(xs), ys) * len(xs) / len(x)).backward()
        preconditioner.step()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.1 * parameter.grad)
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.filterwarnings("ignore::natgrad.NatgradWarning")
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("placement", ["comm-opt", "mem-opt"])
def test_ranks_weigh_by_samples_also_where_no_layer_is_covered(ranks, placement, parts):
    expected = train_uncovered("comm-opt", 1)
    for found in ranks.run(2, train_uncovered, placement, parts):
        for p, q in zip(found, expected, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)
