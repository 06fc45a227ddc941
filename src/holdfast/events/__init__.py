"""What happens to checkpoints: after ``subscribe(listener)``, the listener is called with each event.

Events go through a bounded queue to one thread, which calls the listeners. So a listener that raises, blocks or is slow
changes nothing for a save. Where nobody listens, an operation looks at ``subscriptions`` and does nothing else.
Durations come from the monotonic clock. A forked child has no listeners.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import itertools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Literal

from holdfast._process import Lock, Once, reset_in_child, start_thread
from holdfast._values.shown import short_repr
from holdfast.errors import first_line

if TYPE_CHECKING:
    from holdfast.events.listeners import jsonl, log, opentelemetry, prometheus, scalars, trace

__all__ = ["Event", "PhaseTimes", "SaveReport", "Subscription", "flush", "jsonl", "log", "opentelemetry", "prometheus"]
__all__ += ["scalars", "subscribe", "trace"]

logger = logging.getLogger("holdfast")

HOST = os.uname().nodename

_MOST_WAITING = 1024
_FLUSH_S = 5.0


def __getattr__(name: str) -> object:
    if name in __all__:  # a ready-made listener: imported when asked for, because most programs need one at most
        return getattr(importlib.import_module("holdfast.events.listeners"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTimes:
    """How long a phase took: on average, and on the slowest rank."""

    mean_s: float
    max_s: float
    rank: int
    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """How long a save took: ``total_s`` from the call on the coordinator until the checkpoint was durable.

    The caller was blocked for ``blocked_s``. ``plan_s``, ``stage_s`` (to copy the state into a snapshot), ``write_s``
    and ``sync_s`` (to make the bytes durable) are those of the slowest rank; time in which it waited for others does
    not count. ``phases`` tells for "blocked", "plan" and so on which rank that was. The coordinator published in
    ``commit_s``. All ranks together wrote ``bytes``.
    """

    __repr__ = short_repr

    bytes: int
    total_s: float
    blocked_s: float
    plan_s: float
    stage_s: float
    write_s: float
    sync_s: float
    commit_s: float
    phases: Mapping[str, PhaseTimes]

    @property
    def bytes_per_s(self) -> float:
        return self.bytes / self.total_s if self.total_s else 0.0


RankTimes = tuple[str, int, dict[str, float]]
"""What a rank tells of its part in a save: its host, the bytes that it wrote, and the seconds of each phase.

If "blocked" is not among them, the caller was blocked all the time.
"""


def save_report(ranks: Mapping[int, RankTimes], *, total_s: float, commit_s: float) -> SaveReport:
    """The report of a save, from what the ``ranks`` tell."""
    phases: dict[str, PhaseTimes] = {}
    for name in ("blocked", "plan", "stage", "write", "sync"):
        seconds = {rank: phases_s.get(name, total_s) for rank, (_, _, phases_s) in ranks.items()}
        slowest = max(seconds, key=seconds.__getitem__)
        mean_s, host = sum(seconds.values()) / len(seconds), ranks[slowest][0]
        phases[name] = PhaseTimes(mean_s=mean_s, max_s=seconds[slowest], rank=slowest, host=host)
    longest = {f"{name}_s": phase.max_s for name, phase in phases.items()}
    nbytes = sum(written for _, written, _ in ranks.values())
    return SaveReport(bytes=nbytes, total_s=total_s, commit_s=commit_s, phases=phases, **longest)


Name = Literal["started", "planned", "staged", "written", "published", "loaded", "verified", "failed", "removed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that has happened to a checkpoint.

    Attributes:
        name: what has happened.
        operation: in which operation: "save", "async_save", "load", "read", "verify", "convert", "sweep" or "delete".
        number: counts the operations of this process.
        path: where the checkpoint is.
        attempt: the id of the save that made it; "" if that is not known yet.
        step: ``user_metadata["step"]`` of the checkpoint, if that is an int.
        rank: which rank tells it; ``host`` is where that rank runs.
        seconds: how long the phase took that has ended, or the whole operation, if that has ended.
        bytes: how many bytes this rank has copied, written, read or removed.
        at: when it happened, in seconds since the epoch.
        report: the report of a save that is "published"; only on the coordinator.
        sync_s: of an event "written": how many of its seconds went into making the bytes durable.
        problem: of an event "failed", the error; of an event "verified", what is damaged.
    """

    name: Name
    operation: str
    number: int
    path: str
    attempt: str
    step: int | None
    rank: int
    host: str
    seconds: float
    bytes: int
    at: float
    report: SaveReport | None = None
    sync_s: float = 0.0
    problem: str = ""


Listener = Callable[[Event], object]
_numbers = itertools.count(1)


