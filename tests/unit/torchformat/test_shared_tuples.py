"""Tuples that refer to the one before twice: a few hundred bytes that would keep the interpreter hashing for ever."""

from __future__ import annotations

import pickle
import pickletools
from collections import OrderedDict
from typing import Any

import pytest
import torch

from holdfast._torch_codec.pickles import check_opcodes, unpickle
from holdfast.errors import CorruptError


def doubling(levels: int, *, put: str) -> bytes:
    """Opcodes of a tuple made of the one before twice over, so many times."""
    parts = [b")"]
    for number in range(levels):
        kept = {"MEMOIZE": b"\x94", "BINPUT": b"q%c" % number, "LONG_BINPUT": b"r%c\0\0\0" % number}[put]
        parts += [kept, b"h%c" % number, b"\x86"]
    return b"".join(parts)


def nothing(module: str, name: str) -> Any:
    raise KeyError(name)


@pytest.mark.parametrize("put", ["MEMOIZE", "BINPUT", "LONG_BINPUT"])
@pytest.mark.parametrize(
    ("begin", "end"),
    [(b"\x80\x04}", b"Ns."), (b"\x80\x04\x8f(", b"\x90."), (b"\x80\x04(", b"\x91."), (b"\x80\x04}(", b"Nu.")],
    ids=["key", "set", "frozenset", "keys"],
)
def test_a_key_that_doubles_is_refused_at_once(begin: bytes, end: bytes, put: str) -> None:
    with pytest.raises(CorruptError):
        unpickle(begin + doubling(70, put=put) + end, nothing, what="it")


def shown(data: bytes) -> list[str]:
    return [opcode.name for opcode, _, _ in pickletools.genops(data)]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize(
    "value",
    [
        {"a": (1, 2, ("b", "b")), "b": [(), (1,), (1, 2, 3, 4), -5, 1 << 40, 2.5, None, True]},
        OrderedDict([("key" * 100, ((1, 2), (3, 4)))]),
        [(number, str(number), [number]) for number in range(600)],
        "x" * 70_000,
        torch.Size([1, 2]),
        {"tuples \x86\x94 in text": (b"\x86\x94" * 3, "\x94t\x94")},
    ],
    ids=["nested", "ordered", "many", "framed", "size", "look-alikes"],
)
def test_honest_streams_mean_the_same(value: Any, protocol: int) -> None:
    known = {"Size": torch.Size, "OrderedDict": OrderedDict, "encode": lambda text, coding: text.encode(coding)}
    found = unpickle(pickle.dumps(value, protocol=protocol), lambda module, name: known[name], what="it")
    assert found == value
    assert type(found) is type(value)


def test_a_tuple_that_comes_twice_is_a_list_the_second_time() -> None:
    """Nothing that torch writes has one; what gets the list refuses it."""
    twice = (1, 2)
    found = unpickle(pickle.dumps([twice, twice]), nothing, what="it")
    assert found == [(1, 2), []]
    assert "FRAME" not in shown(check_opcodes(pickle.dumps(["x" * 100] * 3), what="it"))
