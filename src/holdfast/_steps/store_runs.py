"""The steps of a run in an object store: requests are few, and there are no locks.

One listing of a step's folder tells whether it is there, pinned, and has all its files. The newest step is found with
four requests or less, however many there are; all steps are found with one listing of the whole run.

Readers hold a step by an object that they renew. It counts as long as it is not old, by the clock of the store and
this one, which may differ by some minutes. Whoever deletes makes the step invisible before it looks for readers, and a
reader looks for the step again after it has put its object: so one of the two sees the other.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, nullcontext

from holdfast._io.stores import Found as FoundObject
from holdfast._io.stores import store_of
from holdfast._native.delete import DeleteReport, delete_at_url
from holdfast._native.leftovers import METRICS_NAME, PINNED_NAME, READERS_NAME, attempts_in
from holdfast._native.manifest import MOST_TOMBSTONE_BYTES, Summary
from holdfast._native.publish import MANIFEST_NAME, read_summary
from holdfast._native.store_removal import finish_deletion_in_store
from holdfast._process import Once, start_thread
from holdfast._steps.runs import FOLDER, MOST_NOTE_BYTES, STEP_NAME, Found
from holdfast.errors import BusyError, CorruptError, StorageError, UnsupportedVersionError

logger = logging.getLogger("holdfast")

_HOLD_S = 6 * 3600.0
"""So long a reader's object holds a step, unless it is renewed."""
_RENEW_S = 1800.0
_TRIES = 10


