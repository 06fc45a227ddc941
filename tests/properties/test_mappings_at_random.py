"""Random mappings over small states, against plain torch: what is saved is what torch would make of the state, and what
is loaded is the state.
"""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import holdfast
from holdfast import FileSystemWriter, LoadOptions, Mapping, NativeWriter, SaveOptions
from holdfast.mapping import Concat, Deinterleave, Interleave, Move, Split, Stack, Tie, Transpose, Unstack

Lists = list[list[torch.Tensor]]


def reordered(tensor: torch.Tensor, dim: int, groups: int, parts: int, *, to_parts: bool) -> torch.Tensor:
    """The tensor with the elements of each group taken from its parts in turn, or put into its parts in turn."""
    shape = list(tensor.shape)
    inner = shape[dim] // groups // parts
    cut = [groups, inner, parts] if to_parts else [groups, parts, inner]
    dim %= len(shape)
    wide = tensor.reshape(*shape[:dim], *cut, *shape[dim + 1 :])
    return wide.transpose(dim + 1, dim + 2).reshape(shape)


@st.composite
def moves(draw: st.DrawFn) -> tuple[Move, Lists, Lists]:
    """A Move, and tensors outside and inside that it leads from and to; the outside made by torch alone."""
    rank = draw(st.integers(1, 3))
    shape = [draw(st.sampled_from([1, 2, 4, 6])) for _ in range(rank)]
    insides = draw(st.integers(1, 3))
    is_list = draw(st.booleans())
    count = draw(st.integers(1, 3)) if is_list else 1
    seed = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    inside = [[torch.randn(shape, generator=seed) for _ in range(count)] for _ in range(insides)]
    found, operations, was_list, is_split, is_cut = inside, [], is_list, False, False
    for _ in range(draw(st.integers(0, 5))):
        size = list(found[0][0].shape)
        dim = draw(st.integers(-len(size), len(size) - 1)) if size else 0
        kind = draw(st.sampled_from(["transpose", "interleave", "deinterleave", "stack", "concat", "split"]))
        if kind == "transpose" and len(size) > 1:
            other = draw(st.integers(0, len(size) - 1))
            operations.append(Transpose(dim, other))
            found = [[one.transpose(dim, other) for one in each] for each in found]
        elif kind in ("interleave", "deinterleave") and size:
            parts, groups = draw(st.sampled_from([(2, 1), (1, 2), (2, 2), (3, 1), (2, 3)]))
            if all(one.shape[dim] % (parts * groups) == 0 for each in found for one in each):
                only = draw(st.sampled_from([(), (0,)]))
                operations.append((Interleave if kind == "interleave" else Deinterleave)(dim, groups, parts, only))
                found = [
                    [reordered(one, dim, groups, parts, to_parts=kind == "interleave") for one in each]
                    if not only or number in only
                    else each
                    for number, each in enumerate(found)
                ]
        elif kind == "stack" and is_list:
            dim = draw(st.integers(-len(size) - 1, len(size)))
            operations.append(Unstack(dim))
            found, is_list = [[torch.stack(each, dim)] for each in found], False
        elif kind == "stack" and not was_list and size and not any(type(each) is Stack for each in operations):
            if len({each[0].shape[dim] for each in found}) > 1:
                continue  # one {e} in all outside names has the same numbers in each
            operations.append(Stack(dim))
            found = [list(each[0].unbind(dim)) for each in found]
        elif kind == "split" and insides > 1 and not is_split and size:
            operations.append(Split(dim))
            found, is_split = [[torch.cat(each, dim) for each in zip(*found, strict=True)]], True
        elif kind == "concat" and len(found) == 1 and (insides == 1 or is_split) and not is_cut and size:
            parts = draw(st.sampled_from([(1, 1), (2, 1), (1, 2, 1)]))
            if size[dim] % sum(parts) == 0:
                operations.append(Concat(dim, () if set(parts) == {1} else parts))
                lengths = [part * size[dim] // sum(parts) for part in parts]
                pieces = [one.split(lengths, dim) for one in found[0]]
                found, is_cut = [[of_one[part] for of_one in pieces] for part in range(len(parts))], True
    assume(not is_list)
    in_names = [f"in.{{part}}.{letter}{'.{e}' * was_list}" for letter in "abc"[:insides]]
    is_stacked = any(type(each) is Stack for each in operations)
    out_names = [f"out.{{part}}.{letter}{'.{e}' * is_stacked}" for letter in "pqr"[: len(found)]]
    return Move(tuple(out_names), tuple(in_names), tuple(operations[::-1])), found, inside


def named(patterns: tuple[str, ...], tensors: Lists, name: str) -> dict[str, torch.Tensor]:
    return {
        pattern.replace("{part}", name).replace("{e}", str(number)): tensor
        for pattern, each in zip(patterns, tensors, strict=True)
        for number, tensor in enumerate(each)
    }


@pytest.mark.parametrize("form", ["native", "torch"])
@given(drawn=moves(), is_tied=st.booleans())
@settings(max_examples=80, deadline=None)
def test_what_is_saved_is_what_torch_makes_of_it(form: str, drawn: tuple[Move, Lists, Lists], is_tied: bool) -> None:
    move, outside, inside = drawn
    state: dict[str, Any] = {**named(move.insides, inside, "m"), "other": torch.ones(2), "epoch": 3}
    wanted: dict[str, Any] = {**named(move.outsides, outside, "m"), "other": torch.ones(2), "epoch": 3}
    rules: list[Any] = [move]
    if is_tied:
        rules.append(Tie("same", "other"))
        state["same"] = torch.ones(2)
    mapping = Mapping(rules)
    assert Mapping.from_json(mapping.to_json()) == mapping
    shapes = {key: getattr(leaf, "shape", None) for key, leaf in state.items()}
    assert mapping.check({key: getattr(leaf, "shape", None) for key, leaf in wanted.items()}, shapes) == ()
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/a"
        writer: Any = {"native": NativeWriter, "torch": FileSystemWriter}[form](path)
        holdfast.save(state, storage_writer=writer, options=SaveOptions(mapping=mapping))
        with holdfast.open(path) as stored:
            assert set(stored) == set(wanted)
            for key, leaf in wanted.items():
                if isinstance(leaf, torch.Tensor):
                    assert torch.equal(stored[key][...], leaf), key
        target = {key: torch.zeros_like(leaf) if isinstance(leaf, torch.Tensor) else 0 for key, leaf in state.items()}
        report = holdfast.load(target, path, options=LoadOptions(mapping=mapping))
    assert set(report.loaded) == set(wanted)
    assert report.unexpected == report.differences == ()
    for key, leaf in state.items():
        assert torch.equal(target[key], leaf) if isinstance(leaf, torch.Tensor) else target[key] == leaf
