"""How far a conversion is, and whether what becomes of its source is in proportion to it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping

from holdfast.errors import InvalidStateError

OnProgress = Callable[[int, int], None]

_MOST_GROWTH = 16
_ALWAYS_BYTES = 64 << 20


class Progress:
    """Counts bytes for whoever wants to know, from any thread; no more than ``max_bytes``, or what is in proportion."""

    def __init__(self, told: OnProgress | None, source: str | os.PathLike[str], max_bytes: int | None) -> None:
        self._told = told
        self._lock = threading.Lock()
        self._source = os.fspath(source)
        self._source_bytes = _bytes_at(self._source)
        self._most = max(_ALWAYS_BYTES, _MOST_GROWTH * self._source_bytes) if max_bytes is None else max_bytes
        self.done = 0
        self.total = 0

    def expect(self, sizes: Mapping[str, int]) -> None:
        """Take the bytes of all tensors that will be written, by key; InvalidStateError when they are too many."""
        self.total = sum(sizes.values())
        if self.total > self._most:
            key = max(sizes, key=sizes.__getitem__)
            raise InvalidStateError(
                f"{self._source!r} has {self._source_bytes} bytes and would become {self.total}, {sizes[key]} of them "
                f"for {key[:200]!r}, more than {self._most}; pass max_bytes={self.total} if you want that",
                key=key,
            )

    def add(self, nbytes: int) -> None:
        """So many more are done."""
        with self._lock:
            self.done += nbytes
            if self._told is not None:
                self._told(self.done, max(self.total, self.done))


def _bytes_at(path: str) -> int:
    """The bytes of a file, or of the files in a directory and below."""
    if os.path.isfile(path):
        return os.path.getsize(path)
    return sum(os.lstat(os.path.join(folder, name)).st_size for folder, _, names in os.walk(path) for name in names)
