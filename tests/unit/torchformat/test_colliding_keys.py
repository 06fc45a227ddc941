"""Pickles whose keys were chosen to meet in Python's tables: given up, wherever they are read."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast._torch_codec.pickles import deserialize_object, read_pt, serialize_object, unpickle, weigh
from holdfast.errors import CorruptError

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
    with pytest.raises(CorruptError, match="no pickle of torch's"):
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
