"""Whether two layers read the very same tensor: then what they show of their inputs is summed up once."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import count

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from natgrad.layers import Layer

# Instead of the number of a backward pass.
FORWARD = -1


class Sightings:
    """Numbers for what layers have read in the pass under way: equal for the same tensor, read in the same way.

    A tensor is known by its memory and by its version, which every operation in place changes. No memory is held: a
    weak reference keeps no more than its address from being given to another.
    """

    def __init__(self) -> None:
        """Begin with none."""
        self._pass: int | None = None
        self._known: dict[Hashable, int] = {}
        self._numbers = count()

    def forget(self) -> None:
        """Forget all tensors; no number is given twice."""
        self._pass, self._known = None, {}

    def number(self, inputs: Tensor, layer: Layer, samples: int, task: int = FORWARD) -> int | None:
        """Return the number of what a layer reads.

        Args:
            inputs: The tensor.
            layer: The layer.
            samples: How many its rows are of.
            task: The backward pass.

        Returns:
            The number; None: nothing is known to read the same.
        """
        sight = layer.sight
        if sight is None or not is_plain(inputs) or inputs.is_inference():  # which has no version
            return None
        if task != self._pass:
            self.forget()
            self._pass = task
        storage = StorageWeakRef(inputs.untyped_storage())
        # What is written on one stream of a device is not there yet on another.
        stream = torch._C._cuda_getCurrentRawStream(inputs.get_device()) if inputs.device.type == "cuda" else 0
        lies = inputs.storage_offset(), inputs.shape, inputs.stride(), inputs.dtype, inputs.is_neg()
        place = inputs._version, lies, stream
        return self._known.setdefault((storage, place, sight, samples), next(self._numbers))


def is_plain(tensor: Tensor) -> bool:
    """Tell whether a tensor is no more than it shows: not one of a batch of a transform, nor spread over ranks."""
    return type(tensor) in (Tensor, nn.Parameter) and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
