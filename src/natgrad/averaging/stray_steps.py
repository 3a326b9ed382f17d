"""Steps of the optimizer beside those of the averager, which would be two for one batch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import finalize

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from natgrad.errors import NatgradWarning
from natgrad.optimizer import PreconditionedOptimizer


class StraySteps:
    """Notes, by torch's hooks, when its optimizer steps outside of the averager's own step.

    A step that moves nothing is none: without gradients, or at learning rates of zero, as by which
    ``torch.distributed.checkpoint`` makes an optimizer's state exist.
    """

    def __init__(self, averager: str, optimizer: Optimizer) -> None:
        """Look at the steps of `optimizer`, and of one that it wraps.

        Args:
            averager: What the averager is called in messages.
            optimizer: Its optimizer.
        """
        self._averager, self._record = averager, _Record()
        inner = (optimizer.optimizer,) if isinstance(optimizer, PreconditionedOptimizer) else ()
        handles = [each.register_step_post_hook(self._record) for each in (optimizer, *inner)]
        self._stop = finalize(self, _remove, handles)
        self._warned = False

    def check(self) -> None:
        """Warn, the first time, if the optimizer was stepped beside the averager since the averager's last step."""
        if self._record.seen and not self._warned:
            self._warned = True
            warnings.warn(
                f"natgrad: optimizer.step() was called beside {self._averager}.step(), which steps the optimizer "
                f"itself: with both each batch makes two steps. Call {self._averager}.step() alone, with a GradScaler "
                "in place of scaler.step(optimizer) too",
                NatgradWarning,
                stacklevel=4,
            )

    @contextmanager
    def own(self) -> Iterator[None]:
        """Take the steps inside for the averager's own, and forget those before."""
        self._record.inside = True
        try:
            yield
        finally:
            self._record.inside = self._record.seen = False

    def stop(self) -> None:
        """Look no more."""
        self._stop()


class _Record:
    """What the hooks write; it knows nothing of the averager, so that a copy of the optimizer may carry it along."""

    def __init__(self) -> None:
        self.inside = self.seen = False

    def __call__(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.seen = not self.inside and (self.seen or _moves(optimizer))


def _moves(optimizer: Optimizer) -> bool:
    """Tell whether a step changes parameters."""
    return any(
        parameter.grad is not None
        for group in optimizer.param_groups
        if float(group.get("lr", 1.0))
        for parameter in group["params"]
    )


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
