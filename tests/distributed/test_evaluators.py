"""The tasks' metrics over ranks that saw parts of unequal size are those of one process that saw everything."""

import pytest
import torch
from torch import Tensor

from natgrad import tasks
from natgrad.tasks import numerals, vocabulary
from natgrad.tasks.questionanswering import Answers
from natgrad.tasks.translation import LAST, PAD, SPECIAL, Bleu
from tests.distributed.harness import Ranks


def metric(rank: int, name: str, outputs: list[Tensor], targets: list[Tensor]) -> float:
    evaluator = tasks.get(name).evaluator()
    evaluator.update(outputs[rank], targets[rank])
    return evaluator.compute().item()


def metric_of_own_part(name: str, outputs: list[Tensor], targets: list[Tensor]) -> float:
    return metric(torch.distributed.get_rank(), name, outputs, targets)


@pytest.mark.parametrize("name", ["autoencoder", "poisson", "tabular"])
@pytest.mark.parametrize("parts", [(9, 3), (5, 1, 4, 2)])
def test_metrics_are_those_of_all_ranks(ranks: Ranks, name: str, parts: tuple[int, ...]) -> None:
    train, _ = tasks.get(name).datasets()
    torch.manual_seed(0)
    inputs, targets = train[: sum(parts)]
    outputs = tasks.get(name).model()(inputs).detach()
    whole = metric(0, name, [outputs], [targets])
    shared = ranks.run(len(parts), metric_of_own_part, name, outputs.split(parts), targets.split(parts))
    assert shared == [pytest.approx(whole, rel=1e-5)] * len(parts)


def precision_of_own_part(
    outputs: list[dict[str, Tensor]], targets: list[dict[str, Tensor]], sizes: list[int]
) -> float:
    start = sum(sizes[: torch.distributed.get_rank()])
    own = slice(start, start + sizes[torch.distributed.get_rank()])
    evaluator = tasks.get("maskrcnn-coco", measure="segm").evaluator()
    evaluator.update(outputs[own], targets[own])
    first = evaluator.compute().item()
    assert evaluator.compute().item() == first
    return first


def test_the_mean_precision_is_that_of_the_pictures_of_all_ranks(ranks: Ranks) -> None:
    pytest.importorskip("torchvision")
    pytest.importorskip("pycocotools")
    _, test = tasks.get("maskrcnn-coco").datasets()
    _, targets = test[:9]
    outputs = [
        {**each, "scores": torch.rand(len(each["labels"])), "masks": each["masks"].roll(number % 4, 2) > 0}
        for number, each in enumerate(targets)
    ]
    evaluator = tasks.get("maskrcnn-coco", measure="segm").evaluator()
    evaluator.update(outputs, targets)
    whole = evaluator.compute().item()
    assert 0 < whole < 1
    shared = ranks.run(2, precision_of_own_part, outputs, targets, [6, 3])
    assert shared == [pytest.approx(whole)] * 2


def bleu_of_own_part(tokenizer: vocabulary.Tokenizer, outputs: list[Tensor], references: list[list[str]]) -> float:
    rank, metric = torch.distributed.get_rank(), Bleu(tokenizer)
    if references[rank]:
        metric.update(outputs[rank], references[rank])
    return metric.compute().item()


def test_bleu_is_that_of_all_ranks(ranks: Ranks) -> None:
    """The last rank has no sentences."""
    references = [english for _, english in numerals.pairs(12, seed=1)]
    tokenizer = vocabulary.train_byte_pairs(references, 400, SPECIAL)
    translated = [text.replace("hundred and", "hundred").replace(" of", "") for text in references]
    rows = [[*tokenizer.encode(text).ids, LAST] for text in translated]
    longest = max(map(len, rows))
    outputs = torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])
    whole = Bleu(tokenizer)
    whole.update(outputs, references)
    parts = (slice(0, 7), slice(7, 12), slice(12, 12))
    found = ranks.run(
        3, bleu_of_own_part, tokenizer, [outputs[part] for part in parts], [references[part] for part in parts]
    )
    assert found == [pytest.approx(whole.compute().item())] * 3
    assert 0.2 < found[0] < 0.99


def answers_of_own_part(measure: str, outputs: list[Tensor], targets: list[list[dict[str, object]]]) -> float:
    rank, metric = torch.distributed.get_rank(), Answers(measure)
    metric.update(outputs[rank], targets[rank])
    return metric.compute().item()


@pytest.mark.parametrize("measure", ["f1", "exact-match"])
def test_answers_are_those_of_all_ranks(ranks: Ranks, measure: str) -> None:
    places = torch.tensor([[[0, 3], [4, 7], [8, 13]]])
    target = {"context": "one two three", "answers": ("two three", "one"), "places": places}
    logits = torch.zeros(3, 3, 2)
    for row, (first, last) in enumerate(((0, 0), (0, 2), (1, 1))):
        logits[row, first, 0] = logits[row, last, 1] = 9.0
    parts = [[target], [target] * 2]
    expected = (1 + 0.8 + 2 / 3) / 3 if measure == "f1" else 1 / 3
    found = ranks.run(2, answers_of_own_part, measure, [logits[:1], logits[1:]], parts)
    assert found == [pytest.approx(expected)] * 2
