"""DP-KFAC is what its definition says (float64): factors of the owner's own samples, the gradient of all of them."""

import copy
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import natgrad
from natgrad.capture.sampled import LabelSampler
from tests.distributed.deep_models import MODELS

# The reference preconditions gradients of samples that it has not seen.
pytestmark = pytest.mark.filterwarnings("ignore:natgrad. .grad is")

STEPS = 6
LR, CLIP = 0.1, 1e-3
SAMPLED = {"fisher": "sampled", "likelihood": "categorical"}


class Tagger(nn.Module):
    """Classes for every token."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 3)

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.head(self.norm(x + self.attention(x, x, x, need_weights=False)[0]))


def tagger():
    torch.manual_seed(0)
    return Tagger().double()


def little():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()


NETWORKS = {**MODELS, "tagger": tagger, "little": little}


@dataclass(frozen=True, kw_only=True)
class Case:
    """How to train."""

    model: str = "resnet"
    curvature: dict[str, Any] = field(default_factory=dict)
    reduction: str = "mean"
    refresh: tuple[int, int] = (2, 3)
    parts: int = 1

    def inputs(self, step, rank):
        """The micro-batches of one rank."""
        generator = torch.Generator().manual_seed(1000 * rank + step)
        samples, double = 4 * self.parts, torch.float64
        if self.model == "resnet":
            x = torch.randn(samples, 1, 5, 5, generator=generator, dtype=double)
        elif self.model == "little":
            x = torch.randn(samples, 5, generator=generator, dtype=double)
        else:
            x = torch.randint(7, (samples, 4), generator=generator)
        shape = x.shape if self.model == "tagger" else (samples,)
        y = torch.randint(3, shape, generator=generator)
        return list(zip(x.chunk(self.parts), y.chunk(self.parts), strict=True))

    def loss(self, outputs, y):
        return cross_entropy(
            outputs.flatten(0, -2), y.flatten(), reduction="sum" if self.reduction == "sum" else "mean"
        )

    def preconditioner(self, model, **options):
        factors, inverses = self.refresh
        refresh = natgrad.Refresh(factors=factors, inverses=inverses)
        curvature = natgrad.KFAC(**self.curvature)
        return natgrad.Preconditioner(
            model, curvature, damping=0.05, refresh=refresh, reduction=self.reduction, **options
        )


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)


def train(case):
    """Train under dp; return the parameters, and who owns which rows of them (None: the sums are of all samples)."""
    rank, model = dist.get_rank(), NETWORKS[case.model]()
    wrapped, optimizer = DistributedDataParallel(model), optimizer_of(model)
    preconditioner = case.preconditioner(wrapped, placement="dp", optimizer=optimizer, kl_clip=CLIP)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(STEPS):
            optimizer.zero_grad()
            for index, (x, y) in enumerate(case.inputs(step, rank)):
                with nullcontext() if index == case.parts - 1 else wrapped.no_sync():
                    outputs = wrapped(x)
                    preconditioner.backward(case.loss(outputs, y) / case.parts, outputs)
            preconditioner.step()
            optimizer.step()
    plan = preconditioner._structure.plan
    assignments = {
        key: assignment.workers[0] if assignment.sums == "alone" else None
        for key, assignment in plan.assignments.items()
    }
    names = {id(p): name for name, p in model.named_parameters()}
    owners = [
        ((names[id(slot.parameter)], slot.rows or slice(None)), assignments[layer.key])
        for layer, _ in preconditioner._structure.coverage.layers
        for slot in layer.slots
    ]
    return {name: p.detach().clone() for name, p in model.named_parameters()}, owners, preconditioner.traffic()


class Reference:
    """Preconditioners of this process alone: one for each rank, of its samples, and one of all samples."""

    def __init__(self, case, ranks):
        self.case, self.ranks = case, ranks
        self.model = NETWORKS[case.model]()
        self.optimizer = optimizer_of(self.model)
        self.copies = {}
        for owner in (None, *range(ranks)):
            model = copy.deepcopy(self.model)
            self.copies[owner] = (model, case.preconditioner(model))

    def natural(self, owner, step, gradient):
        """Return what `gradient` becomes by the factors of the samples of one rank, or of all."""
        case, (model, preconditioner) = self.case, self.copies[owner]
        model.load_state_dict(self.model.state_dict())
        seen = range(self.ranks) if owner is None else [owner]
        passes = case.parts * len(seen)
        for rank in seen:
            preconditioner._sampler = LabelSampler(seed=0, rank=rank, reduction=case.reduction)
            for x, y in case.inputs(step, rank):
                outputs = model(x)
                preconditioner.backward(case.loss(outputs, y) / passes, outputs)
        for name, parameter in model.named_parameters():
            parameter.grad.copy_(gradient[name])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", natgrad.NatgradWarning)  # of gradients of samples that it has not seen
            preconditioner.step()
        result = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        return result

    def mean_gradient(self, step):
        self.optimizer.zero_grad()
        for rank in range(self.ranks):
            for x, y in self.case.inputs(step, rank):
                (self.case.loss(self.model(x), y) / self.case.parts / self.ranks).backward()
        return {name: p.grad.clone() for name, p in self.model.named_parameters()}

    def train(self, owners):
        for step in range(STEPS):
            gradient = self.mean_gradient(step)
            natural = {owner: self.natural(owner, step, gradient) for owner in self.copies}
            inner = sum(float((natural[owner][name] * gradient[name])[rows].sum()) for (name, rows), owner in owners)
            samples = 4 if self.case.reduction == "sum" else 1  # the clip is that of the mean loss
            scale = min(1.0, (CLIP / (LR**2 * abs(inner))) ** 0.5 * samples)
            parameters = dict(self.model.named_parameters())
            for (name, rows), owner in owners:
                parameters[name].grad[rows] = scale * natural[owner][name][rows]
            self.optimizer.step()
        return {name: p.detach() for name, p in self.model.named_parameters()}


def check(ranks, count, case):
    results = ranks.run(count, train, case)
    parameters, owners, _ = results[0]
    for other, _, _ in results[1:]:
        assert all(torch.equal(value, other[name]) for name, value in parameters.items())
    expected = Reference(case, count).train(owners)
    for name, value in expected.items():
        assert float((parameters[name] - value).norm()) <= 1e-10 * max(1e-3, float(value.norm())), name
    return owners, [traffic for _, _, traffic in results]


@pytest.mark.some(4)
@pytest.mark.pairs
@pytest.mark.parametrize("refresh", [(1, 1), (2, 3)])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("model", ["resnet", "transformer"])
def test_dp_is_its_definition(ranks, model, count, refresh):
    owners, traffic = check(ranks, count, Case(model=model, refresh=refresh))
    tables = {name for (name, _), owner in owners if owner is None}
    assert tables == ({"embedding.weight"} if model == "transformer" else set())
    assert len({owner for _, owner in owners} - {None}) == count  # each owns some
    assert (sum(sent["factors"] for sent in traffic) > 0) == (model == "transformer" and count > 1)
    assert all(sent["inverses"] == 0 for sent in traffic)


@pytest.mark.some(4)
@pytest.mark.values
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize(
    "case",
    [
        Case(curvature={"form": "inverse"}),
        Case(curvature=SAMPLED),
        Case(model="transformer", curvature=SAMPLED, refresh=(1, 1)),
        Case(model="tagger", reduction="tokens"),
        Case(model="tagger", reduction="tokens", curvature=SAMPLED, parts=2),
        Case(model="tagger"),
        Case(model="resnet", reduction="sum"),
        Case(model="transformer", parts=3),
        Case(model="resnet", reduction="sum", parts=2, curvature=SAMPLED),
        Case(model="little", parts=2),
    ],
    ids=lambda case: "-".join(
        [
            case.model,
            case.reduction,
            case.curvature.get("fisher", "empirical"),
            *case.curvature.get("form", ()),
            str(case.parts),
        ]
    ),
)
def test_dp_with_other_losses(ranks, case, count):
    check(ranks, count, case)


@pytest.mark.parametrize("curvature", [{}, SAMPLED])
def test_ranks_without_a_layer_train_on(ranks, curvature):
    """Two layers on four ranks; a warning would be an error."""
    owners, _ = check(ranks, 4, Case(model="little", curvature=curvature))
    assert {owner for _, owner in owners} == {0, 1}
