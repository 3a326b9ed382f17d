import json

import pytest

from natgrad.training.job import Job


def test_a_job_survives_json():
    job = Job(
        task="glyphs",
        task_options={"images": 1000},
        optimizer="AdamW",
        options={"betas": (0.9, 0.95)},
        learning_rate=0.01,
        curvature="kfac",
        kl_clip=None,
        steps=7,
        workers=2,
    )
    assert Job.from_json(json.loads(json.dumps(job.to_json()))) == job
    assert job.optimizer == "adamw"


def test_the_optimizer_left_out_is_natural_muon_or_adamw_with_a_curvature():
    assert Job(task="digits").optimizer == "natural-muon"
    assert Job(task="digits", curvature="kfac").optimizer == "adamw"


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"task": "nothing"}, "nothing"),
        ({"task": "digits", "task_options": {"images": 3}}, "images"),
        ({"task": "digits", "optimizer": "adamm"}, "optimizer='adamm'"),
        ({"task": "digits", "options": {"beta": 1}}, "option='beta'"),
        ({"task": "digits", "options": {"lr": 1}}, "option lr=1"),
        ({"task": "digits", "options": {"eps": {1}}}, "options="),
        ({"task": "digits", "schedule": "linear"}, "schedule='linear'"),
        ({"task": "digits", "curvature": "shampoo"}, "curvature='shampoo'"),
        ({"task": "digits", "curvature": "kfac", "optimizer": "lbfgs"}, "lbfgs"),
        ({"task": "digits", "epochs": 0}, "epochs=0"),
        ({"task": "digits", "epochs": 1, "steps": 1}, "steps=1"),
        ({"task": "digits", "target": float("nan")}, "target=nan"),
        ({"task": "digits", "workers": True}, "workers=True"),
        ({"task": "digits", "damping": 0}, "damping=0"),
        ({"task": "digits", "damping": "much"}, "damping='much'"),
        ({"task": "digits", "kl_clip": -1.0}, "kl_clip=-1.0 .* or 0 for off"),
        ({"task": "digits", "kl_clip": False}, "kl_clip=False"),
        ({"task": "digits", "learning_rate": float("inf")}, "learning_rate=inf"),
        ({"task": "digits", "warmup": -1}, "warmup=-1"),
        ({"task": "digits", "rank": 3}, "rank=3"),
        ({"task": "digits", "optimizer": "natural-muon", "curvature": "kfac"}, "curvature='kfac'"),
        ({"optimizer": "sgd"}, "task=None"),
    ],
)
def test_what_is_not_allowed_is_named(values, named):
    with pytest.raises(ValueError, match=named.replace("(", r"\(")):
        Job.from_json(values)


def test_resolving_fills_in_the_defaults_of_task_and_optimizer():
    job = Job(task="tabular", optimizer="sgd").resolved()
    assert (job.batch_size, job.epochs, job.steps, job.learning_rate) == (64, 30, None, 1e-3)
    assert Job(task="tabular", steps=5).resolved().epochs is None


def test_a_batch_must_divide_over_ranks_and_backward_passes_and_fit_the_data():
    with pytest.raises(ValueError, match=r"batch_size=10 .* multiple of workers x accumulate = 4"):
        Job(task="tabular", batch_size=10, workers=2, accumulate=2).resolved()
    with pytest.raises(ValueError, match="at most"):
        Job(task="tabular", batch_size=10_000).resolved()
