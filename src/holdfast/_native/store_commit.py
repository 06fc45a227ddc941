"""The commit in an object store: one conditional put of ``manifest.json``, always read back.

Of seven things that may happen to such a request, the answer is wrong in five. So what is there afterwards decides, and
where nothing has changed the put is repeated. Where it cannot be read, or nothing has changed in the end, nobody knows
whether a put that was sent arrives later: that is UncertainError, and then nothing may be removed.

No manifest is ever removed, or replaced without a condition. That of a checkpoint that was deleted says so, and stays:
it counts as none.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from holdfast._io.stores import Version, store_of
from holdfast._native.manifest import decode_summary, is_retired
from holdfast._native.publish import MANIFEST_NAME
from holdfast._values.dtypes import MAX_MANIFEST_BYTES
from holdfast.errors import CheckpointError, CorruptError, StorageError, UncertainError, UnsupportedVersionError

_TRIES, _PAUSE_S = 5, 0.1
_LEAST_PART, _MOST_DIFFERING = 64, 4
PROBE_NAME = ".holdfast/probe"
_SAYING = b"Holdfast tries here whether the store keeps to the condition of a put. This object may stay.\n"
_OTHER_VERSION = {"e_tag": '"0123456789abcdef"', "version": "1"}  # Google Cloud Storage asks for the latter


class Head(NamedTuple):
    """The manifest that is there, as bytes, and what tells it from others."""

    data: bytes
    version: Version

    @property
    def is_live(self) -> bool:
        """Whether it is that of a checkpoint."""
        return not is_retired(self.data)


def read_head(directory: str) -> Head | None:
    """What is there now."""
    try:
        data, found = store_of(directory).get(f"{directory}/{MANIFEST_NAME}", limit=MAX_MANIFEST_BYTES)
    except StorageError as error:
        if error.errno != errno.ENOENT:
            raise
        return None
    return Head(bytes(data), found.version)


def commit(directory: str, data: bytes, before: Head | None, may_replace: Callable[[Head], bool]) -> Head:
    """Put ``data`` in place of ``before``, or of what else comes there that it ``may_replace``.

    Returns what is there then: that is ``data``, or what it may not replace.
    """
    store, url = store_of(directory), f"{directory}/{MANIFEST_NAME}"
    failures: list[StorageError] = []
    for number in range(_TRIES):
        time.sleep(_PAUSE_S * number)  # a conflict with another put passes
        try:
            store.put_if(url, data, None if before is None else before.version)
        except StorageError as error:
            failures.append(error)
        try:
            now = _read_back(directory, data, before)
        except CheckpointError as error:
            raise _uncertain(directory, error) from error
        # Where nothing seems to be there, the next put shows if that is so.
        if now is not None and (now.data == data or not (_is_nearly(now.data, data) or may_replace(now))):
            return now
        if failures and all(failure.errno == errno.EACCES for failure in failures):
            raise failures[0]  # a store that refuses it has not done it
        before = now
    raise _uncertain(directory, failures[-1] if failures else None)


def _read_back(directory: str, data: bytes, before: Head | None) -> Head | None:
    """What is there now; CorruptError if it cannot be told from damage on its way, however often it is read."""
    for tries_left in reversed(range(_TRIES)):
        now = read_head(directory)
        if now is None or now == before or not now.is_live or _is_nearly(now.data, data):
            return now
        try:
            decode_summary(now.data, path=f"{directory}/{MANIFEST_NAME}")
        except CorruptError:
            if not tries_left:
                raise
        except UnsupportedVersionError:  # whole, and of a newer holdfast
            return now
        else:
            return now
    return None


def _is_nearly(found: bytes, data: bytes) -> bool:
    """Whether this is ``data``, or was on its way: cut short, or with a few other bytes. Other attempts differ more."""
    if not _LEAST_PART <= len(found) <= len(data):
        return False
    differing = np.frombuffer(found, np.uint8) != np.frombuffer(data[: len(found)], np.uint8)
    return int(np.count_nonzero(differing)) <= _MOST_DIFFERING


def _uncertain(directory: str, reason: CheckpointError | None) -> UncertainError:
    why = "the store answers, and does not keep it" if reason is None else reason.message
    return UncertainError(
        f"nobody can tell whether the change of {directory!r} was made ({why}); nothing was removed: look what is "
        "there before you try again",
        path=directory,
    )


def prove(path: str) -> None:
    """See that the store keeps to the condition of a put, once in a process; StorageError if not, unless it need not.

    It is tried beside ``path``.
    """
    store = store_of(path)
    if not store.is_safe or store.is_proven:
        return
    parent = path.rpartition("/")[0]
    probe = f"{parent if parent.startswith(store.base) else path}/{PROBE_NAME}"
    is_kept = not (store.put_if(probe, _SAYING, None) and store.put_if(probe, _SAYING, None))
    if not is_kept or store.put_if(probe, _SAYING, _OTHER_VERSION):
        raise StorageError(
            f"the store of {path!r} ignores the condition of a put, so two saves could replace each other unseen; use "
            "another store, or Store(url, conditional='unsafe'), which only reads back what was published",
            errno=errno.ENOTSUP,
            path=path,
        )
    store.is_proven = True
