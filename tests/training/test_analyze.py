"""A run is measured where it is, and goes on as if it were not."""

import pytest
import torch

from natgrad.training.analysis import Measures
from natgrad.training.analysis.norms import ALL
from natgrad.training.analyze import Measured, Study
from natgrad.training.display import Silent
from natgrad.training.job import Job
from natgrad.training.loop import Training
from natgrad.training.world import World
from tests.tasks import folders, texts

WORLD = World(rank=0, size=1, device=torch.device("cpu"))
KFAC = {"curvature": "kfac", "form": "inverse", "damping": 0.03, "factors": 2, "inverses": 4}


def plain(job):
    training = Training(job.resolved(), WORLD, observer=Silent(), stop=lambda: False)
    training.run()
    return training


def measured(stop=lambda: False, **options):
    measures = Measures()
    training = Measured(Study(**options).resolved(), measures, world=WORLD, observer=Silent(), stop=stop)
    training.run()
    training.end_epoch()
    return training, measures


def same(one, other):
    """Compare nested states bit by bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.values
@pytest.mark.parametrize(
    "settings",
    [
        {"task": "digits", "optimizer": "sgd", "options": {"momentum": 0.9}, "learning_rate": 0.01, **KFAC, "steps": 7},
        {"task": "tabular", "optimizer": "sgd", "learning_rate": 0.01, "curvature": "hylo", "inverses": 3, "steps": 9},
        pytest.param(
            {"task": "glyphs", "task_options": {"images": 64}, "batch_size": 32, "steps": 3, "accumulate": 2},
            marks=pytest.mark.slow,
        ),
        {"task": "digits", "batch_size": 32, "steps": 3, "accumulate": 2},
        {"task": "text", "task_options": {"sequences": 64, "context": 16}, "steps": 3, **KFAC, "learning_rate": 1e-3},
    ],
    ids=lambda settings: f"{settings['task']}-{settings.get('curvature', 'none')}",
)
@pytest.mark.parametrize("labels", ["true", "sampled"])
def test_a_run_that_is_measured_is_the_same_bit_by_bit(settings, labels):
    job = Job(**settings)
    alone = plain(job)
    watched, measures = measured(job=job, labels=labels, every=1, snapshots=2, batch_sizes=(8, 16), ranks=(2, 8))
    assert measures.rank
    assert measures.error
    assert measures.drift
    assert measures.spectra
    assert same(alone.model.state_dict(), watched.model.state_dict())
    assert same(alone.optimizer.state_dict(), watched.optimizer.state_dict())
    assert torch.equal(alone.state_dict()["ranks"]["0"]["cpu"], watched.state_dict()["ranks"]["0"]["cpu"])
    assert [(each.loss, each.metric) for each in alone.points] == [(each.loss, each.metric) for each in watched.points]
    if alone.preconditioner is not None:
        one, other = (each.preconditioner.state_dict()["blocks"] for each in (alone, watched))
        assert same(one, other)


TINY = {"size": "tiny", "vocabulary_size": 300}


def test_batches_that_are_no_tensors_are_measured(tmp_path):
    """Pairs of sentences, with padding that does not count in the loss."""
    folders.multi30k(tmp_path)
    job = Job(task="transformer-multi30k", data=str(tmp_path), task_options=TINY, batch_size=2, steps=3)
    layers = ("encoder.layers.0.linear1", "decoder.layers.1.linear2")
    _, measures = measured(job=job, layers=layers, every=1, snapshots=1, batch_sizes=(8,), ranks=(4,))
    for found in (measures.rank, measures.error, measures.drift, measures.spectra):
        assert {each.layer for each in found} == set(layers)


def test_a_loss_of_several_terms_has_norms_and_factors_and_no_kernel(tmp_path):
    texts.pretraining(tmp_path / "data", texts.documents(26))
    options = {**TINY, "cache": str(tmp_path / "cache")}
    job = Job(task="bert-pretraining", data=str(tmp_path / "data"), task_options=options, batch_size=4, epochs=1)
    layers = ("bert.encoder.layer.0.output.dense", "cls.seq_relationship")
    figures = ("norms", "drift", "spectra")
    _, measures = measured(job=job, figures=figures, layers=layers, every=1, snapshots=1)
    for found in (measures.norms, measures.drift, measures.spectra):
        assert {each.layer for each in found} - {ALL} == set(layers)
    with pytest.raises(ValueError, match="must be some of norms, drift, spectra for bert-pretraining"):
        Study(job=job).resolved()
    with pytest.raises(ValueError, match="labels='sampled' is not allowed: labels must be true for bert-pretraining"):
        Study(job=job, figures=figures, labels="sampled").resolved()


def test_norms_are_those_of_the_gradient_before_it_is_preconditioned():
    job = Job(task="tabular", optimizer="sgd", learning_rate=1e-9, epochs=1)
    without = measured(job=job, figures=("norms",))[1].norms
    with_kfac = measured(job=Job(**{**job.to_json(), **KFAC}), figures=("norms",))[1].norms
    assert [each.norm for each in with_kfac] == pytest.approx([each.norm for each in without], rel=1e-4)


@pytest.mark.parametrize("schedule", [{"schedule": "cosine", "warmup": 3}, {"schedule": "step"}])
@pytest.mark.parametrize("task", ["tabular", "digits"])
def test_hylo_switches_in_the_epochs_that_are_told(schedule, task):
    known = []

    class Spy(Measured):
        def _step(self, inputs, targets):
            loss = super()._step(inputs, targets)
            if self.position.batch == 0:
                known.append(bool(self.preconditioner.metrics()["kid"]))
            return loss

    curvature_options = {"threshold": 0.3, "least_decay": 0.15}
    measures, options = Measures(), {"curvature": "hylo", "inverses": 1, "curvature_options": curvature_options}
    job = Job(task=task, optimizer="sgd", learning_rate=0.01, epochs=8, **options, **schedule)
    study = Study(job=job, figures=("norms",)).resolved()
    training = Spy(study, measures, world=WORLD, observer=Silent(), stop=lambda: False)
    training.run()
    training.end_epoch()
    told = [each.critical for each in measures.norms if each.layer == ALL]
    assert told == known
    assert len(set(told)) == 2


def test_factors_of_the_same_batch_and_parameters_do_not_drift():
    job = Job(task="tabular", optimizer="sgd", learning_rate=1e-12, batch_size=448, steps=4)
    same_batch = measured(job=job, figures=("drift",), every=1)[1].drift
    assert {each.step for each in same_batch} == {1, 2, 3}
    assert max(each.drift for each in same_batch) < 1e-5
    job = Job(task="tabular", optimizer="sgd", learning_rate=1e-12, batch_size=64, steps=4)
    others = measured(job=job, figures=("drift",), every=2)[1].drift
    assert {each.step for each in others} == {2}
    assert min(each.drift for each in others) > 1e-3


def test_what_was_measured_before_a_stop_is_kept():
    asked = []

    def stop():
        asked.append(1)
        return len(asked) >= 13  # eight times in the snapshot, once a step

    training, measures = measured(job=Job(task="tabular", epochs=9), stop=stop, every=1)
    assert training.position.step == 6  # the stop is heard of a step later
    assert {(each.step, each.layer) for each in measures.rank} == {(0, layer) for layer in "0246"}
    assert max(each.step for each in measures.drift) == training.position.step - 1


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"figures": ("rank", "rink")}, "figures='rank,rink'"),
        ({"figures": ()}, "figures"),
        ({"layers": ("nothing",)}, "layers='nothing'"),
        ({"labels": "drawn"}, "labels='drawn'"),
        ({"every": 0}, "every=0"),
        ({"snapshots": 0}, "snapshots=0"),
        ({"batch_sizes": (0,)}, "batch_sizes"),
        ({"batch_sizes": (9999,)}, "at most 448"),
        ({"ranks": ()}, "ranks"),
        ({"kernel_damping": 0.0}, "kernel_damping=0.0"),
        ({"threshold": -1.0}, "threshold=-1.0"),
        ({"job": Job(task="tabular", workers=2)}, "workers=2"),
        ({"job": Job(task="tabular", optimizer="lbfgs")}, "optimizer='lbfgs'"),
    ],
)
def test_what_is_not_allowed_is_named(options, named):
    with pytest.raises(ValueError, match="is not allowed") as told:
        Study(**{"job": Job(task="tabular"), **options}).resolved()
    assert named in str(told.value)
