"""Living together with torch.distributed.checkpoint in one program."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.interop.conversions import Conversion, convert

if TYPE_CHECKING:
    from holdfast.interop.replacing import Replacement, use_in_torch

__all__ = ["Conversion", "Replacement", "convert", "use_in_torch"]


def __getattr__(name: str) -> object:
    # Late, because it imports torch's checkpoint classes, which conversions do not need.
    if name not in ("Replacement", "use_in_torch"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from holdfast.interop import replacing

    return getattr(replacing, name)
