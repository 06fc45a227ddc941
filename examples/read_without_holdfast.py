"""A reader of the native format in plain Python and numpy: docs/format.md is enough to write one, and this is one.

It is for checkpoints that you trust: it refuses versions and features that it does not know and files of another size,
but verifies no digests. Types that numpy lacks come as unsigned integers of their size, so bfloat16 as uint16.
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np

NUMPY_TYPES = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
               "float16", "float32", "float64", "complex64", "complex128")  # fmt: skip
OTHER_TYPES = {"bfloat16": "<u2", "bits16": "<u2", "complex32": "<u4", "qint32": "<u4"}


def read(path: str | Path) -> dict[str, Any]:
    """Every tensor of the checkpoint as an array, and every other value as typed JSON or bytes, by key."""
    directory = Path(path)
    manifest = json.loads((directory / "manifest.json").read_bytes())
    if (manifest["format"], manifest["version"]) != ("holdfast", 1) or set(manifest["requires"]) - {"pickle"}:
        raise ValueError(f"{directory} needs another reader than this one")
    index = read_index(directory / manifest["index"]["name"], manifest["index"]["bytes"])
    files = [directory / file["name"] for file in manifest["files"]]
    for file, entry in zip(files, manifest["files"], strict=True):
        if file.stat().st_size != entry["bytes"]:
            raise ValueError(f"{file} has not the size that the manifest gives")
    found: dict[str, Any] = {value["key"]: value["value"] for value in manifest["values"]}
    bounds = np.searchsorted(index["tensor"], np.arange(len(manifest["tensors"]) + 1)).tolist()
    for number, tensor in enumerate(manifest["tensors"]):
        if "alias_of" not in tensor:
            found[tensor["key"]] = assemble(tensor, range(bounds[number], bounds[number + 1]), index, files)
    for tensor in manifest["tensors"]:
        if "alias_of" in tensor:
            found[tensor["key"]] = found[tensor["alias_of"]]
    return found


def read_index(path: Path, size: int) -> dict[str, Any]:
    """The columns of the index, a safetensors file: eight bytes of length, a JSON header, then the data."""
    data = path.read_bytes()
    if len(data) != size:
        raise ValueError(f"{path} has not the size that the manifest gives")
    start = 8 + struct.unpack("<Q", data[:8])[0]
    columns = {}
    for name, entry in json.loads(data[8:start]).items():
        if name != "__metadata__":
            begin, end = (start + offset for offset in entry["data_offsets"])
            dtype = f"<u{int(entry['dtype'][1:]) // 8}"
            columns[name] = np.frombuffer(data[begin:end], dtype).reshape(entry["shape"])
    return columns


def assemble(tensor: dict[str, Any], rows: range, index: dict[str, Any], files: list[Path]) -> Any:
    """One tensor, from the chunks in ``rows`` of the index; or the large value that its bytes are."""
    name, shape = tensor["dtype"], tensor["shape"]
    dtype = np.dtype(name).newbyteorder("<") if name in NUMPY_TYPES else np.dtype(OTHER_TYPES.get(name, "<u1"))
    whole = np.empty(shape, dtype)
    for row in rows:
        low, length = (index[column][row, : len(shape)].tolist() for column in ("lo", "length"))
        count = int(index["bytes"][row]) // dtype.itemsize
        chunk = np.fromfile(files[index["file"][row]], dtype, count, offset=int(index["offset"][row]))
        whole[tuple(slice(at, at + size) for at, size in zip(low, length, strict=True))] = chunk.reshape(length)
    kind = tensor.get("kind", "tensor")
    if kind in ("tensor", "numpy"):
        return whole
    return json.loads(whole.tobytes()) if kind == "json" else whole.tobytes()


if __name__ == "__main__":
    for key, value in read(sys.argv[1]).items():
        print(key, f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else value)
