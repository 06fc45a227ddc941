"""Stagers, under torch's names: who copies a state so that training may go on while the copy is saved.

``async_save`` copies by itself, and better: only what a rank writes, straight to where it is written from. These are
for code that brings a stager of its own, or that asks for torch's.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from holdfast._native.file_layout import Copy
from holdfast._process import forget_in_child
from holdfast._staging.copies import Staging
from holdfast._staging.memory import HostMemory, Region
from holdfast._state.nested import keeps_class, tuple_like
from holdfast._state.tensor_bytes import source_of
from holdfast._values.records import KEPT, emptied, refilled
from holdfast.metadata import STATE_DICT_TYPE

__all__ = ["AsyncStager", "BlockingAsyncStager", "DefaultStager", "StagingOptions"]


@runtime_checkable
class AsyncStager(Protocol):
    """Copies a state; what it gives back must not change any more, whatever happens to the state."""

    _synchronize_after_execute: bool = True

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Whether ``async_save`` is to call ``synchronize_staging`` before it returns."""
        return self._synchronize_after_execute

    def stage(self, state_dict: STATE_DICT_TYPE) -> Future[STATE_DICT_TYPE] | STATE_DICT_TYPE:
        """A copy of ``state_dict``, or a future of one."""
        raise NotImplementedError(f"{type(self).__name__} does not say how to stage")

    def synchronize_staging(self) -> None:
        """Return when the state may be changed."""

    def close(self) -> None:
        """Give back what the stager holds; it is not used again."""


@dataclass
class StagingOptions:
    """How ``DefaultStager`` works.

    ``use_pinned_memory`` pins the copies of what is on a device; ``use_shared_memory`` puts them where another process
    could see them; ``use_async_staging`` copies in a thread and returns a future; ``use_non_blocking_copy`` lets the
    device copy on a stream of its own. Without a device the first and the last have nothing to do.
    """

    use_pinned_memory: bool = True
    use_shared_memory: bool = True
    use_async_staging: bool = True
    use_non_blocking_copy: bool = True


class DefaultStager(AsyncStager):
    """Copies every tensor into one region of host memory, which it keeps for the next time.

    So a staged state is good until the next one is staged, or ``close``.
    """

    _synchronize_after_execute = True

    def __init__(self, config: StagingOptions | None = None) -> None:
        self._config = config or StagingOptions()
        self._memory: HostMemory | None = HostMemory()
        self.forget_parent()
        forget_in_child(self)

    def forget_parent(self) -> None:
        """Have a thread of one's own, and nothing under way."""
        self._executor = (
            ThreadPoolExecutor(1, thread_name_prefix="holdfast-stage") if self._config.use_async_staging else None
        )
        self._under_way: Future[STATE_DICT_TYPE] | None = None

    def stage(self, state_dict: STATE_DICT_TYPE, **kwargs: object) -> Future[STATE_DICT_TYPE] | STATE_DICT_TYPE:
        """A copy of ``state_dict`` in host memory; a future of it when staging asynchronously."""
        if self._memory is None:
            raise RuntimeError("the stager is closed; make another")
        copied, copies, region = _copied(state_dict, self._memory, is_shared=self._config.use_shared_memory)
        staging = Staging(copies, region, mode="copy" if self._executor is None else "overlap")
        staging.begin()
        if self._executor is None:
            return copied

        def finish() -> STATE_DICT_TYPE:
            staging.finish()
            return copied

        self._under_way = self._executor.submit(finish)
        return self._under_way

    def synchronize_staging(self) -> None:
        if self._under_way is not None:
            self._under_way.result()

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=True)
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()


class BlockingAsyncStager(AsyncStager):
    """Copies every tensor to host memory before it returns.

    ``cache_staged_state_dict`` keeps the memory for the next time, so that a staged state is good until then.
    ``type_check`` is accepted for torch's sake: a value of any type is copied.
    """

    _synchronize_after_execute = False

    def __init__(self, cache_staged_state_dict: bool = False, type_check: bool = False) -> None:
        self.cache_staged_state_dict = cache_staged_state_dict
        self.type_check = type_check
        self._memory = HostMemory()

    def stage(self, state_dict: STATE_DICT_TYPE) -> STATE_DICT_TYPE:
        memory = self._memory if self.cache_staged_state_dict else HostMemory()
        copied, copies, region = _copied(state_dict, memory, is_shared=False)
        Staging(copies, region, mode="copy").begin()
        if not self.cache_staged_state_dict:
            region.unpin()  # from here on the memory belongs to the tensors alone
        return copied

    def synchronize_staging(self) -> None:
        """Nothing: ``stage`` returns when all is copied."""

    def close(self) -> None:
        self._memory.close()


def aligned(nbytes: int) -> int:
    """The room for a tensor in a region: the next one begins on a cache line, which suits elements of any size."""
    return -(-nbytes // 64) * 64


def _copied(
    state: Mapping[str, object], memory: HostMemory, *, is_shared: bool
) -> tuple[STATE_DICT_TYPE, list[Copy], Region]:
    """A copy of ``state`` whose tensors lie in the region, as soon as the copies are done.

    What shares memory whole, such as tied weights, still does; what is a view has only its own elements. Values are
    copied at once.
    """
    places: dict[tuple[object, ...], tuple[torch.Tensor, int]] = {}
    end = 0
    for tensor in _tensors(state):
        local = _plain(tensor)
        if local is not None and _memory(local) not in places:
            places[_memory(local)] = local, end
            end += aligned(local.numel() * local.dtype.itemsize)
    region = memory.region(end, is_shared=is_shared)
    copies = [Copy(str(at), source_of(tensor, is_ordered=True), at) for tensor, at in places.values()]

    def copied(value: object) -> object:
        if isinstance(value, Mapping):
            entries = {key: copied(entry) for key, entry in value.items()}
            return refilled(emptied(value), entries) if type(value) in KEPT and keeps_class(value) else entries
        if isinstance(value, (list, tuple)):
            parts = [copied(entry) for entry in value]
            return parts if isinstance(value, list) else tuple_like(value, parts)
        if not isinstance(value, torch.Tensor):
            return copy.deepcopy(value)
        local = _plain(value)
        if local is None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # torch's, at every touch of a ShardedTensor
                return value.detach().cpu().clone()
        staged = region.tensor_at(places[_memory(local)][1], local.dtype, local.shape)
        if _is_distributed(value):
            make: Callable[..., torch.Tensor] = type(value)
            return make(staged, value._spec, requires_grad=value.requires_grad)  # type: ignore[attr-defined]
        return staged.requires_grad_(value.requires_grad)

    return {key: copied(entry) for key, entry in state.items()}, copies, region


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for entry in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(entry)


def _is_distributed(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor, told without importing what makes them."""
    return type(tensor).__name__ == "DTensor" and type(tensor).__module__.startswith("torch.distributed.")


def _plain(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor with the bytes that this rank has; None for a kind that knows best itself how to be copied."""
    local: torch.Tensor = tensor._local_tensor if _is_distributed(tensor) else tensor  # type: ignore[attr-defined]
    is_plain = type(local) in (torch.Tensor, torch.nn.Parameter) and local.layout is torch.strided
    return local.detach() if is_plain and not local.is_quantized and not local.is_meta else None


def _memory(tensor: torch.Tensor) -> tuple[object, ...]:
    place = tensor.data_ptr() if tensor.numel() else 0
    return place, tensor.device, tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()
