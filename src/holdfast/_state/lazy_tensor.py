"""Tensors whose elements are elsewhere: a shape and a dtype for planners, bytes for whoever writes them.

A conversion saves such tensors, so that no tensor is ever whole in memory. They know no arithmetic: all that can be
done with one is to ask for its bytes, by ``source_of``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from holdfast.errors import InvalidStateError

if TYPE_CHECKING:
    from holdfast._state.raw import Source


class LazyTensor(torch.Tensor):
    """A tensor of ``size`` and ``dtype`` whose row-major bytes come from ``source``, any range at a time.

    ``quantizer`` is what a quantised dtype needs besides its bytes.
    """

    source: Source
    quantizer: dict[str, Any] | None

    @staticmethod
    def __new__(
        cls,
        source: Source,
        size: Sequence[int],
        dtype: torch.dtype,
        requires_grad: bool = False,
        *,
        quantizer: dict[str, Any] | None = None,
    ) -> LazyTensor:
        """The tensor that stands for ``source``."""
        tensor: LazyTensor = torch.Tensor._make_wrapper_subclass(
            cls, tuple(size), dtype=dtype, device=torch.device("cpu"), requires_grad=requires_grad
        )
        tensor.source = source
        tensor.quantizer = quantizer
        return tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: all is done."""

    def detach(self) -> LazyTensor:
        """The same elements, without a gradient."""
        return LazyTensor(self.source, self.shape, self.dtype, quantizer=self.quantizer)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"LazyTensor(shape={list(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # the stub has an instance method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """InvalidStateError: there are no elements here to compute with."""
        raise InvalidStateError(f"{func} was asked of a tensor that is only in a file; read it first")
