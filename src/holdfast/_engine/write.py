"""Files as jobs of whole pages: how bytes from many sources reach a file that is written past the page cache.

Nothing is shared between jobs: each has its bytes copied into a slab of its own and writes whole pages. Where the last
byte lies inside a page, the next job writes that page, with the bytes that this one has in its slab. So what was
looked at in the slab (hashed, say) is what is written, whatever happens to the sources meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from holdfast._io.direct import ALIGNMENT, OutputFile
from holdfast._io.slabs import Slab, SlabRing
from holdfast._process import Event
from holdfast._values.deadline import Progress

Job = TypeVar("Job", bound="PageJob")


@dataclass(slots=True)
class PageJob:
    """Bytes of one file up to ``end``; ``before`` has those ahead of the first, from the start of its page on.

    What the bytes are is a subclass's to say.
    """

    file: OutputFile
    base: int
    end: int
    before: PageJob | None = None
    is_last: bool = False
    tail: bytes = b""
    is_filled: Event = field(default_factory=Event)


def following(job: Job) -> Job:
    """The job after ``job`` in its file: from the page that ``job`` leaves unfinished."""
    return type(job)(job.file, job.end - job.end % ALIGNMENT, job.end, job)


def filled_slab(job: Job, ring: SlabRing, fill: Callable[[Job, Slab], None]) -> Slab:
    """A slab into which ``fill`` has put the bytes of ``job``."""
    try:
        slab = ring.acquire()
        try:
            fill(job, slab)
        except BaseException:
            ring.release(slab)
            raise
        filled = job.end - job.base
        job.tail = bytes(slab.view[filled - filled % ALIGNMENT : filled])
        return slab
    finally:
        # Also after an error: the next job must not wait for ever.
        job.is_filled.set()


def write_pages(job: PageJob, slab: Slab, ring: SlabRing, progress: Progress) -> None:
    """Write the whole pages of ``job``; a last one that is not whole is the next job's, or padded at the file's end."""
    try:
        if job.before is not None:
            # What it left on the page where this job begins. Jobs start in order and fill their slab before they wait,
            # so this ends.
            job.before.is_filled.wait()
            slab.view[: len(job.before.tail)] = job.before.tail
            job.before = None
        filled = job.end - job.base
        if job.is_last:
            padding = -filled % ALIGNMENT
            slab.view[filled : filled + padding] = bytes(padding)
            filled += padding
        filled -= filled % ALIGNMENT
        job.file.write(slab.view[:filled], job.base)
        progress.moved(filled)
    finally:
        ring.release(slab)
