"""Everything that a user can call, on a state that is small and still the work of several threads; what tells whether
it did what it should, and whether it left something behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import holdfast
from holdfast import _process as collector
from holdfast import events
from holdfast._io import posix
from holdfast._native.sweep import sweep
from holdfast._native.verify import verify_checkpoint
from holdfast._staging.one_at_a_time import TURNS
from holdfast._torch_format.reader import verify_torch_checkpoint
from holdfast.interop import convert
from torture import exports, saves

PATIENCE_S = 5.0
_PROCESS = holdfast.AsyncCheckpointerType.PROCESS
_ELEMENTS = 900_000
_EXPORTED_FILES = 5  # two of tensors, the index, digests, a config
_LITTER = "data-0123456789abcdef-0-0.safetensors"


def work_in_small_pieces() -> None:
    """Have threads work on a few MB as they would on many: for processes that do nothing else."""
    sizes = {"SLAB_BYTES": 2 << 20, "HOT_BYTES": 2 << 20, "MOST_SEGMENT_BYTES": (2 << 20) - 8192, "_JOB_BYTES": 1 << 20}
    for name, module in list(sys.modules.items()):
        if name.startswith("holdfast."):
            for size, value in sizes.items():
                if hasattr(module, size):
                    setattr(module, size, value)


@functools.cache
def state_of(version: int) -> dict[str, Any]:
    """The state of a version, which nobody changes."""
    weight = torch.full((_ELEMENTS,), float(version))
    return {
        "step": version,
        "model": {"weight": weight, "layers": [torch.full((2, 3), version)]},
        "note": bytes([version]) * 70_000,
    }


def _sorted_export(version: int) -> dict[str, Any]:
    return dict(sorted(exports.flat(exports.tensors_of(state_of(version))).items()))


def version_of(state: dict[str, Any]) -> int:
    """The version of ``state``; Torn unless it is whole."""
    version = state["step"]
    if is_export := isinstance(version, torch.Tensor):
        version, state = int(version), dict(sorted(state.items()))
    if version not in (1, 2) or not saves.equal(state, (_sorted_export if is_export else state_of)(version)):
        raise saves.Torn(f"step {version!r}, but not everything is of that version")
    return int(version)


class Place:
    """A folder with a checkpoint in each format, and which version each of them has."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.native, self.torch, self.litter = folder / "native", folder / "torch", folder / "litter"
        self.root, self.model, self.fresh = folder / "run", folder / "model", folder / "fresh"
        self.pt = folder / "some.pt"
        self.versions = {self.native: 1, self.torch: 1, self.model: 1}
        folder.mkdir(parents=True)
        holdfast.save(state_of(1), self.native)
        holdfast.save(state_of(1), storage_writer=holdfast.FileSystemWriter(self.torch))
        exports.save(self.model, exports.tensors_of(state_of(1)), 1, overwrite=False)
        holdfast.save({"step": 1}, self.litter)
        for step in (1, 2):
            holdfast.save({"step": step}, self.root / f"step-{step}")
        holdfast.Steps(self.root).report(1, {"loss": 1.0})
        torch.save({"step": 1, "weight": torch.ones(100)}, self.pt)

    def files(self) -> dict[str, tuple[int, int]]:
        """Size and time of every file."""
        found = {}
        for path in self.folder.rglob("*"):
            if path.is_file():
                status = path.stat()
                found[str(path.relative_to(self.folder))] = status.st_size, status.st_mtime_ns
        return found


@dataclass(frozen=True)
class Operation:
    """Something that can be called; ``writes`` says which checkpoint of a place it replaces, if it does.

    ``changes`` says that files come and go all the same, though as many as before. ``mend`` removes what it may leave
    in the middle, and tells what it may not.
    """

    run: Callable[[Place], None]
    writes: str | None = None
    changes: bool = False
    mend: Callable[[Place], str | None] = lambda place: None


def _save(place: Place, *, writes: str, in_background: bool = False, **arguments: Any) -> None:
    path: Path = getattr(place, writes)
    arguments["storage_writer"] = {"native": holdfast.NativeWriter, "torch": holdfast.FileSystemWriter}[writes](path)
    state = state_of(3 - place.versions[path])
    if not in_background:
        holdfast.save(state, **arguments)
        return
    handle = holdfast.async_save(state, **arguments)
    handle.wait_staged()
    handle.result()


def _export(place: Place, *, in_background: bool = False) -> None:
    version = 3 - place.versions[place.model]
    tensors = exports.tensors_of(state_of(version))
    exports.save(place.model, tensors, version, overwrite=True, in_background=in_background)


def _export_anew(place: Place) -> None:
    exports.save(place.fresh, exports.tensors_of(state_of(1)), 1, overwrite=False)
    if exports.mixture(place.fresh, 1) is not None:
        raise saves.Torn("what was exported is not whole")
    shutil.rmtree(place.fresh)


