"""What a store server holds: objects, uploads that have begun, and the requests that it was asked. Knows no HTTP.

The memory of an object that is deleted or replaced is used again at once, even while someone still reads it.
"""

from __future__ import annotations

import bisect
import hashlib
import mmap
import os
import sys
import threading
import time
from collections import defaultdict
from typing import NamedTuple

_HUGE_PAGE = 2 << 20
_NO_RESERVE = 0x4000  # MAP_NORESERVE: addresses alone; Python 3.10 has no name for it
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, likewise
_AFTER = chr(sys.maxunicode)  # sorts after every letter of a key


class Request(NamedTuple):
    """One request as the server saw it: ``name`` is bucket/key or bucket/prefix, ``nbytes`` those of both bodies."""

    operation: str
    name: str
    status: int
    nbytes: int


class Refused(Exception):
    """The request ends with this status, and S3's code for it."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status = status
        self.code = code


class Piece(NamedTuple):
    """A body as it was received: kept as bytes, kept in the arena, or gone."""

    length: int
    contents: bytes | None = None
    place: int | None = None

    @property
    def is_gone(self) -> bool:
        return self.contents is None and self.place is None


class StoredObject(NamedTuple):
    """What is under a name, and since when."""

    pieces: tuple[Piece, ...]
    size: int
    e_tag: str
    modified_s: float


class Arena:
    """Memory that is used again, because touching fresh pages would cost more than all else the server does."""

    def __init__(self, reserve: int) -> None:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _HUGE_PAGE * _HUGE_PAGE
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
        memory.madvise(mmap.MADV_HUGEPAGE)
        if reserve:
            memory.madvise(_POPULATE_WRITE, 0, min(size, reserve))
        self.view = memoryview(memory)
        self._end = 0
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        self._lock = threading.Lock()

    def take(self, length: int) -> int:
        size = -(-length // _HUGE_PAGE) * _HUGE_PAGE
        with self._lock:
            if self._free[size]:
                return self._free[size].pop()
            if self._end + size > len(self.view):
                raise Refused(507, "OutOfMemory")
            self._end += size
            return self._end - size

    def copy(self, piece: Piece) -> Piece:
        if piece.place is None:
            return piece
        place = self.take(piece.length)
        self.view[place : place + piece.length] = self.view[piece.place : piece.place + piece.length]
        return Piece(piece.length, place=place)

    def give_back(self, pieces: tuple[Piece, ...]) -> None:
        with self._lock:
            for piece in pieces:
                if piece.place is not None:
                    self._free[-(-piece.length // _HUGE_PAGE) * _HUGE_PAGE].append(piece.place)


class Bucket:
    """All objects, uploads and requests; a name is bucket/key. Each call is atomic."""

    def __init__(self, arena: Arena) -> None:
        self.requests: list[Request] = []
        self._arena = arena
        self._objects: dict[str, StoredObject] = {}
        self._names: list[str] | None = []
        self._uploads: dict[str, dict[int, tuple[str, Piece]]] = {}
        self._made = 0
        self._lock = threading.RLock()

    def put(self, name: str, pieces: tuple[Piece, ...], head: dict[str, str]) -> str:
        """The e_tag of the new object, if the conditions in ``head`` hold."""
        with self._lock:
            old = self._objects.get(name)
            wanted = head.get("if-match")
            if (old is not None and head.get("if-none-match") == "*") or (wanted and old and wanted != old.e_tag):
                self._arena.give_back(pieces)
                raise Refused(412, "PreconditionFailed")
            if wanted and old is None:
                self._arena.give_back(pieces)
                raise Refused(404, "NoSuchKey")
            if old is None:
                self._names = None
            else:
                self._arena.give_back(old.pieces)
            size = sum(piece.length for piece in pieces)
            if any(piece.is_gone for piece in pieces):
                pieces = (Piece(size),)
            small = pieces[0].contents if len(pieces) == 1 else None
            # As S3 has it: of a small body the digest, of others anything.
            e_tag = self._new_tag() if small is None else f'"{hashlib.md5(small, usedforsecurity=False).hexdigest()}"'
            self._objects[name] = StoredObject(pieces, size, e_tag, time.time())
            return e_tag

    def find(self, name: str) -> StoredObject:
        try:
            return self._objects[name]
        except KeyError:
            raise Refused(404, "NoSuchKey") from None

    def copy(self, source: str, name: str, head: dict[str, str]) -> str:
        with self._lock:
            return self.put(name, tuple(map(self._arena.copy, self.find(source).pieces)), head)

    def delete(self, name: str) -> None:
        with self._lock:
            if (old := self._objects.pop(name, None)) is not None:
                self._names = None
                self._arena.give_back(old.pieces)

    def create_upload(self) -> str:
        with self._lock:
            upload = self._new_tag().strip('"')
            self._uploads[upload] = {}
            return upload

    def put_part(self, upload: str, number: int, piece: Piece) -> str:
        with self._lock:
            e_tag = self._new_tag()
            parts = self._find_upload(upload)
            if number in parts:
                self._arena.give_back((parts[number][1],))
            parts[number] = e_tag, piece
            return e_tag

    def complete_upload(self, name: str, upload: str, wanted: list[tuple[int, str]], head: dict[str, str]) -> str:
        with self._lock:
            parts = self._find_upload(upload)
            if [(number, parts[number][0]) for number, _ in wanted if number in parts] != wanted or not wanted:
                raise Refused(400, "InvalidPart")
            e_tag = self.put(name, tuple(parts.pop(number)[1] for number, _ in wanted), head)
            self.abort_upload(upload)
            return e_tag

    def abort_upload(self, upload: str) -> None:
        with self._lock:
            self._arena.give_back(tuple(piece for _, piece in self._find_upload(upload).values()))
            del self._uploads[upload]

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            for name in list(self._objects):
                self.delete(name)
            for upload in list(self._uploads):
                self.abort_upload(upload)
            self.requests = []

    def page(self, prefix: str, after: str, delimiter: str, most: int) -> tuple[list[str], list[str], str]:
        """Names and common prefixes that begin with ``prefix`` and come after ``after``; where the next page begins."""
        with self._lock:
            if self._names is None:
                self._names = sorted(self._objects)
            listed = self._names
        names: list[str] = []
        folders: list[str] = []
        at = max(bisect.bisect_left(listed, prefix), bisect.bisect_right(listed, after))
        while at < len(listed) and listed[at].startswith(prefix):
            if len(names) + len(folders) == most:
                return names, folders, after
            cut = listed[at].find(delimiter, len(prefix)) if delimiter else -1
            if cut < 0:
                names.append(listed[at])
                after = listed[at]
            else:
                folders.append(listed[at][: cut + len(delimiter)])
                after = folders[-1] + _AFTER
            at = bisect.bisect_right(listed, after, lo=at)
        return names, folders, ""

    def _new_tag(self) -> str:
        self._made += 1
        return f'"{self._made:032x}"'

    def _find_upload(self, upload: str) -> dict[int, tuple[str, Piece]]:
        try:
            return self._uploads[upload]
        except KeyError:
            raise Refused(404, "NoSuchUpload") from None
