"""The steps of a run in an object store: few requests, no locks, and nobody loses a step."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import holdfast
from holdfast import Best, CheckpointManager, Every, Latest, Steps
from holdfast.cli import app
from tests.stores.conftest import Place
from torture.spoiling import Proxy

State = Callable[..., dict[str, Any]]
EVERY = Every(steps=1)


def manager(root: str, **options: Any) -> CheckpointManager:
    return CheckpointManager(root, **{"save": EVERY, "stop": None, "asynchronous": False, **options})


def numbers(root: str) -> list[int]:
    return [step.step for step in Steps(root).steps()]


def target() -> dict[str, Any]:
    return {"w": torch.zeros(64, 3), "step": -1}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_that_keeps_some_steps_and_goes_on(place: Place, state: State, asynchronous: bool) -> None:
    keep = [Latest(2), Best(1, "loss")]
    with manager(place.url, keep=keep, asynchronous=asynchronous) as run:
        assert run.resume(target()).next_step == 0
        for step, loss in enumerate((3.0, 1.0, 2.0, 4.0, 5.0)):
            run.save(step, state(step), metrics={"loss": loss})
        run.wait()
        assert [each.step for each in run.steps()] == [1, 3, 4]
    with manager(place.url, keep=keep) as run:
        found = target()
        resumed = run.resume(found)
        assert (resumed.step, resumed.next_step, resumed.skipped) == (4, 5, ())
        assert found["step"] == 4
        assert found["w"].unique().tolist() == [4.0]
        best = run.best("loss")
        assert best is not None
        assert (best.step, best.metrics) == (1, {"loss": 1.0})
    left = {name.partition("/")[0] for name in place.objects() if not name.endswith("manifest.json")}
    assert left == {"step-1", "step-3", "step-4", ".holdfast"}


def test_metrics_pins_and_deletions(place: Place, state: State) -> None:
    for step in (1, 2, 3):
        holdfast.save(state(step), f"{place.url}/step-{step}")
    steps = Steps(place.url)
    steps.report(2, {"val": 0.5, "other": float("nan")})
    steps.report(2, {"val": 0.25})
    steps.report(3, {"val": 0.75})
    steps.pin(1)
    steps.pin(1)
    first, second, third = Steps(place.url).steps()
    assert (first.pinned, second.pinned, third.pinned) == (True, False, False)
    assert second.metrics["val"] == 0.25
    assert second.metrics["other"] != second.metrics["other"]
    best = steps.best("val")
    assert best is not None
    assert best.step == 2
    with pytest.raises(holdfast.BusyError, match="pinned"):
        steps.delete(1)
    with pytest.raises(holdfast.BusyError, match="pinned"):
        holdfast.delete(f"{place.url}/step-1")
    assert numbers(place.url) == [1, 2, 3]
    steps.unpin(1)
    report = steps.delete(1)
    assert report.bytes > 0
    assert report.problems == ()
    steps.delete(2)
    with pytest.raises(holdfast.BusyError, match="only one"):
        steps.delete(3)
    for door in (steps.delete, steps.pin, steps.unpin, lambda step: steps.report(step, {"a": 1})):
        with pytest.raises(holdfast.NotFoundError):
            door(2)
    assert numbers(place.url) == [3]
    steps.delete(3, force=True)
    assert numbers(place.url) == []
    assert Steps(place.url).latest() is None
    assert [name for name in place.objects() if "step-" in name and not name.endswith("/manifest.json")] == []


def test_metrics_belong_to_what_was_saved(place: Place, state: State) -> None:
    holdfast.save(state(1), f"{place.url}/step-1")
    Steps(place.url).report(1, {"val": 0.5})
    holdfast.save(state(2), f"{place.url}/step-1")
    (step,) = Steps(place.url).steps()
    assert step.metrics == {}


def test_a_step_that_lacks_an_object_is_passed_over(
    place: Place, state: State, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 3):
        holdfast.save(state(step), f"{place.url}/step-{step}")
    place.remove(place.data_of("step-3"))
    latest = Steps(place.url).latest()
    assert latest is not None
    assert latest.step == 2
    damaged = place.data_of("step-2")
    place.put(damaged, place.get(damaged)[:-1])
    with manager(place.url) as run:
        found = target()
        resumed = run.resume(found)
    assert resumed.step == found["step"] == 1
    assert [each.step for each in resumed.skipped] == [3, 2]


def test_the_newest_step_takes_four_requests(spoiled: Place, proxy: Proxy, state: State) -> None:
    for step in range(12):
        holdfast.save(state(step), f"{spoiled.url}/step-{step}", user_metadata={"metrics": {"loss": float(step)}})
    proxy.reset()
    latest = Steps(spoiled.url).latest()
    assert latest is not None
    assert latest.step == 11
    assert 1 <= len(proxy.requests()) <= 4
    steps = Steps(spoiled.url)
    proxy.reset()
    assert len(steps.steps()) == 12
    assert len(proxy.requests()) <= 14
    proxy.reset()
    assert len(steps.steps()) == 12
    assert len(proxy.requests()) == 1  # what manifests say is remembered


def test_a_deleted_newest_step_costs_one_request_more(spoiled: Place, proxy: Proxy, state: State) -> None:
    for step in range(3):
        holdfast.save(state(step), f"{spoiled.url}/step-{step}")
    holdfast.delete(f"{spoiled.url}/step-2")
    proxy.reset()
    latest = Steps(spoiled.url).latest()
    assert latest is not None
    assert latest.step == 1
    assert len(proxy.requests()) <= 4


def test_a_reader_holds_a_step_against_retention(place: Place, state: State) -> None:
    with manager(place.url, keep=[Latest(1)]) as run:
        run.save(1, state(1))
        run.wait()
        reading = holdfast.follow(place.url, start="all", until=lambda: True)
        held = next(reading)
        assert held.step == 1
        for step in (2, 3):
            run.save(step, state(step))
            run.wait()
        assert [each.step for each in run.steps()] == [1, 3]
        assert holdfast.read(held.path)["step"] == 1
        with pytest.raises(holdfast.BusyError, match="reader holds"):
            run.delete(1, force=True)
        assert holdfast.read(held.path)["step"] == 1
        assert [next(reading).step] == [3]
        run.save(4, state(4))
        run.wait()
        assert [each.step for each in run.steps()] == [3, 4]
        assert next(reading).step == 4
        assert next(reading, None) is None
        run.delete(3)
    assert [name for name in place.objects() if "readers" in name] == []


def test_a_reader_that_goes_on_early_leaves_nothing(place: Place, state: State) -> None:
    holdfast.save(state(1), f"{place.url}/step-1")
    for held in holdfast.follow(place.url, until=lambda: True):
        assert held.step == 1
        assert Steps(place.url).held() == {1}
        held.release()
        assert Steps(place.url).held() == set()
        break
    assert [name for name in place.objects() if "readers" in name] == []


def test_a_reader_that_crashed_holds_its_step_for_a_while(
    place: Place, state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        holdfast.save(state(step), f"{place.url}/step-{step}")
    place.put(".holdfast/readers/reader-0123456789abcdef/step-1", b"")
    steps = Steps(place.url)
    assert steps.held() == {1}
    with pytest.raises(holdfast.BusyError, match="reader holds"):
        steps.delete(1)
    assert numbers(place.url) == [1, 2]
    now = time.time()
    monkeypatch.setattr("time.time", lambda: now + 7 * 3600)
    assert steps.held() == set()
    steps.delete(1)
    assert numbers(place.url) == [2]


def test_a_second_manager_is_told_of_the_first(place: Place, state: State, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="holdfast")
    with manager(place.url) as run:
        run.save(1, state(1))
        assert caplog.text == ""
        with manager(place.url):
            assert f"process {os.getpid()}" in caplog.text
            assert "was not closed" in caplog.text
    caplog.clear()
    with manager(place.url):
        pass
    assert caplog.text == ""
    assert ".holdfast/manager" not in place.objects()


def test_leftovers_of_killed_saves_are_told(place: Place, state: State, caplog: pytest.LogCaptureFixture) -> None:
    holdfast.save(state(1), f"{place.url}/step-1")
    place.put("step-1/data-0123456789abcdef-0-0.safetensors", b"left")
    place.put("step-2/data-fedcba9876543210-0-0.safetensors", b"left")
    with manager(place.url) as run:
        assert "2 saves that were not published" in caplog.text
        assert run.resume(target()).step == 1
    assert len([name for name in place.objects() if "data-" in name]) == 3


def test_a_damaged_step_with_leftovers_stops_nobody(
    place: Place, state: State, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        holdfast.save(state(step), f"{place.url}/step-{step}")
    place.put("step-2/manifest.json", place.get("step-2/manifest.json")[:-30])
    place.put("step-2/data-0123456789abcdef-0-0.safetensors", b"left")
    with manager(place.url) as run:
        assert run.resume(target()).step == 1
        run.save(3, state(3))
    assert "damaged" in caplog.text
    assert holdfast.read(f"{place.url}/step-3")["step"] == 3


def test_who_may_not_delete_is_told_what_stays(
    spoiled: Place, proxy: Proxy, state: State, caplog: pytest.LogCaptureFixture
) -> None:
    """The steps are gone for readers; their objects cost money."""
    proxy.spoil("403", always=True, where=lambda request: request.operation == "delete")
    with manager(spoiled.url, keep=[Latest(1)]) as run:
        for step in (1, 2):
            run.save(step, state(step))
        run.wait()
        assert [step.step for step in run.steps()] == [2]
    assert len(proxy.spoiled()) >= 1
    assert "of step 1, which was deleted: objects of the attempt" in caplog.text
    assert len(spoiled.objects("step-1")) == 3
    proxy.reset()
    with manager(spoiled.url) as run:
        run.finish_deletions()
    assert list(spoiled.objects("step-1")) == ["manifest.json"]


def test_a_sweep_leaves_savers_alone(spoiled: Place, proxy: Proxy, state: State) -> None:
    """One that is about to publish: its objects are shown, and stay unless somebody names them."""
    holdfast.save(state(1), f"{spoiled.url}/step-1")
    reports: list[holdfast.SweepReport] = []
    proxy.call_at(
        lambda: reports.append(holdfast.sweep(spoiled.url, delete=True)),
        where=lambda request: request.method == "PUT" and request.path.endswith("step-2/manifest.json"),
    )
    holdfast.save(state(2), f"{spoiled.url}/step-2")
    (found,) = reports[0].leftovers
    assert (found.verdict, found.removed, len(found.files)) == ("unknown", (), 2)
    assert holdfast.read(f"{spoiled.url}/step-2")["step"] == 2
    assert holdfast.verify(f"{spoiled.url}/step-2").ok


@pytest.mark.parametrize("way", ["no reply", "500 done", "409 not done", "503 not done"])
def test_a_report_whose_answer_is_wrong(spoiled: Place, proxy: Proxy, state: State, way: str) -> None:
    holdfast.save(state(1), f"{spoiled.url}/step-1")
    proxy.spoil(way, where=lambda request: request.method == "PUT" and request.path.endswith("metrics.json"))
    Steps(spoiled.url).report(1, {"val": 1.5})
    assert len(proxy.spoiled()) == 1
    (step,) = Steps(spoiled.url).steps()
    assert step.metrics == {"val": 1.5}


def test_a_report_that_is_refused_says_so(spoiled: Place, proxy: Proxy, state: State) -> None:
    holdfast.save(state(1), f"{spoiled.url}/step-1")
    for at in range(1, 15):
        proxy.spoil("403", at=at, where=lambda request: request.method == "PUT")
    with pytest.raises(holdfast.StorageError, match="credentials"):
        Steps(spoiled.url).report(1, {"val": 1.5})
    assert len(proxy.spoiled()) == 1


def test_a_deletion_that_was_cut_off_is_ended_by_the_next_manager(place: Place, state: State) -> None:
    for step in (1, 2):
        holdfast.save(state(step), f"{place.url}/step-{step}")
    objects = {name: place.get(f"step-1/{name}") for name in place.objects("step-1")}
    holdfast.delete(f"{place.url}/step-1")
    for name, data in objects.items():
        if name != "manifest.json":
            place.put(f"step-1/{name}", data)
    place.put("step-1/metrics.json", b"{}")
    assert numbers(place.url) == [2]
    with manager(place.url, keep=[Latest(1)]) as run:
        run.resume(target())
        run.save(3, state(3))
        run.wait()
        run.finish_deletions()
    assert list(place.objects("step-1")) == ["manifest.json"]
    assert numbers(place.url) == [3]


def test_a_step_that_was_deleted_can_be_saved_again(place: Place, state: State) -> None:
    for step in (1, 2):
        holdfast.save(state(step), f"{place.url}/step-{step}")
    Steps(place.url).delete(1)
    holdfast.save(state(7), f"{place.url}/step-1")
    assert numbers(place.url) == [1, 2]
    assert holdfast.read(f"{place.url}/step-1")["step"] == 7


def test_the_commands_of_steps(place: Place, state: State) -> None:
    for step in (1, 2):
        holdfast.save(state(step), f"{place.url}/step-{step}")

    def said(*words: str) -> str:
        done = CliRunner().invoke(app, list(words), env={"COLUMNS": "250"})
        assert done.exit_code == 0, done.output
        return done.output

    said("report", place.url, "2", "val=0.5")
    said("pin", place.url, "1")
    listing = said("steps", place.url)
    assert "pinned" in listing
    assert "0.5" in listing
    said("unpin", place.url, "1")
    said("delete", place.url, "1")
    assert numbers(place.url) == [2]
    assert CliRunner().invoke(app, ["steps", f"{place.url}/nothing"]).exit_code != 0


def test_a_run_copied_down_goes_on_there(bucket: Place, tmp_path: Path, state: State) -> None:
    with manager(bucket.url, keep=[Latest(2)]) as run:
        for step in range(4):
            run.save(step, state(step))
        run.wait()
        run.report(3, {"val": 1.0})
        run.pin(2)
    for name in bucket.objects():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bucket.get(name))
    with manager(str(tmp_path), keep=[Latest(1)]) as run:
        assert [(step.step, step.pinned) for step in run.steps()] == [(2, True), (3, False)]
        assert run.steps()[1].metrics == {"val": 1.0}
        assert run.resume(target()).step == 3
        run.save(4, state(4))
        run.wait()
        assert [step.step for step in run.steps()] == [2, 4]
