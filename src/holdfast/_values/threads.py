"""Threads, started so that an interrupt cannot come into it."""

from __future__ import annotations

import _thread
import threading
from queue import SimpleQueue


def start_thread(thread: threading.Thread) -> None:
    """Start ``thread``; after an interrupt it may begin all the same, a little later.

    An interrupt that comes into ``Thread.start`` may leave a lock held, for which the new thread then waits for ever.
    They come to the main thread alone: so another one starts it, which itself is started by a single step of C.
    """
    if threading.current_thread() is not threading.main_thread():
        thread.start()
        return
    outcome: SimpleQueue[BaseException | None] = SimpleQueue()
    _thread.start_new_thread(_start, (thread, outcome))
    error = outcome.get()
    if error is not None:
        raise error


def _start(thread: threading.Thread, outcome: SimpleQueue[BaseException | None]) -> None:
    try:
        thread.start()
    except BaseException as error:
        outcome.put(error)
    else:
        outcome.put(None)
