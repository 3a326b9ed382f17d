"""What holds for every task: the facts it states fit its data, its model and its loss."""

import pytest
import torch
from torch import Tensor, nn

from natgrad import tasks
from natgrad.tasks.base import Task


def batch(task: Task, size: int = 32) -> tuple[Tensor, Tensor]:
    # Every k-th sample: poisson's points on the boundary come last.
    train, _ = task.datasets()
    inputs, targets = train[:: len(train) // size]
    return inputs, targets


def seeded_model(task: Task, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return task.model()


def test_inputs_and_targets_are_finite_pairs_of_train_and_test(task: Task) -> None:
    train, test = task.datasets()
    assert len(test) > 0
    for tensors in (train[:], test[:]):
        assert len(tensors) == 2
        assert all(tensor.isfinite().all() for tensor in tensors)
    assert [tensor.shape[1:] for tensor in train[:]] == [tensor.shape[1:] for tensor in test[:]]


def test_outputs_fit_the_likelihood_and_the_targets(task: Task) -> None:
    inputs, targets = batch(task)
    outputs = seeded_model(task)(inputs)
    if task.likelihood == "categorical":
        assert outputs.shape[:-1] == targets.shape
        assert targets.dtype == torch.int64
        assert targets.min() >= 0
        assert targets.max() < outputs.shape[-1]
    else:
        assert outputs.shape == targets.shape
    if task.likelihood == "bernoulli":
        assert targets.min() >= 0
        assert targets.max() <= 1


def test_loss_averages_as_the_reduction_says(task: Task) -> None:
    inputs, targets = batch(task)
    outputs = seeded_model(task).eval()(inputs)
    each = torch.stack(
        [task.loss(outputs[index : index + 1], targets[index : index + 1]) for index in range(len(inputs))]
    )
    torch.testing.assert_close(task.loss(outputs, targets), each.mean())
    if task.reduction == "tokens":
        first = torch.stack(
            [task.loss(outputs[:1, at : at + 1], targets[:1, at : at + 1]) for at in range(outputs.shape[1])]
        )
        torch.testing.assert_close(each[0], first.mean())


def test_data_are_loaded_once_and_the_same_when_loaded_again(task: Task) -> None:
    state = torch.get_rng_state()
    assert task.datasets() is task.datasets()
    for kept, fresh in zip(task.datasets(), task.load(), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(kept[:], fresh[:], strict=True))
    assert torch.equal(torch.get_rng_state(), state), "loading draws from the caller's generator"


def test_no_test_sample_is_in_the_training_set(task: Task) -> None:
    # Poisson's points may coincide only by chance, text's windows only where two files say the same.
    train, test = ({tuple(row.tolist()) for row in part[:][0].flatten(1)} for part in task.datasets())
    assert not train & test


def test_a_few_steps_of_adamw_lower_the_loss(task: Task) -> None:
    model = seeded_model(task)
    inputs, targets = batch(task)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = task.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


def test_metric_ranks_a_perfect_answer_above_a_mixed_up_one(task: Task) -> None:
    _, targets = batch(task)
    perfect = {
        "categorical": lambda: 50.0 * nn.functional.one_hot(targets),
        "bernoulli": lambda: targets.logit(eps=1e-6),
        "gaussian": lambda: targets,
    }[task.likelihood]()
    evaluator = task.evaluator()
    evaluator.update(perfect, targets)
    best = evaluator.compute()
    evaluator.reset()
    evaluator.update(perfect.roll(1, dims=0), targets)
    assert (evaluator.compute() < best) == (task.metric.better == "higher")


@pytest.mark.parametrize(
    ("name", "options", "named"),
    [
        ("mnist", {}, "name='mnist'.*autoencoder, digits, glyphs, poisson, tabular, text"),
        ("digits", {"size": 3}, "option='size'.*has none"),
        ("glyphs", {"photos": 3}, "option='photos'.*'images', 'depth' or 'seed'"),
        ("glyphs", {"images": 3}, "images=3.*at least 4"),
        ("glyphs", {"images": "many"}, "images='many'"),
        ("glyphs", {"depth": 21}, "depth=21.*20 or 32"),
        ("glyphs", {"seed": -1}, "seed=-1"),
        ("text", {"sequences": 7}, "sequences=7.*at least 8"),
        ("text", {"layers": True}, "layers=True"),
        ("text", {"width": 100, "heads": 3}, "heads=3.*divisor of width=100"),
        ("poisson", {"interior": 0}, "interior=0"),
        ("poisson", {"depth": 1.5}, "depth=1.5"),
    ],
)
def test_a_wrong_name_or_option_is_named(name: str, options: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        tasks.get(name, **options)
