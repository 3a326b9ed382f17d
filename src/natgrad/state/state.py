"""The state of curvature in checkpoints, by layer key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from natgrad.distributed import Communicator
from natgrad.errors import require
from natgrad.linalg.precision import at_least_float32
from natgrad.schedule import check_whole, is_whole
from natgrad.specs import TensorSpec
from natgrad.state.averages import allocate_averages, allocate_memory
from natgrad.state.block_group import BlockGroup
from natgrad.state.decisions import Decisions, DecisionState
from natgrad.state.results import allocate_results, padded, record_results, resize, rows_of, sized_by_batch, written
from natgrad.state.tensors import StateTensors

FORMAT = 1

Blocks = dict[str, dict[str, Tensor]]

# Counters of earlier versions, and those that they did not have.
_REMOVED_COUNTERS = {"bounded_gradients", "fallbacks/diagonal", "fallbacks/grafted"}
_ADDED_COUNTERS = {"skipped_steps"}

# The entries of a layer that hold flags and counts: `BlockState.good` and `BlockState.failures`. The names here and in
# `_FIELDS` are those of the format; "early weight" is `BlockState.input_weight`, "watch" the counts of failures.
_WHOLE = {"renewed": torch.bool, "ladder": torch.int32}

_FIELDS = ("format", "step", "last_factors", "last_inverses", "updates", "epochs", "blocks", "watch")


def _stores(group: BlockGroup) -> list[StateTensors]:
    """Allocate and return the tensors of a group that this rank keeps by its role."""
    stores = []
    if group.role.keeps_averages:
        allocate_averages(group)
        stores.append(group.state.averages)
    if group.role.is_gradient_worker:
        stores += [allocate_results(group), allocate_memory(group)]
    return stores


def follow(group: BlockGroup, decisions: DecisionState | None) -> bool:
    """Move all tensors to the device and dtypes of the parameters, and return whether these have changed."""
    state, before = group.state, group.state.place
    state.place = group.place
    if state.place == before:
        return False
    state.failures.to(group.device)
    state.weight, state.input_weight = (
        None if weight is None else weight.to(group.device, group.dtype)
        for weight in (state.weight, state.input_weight)
    )
    state.averages = state.averages.to(group.factor_dtype, group.device)
    state.results, state.memory = (kept.to(group.solve_dtype, group.device) for kept in (state.results, state.memory))
    if decisions is not None:
        decisions.to(group.work_dtype, group.device)
    return True


def blocks(groups: list[BlockGroup], decisions: Decisions) -> Blocks:
    """Return the tensors of this rank's blocks by layer key, also before the first step; views where possible."""
    result: Blocks = {}
    for group in groups:
        stores = _stores(group)
        for member in group.members:
            tensors = {name: store.whole(name, member.blocks) for store in stores for name in store}
            if group.state.weight is not None and group.role.keeps_averages:
                tensors["weight"] = group.state.weight[member.blocks]
                if group.state.input_weight is not None:
                    tensors["early weight"] = group.state.input_weight[member.blocks]
            if group.role.is_gradient_worker:
                good = [group.state.good[task.name][member.blocks] for task in group.tasks]
                tensors["renewed"] = torch.tensor(good, device="cpu").T.contiguous()
                tensors |= group.state.failures.state(member.blocks)
            if group in decisions:
                tensors |= decisions[group].state(member)
            if tensors:
                result[member.layer.key] = tensors
    return result


def snapshot(groups: list[BlockGroup], decisions: Decisions, parts: int = 1) -> dict[str, dict[str, Any]]:
    """Return copies of `blocks` on the host; deferred running averages as if all `parts` were equal to this rank's.

    Tensors whose size depends on the batch are put into tuples. ``torch.distributed.checkpoint`` loads tensors into
    those of a new model's state, which must have the right size, but loads the contents of tuples as they were saved.
    """
    in_parts = {
        member.layer.key: set(group.state.averages)
        for group in groups
        for member in group.members
        if parts > 1 and group.role.assignment.sums == "later"
    }
    unsized = {member.layer.key: sized_by_batch(group) for group in groups for member in group.members}
    copies: dict[str, dict[str, Any]] = {}
    for key, tensors in blocks(groups, decisions).items():
        copied = {name: tensor.cpu().clone() for name, tensor in tensors.items()}
        for name in in_parts.get(key, ()):
            copied[name] = copied[name].to(at_least_float32(copied[name].dtype)) * parts
        copies[key] = {name: (tensor,) if name in unsized[key] else tensor for name, tensor in copied.items()}
    return copies


