"""Places of an autograd graph: written on, found again, and which must be asked for so that a pass visits all of them.

What is written on a graph goes when the graph does.
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
    """Write `note` on the place of `output` in its graph; return its node's number, which few other nodes share."""
    place = get_gradient_edge(output)
    notes: dict[Any, Any] = place.node.metadata  # type: ignore[assignment]
    notes[_KEY] = (*notes.get(_KEY, ()), (place.output_nr, note))
    return place.node._sequence_nr()


def marked(nodes: Iterable[Node], numbers: Container[int]) -> Iterator[tuple[GradientEdge, Any]]:
    """Yield every place at `nodes` that was written on, with what was; only nodes with such a number are looked at."""
    for node in nodes:
        if node._sequence_nr() not in numbers:
            continue  # to ask a node for what is written on it is slow where nothing is
        notes: dict[Any, Any] = node.metadata  # type: ignore[assignment]
        for output, note in notes.get(_KEY, ()):
            yield GradientEdge(node, output), note


def reached(root: Node) -> set[Node]:
    """Return `root` and every node upstream of it."""
    seen, pending = {root}, [root]
    while pending:
        fresh = {following for following, _ in pending.pop().next_functions if following is not None} - seen
        seen |= fresh
        pending += fresh
    return seen


def sources(edges: Sequence[GradientEdge]) -> list[GradientEdge]:
    """Return those of `edges` that have no other one upstream.

    A pass down to these visits all the others on its way, and need not keep their gradients.

    Args:
        edges: Places of a graph, as ``torch.autograd.graph.get_gradient_edge`` returns them.

    Returns:
        A part of `edges`, in their order. Cost: one visit of each node upstream of them.
    """
    marked = {edge.node for edge in edges}
    beyond: dict[Node, bool] = {}  # whether a marked node lies strictly upstream
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
def unnoticed(nodes: Iterable[Node]) -> Iterator[None]:
    """Have ``DistributedDataParallel`` take no notice of a pass through `nodes`.

    With ``static_graph`` it takes the first pass through its output for that of the loss, and then averages the
    gradients of no other one.
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


def go_down(outputs: Tensor, score: Tensor, ends: Callable[[set[Node]], list[GradientEdge]], *, retain: bool) -> None:
    """Differentiate down to some places; parameters' ``.grad`` stay untouched, and wrappers unaware.

    Args:
        outputs: Where to begin.
        score: The derivative of the loss by `outputs`.
        ends: Returns the places, of all that is upstream.
        retain: Whether the graph is to be differentiated again.
    """
    below = set() if outputs.grad_fn is None else reached(outputs.grad_fn)
    places = ends(below)
    if places:
        with unnoticed(below):
            torch.autograd.grad(outputs, places, score, retain_graph=retain, allow_unused=True)


def destination(parameter: Tensor) -> Literal["grad", "caller", ""]:
    """Tell where the backward pass under way takes the gradient of a `parameter`; empty: it does not."""
    try:
        return "grad" if torch._C._will_engine_execute_node(get_gradient_edge(parameter).node) else ""
    except RuntimeError:  # asked for by name in torch.autograd.grad, or frozen meanwhile
        return "caller"
