"""The statistics that a save keeps beside a checkpoint: a file of columns, which the user's metadata names.

Its name is that of a data file which no writer has. So whoever does not know it takes it for a rest of the attempt, and
removes it with the checkpoint. Nothing that is loaded depends on it. It is read when somebody asks for it, bounded by
what the tensors need, and checked. Never touches a file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from holdfast._native.index import HeaderEntry, decode_header, encode_header
from holdfast._native.manifest import BYTE_KINDS, IndexEntry, Summary, TensorEntry
from holdfast._native.paths import STATISTICS_NAME, is_statistics_record
from holdfast._native.values import decode_value
from holdfast._state.numbers import are_kept
from holdfast._values.digest import digest, to_hex
from holdfast._values.dtypes import HEADER_ALIGNMENT
from holdfast._values.lazy import cached_property
from holdfast._values.statistics import COLUMNS, TensorStatistics
from holdfast.errors import CorruptError

_METADATA = {"format": "holdfast-statistics", "version": "1"}
# In the file by falling width, so that each is aligned.
_STORED = {**dict.fromkeys(COLUMNS[3:], "F64"), **dict.fromkeys(("nan", "lost", "nonzero"), "U64"), "tensor": "U32"}
_WIDTHS = {"F64": 8, "U64": 8, "U32": 4}
_NUMPY = {"F64": "<f8", "U64": "<u8", "U32": "<u4"}
_ROW_BYTES = sum(_WIDTHS[dtype] for dtype in _STORED.values())
_DIGEST = re.compile(r"[0-9a-f]{16}")


def encode_statistics(tensors: Sequence[TensorEntry], table: npt.NDArray[np.float64]) -> bytes:
    """The file with the rows of ``table`` for those of ``tensors`` that have numbers of their own."""
    rows = np.array([number for number, entry in enumerate(tensors) if _has_row(entry)], dtype=np.int64)
    columns = dict(zip(COLUMNS, table[rows].T, strict=True))
    parts = [encode_header(_layout(len(rows)), metadata=_METADATA)]
    for name, dtype in _STORED.items():
        column = rows if name == "tensor" else columns[name]
        parts.append(np.ascontiguousarray(column, dtype=_NUMPY[dtype]).tobytes())
    return b"".join(parts)


def entry_for(attempt: str, writer: int, data: bytes) -> IndexEntry:
    """What names the file, where ``writer`` is a number that no writer of data has."""
    return IndexEntry(name=f"data-{attempt}-{writer}-0.safetensors", bytes=len(data), digest=to_hex(digest(data)))


def statistics_entry(manifest: Summary, metadata: object) -> IndexEntry | None:
    """What the manifest says of the file; None unless it names one of its own. ``metadata`` is still encoded."""
    kept = decode_value(metadata, key="metadata")
    said = kept.get(STATISTICS_NAME) if isinstance(kept, dict) else None
    if not is_statistics_record(said):
        return None
    entry = IndexEntry(**said)
    is_ours = re.fullmatch(rf"data-{re.escape(manifest.attempt)}-(0|[1-9][0-9]{{0,9}})-0\.safetensors", entry.name)
    is_free = entry.name not in map(attrgetter("name"), manifest.files)
    return entry if is_ours and is_free and entry.bytes >= 0 and _DIGEST.fullmatch(entry.digest) else None


class KeptStatistics(Mapping[str, TensorStatistics]):
    """The numbers of tensors by key, as the save has seen them; each is made when it is asked for."""

    def __init__(self, data: bytes, entry: IndexEntry, tensors: Sequence[TensorEntry], path: str) -> None:
        """CorruptError unless ``data`` is what ``entry`` says, and what these tensors can have."""
        if len(data) != entry.bytes or to_hex(digest(data)) != entry.digest:
            raise _damaged(path, "it is not what was written")
        entries = decode_header(data[:HEADER_ALIGNMENT], path=path, metadata=_METADATA)
        count = math.prod(entries[0].shape) if entries else 0
        if entries != _layout(count) or len(data) != HEADER_ALIGNMENT + count * _ROW_BYTES:
            raise _damaged(path, "its columns are not those of statistics")
        self._columns: dict[str, np.ndarray] = {
            each.name: np.frombuffer(data, _NUMPY[each.dtype], count, HEADER_ALIGNMENT + each.begin) for each in entries
        }
        self._tensors = tensors
        number = self._columns["tensor"].astype(np.int64)
        expected = np.array([each for each, tensor in enumerate(tensors) if _has_row(tensor)], dtype=np.int64)
        if not np.array_equal(number, expected):
            raise _damaged(path, "it is not of the tensors of this checkpoint")
        self._check(number, path)

    def _check(self, number: np.ndarray, path: str) -> None:
        """CorruptError for numbers that no tensor of that size has."""
        columns, tensors = self._columns, self._tensors
        elements = np.array([math.prod(tensors[each].shape) for each in number], dtype=np.float64)
        nan, lost, nonzero = (columns[name].astype(np.float64) for name in ("nan", "lost", "nonzero"))
        has_finite = elements > lost
        is_real = np.array([not tensors[each].dtype.startswith(("complex", "bcomplex")) for each in number], dtype=bool)
        least, most = columns["min"], columns["max"]
        wrong = (nan > lost) | (lost + nonzero > elements) | ~(columns["sum_squares"] >= 0)
        wrong |= has_finite & is_real & ~(np.isfinite(least) & np.isfinite(most) & (least <= most))
        if wrong.any():
            key = tensors[int(number[wrong.argmax()])].key
            raise _damaged(path, f"the numbers of {key[:200]!r} cannot be", key)

    @cached_property
    def _rows(self) -> dict[str, tuple[int, TensorEntry]]:
        """The row of each key; a tied tensor has that of the one whose data it has."""
        own = {self._tensors[number].key: row for row, number in enumerate(self._columns["tensor"].tolist())}
        storing = ((tensor.alias_of or tensor.key, tensor) for tensor in self._tensors)
        return {tensor.key: (own[key], tensor) for key, tensor in storing if key in own}

    def __getitem__(self, key: str) -> TensorStatistics:
        row, entry = self._rows[key]
        found = {name: column[row].item() for name, column in self._columns.items()}
        elements, is_complex = math.prod(entry.shape), entry.dtype.startswith(("complex", "bcomplex"))
        total: float | complex = complex(found["sum"], found["sum_imag"]) if is_complex else found["sum"]
        is_any = elements > found["lost"]
        return TensorStatistics(
            key=key,
            dtype=entry.dtype,
            shape=entry.shape,
            alias_of=entry.alias_of,
            elements=elements,
            looked_at=elements,
            nan=found["nan"],
            inf=found["lost"] - found["nan"],
            zeros=elements - found["lost"] - found["nonzero"],
            sum=total if is_any and math.isfinite(abs(total)) else None,
            sum_squares=found["sum_squares"] if is_any and math.isfinite(found["sum_squares"]) else None,
            min=found["min"] if is_any and not is_complex else None,
            max=found["max"] if is_any and not is_complex else None,
            magnitudes=None,
            source="save",
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return f"KeptStatistics({len(self):,} tensors)"


def most_bytes(tensors: int) -> int:
    """No file of statistics of so many tensors is longer."""
    return HEADER_ALIGNMENT + tensors * _ROW_BYTES


def _has_row(entry: TensorEntry) -> bool:
    return entry.alias_of is None and entry.kind not in BYTE_KINDS and are_kept(entry.dtype)


def _layout(count: int) -> list[HeaderEntry]:
    entries: list[HeaderEntry] = []
    begin = 0
    for name, dtype in _STORED.items():
        end = begin + count * _WIDTHS[dtype]
        entries.append(HeaderEntry(name=name, dtype=dtype, shape=(count,), begin=begin, end=end))
        begin = end
    return entries


def _damaged(path: str, problem: str, key: str | None = None) -> CorruptError:
    said = f"the statistics in {path!r} are damaged: {problem}; look at the data itself (stored=False)"
    return CorruptError(said, path=path, key=key)
