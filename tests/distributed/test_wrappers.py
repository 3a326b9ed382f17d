"""DistributedDataParallel with its options, compiled and checkpointed: always the plain single-process result."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import natgrad
from tests.distributed.jobs import batch, place, share

SAMPLED = {"fisher": "sampled", "likelihood": "categorical"}


class Network(nn.Module):
    """Two layers, a checkpoint around one of them, and a branch that no step uses unless it is told to."""

    def __init__(self, checkpointed=False):
        super().__init__()
        self.convolution, self.hidden, self.spare = nn.Conv1d(2, 4, 3, stride=2), nn.Linear(12, 5), nn.Linear(12, 5)
        self.head = nn.Linear(5, 3)
        self.checkpointed, self.branching = checkpointed, False

    def forward(self, x):
        x = self.convolution(x).tanh().flatten(1)
        if self.checkpointed:
            x = checkpoint(self.hidden, x, use_reentrant=False)
        else:
            x = (self.spare if self.branching else self.hidden)(x)
        return self.head(x.tanh())


def wrap(model, wrapper, way, options):
    """Return what the loop calls and what natgrad is given."""
    compiled = {"backend": "aot_eager"}
    if way == "compiled inside" and wrapper:
        model = torch.compile(model, **compiled)
    if way == "compiled in place":
        model.compile(**compiled)
    wrapped = DistributedDataParallel(model, **options) if wrapper else model
    return torch.compile(wrapped, **compiled) if way == "compiled outside" else wrapped


def train(way=None, options=None, curvature=None, micro_batches=1, checkpointed=None, branches=(), steps=4):
    torch.compiler.reset()
    torch.manual_seed(0)
    model = Network(checkpointed).double()
    if not branches and not (options or {}).get("find_unused_parameters"):
        model.spare.requires_grad_(False)
    called = wrap(model, dist.is_initialized(), way, options or {})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    preconditioner = natgrad.Preconditioner(
        called,
        natgrad.KFAC(**(curvature or {})),
        optimizer=optimizer,
        damping=0.05,
        refresh=natgrad.Refresh(factors=2, inverses=2),
    )
    for step in range(steps):
        model.branching = step in branches
        x, y = (share(tensor) for tensor in batch(step))
        optimizer.zero_grad()
        for index, (xs, ys) in enumerate(zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True)):
            synchronised = index == micro_batches - 1 or not isinstance(called, DistributedDataParallel)
            # PyTorch's own limit: with static_graph the very first backward pass must synchronise.
            synchronised |= (options or {}).get("static_graph", False) and step == 0
            with nullcontext() if synchronised else called.no_sync():
                outputs = called(xs)
                preconditioner.backward(cross_entropy(outputs, ys) / micro_batches, outputs)
        preconditioner.step()
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}, place()


def assert_all_equal(results, expected, tolerance=1e-9):
    for actual, _ in results:
        for name, value in expected.items():
            torch.testing.assert_close(actual[name], value, rtol=tolerance, atol=1e-11, msg=name)


OPTIONS = {
    "plain": {},
    "static": {"static_graph": True},
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "all": {"static_graph": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 0.0001},
}


@pytest.mark.some(4)
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_of_ddp(ranks, size, options):
    expected, _ = train()
    assert_all_equal(ranks.run(size, train, None, options), expected)


def test_layers_that_a_step_does_not_use(ranks):
    options = {"find_unused_parameters": True}
    expected, _ = train(branches=(1, 2), options=options)
    results = ranks.run(2, train, None, options, None, 1, None, (1, 2))
    assert_all_equal(results, expected)


@pytest.mark.some(2)
@pytest.mark.parametrize("way", ["compiled inside", "compiled in place", "compiled outside"])
@pytest.mark.parametrize("micro_batches", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_compiled_ddp(ranks, way, micro_batches):
    expected, _ = train()
    assert_all_equal(ranks.run(2, train, way, {}, None, micro_batches), expected)


@pytest.mark.some(2)
@pytest.mark.parametrize("way", ["compiled inside", "compiled in place", "compiled outside"])
def test_a_sampled_fisher_under_compiled_ddp(ranks, way):
    """Each rank draws its own labels, compiled or not; the pass for them leaves DDP's gradients alone."""
    expected = ranks.run(2, train, None, {}, SAMPLED)
    for result in ranks.run(2, train, way, {}, SAMPLED):
        assert_all_equal([result], expected[0][0])


@pytest.mark.some(4)
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_checkpoints_under_ddp(ranks, static, micro_batches):
    expected, _ = train()
    results = ranks.run(2, train, None, {"static_graph": static}, None, micro_batches, True)
    assert_all_equal(results, expected)


@pytest.mark.some(2)
@pytest.mark.values
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(
    "options",
    OPTIONS.values(),
    ids=OPTIONS,
)
def test_a_sampled_fisher_with_options_of_ddp(ranks, options, checkpointed):
    """Also in checkpoints, which recompute in both passes, and where a pass does not synchronise.

    The pass of sampled labels comes first: `static_graph` must not take it for the one whose gradients it averages.
    """
    expected = ranks.run(2, train, None, {}, SAMPLED, 3)[0][0]
    assert_all_equal(ranks.run(2, train, None, options, SAMPLED, 3, checkpointed), expected)


def scaled_until_one_loader_ends(options, steps=6, inf=None):
    """The last rank has no batch in odd steps."""
    rank, ranks = place()
    torch.manual_seed(0)
    model = Network().double()
    model.spare.requires_grad_(False)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    preconditioner = natgrad.Preconditioner(
        model, optimizer=optimizer, damping=0.05, scaler=scaler, gradients="reduce", **options
    )
    for step in range(steps):
        parts = {(1, 0): [12], (1, 1): [9], (2, 0): [9, 3], (2, 1): [9, 0]}[ranks, step % 2]
        x, y = (tensor[: sum(parts)].split(parts)[rank] for tensor in batch(step))
        optimizer.zero_grad()
        if len(x):
            scaler.scale(cross_entropy(model(x), y) * (float("inf") if step == inf else 1)).backward()
        scaler.unscale_(optimizer)
        preconditioner.step()
        scaler.step(optimizer)
        scaler.update()
    return dict(model.state_dict()), scaler.get_scale()


REDUCING = ["comm-opt", "mem-opt"]


@pytest.mark.some(3)
@pytest.mark.parametrize("inf", [None, 3])
@pytest.mark.parametrize("placement", REDUCING)
def test_a_rank_without_a_backward_pass_scales_as_the_others_do(ranks, placement, inf):
    options = {"placement": placement}
    expected, scale = scaled_until_one_loader_ends(options, inf=inf)
    assert scale == (2.0**11 if inf is None else 2.0**9)
    for weights, own in ranks.run(2, scaled_until_one_loader_ends, options, 6, inf):
        assert own == scale
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-10, atol=1e-12)
