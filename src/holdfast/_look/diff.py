"""Where two checkpoints differ, key by key: by metadata and digests alone, and by elements where that is asked for.

Formats and shardings may differ. What nobody has compared is said to be "not compared", never that it is the same.
Memory holds one batch of parts, however large the tensors are. Nothing is unpickled.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from holdfast._checkpoint import Checkpoint, Door, catalog_of, read_values
from holdfast._look.digests import differing_blocks
from holdfast._look.elements import ElementsDiff, compare_elements
from holdfast._look.parts import matching, nbytes_of, opened
from holdfast._native.catalog import Catalog
from holdfast._native.values import encode_value
from holdfast._state.numbers import has_numbers
from holdfast._values.dtypes import MAX_VALUE_INLINE_BYTES
from holdfast._values.shown import short_repr
from holdfast.errors import InvalidStateError, UnsafeError
from holdfast.events.progress import OnBytes, following_bytes
from holdfast.metadata import STORAGE_TYPES, TensorStorageMetadata

Status = Literal["added", "removed", "reshaped", "retyped", "changed", "unchanged", "not compared"]

_NO_DIGESTS = "there are no digests of both"
_MAYBE_ARRAY = "arrays are pickles in torch's format, and nothing is unpickled"
_OTHER_CHUNKS = "they are stored in other chunks"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAs:
    """What one checkpoint has under a key.

    ``kind`` is "tensor", "numpy" or "value"; ``value`` the typed JSON of a value (docs/format.md), if it is small.
    """

    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    bytes: int = 0
    value: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyDiff:
    """One key in both checkpoints; None where one does not have it.

    ``by`` is what told: "metadata", "digests", or "values" that were read; None for what was not compared, ``why`` says
    the reason. Digests tell how many of its ``blocks`` of 1 MiB changed.
    """

    key: str
    status: Status
    a: StoredAs | None
    b: StoredAs | None
    by: Literal["metadata", "digests", "values"] | None
    why: str = ""
    blocks: int = 0
    changed_blocks: int = 0
    elements: ElementsDiff | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Diff:
    """All keys: in the order of the first checkpoint, then what only the second one has."""

    __repr__ = short_repr

    keys: Mapping[str, KeyDiff]
    data_bytes_read: int

    @property
    def same(self) -> bool:
        """Whether everything was compared, and is the same."""
        return all(each.status == "unchanged" for each in self.keys.values())

    @property
    def counts(self) -> dict[Status, int]:
        """How many keys have each status that there is."""
        return dict(Counter(each.status for each in self.keys.values()))

    def of(self, *statuses: Status) -> tuple[KeyDiff, ...]:
        """The keys with one of these statuses."""
        return tuple(each for each in self.keys.values() if each.status in statuses)


def diff(
    a: str | os.PathLike[str] | Checkpoint,
    b: str | os.PathLike[str] | Checkpoint,
    *,
    keys: str | Sequence[str] | None = None,
    values: bool = False,
    progress: bool | OnBytes = False,
) -> Diff:
    """Where the checkpoints at ``a`` and ``b`` differ; formats and shardings may differ too.

    Tensors whose chunks are the same in both are compared by digests, without reading them. Values that are no tensors
    are always compared. What gradients tensors require, user metadata, and the order of keys, are not.

    Args:
        a: a directory, URL or folder as for ``open``, or a checkpoint that is open.
        b: the same.
        keys: keys or patterns, as ``show`` has them: only what matches one of them.
        values: read the tensors that digests do not show to be the same, and tell how far they differ.
        progress: as for ``verify``; of the bytes of the first checkpoint that are read.

    Raises:
        CorruptError: what was read is not what was written.
        ValueError: a pattern matches no key of either.
    """
    with Door(), opened(a, b) as both:
        pair = _Pair(*both)
        before = pair.bytes_read
        found = pair.by_metadata(matching(dict.fromkeys([*pair.stored_a, *pair.stored_b]), keys))
        pair.settle_by_digests(found)
        pair.settle_values(found)
        if values:
            with following_bytes(progress, "comparing") as on_progress:
                pair.settle_by_elements(found, on_progress)
        return Diff(keys=found, data_bytes_read=pair.bytes_read - before)


class _Pair:
    """Two open checkpoints. What is known of each key is in a dict, which each step takes further."""

    def __init__(self, a: Checkpoint, b: Checkpoint) -> None:
        self.a, self.b = a, b
        self.stored_a: Mapping[str, STORAGE_TYPES] = a.metadata.state_dict_metadata
        self.stored_b: Mapping[str, STORAGE_TYPES] = b.metadata.state_dict_metadata
        self.catalog_a, self.catalog_b = catalog_of(a), catalog_of(b)

    @property
    def bytes_read(self) -> int:
        return self.a.bytes_read + (self.b.bytes_read if self.b is not self.a else 0)

    def by_metadata(self, keys: Iterable[str]) -> dict[str, KeyDiff]:
        """Each of ``keys``, as far as metadata tells."""
        return {key: self._by_metadata(key) for key in keys}

    def _by_metadata(self, key: str) -> KeyDiff:
        stored_a, stored_b = self.stored_a.get(key), self.stored_b.get(key)
        a = None if stored_a is None else _stored_as(stored_a, key, self.catalog_a)
        b = None if stored_b is None else _stored_as(stored_b, key, self.catalog_b)
        status: Status = "not compared"
        if a is None or b is None:
            status = "added" if a is None else "removed"
        elif a.shape != b.shape and a.kind != "value" != b.kind:
            status = "reshaped"
        elif {a.kind, b.kind} == {"numpy", "value"} and None in (self.catalog_a, self.catalog_b):
            return KeyDiff(key=key, status=status, a=a, b=b, by=None, why=_MAYBE_ARRAY)
        elif (a.kind, a.dtype) != (b.kind, b.dtype) or _quantizer(stored_a) != _quantizer(stored_b):
            status = "retyped"
        elif isinstance(stored_a, TensorStorageMetadata) and nbytes_of(stored_a) == 0:
            status = "unchanged"
        # Most are the same, and there may be many.
        return KeyDiff(
            key=key, status=status, a=a, b=a if a == b else b, by=None if status == "not compared" else "metadata"
        )

    def settle_by_digests(self, found: dict[str, KeyDiff]) -> None:
        """Say of tensors whether they changed where digests tell."""
        open_keys = _left(found, are_values=False)
        if self.catalog_a is not None and self.catalog_b is not None:
            self._settle_blocks(found, open_keys, self.catalog_a, self.catalog_b)
            return
        for key in open_keys:
            found[key] = replace(found[key], why=_NO_DIGESTS)

    def settle_values(self, found: dict[str, KeyDiff]) -> None:
        """Say of values whether they changed."""
        open_keys = _left(found, are_values=True)
        if self.catalog_a is not None and self.catalog_b is not None:
            self._settle_runs(found, open_keys, self.catalog_a, self.catalog_b)
        rest = [key for key in open_keys if found[key].status == "not compared"]
        told_a, told_b = _typed(self.a, self.catalog_a, rest), _typed(self.b, self.catalog_b, rest)
        for key in rest:
            (text_a, why_a), (text_b, why_b) = told_a[key], told_b[key]
            known = replace(found[key], a=_with_value(found[key].a, text_a), b=_with_value(found[key].b, text_b))
            if why_a or why_b:
                found[key] = replace(known, why=why_a or why_b)
            else:
                found[key] = replace(known, status="unchanged" if text_a == text_b else "changed", by="values")

    def _settle_runs(self, found: dict[str, KeyDiff], keys: Iterable[str], a: Catalog, b: Catalog) -> None:
        """Say of values that both store as a run of bytes whether the bytes changed."""
        of_one_size = []
        for key in keys:
            one, other = a.entry(key), b.entry(key)
            if one is not None and other is not None and (one.kind, one.shape) == (other.kind, other.shape):
                of_one_size.append(key)
            elif one is not None and other is not None:
                found[key] = replace(found[key], status="changed", by="metadata")
        self._settle_blocks(found, of_one_size, a, b)

    def _settle_blocks(self, found: dict[str, KeyDiff], keys: list[str], a: Catalog, b: Catalog) -> None:
        """Say whether the bytes of each of ``keys`` changed, where chunks and digests let that be told."""
        why = _OTHER_CHUNKS if a.has_digests and b.has_digests else _NO_DIGESTS
        blocks, differing = differing_blocks(a, b, keys)
        for key, count, changed in zip(keys, blocks.tolist(), differing.tolist(), strict=True):
            if changed < 0:
                found[key] = replace(found[key], why=why)
            else:
                status: Status = "changed" if changed else "unchanged"
                found[key] = replace(found[key], status=status, by="digests", blocks=count, changed_blocks=changed)

    def settle_by_elements(self, found: dict[str, KeyDiff], on_progress: OnBytes) -> None:
        """Read what changed or is not compared, and tell how far it differs; of other types, how far the numbers do."""
        asked = [key for key, known in found.items() if self._is_measurable(known)]
        # Tied tensors are compared once.
        names = {key: (_storing(self.stored_a, key), _storing(self.stored_b, key)) for key in asked}
        compared = compare_elements(self.a, self.b, list(dict.fromkeys(names.values())), on_progress)
        for key, name in names.items():
            known, elements = found[key], compared[name]
            if known.status == "not compared":
                known = replace(known, status="changed" if elements.differing else "unchanged", by="values", why="")
            found[key] = replace(known, elements=elements)

    def _is_measurable(self, known: KeyDiff) -> bool:
        a, b = self.stored_a.get(known.key), self.stored_b.get(known.key)
        if not isinstance(a, TensorStorageMetadata) or not isinstance(b, TensorStorageMetadata):
            return False
        if known.status == "retyped":
            return has_numbers(a.properties.dtype) and has_numbers(b.properties.dtype)
        return known.status in ("changed", "not compared")


def _stored_as(stored: STORAGE_TYPES, key: str, catalog: Catalog | None) -> StoredAs:
    if isinstance(stored, TensorStorageMetadata):
        dtype = str(stored.properties.dtype).removeprefix("torch.")
        return StoredAs(kind=stored.kind or "tensor", dtype=dtype, shape=tuple(stored.size), bytes=nbytes_of(stored))
    entry = None if catalog is None else catalog.entry(key)
    value = None if catalog is None or key not in catalog.values else _text(catalog.values[key])
    return StoredAs(kind="value", bytes=0 if entry is None else entry.shape[0], value=value)


def _text(json: object) -> str:
    return msgspec.json.encode(json).decode()


def _with_value(stored: StoredAs | None, text: str | None) -> StoredAs | None:
    if stored is None or text is None or len(text) > MAX_VALUE_INLINE_BYTES:
        return stored
    return replace(stored, value=text)


def _quantizer(stored: STORAGE_TYPES | None) -> object:
    return stored.quantizer if isinstance(stored, TensorStorageMetadata) else None


def _left(found: Mapping[str, KeyDiff], *, are_values: bool) -> list[str]:
    """The keys that are not compared yet: of values, or of tensors."""
    left = [each for each in found.values() if each.status == "not compared"]
    return [each.key for each in left if all(one and (one.kind == "value") == are_values for one in (each.a, each.b))]


def _storing(entries: Mapping[str, STORAGE_TYPES], key: str) -> str:
    """The key under which the bytes of the tensor ``key`` are stored."""
    stored = entries[key]
    return (stored.alias_of if isinstance(stored, TensorStorageMetadata) else None) or key


def _typed(checkpoint: Checkpoint, catalog: Catalog | None, keys: Sequence[str]) -> dict[str, tuple[str | None, str]]:
    """The values of ``keys`` as typed JSON, or None and why there is none; what the manifest does not hold is read."""
    inline = {} if catalog is None else catalog.values
    told: dict[str, tuple[str | None, str]] = {key: (_text(inline[key]), "") for key in keys if key in inline}
    to_read = [key for key in keys if key not in told]
    try:
        read = read_values(checkpoint, to_read) if to_read else {}
    except UnsafeError:
        if len(to_read) == 1:
            return told | {to_read[0]: (None, "it is a pickle, and nothing is unpickled")}
        for key in to_read:  # some of them can be read
            told |= _typed(checkpoint, catalog, [key])
        return told
    for key, value in read.items():
        try:
            told[key] = _text(encode_value(value, key=key)), ""
        except InvalidStateError:
            told[key] = None, f"a {type(value).__name__} has no typed form to compare"
    return told
