"""The manifest: the one small file whose presence is the checkpoint, as typed entries and as bytes.

There is one way to write a manifest: compact JSON, fields in the order below, a digest over all of it at the end. What
reads back is exactly that and makes sense: unique keys, names that stay inside of the checkpoint, sizes that fit 63
bits, aliases that lead to a tensor, paths that make one tree. Every later version starts and ends the same way, so that
an old reader can tell "newer" from "damaged". Never touches a file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from operator import attrgetter

import msgspec

from holdfast._native.paths import CONTAINERS_NAME, StoredElement, check_fit, check_paths, stored_containers
from holdfast._native.values import decode_value
from holdfast._values.digest import digest, to_hex
from holdfast._values.dtypes import (
    DTYPES,
    HEADER_ALIGNMENT,
    LENGTH_BYTES,
    MAX_DIMENSIONS,
    MAX_FILE_BYTES,
    MAX_FILES,
    MAX_HEADER_BYTES,
    MAX_INDEX_BYTES,
    MAX_KEY_BYTES,
    MAX_MANIFEST_BYTES,
    MAX_TENSORS,
)
from holdfast.errors import CheckpointError, CorruptError, InvalidStateError, UnsupportedVersionError

FORMAT = "holdfast"
VERSION = 1
FEATURES = frozenset({"pickle"})
"""What a manifest may require of its reader, beyond the version."""

BYTE_KINDS = frozenset({"bytes", "json", "opaque", "pickle"})
"""Kinds of tensors that are not numbers but one run of bytes."""

MOST_TOMBSTONE_BYTES = 256
"""No manifest of a checkpoint is as short."""

_NO_DIGEST = "0" * 16
_START = re.compile(rb'\{"format":"holdfast","version":([0-9]{1,9})[,}]')
_END = re.compile(rb'"digest":"([0-9a-f]{16})"\}')
_END_BYTES = len('"digest":""}') + len(_NO_DIGEST)
_DIGEST = re.compile(r"[0-9a-f]{16}")
_TIME = re.compile(r"[0-9]{4}-[01][0-9]-[0-3][0-9]T[0-2][0-9]:[0-5][0-9]:[0-6][0-9]Z")
_ATTEMPT = re.compile(r"[0-9a-zA-Z_-]{1,64}")
_FILE_SUFFIX = re.compile(r"(?:0|[1-9][0-9]{0,9})-(?:0|[1-9][0-9]{0,9})\.safetensors")

_NUMPY_DTYPES = frozenset(
    name for name in DTYPES if re.fullmatch(r"bool|u?int(8|16|32|64)|float(16|32|64)|complex(64|128)", name)
)
_QUANTIZED_DTYPES = frozenset(name for name in DTYPES if name.startswith(("qint", "quint")))
_GRADIENT_DTYPES = frozenset(name for name in DTYPES if name.startswith(("float", "bfloat", "complex")))
_TENSOR_SCHEMES = frozenset({"per_tensor_affine", "per_tensor_symmetric"})
_CHANNEL_SCHEMES = frozenset({"per_channel_affine", "per_channel_symmetric", "per_channel_affine_float_qparams"})


class FileEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A data file: ``header`` of its ``bytes`` come before the data.

    ``digest`` is over the header region, then the eight little-endian bytes of each block digest in file order.
    """

    name: str
    bytes: int
    header: int
    digest: str


class IndexEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The index file; ``digest`` is over all of it."""

    name: str
    bytes: int
    digest: str


class Quantizer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How the integers of a quantised tensor stand for numbers; ``scheme`` is torch's name without ``torch.``."""

    scheme: str
    scale: float | None = None
    zero_point: int | None = None
    axis: int | None = None
    scales: tuple[float, ...] | None = None
    zero_points: tuple[int | float, ...] | None = None


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A tensor. ``path`` is absent when it is just the key; ``alias_of`` names the tensor that holds the same data.

    ``kind`` is how to hand it back: None as a tensor, else "numpy", "bytes", "json" (a typed value that would bloat the
    manifest), "opaque" (what a planner gave as bytes) or "pickle".
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    path: tuple[StoredElement, ...] | None = None
    alias_of: str | None = None
    requires_grad: bool = False
    kind: str | None = None
    quantizer: Quantizer | None = None


class ValueEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A value that is not a tensor, as typed JSON; ``position`` is its place among all leaves, tensors included."""

    key: str
    value: object
    position: int
    path: tuple[StoredElement, ...] | None = None


class WriterEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What wrote the checkpoint: versions, the number of ranks, and when, by the clock of the coordinator."""

    holdfast: str
    torch: str
    python: str
    world_size: int
    saved_at: str | None = None


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Which save a manifest is of, and its files."""

    format: str = FORMAT
    version: int = VERSION
    requires: tuple[str, ...] = ()
    attempt: str
    writer: WriterEntry
    files: tuple[FileEntry, ...]
    index: IndexEntry


class Manifest(Summary, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that a checkpoint says of itself, apart from its chunks; ``metadata`` is the user's, as typed JSON."""

    tensors: tuple[TensorEntry, ...]
    values: tuple[ValueEntry, ...]
    metadata: object = None
    digest: str = _NO_DIGEST


class _SummaryAndMetadata(Summary, frozen=True, kw_only=True):
    metadata: object = None


class _Needs(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a manifest that must be understood before the rest is looked at."""

    requires: tuple[str, ...]


class _Tombstone(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Takes the place of a manifest in an object store, where nothing is removed that could be another one by then."""

    format: str = FORMAT
    version: int = VERSION
    retired: str
    digest: str = _NO_DIGEST


_decode_tombstone = msgspec.json.Decoder(_Tombstone).decode
_decode_needs = msgspec.json.Decoder(_Needs).decode
_decode_manifest = msgspec.json.Decoder(Manifest).decode
_decode_summary = msgspec.json.Decoder(_SummaryAndMetadata).decode
_encode_json = msgspec.json.Encoder().encode


class _BadManifest(Exception):
    """What is wrong with a manifest and at which key; never leaves this module."""

    def __init__(self, problem: str, key: str | None = None) -> None:
        super().__init__(problem)
        self.problem = problem if key is None else f"{key[:200]!r} {problem}"
        self.key = key


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of ``manifest``, its digest computed; InvalidStateError rather than bytes that nobody could read."""
    try:
        _check(manifest)
        data = _serialise(manifest)
    except _BadManifest as fault:
        raise InvalidStateError(f"this cannot be saved: {fault.problem}; change the state", key=fault.key) from None
    except CorruptError as error:
        raise InvalidStateError(f"this cannot be saved: {error.message}", key=error.key) from None
    if len(data) > MAX_MANIFEST_BYTES:
        raise InvalidStateError(f"the manifest would have {len(data)} bytes; save fewer or smaller values")
    return data


def decode_manifest(data: bytes, *, path: str) -> Manifest:
    """The manifest whose bytes are ``data``, checked in every respect that needs no other file; ``path`` names it.

    UnsupportedVersionError when it is whole and was written by a newer holdfast, CorruptError for anything else that
    ``encode_manifest`` does not write.
    """
    _check_frame(data, path)
    try:
        needs = _decode_needs(data)
        if len(needs.requires) > 1000:
            raise _BadManifest(f"it requires {len(needs.requires)} features")
        unknown = sorted(set(needs.requires) - FEATURES)
        if unknown:
            names = ", ".join(repr(name[:80]) for name in unknown[:8])
            raise UnsupportedVersionError(f"{path} needs {names}, which this holdfast does not have; upgrade it")
        manifest = _decode_manifest(data)
        # Duplicate members, spaces, other ways to write a number: all show as a difference to the one way.
        if _serialise(manifest) != data:
            raise _BadManifest("it is not in canonical form")
        _check(manifest)
    except _BadManifest as fault:
        raise _corrupt(path, fault.problem, fault.key) from None
    except CorruptError as error:
        raise _corrupt(path, error.message, error.key) from None
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _corrupt(path, f"it is not the expected JSON ({error})") from error
    return manifest


def decode_summary(data: bytes, *, path: str) -> tuple[Summary, object]:
    """The summary of the same manifest, and its metadata; what only the entries could show to be wrong is not noticed.

    For those who look at many. Errors are those of ``decode_manifest``.
    """
    _check_frame(data, path)
    try:
        summary = _decode_summary(data)
        _check_files(summary)
        if FEATURES.issuperset(summary.requires):
            return summary, summary.metadata
    except (_BadManifest, msgspec.MsgspecError, ValueError, RecursionError):
        pass
    manifest = decode_manifest(data, path=path)  # which says what is wrong
    return manifest, manifest.metadata


def encode_tombstone(attempt: str) -> bytes:
    """What says that the checkpoint of ``attempt`` was deleted. Each deletion has an attempt of its own in it."""
    return _serialise(_Tombstone(retired=attempt))


def is_retired(data: bytes) -> bool:
    """Whether a manifest of these bytes only says that there is none any more."""
    return retired_attempt(data) != ""


def retired_attempt(data: bytes) -> str:
    """The attempt whose checkpoint was deleted, if that is what these bytes say."""
    if len(data) > MOST_TOMBSTONE_BYTES:
        return ""
    try:
        tombstone = _decode_tombstone(data)
        is_one = _ATTEMPT.fullmatch(tombstone.retired) is not None and _serialise(tombstone) == data
    except (_BadManifest, msgspec.MsgspecError, ValueError, RecursionError):
        return ""
    return tombstone.retired if is_one else ""


def _serialise(manifest: Manifest | _Tombstone) -> bytes:
    try:
        data = _encode_json(msgspec.structs.replace(manifest, digest=_NO_DIGEST))
    except (UnicodeEncodeError, RecursionError) as error:
        raise _BadManifest("it holds text that is not valid Unicode, or nests too deep") from error
    return b'%b%b"}' % (data[: -len(_NO_DIGEST) - 2], to_hex(digest(data)).encode())


def _check_frame(data: bytes, path: str) -> None:
    """Accept only what starts like a manifest, ends with its own digest and has a version that is known."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise _corrupt(path, f"it has {len(data)} bytes, but only {MAX_MANIFEST_BYTES} are allowed")
    start = _START.match(data)
    end = _END.fullmatch(data[-_END_BYTES:])
    if start is None or end is None:
        raise _corrupt(path, "it does not start and end like a manifest")
    undigested = b'%b%b"}' % (data[: -len(_NO_DIGEST) - 2], _NO_DIGEST.encode())
    if to_hex(digest(undigested)).encode() != end[1]:
        raise _corrupt(path, "its bytes are not those that were written")
    version = int(start[1])
    if version > VERSION:
        known = f"this holdfast reads up to {VERSION}"
        raise UnsupportedVersionError(f"{path} has format version {version}, but {known}; upgrade holdfast")
    if version < 1:
        raise _corrupt(path, f"there is no format version {version}")


def _corrupt(path: str, problem: str, key: str | None = None) -> CheckpointError:
    advice = "" if problem.endswith("use another checkpoint") else "; use another checkpoint"
    return CorruptError(f"{path} is damaged: {problem}{advice}", path=path, key=key)


def _check(manifest: Manifest) -> None:
    """Raise _BadManifest, or CorruptError for a value, unless the entries make sense together."""
    if manifest.format != FORMAT or manifest.version != VERSION:
        raise _BadManifest(f"the format is {manifest.format[:80]!r}, version {manifest.version}")
    if list(manifest.requires) != sorted(set(manifest.requires)):
        raise _BadManifest("its required features are not in order")
    _check_files(manifest)
    if len(manifest.tensors) > MAX_TENSORS or len(manifest.values) > MAX_TENSORS:
        raise _BadManifest(f"there are more than {MAX_TENSORS} entries")
    leaves: list[TensorEntry | ValueEntry] = [*manifest.tensors, *manifest.values]
    seen: set[str] = set()
    for leaf in leaves:
        key = leaf.key
        # A character takes at most four bytes, so that most keys need no closer look.
        if 4 * len(key) > MAX_KEY_BYTES and len(key.encode("utf-8", "surrogatepass")) > MAX_KEY_BYTES:
            raise _BadManifest(f"is a key of more than {MAX_KEY_BYTES} bytes", key)
        if key in seen:
            raise _BadManifest("is the key of two entries", key)
        seen.add(key)
    has_aliases = False
    for entry in manifest.tensors:
        _check_tensor(entry)
        has_aliases |= entry.alias_of is not None
        if entry.kind == "pickle" and "pickle" not in manifest.requires:
            raise _BadManifest("is a pickle, but the manifest does not require pickle", entry.key)
    if has_aliases:
        _check_aliases(manifest.tensors)
    last = -1
    for value in manifest.values:
        decode_value(value.value, key=value.key)
        if not last < value.position < len(manifest.tensors) + len(manifest.values):
            raise _BadManifest("has no possible position among the leaves", value.key)
        last = value.position
    kept = decode_value(manifest.metadata, key="metadata")
    containers = stored_containers(kept) if isinstance(kept, dict) and CONTAINERS_NAME in kept else {}
    # Without any path all leaves are at the top, under keys that are known to differ.
    if any(leaf.path is not None for leaf in leaves):
        fault = check_paths((leaf.key, leaf.path) for leaf in leaves)
        if fault is None and containers:
            fault = check_fit(containers, ((leaf.key, leaf.path) for leaf in leaves))
        if fault is not None:
            raise _BadManifest(fault.problem, fault.key)


def _check_files(manifest: Summary) -> None:
    """Check the writer and the files that it made."""
    writer = manifest.writer
    if writer.world_size < 1:
        raise _BadManifest(f"the world size is {writer.world_size}")
    if max(len(writer.holdfast), len(writer.torch), len(writer.python)) > 200:
        raise _BadManifest("the version of the writer is too long")
    if writer.saved_at is not None and _TIME.fullmatch(writer.saved_at) is None:
        raise _BadManifest(f"the time {writer.saved_at[:80]!r} is not like 2026-01-31T23:59:59Z")
    if _ATTEMPT.fullmatch(manifest.attempt) is None:
        raise _BadManifest(f"the attempt {manifest.attempt[:80]!r} is not 1 to 64 letters, digits, - and _")
    if len(manifest.files) > MAX_FILES:
        raise _BadManifest(f"there are more than {MAX_FILES} files")
    prefix = f"data-{manifest.attempt}-"
    for file in manifest.files:
        # Names are made of the attempt and two numbers, so none can lead out of the checkpoint.
        if not file.name.startswith(prefix) or _FILE_SUFFIX.fullmatch(file.name, len(prefix)) is None:
            raise _BadManifest(f"the file name {file.name[:200]!r} is not one of this attempt")
        if not 0 < file.header <= file.bytes <= MAX_FILE_BYTES or file.header > MAX_HEADER_BYTES + LENGTH_BYTES:
            raise _BadManifest(f"the file {file.name!r} has impossible sizes")
        if file.header % HEADER_ALIGNMENT:
            raise _BadManifest(f"the data of file {file.name!r} does not start at a multiple of {HEADER_ALIGNMENT}")
        if _DIGEST.fullmatch(file.digest) is None:
            raise _BadManifest(f"the digest of file {file.name!r} is malformed")
    if len(set(map(attrgetter("name"), manifest.files))) != len(manifest.files):
        raise _BadManifest("two files have the same name")
    index = manifest.index
    if index.name != f"index-{manifest.attempt}.safetensors":
        raise _BadManifest(f"the index name {index.name[:200]!r} is not the one of this attempt")
    if not 0 < index.bytes <= MAX_INDEX_BYTES or _DIGEST.fullmatch(index.digest) is None:
        raise _BadManifest("the index has an impossible size or a malformed digest")


def _check_tensor(entry: TensorEntry) -> None:
    dtype = DTYPES.get(entry.dtype)
    if dtype is None:
        raise _BadManifest(f"has the unknown dtype {entry.dtype[:80]!r}", entry.key)
    if len(entry.shape) > MAX_DIMENSIONS:
        raise _BadManifest(f"has more than {MAX_DIMENSIONS} dimensions", entry.key)
    size = dtype.itemsize
    for length in entry.shape:
        if length < 0:
            raise _BadManifest(f"has a negative size in its shape {list(entry.shape)}", entry.key)
        # An empty tensor too must have strides that fit 63 bits.
        size *= length or 1
        if size >= MAX_FILE_BYTES:
            raise _BadManifest("is too large", entry.key)
    if entry.kind is not None:
        _check_kind(entry)
    if entry.quantizer is not None or entry.dtype in _QUANTIZED_DTYPES:
        _check_quantizer(entry)
    if entry.requires_grad and (entry.kind is not None or entry.dtype not in _GRADIENT_DTYPES):
        raise _BadManifest("cannot require a gradient", entry.key)


def _check_kind(entry: TensorEntry) -> None:
    if entry.kind in BYTE_KINDS:
        if entry.dtype != "uint8" or len(entry.shape) != 1:
            raise _BadManifest(f"is of kind {entry.kind} but not one dimension of uint8", entry.key)
    elif entry.kind != "numpy":
        raise _BadManifest(f"is of the unknown kind {str(entry.kind)[:80]!r}", entry.key)
    elif entry.dtype not in _NUMPY_DTYPES:
        raise _BadManifest(f"is a numpy array of {entry.dtype}, which numpy does not have", entry.key)


def _check_quantizer(entry: TensorEntry) -> None:
    quantizer = entry.quantizer
    if quantizer is None or entry.dtype not in _QUANTIZED_DTYPES:
        raise _BadManifest("has a quantised dtype without a quantizer, or the reverse", entry.key)
    per_tensor = quantizer.scale, quantizer.zero_point
    per_channel = quantizer.axis, quantizer.scales, quantizer.zero_points
    if quantizer.scheme in _TENSOR_SCHEMES:
        fits = None not in per_tensor and per_channel == (None, None, None)
        numbers: Iterable[float] = (quantizer.scale or 0.0,)
    else:
        axis = -1 if quantizer.axis is None else quantizer.axis
        channels = entry.shape[axis] if 0 <= axis < len(entry.shape) else None
        scales, zero_points = quantizer.scales or (), quantizer.zero_points or ()
        fits = quantizer.scheme in _CHANNEL_SCHEMES and per_tensor == (None, None) and None not in per_channel
        fits = fits and len(scales) == len(zero_points) == channels
        numbers = (*scales, *zero_points)
    points = (quantizer.zero_point, *(quantizer.zero_points or ()))
    fits = fits and all(type(point) is not int or -(1 << 63) <= point < 1 << 63 for point in points)
    if not fits or not all(math.isfinite(number) for number in numbers):
        raise _BadManifest("has a quantizer that does not fit it", entry.key)


def _check_aliases(tensors: Sequence[TensorEntry]) -> None:
    by_key = {entry.key: entry for entry in tensors}
    for entry in tensors:
        if entry.alias_of is None:
            continue
        target = by_key.get(entry.alias_of or "")
        if target is None or target.alias_of is not None:
            raise _BadManifest(f"is an alias of {str(entry.alias_of)[:200]!r}, which holds no data", entry.key)
        if (target.dtype, tuple(target.shape)) != (entry.dtype, tuple(entry.shape)):
            raise _BadManifest(f"shares data with {target.key[:200]!r}, but not dtype and shape", entry.key)
        if entry.kind in BYTE_KINDS or target.kind in BYTE_KINDS:
            raise _BadManifest("is an alias of something that is no tensor", entry.key)
