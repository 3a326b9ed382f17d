"""Training on a GPU is that on a CPU, under NCCL, sharded and compiled too."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import natgrad
from tests.dense import reference as dense
from tests.device import On
from tests.every import CHOOSING, EVERY, Network, Training, batch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@pytest.mark.parametrize("make", [make for name, make in EVERY.items() if name not in CHOOSING])
def test_a_gpu_does_what_a_cpu_does(make):
    here = Training(make)
    with On("cuda"):
        there = Training(make)
    there.model.load_state_dict(here.model.state_dict())
    for step in range(5):
        x, y = batch(step)
        here.step((x, y))
        there.step((x.cuda(), y.cuda()))
    gradients = {name: gradient.cpu() for name, gradient in there.gradients.items()}
    dense.assert_equal(gradients, here.gradients, 1e-7)


def test_natural_muon_multiplies_in_bfloat16():
    def shown(dtype):
        rows = natgrad.NaturalMuon(Network().to("cuda", dtype), heads=["head"]).preconditioner.explain().rows
        return next(row.curvature for row in rows if row.parameter == "positions.weight")

    assert "dtype=torch.bfloat16" in shown(torch.float32)
    assert "dtype" not in shown(torch.float64)


def test_a_state_goes_from_one_to_the_other():
    with On("cuda"):
        there = Training(natgrad.KFAC)
    for step in range(3):
        x, y = batch(step)
        there.step((x.cuda(), y.cuda()))
    here = Training(natgrad.KFAC)
    here.model.load_state_dict(there.model.state_dict())
    here.preconditioner.load_state_dict(there.preconditioner.state_dict())
    x, y = batch(3)
    here.precondition((x, y))
    there.precondition((x.cuda(), y.cuda()))
    dense.assert_equal({name: each.cpu() for name, each in there.gradients.items()}, here.gradients, 1e-8)


@pytest.fixture
def world(tmp_path):
    """A process group of one rank, for there is one GPU."""
    dist.init_process_group("nccl", init_method=(tmp_path / "store").as_uri(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def train(model, placement, steps=5):
    model = model.cuda()
    own = model
    if dist.is_initialized() and placement.startswith("sharded "):
        fully_shard(model.positions)
        fully_shard(model)
    elif dist.is_initialized():
        own = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    preconditioner = natgrad.Preconditioner(
        own,
        optimizer=optimizer,
        placement=placement.removeprefix("sharded "),
        refresh=natgrad.Refresh(factors=1, inverses=2),
    )
    for step in range(steps):
        x, y = (tensor.cuda() for tensor in batch(step))
        optimizer.zero_grad()
        cross_entropy(own(x), y).backward()
        preconditioner.step()
        optimizer.step()
    return {name: getattr(p, "full_tensor", lambda p=p: p)().detach() for name, p in model.named_parameters()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("placement", ["comm-opt", "mem-opt", "reduce-scatter", "pipelined", "sharded comm-opt"])
def test_nccl(world, placement):
    found = train(Network().double(), placement)
    dist.barrier()
    expected = Network().double()
    dist.destroy_process_group()
    try:
        dense.assert_equal(found, train(expected, "comm-opt"), 1e-9)
    finally:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # for the fixture to end


@pytest.mark.parametrize("narrow", [torch.float16, torch.bfloat16])
def test_mixed_precision_with_a_loss_scale(narrow):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).cuda()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.05), torch.amp.GradScaler("cuda")
    preconditioner = natgrad.Preconditioner(
        model, optimizer=optimizer, scaler=scaler, refresh=natgrad.Refresh(factors=1, inverses=2)
    )
    losses = []
    for step in range(30):
        x, y = batch(step % 3)
        x, y = x[..., 0].float().cuda(), y.cuda()
        optimizer.zero_grad()
        with torch.autocast("cuda", narrow):
            loss = cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        preconditioner.step()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])


@pytest.mark.compiles
@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_compiled_cells(cell):
    class Unrolled(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = cell(2, 3)

        def forward(self, x):
            state = None
            for part in x.unbind(1):
                state = self.cell(part, state)
            return state[0] if isinstance(state, tuple) else state

    torch.manual_seed(0)
    x, y, plain = torch.randn(6, 4, 2).double().cuda(), torch.randint(3, (6,)).cuda(), Unrolled().double().cuda()
    found = []
    for compiled in (False, True):
        torch.compiler.reset()
        model = copy.deepcopy(plain)
        preconditioner = natgrad.Preconditioner(model, damping=0.3)
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        cross_entropy(run(x), y).backward()
        preconditioner.step()
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
    dense.assert_equal(*found, 1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_factors_of_rows_of_16_bits_are_exact(dtype):
    model = torch.nn.Conv2d(8, 16, 3, device="cuda", dtype=dtype)
    preconditioner = natgrad.Preconditioner(model, natgrad.KFAC(factor_decay=0.0))
    inputs = torch.randn(32, 8, 9, 9, device="cuda", dtype=dtype)
    model(inputs).float().square().mean().backward()
    preconditioner.step()
    (block,) = preconditioner.state_dict()["blocks"].values()
    rows = torch.nn.functional.unfold(inputs.double(), 3).mT.flatten(0, 1)
    rows = torch.cat([rows, rows.new_ones(len(rows), 1)], 1)
    exact = rows.mT @ rows / len(inputs)
    assert (block["A"].double() - exact).norm() < 1e-5 * exact.norm()
