"""BERT's and GPT-2's training on ranks is that of one process."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import natgrad
from natgrad.tasks import bert, gpt
from natgrad.tasks.applications.language import TransformerSize
from natgrad.tasks.batches import split
from tests.distributed.harness import Ranks

ENTRIES, LENGTH, SAMPLES, STEPS = 17, 8, 4, 4
SIZE = TransformerSize(layers=1, width=8, heads=2)
TASKS = {
    "bert": bert.Bert(architecture="bert", source="pretraining"),
    "gpt": gpt.Gpt(architecture="gpt", source="wikitext"),
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return (bert if name == "bert" else gpt).build(SIZE, ENTRIES).double().eval()


def batch(name: str, step: int) -> tuple[dict[str, Tensor], dict[str, Tensor] | Tensor]:
    """Return samples with equally many masked tokens, so that the mean over ranks is that over all tokens."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(ENTRIES, (SAMPLES, LENGTH + 1), generator=generator)
    inputs = {"input_ids": tokens[:, :-1], "position_ids": torch.arange(LENGTH).expand(SAMPLES, -1)}
    if name == "gpt":
        return inputs, tokens[:, 1:]
    inputs["token_type_ids"] = (inputs["position_ids"] > 3).long()
    inputs["attention_mask"] = (inputs["position_ids"] < 8 - torch.arange(SAMPLES)[:, None] % 3).long()
    inputs["masked"] = torch.tensor([1, 4, 5, 0]).expand(SAMPLES, -1)
    words = torch.randint(ENTRIES, (SAMPLES, 4), generator=generator)
    words[:, 3] = bert.IGNORED
    return inputs, {"words": words, "next": torch.randint(2, (SAMPLES,), generator=generator)}


def train(name: str, placement: str) -> dict[str, Tensor]:
    """Return the parameters after training on this rank's part of each batch, or on all of it."""
    task, model = TASKS[name], build(name)
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    replica = DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    curvature = dict.fromkeys(task.curvature_layers, natgrad.KFAC())
    preconditioner = natgrad.Preconditioner(
        replica,
        curvature,
        optimizer=optimizer,
        damping=0.03,
        reduction=task.reduction,
        refresh=natgrad.Refresh(inverses=2),
        placement=placement,
    )
    for step in range(STEPS):
        inputs, targets = (split(part, ranks)[rank] for part in batch(name, step))
        optimizer.zero_grad()
        task.loss(replica(inputs), targets).backward()
        preconditioner.step(task.count(targets))
        optimizer.step()
    return {key: value.detach().clone() for key, value in copy.deepcopy(model).named_parameters()}


@pytest.mark.parametrize("placement", ["comm-opt", "mem-opt"])
@pytest.mark.parametrize("name", TASKS)
def test_two_ranks_do_what_one_process_does(ranks: Ranks, name: str, placement: str) -> None:
    alone, before = train(name, "auto"), dict(build(name).named_parameters())
    for found in ranks.run(2, train, name, placement):
        for key, value in alone.items():
            torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-11, msg=key)
    assert all(not torch.equal(value, before[key]) for key, value in alone.items() if "key.bias" not in key)
