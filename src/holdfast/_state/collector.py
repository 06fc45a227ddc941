"""Python's cycle collector, held still while thousands of small objects are made that all stay alive.

Each burst of objects makes it walk the whole heap of the training job, which takes longer than planning the checkpoint.
Nested and concurrent uses count; the collector runs again when the last one ends, if it ran before.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_holders = 0
_was_enabled = False


@contextmanager
def collector_paused() -> Iterator[None]:
    """No automatic collection within the block, or the function it decorates: by then its objects are gone."""
    global _holders, _was_enabled
    with _lock:
        if _holders == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _holders += 1
    try:
        yield
    finally:
        with _lock:
            _holders -= 1
            if _holders == 0 and _was_enabled:
                gc.enable()
