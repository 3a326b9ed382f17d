"""Approximations of a layer's Fisher block, one file per method. Nothing here communicates."""

from natgrad.curvature.base import Curvature
from natgrad.curvature.ekfac import EKFAC
from natgrad.curvature.kfac import KFAC
from natgrad.curvature.rank_one import RankOne
from natgrad.curvature.rows import SNGD, HyLo
from natgrad.curvature.spectral import Spectral
from natgrad.curvature.unitwise import UnitWise

__all__ = ["EKFAC", "KFAC", "SNGD", "Curvature", "HyLo", "RankOne", "Spectral", "UnitWise"]
