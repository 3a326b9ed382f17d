"""A preconditioner as new for a while, and another of the same settings in this process alone."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from natgrad.aside import aside
from natgrad.audit import GradientAudit
from natgrad.epoch_warnings import EpochWarnings
from natgrad.errors import NatgradWarning
from natgrad.gradients.clip import Clip
from natgrad.gradients.given import Given, Unseen
from natgrad.placement import Placement, Runtime
from natgrad.progress import Progress
from natgrad.refresh import Refresh
from natgrad.renewal import Background, RefreshScheduler
from natgrad.rows import Epochs
from natgrad.second_pass import SecondPass
from natgrad.stacks.structure import Structure
from natgrad.trouble.guard import Guard, Watch
from natgrad.trouble.inspection import Inspection

if TYPE_CHECKING:
    from natgrad.preconditioner import Preconditioner


@contextmanager
def as_new(original: Preconditioner) -> Iterator[None]:
    """Have a preconditioner begin anew at the step that it has come to, and go on as before afterwards.

    Whoever changes ``.grad`` meanwhile restores it before the end.
    """
    untouched = original._given.untouched()
    with ExitStack() as stack:
        if untouched:
            stack.callback(lambda: original._given.note(original._stacks))
        for owner in original._stacks:
            stack.enter_context(owner.aside())
        stack.enter_context(original._runtime.aside())
        stack.enter_context(original._capture.aside())
        fresh = aside(
            original,
            _scheduler=RefreshScheduler(original._refresh),
            _progress=Progress(step=original._progress.step),
            _epochs=copy.deepcopy(original._epochs),
            _watch=Watch(Guard(limit=None)),
            _background=Background(),
            _inspection=Inspection(silent=True),
            _clip=Clip(original._clip.optimizer, original._clip.bound),
            _damping=original._damping.held(original._progress.step),
            _given=Given(),
            _scaling=original._scaling.unscaled(),
            _unseen=Unseen(),
            _second=SecondPass(off=True),
            _epoch_warnings=EpochWarnings(None),
        )
        stack.enter_context(fresh)
        yield


def twin(original: Preconditioner, model: nn.Module, epochs: Epochs) -> Preconditioner:
    """Return a new preconditioner with the settings of another, for a plain copy of its model.

    Args:
        original: The other.
        model: The copy.
        epochs: What the other went by when it chose rows.
    """
    copies = zip(original._root.parameters(), model.parameters(), strict=True)
    clip = original._clip.twin({id(parameter): copy for parameter, copy in copies})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NatgradWarning)  # what it has to say has been said
        alone = type(original)(
            model,
            original._curvature,
            optimizer=clip.optimizer,
            damping=original._damping_now(),
            kl_clip=clip.bound,
            reduction=original._reductions.given,
            refresh=Refresh(factors=1, inverses=1),
            precision=replace(original._precision, wire=None),
            guard=Guard(limit=None),
        )
    alone._runtime, alone._inspection, alone._second = Runtime(None), Inspection(silent=True), SecondPass(off=True)
    alone._epoch_warnings = EpochWarnings(None)
    alone._seed, alone._epochs, alone._progress = original._seed, epochs, Progress(step=original._progress.step)
    alone._structure = Structure(
        model,
        alone._curvature,
        alone._precision,
        placement=Placement(),
        rank=0,
        ranks=1,
        factor=original._damping.factor,
    )
    alone._capture.audit = GradientAudit(off=True)
    alone._begin()
    alone._capture.rows.origin = original._capture.rows.origin
    return alone
