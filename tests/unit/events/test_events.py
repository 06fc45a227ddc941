from __future__ import annotations

import dataclasses
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import holdfast
from holdfast import events
from holdfast.events import Event

STATE = {"weight": torch.arange(100_000.0), "epoch": 3}


@pytest.fixture
def told() -> Iterator[list[Event]]:
    found: list[Event] = []
    with events.subscribe(found.append):
        yield found


def names(told: list[Event], operation: str) -> list[str]:
    assert events.flush()
    return [event.name for event in told if event.operation == operation]


def attempt_at(path: Path) -> str:
    attempt: str = json.loads((path / "manifest.json").read_bytes())["attempt"]
    return attempt


def last(told: list[Event]) -> Event:
    assert events.flush()
    return told[-1]


def run(code: str, folder: Path, *, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    lines = f"import os, sys, torch, holdfast\nfrom holdfast import events\nos.chdir({str(folder)!r})\n{code}"
    return subprocess.run(
        [sys.executable, "-c", lines],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, **(environment or {})},
    )


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# What is told.


def test_a_save_is_told_from_its_start_to_the_durable_checkpoint(tmp_path: Path, told: list[Event]) -> None:
    holdfast.save(STATE, tmp_path / "a", user_metadata={"step": 100})
    assert names(told, "save") == ["started", "planned", "written", "published"]
    assert {event.path for event in told} == {str(tmp_path / "a")}
    assert {event.step for event in told} == {100}
    assert {event.number for event in told} == {told[0].number}
    assert [event.attempt for event in told[1:]] == [attempt_at(tmp_path / "a")] * 3
    assert {(event.rank, event.host) for event in told} == {(0, os.uname().nodename)}
    assert [event.at for event in told] == sorted(event.at for event in told)
    assert all(event.seconds >= 0 for event in told)


def test_the_report_of_a_save_has_its_bytes_and_times(tmp_path: Path, told: list[Event]) -> None:
    holdfast.save(STATE, tmp_path / "a")
    report = last(told).report
    assert report is not None
    written = sum(file.stat().st_size for file in (tmp_path / "a").glob("data-*"))
    assert report.bytes == told[-2].bytes == written
    assert list(report.phases) == ["blocked", "plan", "stage", "write", "sync"]
    for name, phase in report.phases.items():
        assert getattr(report, f"{name}_s") == phase.max_s == phase.mean_s
        assert (phase.rank, phase.host) == (0, os.uname().nodename)
    assert report.stage_s == 0
    assert 0 < report.plan_s + report.write_s + report.sync_s + report.commit_s <= report.total_s == report.blocked_s
    assert report.bytes_per_s == report.bytes / report.total_s
    assert isinstance(report, holdfast.SaveReport)


def test_an_asynchronous_save_is_told_and_its_handle_has_the_report(tmp_path: Path, told: list[Event]) -> None:
    handle = holdfast.async_save(STATE, tmp_path / "a", user_metadata={"step": 4})
    handle.result()
    assert names(told, "async_save") == ["started", "planned", "staged", "written", "published"]
    assert handle.report is not None
    assert handle.report == last(told).report
    assert 0 < handle.report.stage_s <= handle.report.blocked_s
    assert {event.step for event in told} == {4}


def test_a_handle_has_the_report_though_nobody_listens(tmp_path: Path) -> None:
    handle = holdfast.async_save(STATE, tmp_path / "a")
    handle.result()
    assert handle.report is not None
    assert handle.report.total_s >= handle.report.write_s > 0


@pytest.mark.parametrize(
    "options",
    [
        {"async_checkpointer_type": holdfast.AsyncCheckpointerType.PROCESS},
        {"options": holdfast.SaveOptions(stage="overlap")},
        {"options": holdfast.SaveOptions(max_host_bytes=1 << 25)},
        {"async_stager": holdfast.staging.DefaultStager()},
    ],
    ids=["process", "overlap", "stream", "stager"],
)
def test_every_way_of_staging_is_told_in_one_order(tmp_path: Path, told: list[Event], options: dict[str, Any]) -> None:
    state = {"weight": torch.zeros(1 << 23), "epoch": 3}  # more than the stream may hold
    handle = holdfast.async_save(state, tmp_path / "a", **options)
    handle.result()
    holdfast.release()
    found = names(told, "async_save")
    assert sorted(found) == sorted(["started", "planned", "staged", "written", "published"])
    assert found[0] == "started"
    assert found[-2:] == ["written", "published"]
    report = handle.report
    assert report is not None
    assert report.bytes > 1 << 25
    assert report.stage_s > 0
    assert report.sync_s > 0


