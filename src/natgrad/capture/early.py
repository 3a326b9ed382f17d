"""What the inputs of a layer show in the forward pass, before it is known whether a gradient will come."""

from __future__ import annotations

from functools import partial
from time import perf_counter

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from natgrad.capture.saved import outline
from natgrad.capture.sightings import Sightings, is_plain
from natgrad.capture.uses import LossTerms, Use
from natgrad.numerics.products import full_products
from natgrad.sums import Sums


def look_ahead(use: Use, inputs: Tensor, output: Tensor, terms: LossTerms, sums: Sums, sightings: Sightings) -> float:
    """Give `sums` what one use of a layer shows without its gradient, if they ask for it; return the seconds it took.

    A layer in evaluation mode is hardly being trained, and token losses may count some positions only.

    Args:
        use: The use.
        inputs: The layer's inputs.
        output: Its output.
        terms: What is known of the loss.
        sums: The sums.
        sightings: What layers have read in this pass.
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
        sight = sightings.number(inputs, use.layer, samples)
        sums.foresee(name, use, partial(use.curvature.observe_inputs, inputs=rows), len(terms.of_loss), sight)
    spent = perf_counter() - started
    use.primary.seconds += spent
    return spent
