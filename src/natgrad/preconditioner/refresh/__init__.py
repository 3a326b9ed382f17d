"""From sums of statistics to running averages, and from these to inverses or eigenvectors."""

from natgrad.preconditioner.refresh.averages import update_averages as update_averages
from natgrad.preconditioner.refresh.background import BackgroundRefresh as BackgroundRefresh
from natgrad.preconditioner.refresh.background import separated as separated
from natgrad.preconditioner.refresh.deferred import PartialAverages as PartialAverages
from natgrad.preconditioner.refresh.gathered import RowRefresh as RowRefresh
from natgrad.preconditioner.refresh.scheduler import RefreshScheduler as RefreshScheduler
from natgrad.preconditioner.refresh.scheduler import share_decisions as share_decisions
from natgrad.preconditioner.refresh.tasks import observed as observed
from natgrad.preconditioner.refresh.tasks import run_tasks as run_tasks

__all__ = [
    "BackgroundRefresh",
    "RefreshScheduler",
    "RowRefresh",
    "observed",
    "run_tasks",
    "separated",
    "share_decisions",
    "update_averages",
]
