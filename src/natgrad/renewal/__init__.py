"""Sums become running averages, and these what a solve needs: in the step, or beside the steps that follow."""

from natgrad.renewal.averages import fold as fold
from natgrad.renewal.background import Background as Background
from natgrad.renewal.renew import observed as observed
from natgrad.renewal.renew import renew as renew
from natgrad.renewal.scheduler import RefreshScheduler as RefreshScheduler

__all__ = ["Background", "RefreshScheduler", "fold", "observed", "renew"]
