"""Hugging Face folders made by hand, byte by byte: an honest one, one as an export leaves it, and hostile ones by name.

Every hostile one must be refused with a CorruptError.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from holdfast._huggingface.notes import FolderNotes, encode_notes
from holdfast._native.index import ChunkIndex, encode_index, file_digest
from holdfast._native.manifest import FileEntry, WriterEntry
from holdfast._values.digest import BLOCK_BYTES, digest

INDEX = "model.safetensors.index.json"
NOTES = "holdfast.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
}

Make = Callable[[Path], object]
Header = dict[str, Any]


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def file_bytes(header: Header | bytes, data: bytes = b"") -> bytes:
    """A safetensors file with this header, as it is."""
    body = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(body).to_bytes(8, "little") + body + data


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def header_of(tensors: Mapping[str, torch.Tensor]) -> tuple[Header, bytes]:
    """Header and data of ``tensors``, one after the other as they come."""
    header: Header = {}
    data = b""
    for key, tensor in tensors.items():
        raw = bytes_of(tensor)
        header[key] = entry(_NAMES[tensor.dtype], list(tensor.shape), len(data), len(data) + len(raw))
        data += raw
    return header, data


def write_folder(path: Path, files: Mapping[str, Mapping[str, torch.Tensor]], *, pad: int = 0) -> None:
    """A folder with an index; ``pad`` more spaces end each header."""
    path.mkdir(parents=True, exist_ok=True)
    for name, tensors in files.items():
        header, data = header_of(tensors)
        (path / name).write_bytes(file_bytes(json.dumps(header).encode() + b" " * pad, data))
    weights = {key: name for name, tensors in files.items() for key in tensors}
    (path / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weights}))


def write_notes(
    path: Path,
    *,
    rows: int | None = None,
    attempt: str = "0123456789abcdef",
    renamed: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Beside the files of a folder, the holdfast.json that fits them; chunks have at most so many ``rows``.

    It fits the headers only where no tensor is ``renamed``.
    """
    names = sorted(name for name in os.listdir(path) if name.endswith(".safetensors"))
    chunks: list[tuple[str, int, int, list[int], list[int], bytes]] = []
    headers = []
    for number, name in enumerate(names):
        raw = (path / name).read_bytes()
        begin = 8 + int.from_bytes(raw[:8], "little")
        headers.append(raw[:begin])
        for key, each in json.loads(raw[8:begin]).items():
            first, stop = (begin + offset for offset in each["data_offsets"])
            shape = each["shape"]
            step = shape[0] if rows is None or not shape or 0 in shape else rows
            row_bytes = (stop - first) // shape[0] if shape and shape[0] else stop - first
            for low in range(0, shape[0], step) if shape and shape[0] else [0]:
                lo, length = (
                    ([low, *[0] * (len(shape) - 1)], [min(step, shape[0] - low), *shape[1:]]) if shape else ([], [])
                )
                start = first + low * row_bytes
                data = raw[start : start + (length[0] if shape else 1) * row_bytes]
                chunks.append((renamed.get(key, key), number, start, lo, length, data))
    keys = sorted({chunk[0] for chunk in chunks})
    chunks.sort(key=lambda chunk: (chunk[0], chunk[3]))
    width = max(len(chunk[3]) for chunk in chunks)
    blocks = [
        [digest(chunk[5][at : at + BLOCK_BYTES]) for at in range(0, len(chunk[5]), BLOCK_BYTES)] for chunk in chunks
    ]
    index = ChunkIndex(
        tensor=np.array([keys.index(chunk[0]) for chunk in chunks]),
        file=np.array([chunk[1] for chunk in chunks]),
        offset=np.array([chunk[2] for chunk in chunks]),
        bytes=np.array([len(chunk[5]) for chunk in chunks]),
        lo=np.array([chunk[3] + [0] * (width - len(chunk[3])) for chunk in chunks]).reshape(-1, width),
        length=np.array([chunk[4] + [1] * (width - len(chunk[4])) for chunk in chunks]).reshape(-1, width),
        digests=np.array([each for of_chunk in blocks for each in of_chunk], dtype=np.uint64),
    )
    files = []
    for number, (name, header) in enumerate(zip(names, headers, strict=True)):
        order = sorted((chunk[2], len(chunk[5]), place) for place, chunk in enumerate(chunks) if chunk[1] == number)
        of_file = np.array([each for _, _, place in order for each in blocks[place]], dtype=np.uint64)
        size = (path / name).stat().st_size
        files.append(FileEntry(name=name, bytes=size, header=len(header), digest=file_digest(header, of_file)))
    notes = FolderNotes(
        attempt=attempt,
        writer=WriterEntry(holdfast="0", torch="0", python="0", world_size=1),
        files=tuple(files),
        chunks=encode_index(index),
    )
    (path / NOTES).write_bytes(encode_notes(notes))


