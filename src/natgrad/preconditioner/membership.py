"""Which parameters of a model are in the groups of its optimizer; followed when the model changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from natgrad.distributed.fsdp import named_parameters
from natgrad.errors import warn
from natgrad.layers.norm import NORMS

_UNDECAYED = (nn.Embedding, nn.EmbeddingBag, *NORMS)

# Names that a warning lists.
_LISTED = 5

Group = dict[str, Any]


class Membership:
    """Follows a model whose parameters are replaced, or get others beside them, after the optimizer was built.

    That is what ``load_state_dict(assign=True)``, ``to_empty``, ``resize_token_embeddings``, ``fully_shard``, a new
    module and LoRA do.

    Attributes:
        parameters: The parameters of the model by name, when it was last compared.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Take the present parameters of `model` for those that the user has chosen for the groups, or left out."""
        self._model, self._optimizer = model, optimizer
        self._read(dict(named_parameters(model)))

    def _read(self, parameters: dict[str, nn.Parameter]) -> None:
        """Take these for the present parameters."""
        self.parameters, self._ids = parameters, set(map(id, parameters.values()))
        # Held, so that no later module or parameter has the ``id`` of one that has gone.
        self._seen_modules = list(self._model.modules())
        self._seen_parts = _ids_of_parts(self._seen_modules)

    def follow(self, group_for: Callable[[nn.Parameter], Group | None] | None = None) -> None:
        """Compare the model with its last parameters, and put those that have changed into the groups.

        A parameter replaces the one of its name, and takes over its state if both have the same shape. `group_for`
        returns the group for a parameter of another name; None: there is no single one. Without it only warn.

        Warns:
            NatgradWarning: of trained parameters that are in no group.
        """
        if _ids_of_parts(self._seen_modules) == self._seen_parts:  # a tenth of the time of `parameters()`
            return
        before, now, known = self.parameters, dict(named_parameters(self._model)), self._ids
        self._read(now)
        ids = self._ids
        if ids == known:  # a module without parameters, or FSDP2 had left some unsharded
            return
        sorted_groups = [group for group in self._optimizer.param_groups if _is_sorted(group, before.values())]
        held = {id(parameter) for group in self._optimizer.param_groups for parameter in group["params"]}
        idle = []
        for name, parameter in now.items():
            old = before.get(name)
            if parameter is old or id(parameter) in held:
                continue
            if old is not None and id(old) not in held:
                continue  # it replaces one that the user left out
            if group_for is not None and old is not None and id(old) not in ids:
                self._replace(old, parameter)
            elif parameter.requires_grad:
                group = None if group_for is None else group_for(parameter)
                if group is None:
                    idle.append(name)
                else:
                    _append(group, name, parameter)
        if group_for is not None:
            self._remove([parameter for parameter in before.values() if id(parameter) not in ids])
            places = {id(parameter): place for place, parameter in enumerate(now.values())}
            for group in sorted_groups:  # as in an optimizer that is built now
                if "param_names" not in group:
                    group["params"].sort(key=lambda parameter: places.get(id(parameter), -1))
        _warn_of_idle(idle)

    def _remove(self, parameters: list[nn.Parameter]) -> None:
        """Remove parameters that have left the model, with their state."""
        gone = {id(parameter) for parameter in parameters}
        for group in self._optimizer.param_groups:
            kept = [place for place, parameter in enumerate(group["params"]) if id(parameter) not in gone]
            for name in group.keys() & {"params", "param_names"}:
                group[name] = [group[name][place] for place in kept]
        for parameter in parameters:
            self._optimizer.state.pop(parameter, None)

    def _replace(self, old: nn.Parameter, new: nn.Parameter) -> None:
        """Put `new` in the place of `old` in its group; its state too, if it has the shape of `old`."""
        for group in self._optimizer.param_groups:
            group["params"] = [new if parameter is old else parameter for parameter in group["params"]]
        state = self._optimizer.state.pop(old, None)
        if state is not None and new.shape == old.shape and type(new) is type(old):
            self._optimizer.state[new] = {name: _like(value, old, new) for name, value in state.items()}


def _ids_of_parts(modules: Iterable[nn.Module]) -> list[int]:
    """Return the ids of all parameters and children of some modules."""
    return [
        id(part) for module in modules for parts in (module._parameters, module._modules) for part in parts.values()
    ]


def decayed(model: nn.Module) -> set[int]:
    """Return the ids of the matrices and kernels that are no embeddings, and that the model does not exempt.

    timm's models exempt positions and tokens, by names that their method ``no_weight_decay`` returns.
    """
    others = {id(p) for module in model.modules() if isinstance(module, _UNDECAYED) for p in module.parameters()}
    exempt = getattr(model, "no_weight_decay", None)
    names = set(exempt()) if callable(exempt) else set()
    named = ((name, one) for name, one in model.named_parameters() if not is_lazy(one))
    return {id(one) for name, one in named if one.ndim > 1 and name not in names} - others


def _warn_of_idle(names: list[str]) -> None:
    """Warn of trained parameters that are in no group, if there are any."""
    if names:
        listed = ", ".join(names[:_LISTED]) + (", ..." if len(names) > _LISTED else "")
        warn(
            f"natgrad: {len(names)} trained parameters are in no group of the optimizer, and do not move: {listed}. "
            "They were replaced or added after it was built: build the optimizer after the change, or call "
            'optimizer.add_param_group({"params": [...]}) with them',
            "parameters-in-no-group",
        )


def _append(group: Group, name: str, parameter: nn.Parameter) -> None:
    group["params"].append(parameter)
    if "param_names" in group:
        group["param_names"].append(name)


def _is_sorted(group: Group, model: Iterable[nn.Parameter]) -> bool:
    """Return whether a group holds its parameters in the order of the model."""
    order = {id(parameter): place for place, parameter in enumerate(model)}
    places = [order.get(id(parameter), -1) for parameter in group["params"]]
    return places == sorted(places)


def _like(value: Any, old: Tensor, new: Tensor) -> Any:
    """Return a value of a state for `new` as a load of the state would."""
    if isinstance(value, Tensor) and value.shape == old.shape and value.ndim:
        return value.to(new.device, new.dtype if value.dtype == old.dtype else value.dtype)
    return value.to(new.device) if isinstance(value, Tensor) and value.device != torch.device("cpu") else value