@pytest.mark.parametrize("make", [holdfast.FileSystemWriter, dcp.FileSystemWriter])
def test_saves_to_other_storage_are_told_too(tmp_path: Path, told: list[Event], make: Any) -> None:
    holdfast.save(STATE, storage_writer=make(tmp_path / "a"))
    assert names(told, "save") == ["started", "planned", "written", "published"]
    report = told[-1].report
    assert report is not None
    assert report.total_s >= report.write_s > 0
    if make is holdfast.FileSystemWriter:
        assert report.bytes > 400_000
        assert report.sync_s > 0


def test_loads_reads_checks_and_conversions_are_told(tmp_path: Path, told: list[Event]) -> None:
    holdfast.save(STATE, tmp_path / "a", user_metadata={"step": 7})
    holdfast.load({"weight": torch.zeros(100_000)}, tmp_path / "a")
    assert names(told, "load") == ["started", "loaded"]
    assert (told[-1].bytes, told[-1].step) == (400_000, 7)
    assert told[-1].attempt == attempt_at(tmp_path / "a")
    holdfast.read(tmp_path / "a")
    assert names(told, "read") == ["started", "loaded"]
    holdfast.verify(tmp_path / "a")
    assert names(told, "verify") == ["started", "verified"]
    assert told[-1].problem == ""
    holdfast.convert(tmp_path / "a", tmp_path / "b", to="torch")
    assert names(told, "convert") == ["started", "published"]
    assert told[-1].path == str(tmp_path / "b")
    holdfast.verify(tmp_path / "b")
    assert (last(told).name, told[-1].path) == ("verified", str(tmp_path / "b"))


def test_damage_is_told(tmp_path: Path, told: list[Event]) -> None:
    holdfast.save(STATE, tmp_path / "a")
    (file,) = (tmp_path / "a").glob("data-*")
    with file.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"\xff")
    holdfast.verify(tmp_path / "a")
    assert last(told).name == "verified"
    assert told[-1].problem == "1 keys and 1 files are damaged"
    with pytest.raises(holdfast.CorruptError):
        holdfast.read(tmp_path / "a")
    assert last(told).name == "failed"
    assert told[-1].problem.startswith("CorruptError: ")


def test_what_fails_is_told_once(tmp_path: Path, told: list[Event]) -> None:
    holdfast.save(STATE, tmp_path / "a")
    assert last(told).name == "published"
    told.clear()
    with pytest.raises(holdfast.AlreadyPublishedError):
        holdfast.save(STATE, tmp_path / "a", overwrite=False)
    with pytest.raises(holdfast.AlreadyPublishedError):
        holdfast.async_save(STATE, tmp_path / "a", overwrite=False)
    with pytest.raises(holdfast.NotFoundError):
        holdfast.load({}, tmp_path / "nothing")
    with pytest.raises(holdfast.NotFoundError):
        holdfast.verify(tmp_path / "nothing")
    with pytest.raises(holdfast.AlreadyPublishedError):
        holdfast.convert(tmp_path / "a", tmp_path / "a" / "manifest.json", to="native", overwrite=True)
    for operation in ("save", "async_save", "load", "verify", "convert"):
        assert names(told, operation) == ["started", "failed"]
    assert [event.problem.partition(":")[0] for event in told if event.name == "failed"] == [
        *["AlreadyPublishedError"] * 2,
        *["NotFoundError"] * 2,
        "AlreadyPublishedError",
    ]


def test_a_save_that_fails_in_the_background_is_told(
    tmp_path: Path, told: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: object, metadata: object, results: object) -> None:
        raise holdfast.StorageError("no", errno=5, path="x")

    monkeypatch.setattr(holdfast.NativeWriter, "finish", refuse)
    handle = holdfast.async_save(STATE, tmp_path / "a")
    assert isinstance(handle.exception(), holdfast.StorageError)
    assert names(told, "async_save") == ["started", "planned", "staged", "written", "failed"]
    assert handle.report is None


def test_an_error_that_cannot_be_printed_stays_what_it_is(tmp_path: Path, told: list[Event]) -> None:
    class Unprintable(KeyboardInterrupt):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    class Raises:
        def state_dict(self) -> dict[str, object]:
            raise Unprintable

        def load_state_dict(self, state: object) -> None: ...

    with pytest.raises(Unprintable):
        holdfast.save({"a": Raises()}, tmp_path / "a")
    assert last(told).name == "failed"
    assert told[-1].problem == "Unprintable"


