"""The most upstream places of a graph."""

import torch
from torch.autograd.graph import get_gradient_edge

from natgrad.capture.sampled import reached, sources


def test_only_what_has_nothing_upstream_is_asked_for():
    x = torch.randn(3, requires_grad=True)
    first, other = x.sin(), x.cos()
    middle = (first * 2).exp()
    end = (middle + other).tanh()
    edges = [get_gradient_edge(tensor) for tensor in (end, first, middle, other)]
    assert sources(edges, reached(end.grad_fn)) == [edges[1], edges[3]]


def test_a_pass_down_to_the_sources_visits_all_places():
    x = torch.randn(3, requires_grad=True)
    tensors = [x.sin()]
    for _ in range(2000):  # deeper than Python's own recursion goes
        tensors.append(tensors[-1] * 1.001)
    visited = []
    for index, tensor in enumerate(tensors):
        tensor.register_hook(lambda gradient, index=index: visited.append(index))
    edges = [get_gradient_edge(tensor) for tensor in tensors]
    torch.autograd.grad(tensors[-1].sum(), sources(edges, reached(tensors[-1].grad_fn)))
    assert visited == list(reversed(range(2001)))
