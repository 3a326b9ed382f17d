"""Edges of an autograd graph: attach notes to them, and differentiate by as few as are needed to reach all.

Notes are deleted with the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

_KEY = "natgrad"


def mark(output: Tensor, note: object) -> int:
    """Attach a note to the edge of `output`, and return the sequence number of its node, which few nodes share."""
    edge = get_gradient_edge(output)
    notes: dict[Any, Any] = edge.node.metadata  # type: ignore[assignment]
    notes[_KEY] = (*notes.get(_KEY, ()), (edge.output_nr, note))
    return edge.node._sequence_nr()


def marked(nodes: Iterable[Node], numbers: Container[int]) -> Iterator[tuple[GradientEdge, Any]]:
    """Yield every edge with a note, and the note, among the nodes with sequence numbers in `numbers`."""
    for node in nodes:
        if node._sequence_nr() not in numbers:
            continue  # reading empty metadata is slow
        notes: dict[Any, Any] = node.metadata  # type: ignore[assignment]
        for output, note in notes.get(_KEY, ()):
            yield GradientEdge(node, output), note


def reached(roots: Iterable[Node]) -> set[Node]:
    """Return `roots` and every node that a backward pass from them may reach."""
    seen = set(roots)
    pending = list(seen)
    while pending:
        fresh = {following for following, _ in pending.pop().next_functions if following is not None} - seen
        seen |= fresh
        pending += fresh
    return seen


def sources(edges: Sequence[GradientEdge]) -> list[GradientEdge]:
    """Return those of `edges` from which no other one can be reached; each node is visited once.

    A backward pass to these visits all the others, without keeping their gradients.
    """
    marked = {edge.node for edge in edges}
    beyond: dict[Node, bool] = {}  # whether another marked node can be reached
    pending = list(marked)
    while pending:
        node = pending[-1]
        nexts = [following for following, _ in node.next_functions if following is not None]
        unknown = [] if node in beyond else [following for following in nexts if following not in beyond]
        if unknown:
            pending += unknown
        else:
            beyond.setdefault(node, any(following in marked or beyond[following] for following in nexts))
            pending.pop()
    return [edge for edge in edges if not beyond[edge.node]]


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
    """Run a backward pass from `outputs` to some edges, without changing ``.grad`` and hidden from DDP.

    Args:
        outputs: The outputs of the model.
        score: The derivative by `outputs`.
        ends: Returns the edges, for the set of nodes that a pass from `outputs` may reach.
    """
    nodes = set() if outputs.grad_fn is None else reached([outputs.grad_fn])
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
