"""The sizes and costs of a layer for the planner, from the declarations of its curvature."""

from __future__ import annotations

from math import prod

from natgrad.curvature import Curvature
from natgrad.curvature.base import declarations, gathered, replayed_statistics, summed
from natgrad.distributed import LayerDemand, Rows, narrower
from natgrad.distributed.fsdp import shares
from natgrad.layers import Layer
from natgrad.linalg.precision import Precision, at_least_float32
from natgrad.specs import TensorSpec
from natgrad.state.tensors import packed_shape, spec_dtype


def work(layer: Layer, curvature: Curvature, precision: Precision) -> LayerDemand:
    """Return the sizes and costs of a layer."""
    sizes, n = (layer.outputs, layer.inputs), layer.blocks
    statistics, tasks, state = declarations(curvature, *sizes)
    rows, statistics = gathered(statistics), summed(statistics)
    linked = any(spec.source == "both" for spec in rows)
    replayed = replayed_statistics(statistics)
    written = [spec for task in tasks for spec in task.writes]
    kept = [*written, *state]
    parameter = layer.slots[0].parameter
    factors, held = precision.factor_dtype(parameter), precision.solve_dtype(parameter)
    shards, replicated = shares(layer)
    return LayerDemand(
        parts={task.name: task.cost * n for task in tasks},
        replayed=n * sum(spec.numel for spec in statistics if spec.name in replayed),
        on_every_worker=frozenset(task.name for task in tasks if task.on_every_worker),
        sums=n * sum(prod(packed_shape(spec)) for spec in statistics),
        results={task.name: n * sum(prod(packed_shape(spec)) for spec in task.writes) for task in tasks},
        rows=Rows(width=n * sum(sizes), share=curvature.rows_per_rank, linked=linked) if rows else None,
        gradients=n * prod(sizes),
        shards=shards,
        replicated=replicated,
        blocks=n,
        solve=n * prod(sizes) * sum(_products(spec) for spec in written),
        averages=n * sum(prod(packed_shape(spec)) * spec_dtype(spec, factors).itemsize for spec in statistics),
        held=n * sum(spec.numel * spec_dtype(spec, held).itemsize for spec in kept),
        itemsize=at_least_float32(held).itemsize,
        wire=narrower(precision.wire, at_least_float32(factors)).itemsize,
        alone=layer.form != "one-hot",
    )


def _products(spec: TensorSpec) -> float:
    """Return the multiply-adds per gradient element of preconditioning with one result.

    One product with a symmetric matrix (an inverse), two with another one (into a basis and back).
    """
    square = len(spec.shape) > 1 and spec.shape[-1] == spec.shape[-2]
    return float(spec.shape[-1] * (1 if spec.symmetric else 2)) if square else 1.0
