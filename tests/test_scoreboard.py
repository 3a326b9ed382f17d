"""What the scoreboard concludes from runs, that its baselines are what they are called, and that it resumes."""

import itertools
import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional
from typer.testing import CliRunner

from benchmarks.scoreboard import __main__ as command
from benchmarks.scoreboard import report, scores, search, timing
from benchmarks.scoreboard.baselines import KLShampoo, LeanMuon, NewtonMuon, split
from benchmarks.scoreboard.journal import Journal
from benchmarks.scoreboard.methods import METHODS
from benchmarks.scoreboard.run import EVALUATIONS, Result, Spec, Training, restore, train
from benchmarks.scoreboard.search import Board, Scale, extension, tuned
from benchmarks.scoreboard.tasks import TASKS

STEPS = 3
FLAT = [1.0, 1.0, 1.0]


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


@pytest.mark.parametrize("name", list(TASKS))
def test_hidden_matrices_are_all_but_tables_norms_biases_and_the_last_layer(name):
    model = TASKS[name].model()
    hidden, others = split(model)
    assert len(hidden) + len(others) == len(list(model.parameters()))
    assert all(each.ndim >= 2 for each in hidden)
    last = [module for module in model.modules() if isinstance(module, (nn.Linear, nn.Conv2d))][-1]
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    kept = {id(each) for each in others if each.ndim >= 2}
    assert kept == {id(last.weight), *map(id, tables)}


@pytest.mark.parametrize("name", ["autoencoder", "digits", "tabular", "poisson", "text", "automaton"])
def test_validation_sets_have_two_thousand_rows_or_positions(name):
    task = TASKS[name]
    inputs, _, held, answers = task.data()
    assert (answers.numel() if task.reduction == "tokens" else len(held)) >= 2000
    assert len(inputs) >= 8192


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


def test_a_divergence_is_a_result(monkeypatch):
    found = iter([1.0, 0.9, math.nan])
    monkeypatch.setattr("benchmarks.scoreboard.run.evaluate", lambda *_: next(found))
    result = train(Spec(task="poisson", method="sgd", rate=1e-3, second=0.9, horizon=1, seed=0, steps=20))
    assert result.diverged
    assert result.final == math.inf
    assert result.validation == [1.0, 0.9]


# What the board concludes.


def halving(start=1.0, factor=0.5):
    return [start * factor**at for at in range(EVALUATIONS + 1)]


def test_a_crossing_is_interpolated_over_the_logarithm():
    assert scores.crossing(halving(), 0.5**7.25, 200) == pytest.approx(72.5)
    assert scores.crossing(halving(), 0.5**21, 200) is None
    assert scores.crossing(halving(), 2.0, 200) == 0
    lucky = [1.0] * (EVALUATIONS + 1)
    lucky[8] = 0.6
    assert scores.crossing(lucky, 0.7, 200) is None
    middle = scores.middle([[1.0, 0.5], [*[1.0] * 3], halving()])  # two have diverged
    assert middle[-1] == math.inf
    assert scores.crossing(middle, 0.01, 100) is None


def test_targets_are_those_of_adamw_and_of_the_best_rival():
    curves = {"adamw": [2.0, 1.0], "muon": [2.0, 0.8], "natural-muon": [2.0, 0.5]}
    assert scores.targets(curves, ["adamw", "muon"], "adamw") == (1.0, 0.8)


def test_a_missed_target_scores_the_longer_of_both_runs():
    slow, fast = [2.0, 2.0, 2.0], [0.5, 0.5, 0.5]
    missed = scores.reached(halving(), 1e-9, 100, slow, 10)
    assert (missed.steps, missed.seconds, missed.missed) == (1.0, 2.0, True)
    assert scores.reached(halving(), 1e-9, 100, fast, 10).seconds == 1.0
    found = scores.reached(halving(), 0.5**10, 100, slow, 10)
    assert (found.steps, found.seconds, found.missed) == (pytest.approx(0.5), pytest.approx(1.0), False)


def test_early_steps_cost_what_they_cost():
    ratios = [3.0, 2.0, 1.0, 2.0]
    assert timing.cost(5, ratios, 10) == 15
    assert timing.cost(20, ratios, 10) == 50
    assert timing.cost(100, ratios, 10) == pytest.approx(80 + 60 * 5 / 3)
    assert timing.steps_within(180, ratios, 10) == pytest.approx(100)


def test_the_loss_at_equal_seconds_is_read_from_the_curve():
    runs = [Result(validation=halving(), training=[0.3], seconds=0.0, diverged=False)]
    one = scores.score(runs, (1.0, 1.0), 100, [2.0, 2.0, 2.0], 10)
    assert one.equal_seconds == pytest.approx(0.5**10)
    assert one.step == 2
    assert scores.score(runs, (1.0, 1.0), 100, [0.5, 0.5, 0.5], 10).equal_seconds == one.final


def one_score(steps, *, missed=False, final=1.0, equal_seconds=1.0):
    reach = scores.Reached(steps=steps, seconds=steps, missed=missed)
    return scores.Score(
        final=final,
        spread=(final, final),
        training=1.0,
        equal_seconds=equal_seconds,
        step=1.0,
        first=reach,
        second=reach,
        curve=FLAT,
    )


def test_of_rivals_that_all_miss_the_one_that_ends_lowest_counts():
    own = {name: one_score(1.0, missed=True, final=final) for name, final in (("sgd", 3.0), ("muon", 1.0))}
    kinds = {**dict.fromkeys(own, "rival"), "natural-muon": "ours"}
    scored = {"t": {**own, "natural-muon": one_score(0.9)}}
    assert report.shares_of_best_rival(scored, kinds, "natural-muon", "steps", "second") == {"t": (0.9, "muon")}


