"""What Python and torch keep for a process or a thread, set for the time of a block: the cycle collector, gradients,
streams.

Each burst of objects makes it walk the whole heap of the training job, which takes longer than planning the checkpoint.
Nested and concurrent uses count; the collector runs again when the last one ends, if it ran before.

Else a training would go on without gradients, or on the stream of a copy. Each is an ``Ending``: enter it twice.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from functools import partial
from typing import ParamSpec, TypeVar

import torch

from holdfast import _process as forks
from holdfast._process import Ending

P = ParamSpec("P")
Result = TypeVar("Result")

_lock = forks.Lock()
_holders: set[object] = set()
_was_enabled = False


class CollectorPause:
    """No automatic collection within its block; ``end`` may be called again, and by any thread."""

    def __enter__(self) -> None:
        global _was_enabled
        with _lock:
            if not _holders:
                _was_enabled = gc.isenabled()
            _holders.add(self)
            gc.disable()

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        """Let the collector run again, if nobody else keeps it from that."""
        _resume(self)


def collector_paused(function: Callable[P, Result]) -> Callable[P, Result]:
    """``function``, without automatic collections while it runs: by its end its objects are gone."""

    @functools.wraps(function)
    def paused(*args: P.args, **kwargs: P.kwargs) -> Result:
        pause = CollectorPause()
        # Ended twice: an interrupt may come into the one end, and then there is the other.
        try:
            with pause:
                return function(*args, **kwargs)
        finally:
            pause.end()

    return paused


def _resume(*holders: object) -> None:
    global _was_enabled
    with _lock:
        _holders.difference_update(holders)
        if not _holders and _was_enabled:
            gc.enable()
            _was_enabled = False


@forks.reset_in_child
def _forget() -> None:
    _resume(*_holders)


def grad_mode() -> Ending:
    """Whether operations are recorded, as it is now."""
    return Ending(partial(torch._C._set_grad_enabled, torch.is_grad_enabled()))


def cuda_stream(device: torch.device) -> Ending:
    """The current stream of ``device``, and the current device, as they are now."""
    stream, current = torch.cuda.current_stream(device), torch.cuda.current_device()

    def put_back() -> None:
        torch.cuda.set_stream(stream)
        torch.cuda._maybe_exchange_device(current)  # which makes no context where there is none

    return Ending(put_back)
