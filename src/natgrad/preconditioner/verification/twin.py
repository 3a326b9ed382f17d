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
from natgrad.capture.audit import GradientAudit
from natgrad.distributed import Communicator, Placement
from natgrad.errors import NatgradWarning
from natgrad.preconditioner.counters import StepCounters
from natgrad.preconditioner.epoch_warnings import EpochWarnings
from natgrad.preconditioner.epochs import Epochs
from natgrad.preconditioner.gradients.clip import Clip
from natgrad.preconditioner.gradients.written import Unseen, WrittenGradients
from natgrad.preconditioner.guard.guard import FailureCounters, Guard
from natgrad.preconditioner.guard.inspection import Inspection
from natgrad.preconditioner.renewal import Background, RefreshScheduler
from natgrad.preconditioner.second_pass import SecondPass
from natgrad.preconditioner.structure import Structure
from natgrad.refresh import Refresh

if TYPE_CHECKING:
    from natgrad.preconditioner import Preconditioner


@contextmanager
def as_new(original: Preconditioner) -> Iterator[None]:
    """Have a preconditioner begin anew at the step that it has come to, and go on as before afterwards.

    Whoever changes ``.grad`` meanwhile restores it before the end.
    """
    untouched = original.parts.given.untouched()
    with ExitStack() as stack:
        if untouched:
            stack.callback(lambda: original.parts.given.note(original.parts.stacks))
        for owner in original.parts.stacks:
            stack.enter_context(owner.aside())
        stack.enter_context(original.parts.runtime.aside())
        stack.enter_context(original.parts.capture.aside())
        parts = original.parts
        fresh = aside(
            parts,
            scheduler=RefreshScheduler(parts.refresh),
            progress=StepCounters(step=parts.progress.step),
            epochs=copy.deepcopy(parts.epochs),
            watch=FailureCounters(Guard(limit=None)),
            background=Background(),
            inspection=Inspection(silent=True),
            clip=Clip(parts.clip.optimizer, parts.clip.bound),
            damping=parts.damping.held(parts.progress.step),
            given=WrittenGradients(),
            scaling=parts.scaling.unscaled(),
            second=SecondPass(off=True),
        )
        stack.enter_context(fresh)
        stack.enter_context(aside(original, _unseen=Unseen(), _epoch_warnings=EpochWarnings(None)))
        yield


def twin(original: Preconditioner, model: nn.Module, epochs: Epochs) -> Preconditioner:
    """Return a new preconditioner with the settings of another, for a plain copy of its model.

    Args:
        original: The other.
        model: The copy.
        epochs: What the other went by when it chose rows.
    """
    copies = zip(original.parts.root.parameters(), model.parameters(), strict=True)
    clip = original.parts.clip.twin({id(parameter): copy for parameter, copy in copies})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NatgradWarning)  # what it has to say has been said
        alone = type(original)(
            model,
            original.curvature,
            optimizer=clip.optimizer,
            damping=original.parts.damping_now(),
            kl_clip=clip.bound,
            reduction=original.parts.reductions.given,
            refresh=Refresh(factors=1, inverses=1),
            precision=replace(original.parts.precision, wire=None),
            guard=Guard(limit=None),
        )
    parts, alone._epoch_warnings = alone.parts, EpochWarnings(None)
    parts.runtime, parts.inspection, parts.second = Communicator(None), Inspection(silent=True), SecondPass(off=True)
    parts.seed, parts.epochs, parts.progress = (
        original.parts.seed,
        epochs,
        StepCounters(step=original.parts.progress.step),
    )
    parts.structure = Structure(
        model,
        alone.curvature,
        parts.precision,
        placement=Placement(),
        rank=0,
        ranks=1,
        factor=original.parts.damping.factor,
    )
    parts.capture.audit = GradientAudit(off=True)
    alone._attach()
    parts.capture.rows.origin = original.parts.capture.rows.origin
    return alone
