"""BERT's loss has two terms: K-FAC of each layer is that of the term that it sees, with the mean's scale."""

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import natgrad
from natgrad.tasks import bert, gpt
from natgrad.tasks.applications.language import TransformerSize
from natgrad.tasks.batches import split
from natgrad.tasks.bert import IGNORED
from tests.dense import reference as dense

DAMPING = 0.03
ENTRIES, LENGTH, PLACES = 23, 9, 4
SIZE = TransformerSize(layers=2, width=8, heads=2)
TASK = bert.Bert(architecture="bert", source="pretraining")


def model() -> bert.Model:
    torch.manual_seed(0)
    return bert.build(SIZE, ENTRIES).double().eval()


def batch(samples: int = 5, seed: int = 0) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return samples of different lengths, with different numbers of masked tokens."""
    random = np.random.default_rng(seed)
    lengths = random.integers(6, LENGTH + 1, samples)
    masked, words = np.zeros((samples, PLACES), np.int64), np.full((samples, PLACES), IGNORED)
    for row, length in enumerate(lengths):
        count = 1 + row % PLACES
        masked[row, :count] = 1 + random.permutation(length - 1)[:count]
        words[row, :count] = random.integers(ENTRIES, size=count)
    seen = np.arange(LENGTH) < lengths[:, None]
    inputs = {
        "input_ids": random.integers(ENTRIES, size=(samples, LENGTH)),
        "token_type_ids": (np.arange(LENGTH) > 4).astype(np.int64) * np.ones((samples, 1), np.int64),
        "attention_mask": seen.astype(np.int64),
        "position_ids": np.tile(np.arange(LENGTH), (samples, 1)),
        "masked": masked,
    }
    targets = {"words": words, "next": random.integers(2, size=samples)}
    return tuple({name: torch.from_numpy(part) for name, part in each.items()} for each in (inputs, targets))


def rows(model: nn.Module, inputs: dict[str, Tensor], targets: dict[str, Tensor]) -> dict[str, dense.Rows]:
    """The rows of each linear and norm layer, with the gradients of the losses that the loss is the mean of.

    The words' head has a sample for each masked token; all other layers have the samples of the batch.
    """
    mask = targets["words"] != IGNORED
    count, samples = int(mask.sum()), len(mask)
    return {
        name: dense.Rows(seen.a, count * seen.g, seen.exact).positions(mask)
        if name.startswith("cls.predictions")
        else dense.Rows(seen.a, samples * seen.g, seen.exact)
        for name, seen in dense.capture(model, lambda model: TASK.loss(model(inputs), targets)).items()
    }


@pytest.mark.parametrize("form", ["eigen", "inverse"])
def test_kfac_of_bert_is_that_of_each_term(form: str) -> None:
    trained = model()
    reference = copy.deepcopy(trained)
    inputs, targets = batch()
    curvature = dict.fromkeys(TASK.curvature_layers, natgrad.KFAC(form=form))
    preconditioner = natgrad.Preconditioner(trained, curvature, damping=DAMPING, reduction=TASK.reduction)
    TASK.loss(trained(inputs), targets).backward()
    raw = {name: value.clone() for name, value in dense.gradients(trained).items()}
    table = trained.bert.embeddings.word_embeddings.weight
    left = table.grad.clone()
    preconditioner.step(TASK.count(targets))
    solved = dense.gradients(trained)
    solve = dense.solve_eigen if form == "eigen" else dense.solve_inverse
    seen = rows(reference, inputs, targets)
    covered = {*solved} - {"cls.predictions.decoder"}  # is tied to the table of words, which the optimizer trains
    assert len(covered) == 2 * 8 + 1 + 4  # linear and norm layers: two blocks, the embeddings' norm, pooler and heads
    for name in covered:
        if seen[name].exact:
            expected = dense.solve_block(raw[name], seen[name].fisher(), DAMPING)
        else:
            expected = solve(raw[name], *seen[name].factors(), DAMPING)
        assert dense.relative_error(solved[name], expected) < 1e-9, name
    assert torch.equal(table.grad, left)


@pytest.mark.parametrize("kind", ["bert", "gpt"])
def test_the_curvature_does_not_depend_on_how_a_batch_is_split(kind: str) -> None:
    """All samples have as many masked tokens, so that the mean over two halves is that over all."""
    torch.manual_seed(0)
    if kind == "bert":
        task, trained = TASK, model()
        inputs, targets = batch(4)
        inputs["masked"][:] = torch.tensor([1, 2, 4, 5])
        targets["words"].clamp_(min=0)
    else:
        task, trained = gpt.Gpt(architecture="gpt", source="wikitext"), gpt.build(SIZE, ENTRIES).double().eval()
        tokens = torch.randint(ENTRIES, (4, LENGTH + 1))
        positions = torch.arange(LENGTH).expand(4, -1)
        inputs, targets = {"input_ids": tokens[:, :-1], "position_ids": positions}, tokens[:, 1:]
    found = []
    for count in (1, 2):
        copied = copy.deepcopy(trained)
        curvature = dict.fromkeys(task.curvature_layers, natgrad.KFAC())
        preconditioner = natgrad.Preconditioner(copied, curvature, damping=DAMPING, reduction=task.reduction)
        for part, labels in zip(split(inputs, count), split(targets, count), strict=True):
            (task.loss(copied(part), labels) / count).backward()
        preconditioner.step(task.count(targets))
        found.append({name: value.grad for name, value in copied.named_parameters()})
    for name, value in found[0].items():  # the keys' biases have no gradient but rounding
        torch.testing.assert_close(found[1][name], value, rtol=1e-9, atol=1e-12, msg=name)
