"""Items of any file system, and items that went through stream transforms: read whole, through streams.

Files are read side by side, the items of one file one after the other in file order. Memory is that of one item for
each of few files.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Protocol

from holdfast._filesystem.base import FileSystemBase, PathLike
from holdfast._filesystem.delivery import Delivery, Item, buffer_of
from holdfast._io.pipeline import run_bounded
from holdfast._values import forks
from holdfast.errors import CheckpointError, CorruptError, StorageError, UnsupportedVersionError

_FILES_AT_ONCE = 4


class TransformRegistry(Protocol):
    """What knows stream transforms by their descriptors, as torch's ExtensionRegistry does."""

    def from_descriptor_list(self, descriptors: Iterable[str]) -> Sequence[Any]:
        """The transforms, each with ``transform_from(stream)``, in the order to be applied."""
        ...


class StreamRead:
    """One batch of reads through streams of ``fs``; ``bytes_read`` counts what came."""

    def __init__(
        self, fs: FileSystemBase, directory: PathLike, delivery: Delivery, registry: TransformRegistry | None
    ) -> None:
        self._fs = fs
        self._directory = directory
        self._delivery = delivery
        self._registry = registry
        self._lock = forks.Lock()
        self.bytes_read = 0

    def run(self, items: Sequence[Item]) -> None:
        """Read and deliver ``items``."""
        by_file: dict[str, list[Item]] = {}
        for item in sorted(items, key=lambda each: (each.place.relative_path, each.place.offset)):
            by_file.setdefault(item.place.relative_path, []).append(item)
        jobs = (partial(self._read_file, name, items) for name, items in by_file.items())
        run_bounded(jobs, workers=_FILES_AT_ONCE, ahead=0)

    def _read_file(self, name: str, items: list[Item]) -> None:
        path = self._fs.concat_path(self._directory, name)
        try:
            with self._fs.create_stream(path, "rb") as stream:
                for item in items:
                    self._deliver(item, self._transformed(item, self._read(stream, item)))
        except CheckpointError:
            raise
        except FileNotFoundError as error:
            raise CorruptError(f"{str(path)!r} is missing; use another checkpoint", path=str(path)) from error
        except OSError as error:
            raise StorageError.from_os(error, "read", str(path)) from error

    def _read(self, stream: Any, item: Item) -> bytes:
        place = item.place
        stream.seek(place.offset)
        pieces, missing = [], place.length
        while missing and (piece := stream.read(missing)):
            pieces.append(piece)
            missing -= len(piece)
        with self._lock:
            self.bytes_read += place.length - missing
        if missing:
            raise CorruptError(
                f"{place.relative_path!r} is truncated: it ends before byte {place.offset + place.length}; "
                "use another checkpoint",
                path=place.relative_path,
                key=item.key,
            )
        return b"".join(pieces)

    def _transformed(self, item: Item, data: bytes) -> bytes:
        descriptors = item.place.transform_descriptors
        if not descriptors:
            return data
        if self._registry is None:
            raise UnsupportedVersionError(
                f"{item.key!r} went through the stream transforms {list(descriptors)}; give FileSystemReader an "
                "_extension_registry that knows them"
            )
        try:
            stream: Any = io.BytesIO(data)
            for transform in self._registry.from_descriptor_list(descriptors):
                stream = transform.transform_from(stream)
            result: bytes = stream.read()
        except CheckpointError:
            raise
        except Exception as error:
            # Extensions are anyone's code, and say in their own ways that they do not know a name or cannot decode.
            raise CorruptError(
                f"the stream transforms {list(descriptors)} of {item.key!r} could not be undone: "
                f"{type(error).__name__}: {error}",
                path=item.place.relative_path,
                key=item.key,
            ) from error
        return result

    def _deliver(self, item: Item, data: bytes) -> None:
        # Planners expect one call at a time.
        with self._lock:
            if item.is_value:
                self._delivery.give_value(item, data)
                return
            tensors = self._delivery.resolve(item.rows)
            self._delivery.fill(item, tensors, buffer_of(data), 0, len(data))
            self._delivery.commit(item, tensors)
