from __future__ import annotations

import itertools
import json
import logging
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import events
from holdfast.events import Event, PhaseTimes, SaveReport

STATE = {"weight": torch.arange(100_000.0), "epoch": 3}
NUMBERS = ("bytes", "total_s", "blocked_s", "plan_s", "stage_s", "write_s", "sync_s", "commit_s", "bytes_per_s")


def report(**changed: Any) -> SaveReport:
    phase = PhaseTimes(mean_s=0.5, max_s=2.0, rank=3, host="host-3")
    times = dict.fromkeys(("total_s", "blocked_s", "plan_s", "stage_s", "write_s", "sync_s", "commit_s"), 2.0)
    return SaveReport(**{"bytes": 4_000_000_000, **times, "phases": {"write": phase}, **changed})


def event(name: Any = "published", **changed: Any) -> Event:
    fields: dict[str, Any] = {"operation": "save", "number": 1, "path": "/runs/step-7", "attempt": "ab", "step": 7}
    fields |= {"rank": 0, "host": "host-0", "seconds": 2.0, "bytes": 1_000_000_000, "at": 1_800_000_000.0}
    return Event(name=name, **(fields | changed))


# A trace, as the Chrome trace event format has it: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU


def trace_events(path: Path) -> list[dict[str, Any]]:
    """The events of a trace in the array form, in which the closing bracket may be missing; each is well formed."""
    text = path.read_text()
    found = json.loads(text if text.rstrip().endswith("]") else text.rstrip().removesuffix(",") + "]")
    for each in found:
        assert isinstance(each["name"], str)
        assert isinstance(each["pid"], int)
        assert each["ph"] in ("X", "i", "M")
        assert isinstance(each.get("args", {}), dict)
        if each["ph"] == "M":
            assert each["name"] in ("process_name", "thread_name")
            assert isinstance(each["args"]["name"], str)
            continue
        assert isinstance(each["ts"], float)
        assert isinstance(each["tid"], int)
        assert each["ph"] != "i" or each["s"] in ("g", "p", "t")
        assert each["ph"] != "X" or each["dur"] >= 0
    check_nesting(found)
    return found


def check_nesting(found: list[dict[str, Any]]) -> None:
    """Of two spans on one line one holds the other, or they do not touch: what viewers draw wrongly otherwise."""
    lines = defaultdict(list)
    for each in found:
        if each["ph"] == "X":
            lines[each["pid"], each["tid"]].append((each["ts"], each["ts"] + each["dur"], each["name"]))
    for spans in lines.values():
        in_order = sorted(spans, key=lambda span: (span[0], -span[1]))
        for (_, end, _), (begin, others_end, _) in itertools.combinations(in_order, 2):
            assert others_end <= end + 1 or begin >= end - 1, spans  # microseconds: the numbers are large


def test_a_trace_is_what_the_format_says(tmp_path: Path) -> None:
    with events.subscribe(events.trace(tmp_path / "trace.json")):
        holdfast.save(STATE, tmp_path / "a", user_metadata={"step": 1})
        holdfast.async_save(STATE, tmp_path / "b").result()
        holdfast.async_save(STATE, tmp_path / "b", options=holdfast.SaveOptions(stage="overlap")).result()
        holdfast.read(tmp_path / "a")
        holdfast.verify(tmp_path / "a")
        holdfast.convert(tmp_path / "a", tmp_path / "c", to="torch")
        with pytest.raises(holdfast.NotFoundError):
            holdfast.read(tmp_path / "d")
    found = trace_events(tmp_path / "trace.json")
    spans = [each["name"] for each in found if each["ph"] == "X"]
    assert spans[:5] == ["plan", "write", "sync", "save", "commit"]
    assert spans[5:11] == ["plan", "stage", "write", "sync", "async_save", "commit"]
    assert spans[-1] == "read"
    assert found[-1]["args"]["problem"].startswith("NotFoundError")
    assert found[0]["args"]["name"].endswith(str(os.getpid()))


def test_operations_that_overlap_are_on_lines_of_their_own(tmp_path: Path) -> None:
    listener = events.trace(tmp_path / "trace.json")
    for name, number, at in (
        *(("started", 1, 10.0), ("started", 2, 11.0), ("planned", 2, 12.0), ("published", 1, 13.0)),
        *(("started", 3, 14.0), ("published", 2, 15.0), ("published", 3, 16.0)),
    ):
        listener(event(name, number=number, at=at, seconds={"planned": 1.0, "published": 2.0}.get(name, 0.0)))
    lines = [(each["tid"], each["args"]["number"]) for each in trace_events(tmp_path / "trace.json")[1:]]
    assert lines == [(0, 1), (1, 2), (1, 2), (0, 1), (0, 3), (1, 2), (0, 3)]


def test_a_trace_of_a_run_that_was_started_again_goes_on(tmp_path: Path) -> None:
    for _ in range(2):
        with events.subscribe(events.trace(tmp_path / "trace.json")):
            holdfast.save(STATE, tmp_path / "a")
    assert [each["name"] for each in trace_events(tmp_path / "trace.json")].count("save") == 2


