"""Hugging Face folders: ``export`` writes one from any sharding, in one pass; ``Mapping`` says how names and tensors of
a model in files relate to those of the model in memory.

``holdfast.load``, ``open``, ``verify`` and ``convert`` read such folders as they read checkpoints.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Mapping as AnyMapping
from contextlib import closing
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch

from holdfast._async_saver import AsyncSave, async_save
from holdfast._huggingface.reader import HuggingFaceReader
from holdfast._huggingface.writer import ExportForm, FolderWriter, is_asset
from holdfast._io import posix
from holdfast._mapping.mappings import Mapping
from holdfast._saver import SaveOptions, planner_for, save
from holdfast._state.tensors import DTYPE_NAMES
from holdfast._values.dtypes import DTYPES
from holdfast.metadata import Metadata

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["ExportOptions", "FolderForm", "Mapping", "async_export", "export"]

Dtypes = torch.dtype | AnyMapping[str, torch.dtype]
Paths = str | os.PathLike[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions(SaveOptions):
    """More options of an export; those of a save too.

    Attributes:
        shard_bytes: the most bytes in a file, if it has more than one tensor.
        metadata: text to keep in the header of each file, beside ``format: pt``.
        process_group: only these ranks take part.
        no_dist: only this process takes part.
    """

    shard_bytes: int = 5_000_000_000
    metadata: AnyMapping[str, str] = field(default_factory=dict)
    process_group: ProcessGroup | None = None
    no_dist: bool = False

    def __post_init__(self) -> None:
        super(ExportOptions, self).__post_init__()
        if self.shard_bytes < 1:
            raise ValueError(f"shard_bytes is at least 1, not {self.shard_bytes}")
        if not all(isinstance(text, str) for pair in self.metadata.items() for text in pair):
            raise ValueError("metadata is a dict of strings: safetensors keeps nothing else")


_DEFAULTS = ExportOptions()


def export(
    state: torch.nn.Module | AnyMapping[Any, Any],
    path: Paths,
    *,
    mapping: Mapping | None = None,
    dtype: Dtypes | None = None,
    like: Paths | None = None,
    assets: Paths | Iterable[Paths] | None = None,
    overwrite: bool = False,
    options: ExportOptions = _DEFAULTS,
) -> Metadata:
    """Write the tensors of ``state`` to ``path`` as a Hugging Face folder, whole or not at all.

    In a job of several ranks, all of them call it, each with its own part of the state. No tensor is gathered: every
    rank writes its bytes right into the final files. ``holdfast.json`` in the folder has the digests of all bytes, for
    ``verify`` and later loads.

    Args:
        state: a module, or nested dicts of tensors; names in the files are their keys, joined by dots.
        path: the folder. What is there is not touched, unless ``overwrite`` is set.
        mapping: how names and tensors in the files relate to those of the state, as in
            ``Mapping.from_transformers(model)``. For ``dtype``, the keys in the files count. A type that a rule gives
            counts more.
        dtype: the floating type that all floating tensors get, but for those of 8 bits; or a dict from patterns, as
            "*.weight", to types: the first that fits counts. Other tensors stay as they are.
        like: a folder whose types, and whose division into files, are taken; ``dtype`` counts more.
        assets: files to copy into the folder, or a folder, of which all is copied that are no weights.
        overwrite: replace a folder of that name, in one step. Of the old one, files that are no weights stay.
        options: all other options.

    Returns:
        The metadata of what was written, as ``save`` does.

    Raises:
        InvalidStateError: the state has something that no such file can hold; it names all keys.
        AlreadyPublishedError: the folder exists, is not empty, and ``overwrite`` is not set.
        StorageError: the file system refused. The old folder is as it was.

    Examples:
        >>> metadata = holdfast.hf.export(model, "my-model", dtype=torch.bfloat16)
    """
    form = FolderForm(dtype=dtype, like=like, assets=assets, options=options)
    return save(_tensors(state), **_arguments(path, form, mapping, overwrite=overwrite))


def async_export(
    state: torch.nn.Module | AnyMapping[Any, Any],
    path: Paths,
    *,
    mapping: Mapping | None = None,
    dtype: Dtypes | None = None,
    like: Paths | None = None,
    assets: Paths | Iterable[Paths] | None = None,
    overwrite: bool = False,
    options: ExportOptions = _DEFAULTS,
) -> AsyncSave:
    """The same in the background, from a copy of ``state`` as it is now; the handle is that of ``async_save``."""
    form = FolderForm(dtype=dtype, like=like, assets=assets, options=options)
    return async_save(_tensors(state), **_arguments(path, form, mapping, overwrite=overwrite))


def _arguments(path: Paths, form: FolderForm, mapping: Mapping | None, *, overwrite: bool) -> dict[str, Any]:
    """The arguments of a save that is an export."""
    options = form.options
    if options.mapping is not None:
        raise ValueError("an export has its mapping beside the options: export(state, path, mapping=...)")
    planner = planner_for(options)
    planner.mapping = mapping
    return {
        "storage_writer": form.writer(path, mapping=mapping, overwrite=overwrite),
        "planner": planner,
        "process_group": options.process_group,
        "no_dist": options.no_dist,
        "options": options,
    }


def _tensors(state: torch.nn.Module | AnyMapping[Any, Any]) -> dict[Any, Any]:
    return dict(state.state_dict() if isinstance(state, torch.nn.Module) else state)


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderForm:
    """What a folder is to look like, for ``convert``: the arguments of ``export`` that say so.

    Attributes:
        dtype: as for ``export``.
        like: as for ``export``.
        assets: as for ``export``.
        options: as for ``export``; a conversion looks at ``shard_bytes`` and ``metadata``.
    """

    dtype: Dtypes | None = None
    like: Paths | None = None
    assets: Paths | Iterable[Paths] | None = None
    options: ExportOptions = _DEFAULTS

    def writer(self, path: Paths, *, mapping: Mapping | None = None, overwrite: bool) -> FolderWriter:
        """The storage that writes such a folder to ``path``, with the types and offsets that ``mapping`` says."""
        files, dtypes = ({}, {}) if self.like is None else _like(self.like)
        rule = _dtype_rule(self.dtype)
        rules = mapping or Mapping()

        def dtype(key: str, has: str) -> str:
            by_rule = rules.dtype_of(key) if DTYPES[has].is_floating else None
            return rule(key, dtypes.get(key, has)) if by_rule is None else DTYPE_NAMES[by_rule]

        form = ExportForm(
            dtype=dtype,
            added=lambda key: -rules.offset_of(key),
            shard_bytes=self.options.shard_bytes,
            files=files,
            assets=_files(self.assets),
            metadata=self.options.metadata,
            mapping=None if mapping is None else json.loads(mapping.to_json()),
        )
        return FolderWriter(path, form=form, overwrite=overwrite)


def _like(path: Paths) -> tuple[dict[str, str], dict[str, str]]:
    """The file and the dtype of each key of the folder ``path``."""
    with closing(HuggingFaceReader(path)) as reader:
        catalog = reader.catalog
    manifest, index = catalog.manifest, catalog.index
    files = {
        manifest.tensors[tensor].key: manifest.files[file].name
        for tensor, file in zip(index.tensor, index.file, strict=True)
    }
    return files, {entry.key: entry.dtype for entry in manifest.tensors}


def _dtype_rule(dtype: Dtypes | None) -> Callable[[str, str], str]:
    """What says which dtype a key gets, given the one that it has."""
    if dtype is None:
        return lambda key, has: has
    is_general = isinstance(dtype, torch.dtype)
    rules = list(({"*": dtype} if isinstance(dtype, torch.dtype) else dtype).items())
    for _, wanted in rules:
        if not isinstance(wanted, torch.dtype) or not DTYPES[DTYPE_NAMES[wanted]].is_floating:
            raise ValueError(f"only floating types can be chosen, not {wanted}")

    def rule(key: str, has: str) -> str:
        wanted = next((wanted for pattern, wanted in rules if fnmatchcase(key, pattern)), None)
        # Numbers of 8 bits have scales elsewhere, and mean nothing without them.
        stays = not DTYPES[has].is_floating or (is_general and DTYPES[has].itemsize == 1)
        return has if wanted is None or stays else DTYPE_NAMES[wanted]

    return rule


def _files(assets: Paths | Iterable[Paths] | None) -> Sequence[str]:
    """The files that ``assets`` mean."""
    if assets is None:
        return ()
    found: list[str] = []
    for path in [assets] if isinstance(assets, (str, os.PathLike)) else assets:
        name = posix.absolute(path)
        if os.path.isdir(name):
            inside = (os.path.join(name, each) for each in posix.list_names(name) if is_asset(each))
            found += filter(os.path.isfile, inside)
        elif os.path.isfile(name):
            found.append(name)
        else:
            raise ValueError(f"the asset {name!r} is not there; name a file or a folder")
    return found
