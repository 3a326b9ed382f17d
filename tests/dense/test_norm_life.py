"""Norm layers in a training: narrow dtypes, memory, bad batches, checkpoints, and which are covered."""

import gc
import io

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import natgrad
from tests.dense import norm as dense_norm
from tests.dense.norm_network import FORMS, assert_solved, data, network, references


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_models_and_autocast(form):
    x, y = data(samples=16)
    expected = {
        name: dense_norm.solve(norm.gradient, norm.fisher(form), 0.5)
        for name, norm in references(network(), lambda m: cross_entropy(m(x), y, reduction="sum")).items()
    }
    half = network().bfloat16()
    mixed = network().float()
    for model, within in ((half, False), (mixed, True)):
        preconditioner = natgrad.Preconditioner(model, natgrad.UnitWise(form=form), damping=0.5)
        with torch.autocast("cpu", torch.bfloat16, enabled=within):
            cross_entropy(model(x.to(model[0].weight.dtype)), y).backward()
        preconditioner.step()
        assert preconditioner.state_dict()["blocks"]["1.weight"]["F"].dtype == torch.float32
        assert_solved(model, expected, 0.1)


def test_autocast_does_not_round_the_statistics():
    """The backward pass within autocast gives the factors of the one behind it, to the last bit."""
    found = []
    for within in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.LayerNorm(6), nn.Tanh())
        preconditioner = natgrad.Preconditioner(model, natgrad.UnitWise(form="full"), damping=0.5)
        loss = model(torch.randn(9, 5, 6)).pow(3).mean()
        with torch.autocast("cpu", torch.bfloat16, enabled=within):
            loss.backward()
        preconditioner.step()
        found.append(preconditioner.state_dict()["blocks"]["0.weight"]["F"])
    assert torch.equal(*found)


@pytest.mark.parametrize("reduction", ["mean", "tokens"])
def test_nothing_but_sums_is_kept_after_the_backward_pass(reduction):
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(8), nn.Tanh(), nn.LayerNorm(8), nn.Tanh())
    preconditioner = natgrad.Preconditioner(model, reduction=reduction)

    def kept():
        gc.collect()
        return sum(t.numel() for t in gc.get_objects() if issubclass(type(t), torch.Tensor))

    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    before = kept()
    model(torch.randn(50, 20, 8)).pow(3).mean().backward()
    assert kept() - before < 50 * 8
    preconditioner.step()


def test_a_poisoned_batch_is_skipped_and_forgotten():
    model, (x, y) = network(), data()
    model[1].eval()
    preconditioner = natgrad.Preconditioner(model, damping=0.05)
    blocks = []
    for poison in (False, True, False):
        model.zero_grad()
        batch = x.clone()
        if poison:
            batch[0, 0, 0] = float("nan")
        cross_entropy(model(batch), y).backward()
        preconditioner.step()
        blocks.append(preconditioner.state_dict()["blocks"]["3.weight"]["F"].clone())
        assert all(p.grad.isfinite().all() for p in model.parameters())
        assert bool(model[3].weight.grad.any()) != poison
    assert torch.equal(blocks[0], blocks[1])
    assert not torch.equal(blocks[1], blocks[2])
    assert preconditioner.metrics()["skipped_factors"] == preconditioner.metrics()["skipped_gradients"] == 7


@pytest.mark.parametrize("form", FORMS)
def test_training_resumes_bit_for_bit(form):
    class Run:
        def __init__(self):
            self.model = network()
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
            curvature = {"[1368]": natgrad.UnitWise(form=form), "*": natgrad.KFAC()}
            self.preconditioner = natgrad.Preconditioner(
                self.model, curvature, optimizer=self.optimizer, refresh=natgrad.Refresh(factors=2, inverses=3)
            )

        def train(self, steps):
            for step in steps:
                x, y = data(step)
                self.optimizer.zero_grad()
                cross_entropy(self.model(x), y).backward()
                self.preconditioner.step()
                self.optimizer.step()
            return self

        def parts(self):
            return {"model": self.model, "optimizer": self.optimizer, "preconditioner": self.preconditioner}

    whole, first, second = Run().train(range(9)), Run().train(range(4)), Run()
    file = io.BytesIO()
    torch.save({name: part.state_dict() for name, part in first.parts().items()}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    for name, part in second.parts().items():
        part.load_state_dict(state[name])
    second.train(range(4, 9))
    for p, q in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(p, q)


class Permuting(nn.LayerNorm):
    """A subclass that normalises another dimension."""

    def forward(self, x):
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


def test_what_is_covered_and_what_is_not():
    model = nn.ModuleDict(
        {
            "linear": nn.Linear(4, 4),
            "bn": nn.BatchNorm1d(4),
            "norm": nn.LayerNorm(4),
            "frozen": nn.LayerNorm(4).requires_grad_(False),
            "bare": nn.BatchNorm1d(4, affine=False),
            "sync": nn.SyncBatchNorm(4),
            "permuting": Permuting(4),
            "skipped_norm": nn.GroupNorm(2, 4),
        }
    )
    full, kfac = natgrad.UnitWise(form="full"), natgrad.KFAC()
    patterns = {"skipped*": None, "norm": full, "*": kfac}
    rows = {row.parameter: row for row in natgrad.Preconditioner(model, patterns).explain().rows}
    assert rows["linear.weight"].curvature.startswith("KFAC")
    assert rows["bn.weight"].curvature == rows["bn.bias"].curvature == repr(natgrad.UnitWise())
    assert rows["norm.bias"].curvature == repr(full)
    assert {name.partition(".")[0] for name in rows} == model.keys() - {"bare"}
    for name, word in {"frozen": "frozen", "sync": "all ranks", "permuting": "forward", "skipped_norm": "skip"}.items():
        assert word in rows[f"{name}.weight"].reason, rows[f"{name}.weight"].reason


def test_unit_wise_does_not_fit_matrices():
    rows = natgrad.Preconditioner(network(), natgrad.UnitWise()).explain().rows
    reasons = {row.parameter: row.reason for row in rows}
    assert "norm layers" in reasons["5.weight"]
    assert "Linear" in reasons["5.weight"]
    assert not reasons["6.weight"]


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("form", "block"),
        ("fisher", "true"),
        ("factor_decay", 1.0),
        ("factor_decay", True),
        ("likelihood", "categorical"),
    ],
)
def test_bad_arguments(argument, value):
    with pytest.raises(ValueError, match=argument):
        natgrad.UnitWise(**{argument: value})
    with pytest.raises(ValueError, match="likelihood"):
        natgrad.UnitWise(fisher="sampled")
