"""What becomes of a save when the interpreter ends, and of the process that writes when its parent does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from outside_views import writer_processes

import holdfast
from holdfast import AsyncCheckpointerType, async_save, release

SCRIPT = """
import os, sys, threading
import torch
import holdfast
from holdfast import AsyncCheckpointerType, async_save

def write_late(*arguments, write=os.pwrite):
    threading.main_thread().join()  # that is: until the interpreter ends
    return write(*arguments)

if __name__ == "__main__":  # a process that imported this again would have no end
    path, kind, at_exit = sys.argv[1:]
    if kind == "thread":
        os.pwrite = write_late
    state = {"a": torch.arange(3_000_000.0), "step": 3}
    options = holdfast.SaveOptions(at_exit=at_exit)
    handle = async_save(state, path, async_checkpointer_type=AsyncCheckpointerType(kind), options=options)
    state["a"].zero_()
    print(handle.done() if kind == "thread" else "begun")
"""


def run(tmp_path: Path, kind: str, at_exit: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(tmp_path / "checkpoint"), kind, at_exit]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_a_pending_save_finishes_when_the_interpreter_ends(tmp_path: Path, kind: str) -> None:
    ended = run(tmp_path, kind, "finish")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == ("False" if kind == "thread" else "begun")
    assert ended.stderr == ""
    found = holdfast.load(tmp_path / "checkpoint")
    assert torch.equal(found["a"], torch.arange(3_000_000.0))
    assert found["step"] == 3


def test_a_pending_save_is_abandoned_cleanly_when_that_is_wanted(tmp_path: Path) -> None:
    ended = run(tmp_path, "thread", "abandon")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == "False"
    assert "abandoned" in ended.stderr
    assert list((tmp_path / "checkpoint").glob("*")) == []


LATE = """
import atexit, sys
import torch
import holdfast

def save():
    kind = holdfast.AsyncCheckpointerType(sys.argv[2])
    holdfast.async_save({"a": torch.arange(3000.0)}, sys.argv[1], async_checkpointer_type=kind)

atexit.register(save)
"""


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_a_save_that_is_called_when_the_interpreter_ends_is_made(tmp_path: Path, kind: str) -> None:
    command = [sys.executable, "-c", LATE, str(tmp_path / "checkpoint"), kind]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    assert torch.equal(holdfast.load(tmp_path / "checkpoint")["a"], torch.arange(3000.0))


KILLED = """
import os, signal, socket, subprocess, sys
import torch
from holdfast import AsyncCheckpointerType, async_save

class Remembered(subprocess.Popen):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        numbers.append(self.pid)

def send_then_die(connection, order, send=socket.socket.sendall):
    (number,) = numbers
    os.kill(number, signal.SIGSTOP)
    send(connection, order)
    print(number, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

numbers = []
subprocess.Popen = Remembered
socket.socket.sendall = send_then_die
state = {str(number): torch.ones(1_000_000) for number in range(10)}
async_save(state, sys.argv[1], async_checkpointer_type=AsyncCheckpointerType.PROCESS).result()
"""


def test_the_process_removes_what_it_was_writing_when_its_parent_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(KILLED)
    command = [sys.executable, str(script), str(tmp_path / "checkpoint")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        number = int(parent.stdout.readline())
        assert parent.wait(300) == -9
        os.kill(number, signal.SIGCONT)
        assert parent.stdout.read() == ""  # it has the parent's standard output, which ends when both are gone
    assert list((tmp_path / "checkpoint").glob("*")) == []


def test_the_process_loads_no_torch(tmp_path: Path) -> None:
    async_save(
        {"a": torch.ones(100)}, tmp_path / "checkpoint", async_checkpointer_type=AsyncCheckpointerType.PROCESS
    ).result()
    (number,) = writer_processes()
    maps = Path(f"/proc/{number}/maps").read_text()
    assert "libtorch" not in maps
    assert "numpy" in maps
    release()