def test_what_a_sweep_removes_is_told(tmp_path: Path, told: list[Event]) -> None:
    holdfast.save(STATE, tmp_path / "a")
    (tmp_path / "a" / "data-gone-0-0.safetensors").write_bytes(b"12345")
    holdfast.sweep(tmp_path)
    assert names(told, "sweep") == []
    holdfast.sweep(tmp_path, delete=True)
    assert names(told, "sweep") == ["started", "removed"]
    assert (told[-1].attempt, told[-1].bytes, told[-1].path) == ("gone", 5, str(tmp_path / "a"))


def test_a_deletion_is_told(tmp_path: Path, told: list[Event]) -> None:
    holdfast.save(STATE, tmp_path / "a")
    report = holdfast.delete(tmp_path / "a")
    assert names(told, "delete") == ["started", "removed"]
    assert (told[-1].attempt, told[-1].bytes, told[-1].path) == (report.attempt, report.bytes, str(tmp_path / "a"))


def test_steps_are_ints(tmp_path: Path, told: list[Event]) -> None:
    for step in (True, "7", 7.0, None):
        holdfast.save(STATE, tmp_path / "a", user_metadata={"step": step})
        assert last(told).step is None


def test_events_cannot_be_changed(tmp_path: Path, told: list[Event]) -> None:
    holdfast.save(STATE, tmp_path / "a")
    with pytest.raises(dataclasses.FrozenInstanceError):
        last(told).bytes = 0  # type: ignore[misc]


# Who is told.


def test_nothing_is_told_after_the_end(tmp_path: Path) -> None:
    told: list[Event] = []
    subscription = events.subscribe(told.append)
    holdfast.save(STATE, tmp_path / "a")
    subscription.close()
    assert [event.name for event in told] == ["started", "planned", "written", "published"]
    subscription.close()
    holdfast.save(STATE, tmp_path / "a")
    assert events.flush()
    assert len(told) == 4
    assert events.subscriptions == ()
    assert "holdfast-events" not in [thread.name for thread in threading.enumerate()]


def test_a_listener_is_a_function() -> None:
    with pytest.raises(TypeError, match="a listener is a function of an event, not a str"):
        events.subscribe("events.jsonl")  # type: ignore[arg-type]


