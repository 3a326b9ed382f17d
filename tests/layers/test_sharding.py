"""The rows of a sharded parameter find their places in the blocks of its layer, whatever its layout and its shards."""

import pytest
import torch
from torch import nn

from natgrad.distributed.fsdp import from_blocks, put_rows, slot_rows
from natgrad.layers import layers_for

MODULES = {
    "linear": lambda: nn.Linear(4, 7),
    "one row": lambda: nn.Linear(4, 1),
    "one column": lambda: nn.Linear(1, 5),
    "grouped": lambda: nn.Conv2d(6, 9, (2, 1), groups=3),
    "depthwise": lambda: nn.Conv1d(5, 5, 3, groups=5),
    "transposed": lambda: nn.ConvTranspose2d(5, 3, (2, 3)),
    "transposed, grouped": lambda: nn.ConvTranspose1d(6, 4, 3, groups=2),
    "transposed, depthwise": lambda: nn.ConvTranspose1d(5, 5, 2, groups=5),
    "attention": lambda: nn.MultiheadAttention(3, 1),
    "attention of others": lambda: nn.MultiheadAttention(4, 1, kdim=3, vdim=5),
    "cell": lambda: nn.LSTMCell(3, 2),
    "norm": lambda: nn.LayerNorm(5),
    "embedding": lambda: nn.Embedding(7, 3),
}


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("kind", MODULES)
def test_pieces_make_up_the_whole(kind, shards):
    torch.manual_seed(0)
    module = MODULES[kind]()
    layers = layers_for("m", module)
    assert not isinstance(layers, str)
    back = {id(p): torch.zeros_like(p) for p in module.parameters()}
    for layer in layers:
        expected, filled = (torch.full((layer.blocks, layer.outputs, layer.inputs), torch.nan) for _ in range(2))
        found = {}
        for slot in layer.slots:
            whole = slot.parameter.detach()
            own, place = layer.align(slot, whole, expected[:, :, slot.columns])
            place.copy_(own)
            for start, rows in _pieces(whole, shards):
                put_rows(found, slot, start, rows)
            own, place = layer.align(slot, found[id(slot.parameter)], filled[:, :, slot.columns])
            place.copy_(own)
            part = slot_rows(slot)
            returned = from_blocks(layer, slot, expected[:, :, slot.columns])
            back[id(slot.parameter)][part.start : part.stop] = returned[part.start : part.stop]
        assert not expected.isnan().any()
        assert torch.equal(filled, expected)
    for layer in layers:
        for slot in layer.slots:
            rows = slice(None) if slot.rows is None else slot.rows
            assert torch.equal(back[id(slot.parameter)][rows], slot.parameter.detach()[rows])


def _pieces(whole, shards):
    """Cut as FSDP2 does; the pieces are views, flat as they arrive."""
    start, pieces = 0, []
    for rows in whole.chunk(shards):
        pieces.append((start, rows.reshape(-1)))
        start += len(rows)
    return [*pieces, *[(start, whole.new_empty(0))] * (shards - len(pieces))]
