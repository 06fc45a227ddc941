"""How the bytes of a state come into host memory: at the call, behind its back, or by way of a clone on the device.

Invariant: ``begin`` runs on the calling thread and ``finish`` on any; once both are through, or ``wait`` has returned,
the memory holds the snapshot and no tensor of the state is looked at again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Literal

import torch

from holdfast._io.pipeline import run_bounded
from holdfast._native.image import Copy
from holdfast._staging.accelerator import Accelerator, Transfer
from holdfast._staging.memory import Region

logger = logging.getLogger("holdfast")

Mode = Literal["copy", "overlap", "device"]

_JOB_BYTES = 8 << 20
_MOST_THREADS = 8


class Staging:
    """The copies of one save into ``region``.

    ``mode`` says what ``begin`` leaves to ``finish``: nothing ("copy"), everything but the chunks named in ``at_once``
    ("overlap"), or what it has cloned on the device ("device"). ``copies`` is emptied when they are done.
    ``advance`` is told, from any thread, how many bytes more have been copied within the host.
    """

    def __init__(
        self,
        copies: list[Copy],
        region: Region,
        *,
        mode: Mode,
        accelerator: Accelerator,
        at_once: Collection[str] = (),
        advance: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        self._copies = copies
        self._region = region
        self._mode = mode
        self._accelerator = accelerator
        self._at_once = at_once
        self._advance = advance
        self._transfer: Transfer | None = None
        self._later: list[Copy] = []
        self._copied: Future[None] = Future()

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to copy."""
        return self._mode == "copy" and self._copied.done()

    def begin(self) -> None:
        """Order the copies behind what the caller's streams have queued, and do those that cannot wait."""
        remote = [copy for copy in self._copies if self._accelerator.holds(copy.source)]
        local = [copy for copy in self._copies if not self._accelerator.holds(copy.source)]
        if remote:
            self._region.pin(self._accelerator)
        if self._mode == "overlap":
            self._copy_now([copy for copy in remote if copy.name in self._at_once])
            remote = [copy for copy in remote if copy.name not in self._at_once]
            self._later = [copy for copy in local if copy.name not in self._at_once]
            local = [copy for copy in local if copy.name in self._at_once]
        if remote:
            self._transfer = self._accelerator.transfer(remote, self._region.tensor)
        if self._transfer is not None and self._mode == "device" and not self._transfer.clone():
            logger.warning("the device has no room for a clone of the state; it is copied to the host instead")
            self._mode = "copy"
        if self._mode != "copy":
            copy_in_parallel(local, self._region, self._advance)
            return
        if self._transfer is not None:
            self._transfer.issue()
        self._copy_beside(local)
        self._end()

    def _copy_now(self, remote: Sequence[Copy]) -> None:
        if remote:
            transfer = self._accelerator.transfer(remote, self._region.tensor)
            transfer.issue()
            transfer.wait()

    def finish(self) -> None:
        """Do the rest; returns when the memory holds all of it."""
        if self.is_done:
            return
        try:
            if self._transfer is not None:
                self._transfer.issue()
            self._copy_beside(self._later)
            self._end()
        except BaseException as error:
            self.cancel(error)
            raise

    def cancel(self, error: BaseException | None = None) -> None:
        """Let nobody wait for copies that will not come; what is done already stays done."""
        if not self._copied.done():
            self._copied.set_exception(error or CancelledError())

    def _copy_beside(self, local: Sequence[Copy]) -> None:
        """Copy within the host while the devices copy."""
        try:
            copy_in_parallel(local, self._region, self._advance)
        except BaseException:
            if self._transfer is not None:
                self._transfer.wait()  # the memory is the next save's only when nothing is on its way there
            raise

    def _end(self) -> None:
        if self._mode != "overlap" and self._transfer is not None:
            self._transfer.wait()
        # What is in the host's memory may change from here on; what is on a device, once it is fenced.
        self._copied.set_result(None)
        if self._mode == "overlap" and self._transfer is not None:
            self._transfer.wait()
        self._copies.clear()
        self._later = []

    def fence(self) -> None:
        """Return when the tensors may be changed by what the caller's streams get from here on; never raises."""
        if self._mode == "device" and self._transfer is not None:
            return  # the clone is in the caller's stream
        if self._copied.exception() is None and self._transfer is not None and self._mode == "overlap":
            self._transfer.fence()


def copy_in_parallel(
    copies: Sequence[Copy], region: Region, advance: Callable[[int], None] = lambda nbytes: None
) -> None:
    """Copy from host memory to host memory with the threads that torch may use; ``advance`` is told of each piece."""
    threads = min(_MOST_THREADS, torch.get_num_threads())
    jobs = list(_jobs(copies, region, advance))
    if threads == 1 or len(jobs) == 1:
        for job in jobs:
            job()
    elif jobs:
        # This thread takes its share as soon as all are handed out.
        run_bounded(jobs, workers=threads - 1, ahead=len(jobs))


def _jobs(copies: Sequence[Copy], region: Region, advance: Callable[[int], None]) -> Iterator[Callable[[], None]]:
    """Pieces of large copies, and small ones together."""
    small: list[Copy] = []
    held = 0
    for copy in copies:
        nbytes = copy.source.nbytes
        if nbytes > _JOB_BYTES:
            for start in range(0, nbytes, _JOB_BYTES):
                stop = min(start + _JOB_BYTES, nbytes)
                yield partial(_copy_part, copy, start, stop, region, advance)
            continue
        small.append(copy)
        held += nbytes
        if held >= _JOB_BYTES:
            yield partial(_copy_all, small, region, advance)
            small, held = [], 0
    if small:
        yield partial(_copy_all, small, region, advance)


def _copy_part(copy: Copy, start: int, stop: int, region: Region, advance: Callable[[int], None]) -> None:
    copy.source.copy_out(start, stop, region, copy.at + start)
    advance(stop - start)


def _copy_all(copies: Sequence[Copy], region: Region, advance: Callable[[int], None]) -> None:
    for copy in copies:
        copy.source.copy_out(0, copy.source.nbytes, region, copy.at)
    advance(sum(copy.source.nbytes for copy in copies))
