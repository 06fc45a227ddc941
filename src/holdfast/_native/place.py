"""Where a checkpoint is written: what a writer asks of a directory, and of a folder in an object store;
and what a save in the background asks of a writer.

``DirectoryPlace`` in ``writer.py`` is the one, ``StorePlace`` in ``store_place.py`` the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableSequence, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

from holdfast._io.mapping import FileImage, WrittenImage
from holdfast._native.file_layout import StagedFiles
from holdfast._native.manifest import Manifest
from holdfast._native.packer import DataFile, Lane, Placed, Slabs
from holdfast._native.report import WrittenFile
from holdfast._values.deadline import Progress
from holdfast.planner import SavePlan, SavePlanner
from holdfast.storage import WriteResult


class Files(Protocol):
    """The data files of a save under way, whoever writes them."""

    def close(self) -> None:
        """Close the files, which ends the sign that their writer lives."""
        ...

    def abandon(self) -> None:
        """Close and remove the files."""
        ...


Proof: TypeAlias = Callable[[list[int]], None]
"""Is told the digests of all blocks that were written, in order."""


class ImageOutput(Files, Protocol):
    """Whoever writes file images from memory: this process, or another that has the same memory."""

    def write(self, files: Sequence[FileImage], memory: memoryview) -> list[WrittenImage]:
        """What was written, durably."""
        ...


@runtime_checkable
class ImageStorage(Protocol):
    """Storage whose files can be laid out in memory first, and be written from there by whoever has that memory."""

    def lay_out(self, plan: SavePlan, planner: SavePlanner, progress: Progress) -> StagedFiles: ...

    def image_output(self, progress: Progress) -> ImageOutput: ...

    def check_for_process(self) -> None:
        """InvalidStateError where another process cannot write."""
        ...

    def write_staged(
        self, staged: StagedFiles, memory: memoryview, files: ImageOutput
    ) -> MutableSequence[WriteResult]: ...

    def stream_staged(
        self, staged: StagedFiles, max_bytes: int, on_copied: Callable[[], None], proof: Proof
    ) -> MutableSequence[WriteResult]: ...


class ChunkOutput(Files, Protocol):
    """Whoever writes chunks to files; then ``placed`` says where each went, and ``digests`` has those of all blocks."""

    placed: list[Placed]
    digests: list[int]

    def write(self, lanes: Sequence[Lane], open_file: Callable[[int, int], DataFile]) -> list[WrittenFile]:
        """Write every chunk and return the durable files."""
        ...


class MakesPacker(Protocol):
    """``slabs`` buffers are used; ``on_filled`` is called when all bytes are copied."""

    def __call__(
        self, *, slabs: Slabs, on_filled: Callable[[], None] | None = None, pinned: bool, progress: Progress
    ) -> ChunkOutput: ...


class SavePlace(Protocol):
    """Where one checkpoint goes. What only the coordinator may call says so."""

    packer: MakesPacker
    images: Callable[[Progress], ImageOutput]

    def begin(self, path: str, *, overwrite: bool) -> None:
        """Look at what is there, before anything is written; the coordinator calls it."""
        ...

    def is_in_memory(self, path: str) -> bool:
        """Whether only one thread at a time may write to each file there."""
        ...

    def missing_directories(self, path: str) -> Sequence[str]: ...

    def make(self, path: str) -> None:
        """Guarantee that files can be made."""
        ...

    def sync(self, path: str) -> None:
        """Return when the names of files are durable."""
        ...

    def rename(self, path: str, name: str, new_name: str) -> None: ...

    def publish(
        self, path: str, manifest: Manifest, tables: Mapping[str, bytes], *, overwrite: bool, marks: bool
    ) -> None:
        """Make the checkpoint visible in one step; the coordinator calls it. ``tables`` are other files, by name."""
        ...

    def remove(self, path: str, attempt: str, names: Iterable[str]) -> None:
        """Remove the files ``names`` of an attempt that failed, unless they may be part of what is published."""
        ...

    def clear(self, path: str, attempt: str | None, directories: Sequence[str]) -> None:
        """Remove what an attempt that failed leaves, as far as that is for the caller, who has its own files gone."""
        ...
