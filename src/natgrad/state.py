"""The state of curvature, keyed by the qualified name of the parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from natgrad.blocks import Member, Stack
from natgrad.errors import require

FORMAT = 1

Blocks = dict[str, dict[str, Tensor]]

_FIELDS = ("format", "step", "last_factors", "last_inverses", "updates", "blocks", "watch")


def blocks(stacks: list[Stack]) -> Blocks:
    """Return every block's tensors, all of them even before the first step; views where they are kept as they are."""
    result: Blocks = {}
    for stack in stacks:
        weight, held = stack.allocate_averages(), stack.allocate_held()
        for member in stack.members:
            own = {name: kept.whole(name, member.blocks) for kept in (stack.averages, held) for name in kept}
            own["weight"] = weight[member.blocks]
            good = [[stack.good[part.name][block] for part in stack.parts] for block in _range(member)]
            own["renewed"] = torch.tensor(good, device="cpu")
            result[member.layer.key] = own
    return result


def snapshot(given: Blocks) -> Blocks:
    """Copy blocks to the host, where neither training nor a load that breaks off can reach them."""
    return {key: {name: tensor.cpu().clone() for name, tensor in own.items()} for key, own in given.items()}


def check(state: Mapping[str, Any], stacks: list[Stack], counters: Mapping[str, Mapping[str, int]]) -> None:
    """Check that `state` is complete and fits the model.

    Args:
        state: What is to be loaded.
        stacks: All stacks.
        counters: For each field that holds counters, such as it is now.

    Raises:
        ValueError: naming what is missing, unknown or of another shape.
    """
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
    given, wanted = state["blocks"], _shapes(stacks)
    fits = isinstance(given, Mapping) and all(isinstance(own, Mapping) for own in given.values())
    require(fits, "state['blocks']", type(given).__name__, "a dict of dicts of tensors")
    for verb, names in (
        ("is missing", set(wanted) - set(given)),
        ("is unknown to the model", set(given) - set(wanted)),
    ):
        require(not names, "state['blocks']", sorted(names)[:5], f"those of the model: each of these {verb}")
    for key, shapes in wanted.items():
        for name, shape in shapes.items():
            tensor = given[key].get(name)
            found = tuple(tensor.shape) if isinstance(tensor, Tensor) else tensor
            require(found == shape, f"state['blocks'][{key!r}][{name!r}]", found, f"a tensor of shape {shape}")


def restore(given: Mapping[str, Mapping[str, Tensor]], stacks: list[Stack]) -> None:
    """Copy checked blocks into the stacks; blocks that are not given stay as they are."""
    for stack in stacks:
        present = [member for member in stack.members if member.layer.key in given]
        if not present:
            continue
        weight = stack.allocate_averages()
        for member in present:
            own = given[member.layer.key]
            weight[member.blocks] = own["weight"].to(weight)
            for kept in (stack.averages, stack.allocate_held()):
                for name in kept:
                    kept.write_whole(name, member.blocks, own[name].to(weight.device))
            flags = own["renewed"].tolist()
            for column, part in enumerate(stack.parts):
                stack.renewed(part.name, member.start, [bool(row[column]) for row in flags], forget=True)


def fitting(given: Blocks, stacks: list[Stack]) -> Blocks:
    """Return those blocks of `given` whose shapes are still right."""
    wanted = _shapes(stacks)
    return {
        key: own
        for key, own in given.items()
        if key in wanted and {name: tuple(tensor.shape) for name, tensor in own.items()} == wanted[key]
    }


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shapes(stacks: list[Stack]) -> dict[str, dict[str, tuple[int, ...]]]:
    wanted = {}
    for stack in stacks:
        specs = [*stack.statistics, *(spec for part in stack.parts for spec in part.writes)]
        for member in stack.members:
            n = member.stop - member.start
            shapes = {spec.name: (n, *spec.shape) for spec in specs}
            wanted[member.layer.key] = {**shapes, "weight": (n,), "renewed": (n, len(stack.parts))}
    return wanted


def _range(member: Member) -> range:
    return range(member.start, member.stop)
