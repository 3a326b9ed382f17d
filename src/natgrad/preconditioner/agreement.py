"""Check that all ranks have the same model and settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from zlib import crc32

import torch
from torch import nn

from natgrad.capture.counts import Reductions
from natgrad.curvature import Curvature
from natgrad.distributed import Communicator
from natgrad.distributed.ddp import find_replica
from natgrad.distributed.fsdp import is_sharded
from natgrad.errors import NatgradError
from natgrad.preconditioner.structure import Structure

# By which the weights of ranks may differ when training begins: those of different hardware round differently.
_TOLERANCE = 0.1


def check_reduction(model: nn.Module, runtime: Communicator, gradients: str) -> None:
    """Check that `gradients` is equal on all ranks. Collective under ``DistributedDataParallel``.

    A rank whose wrapper averages would wait in the first backward pass for ranks whose wrapper does not.

    Raises:
        NatgradError: on all ranks, if it differs.
    """
    if find_replica(model) is not None:
        _check_equal([{"gradients": choice} for choice in runtime.all_gather_objects(gradients)])


def check_agreement(
    runtime: Communicator,
    structure: Structure,
    reductions: Reductions,
    settings: Mapping[str, str],
    *,
    compares_weights: bool,
) -> None:
    """Check that all ranks have equal settings; collective. A rank without samples takes the choice of "auto".

    `compares_weights`: also check that the first element of each covered parameter is about equal.

    Raises:
        NatgradError: on all ranks, if their models, weights, options or progress differ.
    """
    if runtime.ranks == 1:
        return
    nearest = runtime.all_gather_objects(reductions.nearest)
    if reductions.is_undecided:
        reductions.nearest = next((each for each in nearest if each is not None), None)
    own = {**_settings(structure), "reduction": reductions.describe(), **settings}
    replicated = [slot.parameter for slot in structure.slots if not is_sharded(slot.parameter)]
    weights = [p[(0,) * p.ndim].item() for p in replicated if p.numel()] if compares_weights else []
    found = runtime.all_gather_objects((structure.digest(), own, weights))
    if any(plan != found[0][0] for plan, *_ in found):
        raise NatgradError(
            "the ranks have made different plans: their models or curvatures differ, or the options of "
            'natgrad.Placement (costs, speeds and memory have to be the same on every rank; set memory under "auto" '
            "where the ranks have devices of different memory)",
            "different-ranks",
        )
    _check_equal([described for _, described, _ in found])
    every = torch.tensor([first for *_, first in found], dtype=torch.float64, device="cpu")
    if not torch.allclose(every, every[0], rtol=_TOLERANCE, atol=0, equal_nan=True):
        raise NatgradError(
            "the ranks begin with different weights: give them the same before the first step, as by one seed, a "
            "checkpoint or DistributedDataParallel",
            "different-ranks",
        )


def _check_equal(settings: Sequence[Mapping[str, str]]) -> None:
    """Raise a `NatgradError` if the settings of the ranks differ, with their values."""
    known = dict.fromkeys(name for one in settings for name in one)  # ranks may have different curvatures
    names = [name for name in known if len({one.get(name) for one in settings}) > 1]
    if names:
        first, other = next((settings[0], one) for one in settings if one != settings[0])
        differing = [name for name in names if first.get(name) != other.get(name)]
        values = "; ".join(f"{name}: {first.get(name, 'none')} and {other.get(name, 'none')}" for name in differing)
        raise NatgradError(
            f"the ranks differ in {', '.join(names)} ({values}): build the Preconditioner with the same arguments on "
            f"every rank, and load a state on every rank or on none",
            "different-ranks",
        )


def _settings(structure: Structure) -> dict[str, str]:
    """Return descriptions of the curvatures and dtypes."""
    groups, options = structure.groups, dict[str, set[str]]()
    made = [(group.curvature, group.statistics, group.tasks) for group in groups]
    kinds = [(type(c), type(c.likelihood), c.factor_decay, *tensors) for c, *tensors in made]
    for name, value in (option for curvature, *_ in made for option in _options_of(curvature)):
        options.setdefault(name, set()).add(value)
    return {
        "curvature": f"{crc32(repr(kinds).encode()):08x}",
        "dtypes": str([str(group.dtype) for group in groups]),
        "precision": str(structure.precision),
        **{name: " or ".join(sorted(values)) for name, values in options.items()},
    }


def _options_of(curvature: Curvature) -> Iterator[tuple[str, str]]:
    """Yield the options of a curvature and of those that it wraps, with their values."""
    for name, value in vars(curvature).items():
        if isinstance(value, Curvature):
            yield from _options_of(value)
        elif value is None or isinstance(value, (bool, int, float, str, torch.dtype)) or is_dataclass(value):
            yield f"{type(curvature).__name__}.{name.lstrip('_')}", repr(value)
