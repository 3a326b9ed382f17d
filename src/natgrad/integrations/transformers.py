"""For ``transformers.Trainer``: a factory of natgrad's optimizers, and a callback.

Examples:
    >>> trainer = Trainer(
    ...     model, args, train_dataset=data,
    ...     optimizer_cls_and_kwargs=(OptimizerFactory, {"name": "natural-muon", "lr": 2e-2}),
    ...     callbacks=[NatgradCallback()],
    ... )
"""

from __future__ import annotations

from dataclasses import fields
from time import perf_counter
from typing import Any

from torch import nn
from torch.optim import Optimizer

from natgrad.errors import warn, with_address
from natgrad.preconditioner.create import create_optimizer
from natgrad.preconditioner.natural_muon import NaturalMuon
from natgrad.preconditioner.optimizer import PreconditionedOptimizer

_NEEDED = "natgrad.integrations.transformers needs transformers 5.2 or later: pip install 'transformers>=5.2'"

try:
    import transformers
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise ImportError(with_address(_NEEDED, "missing-package")) from error
if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 2):
    _message = (
        f"{_NEEDED}. {transformers.__version__} is installed; its Trainer takes "
        "optimizers=(natgrad.create_optimizer(model, ...), None)"
    )
    raise ImportError(with_address(_message, "missing-package"))

_SECONDS = ("seconds/capture", "seconds/reduce", "seconds/renew", "seconds/solve")


class OptimizerFactory:
    """Builds the optimizer of a ``Trainer``, which takes this class (transformers 5.2 or newer)."""

    def __call__(self, model: nn.Module, name: str = "natural-muon", **options: Any) -> PreconditionedOptimizer:
        """Return `natgrad.create_optimizer` of the same arguments."""
        return create_optimizer(model, name, **options)


class NatgradCallback(TrainerCallback):  # type: ignore[misc]
    """Completes checkpoints of natgrad's optimizers, gives them the loss scale, and logs their share of the time.

    Where each rank holds the curvature of its own layers only, the ranks send it to each other before a save. Each log
    has ``natgrad_overhead``, the share of the host's time since the last log that natgrad took.
    """

    def __init__(self) -> None:
        self._optimizer: PreconditionedOptimizer | None = None
        self._last = 0.0, 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Find the optimizer.

        Warns:
            NatgradWarning: if the optimizer is not one of natgrad's; if the trainer clips gradients before they are
                preconditioned; if the optimizer, its learning rate or its weight decay in the arguments is not used.
        """
        optimizer = unwrapped(kwargs["optimizer"])
        if not isinstance(optimizer, PreconditionedOptimizer):
            _warn(
                f"the trainer's optimizer is {type(optimizer).__name__}, not one of natgrad's: pass "
                "optimizer_cls_and_kwargs=(natgrad.integrations.transformers.OptimizerFactory, {...})"
            )
            return
        self._optimizer = optimizer
        scaler = getattr(kwargs["optimizer"], "scaler", None)
        if scaler is not None:
            optimizer.preconditioner.scaler = scaler
        self._last = self._seconds(), perf_counter()
        if args.max_grad_norm > 0 and not isinstance(optimizer, NaturalMuon):
            _warn(
                f"the trainer clips gradients to {args.max_grad_norm:g} before they are preconditioned. Pass "
                "max_grad_norm=0 in the TrainingArguments; natgrad has a KL clip (beside SGD) and clip_norm="
            )
        defaults = {field.name: field.default for field in fields(args)}
        rates = [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]
        if args.learning_rate not in (defaults["learning_rate"], *rates):
            _warn(f"learning_rate={args.learning_rate:g} of the TrainingArguments is not used: pass lr to natgrad")
        if args.optim != defaults["optim"]:
            _warn(f"optim={str(args.optim.value)!r} of the TrainingArguments is not used: pass name to natgrad")
        if args.weight_decay and not any(group.get("weight_decay") for group in optimizer.param_groups):
            _warn(
                f"weight_decay={args.weight_decay:g} of the TrainingArguments is not used: pass weight_decay to natgrad"
            )

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Collect the curvature before a save."""
        self._before_save(control.should_save)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Collect the curvature before a save."""
        self._before_save(control.should_save)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Collect the curvature if this may turn out to be the best model, which is saved."""
        self._before_save(str(args.save_strategy.value) == "best")

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the share of the time that natgrad took."""
        if logs is None or self._optimizer is None or "loss" not in logs:
            return
        seconds, now = self._seconds(), perf_counter()
        share = (seconds - self._last[0]) / max(now - self._last[1], 1e-9)
        self._last = seconds, now
        for place in (logs, *state.log_history[-1:]):  # loggers that come later, and the trainer's own history
            place["natgrad_overhead"] = share

    def _before_save(self, saves: bool) -> None:
        if saves and self._optimizer is not None and not self._optimizer.preconditioner.is_complete:
            self._optimizer.consolidate_state_dict()

    def _seconds(self) -> float:
        """Return the seconds that natgrad has taken so far."""
        metrics = {} if self._optimizer is None else self._optimizer.preconditioner.metrics()
        return sum(float(metrics.get(name, 0.0)) for name in _SECONDS)


def unwrapped(optimizer: Any) -> Optimizer:
    """Return the optimizer inside Accelerate's wrapper."""
    inner: Optimizer = optimizer.optimizer if type(optimizer).__name__ == "AcceleratedOptimizer" else optimizer
    return inner


def _warn(message: str) -> None:
    warn(f"natgrad: {message}", "trainer")
