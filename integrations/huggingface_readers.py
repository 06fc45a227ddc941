"""Everybody else's readers. Each gets a folder that was exported, and the model or tensors that must come out of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_models import MODELS
from huggingface_ranks import assert_equal, odd_tensors

import holdfast
from holdfast.mapping import Drop


def files_of(folder: Path) -> list[Path]:
    """The safetensors files of ``folder``."""
    found = sorted(folder.glob("*.safetensors"))
    assert found, folder
    return found


def from_pretrained(name: str, folder: Path, dtype: torch.dtype | None = None) -> str:
    """transformers: the same parameters, the same logits, and nothing missing or left over."""
    model = MODELS[name].make() if dtype is None else MODELS[name].make_cast(dtype)
    # "auto" is what the config says, which was copied as it was, whatever the files have.
    wanted = "auto" if dtype is None else dtype
    found, told = MODELS[name].package_class.from_pretrained(folder, dtype=wanted, output_loading_info=True)
    assert not any(told.values()), told
    assert_equal(found.state_dict(), model.state_dict())
    assert torch.equal(MODELS[name].logits(found.eval()), MODELS[name].logits(model)), "other logits"
    return f"{len(list(found.parameters()))} parameters and the logits are equal, {len(files_of(folder))} files"


def converted(name: str, folder: Callable[[], Path], near: Path) -> str:
    """The command convert: in one process, with the rules for the model, and no model."""
    model, inside, outside = MODELS[name].make(), near / f"{name} native", near / f"{name} back"
    mapping = holdfast.Mapping.from_transformers(model)
    holdfast.convert(folder(), inside, to="native", mapping=mapping)
    found, wanted = holdfast.read(inside), model.state_dict()
    dropped = {rule.inside for rule in mapping.rules if isinstance(rule, Drop)}
    assert_equal(found, {key: tensor for key, tensor in wanted.items() if key not in dropped})
    holdfast.convert(inside, outside, to="hf", mapping=mapping)
    assert_equal(holdfast.read(outside), holdfast.read(folder()))
    assert_equal(holdfast.read(folder(), options=holdfast.LoadOptions(mapping=mapping)), found)
    return f"{len(found)} tensors, by {len(mapping.rules)} rules"


def safe_open(folder: Path, wanted: dict[str, torch.Tensor]) -> str:
    """safetensors: every key, its slices, and the format in the metadata."""
    import safetensors

    found: dict[str, torch.Tensor] = {}
    for path in files_of(folder):
        with safetensors.safe_open(path, framework="pt") as file:
            assert file.metadata()["format"] == "pt", path.name
            for key in file.keys():  # noqa: SIM118 - it is no dict
                found[key] = file.get_tensor(key)
                if found[key].ndim:
                    part = file.get_slice(key)[: found[key].shape[0] // 2]
                    assert_equal({key: part}, {key: found[key][: found[key].shape[0] // 2]})
    assert_equal(found, wanted)
    return f"{len(found)} tensors, whole and in parts"


def load_file(folder: Path, wanted: dict[str, torch.Tensor]) -> str:
    """safetensors: whole files."""
    import safetensors.torch

    assert_equal(_of_all_files(folder, safetensors.torch.load_file), wanted)
    return f"{len(files_of(folder))} files"


def load_state_dict_from_file(folder: Path, wanted: dict[str, torch.Tensor]) -> str:
    """huggingface_hub: whole files."""
    from huggingface_hub import load_state_dict_from_file

    assert_equal(_of_all_files(folder, load_state_dict_from_file), wanted)
    return f"{len(files_of(folder))} files"


def load_torch_model(folder: Path, name: str) -> str:
    """huggingface_hub: into a model, by the index."""
    from huggingface_hub import load_torch_model

    model = MODELS[name].make(seed=1)
    load_torch_model(model, folder, strict=False)  # tied weights are in no file
    assert_equal(model.state_dict(), MODELS[name].make().state_dict())
    return "into a model, by the index"


def load_checkpoint_in_model(folder: Path, name: str) -> str:
    """accelerate: into a model, by the index."""
    from accelerate import load_checkpoint_in_model

    model = MODELS[name].make(seed=1)
    load_checkpoint_in_model(model, folder)
    assert_equal(model.state_dict(), MODELS[name].make().state_dict())
    return "into a model, by the index"


def fast_loader(folder: Path, wanted: dict[str, torch.Tensor]) -> str:
    """fastsafetensors: all files at once, without a GPU."""
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    loader = SafeTensorsFileLoader(SingleGroup(), device="cpu", nogds=True)
    loader.add_filenames({0: [str(path) for path in files_of(folder)]})
    buffers = loader.copy_files_to_device()
    try:
        found = {key: buffers.get_tensor(key).clone() for key in loader.get_keys()}
    finally:
        buffers.close()
        loader.close()
    assert_equal(found, wanted)
    return f"{len(found)} tensors on the CPU"


def odd_in_safetensors(folder: Path) -> str:
    """safetensors: tensors that other writers get wrong."""
    return safe_open(folder, {**odd_tensors(), "uneven": torch.arange(7 * 3).reshape(7, 3)})


def _of_all_files(folder: Path, load: Callable[[Any], Any]) -> dict[str, torch.Tensor]:
    return {key: tensor for path in files_of(folder) for key, tensor in load(path).items()}
