"""`verify` finds no difference where there is none, finds what is wrong, and leaves everything as it was."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import natgrad
from natgrad.capture.sums import StatisticsBuffer
from tests import device

SAMPLED = natgrad.KFAC(fisher="sampled", likelihood="categorical")


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.PReLU(), nn.Dropout(0.5), nn.Flatten(1), nn.Linear(36, 5), nn.Tanh(),
        nn.Linear(5, 3),
    )  # fmt: skip


def batch(samples=6, seed=0):
    generator = device.generator(seed)
    return torch.randn(samples, 2, 5, 5, generator=generator), torch.randint(3, (samples,), generator=generator)


def loss_of(model, batch):
    inputs, targets = batch
    return cross_entropy(model(inputs), targets)


def loss_and_outputs(model, batch):
    outputs = model(batch[0])
    return cross_entropy(outputs, batch[1]), outputs


def training(curvature=None, **options):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    preconditioner = natgrad.Preconditioner(model, curvature, optimizer=optimizer, damping=0.01, **options)
    for step in range(3):
        optimizer.zero_grad()
        loss, outputs = loss_and_outputs(model, batch(seed=step))
        preconditioner.backward(loss, outputs)
        preconditioner.step()
        optimizer.step()
    return model, optimizer, preconditioner


@pytest.mark.parametrize("curvature", [None, natgrad.KFAC(form="inverse", sharing="reduce"), natgrad.HyLo(rank=2)])
@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_one_process_equals_itself(curvature, dtype):
    _, _, preconditioner = training(curvature)
    report = preconditioner.verify(batch(), loss_and_outputs, dtype=dtype)
    assert report.worst < (1e-6 if dtype is None else 1e-3)
    assert dtype is None or report.worst > 0
    assert [row.layer for row in report.rows][:: len(report.rows) - 1] == ["0", "7"]
    left = [row for row in report.rows if not row.curvature]
    assert [row.layer for row in left] == ["2.weight"]
    assert all(row.factors is None for row in left)
    assert "7" in str(report)
    assert f"{report.worst:.1e}" in str(report)


def test_nothing_is_changed():
    model, optimizer, preconditioner = training(natgrad.KFAC())

    def everything():
        metrics = preconditioner.metrics()
        return copy.deepcopy(
            {
                "model": model.state_dict(),
                "gradients": [p.grad for p in model.parameters()],
                "optimizer": optimizer.state_dict(),
                "preconditioner": preconditioner.state_dict(),
                "metrics": {name: float(value) for name, value in metrics.items() if "seconds" not in name},
                "rng": torch.get_rng_state(),
                "modes": [module.training for module in model.modules()],
            }
        )

    def same(left, right):
        if isinstance(left, dict):
            return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
        if isinstance(left, list):
            return len(left) == len(right) and all(map(same, left, right))
        return torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right

    gradients = [p.grad for p in model.parameters()]
    before = everything()
    preconditioner.verify(batch(), lambda model, batch: loss_of(model, (batch[0] + torch.rand(()), batch[1])))
    assert same(everything(), before)
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), gradients, strict=True))
    torch.rand(3)  # as dropout would
    with pytest.raises(RuntimeError, match="boom"):
        preconditioner.verify(batch(), lambda model, batch: _fail(loss_of(model, batch)))
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), gradients, strict=True))
    assert same(everything()["preconditioner"], before["preconditioner"])


def _fail(loss):
    raise RuntimeError("boom")


@pytest.mark.parametrize("curvature", [natgrad.KFAC(), natgrad.EKFAC()])
def test_training_goes_on_as_if_nothing_had_been(curvature):
    results = []
    for look in (False, True):
        model, optimizer, preconditioner = training(curvature, refresh=natgrad.Refresh(factors=2, inverses=3))
        for step in range(3, 8):
            if look:
                preconditioner.verify(batch(seed=50 + step), loss_and_outputs)
            optimizer.zero_grad()
            loss, outputs = loss_and_outputs(model, batch(seed=step))
            preconditioner.backward(loss, outputs)
            preconditioner.step()
            optimizer.step()
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*results)


def test_what_is_wrong_is_found(monkeypatch):
    _, _, preconditioner = training()
    close, spoilt = StatisticsBuffer.close, []

    def wrong(self, *args, **kwargs):
        if not spoilt:  # the first of both steps is that of all ranks together
            spoilt.append(self.of("5")["G"].mul_(1.1))
        return close(self, *args, **kwargs)

    monkeypatch.setattr(StatisticsBuffer, "close", wrong)
    report = preconditioner.verify(batch(), loss_of)
    rows = {row.layer: row for row in report.rows}
    assert rows["5"].factors == pytest.approx(0.1, rel=1e-3)
    assert rows["5"].gradient > 1e-3
    assert rows["0"].factors < 1e-6
    assert report.worst >= rows["5"].factors


def test_bad_losses():
    preconditioner = natgrad.Preconditioner(network())
    for loss_fn in (
        None,
        lambda model, batch: model(batch[0]),
        lambda model, batch: 3.0,
        lambda model, batch: torch.tensor(3.0),
    ):
        with pytest.raises(ValueError, match="loss_fn"):
            preconditioner.verify(batch(), loss_fn)
    with pytest.raises(ValueError, match="dtype"):
        preconditioner.verify(batch(), loss_of, dtype=torch.int64)


def test_sampled_labels_are_refused():
    preconditioner = natgrad.Preconditioner(network(), SAMPLED)
    with pytest.raises(ValueError, match=r"curvature=.*sampled.* is not allowed.* one of the true labels"):
        preconditioner.verify(batch(), loss_and_outputs)


def test_not_between_backward_and_step():
    model = network()
    preconditioner = natgrad.Preconditioner(model)
    loss_of(model, batch()).backward()
    with pytest.raises(ValueError, match="verify"):
        preconditioner.verify(batch(), loss_of)
    preconditioner.step()
    preconditioner.verify(batch(), loss_of)


def test_the_model_may_have_changed_since_the_last_step():
    model, _, preconditioner = training()
    model[0].weight.requires_grad_(False)
    assert preconditioner.verify(batch(), loss_and_outputs).worst < 1e-6


def test_gradients_are_still_known_to_be_preconditioned_afterwards():
    model, _, preconditioner = training()
    preconditioner.verify(batch(), loss_and_outputs)
    before = model[7].weight.grad.clone()
    with pytest.warns(natgrad.NatgradWarning, match="without a backward pass"):
        preconditioner.step()
    assert torch.equal(model[7].weight.grad, before)