@pytest.mark.parametrize(("best", "wanted"), [((1.0, 0.9), None), ((2.0, 0.95), 4.0), ((0.5, 0.9), 0.25)])
def test_a_grid_is_extended_where_its_best_is_at_the_edge_and_downwards_where_it_diverged(best, wanted):
    known = {(rate, second): 1.0 for rate in (0.5, 1.0, 2.0) for second in (0.9, 0.95)}
    assert extension({**known, best: 0.1}) == wanted
    assert extension(dict.fromkeys(known, math.inf)) == 0.25


SCALE = Scale(tasks=("digits", "text"), methods=("adamw", "muon"), seeds=(101, 102))


def result(loss):
    curve = [2.0] * EVALUATIONS + [loss]
    return Result(validation=curve, training=[loss], seconds=0.0, diverged=math.isinf(loss))


def test_every_method_has_the_same_budget():
    for method in METHODS:
        assert len(SCALE.grid(method)) == 10
        assert len({rate for rate, _ in SCALE.grid(method)}) == 5


def test_a_search_extends_and_then_takes_fresh_seeds():
    campaign = tuned(SCALE, "digits", "muon", 1)
    specs, seen = next(campaign), []
    while specs[0].seed == search.SEARCH_SEED:
        seen += specs
        specs = campaign.send([result(abs(math.log(spec.rate / 0.15)) + spec.second) for spec in specs])
    rates = sorted({spec.rate for spec in seen})
    assert rates == pytest.approx([0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32])
    assert [(spec.rate, spec.second, spec.seed) for spec in specs] == [(0.16, 0.9, 101), (0.16, 0.9, 102)]
    with pytest.raises(StopIteration):
        campaign.send([result(1.0)] * 2)


def fill(board, losses):
    """Run the protocol with losses in place of trainings: a callable of the spec."""

    def submit(spec):
        done = search.Future()
        done.set_result(result(losses(spec)))
        submitted.append(spec)
        return done

    submitted = []
    board._submit = submit
    board.run(1)
    return submitted


def bowl(spec):
    best = {("digits", "adamw"): 0.008, ("text", "adamw"): 0.004, ("digits", "muon"): 0.02, ("text", "muon"): 0.01}
    distance = abs(math.log2(spec.rate / best[spec.task, spec.method]))
    return math.exp((1.0 if spec.task == "digits" else 3.0) * distance * (1 + spec.second))


def test_one_setting_has_the_least_mean_rank(tmp_path):
    """A task on which losses span orders of magnitude counts no more than another."""
    scale = replace(SCALE, tasks=("digits", "text", "poisson"))
    board = Board(scale, Journal(tmp_path / "j.jsonl"), 0)

    def losses(spec):
        wide = spec.task == "poisson"
        distance = abs(math.log2(spec.rate / (0.04 if wide else 0.02)))
        return (1e-4 if wide else 1.0) * (100.0 if wide else 1.1) ** (distance + spec.second)

    fill(board, losses)
    assert board.best("poisson", "muon", 1) == (0.04, 0.9)
    assert board.one_setting("muon", 1) == (0.02, 0.9)


def test_a_loss_counts_as_at_most_that_at_the_start(tmp_path):
    """All settings above the loss at the start have the same rank, whether they diverged or not."""
    board = Board(SCALE, Journal(tmp_path / "j.jsonl"), 0)
    bad = (0.01, 0.9)  # the best on text, diverged on digits: there it is level with all but one

    def losses(spec):
        setting = (spec.rate, spec.second)
        if spec.task == "digits":
            return 1.0 if setting == (0.02, 0.95) else math.inf if setting == bad else 3.0
        return 0.01 if setting == bad else 1.0 + abs(math.log2(spec.rate / 0.02)) / 10 + (1 - spec.second)

    fill(board, losses)
    assert board.one_setting("muon", 1) == bad


def test_a_journal_is_resumed(tmp_path):
    path = tmp_path / "j.jsonl"
    first = fill(Board(SCALE, Journal(path), 0), bowl)
    assert len(first) == len({spec.key for spec in first})
    assert fill(Board(SCALE, Journal(path), 0), bowl) == []
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:-3], lines[-1][:20]]))  # cut off in the middle of a line
    again = fill(Board(SCALE, Journal(path), 0), bowl)
    assert {spec.key for spec in again} == {restore(json.loads(line))[0] for line in lines[-3:]}


def test_a_forgotten_and_a_changed_method_run_again(tmp_path, monkeypatch):
    path = tmp_path / "j.jsonl"
    first = {spec.key for spec in fill(Board(SCALE, Journal(path), 0), bowl) if spec.method == "muon"}
    Journal(path).forget(["muon"])
    assert {spec.key for spec in fill(Board(SCALE, Journal(path), 0), bowl)} == first
    monkeypatch.setitem(METHODS, "muon", replace(METHODS["muon"], revision=99))
    again = fill(Board(SCALE, Journal(path), 0), bowl)
    assert ({spec.method for spec in again}, len(again)) == ({"muon"}, len(first))


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
    assert len(list((tmp_path / "images").glob("*.png"))) == 3
    data = json.loads((tmp_path / "scoreboard.json").read_text())
    assert set(data["horizons"]) == {"1"}
    again = runner.invoke(app, [*arguments, "--report"])
    assert again.exit_code == 0
    assert (tmp_path / "scoreboard.md").read_text() == page
    assert runner.invoke(app, arguments).exit_code == 0
    assert journal.read_text() == runs
