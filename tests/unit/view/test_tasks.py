"""What takes a while: verify with a flipped bit, exact numbers, elements of a diff; cancelling. And diffs."""

from __future__ import annotations

import math
import threading

import torch

import holdfast
from tests.unit.view.conftest import HOSTILE


def test_verify_finds_a_flipped_bit_and_shows_the_block(serve, tmp_path):
    holdfast.save({"a": torch.zeros(3 << 18), "b": torch.ones(10)}, tmp_path / "a", no_dist=True)
    browser = serve(tmp_path / "a")
    row = next(row["tensor"] for row in browser.ask("/api/tensors?checkpoint=0")["rows"] if row["key"] == "a")
    assert browser.ended("/api/verify?checkpoint=0")["result"]["ok"] is True
    blocks = browser.ask(f"/api/blocks?checkpoint=0&tensor={row}")
    assert blocks == {"blocks": 3, "block_bytes": 1 << 20, "state": "verified", "damaged": []}
    data = next((tmp_path / "a").glob("data-*"))
    content = bytearray(data.read_bytes())
    content[content.index(bytes(1 << 20)) + (1 << 20) + 4096] ^= 1
    data.write_bytes(content)
    told = browser.ended("/api/verify?checkpoint=0")
    assert (told["kind"], told["state"], told["result"]["ok"]) == ("verify", "done", False)
    assert told["bytes"] == told["total_bytes"] > 3 << 20
    [damage] = told["result"]["damage"]
    assert (damage["key"], damage["file"]) == ("a", data.name)
    assert damage["last"] - damage["first"] + 1 == 1 << 20
    assert len(browser.ask(f"/api/blocks?checkpoint=0&tensor={row}")["damaged"]) == 1


def test_numbers_are_sampled_or_of_all_elements(serve, run):
    browser = serve(run)
    browser.ask("/api/run?source=0")
    rows = {row["key"]: row["tensor"] for row in browser.ask("/api/tensors?checkpoint=1")["rows"]}
    sampled = browser.ask(f"/api/statistics?checkpoint=1&tensor={rows['model.tied']}")
    assert (sampled["key"], sampled["alias_of"]) == ("model.tied", "model.weight")
    assert sampled["norm"] == math.sqrt(sum((2 * number) ** 2 for number in range(12)))
    odd = browser.ended(f"/api/statistics?checkpoint=1&tensor={rows[HOSTILE]}")["result"]
    assert (odd["nan"], odd["inf"], odd["is_exact"], odd["max"]) == (1, 1, True, 1.0)
    cells = browser.ask(f"/api/slice?checkpoint=1&tensor={rows[HOSTILE]}&at=0")["values"]
    assert cells == [["NaN", "Infinity", 1.0]]


def test_a_diff_is_shown_by_pages_and_by_elements(serve, run):
    browser = serve(run)
    browser.ask("/api/run?source=0")
    told = browser.ask("/api/diff?a=0&b=1")
    assert told["counts"] == {"changed": 3, "unchanged": 6}
    assert (told["same"], told["total"], told["data_bytes_read"]) == (False, 9, 0)
    changed = browser.ask("/api/diff?a=0&b=1&status=changed&search=weight")
    [row] = changed["rows"]
    assert (row["key"], row["by"], row["a"]["shape"]) == ("model.weight", "digests", [3, 4])
    assert changed["counts"] == told["counts"]
    far = browser.ended(f"/api/diff/values?a=0&b=1&row={row['row']}")["result"]
    assert (far["differing"], far["relative_l2"], far["first_index"]) == (11, 1.0, [0, 1])
    value = next(row for row in told["rows"] if row["key"] == "step")
    assert (value["a"]["shown"], value["b"]["shown"]) == ("1", "2")
    failed = browser.ended(f"/api/diff/values?a=0&b=1&row={value['row']}")
    assert (failed["state"], failed["error"]["kind"]) == ("failed", "InvalidStateError")
    same = browser.ask("/api/diff?a=0&b=0")
    assert same["same"] is True


