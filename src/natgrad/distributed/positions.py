"""Where each rank is: which step, in which call. Ranks read it from the others when a message fails or is late.

A thread publishes the position of this process in the store of the default process group every half second. This is
no collective, and training does not wait for it.
"""

from __future__ import annotations

import atexit
import json
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any
from zlib import crc32

import torch.distributed as dist

from natgrad.errors import LostRankError

# Seconds between two publications.
BEAT = 0.5

# Seconds without a publication after which a rank is called silent.
SILENT = 4 * BEAT

# Seconds that a failed rank waits for the others to read its notice, before its process or its store may end.
_READ = 3.0

# The characters of an error message that are published.
_LENGTH = 500


@dataclass
class Position:
    """Where a rank is.

    Attributes:
        call: The call or phase, as an error message names it.
        steps: The completed steps of each preconditioner, by the key that `Positions.add_preconditioner` returns.
        stepping: The key of the preconditioner whose `step` is in progress. None: none.
        passes: The passes since the last step of each preconditioner in which all ranks take part.
        error: The exception that ended the last call. Empty: none.
        beat: How often the position has been published. -1: never.
        ended: Whether the process has left the process group, or is ending.
    """

    call: str = "before its first step()"
    steps: dict[str, int] = field(default_factory=dict)
    stepping: str | None = None
    passes: dict[str, int] = field(default_factory=dict)
    error: str = ""
    beat: int = -1
    ended: bool = False

    def __str__(self) -> str:
        """Describe the position."""
        if self.error:
            return f"failed {self.call}: {self.error}"
        return f"has left the process group, last {self.call}" if self.ended else f"is {self.call}"


@dataclass(frozen=True)
class Notice:
    """What a rank announces to all others.

    Attributes:
        rank: Its rank in the default process group.
        text: What happened.
        final: Whether training cannot go on. An exception is not final: the user may catch it.
    """

    rank: int
    text: str
    final: bool


class Positions:
    """The positions of all ranks of the default process group.

    Attributes:
        here: The position of this process.
        notice: The notice of another rank, as of the last half second. None: there is none.
    """

    def __init__(self, world: dist.ProcessGroup) -> None:
        """Begin to publish, until `world` is destroyed."""
        self.here = Position()
        self.notice: Notice | None = None
        self.rank, self.ranks = dist.get_rank(world), dist.get_world_size(world)
        self._store: Any = world.get_group_store()
        self._announced, self._read = False, ""
        self._ended = threading.Event()
        weakref.finalize(world, _leave, self._ended).atexit = False
        left = self._stored_notice()
        if left is not None and left.rank == self.rank:  # of a process group before this one
            self._set("notice", "")
        self._publish()
        self._thread = threading.Thread(target=self._run, name="positions of natgrad", daemon=True)
        self._thread.start()
        _publishing.add(self)

    # --- This rank ----------------------------------------------------------------------------------------------

    def add_preconditioner(self, digest: int, ranks: Sequence[int]) -> str:
        """Return the key of a new preconditioner in ``here.steps``, the same on all its ranks.

        Several preconditioners may be made in another order on another rank. Only equal ones must be made in the same
        order.

        Args:
            digest: A number that is the same on ranks with the same plan for the same layers.
            ranks: Its ranks.
        """
        kind = f"{digest:08x}/{crc32(repr(sorted(ranks)).encode()):08x}"
        key = f"{kind}/{sum(other.startswith(kind) for other in self.here.steps)}"
        # The thread may be reading the others.
        self.here.steps, self.here.passes = {**self.here.steps, key: 0}, {**self.here.passes, key: 0}
        return key

    def enter(self, call: str) -> None:
        """Record that this rank is in a call, and so has survived an exception of an earlier one."""
        self.here.call = call
        if self.here.error:
            self.here.error = ""
            if self._announced:
                self._announced = False
                self._set("notice", "")

    def fail(self, error: BaseException) -> None:
        """Announce the exception that ends the present call."""
        follows = isinstance(error, LostRankError) or is_lost(error)
        if self.here.error or follows or not isinstance(error, Exception):
            return
        self.here.error = f"{type(error).__name__}: {error}"[:_LENGTH]
        self.announce(f"rank {self.rank} {self.here}", final=False)

    def explain(self, error: BaseException) -> None:
        """Add a note with the cause to an exception of a collective that is not natgrad's."""
        explained = any(note.startswith("natgrad: ") for note in getattr(error, "__notes__", ()))
        if is_lost(error) and not explained and hasattr(error, "add_note"):  # Python 3.11
            error.add_note(f"natgrad: {self.reason(range(self.ranks))}")

    def announce(self, text: str, *, final: bool) -> None:
        """Give a notice to all ranks, unless one has given a final notice before."""
        self._publish()
        if self.current_notice() is None:
            self._announced = self._set("notice", json.dumps(asdict(Notice(self.rank, text, final))))
            if final:
                self.notice = Notice(self.rank, text, final)

    def await_readers(self) -> None:
        """Wait a few seconds until all other ranks have read this rank's notice."""
        ends = time.monotonic() + _READ
        while self._announced and self.count(f"readers/{self.rank}") < self.ranks - 1 and time.monotonic() < ends:
            time.sleep(BEAT / 10)

    # --- Other ranks --------------------------------------------------------------------------------------------

    def of(self, ranks: Sequence[int]) -> dict[int, Position]:
        """Return the last published positions of some ranks. Empty if the store is gone."""
        found = {}
        for rank in ranks:
            text = self._get(f"position/{rank}")
            found[rank] = Position(**json.loads(text)) if text else Position()
        return found if self._store is not None else {}

    def current_notice(self) -> Notice | None:
        """Return the notice of another rank as of now."""
        notice = self._stored_notice()
        if notice is not None and notice.rank == self.rank:
            return None
        if notice is not None or self._store is not None:  # else what was read before the store was lost
            self.notice = notice
        return self.notice

    def _stored_notice(self) -> Notice | None:
        text = self._get("notice")
        return Notice(**json.loads(text)) if text else None

    def count(self, key: str, added: int = 0) -> int:
        """Add to a number that all ranks share, and return it."""
        return int(self._try(lambda store: store.add(f"natgrad/{key}", added)) or 0)

    def reason(self, ranks: Sequence[int]) -> str:
        """Return why a message to these ranks has failed: a notice, or the ranks that are silent or have ended.

        Takes up to `SILENT` seconds.
        """
        before, ends = self.of(ranks), time.monotonic() + SILENT
        while (notice := self.current_notice()) is None and self._store is not None and time.monotonic() < ends:
            time.sleep(BEAT / 5)
        if notice is not None:
            return notice.text
        unknown = "another rank has probably stopped, see the error there"
        if self._store is None:
            return f"{unknown} (the store is gone, and with it probably rank 0)"
        parts = [
            f"rank {rank} {position}"
            + ("" if position.beat != before[rank].beat or position.ended else f", silent for {SILENT:.0f} s")
            for rank, position in self.of(ranks).items()
            if rank != self.rank
        ]
        return f"{unknown} ({'; '.join(parts[:8])}{'; ...' if len(parts) > 8 else ''})"

    # --- The store ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._ended.wait(BEAT) and self._store is not None:
            self._publish()
            notice = self.current_notice()
            if notice is not None and notice.text != self._read:
                self._read = notice.text
                self.count(f"readers/{notice.rank}", 1)
        self.here.ended = True
        self._publish()

    def _publish(self) -> None:
        self.here.beat += 1
        self._set(f"position/{self.rank}", json.dumps(asdict(self.here)))

    def _set(self, key: str, value: str) -> bool:
        return bool(self._try(lambda store: store.set(f"natgrad/{key}", value) or True))

    def _get(self, key: str) -> str:
        found = self._try(lambda store: store.get(f"natgrad/{key}") if store.check([f"natgrad/{key}"]) else b"")
        return found.decode() if found else ""

    def _try(self, action: Callable[[Any], Any]) -> Any:
        """Use the store. It is gone if the process that hosts it has ended; then return None."""
        try:
            return None if self._store is None else action(self._store)
        except RuntimeError:
            self._store = None
            return None

    @property
    def publishes(self) -> bool:
        """Whether the process group still exists."""
        return not self._ended.is_set()

    def end(self) -> None:
        """Publish that this process ends, and end the thread. After an exception first let the others read it.

        A thread that is in the store while the interpreter ends would abort the process.
        """
        if not self._ended.is_set():
            self.await_readers()
            self._ended.set()
        self._thread.join(SILENT)


