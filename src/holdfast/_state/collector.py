"""Python's cycle collector, held still while thousands of small objects are made that all stay alive.

Each burst of objects makes it walk the whole heap of the training job, which takes longer than planning the checkpoint.
Nested and concurrent uses count; the collector runs again when the last one ends, if it ran before.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast._values import forks

_lock = forks.Lock()
_holders: set[object] = set()
_was_enabled = False


@contextmanager
def collector_paused() -> Iterator[None]:
    """No automatic collection within the block, or the function it decorates: by then its objects are gone."""
    global _was_enabled
    holder = object()
    with _lock:
        if not _holders:
            _was_enabled = gc.isenabled()
        _holders.add(holder)
        gc.disable()
    try:
        yield
    finally:
        _resume(holder)


def _resume(*holders: object) -> None:
    with _lock:
        if _holders and not _holders.difference(holders) and _was_enabled:
            gc.enable()
        _holders.difference_update(holders)


@forks.reset_in_child
def _forget() -> None:
    _resume(*_holders)