class Operation(contextlib.AbstractContextManager["Operation"]):
    """One operation of this process, and its events. Use it in a ``with`` block: an error there is told as "failed".

    ``begun`` is when it began, by the monotonic clock; now, if not given.
    """

    # The same for all operations: what came one after the other must not overlap because two clocks were asked.
    _since_epoch = 0.0

    def __init__(
        self, name: str, path: object, *, attempt: str = "", step: object = None, begun: float | None = None
    ) -> None:
        self._name = name
        self._path = str(path)
        self._number = next(_numbers)
        now = time.monotonic()
        since_epoch = time.time() - now
        if abs(since_epoch - Operation._since_epoch) > 1:  # the clock was set
            Operation._since_epoch = since_epoch
        self._begun = now if begun is None else begun
        self.attempt = attempt
        self.step = step
        self.tell("started", seconds=0.0)

    def tell(self, name: Name, *, seconds: float | None = None, nbytes: int = 0, **more: Any) -> None:
        """Tell listeners what has happened. It took ``seconds``, or all the time since the operation began."""
        if not subscriptions:
            return
        now = time.monotonic()
        distributed: Any = sys.modules.get("torch.distributed")
        is_rank = distributed is not None and distributed.is_available() and distributed.is_initialized()
        _put(
            Event(
                name=name,
                operation=self._name,
                number=self._number,
                path=self._path,
                attempt=self.attempt,
                step=self.step if type(self.step) is int else None,
                rank=distributed.get_rank() if is_rank else 0,
                host=HOST,
                seconds=now - self._begun if seconds is None else seconds,
                bytes=nbytes,
                at=self._since_epoch + now,
                **more,
            )
        )

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            problem = type(error).__name__
            with contextlib.suppress(Exception):  # an error of somebody else's class may fail to print
                problem += f": {first_line(error)}"
            self.tell("failed", problem=problem)


class Subscription(contextlib.AbstractContextManager["Subscription"]):
    """A listener that is told of events until ``close``, which the end of a ``with`` block calls too.

    ``close`` returns when the listener was told of all events so far.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener: Listener | None = listener

    def close(self) -> None:
        flush()
        thread = self._end()
        if not subscriptions and thread.is_alive() and thread is not threading.current_thread():
            thread.join(_FLUSH_S)

    def __exit__(self, *error: object) -> None:
        self.close()

    def _end(self) -> threading.Thread:
        """Listen no more. The thread ends with the last listener."""
        global subscriptions
        with _lock:
            subscriptions = tuple(each for each in subscriptions if each is not self)
            self._listener = None
            if not subscriptions:
                _queue.put(None)
            return _thread

    def _tell(self, event: Event) -> None:
        listener = self._listener
        try:
            if listener is not None:
                listener(event)
        except BaseException:  # whatever it is, the other listeners are told
            logger.exception("a listener to events failed and is not called again: %r", listener)
            self._end()


subscriptions: tuple[Subscription, ...] = ()
"""Who listens. Where it is empty, nothing need be told."""

_lock = Lock()
_queue: SimpleQueue[Event | Once | None] = SimpleQueue()
_thread = threading.Thread()
_dropped = 0


@reset_in_child
def _forget_parent() -> None:
    global subscriptions, _queue, _thread, _dropped
    subscriptions, _queue, _thread, _dropped = (), SimpleQueue(), threading.Thread(), 0


def subscribe(listener: Listener) -> Subscription:
    """Have ``listener`` called with every event of this process from now on, in another thread."""
    global subscriptions, _queue, _thread
    if not callable(listener):
        raise TypeError(f"a listener is a function of an event, not a {type(listener).__name__}")
    subscription = Subscription(listener)
    try:
        with _lock:
            if not subscriptions:
                _queue = SimpleQueue()
                _thread = threading.Thread(target=_deliver, args=(_queue,), name="holdfast-events", daemon=True)
                start_thread(_thread)
                atexit.unregister(flush)
                atexit.register(flush)
            subscriptions = (*subscriptions, subscription)
    except BaseException:
        subscription._end()
        raise
    return subscription


def flush(timeout_s: float = _FLUSH_S) -> bool:
    """Wait until listeners were told of all events so far, ``timeout_s`` seconds at most; returns whether they were."""
    if not subscriptions or _thread is threading.current_thread():
        return True
    reached = Once()
    _queue.put(reached)
    if not reached.wait(timeout_s):
        logger.warning("listeners to events are busy for more than %g s; they were not told of all", timeout_s)
    return reached.is_set()


def _put(event: Event) -> None:
    global _dropped
    if _queue.qsize() < _MOST_WAITING:
        _queue.put(event)
        return
    _dropped += 1
    if _dropped == 1:
        logger.warning("%d events wait for listeners that are slow or stuck; more are dropped", _MOST_WAITING)


def _deliver(queue: SimpleQueue[Event | Once | None]) -> None:
    while (event := queue.get()) is not None:
        if isinstance(event, Once):
            event.set()
        else:
            for subscription in subscriptions:
                subscription._tell(event)
