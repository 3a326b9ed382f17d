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