class RunInStore:
    """A folder in an object store."""

    looks_at_once = 16

    def __init__(self, root: str) -> None:
        self.root = root
        self._store = store_of(root)
        self._seen: dict[int, dict[str, int]] = {}
        """The objects of each step, and their sizes, when it was last found."""

    def _path(self, number: int) -> str:
        return f"{self.root}/step-{number}"

    def numbers(self) -> list[int]:
        folders, _ = self._store.folder(self.root)
        return sorted(int(match[1]) for match in map(STEP_NAME.fullmatch, folders) if match is not None)

    def found(self) -> list[Found]:
        steps = self._all()
        found = [(number, self._identity(number, objects)) for number, objects in sorted(steps.items())]
        return [(number, identity) for number, identity in found if identity is not None]

    def found_descending(self) -> Iterator[Found]:
        for number in reversed(self.numbers()):
            _, objects = self._store.folder(self._path(number))
            identity = self._identity(number, objects)
            if identity is not None:
                yield number, identity

    def _all(self) -> dict[int, list[FoundObject]]:
        """The objects right in the folder of each step, by one listing."""
        steps: dict[int, list[FoundObject]] = defaultdict(list)
        for each in self._store.listed(self.root):
            folder, _, name = each.name.partition("/")
            match = STEP_NAME.fullmatch(folder)
            if match is not None and "/" not in name:
                steps[int(match[1])].append(each._replace(name=name))
        return steps

    def _identity(self, number: int, objects: list[FoundObject]) -> Hashable:
        """What tells the manifest among ``objects`` from others; None where it is none of a checkpoint."""
        self._seen[number] = {each.name: each.bytes for each in objects}
        manifest = next((each for each in objects if each.name == MANIFEST_NAME), None)
        # A shorter one says that the checkpoint was deleted.
        if manifest is None or manifest.bytes <= MOST_TOMBSTONE_BYTES:
            return None
        return tuple(manifest.version.items()), manifest.modified_s, manifest.bytes

    def reported(self, number: int) -> bytes | None:
        has_any = METRICS_NAME in self._seen[number]
        return self._with_version(f"{self._path(number)}/{METRICS_NAME}")[0] if has_any else None

    def is_pinned(self, number: int) -> bool:
        return PINNED_NAME in self._seen[number]

    def is_whole(self, number: int, known: Summary | None) -> bool:
        sizes = self._seen[number]
        try:
            summary = known or read_summary(self._path(number))[0]
        except (CorruptError, UnsupportedVersionError):
            return False
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise
            return False
        files = [(file.name, file.bytes) for file in summary.files]
        return all(sizes.get(name) == nbytes for name, nbytes in [(summary.index.name, summary.index.bytes), *files])

    def locked(self, number: int) -> AbstractContextManager[object]:
        return nullcontext()

    def change(self, number: int, change: Callable[[bytes | None], bytes]) -> None:
        url = f"{self._path(number)}/{METRICS_NAME}"
        for _ in range(_TRIES):
            data, version = self._replaceable(url)
            new = change(data)
            failure: StorageError | None = None
            try:
                self._store.put_if(url, new, version)
            except StorageError as error:
                failure = error
            # Whatever the answer was, what is there now decides.
            if self._with_version(url)[0] == new:
                return
            if failure is not None:
                raise failure
        raise BusyError(f"others change {url!r} at the same time, again and again; try it later")

    def _with_version(self, url: str) -> tuple[bytes | None, dict[str, str] | None]:
        try:
            data, found = self._store.get(url, limit=MOST_NOTE_BYTES)
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise
            return None, None
        return bytes(data), found.version

    def _replaceable(self, url: str) -> tuple[bytes | None, dict[str, str] | None]:
        """The same; what is too large for one of ours counts as nothing, as the listing has logged."""
        try:
            return self._with_version(url)
        except CorruptError:
            found = self._store.head(url)
            return None, None if found is None else found.version

    def pin(self, number: int) -> None:
        self._store.put(f"{self._path(number)}/{PINNED_NAME}", b"")

    def unpin(self, number: int) -> None:
        self._store.delete([f"{self._path(number)}/{PINNED_NAME}"])

    def held(self) -> set[int]:
        limit = time.time() - _HOLD_S
        notes = [each.name for each in self._store.listed(f"{self.root}/{READERS_NAME}") if each.modified_s > limit]
        matches = map(STEP_NAME.fullmatch, (name.rpartition("/")[2] for name in notes))
        return {int(match[1]) for match in matches if match is not None}

    def delete(self, number: int, why_it_stays: Callable[[], str], *, force: bool) -> DeleteReport:
        reason = why_it_stays()
        if reason:
            raise BusyError(reason)
        return delete_at_url(self._path(number), force=force, why_it_stays=why_it_stays)

    def finish_deletions(self) -> None:
        for number, objects in self._all().items():
            sizes = {each.name: each.bytes for each in objects}
            is_retired = 0 < sizes.get(MANIFEST_NAME, 0) <= MOST_TOMBSTONE_BYTES
            if is_retired and len(sizes) > 1:
                finish_deletion_in_store(self._path(number))

    def claim(self) -> Callable[[], None]:
        """There are no locks: say so, and say who was here before and did not end in order."""
        url = f"{self.root}/{FOLDER}/manager"
        before = self._with_version(url)[0]
        if before is not None:
            logger.warning(
                "another CheckpointManager of %r was not closed: %s; if it still runs, end it: two of them would "
                "delete and replace each other's steps, and an object store has no locks that could tell",
                self.root,
                before.decode(errors="replace").strip()[:200],
            )
        self._store.put(url, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        return lambda: self._unclaim(url)

    def _unclaim(self, url: str) -> None:
        try:
            self._store.delete([url])
        except StorageError as error:
            logger.warning("the next CheckpointManager will take this one for one that runs: %s", error)

    def remove_leftovers(self) -> None:
        """Nothing can be proven dead: tell of it."""
        count = nbytes = 0
        for number, objects in self._all().items():
            sizes = {each.name: each.bytes for each in objects}
            left = attempts_in(sizes)
            if self._identity(number, objects) is not None:
                left.pop(read_summary(self._path(number))[0].attempt if len(left) > 1 else next(iter(left), ""), None)
            count += len(left)
            nbytes += sum(sizes[name] for names in left.values() for name in names)
        if count:
            logger.warning(
                "%r has %.1f GB of %d saves that were not published; `holdfast sweep` shows them, and removes those "
                "that you name",
                self.root,
                nbytes / 1e9,
                count,
            )

    def put(self, name: str, data: bytes) -> None:
        self._store.put(f"{self.root}/{FOLDER}/{name}", data)


class ReaderInStore:
    """A reader of the run in ``root``, which holds at most one step."""

    def __init__(self, root: str) -> None:
        self._store = store_of(root)
        self._folder = f"{root}/{READERS_NAME}/reader-{secrets.token_hex(8)}"
        self._held: str | None = None
        self._is_over = Once()
        self._lock = threading.Lock()

    def hold(self, step: str, attempt: str) -> str | None:
        """Hold the ``step``, and return where it can be read; None if it was deleted, or saved again, meanwhile."""
        self._held = held = f"{self._folder}/{step.rpartition('/')[2]}"
        self._store.put(held, b"")
        try:
            if read_summary(step)[0].attempt == attempt:
                self._is_over = is_over = Once()
                start_thread(threading.Thread(target=self._renew, args=(held, is_over), daemon=True))
                return step
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise
        self.release()
        return None

    def _renew(self, held: str, is_over: Once) -> None:
        while not is_over.wait(_RENEW_S):
            # There are several tries before it is old.
            with contextlib.suppress(StorageError), self._lock:
                if self._held == held:
                    self._store.put(held, b"")

    def release(self) -> None:
        """Hold nothing any more. May be called again."""
        self._is_over.set()
        with self._lock:
            held, self._held = self._held, None
            if held is not None:
                self._store.delete([held])

    def close(self) -> None:
        """End as a reader. May be called again. What cannot be removed now counts until it is old."""
        with contextlib.suppress(StorageError):
            self.release()