def union(local: Blocks, counters: dict[str, int], runtime: Communicator) -> tuple[Blocks, dict[str, int]]:
    """Return the blocks of all ranks, on each rank's host, and the highest value of each counter; collective."""
    # Only workers hold the complete state of a layer.
    complete = {key: tensors for key, tensors in local.items() if "renewed" in tensors}
    found = runtime.all_gather_objects((complete, counters))
    merged: Blocks = {}
    for rank_blocks, _ in reversed(found):  # the lowest rank takes precedence
        for key, tensors in rank_blocks.items():
            merged[key] = {**merged.get(key, {}), **tensors}
    return merged, {name: max(rank_counters[name] for _, rank_counters in found) for name in counters}


def checked(
    state: Mapping[str, Any],
    groups: list[BlockGroup],
    counters: Mapping[str, Mapping[str, int]],
    decisions: Decisions,
) -> Mapping[str, Any]:
    """Return `state` without the tuples of `snapshot`, after checking that it is complete and fits the model.

    `counters` are the current values of the fields that hold counters. Results of tasks may hold anything, as the guard
    replaces those that are unusable.

    Raises:
        ValueError: on all ranks that are given the same state, if something is missing or unknown, if a tensor has
            another shape or kind of dtype, or if elements are not finite, or negative where they may not be.
    """
    state = _unpacked(state)
    require(isinstance(state, Mapping), "state", type(state).__name__, "what Preconditioner.state_dict() returned")
    missing = [name for name in _FIELDS if name not in state]
    require(not missing, "state", sorted(state), f"complete: {', '.join(missing)} missing")
    known = is_whole(state["format"]) and state["format"] == FORMAT
    require(known, "state['format']", state["format"], f"{FORMAT}, the format of this version")
    for name, least in (("step", 0), ("last_factors", -1), ("last_inverses", -1)):
        check_whole(f"state[{name!r}]", state[name], least)
    for name, counted in counters.items():
        fits = isinstance(state[name], Mapping) and counted.keys() - _ADDED_COUNTERS <= state[name].keys()
        fits = fits and state[name].keys() <= counted.keys() | _REMOVED_COUNTERS
        fits = fits and all(map(is_whole, state[name].values()))
        require(fits, f"state[{name!r}]", state[name], f"a whole number for each of {', '.join(counted)}")
    loaded = state["blocks"]
    keys = {member.layer.key for group in groups for member in group.members}
    fits = isinstance(loaded, Mapping) and all(isinstance(tensors, Mapping) for tensors in loaded.values())
    require(fits, "state['blocks']", type(loaded).__name__, "a dict of dicts of tensors")
    wanted = _shapes(groups, decisions, loaded)
    missing, unknown = sorted(set(wanted) - set(loaded)), sorted(set(loaded) - keys)
    hint = (
        "the state may be of another curvature, form, dtype, head or full_factors, or of a version in "
        "which other factors of natural Muon were whole; where ranks share the work, save state_dict(gather=True)"
    )
    require(not missing, "state['blocks']", missing[:5], f"those of the model: each of these is missing; {hint}")
    require(not unknown, "state['blocks']", unknown[:5], "those of the model: each of these is unknown to it")
    for key, shapes in wanted.items():
        for name, shape in shapes.items():
            tensor = loaded[key].get(name)
            found = tuple(tensor.shape) if isinstance(tensor, Tensor) else tensor
            require(found == shape, f"state['blocks'][{key!r}][{name!r}]", found, f"a tensor of shape {shape}: {hint}")
    _check_tensors(loaded, groups)
    return state


