"""Keys that were chosen to meet in Python's tables, and containers that hold each other: small files, endless work."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

PRIME = (1 << 61) - 1
"""Python's hash of an integer is its remainder by this number."""

MANY = 20_000


def equal_integers(count: int = MANY) -> list[int]:
    """Integers that all have one hash."""
    return [PRIME * number for number in range(1 << 10, count + (1 << 10))]


def equal_tuples(count: int = MANY) -> list[tuple[int, ...]]:
    """Tuples that all have one hash, because -1 and -2 have."""
    return [tuple(-1 - (number >> bit & 1) for bit in range(16)) for number in range(count)]


@cache
def chained_integers(bits: int = 16) -> list[int]:
    """Integers of different hashes: a third of the slots of a table, and as many that find these taken, one by one."""
    size, mask = 1 << bits, (1 << bits) - 1
    taken, slot = [], 0
    for _ in range(size // 3):
        taken.append(slot)
        slot = (5 * slot + 1) & mask
    # Where a slot is in the order in which they are probed in the end; beyond all of them if it is free.
    order = np.full(size, size)
    order[taken] = np.arange(len(taken))
    numbers = rest = np.arange(size, 64 * size)
    slots = numbers & mask
    meets = order[slots] < size
    while rest.any():
        rest = rest >> 5
        slots = (5 * slots + rest + 1) & mask
        meets &= order[slots] < (size if rest.any() else len(taken) // 4)
    return [*taken, *numbers[meets][: size // 3].tolist()]


def typed_json(key: Any) -> Any:
    """``key`` as the manifest writes it."""
    if isinstance(key, tuple):
        return {"tuple": [typed_json(each) for each in key]}
    if isinstance(key, complex):
        return {"complex": [key.real, key.imag]}
    return key if abs(key) < 1 << 53 else {"int": hex(key)}


def colliding() -> dict[str, list[Any]]:
    """Lists of keys that take long to tell apart."""
    return {
        "integers of one hash": equal_integers(),
        "integers of one chain": chained_integers(),
        "tuples of one hash": equal_tuples(),
        "complex numbers of one hash": [complex(1000003 * number, -number) for number in range(1, MANY)],
        "tuples of one hash in tuples": [(key,) for key in equal_tuples(MANY // 2)],
    }


# --- pickles ---------------------------------------------------------------------------------------------------------


def pickled_keys(keys: list[Any]) -> bytes:
    """Opcodes that push ``keys``, each with None after it."""
    return b"".join(_pushed(key) + b"N" for key in keys)


def _pushed(key: Any) -> bytes:
    if isinstance(key, tuple):
        return b"(" + b"".join(map(_pushed, key)) + b"t"
    if isinstance(key, complex):
        return b"cbuiltins\ncomplex\nG" + struct.pack(">d", key.real) + b"G" + struct.pack(">d", key.imag) + b"\x86R"
    if -(1 << 31) <= key < 1 << 31:
        return struct.pack("<ci", b"J", key)
    data: bytes = pickle.encode_long(key)
    return b"\x8a%c%b" % (len(data), data)


def pickles() -> dict[str, bytes]:
    """Whole pickles that would keep whoever loads them busy."""
    found: dict[str, bytes] = {}
    for title, keys in colliding().items():
        found[f"a dict of {title}"] = b"\x80\x02}(" + pickled_keys(keys) + b"u."
    integers = equal_integers()
    found["a dict of integers of one hash, one by one"] = (
        b"\x80\x02}" + b"".join(_pushed(key) + b"Ns" for key in integers) + b"."
    )
    pushed = b"".join(map(_pushed, integers))
    pairs = b"".join(_pushed(key) + b"N\x86" for key in integers)
    found["a set of integers of one hash"] = b"\x80\x02cbuiltins\nset\n](" + pushed + b"e\x85R."
    found["a counter of integers of one hash"] = b"\x80\x02ccollections\nCounter\n](" + pushed + b"e\x85R."
    found["an ordered dict of integers of one hash"] = b"\x80\x02ccollections\nOrderedDict\n](" + pairs + b"e\x85R."
    doubled = b")" + b"".join(b"q" + bytes([n]) + b"h" + bytes([n]) + b"\x86" for n in range(60))
    found["a key that doubles 60 times"] = b"\x80\x02}" + doubled + b"Ns."
    return found


def archive(data: bytes) -> bytes:
    """What torch.save would write around a pickle."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as records:
        for name, content in {"data.pkl": data, "version": b"3\n", "byteorder": b"little"}.items():
            records.writestr(f"archive/{name}", content)
    return stream.getvalue()


# --- .pt files -------------------------------------------------------------------------------------------------------


def _shared(levels: int, make: Callable[[Any], Any], leaf: Any) -> Any:
    for _ in range(levels):
        leaf = make(leaf)
    return leaf


def _endless() -> list[Any]:
    circle: list[Any] = []
    circle.append(circle)
    return circle


def states() -> dict[str, Callable[[], Any]]:
    """States that become endless or enormous for whoever takes them apart."""
    base = torch.zeros(300)
    text = "x" * 100_000
    return {
        "lists that share lists": lambda: {"x": _shared(60, lambda each: [each, each], [1])},
        "lists that share lists with a tensor": lambda: {"x": _shared(60, lambda each: [each, each], [base])},
        "dicts that share dicts": lambda: {"x": _shared(60, lambda each: {"l": each, "r": each}, {"t": base})},
        "tuples that share tuples": lambda: {"x": _shared(60, lambda each: (each, each), (base,))},
        "lists and dicts that share each other": lambda: {"x": _shared(40, lambda each: [{"a": each}, (each,)], [1])},
        "a text in very many places": lambda: {"x": [[text] * 1000] * 1000},
        "a list that contains itself": lambda: {"x": _endless()},
        "an expanded tensor": lambda: {"x": base[:1].expand(1 << 40)},
        "an expanded tensor of two dimensions": lambda: {"x": base.expand(1 << 30, 300)},
        "very many views of one memory": lambda: {str(n): base[:1].expand(1 << 20, n) for n in range(1, 100)},
        "an expanded parameter": lambda: {"x": torch.nn.Parameter(base[:1].expand(1 << 40))},
    }


def pt_files() -> dict[str, Callable[[Path], object]]:
    """Hostile .pt files; each function writes one."""

    def saved(make: Callable[[], Any], path: Path) -> None:
        torch.save(make(), path)

    def written(data: bytes, path: Path) -> None:
        path.write_bytes(archive(data))

    def old(data: bytes, path: Path) -> None:
        stream = io.BytesIO()
        torch.save({}, stream, _use_new_zipfile_serialization=False)
        # The state is the one empty dict.
        path.write_bytes(stream.getvalue().replace(b"\x80\x02}q\x00.", data, 1))

    found: dict[str, Callable[[Path], object]] = {}
    for title, make in states().items():
        found[title] = lambda path, make=make: saved(make, path)  # type: ignore[misc]
    for title, data in pickles().items():
        found[title] = lambda path, data=data: written(data, path)  # type: ignore[misc]
    data = pickles()["a dict of integers of one hash"]
    found["a dict of integers of one hash, as before torch 1.6"] = lambda path: old(data, path)
    return found
