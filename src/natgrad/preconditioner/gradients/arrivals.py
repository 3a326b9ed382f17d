"""Updates of matrices that arrive from other ranks while the next forward pass runs."""

from __future__ import annotations

import weakref
from collections import deque
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

    Before its forward pass a module waits for the updates of its own parameters, and of those that it may use without
    calling their modules: its children's (``nn.MultiheadAttention``, experts in a list), except in an
    ``nn.Sequential``. In evaluation it waits for all below it, as fused forward passes use these. ``state_dict`` and
    ``load_state_dict`` of any module wait for all.
    """

    def __init__(self) -> None:
        """Expect nothing, without hooks; whoever makes it calls `close` at its end."""
        self._messages: deque[tuple[Message, list[list[nn.Parameter]]]] = deque()  # with the entries' parameters
        self._received = 0
        self._failures: FailureCounters
        self._factors: dict[int, Any] = {}  # numbers or tensors, by the ``id`` of the parameter
        # The number of messages that a module waits for in training and in evaluation, by its ``id``.
        self._waits: dict[int, tuple[int, int]] = {}
        self._handles: list[Handle] = []

    def observe(self, root: nn.Module) -> None:
        """Register hooks on all present modules, in place of earlier ones. They do not keep this object alive."""
        remove_all(self._handles)
        before, anything = _Hook(weakref.WeakMethod(self._before)), _Hook(weakref.WeakMethod(self._before_copying))
        for module in root.modules():
            self._handles.append(module.register_forward_pre_hook(before, prepend=True))
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

    def expect(self, root: nn.Module, messages: Sequence[Message], failures: FailureCounters) -> None:
        """Set what `natgrad.preconditioner.gradients.sharing.share` has begun to send of the matrices of `root`."""
        assert not self._messages
        self._received, self._factors, self._failures = 0, {}, failures
        sent: dict[int, int] = {}
        for number, (entries, finish) in enumerate(messages, 1):
            # Found now, because a functional call replaces them.
            parameters = [entry.parameters for entry in entries]
            self._messages.append(((entries, finish), parameters))
            sent.update((id(parameter), number) for some in parameters for parameter in some)
            for entry in entries:
                failures.expect_failures(entry.group)
        self._waits = {
            id(module): (_last(_used_by(module), sent), _last(module.parameters(), sent)) for module in root.modules()
        }

    def move_by(self, factors: Mapping[int, Any]) -> None:
        """Set the factors, by the parameter's ``id``, by which arriving updates are added to their parameters."""
        self._factors.update(factors)

    def finish(self, count: int | None = None) -> None:
        """Wait for the first messages of the step, or for all, and move the parameters."""
        with torch.inference_mode(False), torch.no_grad():  # what is made now is used in training
            while self._messages and (count is None or self._received < count):
                (entries, finish), parameters = self._messages[0]
                finish()
                clear_unusable(entries, self._failures)
                for entry, some in zip(entries, parameters, strict=True):
                    entry.add_to(some, self._factors)
                self._messages.popleft()
                self._received += 1

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before(self, module: nn.Module) -> None:
        """Wait for what the forward pass of a module uses."""
        if self._messages:
            training, evaluation = self._waits.get(id(module), (None, None))
            self.finish(training if module.training else evaluation)

    def _before_copying(self, module: nn.Module) -> None:
        self.finish()


def _last(parameters: Iterator[nn.Parameter | None], sent: Mapping[int, int]) -> int:
    """Return the number of the last message with an update of any of the parameters; 0: there is none."""
    return max((sent.get(id(parameter), 0) for parameter in parameters), default=0)


def _used_by(module: nn.Module) -> Iterator[nn.Parameter | None]:
    """Yield the parameters that the forward of a module may read without calling another module."""
    yield from module._parameters.values()
    for child in () if type(module).forward is nn.Sequential.forward else module.children():
        has_forward = not isinstance(child, (nn.ModuleList, nn.ModuleDict))
        yield from child._parameters.values() if has_forward else _used_by(child)


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
