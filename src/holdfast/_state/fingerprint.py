"""Small numbers that tell contents apart: what ranks compare to see whether they really hold the same.

Equal contents have equal fingerprints. Different contents have different ones if everything was looked at, and nearly
always if only a sample was: a replica that went its own way differs nearly everywhere. 0 stands for "not looked at".
"""

from __future__ import annotations

import numpy as np
import torch

from holdfast._state.subclasses import ComposedTensor
from holdfast._state.tensors import word_dtype, words_of_quantized
from holdfast._values.digest import digest

_SAMPLES_PER_DIMENSION = 4
_SLICE_BYTES = 16 << 20
_MAX_DEPTH = 64


def fingerprint_of_tensor(tensor: torch.Tensor, *, everything: bool) -> int:
    """A fingerprint of a few elements spread over the tensor, or of all of them."""
    if tensor.numel() == 0:
        return 0
    if tensor.is_quantized:
        tensor = words_of_quantized(tensor)
    if not everything:
        return _digest_of(tensor[tuple(_spread(size) for size in tensor.shape)])
    rows = tensor.reshape(1) if tensor.dim() == 0 else tensor
    step = max(1, _SLICE_BYTES // max(1, rows[0].numel() * rows.element_size()))
    parts = [_digest_of(rows[start : start + step]) for start in range(0, len(rows), step)]
    return digest(np.array(parts, dtype="<u8").tobytes()) or 1


def _spread(size: int) -> slice:
    return slice(None, None, max(1, size // _SAMPLES_PER_DIMENSION))


def _digest_of(tensor: torch.Tensor) -> int:
    words = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().view(word_dtype(tensor.element_size()))
    return digest(words.reshape(-1).view(torch.uint8).numpy().data) or 1


def fingerprint_of_value(value: object) -> int:
    """A fingerprint of a plain value; 0 for one whose text does not tell what it is."""
    text = _text(value.context if isinstance(value, ComposedTensor) else value, 0)
    return 0 if text is None else digest(text.encode("utf-8", "surrogatepass")) or 1


def _text(value: object, depth: int) -> str | None:
    """The value as text that is the same for equal values in every process; None where there is no such text."""
    if depth > _MAX_DEPTH:
        return None
    if value is None or isinstance(
        value, (bool, int, float, complex, str, bytes, np.generic, torch.dtype, torch.device)
    ):
        return repr(value)
    if isinstance(value, dict):
        entries = [_text(part, depth + 1) for pair in value.items() for part in pair]
    elif isinstance(value, (list, tuple)):
        entries = [_text(part, depth + 1) for part in value]
    elif isinstance(value, (set, frozenset)):
        found = [_text(part, depth + 1) for part in value]
        entries = sorted(found, key=str)
    else:
        return None
    return None if None in entries else f"{type(value).__name__}({','.join(map(str, entries))})"
