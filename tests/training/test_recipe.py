import itertools
import json
from dataclasses import replace

import torch
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

from natgrad import recipes
from natgrad.cli import app
from natgrad.training import checkpoint
from natgrad.training.display import Silent
from natgrad.training.job import Job
from natgrad.training.loop import Training
from natgrad.training.recipe import apply
from natgrad.training.world import World

ALONE = World(rank=0, size=1, device=torch.device("cpu"))
JOB = Job.from_json(apply("large-batch", {"task": "digits", "batch_size": 256, "epochs": 2}))


def training(job, *, stop=lambda: False, save=None):
    return Training(job.resolved(), ALONE, observer=Silent(), stop=stop, save=save, save_seconds=1e9)


def parameters(model):
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def command(*arguments):
    return CliRunner().invoke(app, [str(each) for each in arguments])


def test_a_run_is_the_loop_of_all_parts():
    run = training(JOB)
    run.run()

    task = JOB.build_task()
    train, _ = task.datasets()
    row = recipes.large_batch(256, samples=len(train), epochs=2)
    torch.manual_seed(0)
    model = task.model()
    mixup, erasing, decay = row.build_mixup(10), row.build_erasing(), row.build_decay(model)
    optimizer = row.build_optimizer(model)
    scheduler = row.build_scheduler(optimizer)
    preconditioner, rescaling = row.build_preconditioner(model, optimizer), row.build_rescaling(model)
    for epoch in range(2):
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch))
        for indices in order.split(256):
            inputs, targets = mixup(*train[indices])
            optimizer.zero_grad()
            cross_entropy(model(erasing(inputs)), targets).backward()
            decay.step()
            preconditioner.step()
            optimizer.step()
            rescaling.step()
            scheduler.step()
    assert torch.equal(parameters(run.model), parameters(model))
    # Two epochs are so few steps that the first would do all; what was trained is another model than at the start.
    assert not torch.equal(parameters(model), parameters(task.model()))


def test_passes_over_parts_of_a_batch_add_up_to_the_whole():
    # Not beyond the last batch of an epoch, which four do not divide; at a rate that does not blow up rounding errors.
    short = replace(JOB, epochs=None, steps=5, learning_rate=0.01)
    whole, parts = training(short), training(replace(short, accumulate=4))
    for each in (whole, parts):
        each.run()
    assert torch.allclose(parameters(whole.model), parameters(parts.model), rtol=1e-4, atol=1e-5)


def test_a_stopped_run_goes_on_bit_by_bit_from_its_checkpoint(tmp_path):
    straight = training(JOB)
    straight.run()
    asked = itertools.count(1)

    def save(run):
        checkpoint.save(tmp_path, run.position.step, run.state_dict())

    first = training(JOB, stop=lambda: next(asked) >= 6, save=save)
    assert first.run().status == "stopped"
    second = training(JOB)
    second.load_state_dict(checkpoint.load(checkpoint.latest(tmp_path)))
    assert 0 < second.position.step < second.total_steps
    second.run()
    assert torch.equal(parameters(second.model), parameters(straight.model))


def test_resolving_keeps_what_the_rule_says_and_what_is_given():
    job = JOB.resolved()
    samples = len(job.build_task().datasets()[0])
    row = recipes.large_batch(256, samples=samples, epochs=2)
    assert job.options == {"momentum": row.momentum}
    assert (job.optimizer, job.curvature, job.form, job.fisher) == ("heavyball", "kfac", "inverse", "empirical")
    assert (job.learning_rate, job.damping, job.kl_clip, job.inverses) == (row.learning_rate, row.damping, None, 1)
    assert (job.mixup, job.erasing, job.norm_damping, job.norm_form) == (row.mixup, row.erasing, row.norms, "full")
    assert job.resolved() == job
    assert Job.from_json(json.loads(json.dumps(job.to_json()))) == job
    given = {"task": "digits", "batch_size": 256, "epochs": 2, "learning_rate": 0.01, "form": "eigen", "mixup": 0.0}
    own = Job.from_json(apply("large-batch", given)).resolved()
    assert own == replace(job, learning_rate=0.01, form="eigen", mixup=0.0)
    by_steps = Job.from_json(apply("large-batch", {"task": "digits", "batch_size": 256, "steps": 12})).resolved()
    assert row.steps_per_epoch == 6
    assert by_steps == replace(job, steps=12, epochs=None)


def test_a_job_that_names_the_recipe_is_read_as_before():
    job = JOB.resolved()
    earlier = {
        **{"task": "digits", "task_options": {}, "data": None, "recipe": "large-batch", "optimizer": "heavyball"},
        **{"options": job.options, "learning_rate": job.learning_rate, "schedule": "constant", "warmup": 0},
        **{"curvature": "kfac", "curvature_options": job.curvature_options, "form": "inverse", "fisher": "empirical"},
        **{"sharing": None, "placement": "auto", "factors": 1, "inverses": 1, "refresh": "fixed"},
        **{"damping": job.damping, "kl_clip": None, "epochs": 2, "steps": None, "batch_size": 256, "accumulate": 1},
        **{"workers": 1, "averaging": "none", "averaging_options": {}, "nodes": None, "seed": 0, "device": "auto"},
    }
    assert Job.from_json(earlier) == job
    assert Job.from_json({"task": "digits", "recipe": "none"}) == Job(task="digits")


def test_the_command_accumulates_and_takes_flags_in_place_of_the_recipe(tmp_path):
    out = tmp_path / "run"
    flags = ("--batch-size", 512, "--steps", 2, "--lr", 0.1, "--damping", 0.3)
    done = command("train", "digits", "--recipe", "large-batch", *flags, "--out", out)
    assert done.exit_code == 0, done.output
    config = json.loads((out / "config.json").read_text())
    assert (config["accumulate"], config["learning_rate"], config["form"]) == (4, 0.1, "inverse")
    assert (config["damping"], config["damping_schedule"], config["damping_options"]) == (0.3, "constant", {})
