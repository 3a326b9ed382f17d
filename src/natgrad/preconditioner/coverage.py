"""Assign curvatures to parameters, with the reason for each parameter that has none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod

from torch import nn
from torch.nn.parameter import is_lazy

from natgrad.curvature import Curvature, Curvatures
from natgrad.curvature.unitwise import for_norms
from natgrad.errors import warn
from natgrad.layers import Layer, Slot, is_known, is_trained, layers_for, matches, qualified, reason_for, show_key
from natgrad.layers.embedding import EmbeddingLayer

_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module"}
# The share of the elements of weight matrices below which there is a warning, and how many parameters it names.
_ENOUGH, _NAMED = 0.95, 3


@dataclass(frozen=True)
class Left:
    """A parameter that is left to the optimizer.

    Attributes:
        parameter: Its qualified name.
        shape: Its shape.
        reason: Why it is left.
        is_intended: Whether the user or the curvature decided so: by a pattern, by freezing, or because the curvature
            is for other layers.
    """

    parameter: str
    shape: tuple[int, ...]
    reason: str
    is_intended: bool = False


@dataclass(frozen=True)
class Place:
    """A module, its qualified name without the prefixes of wrappers, and its parent (None: it is the model)."""

    name: str
    module: nn.Module
    parent: nn.Module | None


@dataclass(frozen=True)
class Coverage:
    """The preconditioned layers and the other parameters.

    Attributes:
        layers: The covered layers, in the order of the model.
        left: Every other parameter.
        watched: The modules whose changes may change the coverage.
        order: The position of each parameter, or part of one, in the model, by name.
    """

    layers: list[tuple[Layer, Curvature]]
    left: list[Left]
    watched: list[Place]
    order: dict[str, tuple[int, int]]

    def signature(self, *, trained: bool = True) -> list[object]:
        """Return a value that changes if the coverage may have: with modules, shapes, ties, and what is `trained`."""
        shared: dict[int, int] = {}  # tied weights
        found: list[object] = []
        for place in self.watched:
            found += place.module._modules.values()
            for parameter in place.module._parameters.values():
                if parameter is None or is_lazy(parameter):
                    found.append(None)
                else:
                    found += shared.setdefault(id(parameter), len(shared)), parameter.shape
                    found.append(trained and parameter.requires_grad)
        return found


def places(model: nn.Module) -> Iterator[Place]:
    """Yield every module of `model` once."""
    modules: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        modules[path] = module
        above = path.rpartition(".")[0]
        name = ".".join(piece for piece in path.split(".") if piece not in _WRAPPERS)
        yield Place(name, module, modules[above] if path else None)


@contextmanager
def unfrozen(model: nn.Module) -> Iterator[None]:
    """Have frozen parameters require gradients meanwhile, to find what would be covered if they were trained."""
    parameters = [p for p in model.parameters() if p.is_floating_point() and not is_lazy(p) and not p.is_inference()]
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def cover(model: nn.Module, curvature: Curvature | Curvatures) -> Coverage:
    """Assign a curvature to each layer of an unwrapped model, and give a reason for every other parameter."""
    modules = list(places(model))
    found = [_find(place, curvature) for place in modules if list(_parameters_of(place.module))]
    covered = _cover(found)
    names = [qualified(entry.place.name, leaf) for entry in found for leaf in entry.place.module._parameters]
    order = {name: (rank, 0) for rank, name in enumerate(names)}
    slots = [slot for entry in found for layer in entry.layers for slot in layer.slots]
    for slot in slots:
        if slot.rows is not None:
            order[slot.label] = order[slot.name][0], slot.rows.start or 0
    used = {id(slot.parameter) for layer, _ in covered for slot in layer.slots}
    rest = _uncovered_rows(slot for slot in slots if id(slot.parameter) in used)
    order |= {left.parameter: (order[name][0], start) for name, start, left in rest}
    known = {id(entry.place) for entry in found if entry.known}
    watched = [place for place in modules if place.module._modules or id(place) in known]
    return Coverage(covered, [*_left_out(found, covered), *(left for _, _, left in rest)], watched, order)


def _left_out(found: list[_Found], covered: list[tuple[Layer, Curvature]]) -> list[Left]:
    """Return the parameters without curvature, and the parts of parameters of which other parts have curvature."""
    slots = {slot.identity for layer, _ in covered for slot in layer.slots}
    taken = {parameter for parameter, _ in slots}
    left = [
        Left(slot.label, slot.shape, entry.reason)
        for entry in found
        for slot in (slot for layer in entry.layers for slot in layer.slots)
        if slot.rows is not None and id(slot.parameter) in taken and slot.identity not in slots
    ]
    for entry in found:
        module, choice = entry.place.module, entry.choice
        for leaf, parameter in module._parameters.items():
            if parameter is None or id(parameter) in taken:
                continue
            taken.add(id(parameter))
            reason = (reason_for(module, leaf) if entry.layers else "") or entry.reason
            if not reason and entry.layers and choice is not None and not choice.covers_bias:
                reason = f"{type(choice).__name__} moves no biases"
            if not parameter.requires_grad:
                reason = "frozen"
            shape = () if is_lazy(parameter) else tuple(parameter.shape)
            label = qualified(entry.place.name, leaf)
            intended = entry.is_intended or not parameter.requires_grad
            left.append(Left(label, shape, reason or "no layer type covers this parameter", intended))
    return left


def _uncovered_rows(slots: Iterable[Slot]) -> list[tuple[str, int, Left]]:
    """Return the rows of parameters that no layer has, though layers have others, with the name and the first row."""
    parts: dict[int, list[Slot]] = {}
    for slot in slots:
        parts.setdefault(id(slot.parameter), []).append(slot)
    rest = []
    for same in parts.values():
        first, total = same[0], len(same[0].parameter)
        taken = sorted((0, total, 1) if slot.rows is None else slot.rows.indices(total) for slot in same)
        ends = [0, *accumulate((stop for _, stop, _ in taken), max)]
        for start, stop in zip(ends, [*(start for start, _, _ in taken), total], strict=True):
            if start < stop:
                label, shape = f"{first.name}[{start}:{stop}]", (stop - start, *first.parameter.shape[1:])
                rest.append((first.name, start, Left(label, shape, "its layer covers other rows alone")))
    return rest


@dataclass
class _Found:
    """A module with parameters: its layers and the curvature chosen for them, or the reason why there are none.

    `is_intended`: whether it has none because of a pattern, or because the curvature is for other layers.
    """

    place: Place
    layers: Sequence[Layer]
    choice: Curvature | None
    reason: str
    known: bool
    is_intended: bool = False


def _find(place: Place, curvature: Curvature | Curvatures) -> _Found:
    choice, reason = _choose(place, curvature)
    if choice is None:
        return _Found(place, [], None, reason, known=False, is_intended=True)
    made = layers_for(place.name, place.module, place.parent)
    layers, reason = ([], made) if isinstance(made, str) else (made, "")
    if not choice.covers_bias:
        if any(not layer.weight for layer in layers):
            layers, reason = [], f"{type(choice).__name__} moves no biases, and its weight is frozen"
        for layer in layers:
            if layer.bias and layer.form == "matrix":
                layer.leave_bias()
    return _Found(place, layers, choice, reason, is_known(place.module), is_intended=_is_other_table(place, choice))


def _is_other_table(place: Place, choice: Curvature) -> bool:
    """Return whether a module is a trained embedding and the curvature is not for embeddings."""
    if not isinstance(place.module, (nn.Embedding, nn.EmbeddingBag)) or not is_trained(place.module, "weight"):
        return False
    return isinstance(choice.variant_for(EmbeddingLayer(place.name, place.module)), str)


def _claims(found: list[_Found]) -> list[list[tuple[_Found, Layer]]]:
    """Return the layers of all modules in the order of the model, grouped if they share a parameter."""
    groups: dict[tuple[int, str], list[tuple[_Found, Layer]]] = {}
    for entry in found:
        for layer in entry.layers:
            identities = [slot.identity for slot in layer.slots]
            known = {id(groups[identity]): groups[identity] for identity in identities if identity in groups}
            group = [claim for other in known.values() for claim in other] + [(entry, layer)]
            for _, member in group:
                groups.update({slot.identity: group for slot in member.slots})
    return list({id(group): group for group in groups.values()}.values())


def _join(
    claims: list[tuple[_Found, Layer]], users: Mapping[int, dict[str, str]], norms: dict[int, Curvature]
) -> tuple[Layer, Curvature] | str:
    """Return one layer with its curvature for layers that share parameters, or why that is impossible.

    Args:
        claims: The layers and their modules.
        users: By the ``id`` of a parameter, its qualified name in each module that has it, by the module's name.
        norms: By the ``id`` of a curvature, that of the norm layers beside it; extended here.
    """
    layers = [layer for _, layer in claims]
    names = _listed(entry.place.name for entry, _ in claims)
    primary = next((layer for layer in layers if all(other is layer or layer.ties(other) for other in layers)), None)
    if primary is None:
        return f"shared by {names}, which differ in kind or in their other parameters"
    for slot in primary.slots:
        beyond = users[id(slot.parameter)].keys() - {entry.place.name for entry, _ in claims}
        if slot.leaf == primary.bias_name:
            beyond -= {name for name in beyond if any(_contains(name, entry.place.name) for entry, _ in claims)}
        if beyond:
            return tied_to(sorted(beyond))
    choice, *others = {id(entry.choice): entry.choice for entry, _ in claims}.values()
    assert choice is not None
    if others:
        return f"shared by {names}, whose curvatures differ"
    primary.slots = [replace(slot, name=next(iter(users[id(slot.parameter)].values()))) for slot in primary.slots]
    primary.adopt([layer for layer in layers if layer is not primary])
    fitted = choice.variant_for(primary)
    if fitted is None:
        fitted = norms.setdefault(id(choice), for_norms(choice))
    if isinstance(fitted, str):
        for entry, _ in claims:
            entry.is_intended = True
        return fitted
    return primary, fitted


def _cover(found: list[_Found]) -> list[tuple[Layer, Curvature]]:
    """Return one layer with its curvature for each group of tied ones. The other modules get a reason."""
    users: dict[int, dict[str, str]] = {}
    for entry in found:
        for leaf, parameter in entry.place.module._parameters.items():
            if parameter is not None:
                users.setdefault(id(parameter), {}).setdefault(entry.place.name, qualified(entry.place.name, leaf))
    covered, norms = [], dict[int, Curvature]()
    for claims in _claims(found):
        joined = _join(claims, users, norms)
        if isinstance(joined, str):
            for entry, _ in claims:
                entry.reason = joined
        else:
            covered.append(joined)
    return covered


def _contains(name: str, inner: str) -> bool:
    """Return whether a module contains another, and so may keep its bias under a name of its own, as BERT's head."""
    return inner != name and inner.startswith(qualified(name, ""))


