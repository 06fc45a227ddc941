"""Who competes over Hugging Face folders: holdfast's export and loads, its native format, torch's writer and reader.

The job is the same for all, as in contestants.py: durable on return, loaded in place. torch's writer makes neither what
it consolidates nor any name durable, so the missing fsync is added, inside the timed part. Loads of holdfast and of
torch read a folder of plain safetensors files, as the Hub has it, which nobody here has written with digests; so the
native load that they are compared with verifies nothing either.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch.distributed
from safetensors.torch import save_file
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from contestants import Contestant
from disk import files_under, fsync_path
from states import State

NATIVE = "holdfast, native"
FOLDER = "holdfast, folder"
TORCH_FOLDER = "torch, folder"
HUB_FILE_BYTES = 1_000_000_000


def write_hub_folder(state: State, path: Path) -> None:
    """``state`` as safetensors files with an index, the way every folder on the Hub is."""
    files: list[State] = [{}]
    for key, tensor in state.items():
        if files[-1] and sum(each.nbytes for each in files[-1].values()) + tensor.nbytes > HUB_FILE_BYTES:
            files.append({})
        files[-1][key] = tensor
    path.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(files, 1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        save_file(tensors, path / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, name))
    total = sum(tensor.nbytes for tensor in state.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _native() -> Contestant:
    import holdfast

    def save(state: State, folder: Path) -> None:
        holdfast.save(state, folder / "checkpoint")

    def load(state: State, folder: Path) -> None:
        holdfast.load(state, folder / "checkpoint", options=holdfast.LoadOptions(verify=False))

    return Contestant(name=NATIVE, save=save, load=load)


def _folder() -> Contestant:
    import holdfast
    from holdfast import hf

    def save(state: State, folder: Path) -> None:
        hf.export(state, folder / "checkpoint")

    def load(state: State, folder: Path) -> None:
        holdfast.load(state, folder / "checkpoint")

    return Contestant(name=FOLDER, save=save, load=load)


def _torch_folder() -> Contestant:
    def save(state: State, folder: Path) -> None:
        path = folder / "checkpoint"
        writer = HuggingFaceStorageWriter(str(path), save_distributed=True, enable_consolidation=True)
        state_dict_saver.save(dict(state), storage_writer=writer)
        if torch.distributed.get_rank() == 0:
            for file in files_under(path):
                fsync_path(file)
            fsync_path(path)
            fsync_path(folder)

    def load(state: State, folder: Path) -> None:
        state_dict_loader.load(dict(state), storage_reader=HuggingFaceStorageReader(str(folder / "checkpoint")))

    return Contestant(name=TORCH_FOLDER, save=save, load=load)


FOLDER_MAKERS: dict[str, Callable[[], Contestant]] = {
    "native": _native,
    "folder": _folder,
    "torch-folder": _torch_folder,
}
NAMES = {"native": NATIVE, "folder": FOLDER, "torch-folder": TORCH_FOLDER}
