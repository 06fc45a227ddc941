"""Work that takes a while: to verify a checkpoint, to read all of a tensor. Two tasks run at a time, others wait.

A task goes on until it ends or is cancelled, whoever asks for it or not; what it found is kept for some time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

from holdfast.errors import BusyError, NotFoundError
from holdfast.events.progress import OnBytes

_AT_ONCE = 2
_MOST_WAITING = 8
_MOST_KEPT = 64

State = Literal["running", "done", "failed", "cancelled"]
Work = Callable[[OnBytes], dict[str, object]]


class _Cancelled(Exception):
    """Ends the work of a task; never leaves this module."""


@dataclass(slots=True, kw_only=True, eq=False)
class Task:
    """One piece of work, and how far it is."""

    number: int
    kind: str
    checkpoint: int
    state: State = "running"
    bytes: int = 0
    total_bytes: int = 0
    begun: float = field(default_factory=time.monotonic)
    seconds: float | None = None
    result: dict[str, object] | None = None
    error: dict[str, str] | None = None
    is_unwanted: bool = False
    over: threading.Event = field(default_factory=threading.Event)

    def moved(self, done: int, total: int) -> None:
        if self.is_unwanted:
            raise _Cancelled
        self.bytes, self.total_bytes = done, total

    def told(self) -> dict[str, object]:
        fields = ("kind", "checkpoint", "state", "bytes", "total_bytes", "result", "error")
        seconds = time.monotonic() - self.begun if self.seconds is None else self.seconds
        return {"task": self.number, "seconds": seconds, **{name: getattr(self, name) for name in fields}}


class Tasks:
    """All tasks of a server, by number."""

    def __init__(self) -> None:
        self._tasks: dict[int, Task] = {}
        self._lock = threading.Lock()
        self._begun = 0
        self._workers = ThreadPoolExecutor(max_workers=_AT_ONCE, thread_name_prefix="holdfast-view-task")

    def begin(self, kind: str, checkpoint: int, work: Work) -> Task:
        """Have ``work`` done. It is given what to call as it moves on, which raises when it is not wanted any more."""
        with self._lock:
            if sum(task.state == "running" for task in self._tasks.values()) >= _AT_ONCE + _MOST_WAITING:
                raise BusyError("too many tasks are waiting; wait until one has ended, or cancel one")
            ended = [number for number, task in self._tasks.items() if task.state != "running"]
            for number in ended[: max(0, len(self._tasks) - _MOST_KEPT)]:
                del self._tasks[number]
            self._begun += 1
            task = self._tasks[self._begun] = Task(number=self._begun, kind=kind, checkpoint=checkpoint)
        self._workers.submit(self._run, task, work)
        return task

    def _run(self, task: Task, work: Work) -> None:
        try:
            task.moved(0, 0)
            task.result = work(task.moved)
            task.state = "done"
        except _Cancelled:
            task.state = "cancelled"
        except Exception as error:
            task.error = {"kind": type(error).__name__, "message": str(error)}
            task.state = "cancelled" if task.is_unwanted else "failed"
        finally:
            task.seconds = time.monotonic() - task.begun
            task.over.set()

    def find(self, number: int) -> Task:
        with self._lock:
            if number not in self._tasks:
                raise NotFoundError(f"there is no task {number}")
            return self._tasks[number]

    def cancel(self, number: int) -> Task:
        task = self.find(number)
        task.is_unwanted = True
        return task

    def close(self) -> None:
        """Cancel all, and wait until they have ended."""
        for number in list(self._tasks):
            self._tasks[number].is_unwanted = True
        self._workers.shutdown(cancel_futures=True)
