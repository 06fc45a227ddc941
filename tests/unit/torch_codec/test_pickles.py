"""Pickles as bytes: messages between ranks come back, and pickles that would take for ever are given up."""

from __future__ import annotations

import io
import pickle
import pickletools
import zipfile
from collections import Counter, OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast._torch_codec.pickles import (
    check_opcodes,
    decode_message,
    deserialize_object,
    encode_message,
    read_pt,
    serialize_object,
    unpickle,
    weigh,
)
from holdfast.errors import CorruptError

# --- parts of plans travel as they are, columns and the user's own classes included -----------------------------------


@dataclass
class OwnPlan:
    columns: np.ndarray
    note: str


def test_a_plan_of_the_users_own_arrives_equal() -> None:
    sent = OwnPlan(columns=np.arange(1000, dtype=np.int64).reshape(10, 100), note="mine")
    found = decode_message(encode_message([sent, None, (1, "a")]))
    assert found[1:] == [None, (1, "a")]
    assert found[0].note == "mine"
    assert np.array_equal(found[0].columns, sent.columns)


# --- keys that were chosen to meet in Python's tables: given up, wherever they are read -------------------------------


PRIME = (1 << 61) - 1
NUMBERS = [pickle.encode_long(PRIME * number) for number in range(1, 12_000)]
PUSHED = [b"\x8a" + bytes([len(number)]) + number for number in NUMBERS]
TUPLES = [b"(" + b"".join(b"h\x01" if n >> bit & 1 else b"h\x00" for bit in range(14)) + b"t" for n in range(1 << 14)]
PICKLES = {
    "dict": b"\x80\x02}(" + b"".join(key + b"N" for key in PUSHED) + b"u.",
    "one by one": b"\x80\x02}" + b"".join(key + b"Ns" for key in PUSHED) + b".",
    "tuples": b"\x80\x02J\xff\xff\xff\xffq\x00J\xfe\xff\xff\xffq\x01}("
    + b"".join(key + b"N" for key in TUPLES)
    + b"u.",
}
ONLY_IN_FILES = {
    "set": b"\x80\x02cbuiltins\nset\n](" + b"".join(PUSHED) + b"e\x85R.",
    "counter": b"\x80\x02ccollections\nCounter\n](" + b"".join(PUSHED) + b"e\x85R.",
    "ordered": b"\x80\x02ccollections\nOrderedDict\n](" + b"".join(key + b"N\x86" for key in PUSHED) + b"e\x85R.",
    "ordered, filled": b"\x80\x02ccollections\nOrderedDict\n)R(" + b"".join(key + b"N" for key in PUSHED) + b"u.",
    "doubling": b"\x80\x02})" + b"".join(b"q%ch%c\x86" % (n, n) for n in range(60)) + b"Ns.",
    "of an unknown version": b"\x80\xfa}(" + b"".join(key + b"N" for key in PUSHED) + b"u.",
}
ALL = {**PICKLES, **ONLY_IN_FILES}


def archive(data: bytes, *, crc: bool = True) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as records:
        for name, content in {"data.pkl": data, "version": b"3\n", "byteorder": b"little"}.items():
            records.writestr(f"archive/{name}", content)
    whole = stream.getvalue()
    if crc:
        return whole
    checksum = zipfile.crc32(data).to_bytes(4, "little")  # type: ignore[attr-defined]
    return whole.replace(checksum, b"\0\0\0\0")


def nothing(module: str, name: str) -> Any:
    raise KeyError(name)


@pytest.mark.parametrize("name", sorted(PICKLES))
def test_the_unpickler_of_metadata_gives_up(name: str) -> None:
    with pytest.raises(CorruptError, match="it is damaged: it has keys that were chosen to make reading slow"):
        unpickle(PICKLES[name], nothing, what="it")


def test_ordered_dicts_are_filled_by_us_too() -> None:
    def find(module: str, name: str) -> Any:
        return {"OrderedDict": OrderedDict}[name]

    with pytest.raises(CorruptError, match="slow"):
        unpickle(ONLY_IN_FILES["ordered, filled"], find, what="it")