def _mend_export(place: Place) -> str | None:
    """It is there, whole, or it is not; but for a removal that was interrupted."""
    if (place.fresh / "config.json").exists() and (place.fresh / "holdfast.json").exists():
        try:
            version_of(holdfast.load(place.fresh))
        except (saves.Torn, holdfast.CheckpointError) as error:
            if len(list(place.fresh.iterdir())) == _EXPORTED_FILES:
                return f"torn: {error}"
    shutil.rmtree(place.fresh, ignore_errors=True)
    return None


def _load_export(place: Place) -> None:
    target = exports.flat(exports.tensors_of(state_of(place.versions[place.model])))
    target = {key: torch.zeros_like(tensor) for key, tensor in target.items()}
    holdfast.load(target, place.model)
    version_of(target)


def _load(place: Place, *, path: str) -> None:
    layers = [torch.zeros(2, 3, dtype=torch.int64)]
    target = {"step": 0, "model": {"weight": torch.zeros(_ELEMENTS), "layers": layers}, "note": b""}
    holdfast.load(target, getattr(place, path))
    version_of(target)


def _load_all(place: Place, *, path: str) -> None:
    version_of(holdfast.load(getattr(place, path)))


def _read(place: Place, *, path: str) -> None:
    with holdfast.open(getattr(place, path)) as checkpoint:
        step = checkpoint["step"]
        if checkpoint["model.weight"][800_000:].sum().item() != 100_000 * step:
            raise saves.Torn("what was read is of another version")


def _drop(place: Place) -> None:
    """Open, read, and forget to close."""
    if holdfast.open(place.native)["model.layers.0"][...].shape != (2, 3):
        raise saves.Torn("what was read has another shape")


def _convert(place: Place, *, source: str, target: str, to: Any) -> None:
    convert(getattr(place, source), place.folder / target, to=to, overwrite=True)


def _sweep(place: Place) -> None:
    (place.litter / _LITTER).write_bytes(b"dead")
    report = sweep(place.litter, delete=True)
    if [leftover.removed for leftover in report.leftovers] != [(_LITTER,)]:
        raise saves.Torn(f"swept: {report}")


def _delete(place: Place) -> None:
    shutil.copytree(place.root / "step-2", place.root / "copy", dirs_exist_ok=True)
    if not (place.root / "step-3").exists():
        (place.root / "copy").rename(place.root / "step-3")
    holdfast.Steps(place.root).delete(3)


def _mend_delete(place: Place) -> str | None:
    """A step is there, whole, or it is not, and what is left of it can be deleted."""
    found = [step.step for step in holdfast.Steps(place.root).steps()]
    if 3 in found and not holdfast.verify(place.root / "step-3").ok:
        return "a deletion left a damaged step"
    holdfast.Steps(place.root).finish_deletions()
    if 3 not in found and (place.root / "step-3").exists():
        return f"a deletion left what cannot be deleted: {os.listdir(place.root / 'step-3')}"
    for name in ("copy", "step-3"):
        shutil.rmtree(place.root / name, ignore_errors=True)
    return None


def _report(place: Place) -> None:
    holdfast.Steps(place.root).report(1, {"loss": 2.0})


def _pin(place: Place) -> None:
    holdfast.Steps(place.root).pin(1)
    holdfast.Steps(place.root).unpin(1)


def _mend_pin(place: Place) -> str | None:
    (place.root / "step-1" / "pinned").unlink(missing_ok=True)
    return None


def _follow(place: Place) -> None:
    for held in holdfast.follow(place.root, until=lambda: True):
        if holdfast.read(held.path)["step"] != held.step:
            raise saves.Torn("what is held is another step")


def _verify(place: Place) -> None:
    if verify_checkpoint(place.native).damage:
        raise saves.Torn("found damage where there is none")


def _verify_torch(place: Place) -> None:
    if verify_torch_checkpoint(place.torch).damage:
        raise saves.Torn("found damage where there is none")


def _verify_export(place: Place) -> None:
    if holdfast.verify(place.model).damage:
        raise saves.Torn("found damage where there is none")


def _prewarm(place: Place, **options: Any) -> None:
    holdfast.prewarm(state_of(1), **options)


def _release(place: Place) -> None:
    holdfast.prewarm(state_of(1))
    holdfast.release()


def _saving(writes: str, **arguments: Any) -> Operation:
    return Operation(partial(_save, writes=writes, **arguments), writes=writes)


def _converting(source: str, target: str, to: str) -> Operation:
    return Operation(partial(_convert, source=source, target=target, to=to), changes=True)


_heard: list[events.Event] = []


def _save_and_tell(place: Place, *, writes: str, **arguments: Any) -> None:
    """A save of which listeners are told that are there to stay; the disk of one of them is full."""
    if not events.subscriptions:
        full = events.jsonl("/dev/full")

        def try_to_write(event: events.Event) -> None:
            with contextlib.suppress(holdfast.StorageError):  # or it would be told of nothing more
                full(event)

        events.subscribe(try_to_write)
        events.subscribe(_heard.append)
    _save(place, writes=writes, **arguments)
    if not events.flush(PATIENCE_S) or _heard[-1].name != "published":
        raise saves.Torn(f"the listener heard {[event.name for event in _heard]}")
    _heard.clear()


