"""Saves that are called within an asynchronous save: they work, or say at once that they cannot."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import AsyncSave
from holdfast.staging import BlockingAsyncStager


class Calling:
    """A part of a state that calls ``call`` when it is asked for its own."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call

    def state_dict(self) -> dict[str, Any]:
        self.call()
        return {"value": torch.ones(3)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Never called."""


def inner(tmp_path: Path) -> Callable[[], object]:
    return lambda: holdfast.save({"inner": 1}, tmp_path / "inner")


def test_a_state_dict_may_save(tmp_path: Path) -> None:
    state = {"part": Calling(inner(tmp_path)), "step": 1}
    holdfast.prewarm(state)
    holdfast.async_save(state, tmp_path / "outer").result()
    holdfast.async_save(state, tmp_path / "staged", async_stager=BlockingAsyncStager()).result()
    for name in ("outer", "staged"):
        assert holdfast.load(tmp_path / name)["step"] == 1
    assert holdfast.load(tmp_path / "inner") == {"inner": 1}


def test_a_progress_callback_may_save(tmp_path: Path) -> None:
    phases = []

    def save(handle: AsyncSave) -> None:
        phases.append(handle.phase)
        holdfast.save({"inner": 1}, tmp_path / "inner")

    holdfast.async_save(
        {"step": 1, "weight": torch.ones(100)}, tmp_path / "outer", options=holdfast.SaveOptions(progress=save)
    ).result()
    assert "writing" in phases
    assert phases[-1] == "published"
    assert holdfast.load(tmp_path / "inner") == {"inner": 1}


@pytest.mark.parametrize("outer", [holdfast.async_save, holdfast.save])
def test_an_asynchronous_save_within_another_is_an_error_at_once(tmp_path: Path, outer: Callable[..., Any]) -> None:
    state = {"part": Calling(lambda: holdfast.async_save({"inner": 1}, tmp_path / "inner"))}
    if outer is holdfast.save:
        outer(state, tmp_path / "outer")  # in this one it works
        return
    with pytest.raises(holdfast.BusyError, match=r"inside an async_save, by its state_dict\(\)"):
        outer(state, tmp_path / "outer")
    with pytest.raises(holdfast.BusyError, match="inside an async_save"):
        holdfast.async_save({"part": Calling(holdfast.release)}, tmp_path / "outer")
    # And the turn has been given back.
    holdfast.async_save({"step": 1}, tmp_path / "next").result()
    assert not (tmp_path / "outer").exists()


def test_what_is_called_when_a_save_is_done_may_save(tmp_path: Path) -> None:
    done: Future[AsyncSave] = Future()
    handle = holdfast.async_save({"step": 1}, tmp_path / "outer")
    handle.add_done_callback(lambda _: done.set_result(holdfast.async_save({"step": 2}, tmp_path / "next")))
    handle.result()
    done.result().result()
    assert holdfast.load(tmp_path / "next")["step"] == 2
