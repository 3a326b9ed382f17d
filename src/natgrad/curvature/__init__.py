"""Approximations of a layer's Fisher block, one file per method, and their names. Nothing here communicates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from natgrad.curvature.base import Curvature
from natgrad.curvature.ekfac import EKFAC
from natgrad.curvature.kfac import KFAC
from natgrad.curvature.rank_one import RankOne
from natgrad.curvature.rows import SNGD, HyLo
from natgrad.curvature.spectral import Spectral
from natgrad.curvature.unitwise import UnitWise
from natgrad.errors import did_you_mean, require
from natgrad.layers import is_key, show_key

__all__ = ["EKFAC", "KFAC", "SNGD", "Curvature", "HyLo", "RankOne", "Spectral", "UnitWise"]

# Those that support linear layers and convolutions and have defaults for everything, by their names.
BY_NAME: dict[str, Callable[..., Curvature]] = {
    "kfac": KFAC,
    "ekfac": EKFAC,
    "sngd": SNGD,
    "hylo": HyLo,
    "rank-one": RankOne,
}

# Keys: fnmatch patterns of module names (str), and classes of modules. (A union as key type would refuse dicts of str.)
Curvatures: TypeAlias = Mapping[Any, Curvature | None]

_ALLOWED = f"a Curvature such as natgrad.KFAC(), one of the names {', '.join(BY_NAME)}, or None"


def resolve_curvature(curvature: object) -> Curvature | Curvatures:
    """Return the argument `curvature` of `natgrad.Preconditioner` with names resolved; None becomes ``KFAC()``.

    Raises:
        ValueError: if it, or a value of the mapping, is not allowed.
    """
    if not isinstance(curvature, Mapping):
        return _resolve("curvature", curvature, f"{_ALLOWED}, or a mapping of patterns and classes to these") or KFAC()
    for key in curvature:
        allowed = "a mapping whose keys are fnmatch patterns (str) or classes of modules"
        require(is_key(key), "curvature", key, allowed)
    return {key: _resolve(f"curvature[{show_key(key)}]", own, _ALLOWED) for key, own in curvature.items()}


def _resolve(name: str, curvature: object, allowed: str) -> Curvature | None:
    if isinstance(curvature, str) and curvature in BY_NAME:
        return BY_NAME[curvature]()
    is_optimizer = isinstance(curvature, str) and curvature == "kbfgs"
    require(not is_optimizer, name, curvature, "a curvature: K-BFGS is an optimizer, natgrad.KBFGS(model, lr=...)")
    fits = curvature is None or isinstance(curvature, Curvature)
    require(fits, name, curvature, allowed, did_you_mean(curvature, BY_NAME))
    assert curvature is None or isinstance(curvature, Curvature)
    return curvature
