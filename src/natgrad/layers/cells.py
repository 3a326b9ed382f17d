"""``nn.LSTMCell``, ``nn.GRUCell`` and ``nn.RNNCell``: the projections of the input and of the hidden state.

Torch's fused cells do not return the gates, the outputs of these two linear maps; here each is computed separately.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from natgrad.layers.base import Layer
from natgrad.layers.hidden import HiddenLayer, ObservedForward, rebound, unknown_forward

CELLS = (nn.LSTMCell, nn.GRUCell, nn.RNNCell)


def cell_layers(name: str, module: nn.Module) -> Sequence[Layer] | str:
    """Return the layers of a recurrent cell."""
    base = next(cell for cell in CELLS if isinstance(module, cell))
    layers = [
        CellLayer(name, module, part, {f"weight_{short}": None, f"bias_{short}": None})
        for part, short in (("input", "ih"), ("hidden", "hh"))
    ]
    return unknown_forward(module, base, {base.forward: ("_VF",)}) or [layer for layer in layers if layer.slots]


class CellForward(ObservedForward):
    """Torch's forward, with separate operations in place of the fused cell."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._batched = True
        cells = SimpleNamespace(
            lstm_cell=self._lstm, gru_cell=self._gru, rnn_tanh_cell=self._tanh, rnn_relu_cell=self._relu
        )
        self._run = rebound(type(module).forward, _VF=cells)

    @override
    def run(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        inputs = args[0] if args else kwargs["input"]
        self._batched = inputs.ndim == 2
        return self._run(module, *args, **kwargs)

    def _gates(self, inputs: Tensor, hidden: Tensor, *parameters: Any) -> tuple[Tensor, Tensor]:
        input_weight, hidden_weight, input_bias, hidden_bias = parameters
        return (
            self._project("input", inputs, input_weight, input_bias),
            self._project("hidden", hidden, hidden_weight, hidden_bias),
        )

    def _project(self, part: str, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        output = F.linear(inputs, weight, bias)
        self.report(part, inputs if self._batched else inputs[0], output)
        return output

    def _lstm(self, inputs: Tensor, state: tuple[Tensor, Tensor], *parameters: Any) -> tuple[Tensor, Tensor]:
        hidden, cell = state
        of_inputs, of_hidden = self._gates(inputs, hidden, *parameters)
        write, forget, content, read = (of_inputs + of_hidden).chunk(4, 1)
        cell = forget.sigmoid() * _like_fused(cell, forget) + write.sigmoid() * content.tanh()
        return read.sigmoid() * cell.tanh(), cell

    def _gru(self, inputs: Tensor, hidden: Tensor, *parameters: Any) -> Tensor:
        of_inputs, of_hidden = (gates.chunk(3, 1) for gates in self._gates(inputs, hidden, *parameters))
        reset, keep = (of_inputs[gate].add(of_hidden[gate]).sigmoid() for gate in (0, 1))
        content = (of_inputs[2] + reset * of_hidden[2]).tanh()
        return content + keep * (_like_fused(hidden, keep) - content)

    def _tanh(self, inputs: Tensor, hidden: Tensor, *parameters: Any) -> Tensor:
        return torch.add(*self._gates(inputs, hidden, *parameters)).tanh()

    def _relu(self, inputs: Tensor, hidden: Tensor, *parameters: Any) -> Tensor:
        return torch.add(*self._gates(inputs, hidden, *parameters)).relu()


class CellLayer(HiddenLayer):
    """The projection of a cell's input, or of its hidden state."""

    observed_forward = CellForward


def _like_fused(state: Tensor, gate: Tensor) -> Tensor:
    """Return `state` in the dtype that the fused cell uses: autocast lowers it on CUDA, but not on the CPU."""
    return state.to(gate.dtype) if gate.is_cuda else state
