"""Distributed natural-gradient training for PyTorch, in two lines.

Examples:
    >>> preconditioner = natgrad.Preconditioner(model, natgrad.KFAC(), optimizer=optimizer, damping=3e-3)
    >>> ...
    >>> preconditioner.step()  # between loss.backward() and optimizer.step()
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Modules that need torch are imported at first access (PEP 562), so that `natgrad --help` is fast. A new public name
# needs an entry here and an import below for type checkers.
_HOMES = {
    name: home
    for home, names in {
        "natgrad": "averaging damping recipes refresh testing",
        "natgrad.averaging": "DASO Nodes",
        "natgrad.curvature": "Curvature EKFAC HyLo KFAC RankOne SNGD Spectral UnitWise",
        "natgrad.curvature.likelihood": "Bernoulli Categorical Gaussian Likelihood",
        "natgrad.distributed": "Placement PlacementRule Plan register_placement",
        "natgrad.errors": "AveragingError CurvatureError NatgradError NatgradWarning",
        "natgrad.kbfgs": "KBFGS",
        "natgrad.layers": "DenseRows Layer register_layer Rows",
        "natgrad.linalg.precision": "Precision",
        "natgrad.preconditioner": "Preconditioner",
        "natgrad.preconditioner.create": "create_optimizer",
        "natgrad.preconditioner.guard.guard": "Guard",
        "natgrad.preconditioner.natural_muon": "NaturalMuon",
        "natgrad.preconditioner.optimizer": "PreconditionedOptimizer",
        "natgrad.refresh": "Adaptive DoublingInterval DriftRule GrowingInterval MultiStepInterval Refresh "
        "RefreshRule register_refresh ScaledInterval Sides TraceRule TwoPhaseInterval",
        "natgrad.schedule": "Schedule",
        "natgrad.specs": "Statistic Task TensorSpec",
    }.items()
    for name in names.split()
}

# Names that earlier versions had, and what to use in their place.
_REMOVED: dict[str, str] = {
    "Link": 'placement="auto" chooses by the memory of a rank: natgrad.Placement(memory=...)',
    "BasisRule": "Adaptive(DriftRule()) decomposes the layers whose factors have changed",
    "Capped": "a longer interval: Refresh(inverses=...)",
    "Autopilot": "pass a number or a schedule as damping",
    "LevenbergMarquardt": "pass a number or a schedule as damping",
    "TrustRegion": "pass a number as kl_clip",
    "PostLocalSGD": "torch.distributed.algorithms.model_averaging, beside a Preconditioner: docs/averaging.md",
    "HierarchicalSGD": "torch.distributed.algorithms.model_averaging, beside a Preconditioner: docs/averaging.md",
    "DiLoCo": "torchft has DiLoCo",
    "StreamingDiLoCo": "torchft has Streaming DiLoCo",
    "Classic": "DistributedDataParallel over all ranks",
    "Averager": "natgrad.DASO is the only averager",
}

if TYPE_CHECKING:
    from natgrad import averaging as averaging
    from natgrad import damping as damping
    from natgrad import recipes as recipes
    from natgrad import refresh as refresh
    from natgrad import testing as testing
    from natgrad.averaging import DASO as DASO
    from natgrad.averaging import Nodes as Nodes
    from natgrad.curvature import EKFAC as EKFAC
    from natgrad.curvature import KFAC as KFAC
    from natgrad.curvature import SNGD as SNGD
    from natgrad.curvature import Curvature as Curvature
    from natgrad.curvature import HyLo as HyLo
    from natgrad.curvature import RankOne as RankOne
    from natgrad.curvature import Spectral as Spectral
    from natgrad.curvature import UnitWise as UnitWise
    from natgrad.curvature.likelihood import Bernoulli as Bernoulli
    from natgrad.curvature.likelihood import Categorical as Categorical
    from natgrad.curvature.likelihood import Gaussian as Gaussian
    from natgrad.curvature.likelihood import Likelihood as Likelihood
    from natgrad.distributed import Placement as Placement
    from natgrad.distributed import PlacementRule as PlacementRule
    from natgrad.distributed import Plan as Plan
    from natgrad.distributed import register_placement as register_placement
    from natgrad.errors import AveragingError as AveragingError
    from natgrad.errors import CurvatureError as CurvatureError
    from natgrad.errors import NatgradError as NatgradError
    from natgrad.errors import NatgradWarning as NatgradWarning
    from natgrad.kbfgs import KBFGS as KBFGS
    from natgrad.layers import DenseRows as DenseRows
    from natgrad.layers import Layer as Layer
    from natgrad.layers import Rows as Rows
    from natgrad.layers import register_layer as register_layer
    from natgrad.linalg.precision import Precision as Precision
    from natgrad.preconditioner import Preconditioner as Preconditioner
    from natgrad.preconditioner.create import create_optimizer as create_optimizer
    from natgrad.preconditioner.guard.guard import Guard as Guard
    from natgrad.preconditioner.natural_muon import NaturalMuon as NaturalMuon
    from natgrad.preconditioner.optimizer import PreconditionedOptimizer as PreconditionedOptimizer
    from natgrad.refresh import Adaptive as Adaptive
    from natgrad.refresh import DoublingInterval as DoublingInterval
    from natgrad.refresh import DriftRule as DriftRule
    from natgrad.refresh import GrowingInterval as GrowingInterval
    from natgrad.refresh import MultiStepInterval as MultiStepInterval
    from natgrad.refresh import Refresh as Refresh
    from natgrad.refresh import RefreshRule as RefreshRule
    from natgrad.refresh import ScaledInterval as ScaledInterval
    from natgrad.refresh import Sides as Sides
    from natgrad.refresh import TraceRule as TraceRule
    from natgrad.refresh import TwoPhaseInterval as TwoPhaseInterval
    from natgrad.refresh import register_refresh as register_refresh
    from natgrad.schedule import Schedule as Schedule
    from natgrad.specs import Statistic as Statistic
    from natgrad.specs import Task as Task
    from natgrad.specs import TensorSpec as TensorSpec

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        from natgrad.errors import did_you_mean, with_address  # noqa: PLC0415  # here they would be public

        message = f"module {__name__!r} has no attribute {name!r}{did_you_mean(name, _HOMES)}"
        if name in _REMOVED:
            message = f"natgrad.{name} was removed: {_REMOVED[name]}"
        raise AttributeError(with_address(message, "arguments"))
    home = _HOMES[name]
    value = import_module(f"{home}.{name}") if home == __name__ else getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*_HOMES, "__version__"])
