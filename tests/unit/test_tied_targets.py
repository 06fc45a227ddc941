"""Targets with one memory for two keys: equal data is loaded, different data is told, and nothing is ever mixed."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

import holdfast

SMALL, LARGE = 1000, 3_000_000
FORMATS = ["native", "torch"]


def save(state: dict[str, Any], path: str, form: str) -> None:
    if form == "native":
        holdfast.save(state, path)
    else:
        holdfast.save(state, storage_writer=holdfast.FileSystemWriter(path))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_equal_data_loads(path: str, size: int, form: str) -> None:
    save({"a": torch.arange(float(size)), "b": torch.arange(float(size)), "c": torch.ones(3)}, path, form)
    shared = torch.zeros(size)
    report = holdfast.load({"a": shared, "b": shared, "c": torch.zeros(3)}, path)
    assert torch.equal(shared, torch.arange(float(size)))
    assert set(report.loaded) == {"a", "b", "c"}
    assert report.unexpected == report.differences == ()


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_different_data_is_a_mismatch_that_names_both(path: str, size: int, form: str) -> None:
    save({"a": torch.ones(size), "b": torch.full((size,), 2.0)}, path, form)
    shared = torch.zeros(size)
    with pytest.raises(holdfast.MismatchError, match="'a' has other data than 'b'") as caught:
        holdfast.load({"a": shared, "b": shared.view(-1)}, path)
    assert [(each.key, each.kind) for each in caught.value.differences] == [("a", "tied")]
    if form == "native":
        assert not shared.any(), "digests tell before anything is touched"
    else:
        assert "contents of the target are undefined" in str(caught.value)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("last", ["a", "b"])
def test_without_strict_the_last_in_order_is_there_whole_and_told(path: str, size: int, form: str, last: str) -> None:
    data = {"a": torch.ones(size), "b": torch.full((size,), 2.0)}
    save(data, path, form)
    first = "b" if last == "a" else "a"
    shared = torch.zeros(size)
    report = holdfast.load({first: shared, last: shared}, path, strict=False)
    assert torch.equal(shared, data[last])
    assert [(each.key, each.kind) for each in report.differences] == [(first, "tied")]


@pytest.mark.parametrize("form", FORMATS)
def test_three_of_which_two_are_equal(path: str, form: str) -> None:
    save({"a": torch.ones(5), "b": torch.ones(5) * 2, "c": torch.ones(5) * 2}, path, form)
    shared = torch.zeros(5)
    report = holdfast.load({"a": shared, "b": shared, "c": shared}, path, strict=False)
    assert torch.equal(shared, torch.full((5,), 2.0))
    assert [each.key for each in report.differences] == ["a"]


@pytest.mark.parametrize("form", FORMATS)
def test_views_that_overlap_in_part(path: str, form: str) -> None:
    save({"a": torch.arange(10.0), "b": torch.arange(5.0, 15.0), "c": torch.full((10,), 7.0)}, path, form)
    base = torch.zeros(15)
    report = holdfast.load({"a": base[:10], "b": base[5:]}, path)
    assert torch.equal(base, torch.arange(15.0))
    assert report.differences == ()
    base = torch.zeros(15)
    with pytest.raises(holdfast.MismatchError, match="'a' has other data than 'c'"):
        holdfast.load({"a": base[:10], "c": base[5:]}, path)
    base = torch.zeros(15)
    report = holdfast.load({"a": base[:10], "c": base[5:]}, path, strict=False)
    assert torch.equal(base, torch.cat([torch.arange(5.0), torch.full((10,), 7.0)]))
    assert [(each.key, each.kind) for each in report.differences] == [("a", "tied")]


@pytest.mark.parametrize("form", FORMATS)
def test_views_between_each_others_elements_are_not_tied(path: str, form: str) -> None:
    save({"a": torch.ones(6), "b": torch.full((6, 2), 2.0), "c": torch.full((6,), 3.0)}, path, form)
    base = torch.zeros(6, 4)
    holdfast.load({"a": base[:, 0], "b": base[:, 1:3], "c": base[:, 3]}, path)
    assert torch.equal(base, torch.tensor([1.0, 2.0, 2.0, 3.0]).expand(6, 4))


@pytest.mark.parametrize("form", FORMATS)
def test_the_same_memory_in_other_words(path: str, form: str) -> None:
    """Another dtype, another shape, the transpose, an array: what counts is what the memory holds in the end."""
    values = torch.arange(12.0).reshape(3, 4)
    save({"a": values, "words": values.view(torch.int32), "flat": values.reshape(12), "turned": values.T}, path, form)
    for other in ("words", "flat", "turned", "array"):
        memory = np.zeros((3, 4), dtype=np.float32)
        shared = torch.from_numpy(memory)
        views = {"words": shared.view(torch.int32), "flat": shared.reshape(12), "turned": shared.T}
        if other == "array":
            holdfast.load({"a": shared, "flat": memory.reshape(12)}, path)
        else:
            holdfast.load({"a": shared, other: views[other]}, path)
        assert torch.equal(shared, values)


@pytest.mark.parametrize("form", FORMATS)
def test_data_that_casts_to_the_same_is_the_same(path: str, form: str) -> None:
    save({"a": torch.ones(4), "b": torch.ones(4) + 1e-5, "c": torch.ones(4) * 3}, path, form)
    shared = torch.zeros(4, dtype=torch.bfloat16)
    holdfast.load({"a": shared, "b": shared}, path, options=holdfast.LoadOptions(cast=True))
    assert torch.equal(shared, torch.ones(4, dtype=torch.bfloat16))
    with pytest.raises(holdfast.MismatchError, match="other data"):
        holdfast.load({"a": shared, "c": shared}, path, options=holdfast.LoadOptions(cast=True))


def test_not_a_number_is_equal_to_itself(path: str) -> None:
    nan = torch.full((7,), float("nan"))
    save({"a": nan, "b": nan.clone()}, path, "torch")
    shared = torch.zeros(7)
    holdfast.load({"a": shared, "b": shared}, path)
    assert shared.isnan().all()


def test_stored_in_other_chunks_it_is_compared_by_reading(path: str) -> None:
    """A sharded tensor beside a whole one with the same contents: digests of their blocks do not compare."""

    class Halves(holdfast.DefaultSavePlanner):
        def create_local_plan(self) -> Any:
            plan = super().create_local_plan()
            items = []
            for item in plan.items:
                if item.index.fqn != "a":
                    items.append(item)
                    continue
                for low, length in ((0, 4), (4, 6)):
                    chunk = holdfast.metadata.ChunkStorageMetadata(torch.Size([low]), torch.Size([length]))
                    index = holdfast.metadata.MetadataIndex("a", torch.Size([low]))
                    data = dataclasses.replace(item.tensor_data, chunk=chunk)
                    items.append(dataclasses.replace(item, index=index, tensor_data=data))
            return dataclasses.replace(plan, items=items)

    holdfast.save({"a": torch.arange(10.0), "b": torch.arange(10.0), "c": torch.ones(10)}, path, planner=Halves())
    shared = torch.zeros(10)
    holdfast.load({"a": shared, "b": shared}, path)
    assert torch.equal(shared, torch.arange(10.0))
    with pytest.raises(holdfast.MismatchError, match="'a' has other data than 'c'"):
        holdfast.load({"a": shared, "c": shared}, path)


def test_a_model_that_ties_what_was_not_tied(path: str) -> None:
    class Model(torch.nn.Module):
        def __init__(self, *, tied: bool) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(10, 4)
            self.head = torch.nn.Linear(4, 10, bias=False)
            if tied:
                self.head.weight = self.embedding.weight

    holdfast.save({"model": Model(tied=False)}, path)
    model = Model(tied=True)
    with pytest.raises(holdfast.MismatchError, match=r"'model.embedding.weight' has other data than 'model.head"):
        holdfast.load({"model": model}, path)
    holdfast.save({"model": Model(tied=True)}, path)
    holdfast.load({"model": model}, path)


def test_meta_targets_that_are_tied(path: str) -> None:
    holdfast.save({"a": torch.ones(5), "b": torch.ones(5), "c": torch.zeros(5)}, path)
    shared = torch.zeros(5, device="meta")
    target = {"a": shared, "b": shared}
    holdfast.load(target, path)
    assert torch.equal(target["a"], torch.ones(5))
    with pytest.raises(holdfast.MismatchError, match="'a' has other data than 'c'"):
        holdfast.load({"a": shared, "c": shared}, path)


def test_a_planner_with_places_of_its_own_is_left_alone(path: str) -> None:
    holdfast.save({"a": torch.ones(5), "b": torch.full((5,), 2.0)}, path)

    class Elsewhere(holdfast.DefaultLoadPlanner):
        def __init__(self) -> None:
            super().__init__()
            self.found: dict[str, torch.Tensor] = {}

        def lookup_tensor(self, index: Any) -> torch.Tensor:
            return self.found.setdefault(index.fqn, torch.zeros(5))

    shared, planner = torch.zeros(5), Elsewhere()
    holdfast.load({"a": shared, "b": shared}, path, planner=planner)
    assert torch.equal(planner.found["a"], torch.ones(5))
    assert torch.equal(planner.found["b"], torch.full((5,), 2.0))


@pytest.mark.parametrize("form", FORMATS)
def test_all_have_moved_on_for_autograd(path: str, form: str) -> None:
    save({"a": torch.ones(5), "b": torch.ones(5)}, path, form)
    memory = np.zeros(5, dtype=np.float32)
    first, second = torch.from_numpy(memory), torch.from_numpy(memory)
    holdfast.load({"a": first, "b": second}, path)
    assert first._version > 0
    assert second._version > 0
