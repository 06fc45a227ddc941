"""A value on its way between planner and storage, in the shape that torch's protocol asks for."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any


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

    def read(self, size: int | None = -1, /) -> bytes:
        """As BytesIO.read, on the serialized value."""
        self._fill()
        return super().read(size)

    def read1(self, size: int | None = -1, /) -> bytes:
        """As BytesIO.read1, on the serialized value."""
        self._fill()
        return super().read1(size)

    def readinto(self, buffer: Any, /) -> int:
        """As BytesIO.readinto, on the serialized value."""
        self._fill()
        return super().readinto(buffer)

    def readline(self, size: int | None = -1, /) -> bytes:
        """As BytesIO.readline, on the serialized value."""
        self._fill()
        return super().readline(size)

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """As BytesIO.seek, on the serialized value."""
        self._fill()
        return super().seek(offset, whence)

    def getvalue(self) -> bytes:
        """The serialized value."""
        self._fill()
        return super().getvalue()

    def getbuffer(self) -> memoryview:
        """The serialized value, without a copy."""
        self._fill()
        return super().getbuffer()


class SavedValueBuffer(ValueBuffer):
    """A value together with the ``torch.save`` bytes that somebody else made of it; loading those runs no code."""
