"""The state of curvature in checkpoints, keyed by the qualified name of the parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from natgrad.distributed import Communicator
from natgrad.errors import require
from natgrad.state.block_group import BlockGroup
from natgrad.state.tensors import StateTensors

FORMAT = 1

Blocks = dict[str, dict[str, Tensor]]

_FIELDS = ("format", "step", "last_factors", "last_inverses", "updates", "epochs", "blocks", "watch", "damping")


def _stores(group: BlockGroup) -> list[StateTensors]:
    """Return the tensors of a group that this rank keeps by its role, allocated."""
    stores = []
    if group.role.keeps_averages:
        group.allocate_averages()
        stores.append(group.averages)
    if group.role.is_gradient_worker:
        stores += [group.allocate_results(), group.allocate_memory()]
    return stores


def blocks(groups: list[BlockGroup]) -> Blocks:
    """Return the tensors of this rank's blocks, even before the first step; views where they are stored alike."""
    result: Blocks = {}
    for group in groups:
        stores = _stores(group)
        for member in group.members:
            own = {name: tensors.whole(name, member.blocks) for tensors in stores for name in tensors}
            if group.weight is not None and group.role.keeps_averages:
                own["weight"] = group.weight[member.blocks]
                if group.input_weight is not None:
                    own["early weight"] = group.input_weight[member.blocks]
            if group.role.is_gradient_worker:
                good = [group.good[task.name][member.blocks] for task in group.tasks]
                own["renewed"] = torch.tensor(good, device="cpu").T.contiguous()
                own |= group.failures.state(member.blocks)
            if group.decisions is not None:
                own |= group.decisions.state(member)
            if own:
                result[member.layer.key] = own
    return result


def snapshot(groups: list[BlockGroup]) -> dict[str, dict[str, Any]]:
    """Return copies of `blocks` on the host.

    Tensors whose size a batch decides are put into tuples. ``torch.distributed.checkpoint`` loads tensors into those of
    a new model's state, which must have the right size, but loads the contents of tuples as they were saved.
    """
    unsized = {member.layer.key: group.sized_by_batch for group in groups for member in group.members}
    copies: dict[str, dict[str, Any]] = {}
    for key, own in blocks(groups).items():
        whole = {name: tensor.cpu().clone() for name, tensor in own.items()}
        copies[key] = {name: (tensor,) if name in unsized[key] else tensor for name, tensor in whole.items()}
    return copies


def union(given: Blocks, counted: dict[str, int], runtime: Communicator) -> tuple[Blocks, dict[str, int]]:
    """Return the blocks of all ranks, on each rank's host, and the highest value of each counter; collective."""
    mine = {key: own for key, own in given.items() if "renewed" in own}  # workers hold the complete state of a layer
    found = runtime.all_gather_objects((mine, counted))
    whole: Blocks = {}
    for own, _ in reversed(found):  # the lowest rank wins
        for key, tensors in own.items():
            whole[key] = {**whole.get(key, {}), **tensors}
    return whole, {name: max(own[name] for _, own in found) for name in counted}


def checked(
    state: Mapping[str, Any], groups: list[BlockGroup], counters: Mapping[str, Mapping[str, int]]
) -> Mapping[str, Any]:
    """Return `state` without the tuples of `snapshot`, after checking that it is complete and fits the model.

    `counters` are the current values of each field that holds counters.

    Raises:
        ValueError: naming what is missing, unknown or of another shape.
    """
    state = _unpacked(state)
    require(isinstance(state, Mapping), "state", type(state).__name__, "what Preconditioner.state_dict() returned")
    missing = [name for name in _FIELDS if name not in state]
    require(not missing, "state", sorted(state), f"complete: {', '.join(missing)} missing")
    known = _is_whole(state["format"]) and state["format"] == FORMAT
    require(known, "state['format']", state["format"], f"{FORMAT}, the format of this version")
    for name, least in (("step", 0), ("last_factors", -1), ("last_inverses", -1)):
        fits = _is_whole(state[name]) and state[name] >= least
        require(fits, f"state[{name!r}]", state[name], f"a whole number >= {least}")
    for name, counted in counters.items():
        fits = isinstance(state[name], Mapping) and state[name].keys() == counted.keys()
        fits = fits and all(map(_is_whole, state[name].values()))
        require(fits, f"state[{name!r}]", state[name], f"a whole number for each of {', '.join(counted)}")
    given = state["blocks"]
    known = {member.layer.key for group in groups for member in group.members}
    fits = isinstance(given, Mapping) and all(isinstance(own, Mapping) for own in given.values())
    require(fits, "state['blocks']", type(given).__name__, "a dict of dicts of tensors")
    wanted = _shapes(groups, given)
    for verb, names in (("is missing", set(wanted) - set(given)), ("is unknown to the model", set(given) - known)):
        require(not names, "state['blocks']", sorted(names)[:5], f"those of the model: each of these {verb}")
    for key, shapes in wanted.items():
        for name, shape in shapes.items():
            tensor = given[key].get(name)
            found = tuple(tensor.shape) if isinstance(tensor, Tensor) else tensor
            require(found == shape, f"state['blocks'][{key!r}][{name!r}]", found, f"a tensor of shape {shape}")
    return state