def test_a_task_is_cancelled_and_others_wait_for_room(serve, run):
    browser = serve(run / "step-1")
    tasks, begun, going_on = browser.server.viewer._tasks, threading.Semaphore(0), threading.Event()

    def work(moved):
        begun.release()
        going_on.wait()
        moved(1, 2)
        return {}

    numbers = [tasks.begin("verify", 0, work).number for _ in range(10)]
    begun.acquire()
    begun.acquire()
    assert browser.error("/api/verify?checkpoint=0", "POST")[:2] == (503, "BusyError")
    assert browser.ask(f"/api/task?task={numbers[0]}")["state"] == "running"
    for number in numbers:
        browser.ask(f"/api/task?task={number}", "DELETE")
    going_on.set()
    ended = [browser.ask(f"/api/task?task={number}&wait=20") for number in numbers]
    assert {each["state"] for each in ended} == {"cancelled"}
    assert browser.ended("/api/verify?checkpoint=0")["state"] == "done"


def test_the_task_of_a_deleted_checkpoint_fails_and_says_so(serve, run):
    browser = serve(run)
    browser.ask("/api/run?source=0")
    holdfast.Steps(run).delete(1)
    told = browser.ended("/api/verify?checkpoint=0")
    assert (told["state"], told["error"]["kind"]) == ("failed", "NotFoundError")
    assert browser.error("/api/verify?checkpoint=9", "POST")[0] == 404


def test_dynamics_say_which_steps_have_no_numbers(serve, run):
    told = serve(run).ask("/api/dynamics?source=0&under=")
    assert (told["steps"], told["missing"], told["series"]) == ([], [1, 2], [])


def test_numbers_that_were_kept_are_shown_over_the_steps(serve, run):
    options = holdfast.SaveOptions(statistics=True)
    holdfast.save(holdfast.load(run / "step-2"), run / "step-2", no_dist=True, overwrite=True, options=options)
    browser = serve(run)
    browser.ask("/api/run?source=0")
    assert [browser.ask(f"/api/checkpoint?checkpoint={number}")["has_statistics"] for number in (0, 1)] == [False, True]
    about = browser.ask("/api/tensor?checkpoint=1&tensor=0")
    assert about["statistics"]["source"] == "save"
    assert about["statistics"]["norm"] == browser.ask("/api/statistics?checkpoint=1&tensor=0")["norm"]
    told = browser.ask("/api/dynamics?source=0&under=")
    assert (told["steps"], told["missing"], told["rest"], told["left_out"]) == ([2], [1], 0, 0)
    series = {each["name"]: each for each in told["series"]}
    squares = 3 * 5 + sum((2 * number) ** 2 for number in range(12))
    assert series["model"]["norm"] == [math.sqrt(squares)]
    assert series["model"]["rms"] == [math.sqrt(squares / 27)]
    assert (series["model"]["tensors"], series["model"]["under"]) == (4, "model.")  # a tied one counts once
    assert (series[HOSTILE]["non_finite"], series[HOSTILE]["under"]) == ([2], None)
    below = browser.ask("/api/dynamics?source=0&under=model.layers.")["series"]
    assert [(each["name"], each["rms"]) for each in below] == [("0", [1.0]), ("9", [1.0]), ("10", [1.0])]


def test_damaged_numbers_harm_nothing_else(serve, run):
    options = holdfast.SaveOptions(statistics=True)
    holdfast.save({"a": torch.ones(4)}, run / "step-3", no_dist=True, options=options)
    kept = max((run / "step-3").glob("data-*-1-0.safetensors"))
    kept.write_bytes(kept.read_bytes()[:-1])
    browser = serve(run / "step-3", run)
    told = browser.ask("/api/checkpoint?checkpoint=0")
    assert (told["tensors"], told["has_statistics"]) == (1, False)
    assert "damaged" in told["statistics_problem"] or "bytes" in told["statistics_problem"]
    assert 3 in browser.ask("/api/dynamics?source=1&under=")["missing"]