def _listed(names: Iterable[str]) -> str:
    return " and ".join(name or "the model" for name in names)


def _parameters_of(module: nn.Module) -> Iterator[nn.Parameter]:
    return (parameter for parameter in module._parameters.values() if parameter is not None)


def warn_of_idle(model: nn.Module, curvature: Curvature | Curvatures, coverage: Coverage) -> None:
    """Warn of patterns that apply to no module, and of models without covered layers."""
    idle = _idle_patterns(model, curvature)
    if idle or not coverage.layers:
        frozen = any("frozen" in left.reason for left in coverage.left)
        uncovered = "no layer of the model is covered" + (" while its weights are frozen" if frozen else "")
        what = f"the patterns {idle} decide for no module" if idle else uncovered
        warn(f"natgrad: {what}; see explain()", "coverage")


def warn_of_uncovered(coverage: Coverage) -> None:
    """Warn if few elements of weight matrices are covered, apart from those that are left out on purpose."""
    slots = {slot.identity: slot for layer, _ in coverage.layers for slot in layer.slots}
    covered = sum(prod(slot.shape) for slot in slots.values() if _is_matrix(slot.shape))
    # A module around others has positions or tokens of its own rather than weights.
    outer = {above for name in coverage.order for above in _ancestors(name.rpartition(".")[0])}
    left = [one for one in coverage.left if _is_matrix(one.shape) and not one.is_intended]
    left = [one for one in left if one.parameter.rpartition(".")[0] not in outer]
    left.sort(key=lambda one: prod(one.shape), reverse=True)
    share = covered / max(1, covered + sum(prod(one.shape) for one in left))
    if not (coverage.layers and left) or share >= _ENOUGH:
        return
    named: dict[str, list[str]] = {}
    for one in left[:_NAMED]:
        named.setdefault(one.reason, []).append(one.parameter)
    largest = ", ".join(f"{', '.join(parameters)} ({reason})" for reason, parameters in named.items())
    warn(
        f"natgrad has curvature for {share:.0%} of the elements of weight matrices. The optimizer moves the others "
        f"without it, the largest of which are {largest}. See explain(). If that is intended, say so by a pattern with "
        "None, or in adamw= of NaturalMuon",
        "coverage",
    )


