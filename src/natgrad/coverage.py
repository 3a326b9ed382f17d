"""Which parameter has which curvature, and why the others have none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.parameter import is_lazy

from natgrad.curvature import Curvature
from natgrad.layers import Layer, is_known, is_trained, layers_for, qualified

_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module"}


@dataclass(frozen=True)
class Left:
    """A parameter that natgrad leaves to the optimizer, and why."""

    parameter: str
    shape: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class Place:
    """Where a module stands in the model.

    Attributes:
        name: Its qualified name, without the prefixes that wrappers add.
        module: The module.
        parent: The module that holds it; None for the model itself.
        leaf: Its name there.
    """

    name: str
    module: nn.Module
    parent: nn.Module | None
    leaf: str

    def signature(self) -> tuple[object, ...]:
        """Return what tells whether the module was replaced, and which of its parameters are trained."""
        present = self.parent is None or self.parent._modules.get(self.leaf) is self.module
        return (present, *(is_trained(self.module, leaf) for leaf in self.module._parameters))


@dataclass(frozen=True)
class Coverage:
    """What is preconditioned and what is not.

    Attributes:
        layers: The covered layers, in the order of the model.
        left: Every other parameter.
        watched: The modules that, once replaced, frozen or thawed, would change the coverage.
        order: The rank of each parameter in the order of the model, by name.
    """

    layers: list[tuple[Layer, Curvature]]
    left: list[Left]
    watched: list[Place]
    order: dict[str, int]

    def signature(self) -> list[tuple[object, ...]]:
        """Return what the coverage depends on, as it is now."""
        return [place.signature() for place in self.watched]


def places(model: nn.Module) -> Iterator[Place]:
    """Yield every module of `model` once."""
    modules: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        modules[path] = module
        above, _, leaf = path.rpartition(".")
        name = ".".join(piece for piece in path.split(".") if piece not in _WRAPPERS)
        yield Place(name, module, modules[above] if path else None, leaf)


def cover(model: nn.Module, curvature: Curvature | Mapping[str, Curvature | None]) -> Coverage:
    """Give each layer of `model` its curvature.

    Args:
        model: The model, unwrapped.
        curvature: One for all layers, or one for each fnmatch pattern of module names: the first match wins, None and
            no match leave the layer to the optimizer.

    Returns:
        The covered layers, and every other parameter with the reason why it is left out.
    """
    found = [_find(place, curvature) for place in places(model) if list(_own(place.module))]
    covered = _tie(found)
    taken = {id(slot.parameter) for layer, _ in covered for slot in layer.slots}
    left = []
    for one in found:
        for leaf, parameter in one.place.module._parameters.items():
            if parameter is None or id(parameter) in taken:
                continue
            taken.add(id(parameter))
            reason = one.reason or "no layer type covers this parameter"
            shape = () if is_lazy(parameter) else tuple(parameter.shape)
            left.append(Left(qualified(one.place.name, leaf), shape, reason if parameter.requires_grad else "frozen"))
    names = [qualified(one.place.name, leaf) for one in found for leaf in one.place.module._parameters]
    return Coverage(
        covered, left, [one.place for one in found if one.known], {name: rank for rank, name in enumerate(names)}
    )


@dataclass
class _Found:
    """A module with parameters: its layers with their curvatures, or the reason why there are none."""

    place: Place
    layers: list[tuple[Layer, Curvature]]
    reason: str
    known: bool


def _find(place: Place, curvature: Curvature | Mapping[str, Curvature | None]) -> _Found:
    choice, reason = _choose(place.name, curvature)
    if choice is None:
        return _Found(place, [], reason, known=False)
    known = is_known(place.module)
    made = layers_for(place.name, place.module, place.parent)
    if isinstance(made, str):
        return _Found(place, [], made, known)
    fitted = []
    for layer in made:
        own = choice.fit(layer)
        if isinstance(own, str):
            reason = own
        else:
            fitted.append((layer, own))
    return _Found(place, fitted, reason, known)


def _tie(found: list[_Found]) -> list[tuple[Layer, Curvature]]:
    """Return one layer for each set of tied ones; those that cannot be tied are dropped, with the reason."""
    users: dict[int, int] = {}
    for one in found:
        for parameter in _own(one.place.module):
            users[id(parameter)] = users.get(id(parameter), 0) + 1
    groups: dict[object, list[tuple[_Found, Layer, Curvature]]] = {}
    for one in found:
        for layer, curvature in one.layers:
            groups.setdefault(layer.identity(), []).append((one, layer, curvature))
    covered = []
    for group in groups.values():
        _, first, curvature = group[0]
        complete = all(users[id(slot.parameter)] == len(group) for slot in first.slots)
        if complete and all((type(other), chosen) == (type(first), curvature) for _, other, chosen in group):
            first.others = [other for _, other, _ in group[1:]]
            covered.append((first, curvature))
        else:
            for one, _, _ in group:
                one.reason = "shared by several modules that differ in kind, in curvature or in their other parameters"
    return covered


def _own(module: nn.Module) -> Iterator[nn.Parameter]:
    return (parameter for parameter in module._parameters.values() if parameter is not None)


def idle_patterns(model: nn.Module, curvature: Curvature | Mapping[str, Curvature | None]) -> list[str]:
    """Return the patterns that decide for no module with parameters: misspelt, or behind one that matches as much."""
    if isinstance(curvature, Curvature):
        return []
    names = [place.name for place in places(model) if place.module._parameters]
    deciding = {next((pattern for pattern in curvature if fnmatchcase(name, pattern)), None) for name in names}
    return [pattern for pattern in curvature if pattern not in deciding]


def _choose(name: str, curvature: Curvature | Mapping[str, Curvature | None]) -> tuple[Curvature | None, str]:
    if isinstance(curvature, Curvature):
        return curvature, ""
    for pattern, choice in curvature.items():
        if fnmatchcase(name, pattern):
            return choice, f"excluded by the pattern {pattern!r}"
    return None, "no pattern matches its module"