def test_a_listener_that_raises_is_dropped_and_the_others_go_on(
    tmp_path: Path, told: list[Event], caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[Event] = []

    def fails(event: Event) -> None:
        calls.append(event)
        raise SystemExit("ended")

    subscription = events.subscribe(fails)
    holdfast.save(STATE, tmp_path / "a")
    assert len(names(told, "save")) == 4
    assert len(calls) == 1
    assert caplog.text.count("a listener to events failed and is not called again") == 1
    subscription.close()


def test_a_listener_may_close_itself_and_save(tmp_path: Path, told: list[Event]) -> None:
    def nested(event: Event) -> None:
        subscription.close()
        holdfast.save(STATE, tmp_path / "nested")

    subscription = events.subscribe(nested)
    holdfast.save(STATE, tmp_path / "a")
    assert events.flush()
    assert [event.path for event in told if event.name == "published"] == [
        str(tmp_path / "a"),
        str(tmp_path / "nested"),
    ] or [event.path for event in told if event.name == "published"] == [
        str(tmp_path / "nested"),
        str(tmp_path / "a"),
    ]


def test_a_listener_that_blocks_changes_nothing_for_saves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told: list[Event] = []
    go_on = threading.Event()

    def blocks(event: Event) -> None:
        go_on.wait()
        told.append(event)

    subscription = events.subscribe(blocks)
    operation = events.Operation("load", "x")
    holdfast.save(STATE, tmp_path / "a")
    assert not events.flush(0.0)
    for _ in range(2000):
        operation.tell("loaded")
    holdfast.async_save(STATE, tmp_path / "b").result()
    assert holdfast.read(tmp_path / "a")["epoch"] == 3
    go_on.set()
    subscription.close()
    assert 1024 <= len(told) <= 1026  # what waits, and what the listener had in its hands
    assert caplog.text.count("events wait for listeners") == 1
    assert [event.name for event in told[:5]] == ["started", "started", "planned", "written", "published"]
    told.clear()
    with events.subscribe(told.append):  # there is room again
        holdfast.save(STATE, tmp_path / "a")
    assert len(told) == 4


def test_a_forked_child_has_no_listeners(tmp_path: Path) -> None:
    code = """
subscription = events.subscribe(events.jsonl("events"))
holdfast.save({"a": torch.ones(3)}, "parent")
child = os.fork()
if child == 0:
    assert events.subscriptions == ()
    holdfast.save({"a": torch.ones(3)}, "silent")
    subscription.close()
    with events.subscribe(events.jsonl("childs")):
        holdfast.save({"a": torch.ones(3)}, "child")
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
holdfast.save({"a": torch.ones(3)}, "again")
"""
    done = run(code, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    paths = [(line["name"], os.path.basename(line["path"])) for line in lines_of(tmp_path / "events")]
    each = ["started", "planned", "written", "published"]
    assert paths == [(name, path) for path in ("parent", "again") for name in each]
    childs = [(line["name"], os.path.basename(line["path"])) for line in lines_of(tmp_path / "childs")]
    assert childs == [(name, "child") for name in each]


def test_a_child_forked_while_listeners_are_at_work_ends(tmp_path: Path) -> None:
    code = """
import threading
inside, go_on = threading.Event(), threading.Event()
def blocks(event):
    inside.set()
    go_on.wait()
events.subscribe(blocks)
holdfast.save({"a": torch.ones(3)}, "a")
inside.wait()
child = os.fork()
if child == 0:
    assert events.flush()
    with events.subscribe(print):
        holdfast.save({"a": torch.ones(3)}, "a")
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
go_on.set()
"""
    done = run(code, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("name='published'") == 1


def test_what_was_told_is_delivered_when_the_interpreter_ends(tmp_path: Path) -> None:
    code = """
events.subscribe(events.jsonl("events"))
holdfast.save({"a": torch.ones(3)}, "a")
holdfast.async_save({"a": torch.ones(3)}, "b")
"""
    done = run(code, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    ends = [line["operation"] for line in lines_of(tmp_path / "events") if line["name"] == "published"]
    assert ends == ["save", "async_save"]


def test_the_interpreter_ends_though_a_listener_does_not(tmp_path: Path) -> None:
    code = """
import atexit, threading
events.subscribe(lambda event: threading.Event().wait())
atexit.unregister(events.flush)
atexit.register(events.flush, 0.0)
holdfast.save({"a": torch.ones(3)}, "a")
"""
    done = run(code, tmp_path)
    assert done.returncode == 0
    assert "listeners to events are busy" in done.stderr


def test_what_a_killed_process_told_can_be_read(tmp_path: Path) -> None:
    code = """
import signal
for make in (events.jsonl, events.trace):
    events.subscribe(make(make.__name__))
for step in range(3):
    holdfast.save({"a": torch.ones(3)}, "a", user_metadata={"step": step})
class Dies:
    def state_dict(self):
        assert events.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    def load_state_dict(self, state): ...
holdfast.save({"a": Dies()}, "a", user_metadata={"step": 3})
"""
    assert run(code, tmp_path).returncode == -9
    each = ["started", "planned", "written", "published"]
    told = [(line["name"], line["step"]) for line in lines_of(tmp_path / "jsonl")]
    assert told == [*((name, step) for step in range(3) for name in each), ("started", 3)]
    spans = json.loads((tmp_path / "trace").read_text().rstrip(",\n") + "]")
    assert [span["name"] for span in spans].count("save") == 3


def test_importing_events_starts_nothing() -> None:
    code = (
        "import sys, threading; from holdfast import events; events.SaveReport; "
        "assert not {'torch', 'rich', 'holdfast.events.listeners'} & set(sys.modules); "
        "assert threading.active_count() == 1"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_names_of_the_module() -> None:
    assert list(events.__all__) == sorted(events.__all__)
    assert all(getattr(events, name) for name in events.__all__)
    with pytest.raises(AttributeError, match="wandb"):
        events.wandb  # type: ignore[attr-defined]  # noqa: B018


def test_a_thread_that_subscribes_while_another_saves_hears_whole_events(tmp_path: Path) -> None:
    told: list[Event] = []

    def come_and_go() -> None:
        while not is_over.is_set():
            events.subscribe(told.append).close()

    is_over = threading.Event()
    thread = threading.Thread(target=come_and_go)
    thread.start()
    for _ in range(20):
        holdfast.save(STATE, tmp_path / "a")
    is_over.set()
    thread.join()
    assert events.subscriptions == ()
    logging.getLogger("holdfast").info("%d events", len(told))