# Those whose threads may run, also of process groups that have been destroyed.
_publishing: weakref.WeakSet[Positions] = weakref.WeakSet()
_of_world: weakref.WeakKeyDictionary[dist.ProcessGroup, Positions] = weakref.WeakKeyDictionary()


def positions() -> Positions | None:
    """Return the positions of the ranks of the default process group. None: there is none, or it has no store."""
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if world is None or not hasattr(world, "get_group_store") or dist.get_world_size() == 1:
        return None
    if world not in _of_world:
        _install()
        _of_world[world] = Positions(world)
    return _of_world[world]


# What `_report` replaces. None: it is not installed.
_replaced: Callable[[type[BaseException], BaseException, TracebackType | None], Any] | None = None


def _install() -> None:
    """Have exceptions that end this process announced, until the last process group is destroyed."""
    global _replaced
    if _replaced is None:
        _replaced, sys.excepthook = sys.excepthook, _report


def _report(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Announce an exception that ends this process, name the cause of a lost connection, and call the hook before."""
    try:
        world = dist.group.WORLD if dist.is_initialized() else None
        found = None if world is None else _of_world.get(world)
        if found is not None:
            found.explain(error)
            found.fail(error)
    finally:
        (_replaced or sys.__excepthook__)(kind, error, traceback)


def _leave(ended: threading.Event) -> None:
    """End the publications of a destroyed process group; after the last one, restore the exception hook.

    A hook that another library has set since may call `_report`, which then stays.
    """
    global _replaced
    ended.set()
    if sys.excepthook is _report and not any(found.publishes for found in _publishing):
        assert _replaced is not None
        sys.excepthook, _replaced = _replaced, None


def _end() -> None:
    for found in list(_publishing):
        found.end()


atexit.register(_end)


def is_lost(error: BaseException) -> bool:
    """Return whether an exception says that a collective has failed."""
    return isinstance(error, RuntimeError) and (isinstance(error, dist.DistError) or "gloo" in str(error))
