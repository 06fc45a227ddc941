"""The model of a weak file system keeps what was synced, and nothing else for sure; seeded bugs have their places."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))

from torture.seeded import all_bugs
from torture.shim import Call, Record
from torture.weak_disk import SECTOR, Disk, Files, materialise

ROOT = "/root"


def test_every_bug_that_is_seeded_has_its_place_in_the_package() -> None:
    assert len(all_bugs(Path(__file__).parents[2] / "src")) > 200


def record(
    call: Call,
    path: str,
    *,
    other: str = "",
    data: bytes = b"",
    offset: int = -1,
    length: int = 0,
    error: int = 0,
    flags: int = 0,
) -> Record:
    other = f"{ROOT}/{other}" if other else ""
    full = f"{ROOT}/{path}" if path else ROOT
    length = length or len(data)
    return Record(call=call, error=error, offset=offset, length=length, flags=flags, path=full, other=other, data=data)


def states_after(*records: Record, before: Files | None = None, limit: int = 500) -> list[Files]:
    disk = Disk(ROOT, before or {})
    for each in records:
        disk.play(each)
    return list(disk.states(random.Random(0), limit))


def test_what_nobody_synced_may_be_there_or_not() -> None:
    found = states_after(record(Call.CREATE, "a"), record(Call.WRITE, "a", data=b"bytes"))
    assert {} in found
    assert {state.get("a") for state in found} == {None, b"", b"bytes", bytes(5)}


def test_a_synced_file_without_its_name_may_be_lost_but_is_never_torn() -> None:
    steps = [record(Call.CREATE, "a"), record(Call.WRITE, "a", data=b"bytes"), record(Call.FSYNC, "a")]
    assert states_after(*steps) == [{}, {"a": b"bytes"}]
    assert states_after(*steps, record(Call.FSYNC, "")) == [{"a": b"bytes"}]


def test_names_are_lost_each_by_itself() -> None:
    found = states_after(record(Call.CREATE, "a"), record(Call.CREATE, "b"))
    assert {tuple(sorted(state)) for state in found} == {(), ("a",), ("b",), ("a", "b")}


def test_a_rename_is_one_step() -> None:
    found = states_after(record(Call.RENAME, "a", other="b"), before={"a": b"new", "b": b"old"})
    assert found == [{"a": b"new", "b": b"old"}, {"b": b"new"}]


def test_writes_are_torn_at_sectors() -> None:
    data = b"1" * SECTOR + b"2" * SECTOR + b"3" * 10
    found = states_after(
        record(Call.CREATE, "a"), record(Call.FSYNC, ""), record(Call.PWRITE, "a", data=data, offset=0)
    )
    contents = {state["a"] for state in found}
    assert data[:SECTOR] in contents
    assert bytes(SECTOR) + data[SECTOR:] in contents
    assert data[:SECTOR] + bytes(SECTOR) + data[2 * SECTOR :] in contents


def test_what_is_in_a_lost_directory_is_lost() -> None:
    steps = [record(Call.MKDIR, "d"), record(Call.CREATE, "d/a"), record(Call.FSYNC, "d")]
    assert states_after(*steps) == [{}, {"d": None, "d/a": b""}]


def test_a_folder_takes_along_what_is_in_it() -> None:
    steps = [record(Call.MKDIR, "new"), record(Call.CREATE, "new/a"), record(Call.FSYNC, "new"), record(Call.FSYNC, "")]
    moved = [*steps, record(Call.RENAME, "new", other="d")]
    assert states_after(*moved) == [{"new": None, "new/a": b""}, {"d": None, "d/a": b""}]
    # What comes into it after that is there or not, whichever name it has.
    found = states_after(*moved, record(Call.CREATE, "d/b"))
    assert {tuple(sorted(state)) for state in found} == {
        ("new", "new/a"), ("d", "d/a"), ("new", "new/a", "new/b"), ("d", "d/a", "d/b")
    }  # fmt: skip


def test_names_in_a_folder_that_nobody_synced_may_be_lost_after_its_rename() -> None:
    steps = [record(Call.MKDIR, "new"), record(Call.CREATE, "new/a"), record(Call.FSYNC, "new/a")]
    found = states_after(*steps, record(Call.RENAME, "new", other="d"), record(Call.FSYNC, ""))
    assert found == [{"d": None}, {"d": None, "d/a": b""}]


def test_an_exchange_is_one_step() -> None:
    before: Files = {"d": None, "d/a": b"old", "new": None, "new/a": b"new"}
    steps = [record(Call.RENAME, "new", other="d", flags=2)]
    exchanged = {"d": None, "d/a": b"new", "new": None, "new/a": b"old"}
    assert states_after(*steps, before=before) == [before, exchanged]
    # Whoever removes the old one before that is durable loses it.
    assert {"d": None, "new": None, "new/a": b"new"} in states_after(
        *steps, record(Call.UNLINK, "new/a"), before=before
    )
    synced = [*steps, record(Call.FSYNC, ""), record(Call.UNLINK, "new/a")]
    assert states_after(*synced, before=before) == [exchanged, {"d": None, "d/a": b"new", "new": None}]


def test_what_is_opened_anew_is_cut_where_that_is_asked_for() -> None:
    steps = [record(Call.CREATE, "a", flags=os.O_TRUNC), record(Call.WRITE, "a", data=b"1"), record(Call.FSYNC, "a")]
    assert states_after(*steps, before={"a": b"old"}) == [{"a": b"1"}]


def test_of_many_names_some_choices_are_made() -> None:
    found = states_after(*(record(Call.CREATE, str(number)) for number in range(30)), limit=100_000)
    assert {} in found
    assert {len(state) for state in found} >= {0, 1, 29, 30}


def test_calls_that_failed_change_nothing() -> None:
    assert states_after(record(Call.MKDIR, "d", error=28)) == [{}]


def test_links_removals_and_sizes() -> None:
    steps = [
        record(Call.CREATE, "a"),
        record(Call.FALLOCATE, "a", offset=0, length=4),
        record(Call.PWRITE, "a", data=b"123456", offset=0),
        record(Call.FTRUNCATE, "a", length=5),
        record(Call.FSYNC, "a"),
        record(Call.LINK, "a", other="b"),
        record(Call.UNLINK, "a"),
        record(Call.FSYNC, ""),
    ]
    assert states_after(*steps) == [{"b": b"12345"}]


def test_a_state_is_made_of_the_one_before(tmp_path: Path) -> None:
    known: dict[str, bytes | None] = {}
    for state in ({"d": None, "d/a": b"1"}, {"d": None, "d/a": b"2", "b": b""}, {"b": b""}, {}):
        materialise(state, tmp_path, known)
        found = {str(path.relative_to(tmp_path)): path for path in tmp_path.rglob("*")}
        assert {name: None if path.is_dir() else path.read_bytes() for name, path in found.items()} == state
