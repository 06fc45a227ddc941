"""What can be stored of a torch tensor, tensors that are stored as several, and what tells their contents apart.

The class itself is code and never stored. What is stored are the inner tensors, under the key and the name of the
attribute, and the context, so that loading into a target with another context is an error and never a wrong result.

Equal contents have equal fingerprints. Different contents have different ones if everything was looked at, and nearly
always if only a sample was: a replica that went its own way differs nearly everywhere. 0 stands for "not looked at".
"""

from __future__ import annotations

import errno
import io
import math
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial

import numpy as np
import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from holdfast._process import Ending
from holdfast._state.pieces import is_sharded
from holdfast._values.digest import digest
from holdfast._values.dtypes import DTYPES
from holdfast.errors import CorruptError, InvalidStateError, StorageError, UnsupportedVersionError, first_line
from holdfast.metadata import STATE_DICT_TYPE

TORCH_DTYPES: dict[str, torch.dtype] = {
    name: dtype for name in DTYPES if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of that name; UnsupportedVersionError where this torch is too old, CorruptError for any other."""
    try:
        return TORCH_DTYPES[name]
    except KeyError:
        said = f"dtype {name!r} does not exist in torch {torch.__version__}; use a newer torch"
        raise (UnsupportedVersionError if name in DTYPES else CorruptError)(said) from None


def word_dtype(itemsize: int) -> torch.dtype:
    """A dtype that every torch can copy, with elements of ``itemsize`` bytes: copies in it keep every bit."""
    return _WORDS[itemsize]


def check_savable(key: str, tensor: torch.Tensor) -> None:
    """InvalidStateError, naming ``key``, unless the tensor has bytes that can be stored."""
    if plain_address(tensor) and tensor.dtype in DTYPE_NAMES:
        return
    problem = None
    if tensor.is_meta:
        problem = "is a meta tensor and has no data; materialise it first (model.to_empty, then load)"
    elif tensor.is_nested:
        problem = "is a nested tensor; store its buffer and offsets instead"
    elif tensor.layout is not torch.strided:
        problem = f"has layout {tensor.layout}; store its indices and values, or tensor.to_dense()"
    elif isinstance(tensor, UninitializedTensorMixin):
        problem = "is an uninitialised lazy parameter; run the module once first"
    elif type(tensor).__name__ == "FakeTensor":
        problem = "is a fake tensor and has no data"
    elif tensor.dtype not in DTYPE_NAMES:
        problem = f"has dtype {tensor.dtype}, which this version cannot store"
    elif tensor.is_quantized and not has_quantizer(tensor):
        problem = "is quantised but has no quantizer that fits it; make it by quantising a tensor"
    elif not _has_memory(tensor):
        problem = f"is a {type(tensor).__name__} without memory of its own; store what it wraps"
    if problem is not None:
        raise InvalidStateError(f"{key!r} {problem}", key=key)


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether the tensor has memory that can be read: wrappers around other tensors have an address of 0, or none."""
    try:
        return tensor.data_ptr() != 0 or tensor.numel() == 0
    except RuntimeError:
        return False


def check_fillable(key: str, leaf: torch.Tensor | np.ndarray) -> None:
    """InvalidStateError, naming ``key``, unless data can be loaded into ``leaf`` in place."""
    if isinstance(leaf, torch.Tensor) and plain_address(leaf):
        return
    problem = None
    if isinstance(leaf, np.ndarray):
        if not leaf.flags.writeable:
            problem = "is a read-only numpy array; give a writable one"
        elif not leaf.dtype.isnative or any(stride < 0 for stride in leaf.strides):
            problem = "is a numpy array of foreign byte order or with a negative stride; give a plain one"
        else:
            leaf = as_tensor(key, leaf)
    if isinstance(leaf, torch.Tensor):
        if leaf.is_nested or leaf.layout is not torch.strided:
            problem = f"has layout {leaf.layout}, which cannot be filled; give a dense tensor"
        elif not has_own_elements(leaf):
            problem = "has elements that share memory (an expanded tensor?); give it its own"
        elif not _has_memory(leaf):
            problem = f"is a {type(leaf).__name__} without memory of its own; give what it wraps"
    if problem is not None:
        raise InvalidStateError(f"{key!r} in the target {problem}", key=key)


def plain_address(tensor: torch.Tensor) -> int:
    """Where the elements of a plain tensor on CPU or GPU lie, row by row and bit for bit; 0 for any other tensor."""
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or not (tensor.is_cpu or tensor.is_cuda):
        return 0
    if tensor.is_nested or tensor.is_quantized or not tensor.is_contiguous() or is_lazy(tensor):
        return 0
    return 0 if hasattr(tensor, "global_shape") else tensor.data_ptr()  # it may hold parts of a global one (pieces.py)


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether the memory holds the conjugate or the negative of the values."""
    return (tensor.dtype.is_complex and tensor.is_conj()) or tensor.is_neg()


def empty_tensor(size: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """An uninitialised tensor, or StorageError; unlike torch.empty, without a warning about half complex numbers."""
    try:
        if not dtype.is_complex or dtype.itemsize != 4:
            return torch.empty(tuple(size), dtype=dtype, device=device)
        words = torch.empty(math.prod(size) * dtype.itemsize, dtype=torch.uint8, device=device)
        return words.view(dtype).view(tuple(size))
    except (RuntimeError, MemoryError) as error:
        raise _no_memory(math.prod(size) * dtype.itemsize) from error


def _no_memory(nbytes: int) -> StorageError:
    return StorageError(f"cannot allocate {nbytes} bytes for a tensor; free some memory", errno=errno.ENOMEM)


def as_tensor(key: str, array: np.ndarray) -> torch.Tensor:
    """``array`` as a tensor over the same memory where torch knows its dtype; InvalidStateError where not."""
    if isinstance(array, np.ma.MaskedArray):
        raise InvalidStateError(f"{key!r} is a masked numpy array; store its data and its mask", key=key)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()
    try:
        return torch.from_numpy(array)
    except TypeError:
        raise InvalidStateError(
            f"{key!r} is a numpy array of dtype {array.dtype}, which is no tensor; convert it", key=key
        ) from None


def has_own_elements(tensor: torch.Tensor) -> bool:
    """Whether no two elements share memory, so that the tensor can be written to."""
    if tensor.is_contiguous() or tensor.numel() == 0:
        return True
    sizes_and_strides = sorted(
        (stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1
    )
    reach = 0
    for stride, size in sizes_and_strides:
        if stride <= reach:
            return False
        reach += stride * (size - 1)
    return True


def quantizer_of(tensor: torch.Tensor) -> STATE_DICT_TYPE | None:
    """What the bytes of a quantised tensor need to mean anything; None for every other tensor."""
    if not tensor.is_quantized:
        return None
    try:
        scheme = str(tensor.qscheme()).removeprefix("torch.")
    except RuntimeError:  # torch.empty(dtype=torch.qint8) makes one that has no quantizer
        return None
    if scheme in ("per_tensor_affine", "per_tensor_symmetric"):
        return {"scheme": scheme, "scale": tensor.q_scale(), "zero_point": tensor.q_zero_point()}
    return {
        "scheme": scheme,
        "axis": tensor.q_per_channel_axis(),
        "scales": tensor.q_per_channel_scales().double().tolist(),
        "zero_points": tensor.q_per_channel_zero_points().tolist(),
    }


def has_quantizer(tensor: torch.Tensor) -> bool:
    """Whether a quantised tensor has a quantizer that says what its elements mean: that of some views does not."""
    quantizer = quantizer_of(tensor)
    if quantizer is None:
        return False
    if "scale" in quantizer:
        return math.isfinite(quantizer["scale"])
    axis, scales, zero_points = quantizer["axis"], quantizer["scales"], quantizer["zero_points"]
    is_whole = 0 <= axis < tensor.dim() and len(scales) == len(zero_points) == tensor.shape[axis]
    return is_whole and all(map(math.isfinite, (*scales, *zero_points)))


def empty_quantized(size: torch.Size, dtype: torch.dtype, quantizer: STATE_DICT_TYPE) -> torch.Tensor:
    """An uninitialised quantised CPU tensor; CorruptError for a quantizer that torch does not take."""
    try:
        if "scale" in quantizer:
            return torch._empty_affine_quantized(
                list(size), scale=quantizer["scale"], zero_point=quantizer["zero_point"], dtype=dtype, device="cpu"
            )
        whole = quantizer["scheme"] == "per_channel_affine"
        return torch._empty_per_channel_affine_quantized(
            list(size),
            scales=torch.tensor(quantizer["scales"], dtype=torch.float64 if whole else torch.float32, device="cpu"),
            zero_points=torch.tensor(
                quantizer["zero_points"], dtype=torch.int64 if whole else torch.float32, device="cpu"
            ),
            axis=quantizer["axis"],
            dtype=dtype,
            device="cpu",
        )
    except (RuntimeError, TypeError, ValueError, OverflowError, MemoryError) as error:
        if isinstance(error, MemoryError) or "allocate" in str(error):
            raise _no_memory(math.prod(size) * dtype.itemsize) from error
        reason = first_line(error)
        raise CorruptError(f"a quantizer is not one of torch's: {reason}; use another checkpoint") from error


def words_of_quantized(tensor: torch.Tensor) -> torch.Tensor:
    """The integers of a quantised CPU tensor, over the same memory."""
    words = torch.empty(0, dtype=word_dtype(tensor.dtype.itemsize), device="cpu")
    storage = tensor.untyped_storage()
    return words.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


CONTEXT_KEY = "__context__"

# So many elements share a byte, row by row in a way of torch's own: only the storage has bytes to keep.
PACKED = {torch.quint4x2: 2, torch.quint2x4: 4}


@dataclass(frozen=True, slots=True)
class ComposedTensor:
    """The context of a tensor subclass, as a leaf of the state; ``tensor`` is the subclass instance."""

    tensor: torch.Tensor
    context: object


def is_composed(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a subclass that is stored as its inner tensors."""
    if is_sharded(tensor):
        return False
    return tensor.dtype in PACKED or (
        type(tensor) not in (torch.Tensor, torch.nn.Parameter)
        and hasattr(tensor, "__tensor_flatten__")
        and not tensor.is_nested
        and type(tensor).__name__ != "FakeTensor"
    )


def inner_parts(key: str, tensor: torch.Tensor) -> tuple[dict[str, torch.Tensor], object]:
    """The inner tensors of ``tensor`` by attribute name, and its context."""
    if tensor.dtype in PACKED:
        packed = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        *rows, columns = tensor.shape or (1,)
        if len(packed) != math.prod(rows) * -(-columns // PACKED[tensor.dtype]):
            raise InvalidStateError(f"{key!r} is a view of a packed quantised tensor; store the whole of it", key=key)
        fields = (quantizer_of(tensor) or {}).items()
        hashable = tuple((name, tuple(value) if isinstance(value, list) else value) for name, value in fields)
        return {"packed": packed}, (tensor.dtype, tensor.shape, hashable)
    flatten: Callable[[], tuple[list[str], object]] = tensor.__tensor_flatten__  # type: ignore[attr-defined]
    names, context = flatten()
    parts = {name: getattr(tensor, name) for name in names}
    for name, part in parts.items():
        if not isinstance(part, torch.Tensor):
            raise InvalidStateError(
                f"{key!r}: {type(tensor).__name__}.__tensor_flatten__ names {name!r}, which is not a tensor", key=key
            )
    return parts, context


_SAMPLES = 4  # in each dimension
_SLICE_BYTES = 16 << 20
_MAX_DEPTH = 64
_REPRESENTED = (bool, int, float, complex, str, bytes, np.generic, torch.dtype, torch.device, Enum, range, slice)
# Modules whose classes have a repr that says all.
_TELLING = ("datetime", "decimal", "pathlib", "uuid", "zoneinfo")


def fingerprint_of_tensor(tensor: torch.Tensor, *, everything: bool) -> int:
    """A fingerprint of a few elements spread over the tensor, or of all of them."""
    if tensor.numel() == 0:
        return 0
    if tensor.is_quantized:
        tensor = words_of_quantized(tensor)
    if not everything:
        return _digest_of(tensor[tuple(slice(None, None, max(1, size // _SAMPLES)) for size in tensor.shape)])
    rows = tensor.reshape(1) if tensor.dim() == 0 else tensor
    step = max(1, _SLICE_BYTES // max(1, rows[0].numel() * rows.element_size()))
    parts = [_digest_of(rows[start : start + step]) for start in range(0, len(rows), step)]
    return digest(np.array(parts, dtype="<u8").tobytes()) or 1


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
    if isinstance(value, (torch.Generator, io.BytesIO)):
        return f"{digest(value.getvalue() if isinstance(value, io.BytesIO) else value.get_state().numpy().data)}"
    if value is None or isinstance(value, _REPRESENTED) or type(value).__module__.partition(".")[0] in _TELLING:
        return repr(value)
    if isinstance(value, Namespace):
        value = vars(value)
    if isinstance(value, dict):
        entries = [_text(part, depth + 1) for pair in value.items() for part in pair]
    elif isinstance(value, (list, tuple, deque)):
        entries = [_text(part, depth + 1) for part in value]
    elif (names := getattr(type(value), "__dataclass_fields__", None)) is not None:
        entries = [_text(getattr(value, name, None), depth + 1) for name in names]
    elif isinstance(value, (set, frozenset)):
        found = [_text(part, depth + 1) for part in value]
        entries = sorted(found, key=str)
    else:
        return None
    return None if None in entries else f"{type(value).__name__}({','.join(map(str, entries))})"


def grad_mode() -> Ending:
    """Puts back, at its end, whether operations are recorded; enter it twice."""
    return Ending(partial(torch._C._set_grad_enabled, torch.is_grad_enabled()))


def cuda_stream(device: torch.device) -> Ending:
    """Puts back, at its end, the current stream of ``device`` and the current device; enter it twice."""
    stream, current = torch.cuda.current_stream(device), torch.cuda.current_device()

    def put_back() -> None:
        torch.cuda.set_stream(stream)
        torch.cuda._maybe_exchange_device(current)  # which makes no context where there is none

    return Ending(put_back)
