"""Runs: which steps there are and how they are, a run that goes on, a step that is deleted while it is shown."""

from __future__ import annotations

import threading

import torch

import holdfast
from holdfast import events
from holdfast.errors import NotFoundError


def test_steps_are_listed_with_all_that_is_known(serve, run):
    holdfast.Steps(run).pin(1)
    browser = serve(run)
    told = browser.ask("/api/run?source=0")
    first, second = told["steps"]
    assert (first["step"], first["state"], first["why"], first["pinned"], first["held"]) == (
        1,
        "whole",
        None,
        True,
        False,
    )
    assert first["metrics"] == {"loss": 1.5, "odd": "NaN"}
    assert second["metrics"]["loss"] == 0.75
    assert second["bytes"] > 0 < second["saved_at"]
    assert (second["ranks"], second["seconds"], second["blocked_s"]) == (1, None, None)
    assert browser.ask(f"/api/checkpoint?checkpoint={second['checkpoint']}")["step"] == 2


def test_events_in_the_directory_tell_how_long_saves_took(serve, run):
    subscription = events.subscribe(events.jsonl(run / "events-0.jsonl"))
    holdfast.save({"a": torch.ones(10)}, run / "step-3", no_dist=True)
    subscription.close()
    with (run / "events-0.jsonl").open("a") as log:
        log.write('nonsense\n{"name": "published"}\n[]\n{"name": "written", "attempt": 5}\n')
    (run / "of-others.jsonl").write_bytes(b"\xff\x00" * 100)
    (run / "folder.jsonl").mkdir()
    browser = serve(run)
    first, _, third = browser.ask("/api/run?source=0")["steps"]
    assert (first["seconds"], first["blocked_s"]) == (None, None)
    assert third["seconds"] == third["blocked_s"] > 0
    ranks = browser.ask(f"/api/ranks?checkpoint={third['checkpoint']}")
    [row] = ranks["ranks"]
    assert (row["rank"], row["host"], ranks["slowest"]) == (0, events.HOST, 0)
    assert 0 < row["sync_s"] < row["seconds"] < third["seconds"]
    assert browser.ask(f"/api/ranks?checkpoint={first['checkpoint']}")["slowest"] is None


def test_a_step_without_files_and_an_unfinished_one_say_why(serve, run):
    next((run / "step-1").glob("data-*")).unlink()
    (run / "step-2" / "manifest.json").unlink()
    (run / "step-3").mkdir()
    first, second, third = serve(run).ask("/api/run?source=0")["steps"]
    assert (first["state"], first["why"]) == ("damaged", "files are missing, or have another size")
    assert (second["state"], second["checkpoint"]) == ("unfinished", None)
    assert second["why"].startswith("a save died: ")
    assert second["bytes"] > 0
    assert (third["state"], third["why"]) == ("unfinished", "nothing is in it")


def test_a_reader_holds_a_step(serve, run):
    browser = serve(run)
    following = holdfast.follow(run)
    with next(following):
        assert [step["held"] for step in browser.ask("/api/run?source=0")["steps"]] == [False, True]
        assert browser.ask("/api/checkpoint?checkpoint=1")["step"] == 2  # its links are no other checkpoint


def test_new_steps_come_to_who_waits(serve, run):
    browser = serve(run)
    told = browser.ask("/api/run?source=0")
    found = []
    waiting = threading.Thread(target=lambda: found.append(browser.ask(f"/api/run?source=0&after={told['revision']}")))
    waiting.start()
    holdfast.save({"step": 3}, run / "step-3", no_dist=True)
    waiting.join()
    while [step["step"] for step in found[0]["steps"] if step["state"] == "whole"] != [1, 2, 3]:  # it was seen half-way
        found = [browser.ask(f"/api/run?source=0&after={found[0]['revision']}")]
    assert [step["checkpoint"] for step in found[0]["steps"]][:2] == [0, 1]
    assert browser.ask("/api/run?source=0")["revision"] == found[0]["revision"]


def test_who_waits_is_let_go_when_the_server_ends(serve, run):
    browser = serve(run)
    revision = browser.ask("/api/run?source=0")["revision"]
    found = []
    waiting = threading.Thread(target=lambda: found.append(browser.request(f"/api/run?source=0&after={revision}")[0]))
    waiting.start()
    browser.server.viewer.close()
    waiting.join()
    assert found == [204]


def test_a_step_that_is_deleted_or_saved_again_is_gone(serve, run):
    browser = serve(run)
    first, second = (step["checkpoint"] for step in browser.ask("/api/run?source=0")["steps"])
    assert browser.ask(f"/api/tensors?checkpoint={first}")["total"] == 7
    holdfast.Steps(run).delete(1)
    status, kind, message = browser.error(f"/api/tensors?checkpoint={first}")
    assert (status, kind) == (404, "NotFoundError")
    assert message.startswith("step 1 was deleted")
    holdfast.save({"other": 1}, run / "step-2", no_dist=True, overwrite=True)
    assert browser.error(f"/api/checkpoint?checkpoint={second}")[0] == 404
    [step] = browser.ask("/api/run?source=0")["steps"]
    assert step["checkpoint"] not in (first, second)
    assert browser.ask(f"/api/checkpoint?checkpoint={step['checkpoint']}")["values"] == 1


def test_a_checkpoint_by_its_path_is_read_again_when_it_changes(serve, run):
    browser = serve(run / "step-1")
    assert browser.ask("/api/checkpoint?checkpoint=0")["tensors"] == 7
    holdfast.save({"other": 1}, run / "step-1", no_dist=True, overwrite=True)
    assert browser.ask("/api/checkpoint?checkpoint=0")["tensors"] == 0


def test_directories_of_checkpoints_and_runs_that_have_not_begun(serve, run, tmp_path):
    (tmp_path / "new").mkdir()
    (run / "step-1").rename(run / "best")
    (run / "step-2").rename(run / "last")
    browser = serve(run, tmp_path / "new")
    sources = browser.ask("/api/sources")["sources"]
    assert [each["path"].rpartition("/")[2] for each in sources] == ["best", "last", "new"]
    assert [each["kind"] for each in sources] == ["checkpoint", "checkpoint", "run"]
    assert browser.ask("/api/run?source=2")["steps"] == []
    assert browser.error("/api/run?source=0")[0] == 400


def test_a_run_in_a_store_is_shown(serve, tmp_path):
    root = f"memory://view-{tmp_path.name}/run"
    for number in (1, 2):
        holdfast.save({"a": 1}, f"{root}/step-{number}", no_dist=True)
    browser = serve(root)
    assert [step["state"] for step in browser.ask("/api/run?source=0")["steps"]] == ["whole", "whole"]
    assert browser.ask("/api/checkpoint?checkpoint=0")["values"] == 1
    holdfast.Steps(root).delete(1)
    assert browser.error("/api/checkpoint?checkpoint=0")[0] == 404
    assert browser.ask("/api/run?source=0")["steps"][0]["state"] in ("retired", "whole")


def test_nothing_to_show_is_said_at_once(serve, tmp_path):
    try:
        serve(tmp_path / "nothing")
    except NotFoundError as error:
        assert "no checkpoint" in error.message  # noqa: PT017
    else:
        raise AssertionError("it was served")
