"""The storage writer of an export: every rank writes its bytes right into the files of a folder as Hugging Face has it.

The coordinator lays out all files from the plans of all ranks. Each rank writes whole pages of what it holds; where the
parts of a tensor do not lie side by side in its file, the ranks that have them put stripes of it together first. Then
the coordinator writes headers, the pages that several ranks have part of, the index and holdfast.json, and gives the
folder its name, in one step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import platform
import secrets
import time
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.futures import Future

from holdfast._huggingface.layout import INDEX_NAME, FolderLayout, Laid, lay_out
from holdfast._huggingface.notes import NOTES_NAME, FolderNotes, encode_notes
from holdfast._huggingface.packing import RunPacker
from holdfast._huggingface.places import ChunkTable, FolderPart, FolderReport, check_tiled, indexed, shared_out
from holdfast._huggingface.rank_work import RankWork
from holdfast._huggingface.stripes import SLOTS_EACH, Circle, Stripe, meet
from holdfast._io import posix
from holdfast._io.folders import (
    AttemptFolder,
    SharedOutputFile,
    attempt_path,
    check_free,
    copy_into,
    fill_in,
    publish_folder,
)
from holdfast._io.pipeline import default_workers, run_bounded
from holdfast._io.slabs import uses_cuda
from holdfast._native.index import RESERVED_NAME, check_index, encode_index
from holdfast._native.manifest import TensorEntry, WriterEntry
from holdfast._ranks.ranks import Ranks
from holdfast._state.tensors import DTYPE_NAMES
from holdfast._torch_classes.adapt import final_save_plan
from holdfast._torch_classes.translate import save_plan_from_torch
from holdfast._values.dtypes import DTYPES
from holdfast._version import __version__
from holdfast.errors import InternalError, InvalidStateError, StorageError
from holdfast.metadata import Metadata, MetadataIndex, StorageMeta
from holdfast.planner import SavePlan, SavePlanner, TensorHead, WriteColumns, write_columns
from holdfast.storage import StorageWriter, WriteResult, finished

_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".ckpt", ".gguf")


def is_asset(name: str) -> bool:
    """Whether a file of this name belongs to a model beside its weights, as its config and tokenizer do."""
    return not name.endswith(_WEIGHTS) and name != NOTES_NAME


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportForm:
    """What a folder is to look like.

    ``dtype`` says for a key and the name of its dtype in the state which it gets, ``added`` what is added to each of
    its elements. ``files`` names a file for each key, or is empty; ``assets`` are files to copy. ``metadata`` is for
    the headers, ``mapping`` for holdfast.json.
    """

    dtype: Callable[[str, str], str] = lambda key, dtype: dtype
    added: Callable[[str], float] = lambda key: 0.0
    shard_bytes: int = 5_000_000_000
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    assets: Sequence[str] = ()
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)
    mapping: object = None


class FolderWriter(StorageWriter):
    """Writes the folder ``path`` in the form ``form``; ``overwrite`` replaces one of that name, in one step.

    Of a folder that is replaced, what does not belong to the weights (config, tokenizer) stays.
    """

    def __init__(self, path: str | os.PathLike[str], *, form: ExportForm | None = None, overwrite: bool = True) -> None:
        self.path = _checked_path(path)
        self.form = form or ExportForm()
        self.overwrite = overwrite
        self._attempt = secrets.token_hex(8)
        self._share_out: Callable[[Sequence[int] | None], tuple[list[FolderPart], ChunkTable]] | None = None
        self._table: ChunkTable | None = None
        self._folder: AttemptFolder | None = None
        self._stripes: Sequence[Stripe] | None = None
        self._circle: Circle | None = None

    @property
    def file_at_work(self) -> str:  # type: ignore[override]
        return posix.file_at_work(self._place)

    @property
    def _place(self) -> str:
        return attempt_path(self.path, self._attempt)

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self.path, save_id=self._attempt)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Start a new attempt, at ``checkpoint_id`` when it is given."""
        self.abandon()
        if checkpoint_id is not None:
            self.path = _checked_path(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: object, **kwargs: object) -> None:
        """Refuse early what could not be published."""
        if not kwargs.get("use_collectives", True):
            raise ValueError("all ranks plan a folder together; leave use_collectives at True")
        self.abandon()
        self._attempt = secrets.token_hex(8)
        if is_coordinator:
            check_free(self.path, overwrite=self.overwrite)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """``plan``, unchanged; InvalidStateError that names all that a safetensors file cannot hold."""
        columns = write_columns(save_plan_from_torch(plan).items)
        refused = []
        for key, head in zip(columns.keys, columns.heads, strict=True):
            problem = self._problem(key, head)
            if problem:
                said = f"{key!r} cannot be in a Hugging Face folder: {problem}"
                refused.append(InvalidStateError(said, key=key))
        if refused:
            raise InvalidStateError.of(refused)
        return plan

    def _problem(self, key: str, head: TensorHead | None) -> str:
        if head is None:
            return "it is no tensor; export the part of the state that has the weights, as state['model']"
        if head.alias_of is not None:
            return (
                f"it shares its memory with {head.alias_of!r}, and a file may have these bytes under one name only; "
                "say which name is left out, with a mapping: Tie, or Mapping.from_transformers(model)"
            )
        dtype = self.form.dtype(key, DTYPE_NAMES[head.properties.dtype])
        if DTYPES[dtype].safetensors is None:
            return f"no reader of all versions knows {dtype}; leave it out, or give it another dtype"
        return "the name is reserved; use another" if key == RESERVED_NAME else ""

    def check_value(self, key: str, value: object) -> None:
        raise InvalidStateError(f"{key!r} cannot be in a Hugging Face folder: {self._problem(key, None)}", key=key)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans, each with the places of what its rank writes."""
        tables = [write_columns(save_plan_from_torch(plan).items) for plan in plans]
        layout, dtypes = self._laid_out(tables)
        self._share_out = partial(shared_out, layout, tables, self._attempt, dtypes)
        parts, self._table = self._share_out(None)
        return [dataclasses.replace(plan, storage_data=part) for plan, part in zip(plans, parts, strict=True)]

    def _laid_out(self, tables: Sequence[WriteColumns]) -> tuple[FolderLayout, dict[str, str]]:
        tensors: dict[str, Laid] = {}
        dtypes: dict[str, str] = {}
        for table in tables:
            for key, head in zip(table.keys, table.heads, strict=True):
                if head is None or key in tensors:
                    continue
                in_state = DTYPE_NAMES[head.properties.dtype]
                dtype = self.form.dtype(key, in_state)
                if dtype != in_state or self.form.added(key):
                    dtypes[key] = dtype
                tensors[key] = Laid(key, dtype, tuple(head.size))
        metadata = {"format": "pt", **self.form.metadata}
        form = self.form
        unnamed = [key for key in tensors if key not in form.files] if form.files else []
        if unnamed:
            raise InvalidStateError.of(
                [
                    InvalidStateError(f"{key!r} has no file in the folder that this one is to be like", key=key)
                    for key in unnamed
                ]
            )
        made = lay_out(list(tensors.values()), shard_bytes=form.shard_bytes, files=form.files, metadata=metadata)
        return made, dtypes

    def meet(self, plan: SavePlan, ranks: Ranks) -> None:
        """Have the ranks of a host share memory, and those of several be connected, if any tensor needs it."""
        part = _part_of(plan)
        if part.meets:
            self._stripes, self._circle = meet(ranks, part.stripes, self._shared_out_on)

    def _shared_out_on(self, hosts: Sequence[int]) -> list[Sequence[Stripe]]:
        assert self._share_out is not None
        parts, self._table = self._share_out(hosts)
        return [part.stripes for part in parts]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[MutableSequence[WriteResult]]:
        """Write what is this rank's part of the files, durably."""
        part = _part_of(plan)
        if self._stripes is not None:
            part = dataclasses.replace(part, stripes=tuple(self._stripes))
        plan, planner = final_save_plan(plan, planner)
        self._attempt = part.attempt
        posix.make_directories(os.path.dirname(self.path))
        self._folder = folder = AttemptFolder(self._place)
        folder.enter()
        columns = write_columns(plan.items)
        work = RankWork(part, columns, planner, self.form.added, folder.path)
        self.progress.total = work.nbytes
        packer = RunPacker(pinned=uses_cuda(), progress=self.progress, nbytes=work.nbytes)
        try:
            together = work.together(self._circle, packer)
            if together is not None:
                jobs = together.jobs(self.progress.check)
                run_bounded(jobs, workers=default_workers(), ahead=SLOTS_EACH, at_once=True)
            packer.write_spans(work.spans())
            begun = time.monotonic()
            work.sync()
            self.progress.sync_s += time.monotonic() - begun
        finally:
            work.close()
        report = FolderReport(digests=work.digests(packer.digests), pages=packer.pages, fragments=packer.fragments)
        return finished([WriteResult(MetadataIndex(""), work.nbytes, report)])

    def finish(self, metadata: Metadata, results: list[MutableSequence[WriteResult]]) -> None:
        """Write what no rank could write alone, and give the folder its name."""
        table, form = self._table, self.form
        if table is None or self._folder is None:
            raise InternalError("a folder is finished that was not planned here; please report it")
        reports = [_report_of(result) for result in results]
        check_tiled(table.layout, reports)
        index, files = indexed(table, reports)
        tensors = [
            TensorEntry(key=tensor.key, dtype=tensor.dtype, shape=tensor.shape)
            for tensor in sorted(table.layout.tensors)
        ]
        check_index(index, files=files, tensors=tensors, path=os.path.join(self._place, NOTES_NAME))
        notes = FolderNotes(
            attempt=self._attempt,
            writer=WriterEntry(
                holdfast=__version__,
                torch=str(torch.__version__),
                python=platform.python_version(),
                world_size=len(reports),
                saved_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            ),
            files=files,
            chunks=encode_index(index),
            mapping=form.mapping,
        )
        rest: dict[str, list[tuple[int, bytes]]] = {}
        for name, offset, data in itertools.chain.from_iterable(report.fragments for report in reports):
            rest.setdefault(name, []).append((offset, data))
        for file in table.layout.files:
            path = os.path.join(self._place, file.name)
            if file.nbytes == len(file.header):  # which nobody had anything for
                with contextlib.closing(SharedOutputFile(path)) as made:
                    made.make(file.nbytes)
            fill_in(path, [(0, file.header), *rest.get(file.name, ())])
            self.progress.check()
        posix.write_new(os.path.join(self._place, INDEX_NAME), table.layout.index())
        posix.write_new(os.path.join(self._place, NOTES_NAME), encode_notes(notes))
        copy_into(self._place, form.assets)
        self._folder.replaces = True
        try:
            publish_folder(self._place, self.path, overwrite=self.overwrite, keep=is_asset)
        except StorageError:
            self._folder.replaces = False
            raise
        self._table = self._share_out = None

    def conclude(self) -> None:
        """Let go of the folder, which has its name now, and of the other ranks."""
        self._leave()
        if self._folder is not None:
            self._folder.discard()
        self._folder = None

    def abandon(self) -> None:
        """Forget a save that failed; the last rank to do so removes the folder of the attempt."""
        self._leave()
        if self._folder is not None:
            self._folder.abandon()
        self._folder = self._table = self._share_out = None

    def _leave(self) -> None:
        if self._circle is not None:
            self._circle.close()
        self._stripes = self._circle = None

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, **dict.fromkeys(("_folder", "_stripes", "_circle", "_table", "_share_out"))}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return "://" not in os.fspath(checkpoint_id)


def _part_of(plan: SavePlan) -> FolderPart:
    part = plan.storage_data
    if not isinstance(part, FolderPart):
        raise InternalError("the plan did not pass through prepare_global_plan of this storage")
    return part


def _report_of(results: Sequence[WriteResult]) -> FolderReport:
    report = results[0].storage_data if len(results) == 1 else None
    if not isinstance(report, FolderReport):
        raise InternalError("a rank sent another report than that of a folder; please report it")
    return report


def _checked_path(path: str | os.PathLike[str]) -> str:
    if "://" in posix.text_path(path):
        raise ValueError(f"a Hugging Face folder is written to a directory, not to {os.fspath(path)!r}; copy it up")
    return posix.absolute(path)
