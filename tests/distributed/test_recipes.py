"""The parts of the recipe on ranks: mixtures of their own, and weights that FSDP2 has sharded."""

import torch
import torch.distributed as dist

from natgrad.recipes import RunningMixup, ZeroErasing
from natgrad.training import checkpoint
from natgrad.training.display import Silent
from natgrad.training.job import Job
from natgrad.training.loop import Training
from natgrad.training.recipe import apply
from natgrad.training.world import World


def mixtures(steps):
    mixup, erasing = RunningMixup(0.4, classes=3), ZeroErasing()
    generator = torch.Generator().manual_seed(dist.get_rank())
    done = []
    for step in range(steps):
        inputs, targets = torch.randn(3, 1, 6, 6, generator=generator), torch.randint(3, (3,), generator=generator)
        done.append((mixup.shares(step, 3), inputs, *mixup(inputs, targets), erasing(torch.ones(9, 1, 8, 8))))
    return done


def test_each_rank_has_its_own_mixture(ranks):
    first, second = ranks.run(2, mixtures, 3)
    for rank, done in enumerate((first, second)):
        past = None
        for step, (shares, inputs, mixed, _, _) in enumerate(done):
            assert torch.equal(shares, RunningMixup(0.4, rank=rank).shares(step, 3))
            past = inputs if past is None else torch.lerp(past, inputs, shares.view(3, 1, 1, 1).float())
            assert torch.allclose(mixed, past, atol=1e-6)
    assert all(not torch.equal(one[0], other[0]) for one, other in zip(first, second, strict=True))
    assert not all(torch.equal(one[4], other[4]) for one, other in zip(first, second, strict=True))


def run_by_recipe(folder, stop):
    """Train digits on this rank, or go on where another run was saved; return its weights and its mixture."""
    fields = {"task": "digits", "batch_size": 256, "accumulate": 2, "steps": 5, "workers": 2}
    job = Job.from_json(apply("large-batch", fields)).resolved()
    world = World(rank=dist.get_rank(), size=2, device=torch.device("cpu"))

    def save(run):
        checkpoint.save(folder, run.position.step, run.state_dict())

    run = Training(job, world, observer=Silent(), stop=lambda: stop, save=save)
    if checkpoint.latest(folder) is not None:
        run.load_state_dict(checkpoint.load(checkpoint.latest(folder)))
    status = run.run().status
    weights = torch.cat([parameter.detach().flatten() for parameter in run.model.parameters()])
    return status, weights, run._additions.state_dict()["inputs"]


def test_two_ranks_train_by_the_recipe_and_resume_bit_by_bit(ranks, tmp_path):
    straight = ranks.run(2, run_by_recipe, tmp_path / "straight", False)
    assert torch.equal(straight[0][1], straight[1][1])
    assert not torch.equal(straight[0][2], straight[1][2])
    halves = [ranks.run(2, run_by_recipe, tmp_path / "halves", stop) for stop in (True, False)]
    assert [each[0][0] for each in halves] == ["stopped", "finished"]
    assert torch.equal(halves[1][0][1], straight[0][1])
    assert torch.equal(halves[1][1][2], straight[1][2])


def run_to_a_plateau():
    """Train with DASO on two nodes of one rank; return the learning rates after each epoch and the last weights."""
    job = Job(
        **{"task": "tabular", "optimizer": "sgd", "learning_rate": 0.5, "batch_size": 32, "epochs": 4},
        schedule="plateau",
        schedule_options={"patience": 0, "threshold": 0.1, "factor": 0.5},
        **{"averaging": "daso", "averaging_options": {"batches_between": 2}, "workers": 2, "nodes": 2},
    )
    world = World(rank=dist.get_rank(), size=2, device=torch.device("cpu"))
    run = Training(job.resolved(), world, observer=Silent(), stop=lambda: False)
    points = run.run().points
    weights = torch.cat([parameter.detach().flatten() for parameter in run.model.parameters()])
    return [point.learning_rate for point in points], run.optimizer.param_groups[0]["lr"], weights


def test_the_rates_of_all_nodes_fall_together_on_a_plateau_of_the_global_loss(ranks):
    (rates, last, weights), (others, other_last, other_weights) = ranks.run(2, run_to_a_plateau)
    assert rates == others
    assert last == other_last == rates[-1] < 0.5
    assert torch.equal(weights, other_weights)
