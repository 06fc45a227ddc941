"""A buffer that makes its bytes when somebody reads them, whichever way that is."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest

from holdfast.storage import ValueBuffer

DATA = b"one\ntwo\n"


def read_into(buffer: io.BytesIO) -> bytes:
    room = bytearray(100)
    return bytes(room[: buffer.readinto(room)])


WAYS: dict[str, Callable[[io.BytesIO], bytes]] = {
    "read": lambda buffer: buffer.read(),
    "read1": lambda buffer: buffer.read1(),
    "readinto": read_into,
    "readline": lambda buffer: buffer.readline() + buffer.readline(),
    "readlines": lambda buffer: b"".join(buffer.readlines()),
    "iteration": b"".join,
    "getvalue": lambda buffer: buffer.getvalue(),
    "getbuffer": lambda buffer: bytes(buffer.getbuffer()),
    "seek": lambda buffer: DATA if buffer.seek(0, io.SEEK_END) == len(DATA) else b"",
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_every_way_to_read_gives_the_bytes(way: Callable[[io.BytesIO], bytes]) -> None:
    made: list[object] = []
    buffer = ValueBuffer(7, lambda value: made.append(value) or DATA)
    assert not made
    assert way(buffer) == DATA
    assert way(ValueBuffer(7, lambda value: DATA)) == way(io.BytesIO(DATA))
    buffer.seek(0)
    assert buffer.read() == DATA
    assert made == [7]