def completed(
    state: Mapping[str, Any], groups: list[BlockGroup], runtime: Communicator | None
) -> tuple[Mapping[str, Any], list[str]]:
    """Add blocks that a state lacks, as zeros, so that they start anew.

    Where only the results of tasks are missing, as for other ranks' layers under "mem-opt", the running averages stay
    as they were saved. All ranks start the same blocks anew (collective), unless `runtime` is None: then every rank's
    state lacks the same.

    Returns:
        The state, and the keys of the blocks that start anew on any rank.
    """
    state = _unpacked(state)
    given = state.get("blocks") if isinstance(state, Mapping) else None
    fits = isinstance(given, Mapping) and all(isinstance(own, Mapping) for own in given.values())
    blocks: dict[str, dict[str, Any]] = {key: dict(own) for key, own in given.items()} if fits and given else {}
    wanted = _shapes(groups, blocks) if fits else {}
    missing = {key for key, shapes in wanted.items() if not shapes.keys() <= blocks.get(key, {}).keys()}
    averages = {member.layer.key: _averages(group) for group in groups for member in group.members}
    whole = {key for key, names in averages.items() if names is not None and names <= blocks.get(key, {}).keys()}
    if runtime is not None:
        found = runtime.all_gather_objects((missing, whole))
        missing, whole = set().union(*(own for own, _ in found)), whole.intersection(*(own for _, own in found))
    if not missing:
        return state, []
    for key in missing & averages.keys():
        before, kept = blocks.pop(key, {}), (averages[key] or set()) | {"early weight"}
        shapes = _shapes(groups, blocks).get(key)
        if shapes is not None:
            blocks[key] = {name: torch.zeros(shape, device="cpu") for name, shape in shapes.items()}
            blocks[key] |= {name: before[name] for name in kept & before.keys() if key in whole}
    return {**state, "blocks": blocks}, sorted(missing)


def _averages(group: BlockGroup) -> set[str] | None:
    """Return the names of a layer's running averages on this rank; None: they cannot be used without the rest."""
    if group.memory_specs or group.restarting or group.gathered:
        return None
    return {"weight", *(spec.name for spec in group.statistics)} if group.role.keeps_averages else set()


def restore(given: Mapping[str, Mapping[str, Tensor]], groups: list[BlockGroup]) -> None:
    """Copy checked blocks into the block groups; blocks that are not given stay as they are."""
    for group in groups:
        loaded = [given[member.layer.key] for member in group.members if given.get(member.layer.key)]
        if not loaded:
            continue
        if group.role.is_gradient_worker:
            most = max(map(group.rows_of, loaded))
            group.resize(most if len(loaded) == len(group.members) else max(most, group.rows))
        stores = _stores(group)
        for member in group.members:
            own = given.get(member.layer.key, {})
            if not own:
                continue
            for tensors in stores:
                for name in tensors:
                    tensors.write_whole(name, member.blocks, group.padded(name, own[name].to(group.device)))
            if group.weight is not None and group.role.keeps_averages:
                group.weight[member.blocks] = own["weight"].to(group.weight)
                if group.input_weight is not None:  # with one interval for both, both have the same
                    group.input_weight[member.blocks] = own.get("early weight", own["weight"]).to(group.weight)
            if group.role.is_gradient_worker:
                for task, success in zip(group.tasks, own["renewed"].bool().T.tolist(), strict=True):
                    group.renewed(task.name, member.start, success, forget=True)
                group.failures.load(member.start, own, group.work_dtype, group.device)
            if group.decisions is not None:
                group.decisions.restore(member, own)


def fitting(given: Blocks, groups: list[BlockGroup]) -> Blocks:
    """Return the blocks of `given` whose shapes still fit."""
    wanted = _shapes(groups, given)
    return {
        key: own
        for key, own in given.items()
        if key in wanted and {name: tuple(own[name].shape) for name in wanted[key] if name in own} == wanted[key]
    }


def _unpacked(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state without the tuples of `snapshot`; anything that is not a state is returned unchanged."""
    if not (isinstance(state, Mapping) and isinstance(state.get("blocks"), Mapping)):
        return state
    found = {
        key: {name: value[0] if isinstance(value, tuple) and len(value) == 1 else value for name, value in own.items()}
        for key, own in state["blocks"].items()
        if isinstance(own, Mapping)
    }
    return {**state, "blocks": {**state["blocks"], **found}}


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shapes(
    groups: list[BlockGroup], given: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the shapes of the tensors that a layer's blocks need, where these are `given`."""
    wanted = {}
    for group in groups:
        for member in group.members:
            n = member.stop - member.start
            shapes: dict[str, tuple[int, ...]] = {}
            if group.role.keeps_averages:
                shapes |= {"weight": (n,), **{spec.name: (n, *spec.shape) for spec in group.statistics}}
            if group.role.is_gradient_worker:
                written = (*group.written(group.rows_of(given.get(member.layer.key, {}))), *group.memory_specs)
                shapes |= {"renewed": (n, len(group.tasks)), **group.failures.shapes(n)}
                shapes |= {spec.name: (n, *spec.shape) for spec in written}
            if group.decisions is not None:  # layers for which any of these is missing start anew
                remembered = group.decisions.shapes(member)
                shapes |= remembered if given.get(member.layer.key, {}).keys() >= remembered.keys() else {}
            if shapes:
                wanted[member.layer.key] = shapes
    return wanted
