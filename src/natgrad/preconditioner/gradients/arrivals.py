"""Updates of matrices that arrive from other ranks while the next forward pass runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from natgrad.layers import Handle, remove_all
from natgrad.preconditioner.gradients.preconditioning import clear_unusable
from natgrad.preconditioner.gradients.stacked import GroupGradients
from natgrad.preconditioner.guard.guard import FailureCounters

Message = tuple[list[GroupGradients], Callable[[], None]]


class Arrivals:
    """The updates of the last step that this rank has yet to receive, in the order in which they were sent.

    Before its next forward pass a module waits for the updates of its own parameters and, unless it is an
    ``nn.Sequential``, for those of its children, which it may use without calling them (``nn.MultiheadAttention``). An
    evaluation, ``state_dict`` and ``load_state_dict`` of any module wait for all.
    """

    def __init__(self, root: nn.Module, failures: FailureCounters) -> None:
        """Register hooks on all modules. They do not keep this object alive: its owner calls `close` at its end."""
        self._failures = failures
        self._messages: list[Message] = []
        self._last: dict[int, int] = {}  # the last message with an update, by the ``id`` of the parameter
        self._received = 0
        self._factors: dict[int, Any] = {}  # numbers or tensors
        self._handles: list[Handle] = []
        self.observe(root)

    def observe(self, root: nn.Module) -> None:
        """Register hooks on all present modules, in place of earlier ones."""
        remove_all(self._handles)
        before, anything = _Hook(weakref.WeakMethod(self._before)), _Hook(weakref.WeakMethod(self._before_copying))
        for module in root.modules():
            self._handles.append(module.register_forward_pre_hook(before))
            self._handles.append(module.register_state_dict_pre_hook(anything))
            self._handles.append(module.register_load_state_dict_pre_hook(anything))

    def close(self) -> None:
        """Wait for all updates, and remove the hooks."""
        try:
            self.finish()
        finally:
            remove_all(self._handles)

    @property
    def remain(self) -> bool:
        """Whether any update has not arrived."""
        return bool(self._messages)

    def expect(self, messages: Sequence[Message]) -> None:
        """Set the messages that `natgrad.preconditioner.gradients.sharing.share` has begun to send."""
        self._messages, self._received, self._factors = list(messages), 0, {}
        self._last = {
            id(slot.parameter): number
            for number, (entries, _) in enumerate(self._messages)
            for entry in entries
            for member in entry.members
            for slot in member.layer.slots
        }

    def move_by(self, factors: Mapping[int, Any]) -> None:
        """Set the factors, by the parameter's ``id``, by which arriving updates are added to their parameters."""
        self._factors.update(factors)

    @torch.no_grad()
    def finish(self, last: int | None = None) -> None:
        """Wait for the messages up to the number `last`, or for all, and move the parameters."""
        last = len(self._messages) - 1 if last is None else last
        while self._received <= last:
            entries, finish = self._messages[self._received]
            self._received += 1
            finish()
            clear_unusable(entries, self._failures)
            for entry in entries:
                entry.add_to_parameters(self._factors)
        if self._received == len(self._messages):
            self._messages = []

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before(self, module: nn.Module) -> None:
        """Wait for what the forward pass of a module uses."""
        if self._messages:
            self.finish(None if not module.training else self._last_of(module))

    def _before_copying(self, module: nn.Module) -> None:
        self.finish()

    def _last_of(self, module: nn.Module) -> int:
        numbers = (self._last.get(id(parameter), -1) for parameter in _used_by(module))
        return max(numbers, default=-1)


def _used_by(module: nn.Module) -> Iterator[nn.Parameter | None]:
    """Yield the parameters that the forward of a module may read by itself."""
    yield from module._parameters.values()
    for child in () if isinstance(module, nn.Sequential) else module.children():
        yield from child._parameters.values()


class _Hook:
    """A hook that passes the module to a method. Copies do nothing."""

    def __init__(self, method: weakref.WeakMethod[Callable[[nn.Module], None]] | None = None) -> None:
        self._method = method

    def __call__(self, module: nn.Module, *args: Any) -> None:
        method = None if self._method is None else self._method()
        if method is not None:
            method(module)

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return _Hook, ()
