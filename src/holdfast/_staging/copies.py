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
from holdfast._values.digest import BLOCK_BYTES, digest

logger = logging.getLogger("holdfast")

Mode = Literal["copy", "overlap", "device"]

_JOB_BYTES = 8 << 20  # whole blocks
_MOST_THREADS = 8


class Staging:
    """The copies of one save into ``region``.

    ``mode`` says what ``begin`` leaves to ``finish``: nothing ("copy"), everything but the chunks named in ``at_once``
    ("overlap"), or what it has cloned on the device ("device"). ``copies`` is emptied when they are done.
    ``advance`` is told, from any thread, how many bytes more have been copied within the host. ``digests`` is given, by
    its place in the region, the digest of each block that was copied within the host, where it costs next to nothing.
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
        digests: dict[int, int] | None = None,
    ) -> None:
        self._copies = copies
        self._region = region
        self._mode = mode
        self._accelerator = accelerator
        self._at_once = at_once
        self._copier = HostCopier(region, advance, digests)
        self._transfer: Transfer | None = None
        self._later: list[Copy] = []
        self._copied: Future[None] = Future()

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to copy."""
        return self._mode == "copy" and self._copied.done()

    def begin(self) -> None:
        """Order the copies behind what the caller's streams have queued, and do those that cannot wait."""
        local: list[Copy] = []
        remote: list[Copy] = []
        for copy in self._copies:
            (remote if self._accelerator.holds(copy.source) else local).append(copy)
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
            self._copier.copy(local)
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
            self._copier.copy(local)
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


class HostCopier:
    """Copies from host memory into ``region`` with the threads that torch may use; the rest is as in ``Staging``.

    A block whose digest is wanted is hashed right after it was copied, while the processor's cache has it.
    """

    def __init__(self, region: Region, advance: Callable[[int], None], digests: dict[int, int] | None) -> None:
        self._region = region
        self._view = region.view
        self._advance = advance
        self._digests = digests

    def copy(self, copies: Sequence[Copy]) -> None:
        """Do all of ``copies``."""
        threads = min(_MOST_THREADS, torch.get_num_threads())
        jobs = list(self._jobs(copies))
        if threads == 1 or len(jobs) == 1:
            for job in jobs:
                job()
        elif jobs:
            # This thread takes its share as soon as all are handed out.
            run_bounded(jobs, workers=threads - 1, ahead=len(jobs))

    def _jobs(self, copies: Sequence[Copy]) -> Iterator[Callable[[], None]]:
        """Pieces of large copies, and small ones together."""
        small: list[Copy] = []
        held = 0
        for copy in copies:
            nbytes = copy.source.nbytes
            if nbytes > _JOB_BYTES:
                for start in range(0, nbytes, _JOB_BYTES):
                    yield partial(self._copy_part, copy, start, min(start + _JOB_BYTES, nbytes))
                continue
            small.append(copy)
            held += nbytes
            if held >= _JOB_BYTES:
                yield partial(self._copy_all, small)
                small, held = [], 0
        if small:
            yield partial(self._copy_all, small)

    def _copy_part(self, copy: Copy, start: int, stop: int) -> None:
        self._copy_blocks(copy, start, stop)
        self._advance(stop - start)

    def _copy_all(self, copies: Sequence[Copy]) -> None:
        for copy in copies:
            self._copy_blocks(copy, 0, copy.source.nbytes)
        self._advance(sum(copy.source.nbytes for copy in copies))

    def _copy_blocks(self, copy: Copy, start: int, stop: int) -> None:
        if self._digests is None:
            copy.source.copy_out(start, stop, self._region, copy.at + start)
            return
        for begin in range(start, stop, BLOCK_BYTES):
            end = min(begin + BLOCK_BYTES, stop)
            at = copy.at + begin
            copy.source.copy_out(begin, end, self._region, at)
            self._digests[at] = digest(self._view[at : at + end - begin])