def _check_tensors(loaded: Mapping[str, Mapping[str, Any]], groups: list[BlockGroup]) -> None:
    """Check the dtypes, shapes and elements of tensors, also of those that only other ranks need."""
    for group in groups:
        for member in group.members:
            tensors, count = loaded.get(member.layer.key, {}), member.stop - member.start
            results = {spec.name: spec for spec in written(group, rows_of(group, tensors))}
            specs = results | {spec.name: spec for spec in (*group.statistics, *group.memory_specs)}
            specs |= {name: TensorSpec(name, (), nonnegative=True) for name in ("weight", "early weight")}
            for name, tensor in tensors.items():
                if name not in specs and name not in _WHOLE:
                    continue
                place = f"state['blocks'][{member.layer.key!r}][{name!r}]"
                shape = (count, *specs[name].shape) if name in specs else None
                found = f"{tensor.dtype}{list(tensor.shape)}" if isinstance(tensor, Tensor) else tensor
                fits = isinstance(tensor, Tensor) and tensor.layout == torch.strided and shape in (None, tensor.shape)
                fits = fits and not tensor.is_complex() and tensor.is_floating_point() == (name in specs)
                kind = "whole numbers or bools" if shape is None else f"floating-point numbers {list(shape)}"
                require(fits, place, found, f"a tensor of {kind}")
                if name in specs and name not in results:
                    require(bool(tensor.isfinite().all()), place, "a tensor with nan or infinite elements", "finite")
                    fits = not specs[name].nonnegative or bool((tensor >= 0).all())
                    require(fits, place, "a tensor with negative elements", "nonnegative")


def restore(blocks: Mapping[str, Mapping[str, Tensor]], groups: list[BlockGroup], decisions: Decisions) -> None:
    """Copy checked blocks into the block groups. Blocks that are not in `blocks` do not change."""
    for group in groups:
        loaded = [blocks[member.layer.key] for member in group.members if blocks.get(member.layer.key)]
        if not loaded:
            continue
        if group.role.is_gradient_worker:
            most = max(rows_of(group, tensors) for tensors in loaded)
            resize(group, most if len(loaded) == len(group.members) else max(most, group.state.rows))
        stores = _stores(group)
        for member in group.members:
            tensors = blocks.get(member.layer.key, {})
            if not tensors:
                continue
            for store in stores:
                for name in store:
                    store.write_whole(name, member.blocks, padded(group, name, tensors[name].to(group.device)))
            if group.state.weight is not None and group.role.keeps_averages:
                group.state.weight[member.blocks] = tensors["weight"].to(group.state.weight)
                if group.state.input_weight is not None:  # a training with one interval saved one weight
                    group.state.input_weight[member.blocks] = tensors.get("early weight", tensors["weight"]).to(
                        group.state.weight
                    )
            if group.role.is_gradient_worker:
                for task, success in zip(group.tasks, tensors["renewed"].bool().T.tolist(), strict=True):
                    index = list(range(member.start, member.stop))
                    record_results(group, task.name, index, success, forget=True)
                group.state.failures.load(member.start, tensors, group.device)
            if group in decisions:
                decisions[group].restore(member, tensors)


def fitting(blocks: Blocks, groups: list[BlockGroup], decisions: Decisions) -> Blocks:
    """Return the `blocks` whose shapes fit the groups."""
    wanted = _shapes(groups, decisions, blocks)
    return {
        key: tensors
        for key, tensors in blocks.items()
        if key in wanted
        and {name: tuple(tensors[name].shape) for name in wanted[key] if name in tensors} == wanted[key]
    }


def _unpacked(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state without the tuples of `snapshot`; other objects are returned unchanged."""
    if not (isinstance(state, Mapping) and isinstance(state.get("blocks"), Mapping)):
        return state
    found = {
        key: {
            name: value[0] if isinstance(value, tuple) and len(value) == 1 else value for name, value in values.items()
        }
        for key, values in state["blocks"].items()
        if isinstance(values, Mapping)
    }
    return {**state, "blocks": {**state["blocks"], **found}}


def _shapes(
    groups: list[BlockGroup], decisions: Decisions, loaded: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the shapes of the tensors that each layer's blocks need, where sizes by batch are those of `loaded`."""
    wanted = {}
    for group in groups:
        for member in group.members:
            n = member.stop - member.start
            shapes: dict[str, tuple[int, ...]] = {}
            if group.role.keeps_averages:
                shapes |= {"weight": (n,), **{spec.name: (n, *spec.shape) for spec in group.statistics}}
            if group.role.is_gradient_worker:
                held = (*written(group, rows_of(group, loaded.get(member.layer.key, {}))), *group.memory_specs)
                shapes |= {"renewed": (n, len(group.tasks)), **group.state.failures.shapes(n)}
                shapes |= {spec.name: (n, *spec.shape) for spec in held}
            if group in decisions:  # if any of these is missing, the decisions start from their initial state
                remembered = decisions[group].shapes(member)
                shapes |= remembered if loaded.get(member.layer.key, {}).keys() >= remembered.keys() else {}
            if shapes:
                wanted[member.layer.key] = shapes
    return wanted
