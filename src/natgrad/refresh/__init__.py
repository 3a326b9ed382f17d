"""When is curvature renewed? One file a rule."""

from natgrad.refresh.fixed import Refresh

__all__ = ["Refresh"]
