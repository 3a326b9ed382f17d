"""The tasks' metrics on values worked out by hand."""

import math

import pytest
import torch

from natgrad import tasks


def test_accuracy_counts_the_largest_logit() -> None:
    evaluator = tasks.get("tabular").evaluator()
    logits = torch.tensor([[0.2, 0.7], [0.9, 0.8], [-3.0, -5.0], [0.1, 0.3]])
    evaluator.update(logits, torch.tensor([1, 1, 0, 1]))
    assert evaluator.compute().item() == pytest.approx(0.75)


def test_bits_per_byte_of_even_odds_over_all_bytes_are_eight() -> None:
    evaluator = tasks.get("text").evaluator()
    evaluator.update(torch.zeros(2, 3, 256), torch.tensor([[0, 1, 2], [3, 4, 255]]))
    assert evaluator.compute().item() == pytest.approx(8)


def test_reconstruction_loss_of_logits_zero_is_ln_two() -> None:
    evaluator = tasks.get("autoencoder").evaluator()
    evaluator.update(torch.zeros(3, 64), torch.rand(3, 64))
    assert evaluator.compute().item() == pytest.approx(math.log(2))


def test_relative_error_is_the_ratio_of_norms_over_all_batches() -> None:
    evaluator = tasks.get("poisson").evaluator()
    evaluator.update(torch.tensor([[3.0], [1.0]]), torch.tensor([[0.0], [1.0]]))
    evaluator.update(torch.tensor([[4.0]]), torch.tensor([[0.0]]))
    evaluator.update(torch.tensor([[7.0]]), torch.tensor([[7.0]]))
    assert evaluator.compute().item() == pytest.approx(5 / math.sqrt(50))
    evaluator.reset()
    evaluator.update(torch.tensor([[1.0]]), torch.tensor([[2.0]]))
    assert evaluator.compute().item() == pytest.approx(0.5)
