from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.events.progress import Following, Shown

STATE = {"weight": torch.arange(100_000.0), "epoch": 3}


def work(path: Path) -> dict[str, Callable[[bool], object]]:
    """Every function that shows progress."""
    state = {"weight": torch.zeros(100_000), "epoch": 0}
    return {
        "save": lambda progress: holdfast.save(STATE, path / "made", options=holdfast.SaveOptions(progress=progress)),
        "async_save": lambda progress: holdfast.async_save(
            STATE, path / "made", options=holdfast.SaveOptions(progress=progress)
        ).result(),
        "load": lambda progress: holdfast.load(state, path / "a", options=holdfast.LoadOptions(progress=progress)),
        "read": lambda progress: holdfast.read(path / "a", options=holdfast.LoadOptions(progress=progress)),
        "verify": lambda progress: holdfast.verify(path / "a", progress=progress),
        "convert": lambda progress: holdfast.convert(path / "a", path / "made", to="torch", progress=progress),
    }


def shown_on_a_terminal(code: str, folder: Path) -> str:
    """What a process shows that runs ``code`` in ``folder``, with its standard error on a terminal."""
    ours, theirs = pty.openpty()
    lines = f"import torch, holdfast\nstate = {{'weight': torch.arange(100_000.0), 'epoch': 3}}\n{code}"
    process = subprocess.Popen(
        [sys.executable, "-c", lines], cwd=folder, stderr=theirs, env={**os.environ, "TERM": "xterm", "COLUMNS": "200"}
    )
    os.close(theirs)
    seen = bytearray()
    with contextlib.suppress(OSError):  # how the end of a terminal is told
        while piece := os.read(ours, 1 << 16):
            seen.extend(piece)
    os.close(ours)
    assert process.wait(300) == 0, seen.decode()
    return seen.decode()


def test_a_bar_is_shown_on_a_terminal(tmp_path: Path) -> None:
    code = """
import threading
save, load = holdfast.SaveOptions(progress=True), holdfast.LoadOptions(progress=True)
holdfast.save(state, "saved", options=save)
holdfast.async_save(state, "behind", options=save).result()
holdfast.load(dict(state), "saved", options=load)
holdfast.read("behind", options=load)
holdfast.verify("saved", progress=True)
holdfast.convert("saved", "torchs", to="torch", progress=True)
assert not [thread for thread in threading.enumerate() if thread.name == "holdfast-progress"]
"""
    shown = shown_on_a_terminal(code, tmp_path)
    ends = ("saved: done", "behind: published", "behind: done", "verifying saved: done", "converting saved: done")
    assert [end for end in ends if end not in shown] == []
    assert shown.count("saved: done") >= 4
    assert "GB/s" in shown
    assert "390.6/390.6 KiB" in shown
    assert shown.rstrip().endswith("\x1b[?25h")  # the cursor is back


@pytest.mark.parametrize("name", work(Path()))
def test_in_a_file_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    holdfast.save(STATE, tmp_path / "a")
    work(tmp_path)[name](True)
    shown = capsys.readouterr()
    assert len(shown.err.splitlines()) == 1
    assert "GB/s" in shown.err
    assert shown.out == ""


@pytest.mark.parametrize("name", work(Path()))
def test_nothing_is_shown_unless_it_is_wanted(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    holdfast.save(STATE, tmp_path / "a")
    work(tmp_path)[name](False)
    assert capsys.readouterr() == ("", "")


def test_the_bar_of_an_asynchronous_save_ends_with_all_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {"w": torch.ones(1 << 20)}
    holdfast.async_save(state, tmp_path / "a", options=holdfast.SaveOptions(progress=True)).result()
    assert "4.0/4.0 MiB" in capsys.readouterr().err


@pytest.mark.parametrize("options", [holdfast.SaveOptions, holdfast.LoadOptions])
def test_what_is_no_way_to_show_progress_is_refused(options: Any) -> None:
    with pytest.raises(ValueError, match="progress is True, False or a function, not 'yes'"):
        options(progress="yes")


def test_a_failure_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = holdfast.SaveOptions(progress=True)
    for save in (holdfast.save, holdfast.async_save):
        with pytest.raises(holdfast.InvalidStateError):
            save({"a": object()}, tmp_path / "a", options=options)
        assert "a: failed" in capsys.readouterr().err
    assert not [thread for thread in threading.enumerate() if thread.name == "holdfast-progress"]


def test_names_are_no_markup_and_no_escape_sequences(tmp_path: Path) -> None:
    code = """
for name in ("[red]a", "b\\x1b]0;title"):
    holdfast.save(state, name, options=holdfast.SaveOptions(progress=True))
"""
    shown = shown_on_a_terminal(code, tmp_path)
    assert "[red]a: done" in shown
    assert "'b\\x1b]0;title': done" in shown


def test_a_function_sees_how_far_a_save_and_a_load_are(tmp_path: Path) -> None:
    seen: list[Shown] = []
    holdfast.save(STATE, tmp_path / "a", options=holdfast.SaveOptions(progress=seen.append))
    (file,) = (tmp_path / "a").glob("data-*")
    assert (seen[-1].phase, seen[-1].bytes_done, seen[-1].bytes_total) == ("done", 400_000, 400_000)
    assert file.stat().st_size > 400_000
    seen.clear()
    holdfast.load(dict(STATE), tmp_path / "a", options=holdfast.LoadOptions(progress=seen.append))
    assert (seen[-1].phase, seen[-1].bytes_done, seen[-1].bytes_total) == ("done", 400_000, 400_000)


def test_a_function_is_called_while_the_work_goes_on(tmp_path: Path) -> None:
    seen = threading.Event()

    def saw(shown: Any) -> None:
        if shown.phase == "planning the save":
            seen.set()

    class Waits:
        def state_dict(self) -> dict[str, object]:
            assert seen.wait(300)
            return {"a": 1}

        def load_state_dict(self, state: object) -> None: ...

    holdfast.save({"object": Waits()}, tmp_path / "a", options=holdfast.SaveOptions(progress=saw))


def test_a_function_that_fails_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fails(shown: object) -> None:
        raise ValueError("broken")

    holdfast.save(STATE, tmp_path / "a", options=holdfast.SaveOptions(progress=fails))
    assert caplog.text.count("showing the progress failed") == 1
    assert holdfast.verify(tmp_path / "a").ok


def test_a_forked_child_shows_nothing(tmp_path: Path) -> None:
    seen: list[int] = []
    with Following(lambda shown: seen.append(os.getpid()), lambda: Shown("waiting")) as following:
        child = os.fork()
        if child == 0:
            following.__exit__(None)
            os._exit(len(seen) if os.getpid() in seen else 0)
        assert os.waitpid(child, 0)[1] == 0
    assert set(seen) == {os.getpid()}
