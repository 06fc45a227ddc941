"""Who competes: each saves a flat state into an empty folder, durable on return, and loads it into tensors in place.

The job is the same for all. Whoever does not make files or names durable by itself gets the missing fsync added, inside
the timed part; whoever cannot load in place gets the copy added. The raw limit moves as many bytes and does nothing
with them; it has no warm load.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from disk import fsync_path, prepare_raw, read_raw, write_raw
from states import State

RAW = "raw O_DIRECT"
HOLDFAST = "holdfast"
TORCH_DCP = "torch DCP"
TORCH_DCP_4 = "torch DCP, 4 threads"
TORCH_SAVE = "torch.save"
SAFETENSORS = "safetensors"

RAW_THREADS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """One way to save and load; ``loads_data`` is false for the raw limit, which forgets what it reads."""

    name: str
    save: Callable[[State, Path], None]
    load: Callable[[State, Path], None]
    loads_data: bool = True


def contestants(names: list[str]) -> list[Contestant]:
    """The named contestants, in the order of :data:`MAKERS`; everyone when no name is given."""
    unknown = sorted(set(names) - set(MAKERS))
    if unknown:
        raise SystemExit(f"no contestant is called {', '.join(map(repr, unknown))}; choose from {', '.join(MAKERS)}")
    return [make() for short, make in MAKERS.items() if not names or short in names]


def _raw() -> Contestant:
    prepare_raw(threads=RAW_THREADS)

    def save(state: State, folder: Path) -> None:
        total = sum(tensor.nbytes for tensor in state.values())
        write_raw(folder / "raw.bin", total, threads=RAW_THREADS)

    def load(state: State, folder: Path) -> None:
        # The very file that holdfast loads, where it takes part: below a virtual disk may be a cache of the host's, and
        # what one file finds there says nothing of another.
        same = sorted((folder.parent / HOLDFAST / "checkpoint").glob("data-*"))
        for path in same or [folder / "raw.bin"]:
            read_raw(path, threads=RAW_THREADS)

    return Contestant(name=RAW, save=save, load=load, loads_data=False)


def _holdfast() -> Contestant:
    import holdfast  # late, so that the others can be measured without it

    def save(state: State, folder: Path) -> None:
        holdfast.save(state, folder / "checkpoint")

    def load(state: State, folder: Path) -> None:
        holdfast.load(state, folder / "checkpoint")

    return Contestant(name=HOLDFAST, save=save, load=load)


def _torch_dcp() -> Contestant:
    return _dcp(TORCH_DCP, thread_count=None)


def _torch_dcp_4() -> Contestant:
    return _dcp(TORCH_DCP_4, thread_count=4)


def _dcp(name: str, *, thread_count: int | None) -> Contestant:
    # torch says on every call that there is no process group; that is what is measured here.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)

    def save(state: State, folder: Path) -> None:
        path = folder / "checkpoint"
        if thread_count is None:
            state_dict_saver.save(dict(state), checkpoint_id=path)
        else:
            writer = FileSystemWriter(path, thread_count=thread_count)
            state_dict_saver.save(dict(state), storage_writer=writer)
        # It makes its files durable, but not their names.
        fsync_path(path)
        fsync_path(folder)

    def load(state: State, folder: Path) -> None:
        state_dict_loader.load(dict(state), checkpoint_id=folder / "checkpoint")

    return Contestant(name=name, save=save, load=load)


def _torch_save() -> Contestant:
    def save(state: State, folder: Path) -> None:
        torch.save(state, folder / "state.pt")
        fsync_path(folder / "state.pt")
        fsync_path(folder)

    def load(state: State, folder: Path) -> None:
        loaded: State = torch.load(folder / "state.pt", weights_only=True)
        for key, tensor in state.items():
            tensor.copy_(loaded[key])

    return Contestant(name=TORCH_SAVE, save=save, load=load)


def _safetensors() -> Contestant:
    def save(state: State, folder: Path) -> None:
        save_file(state, folder / "state.safetensors")
        fsync_path(folder / "state.safetensors")
        fsync_path(folder)

    def load(state: State, folder: Path) -> None:
        with safe_open(folder / "state.safetensors", framework="pt") as file:
            for key, tensor in state.items():
                tensor.copy_(file.get_tensor(key))

    return Contestant(name=SAFETENSORS, save=save, load=load)


MAKERS: dict[str, Callable[[], Contestant]] = {
    "raw": _raw,
    "holdfast": _holdfast,
    "dcp": _torch_dcp,
    "dcp4": _torch_dcp_4,
    "torch-save": _torch_save,
    "safetensors": _safetensors,
}
