"""Which calls of the ranks belong together, and their messages in pieces."""

from __future__ import annotations

import random

import pytest

from holdfast._ranks.channel import INTERRUPTED, Ended, Join, Lobby, losers
from holdfast._ranks.connections import Assembler, Kind, Message, cut
from holdfast._values.deadline import Deadline

# --- calls: by key, in order, with what was missed and what failed early left out -------------------------------------


def join(call: int, key: str = "save a", rank: int = 1) -> Join:
    return Join(rank=rank, call=call, key=key)


def said(call: int, kind: Kind, phase: str = "") -> Message:
    return Message(guest=1, call=call, serial=0, kind=kind, phase=phase)


def ended(number: int, key: str = "save a", *, is_error: bool = False, is_open: bool = False) -> Ended:
    return Ended(number=number, key=key, verdict=str(number).encode(), is_error=is_error, is_open=is_open)


def lobby_of(*joins: Join) -> Lobby:
    lobby = Lobby()
    for each in joins:
        lobby.add(each)
    return lobby


def test_the_oldest_with_the_same_key_is_taken_and_others_wait_on() -> None:
    lobby = lobby_of(join(0, "load b"), join(1), join(2))
    first = lobby.take(1, "save a", 0)
    assert first is not None
    assert first.call == 1
    waiting = lobby.waiting(1)
    assert waiting is not None
    assert waiting.call == 0
    assert lobby.take(1, "save c", 1) is None
    assert lobby.take(2, "save a", 1) is None
    second = lobby.take(1, "save a", 1)
    assert second is not None
    assert second.call == 2


def test_what_failed_belongs_to_the_next_call_whatever_its_key() -> None:
    lobby = lobby_of(join(0, "save None"), join(1))
    lobby.hear(said(0, Kind.FAILURE))
    lobby.hear(said(0, Kind.LEFT))
    first, second = lobby.take(1, "save a", 0), lobby.take(1, "save a", 1)
    assert first is not None
    assert second is not None
    assert (first.call, [each.kind for each in first.messages]) == (0, [Kind.FAILURE, Kind.LEFT])
    assert second.call == 1


@pytest.mark.parametrize("kinds", [[Kind.FAILURE, Kind.LEFT], [Kind.PART, Kind.LEFT]], ids=["interrupted", "gave up"])
def test_what_was_left_is_passed_over_for_one_that_waits(kinds: list[Kind]) -> None:
    lobby = lobby_of(join(0))
    for kind in kinds:
        lobby.hear(said(0, kind, INTERRUPTED))
    assert lobby.take(1, "save a", 0) is None
    assert lobby.waiting(1) is None
    left = lobby.take_left(1, "save a")
    assert left is not None
    assert Kind.PART not in [each.kind for each in left.messages]
    lobby.add(left)
    lobby.add(join(1))
    taken = lobby.take(1, "save a", 0)
    assert taken is not None
    assert taken.call == 1
    assert lobby.take_left(1, "save a") is None, "who came to the next call is past that one"


def test_of_beats_the_last_is_kept_and_of_strangers_nothing() -> None:
    lobby = lobby_of(join(0))
    for kind in (Kind.BEAT, Kind.PART, Kind.BEAT, Kind.BEAT):
        lobby.hear(said(0, kind))
    lobby.hear(said(9, Kind.PART))
    taken = lobby.take(1, "save a", 0)
    assert taken is not None
    assert [each.kind for each in taken.messages] == [Kind.PART, Kind.BEAT]


def test_what_was_left_does_not_pile_up() -> None:
    lobby = Lobby()
    for call in range(100):
        lobby.add(join(call, f"save {call}"))
        lobby.hear(said(call, Kind.LEFT))
    assert len(lobby._joins[1]) == 16
    lobby.empty(1)
    assert lobby.take_left(1, "save 99") is None


def test_a_call_that_ended_is_told_once_to_whom_comes_late() -> None:
    lobby = Lobby()
    lobby.remember(1, ended(3))
    assert lobby.recall(2, "save a") is None
    assert lobby.recall(1, "save b") is None
    assert lobby.recall(1, "save a") == b"3"
    assert lobby.recall(1, "save a") is None


def test_after_an_error_the_next_call_of_a_rank_is_the_one_that_failed() -> None:
    lobby = Lobby()
    lobby.remember(1, ended(3, is_error=True))
    assert lobby.recall(1, "save b") == b"3"


def test_who_was_awaited_in_vain_may_be_at_the_next_call_of_the_same_key() -> None:
    lobby = Lobby()
    lobby.remember(1, ended(3, is_open=True))
    assert lobby.recall(1, "save a") is None
    assert lobby.recall(1, "save b", is_at_another=True) is None
    assert lobby.recall(1, "save a", is_at_another=True) == b"3"


def test_what_a_rank_has_passed_by_is_forgotten() -> None:
    lobby = Lobby()
    lobby.remember(1, ended(3))
    lobby.add(join(0, "save b"))
    assert lobby.take(1, "save b", 4) is not None
    assert lobby.recall(1, "save a", is_at_another=True) is None


def test_whom_nobody_comes_to_is_not_spared_for_ever() -> None:
    now = [0.0]
    lobby = lobby_of(join(0), join(1))
    waiting = lobby.waiting(1)
    assert waiting is not None
    assert not lobby.spared()
    waiting.spare(b"verdict", Deadline(5.0, lambda: now[0]))
    ((spared, until),) = lobby.spared()
    assert (spared.call, until.passed) == (0, False)
    now[0] = 5.0
    assert until.passed
    lobby.drop(spared)
    assert not lobby.spared()


@pytest.mark.parametrize(
    ("ours", "keys", "failing"),
    [
        (3, "b", None),  # one of four has missed ours
        (1, "bbb", "bbb"),  # we have missed theirs
        (1, "b", None),  # nobody can tell
        (2, "bb", None),
        (1, "bbc", "bb"),
        (1, "bcd", None),
    ],
)
def test_the_larger_part_goes_on(ours: int, keys: str, failing: str | None) -> None:
    others = {rank: join(0, key, rank) for rank, key in enumerate(keys, start=1)}
    found = losers(ours, others)
    assert (None if found is None else "".join(each.key for each in found)) == failing


def test_in_a_tie_the_coordinator_goes_on_twice() -> None:
    other = join(0, "b")
    for _ in range(2):
        assert losers(1, {1: other}) is None
        other.spare(b"", Deadline(5.0, lambda: 0.0))
    assert losers(1, {1: other}) == [other]


# --- messages in pieces, and back from pieces in any order ------------------------------------------------------------


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
