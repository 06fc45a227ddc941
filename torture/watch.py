"""A call under watch: how long it took, how much memory, what it opened or ran that it should not have.

The hook into the interpreter's audit events cannot be taken out again: only processes that are there for it call
``install``.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_RUNS_CODE = frozenset(
    {
        *("exec", "compile", "import", "marshal.loads", "os.system", "os.exec"),
        *("os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "subprocess.Popen", "ctypes.dlopen"),
        *("ctypes.dlsym", "ctypes.cdata", "socket.connect", "socket.bind", "socket.getaddrinfo", "webbrowser.open"),
        *("pickle.find_class", "code.__new__", "function.__new__", "cpython.run_file", "cpython.run_command"),
    }
)
_CHANGES_FILES = frozenset(
    {
        *("os.rename", "os.remove", "os.link", "os.symlink", "os.mkdir", "os.rmdir"),
        *("os.chmod", "os.chown", "os.truncate", "os.utime", "os.setxattr", "shutil.copyfile"),
        *("shutil.move", "shutil.rmtree", "tempfile.mkstemp", "tempfile.mkdtemp"),
    }
)

_MAPPINGS = "/proc/self/maps"  # Where a conversion finds what torch has mapped, to give its pages back.

_inside: str | None = None
_events: list[str] = []


def install() -> None:
    """Watch this process from now on."""
    sys.addaudithook(_hook)


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _inside is None:
        return
    if event == "open":
        path, _, flags = arguments
        if isinstance(path, int):
            return
        name = os.path.abspath(os.fsdecode(path))
        if name == _MAPPINGS:
            return
        if not (name + os.sep).startswith(_inside + os.sep):
            _events.append(f"opened {name}")
        elif isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            _events.append(f"opened {name} for writing")
    elif event in _RUNS_CODE or event in _CHANGES_FILES:
        _events.append(f"{event} {str(arguments)[:200]}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """What a call did: the error that it raised, seconds, bytes by which memory grew at most, forbidden events."""

    error: Exception | None
    seconds: float
    grown: int
    events: tuple[str, ...]


def watched(call: Callable[[], object], inside: Path) -> Watched:
    """What ``call``, which may open nothing outside of ``inside``, did."""
    global _inside
    _events.clear()
    before = _reset_peak()
    error: Exception | None = None
    # The real path: what was reached through a link that leads out shows as outside.
    _inside = str(inside)
    started = time.process_time()
    try:
        call()
    except Exception as raised:
        error = raised
    finally:
        seconds = time.process_time() - started
        _inside = None
    return Watched(error=error, seconds=seconds, grown=_peak() - before, events=tuple(_events))


def _reset_peak() -> int:
    """Forget the peak of resident memory; what it is now."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return _peak()


def _peak() -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))
