"""What the scoreboard concludes from runs, that its baselines are what they are called, and that it resumes."""

import itertools
import json
import math

import pytest
import torch
from torch import nn
from torch.nn import functional
from typer.testing import CliRunner

from benchmarks.scoreboard import __main__ as command
from benchmarks.scoreboard.baselines import KLShampoo, LeanMuon, NewtonMuon
from benchmarks.scoreboard.methods import METHODS
from benchmarks.scoreboard.run import Spec, Training

STEPS = 3


def gradients(shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(STEPS)]


def move(optimizer, parameter, given):
    for gradient in given:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


def dense_polar(matrix):
    """Apply the Newton-Schulz polynomial to the singular values."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.norm()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left @ torch.diag(values) @ right


def nesterov(given, momentum):
    average = torch.zeros_like(given[0])
    for gradient in given:
        average = momentum * average + (1 - momentum) * gradient
        yield momentum * average + (1 - momentum) * gradient


def power(matrix, exponent):
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values**exponent) @ vectors.T


@pytest.mark.parametrize(("shape", "row_decay"), [((4, 6), None), ((6, 4), 0.95), ((4, 6), 0.95), ((5, 2, 3, 3), None)])
def test_muon_and_normuon_are_the_dense_formula(shape, row_decay):
    """Two parameters of one shape, which move together."""
    given = [gradients(shape, seed) for seed in range(2)]
    parameters = [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for _ in given]
    optimizer = LeanMuon(parameters, lr=0.1, momentum=0.9, **({} if row_decay is None else {"row_decay": row_decay}))
    for each in zip(*given, strict=True):
        for parameter, gradient in zip(parameters, each, strict=True):
            parameter.grad = gradient
        optimizer.step()
    for parameter, own in zip(parameters, given, strict=True):
        expected = torch.zeros(shape, dtype=torch.float64).flatten(1)
        squares = torch.zeros(shape[0], 1, dtype=torch.float64)
        for ahead in nesterov([each.flatten(1) for each in own], 0.9):
            update = dense_polar(ahead)
            if row_decay is None:
                expected -= 0.1 * 0.2 * math.sqrt(max(expected.shape)) * update
            else:
                squares = row_decay * squares + (1 - row_decay) * update.square().mean(1, keepdim=True)
                update = update / squares.sqrt()
                expected -= 0.1 * 0.2 * math.sqrt(expected.numel()) * update / update.norm()
        torch.testing.assert_close(parameter.detach().flatten(1), expected)


def test_newton_muon_is_the_dense_formula():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Flatten(), nn.Linear(48, 5), nn.Linear(5, 2)).double()
    kernel, matrix = model[0].weight, model[2].weight
    expected = {each: each.detach().clone() for each in (kernel, matrix)}
    averages = {each: torch.zeros_like(each.detach()).flatten(1) for each in expected}
    moments = {}
    optimizer = NewtonMuon(model, lr=0.1, momentum=0.9)
    for step in range(4):
        inputs = torch.randn(6, 2, 4, 4, dtype=torch.float64)
        loss = functional.cross_entropy(model(inputs), torch.arange(6) % 2)
        model.zero_grad()
        loss.backward()
        if step != 3:  # steps 0, 1, 2, 4, 8... renew
            rows = {
                kernel: functional.unfold(inputs, 3, padding=1).transpose(1, 2).reshape(-1, 18),
                matrix: model[:2](inputs).detach(),
            }
            for each, own in rows.items():
                new = own.T @ own / len(own)
                moments[each] = 0.6 * moments[each] + 0.4 * new if each in moments else new
        for each, average in averages.items():
            moment = moments[each]
            ridge = 1e-2 * moment.trace() / len(moment) * torch.eye(len(moment), dtype=torch.float64)
            gradient = each.grad.flatten(1) @ torch.linalg.inv(moment + ridge)
            average.mul_(0.9).add_(gradient, alpha=0.1)
            update = dense_polar(0.9 * average + 0.1 * gradient)
            expected[each] -= (0.1 * 0.2 * math.sqrt(max(update.shape)) * update).view_as(each)
        optimizer.step()
        for each, value in expected.items():
            torch.testing.assert_close(each.detach(), value)


def test_kl_shampoo_is_the_dense_formula():
    shape, given = (3, 4), gradients((3, 4))
    parameter = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    size = given[0].square().mean().sqrt()
    left, right = size * torch.eye(3, dtype=torch.float64), size * torch.eye(4, dtype=torch.float64)
    average, expected = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    for step, gradient in enumerate(given, 1):
        average = 0.9 * average + 0.1 * gradient
        new_left = gradient @ torch.linalg.inv(right) @ gradient.T / 4
        new_right = gradient.T @ torch.linalg.inv(left) @ gradient / 3
        left, right = 0.95 * left + 0.05 * new_left, 0.95 * right + 0.05 * new_right
        expected -= 0.1 * power(left, -0.5) @ (average / (1 - 0.9**step)) @ power(right, -0.5)
    moved = move(KLShampoo([parameter], lr=0.1, betas=(0.9, 0.95)), parameter, given)
    torch.testing.assert_close(moved, expected)


@pytest.mark.parametrize(("method", "task"), list(zip(METHODS, itertools.cycle(["digits", "automaton"]), strict=False)))
def test_every_method_trains(method, task):
    if method == "soap":
        pytest.importorskip("pytorch_optimizer")
    chosen = METHODS[method]
    spec = Spec(task=task, method=method, rate=chosen.rate / 4, second=chosen.values[-1], horizon=1, seed=0, steps=20)
    training = Training(spec)
    before = [each.detach().clone() for each in training.model.parameters()]
    assert all(math.isfinite(training.step()) for _ in range(3))
    changed = [(old != new).any().item() for old, new in zip(before, training.model.parameters(), strict=True)]
    assert all(changed)


# What the board concludes.


@pytest.mark.slow
def test_the_board_runs_and_reports(tmp_path):
    journal = tmp_path / "journal.jsonl"
    arguments = ["--smoke", "--horizon", "1", "--workers", "0", "--journal", str(journal)]
    runner, app = CliRunner(), command.typer.Typer()
    app.command()(command.main)
    first = runner.invoke(app, arguments)
    assert first.exit_code == 0, first.output
    runs = journal.read_text()
    page = (tmp_path / "scoreboard.md").read_text()
    assert "## N steps, tuned per task" in page
    assert "## N steps, one setting for all tasks" in page
    assert "natural Muon" in page
    assert len(list((tmp_path / "images").glob("*.png"))) == 4
    data = json.loads((tmp_path / "scoreboard.json").read_text())
    assert set(data["horizons"]) == {"1"}
    again = runner.invoke(app, [*arguments, "--report"])
    assert again.exit_code == 0
    assert (tmp_path / "scoreboard.md").read_text() == page
    assert runner.invoke(app, arguments).exit_code == 0
    assert journal.read_text() == runs
