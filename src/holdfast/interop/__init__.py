"""Living together with torch.distributed.checkpoint: native storage under torch's names, and conversions.

Checkpoints go from one format to another (native, torch's, Hugging Face folders, ``.pt`` files) without being loaded.
Bytes pass in pieces of at most one slab. So memory does not grow with the checkpoint or its largest tensor, but for
quantised tensors and for ``.pt`` files of the time before torch 1.6. What is read is verified as far as the source's
format goes. The target appears whole or not at all. Values keep their types; what only a pickle could keep is refused
unless the caller allows pickles.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from holdfast import events
from holdfast._checkpoint import is_torch_format
from holdfast._checkpoint import open as open_checkpoint
from holdfast._huggingface.folder import is_folder
from holdfast._io import files, posix
from holdfast._io.folders import check_free
from holdfast._io.urls import is_store_url
from holdfast._mapping.mappings import Mapping as Rules
from holdfast._native.publish import formats_at
from holdfast._native.writer import NativeWriter
from holdfast._saver import save
from holdfast._torch_codec.archive_writing import write_pt
from holdfast._torch_codec.pickles import read_pt
from holdfast._torch_format.file_systems import is_for_fsspec, is_remote
from holdfast._torch_format.reader import verify_torch_checkpoint
from holdfast._torch_format.writer import _FileSystemWriter
from holdfast.errors import AlreadyPublishedError, CorruptError
from holdfast.events.progress import OnBytes, following_bytes
from holdfast.hf import FolderForm
from holdfast.interop.copying import ByteCount, CopyPlanner, CountingPlanner, Leaves
from holdfast.interop.mapped import MappedCheckpoint
from holdfast.metadata import TensorStorageMetadata
from holdfast.storage import StorageWriter

if TYPE_CHECKING:
    from holdfast.interop.replacing import Replacement, use_in_torch

__all__ = ["Conversion", "Replacement", "convert", "use_in_torch"]

_Path = str | os.PathLike[str]
Format = Literal["native", "torch", "pt", "hf"]


def __getattr__(name: str) -> object:
    # Late, because it imports torch's checkpoint classes, which conversions do not need.
    if name not in ("Replacement", "use_in_torch"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from holdfast.interop import replacing

    return getattr(replacing, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """What was converted: how many tensors (tied ones count once each) and values, and the bytes of the tensors."""

    tensors: int
    values: int
    bytes: int
    seconds: float


def convert(
    source: _Path,
    target: _Path,
    *,
    to: Format | FolderForm,
    allow_pickle: bool = False,
    overwrite: bool = False,
    verify: bool = True,
    mapping: Rules | None = None,
    max_bytes: int | None = None,
    progress: bool | OnBytes = False,
) -> Conversion:
    """Write ``source`` (a checkpoint, Hugging Face folder or ``.pt`` file) to ``target``, in the format ``to``.

    Args:
        source: what it is, is found out by looking at it. It may be in an object store, unless it is in torch's format.
        target: a directory, or for ``pt`` a file; for ``native`` also the URL of a folder in an object store.
        to: "native", "torch" (the format of torch.distributed.checkpoint), "pt" (torch.save) or "hf" (a Hugging Face
            folder); or a ``holdfast.hf.FolderForm``, which says what the folder is to look like.
        allow_pickle: read and write values that only a pickle can keep; reading them runs code from the source.
        overwrite: replace what is at ``target``, at the end and at once, if it is of the same format; in a directory
            that holds no checkpoint, all that is there stays.
        verify: check the source's digests or checksums, where it has any.
        mapping: leads from the outside, which ``source`` has, to the inside; to "hf", from the inside to the outside.
        max_bytes: the most bytes of tensors to write. A file of a few kilobytes can hold an expanded tensor of any
            size; by default, what is 16 times as large as the source, and more than 64 MiB, is refused.
        progress: True for a bar on the terminal; a function is called with the bytes that are done and all that there
            are, from any thread.

    Examples:
        >>> done = holdfast.convert("checkpoints/step-100", "model.pt", to="pt")
    """
    if not isinstance(to, FolderForm) and to not in get_args(Format):
        raise ValueError(f"there is no format {to!r}; it is one of {', '.join(get_args(Format))}")
    for place in (source, target):
        if is_for_fsspec(place):
            raise ValueError(
                f"{os.fspath(place)!r} is a URL of fsspec, which cannot be converted; copy the files from or to it"
            )
    source, target = posix.absolute(source), posix.absolute(target)
    if is_store_url(target) and to != "native":
        raise ValueError(
            f"only native checkpoints are written to an object store; convert to a directory, not {target!r}"
        )
    if source == target or os.path.realpath(source) == os.path.realpath(target):
        raise ValueError(f"source and target are both {source!r}; give the result another name")
    name = f"converting {os.path.basename(source)}"
    with events.Operation("convert", target) as operation, following_bytes(progress, name) as on_progress:
        count = ByteCount(on_progress, source, max_bytes)
        how = {"allow_pickle": allow_pickle, "overwrite": overwrite, "verify": verify}
        done = _convert(source, target, to, count, mapping, **how)
        operation.tell("published", nbytes=done.bytes)
        return done


def _convert(
    source: str,
    target: str,
    to: Format | FolderForm,
    progress: ByteCount,
    mapping: Rules | None,
    *,
    allow_pickle: bool,
    overwrite: bool,
    verify: bool,
) -> Conversion:
    started, is_export = time.monotonic(), to == "hf" or isinstance(to, FolderForm)
    _check_target(target, to, overwrite=overwrite)
    if os.path.isfile(source) and not is_folder(source):
        if to == "pt":
            raise ValueError(f"{source!r} is a .pt file already; copy it")
        if mapping is not None and not is_export:
            raise ValueError(f"{source!r} is a .pt file; convert it to native first, and that with the mapping")
        writer = _writer(target, to, mapping, allow_pickle=allow_pickle, overwrite=overwrite)
        state = read_pt(source, allow_pickle=allow_pickle, verify=verify)
        metadata = save(state, storage_writer=writer, planner=CountingPlanner(progress, mapping), no_dist=True)
    else:
        if verify and is_torch_format(source):
            if is_remote(source):
                raise ValueError(f"{source!r} is in torch's format; copy it to a directory, and convert it there")
            _check_torch(source)
        with open_checkpoint(source, verify=verify, allow_pickle=allow_pickle) as opened:
            checkpoint = opened if mapping is None else MappedCheckpoint(opened, mapping, is_export=is_export)
            leaves = Leaves(checkpoint, progress, plain_only=to in ("torch", "pt") and not allow_pickle)
            if to == "pt":
                write_pt(leaves.state(), target, overwrite=overwrite)
            else:
                own = opened.user_metadata
                writer = _writer(target, to, mapping, own, allow_pickle=allow_pickle, overwrite=overwrite)
                save({}, storage_writer=writer, planner=CopyPlanner(leaves), no_dist=True)
            metadata = checkpoint.metadata
    entries = metadata.state_dict_metadata.values()
    tensors = sum(isinstance(entry, TensorStorageMetadata) for entry in entries)
    seconds = time.monotonic() - started
    return Conversion(tensors=tensors, values=len(entries) - tensors, bytes=progress.done, seconds=seconds)


def _check_target(target: str, to: Format | FolderForm, *, overwrite: bool) -> None:
    """AlreadyPublishedError for a target that must not be replaced."""
    if isinstance(to, FolderForm) or to == "hf":
        check_free(target, overwrite=overwrite)
        return
    existed = bool(formats_at(target)) if is_store_url(target) else posix.exists(target)
    if existed and not overwrite:
        raise AlreadyPublishedError(f"{target!r} exists already; use another name or overwrite=True")
    if existed and not _holds(target, to):
        raise AlreadyPublishedError(
            f"{target!r} is there, and a checkpoint of the {to} format cannot take its place; remove it first"
        )


def _holds(target: str, to: Format) -> bool:
    """Whether ``target`` is what a conversion to ``to`` would make; a directory without a checkpoint takes one too."""
    if to == "pt":
        return os.path.isfile(target)
    return files.is_directory(target) and ("torch" if to == "native" else "native") not in formats_at(target)


def _writer(
    target: _Path,
    to: Format | FolderForm,
    mapping: Rules | None,
    own: Any = None,
    *,
    overwrite: bool,
    allow_pickle: bool,
) -> StorageWriter:
    if to == "hf" or isinstance(to, FolderForm):
        return (FolderForm() if to == "hf" else to).writer(target, mapping=mapping, overwrite=overwrite)
    if to == "native":
        return NativeWriter(target, overwrite=overwrite, allow_pickle=allow_pickle, user_metadata=own)
    return _FileSystemWriter(target, overwrite=overwrite)


def _check_torch(source: _Path) -> None:
    """CorruptError where a checksum is wrong: they are of whole chunks, and a conversion reads parts."""
    damage = next(iter(verify_torch_checkpoint(source).damage), None)
    if damage is not None:
        raise CorruptError.of_part(os.path.join(source, damage.file), damage.key, damage.span, damage.problem)
