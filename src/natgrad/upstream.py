"""Which places of an autograd graph must be asked for so that a pass visits all of them."""

from __future__ import annotations

from collections.abc import Sequence

from torch.autograd.graph import GradientEdge, Node


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