def _telling(writes: str, **arguments: Any) -> Operation:
    return Operation(partial(_save_and_tell, writes=writes, **arguments), writes=writes)


OPERATIONS = {
    "save": _saving("native"),
    "async_save": _saving("native", in_background=True),
    "async_save, overlap": _saving("native", in_background=True, options=holdfast.SaveOptions(stage="overlap")),
    "async_save, process": _saving("native", in_background=True, async_checkpointer_type=_PROCESS),
    "async_save, streaming": _saving(
        "native", in_background=True, options=holdfast.SaveOptions(max_host_bytes=1 << 21)
    ),
    "save, told to listeners": _telling("native"),
    "async_save, told to listeners": _telling("native", in_background=True),
    "prewarm": Operation(_prewarm),
    "prewarm, process": Operation(partial(_prewarm, async_checkpointer_type=_PROCESS)),
    "release": Operation(_release),
    "export": Operation(_export, writes="model"),
    "export, in the background": Operation(partial(_export, in_background=True), writes="model"),
    "export, fresh": Operation(_export_anew, changes=True, mend=_mend_export),
    "load of an export": Operation(_load_export),
    "verify of an export": Operation(_verify_export),
    "load": Operation(partial(_load, path="native")),
    "load(path)": Operation(partial(_load_all, path="native")),
    "open": Operation(partial(_read, path="native")),
    "open, not closed": Operation(_drop),
    "verify": Operation(_verify),
    "sweep": Operation(_sweep, changes=True),
    "delete": Operation(_delete, changes=True, mend=_mend_delete),
    "report": Operation(_report, changes=True),
    "pin": Operation(_pin, changes=True, mend=_mend_pin),
    "follow": Operation(_follow),
    "convert to torch's format": _converting("native", "to-torch", "torch"),
    "convert to .pt": _converting("native", "to.pt", "pt"),
    "convert from .pt": _converting("pt", "from-pt", "native"),
    "convert from torch's format": _converting("torch", "from-torch", "native"),
    "torch's format: save": _saving("torch"),
    "torch's format: async_save": _saving("torch", in_background=True),
    "torch's format: load": Operation(partial(_load, path="torch")),
    "torch's format: load(path)": Operation(partial(_load_all, path="torch")),
    "torch's format: open": Operation(partial(_read, path="torch")),
    "torch's format: verify": Operation(_verify_torch),
}


class Standing:
    """What a process and its files are like before an operation; ``change`` tells what is not so after it."""

    def __init__(self, place: Place, operation: Operation) -> None:
        self._place = place
        self._operation = operation
        self._files = place.files()
        self._threads = set(threading.enumerate())
        self._descriptors = _descriptors()

    def change(self, *, is_released: bool) -> str | None:
        """What is wrong, apart from a save that goes on in the background, and from garbage.

        Where nothing was released, memory and process of asynchronous saves are still there.
        """
        until = time.monotonic() + PATIENCE_S
        while (found := self._held(is_released)) and time.monotonic() < until:
            time.sleep(0.002)
            gc.collect()
        return found or self._on_disk()

    def _held(self, is_released: bool) -> str | None:
        threads = [thread.name for thread in threading.enumerate() if thread not in self._threads]
        if threads:
            return f"threads are left: {threads}"
        more = sorted(value for number, value in _descriptors().items() if number not in self._descriptors)
        if not is_released:
            more = [value for value in more if not value.startswith(("/memfd:", "socket:"))]
        if more:
            return f"descriptors are left: {more}"
        if not gc.isenabled() or collector._pauses:
            return f"the collector is held by {collector._pauses}, enabled: {gc.isenabled()}"
        if not torch.is_grad_enabled():
            return "gradients are not recorded any more"
        if TURNS._current is not None:
            return f"a turn is left: {TURNS._current.phase}"
        if posix._underway:
            return f"files are said to be worked on: {posix._underway}"
        if is_released:
            subprocess._cleanup()  # type: ignore[attr-defined]
            if children := _children():
                return f"children are left: {children}"
        return None

    def _on_disk(self) -> str | None:
        place, operation = self._place, self._operation
        (place.litter / _LITTER).unlink(missing_ok=True)
        if (problem := operation.mend(place)) is not None:
            return problem
        files = place.files()
        for name in files:
            if (reason := _lock_of(place.folder / name)) is not None:
                return f"{name} is locked: {reason}"
        if operation.writes is None and not operation.changes:
            return (
                None if files == self._files else f"files have changed: {sorted(files.items() ^ self._files.items())}"
            )
        if len(files) != len(self._files):
            return f"files are left: {sorted(files.keys() - self._files.keys())}, gone: {self._files.keys() - files}"
        if operation.writes is None:
            return None
        path = getattr(place, operation.writes)
        try:
            place.versions[path] = version_of(holdfast.load(path))
        except (saves.Torn, holdfast.CheckpointError, KeyError) as error:
            return f"torn: {type(error).__name__}: {error}"
        return None


def _lock_of(path: Path) -> str | None:
    with open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return str(error)
    return None


def _descriptors() -> dict[str, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[name] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
    return found


def _children() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
