"""HoldfastIO: how checkpoints of Lightning are written, read and removed. latest: which one to resume from.

Invariant: a checkpoint that is to go stays until the save under way is published. Under DDP Lightning saves on rank 0
alone, so a save there never waits for another rank; it loads on every rank.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import torch

from holdfast._async_saver import AsyncCheckpointerType, async_save
from holdfast._io import posix
from holdfast._loader import LoadOptions, LoadReport, load
from holdfast._native.delete import delete
from holdfast._native.publish import format_at, read_summary
from holdfast._native.values import decode_value
from holdfast._native.verify import has_its_files
from holdfast._process import Lock, Once
from holdfast._saver import SaveOptions, save
from holdfast._staging.one_at_a_time import AsyncSave
from holdfast.errors import CheckpointError, CorruptError, InvalidStateError, NotFoundError, UnsafeError
from holdfast.integrations import default_options, imported

_plugins: Any = imported("lightning", "lightning.fabric.plugins")

__all__ = ["HoldfastIO", "latest"]

logger = logging.getLogger("holdfast")

Paths = str | os.PathLike[str]
State = dict[str, Any]
_LOAD = LoadOptions()
_CALLBACK = "HoldfastCallback"


def latest(folder: Paths) -> str | None:
    """The newest checkpoint in ``folder`` that has all its files, as ``ckpt_path``; None if there is none.

    It is the one of the highest step; of equal ones, the one that was saved last. Damaged ones are named in the log.
    """
    found: list[tuple[int, str, str]] = []
    root = posix.absolute(folder)
    for path in [os.path.join(root, name) for name in posix.list_directories(root)]:
        try:
            if format_at(path) != "native":
                continue
            summary, metadata = read_summary(path)
            told = decode_value(metadata, key="user_metadata")
            if not has_its_files(path, summary):
                raise CorruptError(f"{path!r} has not all its files", path=path)
        except CheckpointError as error:
            logger.warning("a checkpoint is passed over: %s", error)
        else:
            step = told.get("step") if isinstance(told, dict) else None
            found.append((step if isinstance(step, int) else -1, summary.writer.saved_at or "", path))
    return max(found)[2] if found else None


class HoldfastIO(_plugins.CheckpointIO):
    """Writes, reads and removes Lightning's checkpoints: ``plugins=[HoldfastIO()]``, of the Trainer and of Fabric.

    Args:
        asynchronous: save in the background, in a thread; "process" has another process write. What a save fails with
            is raised by the next one, by ``wait``, or when the Trainer ends.
        options: the options of every save. Without them, a state on the CPU is written from where it is; with
            ``asynchronous`` that is so if there is a ``HoldfastCallback``, which has the optimizers wait.
        load_options: the options of every load. With ``allow_pickle``, Lightning loads what Lightning has written.
    """

    is_sharded = False  # all ranks save together: set by a strategy with sharded models

    def __init__(
        self,
        *,
        asynchronous: bool | Literal["process"] = False,
        options: SaveOptions | None = None,
        load_options: LoadOptions = _LOAD,
    ) -> None:
        if asynchronous not in (True, False, "process"):
            raise ValueError(f"asynchronous is True, False or 'process', not {asynchronous!r}")
        self._asynchronous, self.options, self.load_options = asynchronous, options, load_options
        self._lock = Lock()
        self._last: tuple[AsyncSave, Once] | None = None
        self._is_busy = self._has_failed = self._has_warned = False
        self._going: list[str] = []

    def save_checkpoint(self, checkpoint: State, path: Paths, storage_options: object = None) -> None:
        """Save ``checkpoint``; when this returns, it may be changed again."""
        check_no_options(storage_options)
        self.warn_of_ranks(checkpoint)
        job = torch.distributed if torch.distributed.is_available() and torch.distributed.is_initialized() else None
        is_per_rank = any(isinstance(value, dict) and value.keys() == {"rank-0"} for value in checkpoint.values())
        if is_per_rank and job is not None and job.get_world_size() > 1:
            raise InvalidStateError("under DDP only rank 0 saves, and a PerRank or Rng would be that of rank 0 alone")
        self.save(checkpoint, path, options=self.options_for(checkpoint))

    def options_for(self, checkpoint: Mapping[str, Any]) -> SaveOptions:
        """The options of the save of ``checkpoint``."""
        is_guarded = _CALLBACK in (checkpoint.get("callbacks") or ())  # which sees to it
        return self.options or default_options(self._asynchronous, is_guarded)

    def save(self, state: State, path: Paths, *, options: SaveOptions, **metadata: object) -> None:
        """Save ``state``, with ``metadata`` beside it. Of a sharded model, all ranks call it."""
        for name, value in (("step", state.get("global_step", state.get("step"))), ("epoch", state.get("epoch"))):
            metadata |= {name: value} if type(value) is int else {}
        path, is_alone = posix.absolute(path), not self.is_sharded
        with self._lock:
            self._going = [gone for gone in self._going if gone != path]
        if not self._asynchronous:
            save(state, path, no_dist=is_alone, user_metadata=metadata, options=options)
            return
        if options.when_busy == "wait" or not self._is_busy:
            self.wait()
        kind = AsyncCheckpointerType("process" if self._asynchronous == "process" else "thread")
        begin = partial(async_save, no_dist=is_alone, user_metadata=metadata, options=options)
        handle, is_told = begin(state, path, async_checkpointer_type=kind), Once()
        self._last, self._is_busy = (handle, is_told), True
        handle.add_done_callback(partial(self._over, handle, is_told))

    def load_checkpoint(self, path: Paths, map_location: Any = None, weights_only: bool | None = None) -> State:
        """All of the checkpoint, on the CPU. All ranks call it. Nothing is pickled, whatever ``weights_only`` says."""
        if map_location is not None:
            raise ValueError("everything is loaded to the CPU; move it afterwards, instead of giving a map_location")
        path, state = os.fspath(path), State()
        if is_lightnings_own(path, allow_pickle=self.load_options.allow_pickle):
            loaded: State = _plugins.TorchCheckpointIO().load_checkpoint(path, weights_only=bool(weights_only))
            return loaded
        self.load(state, path)
        return state

    def load(self, state: State, path: Paths, *, strict: bool = True) -> LoadReport:
        """Load into ``state``, in place, when the save under way is over."""
        self.wait()
        try:
            return load(state, path, strict=strict, options=self.load_options)
        except NotFoundError as error:
            folder = os.path.dirname(posix.absolute(path))
            advice = f"the newest whole one there is {latest(folder)!r}, which latest({folder!r}) gives you"
            raise NotFoundError(f"{error.message}; {advice}") from None

    def remove_checkpoint(self, path: Paths) -> None:
        """Remove the checkpoint, file or link ``path``: now, or when the save under way is published."""
        with self._lock:
            self._going.append(posix.absolute(path))
            if not self._is_busy and not self._has_failed:
                self._remove()

    def wait(self) -> None:
        """Return when no save is under way, and what was to go is gone; raises what the last save failed with."""
        last, self._last = self._last, None
        if last is not None:
            last[1].wait()
            last[0].result()

    teardown = wait

    def _over(self, handle: AsyncSave, is_told: Once, _: object) -> None:
        """Do what follows the end of a background save. Called by the thread of that save."""
        try:
            with self._lock:
                self._is_busy, self._has_failed = False, handle.phase != "published"
                if not self._has_failed:
                    self._remove()
        finally:
            is_told.set()

    def _remove(self) -> None:
        going, self._going = self._going, []
        for path in going:
            try:
                if os.path.isdir(path) and not os.path.islink(path):
                    delete(path)
                    posix.remove(os.path.join(path, "meta.pt"))  # of Lightning's own; else none is there
                    posix.remove_empty_directories([path])
                else:
                    posix.remove(path)
            except CheckpointError as error:
                logger.warning("the checkpoint %r was to go, and stays: %s", path, error)

    def warn_of_ranks(self, checkpoint: Mapping[str, Any]) -> None:
        """Say once if ``checkpoint``, one of the Trainer, has nothing of what is different on each rank."""
        callbacks = checkpoint.get("callbacks") if "loops" in checkpoint else None
        if callbacks is not None and _CALLBACK not in callbacks and not self._has_warned:
            self._has_warned = True
            said = "random generators, and loaders of other ranks than the first, are not saved"
            logger.warning("%s: add Trainer(callbacks=[HoldfastCallback()])", said)


def check_no_options(storage_options: object) -> None:
    """TypeError if there are any."""
    if storage_options is not None:
        raise TypeError("storage_options have no meaning here; pass HoldfastIO(options=SaveOptions(...))")


def is_lightnings_own(path: str, *, allow_pickle: bool) -> bool:
    """Whether Lightning itself wrote what is at ``path``, with pickles; UnsafeError if these are not allowed."""
    is_folder = os.path.exists(os.path.join(path, "meta.pt")) and format_at(path) == "torch"
    if not is_folder and not os.path.isfile(path):
        return False
    if not allow_pickle:
        convert = "" if is_folder else f"load what 'holdfast convert {path} NEW --to native' makes of it; or, "
        trust = "if you trust it, pass HoldfastIO(load_options=LoadOptions(allow_pickle=True)): Lightning loads it then"
        raise UnsafeError(f"{path!r} was written by Lightning itself, as a pickle; {convert}{trust}")
    return True
