"""Places of an autograd graph: notes on them, and which of them a pass must go to so that it visits all of them.

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
    """Attach a note to the place of `output` in its graph; return its node's number, which few other nodes share."""
    place = get_gradient_edge(output)
    notes: dict[Any, Any] = place.node.metadata  # type: ignore[assignment]
    notes[_KEY] = (*notes.get(_KEY, ()), (place.output_nr, note))
    return place.node._sequence_nr()


def marked(nodes: Iterable[Node], numbers: Container[int]) -> Iterator[tuple[GradientEdge, Any]]:
    """Yield every place with a note, and the note, among the nodes with one of some numbers."""
    for node in nodes:
        if node._sequence_nr() not in numbers:
            continue  # reading the metadata of a node without any is slow
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
    """Return those of `edges` that have no other one upstream, in one visit of each node upstream.

    A pass down to these visits all the others on its way, and need not keep their gradients.
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
    """Keep ``DistributedDataParallel`` from noticing a pass through `nodes`.

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
    """Differentiate `outputs`, whose derivative is `score`, down to the places that `ends` returns of all upstream.

    Parameters' ``.grad`` stay unchanged, and wrappers unaware. `retain`: The graph will be differentiated again.
    """
    below = set() if outputs.grad_fn is None else reached(outputs.grad_fn)
    places = ends(below)
    if places:
        with unnoticed(below):
            torch.autograd.grad(outputs, places, score, retain_graph=retain, allow_unused=True)


def destination(parameter: Tensor) -> Literal["grad", "caller", ""]:
    """Return where the present backward pass takes the gradient of a `parameter`. Empty: it does not."""
    try:
        return "grad" if torch._C._will_engine_execute_node(get_gradient_edge(parameter).node) else ""
    except RuntimeError:  # asked for by name in torch.autograd.grad, or frozen meanwhile
        return "caller"
