"""From sums of statistics to running averages, and from these to inverses or eigenvectors."""

from natgrad.preconditioner.renewal.averages import fold as fold
from natgrad.preconditioner.renewal.background import BackgroundRefresh as BackgroundRefresh
from natgrad.preconditioner.renewal.gathered import RowRenewal as RowRenewal
from natgrad.preconditioner.renewal.renew import observed as observed
from natgrad.preconditioner.renewal.renew import renew as renew
from natgrad.preconditioner.renewal.scheduler import RefreshScheduler as RefreshScheduler

__all__ = ["BackgroundRefresh", "RefreshScheduler", "RowRenewal", "fold", "observed", "renew"]
