"""Living together with torch.distributed.checkpoint in one program."""

from __future__ import annotations

from holdfast.interop.conversions import Conversion, convert
from holdfast.interop.replacing import Replacement, use_in_torch

__all__ = ["Conversion", "Replacement", "convert", "use_in_torch"]
