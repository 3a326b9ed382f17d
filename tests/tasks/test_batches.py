"""Batches of tensors, tuples, dictionaries and lists."""

import torch

from natgrad.tasks import batches


def test_every_kind_of_batch_is_measured_split_and_moved() -> None:
    rows = torch.arange(5)
    batch = ({"ids": rows, "mask": rows.bool()}, [{"box": torch.full((n, 4), n)} for n in range(5)])
    assert batches.size(batch) == batches.size(batch[0]) == batches.size(batch[1]) == 5
    parts = batches.split(batch, 2)
    assert [part[0]["ids"].tolist() for part in parts] == [[0, 1, 2], [3, 4]]
    assert [[len(sample["box"]) for sample in part[1]] for part in parts] == [[0, 1, 2], [3, 4]]
    moved = batches.to(batch, "meta")
    assert {tensor.device.type for tensor in batches.tensors(moved)} == {"meta"}
    assert [tensor.shape for tensor in batches.tensors(moved)] == [tensor.shape for tensor in batches.tensors(batch)]
