"""The states that the benchmarks save and load: flat dicts of bf16 tensors, the same on every run.

Sizes come from real language models, so that most tensors are whole pages and some are not. Values are random bits
(NaNs among them): compare bytes, never numbers.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

import torch

State = dict[str, torch.Tensor]
Shapes = dict[str, tuple[int, ...]]

SMALL_TENSORS = 7_500
SMALL_BYTES = (2 * 1024, 32 * 1024)


def large_shapes(*, layers: int = 16) -> Shapes:
    """About 2 GB of bf16 in 150 tensors, as of a language model; in one layer of four no tensor is whole pages."""
    shapes: Shapes = {"embedding.weight": (32_003, 2048), "head.weight": (32_003, 2048), "norm.weight": (2048,)}
    for layer in range(layers):
        shapes.update(_decoder_layer(layer, hidden=2000 if layer % 4 == 3 else 2048))
    shapes["vision.patch.weight"] = (1152, 3, 14, 14)
    shapes["vision.position.weight"] = (729, 1152)
    shapes["score.weight"] = (1001, 2047)
    return shapes


def shapes_of_size(gigabytes: float) -> Shapes:
    """Tensors of a language model, as many as fit."""
    chosen: Shapes = {}
    total = 0
    for key, shape in large_shapes(layers=max(16, int(gigabytes * 16))).items():
        size = byte_count({key: shape})
        if total + size <= gigabytes * 1e9:
            chosen[key] = shape
            total += size
    return chosen


def eight_billion_shapes(*, total: int) -> Shapes:
    """The shapes of an 8-billion-parameter decoder (16 GB of bf16 at 32 layers), with layers until ``total`` bytes."""
    shapes: Shapes = {"embedding.weight": (128_256, 4096), "head.weight": (128_256, 4096), "norm.weight": (4096,)}
    layer = 0
    while byte_count(shapes) + byte_count(_decoder_layer(layer, hidden=4096)) <= total:
        shapes.update(_decoder_layer(layer, hidden=4096))
        layer += 1
    return shapes


def small_shapes(*, tensors: int = SMALL_TENSORS) -> Shapes:
    """``tensors`` shapes of 2 to 32 KB each, vectors and matrices, drawn once from a fixed seed."""
    draw = random.Random(20_240_229)
    low, high = (size // 2 for size in SMALL_BYTES)
    shapes: Shapes = {}
    for number in range(tensors):
        elements = draw.randint(low, high)
        rows = draw.choice((1, 1, 8, 32))
        shape = (elements,) if rows == 1 else (rows, elements // rows)
        shapes[f"blocks.{number // 10}.part{number % 10}.weight"] = shape
    return shapes


def byte_count(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """How many bytes the shapes take as bf16."""
    return sum(2 * torch.Size(shape).numel() for shape in shapes.values())


def random_state(shapes: Shapes, *, device: str = "cpu", seed: int = 0) -> State:
    """Tensors of random bits, the same for the same seed and device."""
    generator = torch.Generator(device=device).manual_seed(seed)
    state = empty_state(shapes, device=device)
    for tensor in state.values():
        tensor.view(torch.int16).random_(generator=generator)
    return state


def empty_state(shapes: Shapes, *, device: str = "cpu") -> State:
    """Targets for a load: zeroed, so that their memory is resident before the clock starts."""
    return {key: torch.zeros(shape, dtype=torch.bfloat16, device=device) for key, shape in shapes.items()}


def transposed_state(*, total: int) -> State:
    """One transposed matrix of about ``total`` bytes: no two neighbours of a row lie side by side in memory."""
    rows = 16_384
    columns = max(1, total // (2 * rows))
    matrix = torch.empty((rows, columns), dtype=torch.bfloat16)
    matrix.view(torch.int16).random_(generator=torch.Generator().manual_seed(1))
    return {"transposed.weight": matrix.t()}


def clear(state: State) -> None:
    """Zero every tensor, so that a load that does nothing cannot pass for one that worked."""
    for tensor in state.values():
        tensor.zero_()


def different_keys(wanted: State, found: State) -> list[str]:
    """The keys whose bytes differ, a tensor at a time and on its own device; empty when all are equal."""
    return [key for key, tensor in wanted.items() if not _same_bytes(tensor, found[key])]


def _same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and torch.equal(left.view(torch.int16), right.view(torch.int16))


def _decoder_layer(layer: int, *, hidden: int) -> Shapes:
    wide = hidden * 7 // 2
    parts: Shapes = {
        "attention.query.weight": (hidden, hidden),
        "attention.key.weight": (hidden // 4, hidden),
        "attention.value.weight": (hidden // 4, hidden),
        "attention.output.weight": (hidden, hidden),
        "attention_norm.weight": (hidden,),
        "feed_forward.gate.weight": (wide, hidden),
        "feed_forward.up.weight": (wide, hidden),
        "feed_forward.down.weight": (hidden, wide),
        "feed_forward_norm.weight": (hidden,),
    }
    return {f"layers.{layer}.{name}": shape for name, shape in parts.items()}
