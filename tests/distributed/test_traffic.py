"""The bytes sent, summed over the ranks, are those of docs/placements and of the plan, to the last counter."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import natgrad
from tests.dense import reference as dense
from tests.distributed.jobs import Job, network, place, train

BYTES = 8  # float64
STEPS = range(7)
REFRESH = {"factors": 2, "inverses": 3}
TIMES = {"factors": 4, "inverses": 3, "step": 7}  # steps 0 2 4 6, 0 3 6, and all
AUDITS = 3  # in the first steps
FORMS = ["eigen", "inverse"]


def sizes(form):
    """Elements of factors (triangles), of what renewals make, and of gradients; the number of layers and of blocks."""
    factors = bases = values = gradients = count = 0
    layers = dense.trained_layers(network()).values()
    for module in layers:
        blocks = getattr(module, "groups", 1)
        outputs, inputs = module.weight.shape[0] // blocks, module.weight[0].numel() + 1
        factors += blocks * (outputs * (outputs + 1) + inputs * (inputs + 1)) // 2
        bases += blocks * (outputs**2 + inputs**2)
        values += blocks * (outputs + inputs)
        gradients += blocks * outputs * inputs
        count += blocks
    return factors, bases + values if form == "eigen" else factors, gradients, len(layers), count


def audited(model):
    """Return the numbers that the gradient audit adds up: two for each input of the last linear layer."""
    *_, last = (module for module in model.modules() if type(module) is torch.nn.Linear)
    return 2 * last.in_features


def total(results):
    return {kind: sum(result.traffic[kind] for result in results) for kind in results[0].traffic}


# How often the elements of factors, of inverses and of gradients are sent, with n workers of P ranks a layer.
COPIES = {
    "comm-opt": lambda P, n: (2 * (P - 1), P - 1, 0),
    "mem-opt": lambda P, n: (2 * (P - 1), 0, P - 1),
    "hybrid:0.5": lambda P, n: (2 * (P - 1), n - 1, P - n),
    "reduce-scatter": lambda P, n: (P - 1, 0, P - 1),
    "dp": lambda P, n: (0, 0, P - 1),
}


@pytest.mark.values
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("placement", COPIES)
def test_every_placement(ranks, placement, form, count):
    job = Job(curvature={"form": form}, refresh=REFRESH, options={"placement": placement})
    sent = total(ranks.run(count, train, job, STEPS))
    copies = dict(zip(("factors", "inverses", "gradients"), COPIES[placement](count, max(1, count // 2)), strict=True))
    N_f, made, N_g, layers, blocks = sizes(form)
    # With the factors travel each layer's samples and rows, with the inverses the success of each A and G, with the
    # gradients each block's <V, W>, each layer's readiness and trouble.
    least = {
        "factors": TIMES["factors"] * copies["factors"] * (N_f + 2 * layers) * BYTES,
        "inverses": TIMES["inverses"] * copies["inverses"] * (made + 2 * blocks) * BYTES,
        # Beside DistributedDataParallel's own:
        "gradients": TIMES["step"] * copies["gradients"] * (N_g + blocks + 2 * layers) * BYTES,
    }
    for kind, own in least.items():  # what owners have beside their even share travels twice
        assert own <= sent[kind] <= 1.6 * own
    assert sent["counters"] <= 1000
    if placement in ("comm-opt", "mem-opt"):
        assert sent["factors"] == least["factors"]  # an all-reduce
    assert sent.get("audit", 0) == AUDITS * 2 * (count - 1) * audited(network()) * BYTES


def sequence():
    """A table, a layer of groups, a norm layer."""
    torch.manual_seed(0)
    parts = [nn.Embedding(7, 4), nn.Conv1d(4, 6, 3, groups=2), nn.GroupNorm(2, 6), nn.Flatten(1), nn.Linear(12, 3)]
    return nn.Sequential(*parts).double()


def train_sequence(placement, form):
    """Return the bytes sent, the bytes that the plan foretells in all and for this rank, and the table's factors."""
    rank, P = place()
    model = sequence()
    wrapped = DistributedDataParallel(model) if dist.is_initialized() else model
    refresh = natgrad.Refresh(**REFRESH)
    preconditioner = natgrad.Preconditioner(wrapped, natgrad.KFAC(form=form), refresh=refresh, placement=placement)
    generator = torch.Generator().manual_seed(rank)
    for _ in STEPS:
        tokens = torch.randint(7, (3, 4), generator=generator)
        model.zero_grad()
        cross_entropy(wrapped(tokens), torch.randint(3, (3,), generator=generator)).backward()
        preconditioner.step()
    plan, foretold, own = preconditioner.plan, {}, {}
    for moment, kinds in plan.traffic().items():
        for kind, elements in kinds.items():
            foretold[kind] = TIMES[moment] * elements * BYTES
            sent = sum(exchange.sent(rank) for exchange in plan.exchanges()[moment])
            own[kind] = TIMES[moment] * sent * BYTES
    # Once: whether a table serves as a head, and whether there is curvature.
    # Also once whether each layer has an input that is broadcast over the samples.
    foretold["counters"] = 2 * (P - 1) * 4 * ((2 if plan.columns > 1 else 1) + len(plan.layers))
    table = next(work for key, work in plan.layers.items() if not work.alone)
    traffic = preconditioner.traffic()
    assert traffic.pop("audit") == pytest.approx(AUDITS * 2 * (P - 1) / P * audited(model) * BYTES, abs=1)
    return traffic, foretold, own, table.sums * BYTES


# Forms in turn: what they make is of different sizes, and travels alike.
FORETOLD = [
    *((placement, FORMS[(index + P // 4) % 2], P) for index, placement in enumerate(COPIES) for P in (2, 4)),
    ("hybrid:0.25", "eigen", 4),
    ("reduce-scatter", "eigen", 8),
    ("hybrid:0.5", "inverse", 8),
]


@pytest.mark.some(6)
@pytest.mark.parametrize(("placement", "form", "count"), FORETOLD)
def test_the_plan_foretells_what_is_sent(ranks, placement, form, count):
    results = ranks.run(count, train_sequence, placement, form)
    sent = {kind: sum(traffic[kind] for traffic, *_ in results) for kind in results[0][0]}
    for traffic, foretold, own, table in results:
        assert sent == foretold
        assert {kind: traffic[kind] for kind in own} == own  # so the busiest rank's as well
        if placement == "dp":  # a table needs the samples of all ranks; its sums go to its worker
            assert sent["factors"] >= TIMES["factors"] * (count - 1) * table


def held_on(placement):
    """Return what the plan says and what the tensors take, after a step."""
    model = sequence()
    wrapped = DistributedDataParallel(model)
    preconditioner = natgrad.Preconditioner(wrapped, placement=placement)
    wrapped(torch.randint(7, (3, 4))).square().sum().backward()
    preconditioner.step()
    kept = [
        tensor
        for stack in preconditioner._structure.groups
        for own in (stack.state.averages, stack.state.results)
        for tensor in own.values()
    ]
    explained = sum(row.bytes for row in preconditioner.explain().rows)
    note, plan = preconditioner.explain().note, preconditioner.plan
    return plan.held(dist.get_rank()), sum(t.numel() * t.element_size() for t in kept), explained, plan.note in note


@pytest.mark.parametrize("placement", COPIES)
def test_the_plan_knows_what_is_held(ranks, placement):
    for held, kept, explained, noted in ranks.run(4, held_on, placement):
        assert held == kept == explained
        assert noted
