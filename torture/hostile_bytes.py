"""Hostile bytes in place of torch's pickles and archives, by name."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable
from typing import Any

import torch


def streams() -> dict[str, Callable[[bytes], bytes]]:
    """Pickles whose opcodes are the attack."""
    return {
        "empty": lambda data: b"",
        "cut in half": lambda data: data[: len(data) // 2],
        "without its end": lambda data: data[:-1],
        "with more after its end": lambda data: data + data,
        "of zeros": lambda data: bytes(1000),
        "of JSON": lambda data: b'{"state_dict_metadata": {}}',
        "protocol 250": lambda data: b"\x80\xfa" + data[2:],
        "30,000 nested lists": lambda data: b"\x80\x02" + b"]" * 30_000 + b"a" * 29_999 + b".",
        "30,000 nested tuples": lambda data: b"\x80\x02)" + b"\x85" * 30_000 + b".",
        "300,000 marks": lambda data: b"\x80\x02" + b"(" * 300_000 + b".",
        "a memo of 2**31": lambda data: b"\x80\x02]r\xff\xff\xff\x7f.",
        "a memo of 2**31 in text": lambda data: b"\x80\x02]p2147483647\n.",
        "a memo of 10**30": lambda data: b"\x80\x02]p1000000000000000000000000000000\n.",
        "a string of 2**31 bytes": lambda data: b"\x80\x02X\xff\xff\xff\x7fabc.",
        "a string of 2**62 bytes": lambda data: b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"abc.",
        "bytes of 2**62": lambda data: b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62) + b"abc.",
        "a bytearray of 2**62": lambda data: b"\x80\x05\x96" + struct.pack("<Q", 1 << 62) + b"abc.",
        "a frame of 2**62 bytes": lambda data: b"\x80\x04\x95" + struct.pack("<Q", 1 << 62) + b"N.",
        "an integer of 2**31 bytes": lambda data: b"\x80\x02\x8b\xff\xff\xff\x7fabc.",
        "an integer of 1,000,000 digits": lambda data: b"\x80\x02I" + b"1" * 1_000_000 + b"\n.",
        "a key that doubles 60 times": lambda data: b"\x80\x02}" + _doubling(60) + b"Ns.",
        "a set element that doubles 60 times": lambda data: b"\x80\x04\x8f(" + _doubling(60) + b"\x90.",
        "a frozen set that doubles 60 times": lambda data: b"\x80\x04(" + _doubling(60) + b"\x91.",
        "an entry that is in itself": lambda data: b"\x80\x02]q\x00h\x00a.",
        "out of band buffers": lambda data: b"\x80\x05\x97.",
        "an empty stack": lambda data: b"\x80\x02.",
        "pops too many": lambda data: b"\x80\x020000.",
    }


def _doubling(levels: int) -> bytes:
    """Opcodes of a tuple that refers to the one before twice, so many times over."""
    return b")" + b"".join(b"q" + bytes([n]) + b"h" + bytes([n]) + b"\x86" for n in range(levels))


def _zip(entries: dict[str, bytes], *, method: int = zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    return stream.getvalue()


def archives() -> dict[str, Callable[[bytes], bytes]]:
    """Other bytes in place of the archive of a tensor."""

    def patched(data: bytes, at: int, new: bytes) -> bytes:
        at = at if at >= 0 else len(data) + at
        return data[:at] + new + data[at + len(new) :]

    return {
        "empty": lambda item: b"",
        "of zeros": lambda item: bytes(len(item)),
        "cut": lambda item: item[:-30],
        "with bytes before": lambda item: b"x" * 64 + item,
        "that counts 65,534 entries": lambda item: patched(item, -12, b"\xfe\xff"),
        "whose directory begins at 2**31": lambda item: patched(item, -6, b"\xff\xff\xff\x7f"),
        "whose directory has 2**31 bytes": lambda item: patched(item, -10, b"\xff\xff\xff\x7f"),
        "whose directory is past its end": lambda item: patched(item, -6, struct.pack("<L", len(item))),
        "of another tensor": lambda item: torch_saved(torch.zeros(2)),
        "of another dtype": lambda item: torch_saved(torch.zeros(4, 6, dtype=torch.float64)),
        "of another shape": lambda item: torch_saved(torch.zeros(6, 4)),
        "of fewer elements": lambda item: torch_saved(torch.zeros(4, 5)),
        "of a list": lambda item: torch_saved([1, 2]),
        "of a dict of tensors": lambda item: torch_saved({"a": torch.zeros(4, 6)}),
        "of a value": lambda item: torch_saved(5),
        "of no pickle": lambda item: _zip({"archive/data.pkl": b"garbage", "archive/data/0": bytes(96)}),
        "without a pickle": lambda item: _zip({"archive/data/0": bytes(96)}),
        "without its record": lambda item: _without_record(item),
        "with a record too short": lambda item: _with_record(item, bytes(95)),
        "with a record too long": lambda item: _with_record(item, bytes(97)),
        "that is a bomb": lambda item: _zip({"archive/data.pkl": bytes(1 << 26)}, method=zipfile.ZIP_DEFLATED),
        "with records outside": lambda item: _zip({"../../x/data.pkl": b"\x80\x02N.", "../../x/data/0": bytes(96)}),
        "with an absolute record": lambda item: _zip({"/etc/data.pkl": b"\x80\x02N.", "/etc/version": b"3"}),
        "of an old torch.save": lambda item: torch_saved(torch.zeros(4, 5), zipped=False),
        "with a flipped checksum": lambda item: (
            item[: len(item) // 2] + item[len(item) // 2 :].replace(b"PK\x01\x02", b"PK\x01\x03", 1)
        ),
        "of TorchScript": lambda item: _zip(
            {
                "a/constants.pkl": b"\x80\x02).",
                "a/data.pkl": b"\x80\x02}.",
                "a/code/x.py": b"import os",
                "a/version": b"3",
            }
        ),
    }


def torch_saved(value: Any, *, zipped: bool = True) -> bytes:
    """What torch.save writes."""
    stream = io.BytesIO()
    torch.save(value, stream, _use_new_zipfile_serialization=zipped)
    return stream.getvalue()


def _records(item: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(item)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _without_record(item: bytes) -> bytes:
    return _zip({name: data for name, data in _records(item).items() if not name.endswith("data/0")})


def _with_record(item: bytes, record: bytes) -> bytes:
    return _zip({name: record if name.endswith("data/0") else data for name, data in _records(item).items()})


def values() -> dict[str, Callable[[bytes], bytes]]:
    """Other bytes in place of a value."""
    return {
        "empty": lambda item: b"",
        "of zeros": lambda item: bytes(100),
        "cut": lambda item: item[:-1],
        "a bomb": lambda item: _zip({"archive/data.pkl": bytes(1 << 26)}, method=zipfile.ZIP_DEFLATED),
        "of no pickle": lambda item: _zip({"archive/data.pkl": b"garbage", "archive/version": b"3"}),
        "with a string of 2**62 bytes": lambda item: _zip(
            {"archive/data.pkl": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"abc.", "archive/version": b"3"}
        ),
        "with a memo of 2**31": lambda item: _zip(
            {"archive/data.pkl": b"\x80\x02]r\xff\xff\xff\x7f", "archive/version": b"3"}
        ),
        "with a tensor of 2**60 elements": lambda item: torch_saved(torch.zeros(1).expand(1)).replace(
            b"K\x01", b"K\x7f"
        ),
    }
