"""Where a checkpoint is written: what a writer asks of a directory, and of a folder in an object store; and files that
are held there.

``DirectoryPlace`` in ``writer.py`` is the one, ``StorePlace`` in ``store_place.py`` the other.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from holdfast._io.mapping import FileImage, WrittenImage
from holdfast._native.manifest import Manifest
from holdfast._native.packer import Chunk, DataFile, Placed
from holdfast._native.publish import is_published
from holdfast._native.report import WrittenFile
from holdfast._process import forget_in_child
from holdfast._values.deadline import Progress


class Files(Protocol):
    """The data files of a save under way, whoever writes them."""

    def close(self) -> None:
        """Close the files, which ends the sign that their writer lives."""
        ...

    def abandon(self) -> None:
        """Close and remove the files."""
        ...


class Held:
    """The files of one attempt, open and locked, which tells others that their writer lives.

    They are let go when ``writer`` is gone, which tells of a failure where nobody else does; ``removing`` is for the
    coordinator, who knows that it did not publish, as others cannot. They are nothing to a forked child, whatever
    becomes of the child's copies of writer and finalizer.
    """

    def __init__(self, files: Files, path: str, attempt: str, *, writer: object, removing: bool) -> None:
        self.files = files
        self.attempt = attempt
        self._path = path
        self._is_closed = False
        self._is_inherited = False
        forget_in_child(self)
        self._when_forgotten = weakref.finalize(writer, self.remove if removing else self.close)

    def forget_parent(self) -> None:
        self._is_inherited = True

    def close(self) -> None:
        self._when_forgotten.detach()
        self._is_closed = True
        if not self._is_inherited:
            self.files.close()

    def remove(self) -> None:
        """Remove the files, unless they are let go already or part of what is published."""
        if not self._is_closed and not self._is_inherited and is_published(self._path, self.attempt) is False:
            self.files.abandon()
        self.close()


class ImageOutput(Files, Protocol):
    """Whoever writes file images from memory: this process, or another that has the same memory."""

    def write(self, files: Sequence[FileImage], memory: memoryview) -> list[WrittenImage]:
        """What was written, durably."""
        ...


class ChunkOutput(Files, Protocol):
    """Whoever writes chunks to files; then ``placed`` says where each went, and ``digests`` has those of all blocks."""

    placed: list[Placed]
    digests: list[int]

    def write(self, chunks: Iterable[Chunk], open_file: Callable[[int, int], DataFile]) -> list[WrittenFile]:
        """Write every chunk and return the durable files."""
        ...


class MakesPacker(Protocol):
    """``slabs`` buffers are used; ``on_filled`` is called when all bytes are copied."""

    def __call__(
        self, *, slabs: int, on_filled: Callable[[], None] | None = None, pinned: bool, progress: Progress
    ) -> ChunkOutput: ...


class SavePlace(Protocol):
    """Where one checkpoint goes. What only the coordinator may call says so."""

    packer: MakesPacker
    images: Callable[[Progress], ImageOutput]

    def begin(self, path: str, *, overwrite: bool) -> None:
        """Look at what is there, before anything is written; the coordinator calls it."""
        ...

    def missing_directories(self, path: str) -> Sequence[str]: ...

    def make(self, path: str) -> None:
        """Guarantee that files can be made."""
        ...

    def sync(self, path: str) -> None:
        """Return when the names of files are durable."""
        ...

    def rename(self, path: str, name: str, new_name: str) -> None: ...

    def publish(self, path: str, manifest: Manifest, tables: Sequence[bytes], *, overwrite: bool, marks: bool) -> None:
        """Make the checkpoint visible in one step; the coordinator calls it. ``tables`` as ``table_names`` has them."""
        ...

    def remove(self, path: str, attempt: str, names: Iterable[str]) -> None:
        """Remove the files ``names`` of an attempt that failed, unless they may be part of what is published."""
        ...

    def clear(self, path: str, attempt: str | None, directories: Sequence[str]) -> None:
        """Remove what an attempt that failed leaves, as far as that is for the caller, who has its own files gone."""
        ...
