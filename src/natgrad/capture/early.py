"""What the inputs of a layer show in the forward pass, before it is known whether a gradient will come."""

from __future__ import annotations

from functools import partial
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from natgrad.capture.saved import outline
from natgrad.capture.uses import LossTerms, Use
from natgrad.numerics.products import full_products
from natgrad.sums import Sums


def look_ahead(use: Use, inputs: Tensor, output: Tensor, terms: LossTerms, sums: Sums) -> float:
    """Give `sums` what one use of a layer shows without its gradient, if they ask for it; return the seconds it took.

    A layer in evaluation mode is hardly being trained, and token losses may count some positions only.

    Args:
        use: The use.
        inputs: The layer's inputs.
        output: Its output.
        terms: What is known of the loss.
        sums: The sums.
    """
    name = use.primary.name
    if not (sums.foresees(name) and use.layer.module.training and terms.foreseeable(use)):
        return 0.0
    if not (is_plain(inputs) and inputs.numel() and output.numel()):
        return 0.0
    started = perf_counter()
    # Nobody is to see these products: selective checkpointing counts the operations of a forward pass.
    with torch.no_grad(), _disable_current_modes(), full_products(inputs.device):
        samples = terms.of(name).samples(use, -1, output, drawn=False)
        rows, _ = use.layer.rows(inputs.detach(), outline(output), samples)
        sums.foresee(name, use, partial(use.curvature.observe_inputs, inputs=rows), len(terms.of_loss))
    spent = perf_counter() - started
    use.primary.seconds += spent
    return spent


def is_plain(tensor: Tensor) -> bool:
    """Tell whether a tensor is no more than it shows: not one of a batch of a transform, nor spread over ranks."""
    return type(tensor) in (Tensor, nn.Parameter) and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
