"""Sweeping: which files of saves that died are left in a tree of checkpoints, and removing just those.

A file is dead when it is named like one of an attempt, no published manifest needs it, and none of the attempt's
writers lives. A living writer holds the lock of each of its data files, and the one that publishes holds that of the
index from before it looks at the data files for the last time until the checkpoint has its name. So:

1. The published manifest is read; the attempt that it names is not touched. Where it cannot be read, nothing is.
2. If the lock of any data file, or of the index, is held, the attempt lives.
3. To remove, the lock of a data file is taken: a writer that has just made it waits, and its attempt is not published
   meanwhile. Then that of the index, which is made first where there is none: from now on nobody can publish the
   attempt. The manifest and the directory are looked at again, in case it was published or grew meanwhile; and the
   directory is synced, so that no power cut brings back a manifest that needs what is removed.
4. Data files go first, each under its lock, then the unpublished manifest, the index last. A publisher that comes too
   late finds the index taken, or its data files gone, and fails; one that came early has been seen in step 2.

Notes about two formats (see ``formats``) are dead where there are not two, and nobody has the turn to publish. Where
there are two that no note is about, that is a problem which only the user can solve.

A reader that holds steps of a run (see ``_steps/following.py``) is told from a dead one by the lock of its file. The
folder beside that file goes with it.

The folder of an export (see ``_io/folders.py``) that is named as one of an attempt is dead if nobody holds its lock.

An unpublished manifest exists only while its index is there and locked; without an index it will never be published.
Never follows a link, never touches a file that is named otherwise, and never relies on a clock or on the age of files.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Literal, cast

from holdfast import events
from holdfast._io import locks, posix
from holdfast._io.folders import attempt_of, remove_folder
from holdfast._io.locks import Directory, walk
from holdfast._io.urls import is_store_url
from holdfast._native.leftovers import Leftover, SweepReport, Verdict, attempts_in
from holdfast._native.manifest import decode_manifest, is_retired
from holdfast._native.publish import MANIFEST_NAME, format_at, formats_at
from holdfast._native.store_removal import sweep_store
from holdfast._process import Descriptor, Ending
from holdfast._torch_codec.metadata_file import NOTE_PREFIX, is_of_a_save
from holdfast._values.dtypes import MAX_MANIFEST_BYTES
from holdfast.errors import CheckpointError, CorruptError, NotFoundError, StorageError, UnsupportedVersionError

__all__ = ["Leftover", "SweepReport", "sweep"]


def sweep(root: str | os.PathLike[str], *, delete: bool = False, attempts: Collection[str] = ()) -> SweepReport:
    """Find what dead saves left in ``root`` and every directory below it; ``delete`` removes what is proven dead.

    ``attempts`` are ids that the caller knows to be dead, for file systems whose locks do not tell (shared ones, or
    ones without locks). Even those are left alone where a lock shows that a writer lives, or a manifest needs them.

    In an object store nothing tells that a saver is dead. There the report says how old the files are, and only the
    ``attempts`` that are named are removed, and what deletions left.

    Raises:
        NotFoundError: there is no directory ``root``.
    """
    root = posix.absolute(root)
    if is_store_url(root):
        return _told(sweep_store(root, delete=delete, named=frozenset(attempts)))
    if "://" in root:
        raise ValueError("only directories and object stores can be swept")
    leftovers: list[Leftover] = []
    problems: list[str] = []
    directories = 0
    try:
        for found in walk(root):
            if isinstance(found, StorageError):
                problems.append(found.message)
                continue
            directories += 1
            try:
                leftovers += sweep_directory(found, problems, delete=delete, named=frozenset(attempts))
            except StorageError as error:
                problems.append(error.message)
    except StorageError as error:
        if directories == 0 and error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise NotFoundError(f"there is no directory {root!r} to sweep") from error
        raise
    return _told(SweepReport(root=root, directories=directories, leftovers=tuple(leftovers), problems=tuple(problems)))


def _told(report: SweepReport) -> SweepReport:
    for each in report.leftovers:
        if each.removed:
            events.Operation("sweep", each.directory, attempt=each.attempt).tell("removed", nbytes=each.bytes)
    return report


class _NotDead(Exception):
    """Why an attempt is taken to live, or why nobody can tell; never leaves this module."""

    def __init__(self, verdict: Literal["living", "unknown"], reason: str) -> None:
        super().__init__(reason)
        self.verdict: Literal["living", "unknown"] = verdict


def sweep_directory(
    directory: Directory, problems: list[str], *, delete: bool, named: Collection[str] = ()
) -> Iterator[Leftover]:
    """What ``sweep`` does in one directory, as it is done."""
    try:
        format_at(directory.path)
    except CorruptError as error:
        problems.append(error.message)
    yield from _sweep_notes(directory, delete=delete)
    yield from _sweep_folder(directory, problems, delete=delete, named=named)
    for attempt, names in attempts_in(directory.names()).items():
        found = _Attempt(directory, attempt, names)
        leftover = found.examine(is_named=attempt in named)
        if leftover is not None and leftover.verdict == "dead" and delete:
            leftover = found.remove(leftover, problems)
        if leftover is not None:
            yield leftover


def living_writer(directory: Directory) -> str | None:
    """How one sees that a save to ``directory`` goes on, even if it is published by now; None where none does."""
    for attempt, names in attempts_in(directory.names()).items():
        try:
            _Attempt(directory, attempt, names).check_dead()
        except _NotDead as found:
            if found.verdict == "living":
                return str(found)
    return None


def release_all(directory: Directory, name: str) -> None:
    """Remove all that the reader holds whose lock is ``name``; of other names nothing."""
    folder = name.removesuffix(".lock")
    if folder == name or directory.status(folder) is None:
        return
    with directory.enter(folder) as steps:
        for step in steps.names():
            with steps.enter(step) as held:
                # A directory that has a manifest is no leftover for anybody else: so that goes last.
                for file in sorted(held.names(), key=lambda file: file == MANIFEST_NAME):
                    held.remove(file)
            steps.remove_directory(step)
    directory.remove_directory(folder)


def _sweep_notes(directory: Directory, *, delete: bool) -> Iterator[Leftover]:
    """The notes that nobody needs any more; whoever writes one has the turn to publish."""
    notes = [name for name in directory.names() if name.startswith(NOTE_PREFIX) and is_of_a_save(name)]
    if not notes or len(formats_at(directory.path)) == 2:
        return
    with directory.locked() as is_ours:
        for note in notes if is_ours and len(formats_at(directory.path)) < 2 else ():
            status = directory.status(note)
            if delete:
                directory.remove(note)
            yield Leftover(
                directory=directory.path,
                attempt=note.removeprefix(NOTE_PREFIX).removesuffix(".tmp"),
                files=(note,),
                bytes=0 if status is None else status.st_size,
                verdict="dead",
                reason="one format has replaced the other",
                removed=(note,) if delete else (),
            )


def _sweep_folder(
    directory: Directory, problems: list[str], *, delete: bool, named: Collection[str]
) -> Iterator[Leftover]:
    """The folder of an export without its name yet, or what it has replaced; its lock tells if somebody lives."""
    attempt = attempt_of(os.path.basename(directory.path))
    if attempt is None:
        return
    names, verdict, reason = directory.names(), "dead", "no writer holds its lock"
    sizes = [status.st_size for status in map(directory.status, names) if status is not None]
    is_reliable, kind = locks.are_reliable(directory.descriptor)
    try:
        if not locks.try_lock(directory.descriptor, directory.path):
            verdict, reason = "living", "a writer holds its lock"
        elif not is_reliable and attempt not in named:
            verdict, reason = "unknown", f"locks of other hosts may be invisible on {kind}"
        elif delete:
            remove_folder(directory.path)
    except StorageError as error:
        verdict, reason = "unknown", error.message
        problems.append(error.message)
    yield Leftover(
        directory=directory.path,
        attempt=attempt,
        files=tuple(names),
        bytes=sum(sizes),
        verdict=cast(Verdict, verdict),
        reason=reason,
        removed=tuple(names) if delete and verdict == "dead" else (),
    )


def _published(directory: Directory) -> str | None:
    """The attempt that is published in ``directory``; _NotDead when there is a manifest that cannot be read."""
    try:
        data = directory.read(MANIFEST_NAME, limit=MAX_MANIFEST_BYTES)
        return None if is_retired(data) else decode_manifest(data, path=directory.path_of(MANIFEST_NAME)).attempt
    except StorageError as error:
        if error.errno == errno.ENOENT:
            return None
        raise _NotDead("unknown", error.message) from None
    except (CorruptError, UnsupportedVersionError):
        raise _NotDead("unknown", f"{MANIFEST_NAME} cannot be read, so the files that it needs are unknown") from None


class _Attempt:
    """The files of one attempt in one directory."""

    def __init__(self, directory: Directory, attempt: str, names: list[str]) -> None:
        self._directory = directory
        self._attempt = attempt
        self._index = f"index-{attempt}.safetensors"
        self._staged = f"manifest-{attempt}.tmp"
        self._names = names
        self._is_named = False

    @property
    def _data(self) -> list[str]:
        return [name for name in self._names if name not in (self._index, self._staged)]

    def examine(self, *, is_named: bool) -> Leftover | None:
        """What the files are; None when nothing of them is left over."""
        self._is_named = is_named
        try:
            if _published(self._directory) == self._attempt:
                if self._staged not in self._names:
                    return None
                # Its saver died, or is, between giving the manifest its name and taking away the temporary one.
                self._names = [self._staged]
                return self._leftover("dead", "its manifest is already published")
            self.check_dead()
            if _published(self._directory) == self._attempt:
                return None
        except _NotDead as found:
            return self._leftover(found.verdict, str(found))
        except CheckpointError as error:
            return self._leftover("unknown", error.message)
        return self._leftover("dead", "named by the caller" if is_named else "no writer holds a lock")

    def remove(self, leftover: Leftover, problems: list[str]) -> Leftover:
        """Remove the files, all or as far as that is possible; ``leftover`` with what became of them."""
        removed: list[str] = []
        try:
            self._remove(removed)
        except _NotDead as found:
            leftover = replace(leftover, verdict=found.verdict, reason=str(found))
        except CheckpointError as error:
            problems.append(error.message)
        return replace(leftover, removed=tuple(removed))

    def _remove(self, removed: list[str]) -> None:
        directory = self._directory
        if self._names == [self._staged] and _published(directory) == self._attempt:
            directory.sync()
            self._unlink(self._staged, removed)
            return
        made: list[Descriptor] = []
        forgetting = Ending(lambda: self._directory.remove(self._index) if made else None)
        with contextlib.ExitStack() as held, forgetting, forgetting:
            first = self._claim(held, made)
            names = attempts_in(directory.names()).get(self._attempt, [])
            if _published(directory) == self._attempt or set(names) - {*self._names, self._index}:
                raise _NotDead("living", "it changed during the sweep")
            directory.sync()
            for name in self._data:
                with contextlib.nullcontext(True) if name == first else self._locked(name) as is_there:
                    if is_there:
                        release_all(directory, name)
                        self._unlink(name, removed)
            for name in (self._staged, self._index):
                if name in self._names:
                    self._unlink(name, removed)

    def _claim(self, held: contextlib.ExitStack, made: list[Descriptor]) -> str | None:
        """Take the lock of the index, made if need be: nobody else can publish the attempt from here on.

        Before that, the lock of a data file, which is returned: its writer may live and be about to take it.
        """
        first = next((name for name in self._data if held.enter_context(self._locked(name))), None)
        if self._index not in self._names and (first or not self._data):
            self._directory.create(self._index, made)
        if not held.enter_context(self._locked(self._index)):
            raise _NotDead("living", "it changed during the sweep")
        return first

    def check_dead(self) -> None:
        """_NotDead unless the locks of all files can be had."""
        for name in (*self._data, self._index):
            with self._locked(name):
                pass
        status = self._directory.status(self._staged)
        if status is not None and not stat.S_ISREG(status.st_mode):
            raise _NotDead("unknown", f"{self._staged} is not a regular file")
        is_reliable, kind = locks.are_reliable(self._directory.descriptor)
        if not is_reliable and not self._is_named:
            raise _NotDead("unknown", f"locks of other hosts may be invisible on {kind}")

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[bool]:
        """Hold the lock of ``name`` for the block; False when there is no such file."""
        file: locks.LockedFile | None = None
        try:
            try:
                file = self._directory.lock(name)
                if file is None:
                    raise _NotDead("living", f"a writer holds the lock of {name}")
                if not self._directory.holds(name, file.descriptor):
                    raise _NotDead("living", "it changed during the sweep")
                is_there = True
            except StorageError as error:
                is_there = error.errno != errno.ENOENT
                if is_there and not (self._is_named and error.errno in locks.UNSUPPORTED):
                    raise _NotDead("unknown", error.message) from None
            yield is_there
        finally:
            if file is not None:
                file.discard()

    def _unlink(self, name: str, removed: list[str]) -> None:
        self._directory.remove(name)
        removed.append(name)

    def _leftover(self, verdict: Verdict, reason: str) -> Leftover:
        statuses = [self._directory.status(name) for name in self._names]
        return Leftover(
            directory=self._directory.path,
            attempt=self._attempt,
            files=tuple(self._names),
            bytes=sum(status.st_size for status in statuses if status is not None),
            verdict=verdict,
            reason=reason,
        )
