"""One rank's part of a folder: its files, the bytes for them, and what it tells the coordinator of them."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from holdfast._huggingface.packing import (
    AssembledSource,
    ConvertedSource,
    HeldPart,
    RunPacker,
    Span,
    block_digests,
    most_packed,
    packed,
    unpacked,
)
from holdfast._huggingface.places import FolderPart, run_order
from holdfast._huggingface.stripes import Circle, Handling, Stripe, StripeJobs
from holdfast._io.direct import ALIGNMENT
from holdfast._io.folders import SharedOutputFile
from holdfast._io.slabs import Slab
from holdfast._state.tensor_bytes import source_of
from holdfast._state.tensors import torch_dtype
from holdfast._values.box import Box
from holdfast._values.digest import BLOCK_BYTES, block_counts
from holdfast._values.lazy import cached_property
from holdfast.errors import CorruptError, InvalidStateError, StorageError
from holdfast.planner import SavePlanner, WriteColumns


class RankWork:
    """What one rank writes: its files, and where the bytes for them come from."""

    def __init__(
        self, part: FolderPart, columns: WriteColumns, planner: SavePlanner, added: Callable[[str], float], folder: str
    ) -> None:
        self._part = part
        self._columns = columns
        self._planner = planner
        self._added = added
        self._folder = folder
        self._files: dict[int, SharedOutputFile] = {}
        self._digests: dict[int, list[int]] = {}
        heads = zip(columns.keys, columns.heads, strict=True)
        self._planned = {key: head.properties.dtype for key, head in heads if head is not None}
        self._dtypes = {
            **self._planned,
            **{key: torch_dtype(part.dtypes[key]) for key in self._planned if key in part.dtypes},
        }
        itemsizes = np.array([self._dtypes[key].itemsize for key in columns.keys], dtype=np.int64)
        self._sizes = columns.length.prod(axis=1, dtype=np.int64) * itemsizes[columns.key]
        self.nbytes = int(self._sizes.sum())

    def file(self, number: int) -> SharedOutputFile:
        """File ``number``, which is open until ``close``."""
        if number not in self._files:
            name, nbytes = self._part.files[number]
            self._files[number] = made = SharedOutputFile(os.path.join(self._folder, name))
            made.make(nbytes)
        return self._files[number]

    def sync(self) -> None:
        """Have what was written durable."""
        for file in self._files.values():
            file.sync()

    def close(self) -> None:
        for file in self._files.values():
            with contextlib.suppress(StorageError):
                file.close()

    def spans(self) -> Iterator[Span]:
        """What this rank writes on its own: the rows that are in runs, then stripes that are all its own."""
        part = self._part
        for row in run_order(part):
            key, tensor = self._resolve(row)
            source, dtype, added = source_of(tensor), self._dtypes[key], self._added(key)
            if tensor.dtype != dtype or added:
                source = ConvertedSource(source, tensor.dtype, dtype, added)
            yield Span(self.file(int(part.file[row])), int(part.offset[row]), source)
        for stripe in self._part.stripes:
            if len(stripe.parts) == 1:
                yield Span(self.file(stripe.file), stripe.offset, self._assembled(stripe))

    def together(self, circle: Circle | None, packer: RunPacker) -> StripeJobs | None:
        """The stripes that this rank puts together with others, if there are any."""
        stripes = [stripe for stripe in self._part.stripes if len(stripe.parts) > 1]
        if not stripes:
            return None
        if circle is None:
            raise InvalidStateError(
                f"{stripes[0].key!r} is sharded within its rows, which ranks can only write together when "
                "holdfast.save or holdfast.hf.export drives them; call one of these"
            )

        def write(stripe: Stripe, slab: Slab) -> None:
            head = stripe.offset % ALIGNMENT
            end = head + stripe.box.volume * self._dtypes[stripe.key].itemsize
            self._digests[stripe.turn] = block_digests(slab.view[head:end])
            packer.write_part(self.file(stripe.file), slab.view, stripe.offset - head, (head, end))

        for number in {stripe.file for stripe in stripes if stripe.writer == self._part.rank}:
            self.file(number)  # here, because several threads write
        handling = Handling(
            copy=lambda stripe, slab: _copy(self._assembled(stripe), stripe, slab),
            write=write,
            pack=lambda stripe: packed(self._assembled(stripe)),
            most=lambda stripe: most_packed(stripe.box, self._dtypes[stripe.key]),
            unpack=self._unpack,
        )
        return StripeJobs(circle, stripes, handling)

    def _unpack(self, stripe: Stripe, data: torch.Tensor, slab: Slab, sender: int) -> None:
        source = unpacked(data, stripe.box, self._dtypes[stripe.key])
        if source is None:
            raise CorruptError(
                f"part of {stripe.key!r} was intact on the host of rank {sender} and arrived damaged; check the "
                "network and the memory of both hosts, and export again",
                path=self._part.files[stripe.file][0],
                key=stripe.key,
            )
        _copy(source, stripe, slab)

    def digests(self, of_spans: Sequence[int]) -> np.ndarray:
        """All digests in the order of the table: those of runs, then those of stripes."""
        part = self._part
        sizes = self._sizes[np.array(run_order(part), dtype=np.int64)]
        runs = int(block_counts(sizes).sum())
        alone, found = iter(of_spans[runs:]), list(of_spans[:runs])
        for stripe in part.stripes:
            if len(stripe.parts) == 1:
                count = -(-stripe.box.volume * self._dtypes[stripe.key].itemsize // BLOCK_BYTES)
                found += itertools.islice(alone, count)
            elif stripe.writer == part.rank:
                found += self._digests[stripe.turn]
        return np.array(found, dtype=np.uint64)

    @cached_property
    def _held(self) -> dict[str, list[HeldPart]]:
        """What this rank has of tensors that are not in runs."""
        held: dict[str, list[HeldPart]] = {}
        for row in np.flatnonzero(self._part.offset < 0).tolist():
            key, tensor = self._resolve(row)
            _, lo, length, _, _ = self._columns.rows[row]
            wide = tensor.dim()
            held.setdefault(key, []).append(HeldPart(Box(tuple(lo[:wide]), tuple(length[:wide])), tensor))
        return held

    def _assembled(self, stripe: Stripe) -> AssembledSource:
        held = [each for each in self._held[stripe.key] if each.box.intersect(stripe.box) is not None]
        return AssembledSource(stripe.box, self._dtypes[stripe.key], held, self._added(stripe.key))

    def _resolve(self, row: int) -> tuple[str, torch.Tensor]:
        key = self._columns.keys[self._columns.key[row]]
        tensor = self._planner.resolve_row(self._columns, row)
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != self._planned[key] or tensor.is_quantized:
            raise InvalidStateError(f"the planner gave something else for {key!r} than a tensor as planned", key=key)
        return key, tensor


def _copy(source: AssembledSource, stripe: Stripe, slab: Slab) -> None:
    source.copy_out(0, source.nbytes, slab, stripe.offset % ALIGNMENT)
