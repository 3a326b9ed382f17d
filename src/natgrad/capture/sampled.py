"""Labels drawn from the model's prediction for the sampled Fisher, and the backward pass of their loss.

The pass differentiates by as few edges of the autograd graph as are needed to reach all uses of layers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from natgrad.curvature.likelihood import Likelihood
from natgrad.errors import describe, require


class LabelSampler:
    """Draws labels as a function of seed, rank and step, so that resuming needs no generator state."""

    def __init__(self, *, seed: int, rank: int, reduction: str) -> None:
        """Initialize; each rank draws different labels."""
        self.seed, self._rank, self._reduction = seed, rank, reduction
        self._last = (-1, 0)  # step, and number of draws in it

    def score(self, likelihood: Likelihood, outputs: Tensor, mask: Tensor | None, step: int) -> Tensor:
        """Return the derivative of the loss at drawn labels by the detached `outputs`, in their shape.

        Several draws in the same step differ.

        Raises:
            ValueError: if `outputs` or `mask` has a wrong shape. Nothing has been drawn then.
        """
        draw = self._last[1] + 1 if self._last[0] == step else 0
        score = likelihood.score(
            outputs,
            torch.Generator(outputs.device).manual_seed(seed_of(self.seed, self._rank, step, draw)),
            summed=self._reduction == "sum",
            first_feature=outputs.ndim - 1 if self._reduction == "tokens" else 1,
        )
        if mask is not None:
            last = score.movedim(likelihood.dim, -1)
            fits = isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.shape == last.shape[: mask.ndim]
            allowed = f"bool, of the leading dimensions of outputs, classes last: {list(last.shape)}"
            require(fits, "mask", describe(mask), allowed)
            kept = mask.view(*mask.shape, *[1] * (last.ndim - mask.ndim))
            score = (last * kept).movedim(-1, likelihood.dim)
        self._last = (step, draw)
        return score


def seed_of(*parts: int | str) -> int:
    """Return a seed below 2⁶³ that depends on `parts`, such as a user's seed, a rank and a step."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def reached(root: Node) -> set[Node]:
    """Return `root` and every node that a backward pass from it may reach."""
    seen, pending = {root}, [root]
    while pending:
        fresh = {following for following, _ in pending.pop().next_functions if following is not None} - seen
        seen |= fresh
        pending += fresh
    return seen


def sources(edges: Sequence[GradientEdge], nodes: Iterable[Node]) -> list[GradientEdge]:
    """Return those of `edges` from which no other one can be reached, in a graph of these `nodes`.

    A backward pass to these visits all the others, without keeping their gradients.
    """
    found = {edge.node for edge in edges}
    beyond: set[Node] = set()  # from which another edge can be reached
    for node in sorted(nodes, key=lambda node: node._sequence_nr()):  # each after the nodes that it leads to
        if any(following in found or following in beyond for following, _ in node.next_functions):
            beyond.add(node)
    return [edge for edge in edges if edge.node not in beyond]


@contextmanager
def _hidden_from_ddp(nodes: Iterable[Node]) -> Iterator[None]:
    """Hide a backward pass through `nodes` from ``DistributedDataParallel``.

    With ``static_graph``, DDP averages gradients only in the first pass through its output.
    """
    sinks: list[Any] = [node for node in nodes if type(node).__name__ == "_DDPSinkBackward"]
    wrappers = {wrapper for sink in sinks if (wrapper := sink.ddp_weakref()) is not None and wrapper.static_graph}
    enqueued = {wrapper: wrapper._static_graph_delay_allreduce_enqueued for wrapper in wrappers}
    for wrapper in wrappers:
        wrapper._static_graph_delay_allreduce_enqueued = True
    try:
        yield
    finally:
        for wrapper, before in enqueued.items():
            wrapper._static_graph_delay_allreduce_enqueued = before


def differentiate_to(outputs: Tensor, score: Tensor, ends: Callable[[set[Node]], list[GradientEdge]]) -> None:
    """Run a backward pass from `outputs` to the edges `ends` returns, hidden from DDP; ``.grad`` does not change."""
    nodes = set() if outputs.grad_fn is None else reached(outputs.grad_fn)
    edges = ends(nodes)
    if edges:
        with _hidden_from_ddp(nodes):
            torch.autograd.grad(outputs, edges, score, retain_graph=True, allow_unused=True)


def destination(parameter: Tensor) -> Literal["grad", "caller", ""]:
    """Return whether the current backward pass writes the gradient of a parameter to ``.grad``, or returns it.

    Empty: the pass does not compute it.
    """
    try:
        return "grad" if torch._C._will_engine_execute_node(get_gradient_edge(parameter).node) else ""
    except RuntimeError:  # an argument of torch.autograd.grad, or frozen since
        return "caller"