def _ancestors(name: str) -> Iterator[str]:
    """Yield the names of the modules around a module."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _is_matrix(shape: tuple[int, ...]) -> bool:
    """Return whether two or more dimensions are longer than 1."""
    return sum(size > 1 for size in shape) > 1


def warn_of_lost(before: Iterable[str], coverage: Coverage) -> None:
    """Warn of layers that were covered `before` and now are left to the optimizer, except frozen ones."""
    covered = {layer.name for layer, _ in coverage.layers}
    reasons = {left.parameter.rpartition(".")[0]: left.reason for left in coverage.left if "frozen" not in left.reason}
    lost = [name for name in before if name not in covered and name in reasons]
    if lost:
        warn(
            f"natgrad: the model has changed, and the optimizer moves {_listed(lost)} without curvature from now on: "
            f"{'; '.join(dict.fromkeys(reasons[name] for name in lost))}",
            "changed-model",
        )


def _idle_patterns(model: nn.Module, curvature: Curvature | Curvatures) -> list[str]:
    """Return the keys that apply to no module with parameters. A class of which there are no modules is no mistake."""
    if isinstance(curvature, Curvature):
        return []
    found = [place for place in places(model) if place.module._parameters]
    deciding = {next((key for key in curvature if matches(key, place.name, place.module)), None) for place in found}
    idle = [key for key in curvature if key not in deciding]
    return [
        key if isinstance(key, str) else show_key(key)
        for key in idle
        if isinstance(key, str) or any(isinstance(module, key) for module in model.modules())
    ]


def tied_to(names: Iterable[str]) -> str:
    """Return the reason of modules that share their weight with others, which have no curvature."""
    return f"tied to {_listed(names)}, which is left out"


def excluded_by(key: str | type[nn.Module]) -> str:
    """Return the reason of modules to which a pattern or class gives no curvature."""
    return f"excluded by the {'pattern' if isinstance(key, str) else 'class'} {show_key(key)}"


def _choose(place: Place, curvature: Curvature | Curvatures) -> tuple[Curvature | None, str]:
    if isinstance(curvature, Curvature):
        return curvature, ""
    for key, choice in curvature.items():
        if matches(key, place.name, place.module):
            return choice, excluded_by(key)
    return None, "no pattern or class matches its module"
