"""Tensors on their way to the CPU for a stream: one at a time, or some ahead of the writing while that goes on.

Slabs make these unnecessary for local files; streams of other file systems take whole tensors through them.
"""

from __future__ import annotations

import abc
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

Resolve = Callable[[Any], torch.Tensor]


class _TensorLoader(abc.ABC):
    """Gives the tensors of what was added, on the CPU, each with the object that it is for."""

    @abc.abstractmethod
    def add(self, size: int, obj: Any) -> None:
        """Take ``obj``, whose tensor has ``size`` bytes."""

    @abc.abstractmethod
    def start_loading(self) -> None:
        """Begin, where that can be done ahead; nothing may be added any more."""

    @abc.abstractmethod
    def values(self) -> Iterator[tuple[torch.Tensor, Any]]:
        """Each tensor and its object."""


class _SerialCpuLoader(_TensorLoader):
    """One tensor after the other, each when it is asked for."""

    def __init__(self, resolve_fun: Resolve) -> None:
        self.resolve_fun = resolve_fun
        self.items: list[tuple[int, Any]] = []

    def add(self, size: int, obj: Any) -> None:
        """Take ``obj``."""
        self.items.append((size, obj))

    def start_loading(self) -> None:
        """Nothing: there is no ahead."""

    def values(self) -> Iterator[tuple[torch.Tensor, Any]]:
        """Each tensor and its object, in the order in which they were added."""
        for _, obj in self.items:
            yield self.resolve_fun(obj).detach().cpu(), obj


class _OverlappingCpuLoader(_TensorLoader):
    """Copies from the accelerator run ahead of the caller, small ones first, on ``stream`` (the current one if None).

    At least ``inflight_threshhold`` bytes are under way while there are as many left, and at most one tensor more.
    """

    def __init__(
        self, resolve_fun: Resolve, stream: torch.Stream | None = None, inflight_threshhold: int = 1_000_000
    ) -> None:
        self.resolve_fun = resolve_fun
        self.inflight_threshhold = inflight_threshhold
        self.items: list[tuple[int, Any]] = []
        self.in_flight_data = 0
        self.started = False
        device_type = accelerator_type() if stream is None else stream.device.type
        if device_type is None:
            raise RuntimeError("there is no accelerator to copy ahead from; use the serial loader")
        self.device_type = device_type
        self.device_module = torch.get_device_module(self.device_type)
        current = self.device_module.current_stream()
        self.stream = current if stream is None else stream
        if self.stream != current:
            self.stream.wait_stream(current)
        self._under_way: deque[tuple[torch.Tensor, Any]] = deque()
        self._next = 0

    def add(self, size: int, obj: Any) -> None:
        """Take ``obj``; RuntimeError once loading has begun, because the order is fixed then."""
        if self.started:
            raise RuntimeError("nothing can be added to a loader that has begun to load")
        self.items.append((size, obj))

    def start_loading(self) -> None:
        """Start the first copies; a second call does nothing."""
        if not self.started:
            self.started = True
            self.items.sort(key=lambda item: item[0])
            self._refill()

    def values(self) -> Iterator[tuple[torch.Tensor, Any]]:
        """Each tensor and its object, small ones first."""
        self.start_loading()
        while self._under_way:
            self.stream.synchronize()
            # All that were under way have arrived; for each that goes out, the next are started.
            for _ in range(len(self._under_way)):
                tensor, obj = self._under_way.popleft()
                self.in_flight_data -= tensor.nbytes
                self._refill()
                yield tensor, obj

    def _refill(self) -> None:
        with self.device_module.stream(self.stream):
            while self._next < len(self.items) and self.in_flight_data < self.inflight_threshhold:
                _, obj = self.items[self._next]
                self._next += 1
                tensor = self.resolve_fun(obj).detach()
                on_device = tensor.device.type == self.device_type
                tensor = tensor.to("cpu", non_blocking=True) if on_device else tensor.cpu()
                self._under_way.append((tensor, obj))
                self.in_flight_data += tensor.nbytes


def accelerator_type() -> str | None:
    """The kind of accelerator that this process can use ("cuda", or another backend's name); None without one."""
    if not torch.accelerator.is_available():
        return None
    device = torch.accelerator.current_accelerator()
    return None if device is None else device.type


def tensor_loader(resolve_fun: Resolve, *, thread_count: int, copy_ahead: int) -> _TensorLoader:
    """The overlapping loader where one thread writes, there is an accelerator and something may be copied ahead."""
    if thread_count == 1 and copy_ahead > 0 and accelerator_type() is not None:
        return _OverlappingCpuLoader(resolve_fun, inflight_threshhold=copy_ahead)
    return _SerialCpuLoader(resolve_fun)
