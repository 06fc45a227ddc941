"""Exports that are disturbed: a folder as Hugging Face has it, of several files and with what is beside the weights.

Everything in the folder tells its version, so that what is found is the old folder, the new one, or a mixture.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import torch

import holdfast
from holdfast import hf

MODES = ("export, fresh", "export, replacing", "export, async, replacing")
SHARD_BYTES = 1200
"""So that the largest tensor has a file of its own."""

_SHAPE = (64, 1200)  # a row is no whole page, and neither is what a rank has of it
_CONFIG, _OWN = "config.json", "tokenizer.json"
_ATTEMPT = re.compile(r"\.holdfast-[0-9a-f]{16}")


def tensors_of(state: dict[str, Any]) -> dict[str, Any]:
    """The state without values: what can be in a folder."""
    return {key: torch.tensor(value) if isinstance(value, int) else value for key, value in state.items()
            if not isinstance(value, bytes)}  # fmt: skip


def sharded(version: int, ranks: int, rank: int | None) -> dict[str, Any]:
    """A tensor that ranks have rows of, and one that they have columns of; for ``None`` both as a whole."""
    if rank is None:
        return {name: torch.full(_SHAPE, float(version)) for name in ("rows", "columns")}
    return {"rows": Shard(version, 0, rank, ranks), "columns": Shard(version, 1, rank, ranks)}


class Shard(torch.Tensor):
    """What one rank has of a tensor that is cut along a dimension."""

    def __new__(cls, version: int, dim: int, rank: int, ranks: int, shape: tuple[int, ...] = _SHAPE) -> Shard:
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)

    def __init__(self, version: int, dim: int, rank: int, ranks: int, shape: tuple[int, ...] = _SHAPE) -> None:
        length, offset = list(shape), [0] * len(shape)
        length[dim] //= ranks
        offset[dim] = rank * length[dim]
        self._box = holdfast.ChunkStorageMetadata(offsets=torch.Size(offset), sizes=torch.Size(length))
        self._held = torch.full(length, float(version))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # the stub has an instance method
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError(f"nobody computes with what a rank has, as {function} does")

    def __create_chunk_list__(self) -> list[holdfast.ChunkStorageMetadata]:
        return [self._box]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return self._held


def flat(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The same by the names that tensors have in files."""
    found: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        inner = dict(enumerate(value)) if isinstance(value, list) else value
        found.update({f"{key}.{name}": each for name, each in flat(inner).items()} if isinstance(inner, dict)
                     else {str(key): inner})  # fmt: skip
    return found


def save(path: Path, tensors: dict[str, Any], version: int, *, overwrite: bool, in_background: bool = False) -> None:
    """Export version ``version``, with a file beside the weights that tells it."""
    config = assets(version)
    options = hf.ExportOptions(shard_bytes=SHARD_BYTES, metadata={"version": str(version)})
    if in_background:
        hf.async_export(tensors, path, assets=config, overwrite=overwrite, options=options).result()
    else:
        hf.export(tensors, path, assets=config, overwrite=overwrite, options=options)


def assets(version: int) -> Path:
    """The file to copy into the folder; it lies where nothing is counted or disturbed."""
    file = Path(tempfile.gettempdir()) / f"holdfast-torture-{os.getuid()}" / str(version) / _CONFIG
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps({"version": version}))
        draft.replace(file)
    return file


def add_own(path: Path) -> None:
    """Put a file into the folder that belongs to its user, and has to stay."""
    (path / _OWN).write_text("mine")


def mixture(path: Path, version: int, *, has_own: bool = False) -> str | None:
    """What is in the folder ``path`` beside the weights of ``version``, or of which bytes nobody can be sure."""
    if damage := holdfast.verify(path).damage:
        return f"damaged: {damage[0]}"
    weights = {file.name for file in path.glob("*.safetensors")}
    index = json.loads((path / "model.safetensors.index.json").read_text())
    wanted = {*index["weight_map"].values(), "model.safetensors.index.json", "holdfast.json", _CONFIG}
    names = set(os.listdir(path))
    if names - {_OWN} != wanted or (has_own and _OWN not in names) or weights - set(index["weight_map"].values()):
        return f"a mixture of folders: {sorted(names)}"
    if (told := json.loads((path / _CONFIG).read_text())["version"]) != version:
        return f"a mixture of folders: {_CONFIG} is of version {told}, the weights are of {version}"
    return None


def leftovers(path: Path) -> list[str]:
    """What is beside the folder ``path`` that was left by exports to it."""
    names = os.listdir(path.parent) if path.parent.exists() else []
    return sorted(name for name in names if name.startswith(path.name) and _ATTEMPT.fullmatch(name[len(path.name) :]))


def unswept(path: Path) -> str | None:
    """What is wrong with a sweep of where ``path`` is: what exports left has to go, and nothing else."""
    if not path.parent.exists():
        return None
    before = set(os.listdir(path.parent))
    left = set(leftovers(path))
    if strange := {name for name in before - left - {path.name} if name.startswith(path.name)}:
        return f"an export left {sorted(strange)}"
    report = holdfast.sweep(path.parent, delete=True)
    after = set(os.listdir(path.parent))
    if before - after != left or after - before:
        return f"a sweep removed {sorted(before - after)} of {sorted(before)}, where {sorted(left)} is left: {report}"
    return None
