"""The tasks' metrics over ranks that saw parts of unequal size are those of one process that saw everything."""

import pytest
import torch
from torch import Tensor

from natgrad import tasks
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
