import copy

import pytest
import torch
from torch.nn.functional import cross_entropy

from natgrad.recipes import RunningMixup, soft_labels


def batches(sizes, classes=3):
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(size, 2, 3, generator=generator, dtype=torch.float64),
            torch.randint(classes, (size,), generator=generator),
        )
        for size in sizes
    ]


def test_every_step_mixes_with_the_mixture_before_it():
    mixup = RunningMixup(0.4, classes=3, seed=5)
    before = None
    for step, (inputs, numbers) in enumerate(batches([4] * 6)):
        mixed, labels = mixup(inputs, numbers)
        onehot = torch.eye(3, dtype=torch.float64)[numbers]
        shares = mixup.shares(step, 4)
        if before is None:
            expected = inputs, onehot
        else:
            expected = tuple(
                torch.stack([share * a + (1 - share) * b for share, a, b in zip(shares, now, old, strict=True)])
                for now, old in zip((inputs, onehot), before, strict=True)
            )
        assert torch.allclose(mixed, expected[0], rtol=1e-14)
        assert torch.allclose(labels, expected[1], rtol=1e-14)
        assert torch.allclose(labels.sum(1), torch.ones(4, dtype=torch.float64))
        before = expected


def test_each_sample_has_the_larger_of_two_beta_distributed_shares():
    for alpha in (0.4, 1.0):
        shares = torch.cat([RunningMixup(alpha).shares(step, 40) for step in range(100)])
        assert shares.min() >= 0.5
        # The variance of Beta(α, α), around 1/2, within four standard errors or more.
        assert abs((shares - 0.5).square().mean() - 1 / (4 * (2 * alpha + 1))) < 0.01
    assert torch.equal(RunningMixup(0).shares(3, 2), torch.ones(2, dtype=torch.float64))


def test_seeds_and_ranks_draw_apart_and_again_the_same():
    drawn = [RunningMixup(0.4, seed=seed, rank=rank).shares(3, 2) for seed in range(3) for rank in range(3)]
    assert len(torch.cat(drawn).unique()) == 18
    assert torch.equal(RunningMixup(0.4, seed=2, rank=1).shares(3, 2), drawn[7])
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    RunningMixup(0.4, classes=3)(*batches([4])[0])
    assert torch.equal(torch.rand(1), expected)  # torch's own generator is left alone


def test_it_goes_on_where_its_state_was_saved():
    straight, first = RunningMixup(0.4, classes=3, seed=7), RunningMixup(0.4, classes=3, seed=7)
    data = batches([4, 4, 2, 4, 4])
    expected = [straight(*batch) for batch in data]
    for batch in data[:3]:
        first(*batch)
    second = RunningMixup(0.4, classes=3, seed=7)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for batch, (inputs, labels) in zip(data[3:], expected[3:], strict=True):
        mixed, shares = second(*batch)
        assert torch.equal(mixed, inputs)
        assert torch.equal(shares, labels)


@pytest.mark.parametrize(
    ("inputs", "targets", "name"),
    [
        (torch.ones(4, 3, dtype=torch.long), torch.zeros(4, dtype=torch.long), "inputs"),
        (torch.ones(4, 2), torch.zeros(4, dtype=torch.long), "inputs"),
        (torch.ones(4, 3), torch.zeros(3, dtype=torch.long), "targets"),
        (torch.ones(4, 3), torch.zeros(4, 9), "targets"),
    ],
)
def test_what_does_not_fit_is_named_and_changes_nothing(inputs, targets, name):
    mixup, other = RunningMixup(0.4, classes=3), RunningMixup(0.4, classes=3)
    good = torch.randn(4, 3), torch.zeros(4, dtype=torch.long)
    for each in (mixup, other):
        each(*good)
    with pytest.raises(ValueError, match=name):
        mixup(inputs, targets)
    assert all(torch.equal(one, two) for one, two in zip(mixup(*good), other(*good), strict=True))


@pytest.mark.parametrize("wrong", [{"alpha": -0.1}, {"alpha": float("nan")}, {"alpha": 1, "classes": 0}])
def test_wrong_options_are_refused(wrong):
    with pytest.raises(ValueError, match="is not allowed"):
        RunningMixup(**wrong)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_soft_labels_are_what_torch_smooths(smoothing):
    logits = torch.randn(5, 4, dtype=torch.float64)
    numbers = torch.tensor([0, 3, 1, 1, 2])
    shares = soft_labels(numbers, 4, smoothing=smoothing, dtype=torch.float64)
    assert torch.allclose(cross_entropy(logits, shares), cross_entropy(logits, numbers, label_smoothing=smoothing))
    assert torch.allclose(shares[0], torch.tensor([1 - 0.75 * smoothing, *[smoothing / 4] * 3], dtype=torch.float64))
