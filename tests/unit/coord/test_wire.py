"""Messages in pieces, and back from pieces in any order."""

from __future__ import annotations

import random

import pytest

from holdfast._ranks.connections import Assembler, Kind, Message, cut


def message(serial: int = 1, size: int = 10) -> Message:
    payload = random.Random(serial).randbytes(size)
    return Message(guest=3, call=7, serial=serial, kind=Kind.PART, step=2, phase="écrire", payload=payload)


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 200, 1000])
def test_a_message_is_whole_after_its_last_piece(size: int) -> None:
    sent = message(size=size)
    pieces = list(cut(sent, 100))
    assert len(pieces) == max(1, -(-size // 100))
    assembler = Assembler()
    assert [found for piece in pieces[:-1] for found in assembler.add(piece)] == []
    assert list(assembler.add(pieces[-1])) == [sent]


@pytest.mark.parametrize("step", [1, 3, 1000, 100_000])
def test_bytes_may_come_in_any_portions(step: int) -> None:
    sent = [message(serial, size=950) for serial in range(5)]
    stream = b"".join(piece for one in sent for piece in cut(one, 100))
    assembler = Assembler()
    portions = [stream[start : start + step] for start in range(0, len(stream), step)]
    assert [found for portion in portions for found in assembler.add(portion)] == sent


def test_pieces_of_several_messages_may_mix_in_any_order() -> None:
    sent = [message(serial, size=950) for serial in range(5)]
    pieces = [piece for one in sent for piece in cut(one, 100)]
    random.Random(0).shuffle(pieces)
    assembler = Assembler()
    whole = [found for piece in pieces for found in assembler.add(piece)]
    assert sorted(whole, key=lambda one: one.serial) == sent
    assert not assembler._unfinished
    assert not assembler._received
