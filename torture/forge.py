"""Checkpoints forged by someone who knows the format: whatever is changed, all digests are made right again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash

import holdfast
from holdfast._native.index import INDEX_METADATA, HeaderEntry, decode_index, encode_header, file_digest
from holdfast._values.digest import BLOCK_BYTES, digest
from torture.samples import one_file_each

COLUMNS = ("digests", "offset", "bytes", "tensor", "file", "lo", "length")
_WIDTHS = {"U8": 1, "U16": 2, "U32": 4, "U64": 8}


def sealed(manifest: bytes) -> bytes:
    """The text of a manifest with its digest made right; as it is when it does not end like one."""
    if not manifest.endswith(b'"}') or len(manifest) < 18:
        return manifest
    zeroed = manifest[:-18] + b"0" * 16 + b'"}'
    return manifest[:-18] + xxhash.xxh3_64_hexdigest(zeroed).encode() + b'"}'


def index_bytes(columns: dict[str, np.ndarray], *, order: tuple[str, ...] | None = None) -> bytes:
    """An index file of ``columns``, each as narrow as it can be, in the order of the format or in ``order``."""
    dtypes = {name: _narrowest(column) for name, column in columns.items()}
    names = order or tuple(sorted(columns, key=lambda name: -_WIDTHS[dtypes[name]]))
    entries: list[HeaderEntry] = []
    parts: list[bytes] = []
    position = 0
    for name in names:
        data = columns[name].astype(f"<u{_WIDTHS[dtypes[name]]}").tobytes()
        entries.append(HeaderEntry(name, dtypes[name], columns[name].shape, position, position + len(data)))
        position += len(data)
        parts.append(data)
    return encode_header(entries, metadata=INDEX_METADATA) + b"".join(parts)


def _narrowest(column: np.ndarray) -> str:
    largest = int(column.max()) if column.size else 0
    return next(name for name, width in _WIDTHS.items() if largest < 1 << 8 * width)


@dataclass(slots=True)
class Forgery:
    """A checkpoint in parts: change any of them, then ``write`` it.

    ``manifest`` is the parsed JSON, ``index`` its columns, ``files`` the bytes of data files. What is set in ``raw``
    ("manifest" or "index") is taken as it is, but for the manifest's digest.
    """

    manifest: dict[str, Any]
    index: dict[str, np.ndarray]
    files: dict[str, bytes]
    raw: dict[str, bytes] = field(default_factory=dict)
    seal_files: bool = True

    @classmethod
    def of(cls, path: Path) -> Forgery:
        """The checkpoint at ``path`` in parts."""
        manifest = json.loads((path / "manifest.json").read_bytes())
        found = decode_index((path / manifest["index"]["name"]).read_bytes(), path="index")
        columns = {name: np.array(getattr(found, name), dtype=np.uint64) for name in COLUMNS}
        files = {entry["name"]: (path / entry["name"]).read_bytes() for entry in manifest["files"]}
        return cls(manifest, columns, files)

    def header(self, number: int = 0) -> dict[str, Any]:
        """The parsed header of a data file."""
        data = self.files[self.manifest["files"][number]["name"]]
        parsed: dict[str, Any] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        return parsed

    def set_header(self, text: bytes, number: int = 0) -> None:
        """Exchange the text of the header of a data file, padded to the room that it has."""
        name = self.manifest["files"][number]["name"]
        room = self.manifest["files"][number]["header"]
        self.files[name] = self.files[name][:8] + text.ljust(room - 8) + self.files[name][room:]

    def set_data(self, key: str, data: bytes) -> None:
        """Exchange the bytes of the one chunk of ``key``, which stay as many, and their digests."""
        number = next(n for n, entry in enumerate(self.manifest["tensors"]) if entry["key"] == key)
        (row,) = np.flatnonzero(self.index["tensor"] == number)
        offset, size = int(self.index["offset"][row]), int(self.index["bytes"][row])
        assert len(data) == size
        name = self.manifest["files"][int(self.index["file"][row])]["name"]
        self.files[name] = self.files[name][:offset] + data + self.files[name][offset + size :]
        counts = -(-self.index["bytes"].astype(np.int64) // BLOCK_BYTES)
        first = int(np.cumsum(counts)[row] - counts[row])
        for block in range(int(counts[row])):
            piece = data[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
            self.index["digests"][first + block] = digest(piece)

    def write(self, path: Path) -> None:
        """Write it all, digests made right."""
        path.mkdir(parents=True)
        for name, data in self.files.items():
            (path / name).write_bytes(data)
        index = self.raw["index"] if "index" in self.raw else index_bytes(self.index)
        if isinstance(self.manifest.get("files"), list) and self.seal_files:
            self._seal_files()
        entry = self.manifest.get("index")
        name = "index-forged.safetensors"
        if isinstance(entry, dict) and self.seal_files:
            entry["bytes"] = entry["bytes"] if entry.pop("keep", False) else len(index)
            entry["digest"] = xxhash.xxh3_64_hexdigest(index)
        (path / name).write_bytes(index)
        manifest = self.raw.get("manifest") or msgspec.json.encode(self.manifest)
        (path / "manifest.json").write_bytes(sealed(manifest))

    def _seal_files(self) -> None:
        order = np.lexsort((self.index["offset"], self.index["file"])) if len(self.index["file"]) else np.array([], int)
        counts = -(-self.index["bytes"].astype(np.int64) // BLOCK_BYTES)
        if len(counts) != len(self.index["file"]) or int(counts.sum()) != len(self.index["digests"]):
            return
        first = np.cumsum(counts) - counts
        for number, entry in enumerate(self.manifest["files"]):
            name = entry.get("name") if isinstance(entry, dict) else None
            data = self.files.get(name) if isinstance(name, str) else None
            header = entry.get("header") if isinstance(entry, dict) else None
            if data is None or type(header) is not int or not 0 < header <= len(data):
                continue
            rows = [row for row in order.tolist() if int(self.index["file"][row]) == number]
            blocks = [self.index["digests"][first[row] : first[row] + counts[row]] for row in rows]
            joined = np.concatenate(blocks) if blocks else np.array([], np.uint64)
            entry["digest"] = file_digest(data[:header], joined)


def honest(path: Path) -> Forgery:
    """The parts of an honest checkpoint, made at ``path``, that has what forgers want to change."""
    state = {
        "weight": torch.arange(24, dtype=torch.float32).reshape(4, 6),
        "nested": {"list": [torch.arange(5), torch.tensor(3.5)], 7: torch.ones(2, dtype=torch.bfloat16)},
        "blob": bytes(70_000),
        "note": "n" * 70_000,
        "empty": torch.zeros(0, 3),
        "quantised": torch.quantize_per_tensor(torch.ones(4), 0.5, 1, torch.qint8),
        "step": 5,
        "betas": (0.9, 0.999),
    }
    state["tied"] = state["weight"]
    writer = holdfast.NativeWriter(path, attempt="forged", user_metadata={"run": 1})
    with one_file_each():
        holdfast.save(state, storage_writer=writer)
    return Forgery.of(path)


Change = Callable[[Forgery], object]
"""What someone does to a checkpoint before its digests are made right."""


def number_of(forgery: Forgery, key: str) -> int:
    """The number of the tensor ``key``."""
    return next(number for number, entry in enumerate(forgery.manifest["tensors"]) if entry["key"] == key)
