"""What asks a run to stop: a signal, a file, the end of its allocation.

A handler sets a flag, wakes the thread of the watch, and calls the handler that was there before. The thread tells all
ranks, through an ``Agreement``. It also looks at the file and the clock. Nothing here saves or stops anything.

torchrun sends a signal to the whole process group of each rank, and loader workers are in that group. A worker that
dies of the signal ends its rank. So workers have to ignore it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Literal

from holdfast._io import posix
from holdfast._process import forget_in_child, start_thread
from holdfast._ranks.agreement import Agreement
from holdfast._state.per_rank import job_rank
from holdfast._steps.policies import is_number
from holdfast._values.deadline import Clock
from holdfast.errors import StorageError

logger = logging.getLogger("holdfast")

_SLURM_END = "SLURM_JOB_END_TIME"
_LOOK_S = 1.0
_SAME_S = 5.0  # torchrun and the scheduler may both signal one stop
_SPARE_S, _UNMEASURED_S = 10.0, 60.0
_SIGNALS = ("SIGTERM", "SIGUSR1")
_CAUGHT = signal.Signals.__members__.keys() - {"SIGKILL", "SIGSTOP"}
_Handler = Callable[[int, FrameType | None], object] | int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopOn:
    """What a run stops for, at a step that all ranks agree on.

    Attributes:
        signals: their names. Handlers that were there before are still called. The system's own action comes only with
            a second signal, five seconds or more after the first.
        file: the run stops when this file is made or touched. Rank 0 looks once a second. A file that exists from the
            start does not count until it is touched.
        end: when the allocation ends: a datetime with a time zone, or seconds since the epoch. If it is not given,
            ``SLURM_JOB_END_TIME`` counts, if that is set.
        margin_s: how long before ``end`` to stop. "auto" is ten seconds more than twice the longest step and the
            longest save so far.
    """

    signals: Sequence[str] = _SIGNALS
    file: str | os.PathLike[str] | None = None
    end: datetime | float | None = None
    margin_s: float | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        if isinstance(self.signals, str) or not set(self.signals) <= _CAUGHT:
            raise ValueError(f"signals are names of signals that can be caught, as ('SIGTERM',), not {self.signals!r}")
        is_time = self.end.tzinfo is not None if isinstance(self.end, datetime) else is_number(self.end)
        if self.end is not None and not is_time:
            raise ValueError(f"end is a datetime with a time zone, or seconds since the epoch, not {self.end!r}")
        if self.margin_s != "auto" and not (is_number(self.margin_s) and self.margin_s >= 0):
            raise ValueError(f"margin_s is a number of seconds or 'auto', not {self.margin_s!r}")

    @property
    def end_s(self) -> float | None:
        """When the allocation ends, in seconds since the epoch; None if that is not known."""
        if self.end is not None:
            return self.end.timestamp() if isinstance(self.end, datetime) else self.end
        said = os.environ.get(_SLURM_END)
        with contextlib.suppress(ValueError):
            return float(said) if said else None
        logger.warning("%s is %r, which is no time; the end of the allocation is not known", _SLURM_END, said)
        return None


class StopWatch:
    """Asks all ranks to stop when something in ``stop`` says so, until it is closed.

    ``clock`` gives seconds since the epoch. ValueError outside of the main thread, where signals cannot be handled.
    """

    def __init__(self, stop: StopOn, agreement: Agreement, clock: Clock = time.time) -> None:
        self._agreement, self._clock, self._margin_s = agreement, clock, stop.margin_s
        self._step_s = self._durable_s = 0.0
        self._reason, self._is_over = "", False
        self._rank, self._process = job_rank(), os.getpid()
        self._wishes: SimpleQueue[str] = SimpleQueue()
        self._before, self._first_at = dict[int, _Handler](), dict[int, float]()
        self._end_s = stop.end_s if agreement.is_coordinator else None
        self._file = os.path.abspath(stop.file) if agreement.is_coordinator and stop.file is not None else None
        self._old_file = self._file_now()
        if self._old_file is not None:
            logger.warning("the file %r was there before this run, so it does not stop it; touch it to", self._file)
        forget_in_child(self)
        try:
            self._handle_signals([signal.Signals[name] for name in stop.signals])
            start_thread(threading.Thread(target=self._run, name="holdfast-stop", daemon=True))
        except BaseException:
            self.close()
            raise

    @property
    def reason(self) -> str:
        """Why this rank was asked to stop, or another rank, as far as this one has heard; "" if nobody was."""
        return self._agreement.reasons.get("stop", self._reason)

    @property
    def margin_s(self) -> float:
        measured_s = self._step_s + (self._durable_s or _UNMEASURED_S)
        return 2 * measured_s + _SPARE_S if self._margin_s == "auto" else self._margin_s

    def measured(self, *, step_s: float = 0.0, durable_s: float = 0.0) -> None:
        """Take into account how long a step took, or a save until it was durable."""
        self._step_s, self._durable_s = max(self._step_s, step_s), max(self._durable_s, durable_s)

    def close(self, error: BaseException | None = None) -> None:
        """Put the old handlers back; ``error`` is what ended the run, if an error did."""
        self._is_over = True
        self._wishes.put("")
        self._put_back()
        if error is not None and self.reason and "DataLoader worker" in str(error):
            said = "a DataLoader worker died while the run was asked to stop (%s), and the run with it"
            logger.error(f"{said}; pass worker_init_fn=holdfast.ignore_stop_signals", self.reason)

    def forget_parent(self) -> None:
        self._is_over = True
        self._put_back()

    def _handle_signals(self, numbers: Sequence[signal.Signals]) -> None:
        if numbers and threading.current_thread() is not threading.main_thread():
            raise ValueError(
                "signals are handled in the main thread: make the CheckpointManager there, or with StopOn(signals=())"
            )
        for number in numbers:
            self._before[number] = signal.getsignal(number) or signal.SIG_DFL
            signal.signal(number, self._handle)

    def _put_back(self) -> None:
        # Only the main thread may. Otherwise ours stay, and pass everything on.
        if threading.current_thread() is threading.main_thread():
            for number, before in self._before.items():
                if signal.getsignal(number) == self._handle:
                    signal.signal(number, before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Note the signal. It interrupts the main thread anywhere, so this takes no lock and logs nothing."""
        before, now = self._before[number], time.monotonic()
        # A signal may reach a forked child before it has forgotten the watch. Then it must end the child, not be lost.
        is_ours = not self._is_over and os.getpid() == self._process
        if is_ours := is_ours and now - self._first_at.setdefault(number, now) < _SAME_S:
            self._reason = self._reason or f"{signal.Signals(number).name} to rank {self._rank}"
            self._wishes.put(self._reason)
        if callable(before) and not (is_ours and before is signal.default_int_handler):
            before(number, frame)
        elif not is_ours and before == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _run(self) -> None:
        """Ask again and again until it is decided: a rank whose connection broke has a new one after its next save."""
        is_looking = self._end_s is not None or self._file is not None
        while not self._is_over:
            with contextlib.suppress(Empty):
                self._wishes.get(timeout=_LOOK_S if is_looking or self._reason else None)
            if is_looking and not self._reason and (seen := self._seen()):
                self._reason = seen
            if self._reason and not self._is_over:
                self._agreement.request("stop", self._reason)

    def _seen(self) -> str:
        if self._end_s is not None and self._clock() >= self._end_s - self.margin_s:
            return f"the allocation ends at {datetime.fromtimestamp(self._end_s).astimezone():%Y-%m-%d %H:%M:%S %z}"
        if self._file is not None and self._file_now() not in (None, self._old_file):
            return f"the file {self._file!r}"
        return ""

    def _file_now(self) -> tuple[int, int] | None:
        """What changes when the file is made anew or touched; None if there is none, or it cannot be seen."""
        status = None
        with contextlib.suppress(StorageError):
            status = posix.file_status(self._file) if self._file is not None else None
        return None if status is None else (status.st_ino, status.st_mtime_ns)


def ignore_stop_signals(worker: int = 0, *, signals: Sequence[str] = _SIGNALS) -> None:
    """Have this process, a worker of a data loader, ignore ``signals``: its rank gets them too, and ends it in time.

    For ``DataLoader(worker_init_fn=holdfast.ignore_stop_signals)``. A SIGTERM from the process that started this one
    still ends it. Processes that it starts itself begin with these signals blocked.
    """
    numbers, parent = {signal.Signals[name] for name in signals}, os.getppid()

    def wait() -> None:
        while True:
            said = signal.sigwaitinfo(numbers)
            if said.si_signo == signal.SIGTERM and said.si_pid == parent:
                os._exit(0)

    for number in numbers:
        signal.signal(number, lambda number, frame: None)  # other threads that exist already do not block them
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # only by waiting for a signal does one learn who sent it
    start_thread(threading.Thread(target=wait, name="holdfast-signals", daemon=True))
