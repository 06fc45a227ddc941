"""Single values as ``torch.save`` bytes: what torch's protocol keeps non-tensor items in.

Reading is restricted to what torch calls weights only, unless the caller trusts the checkpoint with its life.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

from holdfast._torchformat.weighing import weigh
from holdfast.errors import CorruptError, InvalidStateError, UnsafeError


def serialize_object(value: object) -> bytes:
    """``value`` as torch.save bytes."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise InvalidStateError(f"a {type(value).__name__} cannot be pickled: {error}") from error
    return buffer.getvalue()


def deserialize_object(data: io.BytesIO, *, key: str, allow_pickle: bool) -> Any:
    """The value in torch.save bytes; UnsafeError when that needs code to run and ``allow_pickle`` is not set."""
    if not allow_pickle:
        weigh(data, what=f"the value of {key!r}")
    try:
        return torch.load(data, map_location="cpu", weights_only=not allow_pickle)
    except pickle.UnpicklingError as error:
        if allow_pickle:
            raise CorruptError(f"the value of {key!r} is not a valid pickle: {error}", key=key) from error
        raise UnsafeError(
            f"{key!r} is a pickle of more than plain values, and loading it would run code; "
            "pass allow_pickle=True if you trust the checkpoint",
            key=key,
        ) from error
    except Exception as error:
        if allow_pickle and not isinstance(error, (RuntimeError, EOFError, ValueError, KeyError)):
            raise  # it comes from code of the checkpoint
        # Anything may come out of bytes that are not what they should be; all of it means the same.
        raise CorruptError(f"the value of {key!r} is not what torch.save writes: {error}", key=key) from error
