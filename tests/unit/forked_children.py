"""Children that a test forks, to do what may end a process."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable


def start_child(function: Callable[[], object]) -> int:
    """The id of a forked child that ends with 0 when ``function`` returns, and after five minutes at the latest."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(300)
            function()
            status = 0
        except BaseException as error:
            os.write(2, f"in the child: {type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(status)
    return child


def end_of(child: int) -> int:
    """How a child ended: its exit code, or a signal as a negative number."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def in_child(function: Callable[[], object]) -> int:
    """How a forked child ended that called ``function``: 0 when that returned."""
    return end_of(start_child(function))
