"""What has to be done at the end of a block, also where an interrupt comes into just that."""

from __future__ import annotations

from collections.abc import Callable


class Ending:
    """Calls ``end``, which may be called again, when its block is left.

    Enter it twice, ``with ending, ending:``. An interrupt may come into the one end, and then there is the other.
    """

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end

    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        self._end()
