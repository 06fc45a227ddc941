"""Targets made of what a checkpoint says of itself: all of it, or chosen keys, on the CPU, without a template."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import torch

from holdfast._state.tensors import empty_quantized, empty_tensor
from holdfast.errors import Difference, MismatchError
from holdfast.metadata import STATE_DICT_TYPE, BytesStorageMetadata, Metadata, TensorStorageMetadata


def empty_state(
    metadata: Metadata,
    keys: Iterable[str] | None = None,
    likes: Mapping[str, torch.Tensor | torch.device] | None = None,
) -> STATE_DICT_TYPE:
    """A flat target on the CPU for ``keys`` of the checkpoint, or all; tied keys share a tensor, values are None.

    ``likes`` has devices for some, or tensors of the same size to take after: device, mesh, placements and strides.
    """
    likes = likes or {}
    leaves: STATE_DICT_TYPE = {}
    chosen = list(metadata.state_dict_metadata if keys is None else keys)
    stored_here = set(chosen)
    tied: list[tuple[str, str]] = []
    for key in chosen:
        stored = metadata.state_dict_metadata[key]
        if isinstance(stored, BytesStorageMetadata):
            leaves[key] = None
        elif stored.alias_of in stored_here and likes.get(key) is likes.get(stored.alias_of):
            leaves[key] = None
            tied.append((key, stored.alias_of))
        elif stored.kind == "numpy":
            leaves[key] = empty_tensor(stored.size, stored.properties.dtype).numpy()
        elif stored.quantizer is not None:
            leaves[key] = empty_quantized(stored.size, stored.properties.dtype, stored.quantizer)
        else:
            leaves[key] = _tensor_like(likes.get(key), stored)
    for key, first in tied:
        alike = _requires_grad(metadata, key) == _requires_grad(metadata, first)
        leaves[key] = leaves[first] if alike else leaves[first].detach()
    return leaves


def _tensor_like(like: torch.Tensor | torch.device | None, stored: TensorStorageMetadata) -> torch.Tensor:
    if isinstance(like, torch.Tensor):
        return torch.empty_like(like, dtype=stored.properties.dtype, device=like.device)
    return empty_tensor(stored.size, stored.properties.dtype, like or "cpu")


def require_gradients(metadata: Metadata, leaves: STATE_DICT_TYPE) -> None:
    """Have the tensors among ``leaves`` require gradients that did so when they were saved."""
    for key, leaf in leaves.items():
        if _requires_grad(metadata, key):
            leaf.requires_grad_()


def chosen_keys(metadata: Metadata, keys: Collection[str] | None, *, allow_missing: bool = False) -> list[str]:
    """The keys of the checkpoint that ``keys`` name, or all; a name stands for itself and all below it, after a dot.

    MismatchError for names that stand for nothing, unless ``allow_missing``.
    """
    if keys is None:
        return list(metadata.state_dict_metadata)
    names = {keys} if isinstance(keys, str) else set(keys)
    chosen: list[str] = []
    met: set[str] = set()
    for key in metadata.state_dict_metadata:
        matching = names.intersection(prefixes(key))
        if matching:
            chosen.append(key)
            met |= matching
    if names - met and not allow_missing:
        raise MismatchError.of(
            [Difference(key=name, kind="missing", stored="nothing", wanted="a key") for name in sorted(names - met)],
            advice="Ask for keys, or for what comes before one of their dots.",
        )
    return chosen


def prefixes(key: str) -> Iterator[str]:
    """``key`` and all that comes before one of its dots, the longest first."""
    yield key
    end = key.rfind(".")
    while end >= 0:
        yield key[:end]
        end = key.rfind(".", 0, end)


def _requires_grad(metadata: Metadata, key: str) -> bool:
    stored = metadata.state_dict_metadata[key]
    return isinstance(stored, TensorStorageMetadata) and stored.properties.requires_grad
