"""What ranks say that have lost the coordinator, or the process that carries the messages: all of them the same.

Whatever a lost rank sent last may have reached some and not others, so each knows something else of it. They go to a
store that is left, and the word of the first who comes is the word of all. Nobody waits for anybody, except the rank
that runs that store: if its process ended at once, others would find nobody.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Collection

from holdfast._coord.channel import Channel
from holdfast._values.deadline import Deadline

_LOOK_S = 0.02


class Witness:
    """The store at which those who have lost the ranks ``lost`` settle the end of one operation.

    Making one connects to it: OSError or RuntimeError where it is gone too. Every call blocks while it is stopped.
    """

    def __init__(self, channel: Channel, operation: int, lost: Collection[int]) -> None:
        last = channel.size - 1
        keeper = channel.carrier if last in lost else last
        self._is_keeper = channel.rank == keeper
        self._survivors = channel.size - len(lost)
        self._word, self._count = f"word/{operation}", f"count/{operation}"
        self._client = channel.visit(keeper)

    def settle(self, word: bytes) -> bytes:
        """The word of the first survivor that came here, which is ``word`` if we are the first."""
        said = self._client.compare_set(self._word, "", base64.b64encode(word).decode())
        self._client.add(self._count, 1)
        return base64.b64decode(said)

    def stay(self, deadline: Deadline) -> None:
        """Return when this process may end: if it runs the store, when all survivors came or the deadline passed."""
        while self._is_keeper and self._client.add(self._count, 0) < self._survivors and not deadline.passed:
            time.sleep(_LOOK_S)
