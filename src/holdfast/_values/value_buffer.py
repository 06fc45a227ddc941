"""A value on its way between planner and storage, in the shape that torch's protocol asks for."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from typing import Any


def _of_the_value(name: str) -> Any:
    """The method ``name`` of BytesIO, on the serialized value."""
    method = getattr(io.BytesIO, name)

    @functools.wraps(method)
    def on_value(self: ValueBuffer, *arguments: Any) -> Any:
        self._fill()
        return method(self, *arguments)

    return on_value


class ValueBuffer(io.BytesIO):
    """A BytesIO that carries a value, and makes its bytes only when somebody reads them.

    The default planners hand values to storage in this form: native storage takes ``value``, any other storage reads
    the bytes, which are those ``torch.save`` would write.
    """

    def __init__(self, value: object, serialize: Callable[[object], bytes]) -> None:
        super().__init__()
        self.value = value
        self._serialize: Callable[[object], bytes] | None = serialize

    def _fill(self) -> None:
        if self._serialize is not None:
            serialize, self._serialize = self._serialize, None
            super().write(serialize(self.value))
            super().seek(0)

    read = _of_the_value("read")
    read1 = _of_the_value("read1")
    readinto = _of_the_value("readinto")
    readline = _of_the_value("readline")
    readlines = _of_the_value("readlines")
    seek = _of_the_value("seek")
    getvalue = _of_the_value("getvalue")
    getbuffer = _of_the_value("getbuffer")
    __next__ = _of_the_value("__next__")


class SavedValueBuffer(ValueBuffer):
    """A value together with the ``torch.save`` bytes that somebody else made of it; loading those runs no code."""