# Files.


def test_lines_of_json_have_all_fields(tmp_path: Path) -> None:
    with events.subscribe(events.jsonl(tmp_path / "events.jsonl")):
        holdfast.save(STATE, tmp_path / "a", user_metadata={"step": 1})
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [line["name"] for line in lines] == ["started", "planned", "written", "published"]
    assert lines[-1]["report"]["phases"]["write"]["rank"] == 0
    assert lines[-1]["report"]["bytes"] == lines[-1]["bytes"] == lines[-2]["bytes"]
    assert lines[0]["path"] == str(tmp_path / "a")


def test_names_that_are_no_text_can_be_written(tmp_path: Path) -> None:
    events.jsonl(tmp_path / "events.jsonl")(event(path=os.fsdecode(b"\xff\n")))
    (line,) = (tmp_path / "events.jsonl").read_text().splitlines()
    assert os.fsencode(json.loads(line)["path"]) == b"\xff\n"


def test_a_file_that_cannot_be_made_is_an_error_at_once(tmp_path: Path) -> None:
    for make in (events.jsonl, events.trace):
        with pytest.raises(holdfast.StorageError, match="cannot open"):
            make(tmp_path / "nowhere" / "events")


def test_files_stay_where_they_were_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    listener = events.jsonl("events")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    listener(event())
    assert (tmp_path / "events").read_text().count("\n") == 1
    assert not (tmp_path / "other" / "events").exists()


@pytest.mark.parametrize("make", [events.jsonl, events.trace])
def test_a_line_that_does_not_fit_is_left_out_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    listener = make(tmp_path / "events")
    listener(event())
    before = (tmp_path / "events").read_bytes()
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:10]))
    with pytest.raises(holdfast.StorageError, match="No space left"):
        listener(event())
    assert (tmp_path / "events").read_bytes() == before


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_full_disk_changes_nothing_for_a_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told: list[Event] = []
    with events.subscribe(events.jsonl("/dev/full")), events.subscribe(told.append):
        holdfast.save(STATE, tmp_path / "a")
        holdfast.async_save(STATE, tmp_path / "b").result()
    assert holdfast.verify(tmp_path / "a").ok
    assert holdfast.verify(tmp_path / "b").ok
    assert len(told) == 9
    assert caplog.text.count("a listener to events failed") == 1


# Numbers and words.


def test_scalars_are_those_of_the_report(tmp_path: Path) -> None:
    found: list[tuple[str, float, int | None]] = []
    with events.subscribe(events.scalars(lambda *scalar: found.append(scalar))):
        holdfast.save(STATE, tmp_path / "a", user_metadata={"step": 12})
    names = [name for name, _, _ in found]
    phases = [
        f"{name}_{what}"
        for name in ("blocked", "plan", "stage", "write", "sync")
        for what in ("mean_s", "slowest_rank")
    ]
    assert sorted(names) == sorted(f"checkpoint/{name}" for name in (*NUMBERS, *phases))
    assert {step for _, _, step in found} == {12}
    assert all(type(value) is float for _, value, _ in found)


def test_scalars_of_what_has_no_report() -> None:
    found: dict[str, float] = {}
    listener = events.scalars(lambda name, value, step: found.__setitem__(name, value))
    listener(event("published"))  # of a rank that is not the coordinator
    listener(event("planned"))
    assert found == {}
    listener(event("loaded", operation="load"))
    listener(event("verified", operation="verify", seconds=3.0))
    listener(event("failed", operation="async_save"))
    assert found == {
        "checkpoint/load_s": 2.0,
        "checkpoint/load_bytes": 1e9,
        "checkpoint/verify_s": 3.0,
        "checkpoint/verify_bytes": 1e9,
        "checkpoint/async_save_failed": 1.0,
    }


def test_the_log_has_a_line_for_each_end_with_the_slowest_rank(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    listener = events.log()
    for name in ("started", "planned", "written"):
        listener(event(name))
    assert caplog.text == ""
    listener(event(report=report()))
    assert [record.getMessage() for record in caplog.records] == [
        "save: published /runs/step-7, 1,000,000,000 bytes in 2.000 s, 0.50 GB/s; "
        "write 2.000 s on rank 3 (host-3), 0.500 s on average"
    ]
    listener(event("failed", problem="CorruptError: no", bytes=0))
    assert caplog.records[-1].levelname == "WARNING"
    assert caplog.records[-1].getMessage().endswith("0 bytes in 2.000 s; CorruptError: no")
    listener(event(report=report(phases={"plan": PhaseTimes(mean_s=1.0, max_s=1.0, rank=0, host="host-0")})))
    assert caplog.records[-1].getMessage().endswith("GB/s; plan 1.000 s")


@pytest.mark.parametrize("name", ["prometheus", "opentelemetry"])
def test_packages_that_are_not_there_are_missed_when_they_are_asked_for(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = {"prometheus": "prometheus_client"}.get(name, name)
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(ImportError, match=package):
        getattr(events, name)()
