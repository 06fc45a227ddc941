"""A mutational fuzzer of everything that decodes bytes of a checkpoint, over the corpus in ``torture/corpus``.

Mutations know the structure: JSON is changed as JSON, columns as columns, pickles opcode by opcode; digests are made
right again most of the time, so that what comes after them is reached. Everything follows from the seed of a batch.
"""

from __future__ import annotations

import io
import json
import pickle
import pickletools
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

import holdfast
from holdfast._native.index import INDEX_METADATA, check_index, decode_header, decode_index, encode_header, encode_index
from holdfast._native.manifest import Manifest, decode_manifest, encode_manifest
from holdfast._native.values import decode_value_bytes, encode_value_bytes
from holdfast._torch_codec.archive import find_tensor
from holdfast._torch_codec.metadata_file import decode_metadata
from torture import hostile_torch
from torture.forge import COLUMNS, index_bytes, sealed
from torture.samples import save, small_state

CORPUS = Path(__file__).with_name("corpus")
_NUMBERS = (0, 1, -1, 2, 7, 64, 65, 255, 256, 4095, 4096, 1 << 20, 1 << 31, 1 << 53, 1 << 60, 1 << 62, 1 << 63, 1 << 64)
_TEXTS = ("", "..", "/etc/passwd", "a" * 300, "\x00", "ü", "@[0:1]", "__metadata__", "float32", "pickle", "nan", "-0x1")
_TAGS = ("tuple", "dict", "set", "frozenset", "int", "float", "bytes", "complex", "torch.dtype", "torch.device")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A decoder: ``mutate`` makes an input of the corpus, ``decode`` raises an error of the library or accepts it."""

    mutate: Callable[[random.Random], bytes]
    decode: Callable[[bytes], object]


@cache
def corpus(kind: str) -> tuple[bytes, ...]:
    """The inputs that are kept for a decoder."""
    found = tuple(file.read_bytes() for file in sorted((CORPUS / kind).iterdir()))
    assert found, f"the corpus has nothing for {kind}"
    return found


# --- bytes ----------------------------------------------------------------------------------------------------------


def mutated_bytes(data: bytes, chosen: random.Random) -> bytes:
    """``data`` with a few bytes flipped, set, removed, repeated, exchanged or put in."""
    changed = bytearray(data)
    for _ in range(chosen.choice((1, 1, 1, 2, 4))):
        if not changed:
            return b"\x00"
        at = chosen.randrange(len(changed))
        kind = chosen.randrange(6)
        if kind == 0:
            changed[at] ^= 1 << chosen.randrange(8)
        elif kind == 1:
            changed[at] = chosen.choice((0, 0xFF, 0x7F, 0x80, 0x20, 0x22, 0x5B, 0x7B, chosen.randrange(256)))
        elif kind == 2:
            del changed[at : at + chosen.choice((1, 2, 8, 64))]
        elif kind == 3:
            changed[at:at] = changed[at : at + chosen.choice((1, 4, 32))]
        elif kind == 4:
            size = chosen.choice((1, 2, 4, 8))
            number = chosen.choice((0, 1, (1 << 8 * size) - 1, 1 << (8 * size - 1), chosen.randrange(1 << 8 * size)))
            changed[at : at + size] = number.to_bytes(size, "little")
        else:
            other = chosen.randrange(len(changed))
            changed[at : at + 4] = changed[other : other + 4]
    return bytes(changed)


# --- JSON -----------------------------------------------------------------------------------------------------------


def mutated_json(value: Any, chosen: random.Random) -> Any:
    """``value`` with one place in it changed, somewhere; containers on the way are copied."""
    if isinstance(value, dict) and value and chosen.random() < 0.93:
        changed = dict(value)
        key = chosen.choice(list(changed))
        kind = chosen.randrange(14)
        if kind == 0:
            del changed[key]
        elif kind == 1:
            changed[chosen.choice((*_TEXTS, *_TAGS))] = changed[key]
        elif kind == 2:
            changed = dict(chosen.sample(list(changed.items()), len(changed)))
        else:
            changed[key] = mutated_json(changed[key], chosen)
        return changed
    if isinstance(value, list) and value and chosen.random() < 0.93:
        items = list(value)
        at = chosen.randrange(len(items))
        kind = chosen.randrange(14)
        if kind == 0:
            del items[at]
        elif kind == 1:
            items.insert(at, items[chosen.randrange(len(items))])
        elif kind == 2:
            items[at], items[-1] = items[-1], items[at]
        else:
            items[at] = mutated_json(items[at], chosen)
        return items
    return _other_json(value, chosen)


def _other_json(value: Any, chosen: random.Random) -> Any:
    kind = chosen.randrange(8)
    if kind == 0:
        return [value]
    if kind == 1:
        return {chosen.choice(_TAGS): value}
    if kind == 2:
        return chosen.choice((None, True, False, [], {}, 1.5, -0.0, 1e300))
    if isinstance(value, str) and kind < 6:
        return mutated_bytes(value.encode(), chosen).decode("utf-8", "replace")
    if isinstance(value, int) and kind < 6:
        return value + chosen.choice((1, -1, 4096, 1 << 32, -(1 << 40)))
    return chosen.choice(_NUMBERS) if kind == 6 else chosen.choice(_TEXTS)


@cache
def _parsed(data: bytes) -> Any:
    return msgspec.json.decode(data)


# --- the decoders ---------------------------------------------------------------------------------------------------


def _manifest_input(chosen: random.Random) -> bytes:
    data = chosen.choice(corpus("manifest"))
    kind = chosen.random()
    if kind < 0.05:
        return mutated_bytes(data, chosen)
    if kind < 0.35:
        return sealed(mutated_bytes(data, chosen))
    value = _parsed(data)
    for _ in range(chosen.choice((1, 1, 2, 3))):
        value = mutated_json(value, chosen)
    return sealed(msgspec.json.encode(value))


def _decode_manifest(data: bytes) -> None:
    manifest = decode_manifest(data, path="manifest")
    _must(encode_manifest(manifest) == data, "a manifest is accepted that is written otherwise")


@cache
def _manifests() -> tuple[Manifest, ...]:
    return tuple(decode_manifest(data, path="manifest") for data in corpus("manifest"))


@cache
def _columns(data: bytes) -> dict[str, np.ndarray]:
    found = decode_index(data, path="index")
    return {name: np.array(getattr(found, name), dtype=np.uint64) for name in COLUMNS}


def _index_input(chosen: random.Random) -> bytes:
    data = chosen.choice(corpus("index"))
    kind = chosen.random()
    if kind < 0.2:
        return mutated_bytes(data, chosen)
    if kind < 0.4:
        text = mutated_bytes(data[8:4096].rstrip(), chosen)[:4088].ljust(4088)
        return data[:8] + text + data[4096:]
    columns = dict(_columns(data))
    for _ in range(chosen.choice((1, 1, 2, 3))):
        _mutate_column(columns, chosen)
    return index_bytes(columns)


def _mutate_column(columns: dict[str, np.ndarray], chosen: random.Random) -> None:
    name = chosen.choice(COLUMNS)
    column = columns[name].copy()
    kind = chosen.randrange(8)
    if kind < 5 and column.size:
        at = chosen.randrange(column.size)
        flat = column.reshape(-1)
        number = chosen.choice((0, 1, int(flat[at]) + 1, int(flat[at]) - 1, chosen.choice(_NUMBERS)))
        flat[at] = np.uint64(number % (1 << 64))
    elif kind == 5 and len(column) > 1:
        order = list(range(len(column)))
        one, other = chosen.randrange(len(order)), chosen.randrange(len(order))
        order[one], order[other] = order[other], order[one]
        for each in ("tensor", "file", "offset", "bytes", "lo", "length"):
            if len(columns[each]) == len(order):
                columns[each] = columns[each][order]
        return
    elif kind == 6 and len(column):
        column = np.delete(column, chosen.randrange(len(column)), axis=0)
    elif len(column):
        column = np.insert(column, 0, column[chosen.randrange(len(column))], axis=0)
    columns[name] = column


def _decode_index(data: bytes) -> None:
    index = decode_index(data, path="index")
    _must(encode_index(index) == data, "an index is accepted that is written otherwise")
    for manifest in _manifests():
        if abs(len(index) - sum(entry.alias_of is None for entry in manifest.tensors)) > 2:
            continue
        try:
            check_index(index, files=manifest.files, tensors=manifest.tensors, path="index")
        except holdfast.CheckpointError:
            continue


def _header_input(chosen: random.Random) -> bytes:
    data = chosen.choice(corpus("header"))
    kind = chosen.random()
    if kind < 0.2:
        return mutated_bytes(data, chosen)
    text = data[8:].rstrip()
    text = mutated_bytes(text, chosen) if kind < 0.5 else msgspec.json.encode(mutated_json(_parsed(text), chosen))
    size = -(-(8 + len(text)) // 4096) * 4096
    return (size - 8).to_bytes(8, "little") + text.ljust(size - 8)


def _decode_header(data: bytes) -> None:
    entries = decode_header(data, path="header", metadata=INDEX_METADATA if b"holdfast-index" in data else None)
    metadata = INDEX_METADATA if b"holdfast-index" in data else None
    _must(encode_header(entries, reserve=len(data), metadata=metadata) == data, "a header is written otherwise")


def _value_input(chosen: random.Random) -> bytes:
    data = chosen.choice(corpus("value"))
    if chosen.random() < 0.2:
        return mutated_bytes(data, chosen)
    value = _parsed(data)
    for _ in range(chosen.choice((1, 1, 2, 4))):
        value = mutated_json(value, chosen)
    return msgspec.json.encode(value)


def _decode_value(data: bytes) -> None:
    value = decode_value_bytes(data, key="value")
    _must(encode_value_bytes(value, key="value") == data, "a value is accepted that is written otherwise")


@cache
def _opcodes(data: bytes) -> tuple[bytes, ...]:
    places = [place for _, _, place in pickletools.genops(data) if place is not None]
    return tuple(data[start:stop] for start, stop in zip(places, [*places[1:], len(data)], strict=True))


def _metadata_input(chosen: random.Random) -> bytes:
    data = chosen.choice(corpus("metadata"))
    if chosen.random() < 0.3:
        return mutated_bytes(data, chosen)
    opcodes = list(_opcodes(data))
    for _ in range(chosen.choice((1, 1, 2, 3, 6))):
        at = chosen.randrange(len(opcodes))
        kind = chosen.randrange(7)
        if kind == 0 and len(opcodes) > 2:
            del opcodes[at]
        elif kind == 1:
            opcodes.insert(at, opcodes[chosen.randrange(len(opcodes))])
        elif kind == 2:
            opcodes[at] = opcodes[chosen.randrange(len(opcodes))]
        elif kind == 3:
            opcodes.insert(
                at, bytes([chosen.choice(b"()}]NRbtsuaeQl0123qhJKMGX\x81\x85\x86\x87\x88\x8f\x90\x91\x93\x94.")])
            )
        elif kind == 4:
            opcodes[at] = mutated_bytes(opcodes[at], chosen)
        elif kind == 5:
            opcodes[at] = chosen.choice(
                (b"J\xff\xff\xff\xff", b"\x8a\x09" + b"\xff" * 8 + b"\x00", b"K\x00", b"N", b"\x88")
            )
        else:
            other = chosen.choice([_opcodes(each) for each in corpus("metadata")])
            start = chosen.randrange(len(other))
            opcodes[at:at] = other[start : start + chosen.randrange(1, 12)]
    return b"".join(opcodes)


def _decode_metadata(data: bytes) -> None:
    decode_metadata(data, path="metadata")


def _archive_input(chosen: random.Random) -> bytes:
    data = chosen.choice(corpus("archive"))
    if chosen.random() < 0.5:
        return mutated_bytes(data, chosen)
    # The directory, at the end, more often than its share.
    cut = max(0, len(data) - 400)
    return data[:cut] + mutated_bytes(data[cut:], chosen)


def _decode_archive(data: bytes) -> None:
    def read(start: int, stop: int) -> bytes:
        _must(0 <= start <= stop <= len(data), f"bytes {start} to {stop} of an archive of {len(data)} are read")
        return data[start:stop]

    elements = find_tensor(read, len(data))
    if elements is not None:
        end = elements.begin + elements.nbytes
        _must(0 <= elements.begin <= end <= len(data), "a tensor is found outside of its archive")


class Accepted(Exception):
    """Something was accepted that must not be."""


def _must(condition: bool, otherwise: str) -> None:
    if not condition:
        raise Accepted(otherwise)


TARGETS: dict[str, Target] = {
    "manifest": Target(mutate=_manifest_input, decode=_decode_manifest),
    "index": Target(mutate=_index_input, decode=_decode_index),
    "header": Target(mutate=_header_input, decode=_decode_header),
    "value": Target(mutate=_value_input, decode=_decode_value),
    "metadata": Target(mutate=_metadata_input, decode=_decode_metadata),
    "archive": Target(mutate=_archive_input, decode=_decode_archive),
}


# --- the corpus -----------------------------------------------------------------------------------------------------


def make_corpus(folder: Path) -> None:
    """Write the corpus anew, from honest checkpoints made in ``folder``; ``python -m torture.fuzzing FOLDER``."""
    golden = Path(__file__).parents[1] / "tests" / "compat" / "data"
    state = small_state()
    del state["note"]
    save(state, folder / "native")
    checkpoints = [folder / "native", *(path.parent for path in sorted(golden.glob("*/*/manifest.json")))]
    for path in checkpoints:
        name = path.name
        manifest = (path / "manifest.json").read_bytes()
        _keep("manifest", name, manifest)
        _keep("index", name, (path / json.loads(manifest)["index"]["name"]).read_bytes())
        _keep("header", f"{name}-index", (path / json.loads(manifest)["index"]["name"]).read_bytes()[:4096])
        for entry in json.loads(manifest)["files"]:
            _keep(
                "header",
                entry["name"].removesuffix(".safetensors"),
                (path / entry["name"]).read_bytes()[: entry["header"]],
            )
        for number, entry in enumerate(json.loads(manifest)["values"]):
            _keep("value", f"{name}-{number}", msgspec.json.encode(entry["value"]))
    hostile_torch.saved(folder / "torch")
    data = (folder / "torch" / ".metadata").read_bytes()
    for protocol in (2, 4):
        _keep("metadata", f"protocol-{protocol}", pickle.dumps(pickle.loads(data), protocol=protocol))
    for name, tensor in {
        "dense": torch.arange(6.0).reshape(2, 3),
        "turned": torch.arange(6).reshape(2, 3).T,
        "parameter": torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)),
        "part": torch.arange(9)[2:5],
    }.items():
        stream = io.BytesIO()
        torch.save(tensor, stream)
        _keep("archive", name, stream.getvalue())


def _keep(kind: str, name: str, data: bytes) -> None:
    (CORPUS / kind).mkdir(parents=True, exist_ok=True)
    if len(data) < 40_000:
        (CORPUS / kind / name).write_bytes(data)


if __name__ == "__main__":
    make_corpus(Path(sys.argv[1]))
