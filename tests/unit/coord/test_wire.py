"""Messages in pieces, and back from pieces in any order."""

from __future__ import annotations

import random

import pytest

from holdfast._coord.wire import PIECE, Assembler, Kind, Message, cut


def message(serial: int = 1, size: int = 10, operation: int = 7) -> Message:
    payload = random.Random(serial).randbytes(size)
    return Message(
        operation=operation, sender=3, serial=serial, kind=Kind.PART, step=2, phase="écrire", payload=payload
    )


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 200, 1000])
def test_a_message_is_whole_after_its_last_piece(size: int) -> None:
    sent = message(size=size)
    pieces = list(cut(sent, 100))
    assert len(pieces) == max(1, -(-size // 100))
    assembler = Assembler()
    assert [assembler.add(piece) for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert assembler.add(pieces[-1]) == sent


def test_a_piece_fits_into_what_a_store_takes() -> None:
    assert max(len(piece) for piece in cut(message(size=2 * PIECE + 1))) < 8 << 20


def test_pieces_of_several_messages_may_mix_in_any_order() -> None:
    sent = [message(serial, size=950) for serial in range(5)]
    pieces = [piece for one in sent for piece in cut(one, 100)]
    random.Random(0).shuffle(pieces)
    assembler = Assembler()
    whole = [found for found in map(assembler.add, pieces) if found is not None]
    assert sorted(whole, key=lambda one: one.serial) == sent


def test_a_forgotten_operation_leaves_nothing() -> None:
    assembler = Assembler()
    old, new = list(cut(message(1, 300), 100)), list(cut(message(1, 300, operation=8), 100))
    for piece in (*old[:2], *new[:2]):
        assert assembler.add(piece) is None
    assembler.forget(7)
    assert assembler.add(old[2]) is None
    assert assembler.add(new[2]) == message(1, 300, operation=8)
    assembler.forget(7)
    assert not assembler._unfinished
