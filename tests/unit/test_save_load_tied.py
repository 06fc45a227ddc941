"""Tied weights: stored once, named, and tied again where the target ties them."""

from __future__ import annotations

from pathlib import Path

import torch

import holdfast


def data_bytes(path: str) -> int:
    return sum(file.stat().st_size for file in Path(path).glob("data-*"))


def test_tied_tensors_are_stored_once(path: str) -> None:
    weight = torch.arange(100_000.0)
    metadata = holdfast.save({"embedding": weight, "head": weight, "again": weight.detach()}, path)
    assert weight.nbytes <= data_bytes(path) < weight.nbytes + 8192
    assert metadata.state_dict_metadata["head"].alias_of == "embedding"
    assert metadata.state_dict_metadata["embedding"].alias_of is None
    with holdfast.open(path) as checkpoint:
        assert checkpoint["head"].alias_of == "embedding"
        assert checkpoint["again"].alias_of == "embedding"
        assert torch.equal(checkpoint["again"][10:20], weight[10:20])


def test_tied_tensors_are_tied_again_when_everything_is_loaded(path: str) -> None:
    weight = torch.arange(10.0)
    holdfast.save({"model": {"embedding": weight}, "head": [weight]}, path)
    loaded = holdfast.load(path)
    assert loaded["head"][0] is loaded["model"]["embedding"]
    assert torch.equal(loaded["head"][0], weight)


def test_targets_that_are_tied_stay_tied(path: str) -> None:
    weight = torch.arange(10.0)
    holdfast.save({"embedding": weight, "head": weight}, path)
    shared = torch.zeros(10)
    target = {"embedding": shared, "head": shared}
    holdfast.load(target, path)
    assert target["head"] is target["embedding"]
    assert torch.equal(shared, weight)


def test_targets_that_are_not_tied_get_copies(path: str) -> None:
    weight = torch.arange(10.0)
    holdfast.save({"embedding": weight, "head": weight}, path)
    target = {"embedding": torch.zeros(10), "head": torch.zeros(10)}
    holdfast.load(target, path)
    assert torch.equal(target["embedding"], weight)
    assert torch.equal(target["head"], weight)
    assert target["embedding"].data_ptr() != target["head"].data_ptr()


def test_meta_targets_that_are_tied_are_tied_again(path: str) -> None:
    weight = torch.arange(10.0)
    holdfast.save({"embedding": weight, "head": weight, "other": weight + 1}, path)
    shared = torch.zeros(10, device="meta")
    target = {"embedding": shared, "head": shared.detach(), "other": torch.zeros(10, device="meta")}
    holdfast.load(target, path)
    assert torch.equal(target["head"], weight)
    assert target["embedding"].data_ptr() == target["head"].data_ptr()
    assert target["other"].data_ptr() != target["head"].data_ptr()


def test_other_views_of_the_same_memory_are_tensors_of_their_own(path: str) -> None:
    base = torch.arange(16.0)
    numbers = torch.arange(3.0) + 1j
    state = {
        "base": base,
        "tail": base[1:],
        "square": base.view(4, 4),
        "turned": base.view(4, 4).t(),
        "words": base.view(torch.int32),
        "numbers": numbers,
        "conjugate": numbers.conj(),
        "imaginary": numbers.imag,
        "negative": numbers.conj().imag,
    }
    holdfast.save(state, path)
    loaded = holdfast.load(path)
    with holdfast.open(path) as checkpoint:
        assert all(checkpoint[key].alias_of is None for key in state)
    for key, tensor in state.items():
        assert torch.equal(loaded[key], tensor), key


def test_only_the_head_can_be_loaded(path: str) -> None:
    weight = torch.arange(10.0)
    holdfast.save({"embedding": weight, "head": weight}, path)
    target = {"head": torch.zeros(10)}
    report = holdfast.load(target, path)
    assert torch.equal(target["head"], weight)
    assert report.unexpected == ("embedding",)


def test_empty_tensors_are_never_tied(path: str) -> None:
    empty = torch.zeros(0, 3)
    metadata = holdfast.save({"a": empty, "b": empty, "c": torch.zeros(0, 3)}, path)
    assert all(stored.alias_of is None for stored in metadata.state_dict_metadata.values())
    assert holdfast.load(path)["b"].shape == (0, 3)


def test_tied_parameters_keep_their_own_requires_grad(path: str) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    holdfast.save({"parameter": weight, "buffer": weight.data}, path)
    loaded = holdfast.load(path)
    assert loaded["parameter"].requires_grad
    assert not loaded["buffer"].requires_grad
    assert loaded["buffer"].data_ptr() == loaded["parameter"].data_ptr()
    assert torch.equal(loaded["buffer"], torch.ones(3))


def test_a_module_with_tied_weights_on_meta_gets_them_tied(path: str) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(4, 3)
            self.body = torch.nn.Linear(3, 3)
            self.head = torch.nn.Linear(3, 4, bias=False)
            self.head.weight = self.embedding.weight

    model = Model()
    holdfast.save({"model": model}, path)
    with torch.device("meta"):
        unreal = Model()
    holdfast.load({"model": unreal}, path)
    assert unreal.head.weight is unreal.embedding.weight
    for name, parameter in model.named_parameters():
        assert torch.equal(unreal.get_parameter(name), parameter)
        assert unreal.get_parameter(name).requires_grad