A_AND_B = {"a": torch.arange(24.0).reshape(4, 6), "b": torch.ones(3)}
HONEST = {FIRST: A_AND_B, SECOND: {"c": torch.zeros(5)}}


def honest(path: Path) -> None:
    """Two files, an index, and what else lies in such folders."""
    write_folder(path, HONEST)
    (path / "config.json").write_text("{}")


def exported(path: Path) -> None:
    honest(path)
    write_notes(path)


def flip_last(file: Path) -> None:
    """One bit of the last byte changed."""
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def whole(header: Header | bytes, data: bytes = b"") -> Make:
    """A folder with one file, which has this header."""

    def make(path: Path) -> None:
        path.mkdir()
        (path / "model.safetensors").write_bytes(file_bytes(header, data))

    return make


def raw(data: bytes, size: int | None = None) -> Make:
    """A folder with one file of these bytes, and zeros up to ``size``."""

    def make(path: Path) -> None:
        path.mkdir()
        (path / "model.safetensors").write_bytes(data)
        if size is not None:
            os.truncate(path / "model.safetensors", size)

    return make


def changed(change: Callable[[Path], object], first: Make = honest) -> Make:
    """The honest folder, changed."""

    def make(path: Path) -> None:
        first(path)
        change(path)

    return make


def _headers() -> dict[str, Make]:
    two = {"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 4, 8)}

    def other(key: str, **change: Any) -> Make:
        return whole({**two, key: {**two[key], **change}}, bytes(8))

    text = json.dumps(two).encode()
    return {
        "a file of no bytes": raw(b""),
        "a file of 7 bytes": raw(bytes(7)),
        "a header of 2**63 bytes": raw(b"\xff" * 8 + b"{}"),
        "a header longer than the file": raw((1000).to_bytes(8, "little") + b"{}"),
        "a header of more than 100 MB": raw((100_000_001).to_bytes(8, "little") + b"{", 200_000_000),
        "a header of no bytes": whole(b""),
        "a header of zeros": whole(bytes(4096)),
        "a header that is a list": whole(b"[]"),
        "a header that begins with a space": whole(b" " + text, bytes(8)),
        "a header that is cut": whole(text[:-1], bytes(8)),
        "a header with more after it": whole(text + b"{}", bytes(8)),
        "a header of 50,000 brackets": whole(b'{"a":' + b"[" * 50_000),
        "a header of 50,000 objects": whole(b'{"a":' * 50_000),
        "a header that is no UTF-8": whole(text.replace(b'"b"', b'"\xff"'), bytes(8)),
        "a lone surrogate": whole(text.replace(b'"b"', b'"\\ud800"'), bytes(8)),
        "a key twice": whole(text[:-1] + b',"a":' + json.dumps(two["a"]).encode() + b"}", bytes(8)),
        "a key twice, once escaped": whole(text.replace(b'"b"', b'"\\u0061"').replace(b"4, 8", b"0, 4"), bytes(4)),
        "a shape twice": whole(text.replace(b'"shape": [4]', b'"shape": [4], "shape": [4]', 1), bytes(8)),
        "notes twice": whole(b'{"__metadata__":{"x":"y"},"__metadata__":{},' + text[1:], bytes(8)),
        "notes that are no text": whole({"__metadata__": {"x": 1}, **two}, bytes(8)),
        "notes that are a tensor": whole({"__metadata__": two["a"], "b": two["b"]}, bytes(8)),
        "a member too many": other("b", extra=1),
        "a member missing": whole({"a": {"dtype": "U8", "shape": [4]}}, bytes(4)),
        "a dtype that nobody has": other("b", dtype="F33"),
        "four bits": other("b", dtype="F4", shape=[8]),
        "a dtype that is a number": other("b", dtype=1),
        "another dtype": other("b", dtype="U16"),
        "a shape of floats": other("b", shape=[4.0]),
        "a shape of true": other("b", shape=[True]),
        "a negative size": other("b", shape=[-4]),
        "two negative sizes": other("b", shape=[-2, -2]),
        "a size of 2**62": other("b", shape=[2**62]),
        "a size of 2**64 + 4": other("b", shape=[2**64 + 4]),
        "a size of a million digits": whole(text.replace(b"[4]", b"[" + b"4" * 1_000_000 + b"]", 1), bytes(8)),
        "sizes that wrap around": other("b", shape=[2**32, 2**32, 4]),
        "an empty tensor of 2**62": whole({"a": entry("U8", [0, 2**62], 0, 0)}),
        "65 dimensions": other("b", shape=[1] * 64 + [4]),
        "10,000 dimensions": other("b", shape=[1] * 9_999 + [4]),
        "a shape too small": other("b", shape=[3]),
        "a shape too large": other("b", shape=[5]),
        "data that overlaps": other("b", data_offsets=[3, 7]),
        "data twice": other("b", data_offsets=[0, 4]),
        "data within data": whole({"a": entry("U8", [8], 0, 8), "b": entry("U8", [2], 2, 4)}, bytes(8)),
        "data with a hole": whole({"a": two["a"], "b": entry("U8", [4], 5, 9)}, bytes(9)),
        "data that begins late": whole({"a": entry("U8", [4], 4, 8)}, bytes(8)),
        "data that ends early": whole(two, bytes(9)),
        "data that ends late": whole(two, bytes(7)),
        "data before the file": other("a", data_offsets=[-4, 0]),
        "data backwards": other("b", data_offsets=[8, 4]),
        "data at 2**63": other("b", data_offsets=[2**63, 2**63 + 4]),
        "data at 1.5": other("b", data_offsets=[1.5, 5.5]),
        "one offset": other("b", data_offsets=[4]),
        "three offsets": other("b", data_offsets=[4, 8, 8]),
        "an empty tensor in a tensor": whole({"a": two["a"], "b": entry("U8", [0], 2, 2)}, bytes(4)),
        "a key of 64 KiB": whole({"k" * 65_537: two["a"]}, bytes(4)),
        "data of 2**40 bytes in a small file": whole({"a": entry("U8", [2**40], 0, 2**40)}, bytes(8)),
    }


def _weights(change: Callable[[dict[str, str]], object]) -> Make:
    def apply(path: Path) -> None:
        index = json.loads((path / INDEX).read_text())
        change(index["weight_map"])
        (path / INDEX).write_text(json.dumps(index))

    return changed(apply)


def _index_text(old: str, new: str) -> Make:
    def apply(path: Path) -> None:
        text = (path / INDEX).read_text()
        assert old in text
        (path / INDEX).write_text(text.replace(old, new, 1))

    return changed(apply)


def _named(name: str) -> Make:
    def change(weights: dict[str, str]) -> None:
        weights["c"] = name

    return _weights(change)


def _indexes() -> dict[str, Make]:
    names = {
        "a parent": "../outside",
        "a parent of a folder": "x/../../outside.safetensors",
        "a name in a folder": "sub/model.safetensors",
        "an absolute name": "/etc/passwd.safetensors",
        "a backslash": "..\\outside.safetensors",
        "a drive": "C:model.safetensors",
        "a stream": "model.safetensors:hidden.safetensors",
        "a dot": ".",
        "two dots": "..",
        "no name": "",
        "a NUL": "model\0.safetensors",
        "a newline": "model\n.safetensors",
        "a long name": "x" * 300 + ".safetensors",
        "another kind of file": "config.json",
        "a missing file": "model-00003-of-00003.safetensors",
        "another file": FIRST,
    }
    cases = {f"an index with {name}": _named(text) for name, text in names.items()}
    return cases | {
        "an index that is empty": changed(lambda path: (path / INDEX).write_text("")),
        "an index that is a list": changed(lambda path: (path / INDEX).write_text("[]")),
        "an index without weights": changed(lambda path: (path / INDEX).write_text("{}")),
        "an index of 50,000 brackets": changed(lambda path: (path / INDEX).write_text('{"weight_map":' + "[" * 50_000)),
        "an index with a list of weights": _index_text('"weight_map": {', '"weight_map": [], "x": {'),
        "an index with numbers": _index_text(f'"{SECOND}"', "2"),
        "an index with a key twice": _index_text('"c":', f'"c": "{SECOND}", "c":'),
        "an index with its weights twice": _index_text('{"metadata"', '{"weight_map": {}, "metadata"'),
        "an index of more than 100 MB": changed(lambda path: os.truncate(path / INDEX, 200_000_000)),
        "an index with a key too many": _weights(lambda weights: weights.update(d=FIRST)),
        "an index with a key missing": _weights(lambda weights: weights.pop("b")),
        "an index without keys": _weights(lambda weights: [weights.pop(key) for key in ("b", "c")]),
        "a stray key in another file": changed(
            lambda path: (path / SECOND).write_bytes(
                file_bytes(*header_of({"a": torch.ones(4, 6), "c": torch.zeros(5)}))
            )
        ),
        "two indexes": changed(lambda path: _other_index(path, "y.safetensors.index.json")),
        "an index beside a whole": changed(lambda path: _other_index(path, "model.safetensors")),
        "files with the same keys": changed(_without_index),
    }


def _other_index(path: Path, *others: str) -> None:
    """The index under another name, with ``others`` beside it."""
    data = (path / INDEX).read_bytes()
    (path / INDEX).unlink()
    for name in ("x.safetensors.index.json", *others):
        (path / name).write_bytes(data if name.endswith("json") else (path / FIRST).read_bytes())


def _without_index(path: Path) -> None:
    (path / INDEX).unlink()
    (path / "consolidated.safetensors").write_bytes((path / FIRST).read_bytes())


def _swap(name: str, put: Callable[[Path, Path], object], first: Make = honest) -> Make:
    """In place of a file something else: ``put`` is told where, and where the file is now, outside."""

    def apply(path: Path) -> None:
        outside = path.parent / "outside"
        os.rename(path / name, outside)
        put(path / name, outside)

    return changed(apply, first)


def _things() -> dict[str, Make]:
    cases: dict[str, Make] = {}
    for title, name, first in (
        ("file", SECOND, honest),
        ("index", INDEX, honest),
        ("holdfast.json", NOTES, exported),
    ):
        cases |= {
            f"a link as {title}": _swap(name, lambda place, outside: place.symlink_to(outside), first),
            f"a dangling link as {title}": _swap(name, lambda place, _: place.symlink_to("/nowhere/at/all"), first),
            f"a link to itself as {title}": _swap(name, lambda place, _: place.symlink_to(place.name), first),
            f"a pipe as {title}": _swap(name, lambda place, _: os.mkfifo(place), first),
            f"a folder as {title}": _swap(name, lambda place, _: place.mkdir(), first),
        }
    cases["a device as file"] = _swap(SECOND, lambda place, _: place.symlink_to("/dev/zero"))
    return cases


def shards(path: Path, parts: list[tuple[Any, list[int], str]], *, notes: Any = None) -> None:
    """Files as torch writes them rank by rank: of ``w``, at these offsets, parts of these shapes and dtypes."""
    path.mkdir()
    for number, (offsets, shape, dtype) in enumerate(parts, 1):
        size = int(np.prod(shape)) * {"F32": 4, "U8": 1}[dtype]
        info = json.dumps({"w": {"saved_offsets": offsets}}) if notes is None else notes
        header = {"__metadata__": {"DCP_SHARDING_INFO": info}, "w": entry(dtype, shape, 0, size)}
        name = f"shard-{number:05}-model-00001-of-00001.safetensors"
        (path / name).write_bytes(file_bytes(header, bytes(size)))


def _shards() -> dict[str, Make]:
    def of(*parts: tuple[Any, list[int], str], notes: Any = None) -> Make:
        return partial(shards, parts=list(parts), notes=notes)

    return {
        "parts that overlap": of(([0, 0], [2, 4], "U8"), ([1, 0], [2, 4], "U8")),
        "parts with a gap": of(([0, 0], [2, 4], "U8"), ([3, 0], [2, 4], "U8")),
        "a part that begins late": of(([1, 0], [2, 4], "U8")),
        "a part twice": of(([0, 0], [2, 4], "U8"), ([0, 0], [2, 4], "U8")),
        "parts of two dtypes": of(([0, 0], [2, 4], "U8"), ([2, 0], [2, 4], "F32")),
        "parts of two dimensions and of one": of(([0, 0], [2, 4], "U8"), ([2], [2], "U8")),
        "a part at -1": of(([-1, 0], [2, 4], "U8")),
        "a part at 2**61": of(([2**61, 0], [2, 4], "U8")),
        "a part at 2**40 by 2**40": of(([0, 0], [2, 4], "U8"), ([2**40, 2**40], [2, 4], "U8")),
        "a part at 2**62": of(([2**62, 0], [2, 4], "U8")),
        "a part at 2**70": of(([2**70, 0], [2, 4], "U8")),
        "a part at a text": of((["0", 0], [2, 4], "U8")),
        "a part with one offset": of(([0], [2, 4], "U8")),
        "parts of something else": of(([0, 0], [2, 4], "U8"), notes='{"v": {"saved_offsets": [0, 0]}}'),
        "parts that are no JSON": of(([0, 0], [2, 4], "U8"), notes="{"),
        "parts of 50,000 brackets": of(([0, 0], [2, 4], "U8"), notes="[" * 50_000),
    }


def _rewritten(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    (path / SECOND).write_bytes(file_bytes(*header_of(tensors)))


def _noted(change: Callable[[bytes], bytes]) -> Make:
    return changed(lambda path: (path / NOTES).write_bytes(change((path / NOTES).read_bytes())), exported)


def _other_notes(first: Make) -> Make:
    """The holdfast.json of another folder."""

    def apply(path: Path) -> None:
        other = path.parent / "other"
        first(other)
        write_notes(other)
        os.replace(other / NOTES, path / NOTES)

    return changed(apply, exported)


def _notes() -> dict[str, Make]:
    def beside(second: Mapping[str, torch.Tensor], name: str = SECOND) -> Make:
        return partial(write_folder, files={FIRST: A_AND_B, name: second})

    backwards = {FIRST: dict(reversed(A_AND_B.items())), SECOND: HONEST[SECOND]}
    return {
        "notes of no bytes": _noted(lambda data: b""),
        "notes that are cut": _noted(lambda data: data[:-1]),
        "notes with a flipped bit": _noted(lambda data: data[:200] + bytes([data[200] ^ 1]) + data[201:]),
        "notes of brackets": _noted(lambda data: b'{"format":"holdfast-folder","version":1,' + b"[" * 50_000),
        "notes with two tensors in each other's place": changed(
            lambda path: write_notes(path, renamed={"a": "b", "b": "a"}),
            partial(write_folder, files={FIRST: {"a": torch.zeros(5), "b": torch.ones(5)}}),
        ),
        "notes of more bytes than allowed": changed(lambda path: os.truncate(path / NOTES, 1 << 40), exported),
        "notes of other files": _other_notes(beside(HONEST[SECOND], "model-00003-of-00003.safetensors")),
        "notes of other keys": _other_notes(beside({"d": torch.zeros(5)})),
        "notes of other shapes": _other_notes(beside({"c": torch.zeros(6)})),
        "notes of headers with more spaces": _other_notes(partial(write_folder, files=HONEST, pad=1)),
        "notes of keys in another order": _other_notes(partial(write_folder, files=backwards)),
        "a file written anew with another shape": changed(
            lambda path: _rewritten(path, {"c": torch.zeros(5, 1)}), exported
        ),
        "a file written anew with another dtype": changed(
            lambda path: _rewritten(path, {"c": torch.zeros(20, dtype=torch.uint8)}), exported
        ),
        "a file written anew with a key more": changed(
            lambda path: _rewritten(path, {"c": torch.zeros(5), "d": torch.zeros(1)}), exported
        ),
    }


CASES: dict[str, Make] = {**_headers(), **_indexes(), **_things(), **_shards(), **_notes()}
"""Every case: what puts it at a path that is not there yet."""