@pytest.mark.parametrize("opcode", [b"\x8f", b"(\x91", b"\x8f(\x90"], ids=["set", "frozenset", "filled"])
def test_sets_are_not_what_metadata_is_made_of(opcode: bytes) -> None:
    with pytest.raises(CorruptError, match="not a pickle of torch"):
        unpickle(b"\x80\x04" + opcode + b".", nothing, what="it")


@pytest.mark.parametrize("name", sorted(ALL))
def test_values_and_files_are_weighed_before_torch_loads_them(name: str, tmp_path: Path) -> None:
    with pytest.raises(CorruptError, match="the value of 'k' is damaged: it has keys that were chosen"):
        deserialize_object(io.BytesIO(archive(ALL[name])), key="k", allow_pickle=False)
    (tmp_path / "a.pt").write_bytes(archive(ALL[name], crc=False))
    with pytest.raises(CorruptError, match=r"a\.pt' is damaged: it has keys that were chosen"):
        read_pt(tmp_path / "a.pt", verify=False)


def test_files_of_the_time_before_archives_are_weighed_too(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    data = (tmp_path / "a.pt").read_bytes()
    assert data.count(b"\x80\x02}q\x00.") == 1
    (tmp_path / "a.pt").write_bytes(data.replace(b"\x80\x02}q\x00.", PICKLES["dict"]))
    with pytest.raises(CorruptError, match="chosen"):
        read_pt(tmp_path / "a.pt")


def honest() -> dict[Any, Any]:
    key = (1, ("a", -2))
    return {
        "weight": torch.nn.Parameter(torch.ones(2, 3)),
        "sets": {"numbers": {1, 2, 3}, "complex": complex(1, 2), "size": torch.Size([1, 2])},
        "counter": Counter([1, 2, 2]),
        "ordered": OrderedDict([(key, 1), ("b", 2)]),
        "again": {key: 1, torch.Size([3]): 2, 2.5: 3, None: 4, True: 5},
        "optimizer": {"state": {n: {"step": torch.tensor(1.0)} for n in range(300)}, "betas": [(0.9, 0.99)] * 3},
        "many": {n * n: n for n in range(20_000)},
    }


@pytest.mark.parametrize("zipped", [True, False])
def test_honest_files_are_left_alone(zipped: bool, tmp_path: Path) -> None:
    torch.save(honest(), tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    with open(tmp_path / "a.pt", "rb") as stream:
        weigh(stream, what="it")  # type: ignore[arg-type]
        assert stream.tell() == 0
    found = read_pt(tmp_path / "a.pt")
    assert {key: found[key] for key in ("sets", "counter", "ordered", "again", "many")} == {
        key: honest()[key] for key in ("sets", "counter", "ordered", "again", "many")
    }
    value = {"note": honest()["many"], "keys": honest()["again"]}
    assert deserialize_object(io.BytesIO(serialize_object(value)), key="k", allow_pickle=False) == value


def test_a_buffer_in_a_state_of_torchs_format_comes_back_where_it_was(tmp_path: Path) -> None:
    buffer = io.BytesIO(b"losses")
    buffer.seek(2)
    holdfast.save({"losses": buffer}, storage_writer=holdfast.FileSystemWriter(tmp_path / "c"))
    target = {"losses": io.BytesIO()}
    holdfast.load(target, storage_reader=holdfast.FileSystemReader(tmp_path / "c"))
    assert (target["losses"].getvalue(), target["losses"].tell()) == (b"losses", 2)


@pytest.mark.parametrize("data", [b"\x80\x02t.", b"\x80\x02]a.", b"\x80\x02h\x05.", b"\x80\x02J\x01"])
def test_a_file_whose_pickle_is_damaged_says_so(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(archive(data))
    with pytest.raises(CorruptError, match=r"a\.pt.*damaged"):
        read_pt(tmp_path / "a.pt")


# --- tuples that refer to the one before twice: a few hundred bytes that would be hashed for ever ---------------------


def doubling(levels: int, *, put: str) -> bytes:
    """Opcodes of a tuple made of the one before twice over, so many times."""
    parts = [b")"]
    for number in range(levels):
        kept = {"MEMOIZE": b"\x94", "BINPUT": b"q%c" % number, "LONG_BINPUT": b"r%c\0\0\0" % number}[put]
        parts += [kept, b"h%c" % number, b"\x86"]
    return b"".join(parts)


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
