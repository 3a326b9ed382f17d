import itertools
import resource
from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from natgrad import tasks
from natgrad.training.display import Silent
from natgrad.training.job import Job
from natgrad.training.loop import Training
from natgrad.training.world import World

ALONE = World(rank=0, size=1, device=torch.device("cpu"))
KFAC = {"optimizer": "sgd", "options": {"momentum": 0.9}, "curvature": "kfac", "learning_rate": 0.05, "damping": 0.03}


def training(job, *, stop=lambda: False, save=None, save_seconds=1e9):
    return Training(job.resolved(), ALONE, observer=Silent(), stop=stop, save=save, save_seconds=save_seconds)


def stop_after(steps):
    asked = itertools.count(1)
    return lambda: next(asked) >= steps


def parameters(run):
    return torch.cat([each.detach().flatten() for each in run.model.parameters()])


def test_a_first_order_run_is_the_plain_loop():
    job = Job(task="tabular", optimizer="adamw", learning_rate=0.01, epochs=2)
    run = training(job)
    result = run.run()

    task = job.build_task()
    torch.manual_seed(0)
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train, test = task.datasets()
    for epoch in range(2):
        generator = torch.Generator()
        generator.manual_seed(epoch)  # as DistributedSampler draws its order
        losses = []
        for indices in torch.randperm(len(train), generator=generator).split(64):
            inputs, targets = train[indices]
            optimizer.zero_grad()
            loss = task.loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item() * len(indices))
        assert result.points[epoch].loss == pytest.approx(sum(losses) / len(train), rel=1e-6)
    assert torch.equal(parameters(run), torch.cat([each.detach().flatten() for each in model.parameters()]))
    inputs, targets = test[:]
    accuracy = (model.eval()(inputs).argmax(1) == targets).float().mean()
    assert result.points[-1].metric == pytest.approx(accuracy.item())
    assert [point.step for point in result.points] == [7, 14]


class Pairs:
    """Samples whose inputs are a tuple, and whose targets a list."""

    def __len__(self):
        return 6

    def __getitem__(self, indices):
        return (torch.tensor(indices), torch.tensor(indices) + 1), [f"text {index}" for index in indices]


def test_batches_keep_their_structure():
    run = training(Job(task="tabular", optimizer="adamw", steps=1))
    [(inputs, targets)] = run._read(Pairs(), [[4, 2, 5]])
    assert isinstance(inputs, tuple)
    assert [each.tolist() for each in inputs] == [[4, 2, 5], [5, 3, 6]]
    assert targets == ["text 4", "text 2", "text 5"]


class OpenFiles(Pairs):
    """Samples whose targets are the number of files that the process that reads them may open."""

    def __getitem__(self, indices):
        return torch.tensor(indices), [resource.getrlimit(resource.RLIMIT_NOFILE)[0]]


def test_readers_may_open_as_many_files_as_the_system_allows(monkeypatch):
    monkeypatch.setattr(tasks.Task, "reading_processes", 1)
    run = training(Job(task="tabular", optimizer="adamw", steps=1))
    usual, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, most - 1), most))
    try:
        [(_, targets)] = run._read(OpenFiles(), [[0]])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (usual, most))
    assert targets == [most]


def test_a_run_ends_at_the_first_evaluation_that_reaches_the_target():
    job = Job(task="autoencoder", optimizer="adamw", epochs=4)
    whole = training(job).run().points
    values = [point.metric for point in whole]
    assert values == sorted(values, reverse=True)  # lower is better
    for target, epochs in ((values[1], 2), ((values[1] + values[2]) / 2, 3), (0.0, 4)):
        run = training(replace(job, target=target))
        result = run.run()
        assert [point.metric for point in result.points] == values[:epochs]
        assert (result.status, run.has_reached_target) == ("finished", target > 0)


def test_a_run_that_is_asked_to_stop_and_reaches_the_target_is_finished():
    assert training(Job(task="tabular", epochs=3, target=0.01), stop=stop_after(7)).run().status == "finished"
    assert training(Job(task="tabular", epochs=3, target=1.1), stop=stop_after(7)).run().status == "stopped"


@pytest.mark.parametrize("settings", [{"optimizer": "sgd", "learning_rate": 0.1}, {**KFAC, "fisher": "empirical"}])
def test_accumulation_changes_nothing(settings):
    whole, parts = (training(Job(task="tabular", steps=3, accumulate=k, **settings)) for k in (1, 4))
    for each in (whole, parts):
        each.run()
    assert torch.allclose(parameters(whole), parameters(parts), atol=2e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "sgd"},
        {"optimizer": "adamw"},
        {"optimizer": "muon", "schedule": "cosine", "warmup": 3},
        {"optimizer": "natural-muon"},
        KFAC,
    ],
)
def test_a_stopped_run_goes_on_bit_by_bit(settings):
    job = Job(task="tabular", steps=21, seed=3, **settings)
    straight = training(job)
    expected = straight.run()

    states = []
    first = training(job, stop=stop_after(12), save=lambda run: states.append(run.state_dict()))
    assert first.run().status == "stopped"
    assert first.position.step == 13  # in the middle of a pass; a stop is heard a step later
    torch.manual_seed(99)
    second = training(job)
    state = states[0]
    state["optimizer"]["state"] = {str(key): value for key, value in state["optimizer"]["state"].items()}
    second.load_state_dict(state)
    result = second.run()
    assert torch.equal(parameters(second), parameters(straight))
    assert [(point.step, point.loss, point.metric) for point in result.points] == [
        (point.step, point.loss, point.metric) for point in expected.points
    ]


def test_a_divergence_ends_the_run_and_keeps_what_came_before():
    saved = []
    run = training(Job(task="tabular", optimizer="sgd", learning_rate=1e38, epochs=5), save=saved.append)
    result = run.run()
    assert result.status == "diverged"
    assert run.position.step < 35
    assert all(point.loss == point.loss for point in result.points)
    assert not saved


def test_checkpoints_are_spaced_in_time_and_the_end_has_one():
    rare, frequent = [], []
    training(Job(task="tabular", epochs=3), save=lambda run: rare.append(run.position.step)).run()
    training(Job(task="tabular", epochs=3), save=lambda run: frequent.append(run.position.step), save_seconds=0).run()
    assert rare == [21]
    assert frequent == [7, 14, 21, 21]


def test_a_long_pass_is_interrupted_for_a_first_checkpoint_that_changes_nothing(monkeypatch):
    """Later ones keep the distance of the user's, here never."""
    job = Job(task="tabular", epochs=2, **KFAC)
    straight = training(job)
    expected = straight.run()
    monkeypatch.setattr("natgrad.training.loop._LONGEST_WITHOUT_CHECKPOINT", 0.0)
    states = []
    run = training(job, save=lambda run: states.append((run.position.step, deepcopy(run.state_dict()))))
    result = run.run()
    assert [step for step, _ in states] == [2, 14]  # heard a step later, and at the end
    assert [point.loss for point in result.points] == [point.loss for point in expected.points]
    assert torch.equal(parameters(run), parameters(straight))

    resumed = training(job)
    state = states[0][1]
    state["optimizer"]["state"] = {str(key): value for key, value in state["optimizer"]["state"].items()}
    resumed.load_state_dict(state)
    assert [point.loss for point in resumed.run().points] == [point.loss for point in expected.points]
    assert torch.equal(parameters(resumed), parameters(straight))
