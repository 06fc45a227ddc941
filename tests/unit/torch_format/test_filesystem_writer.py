"""FileSystemWriter: torch reads what it writes, whatever the options."""

from __future__ import annotations

import io
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter as TorchWriter
from torch.distributed.checkpoint.filesystem import _split_by_size_and_type as torch_split
from torch.distributed.checkpoint.filesystem import _StorageInfo as TorchInfo
from torch.distributed.checkpoint.metadata import Metadata as TorchMetadata
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import holdfast
from holdfast.default_planner import DefaultSavePlanner
from holdfast.errors import AlreadyPublishedError, InvalidStateError
from holdfast.filesystem import (
    CURRENT_DCP_VERSION,
    FileSystemWriter,
    SerializationFormat,
    _FileSystemWriter,
    _item_size,
    _split_by_size_and_type,
)
from holdfast.interop import convert
from holdfast.metadata import ChunkStorageMetadata, MetadataIndex, StorageMeta, TensorProperties
from holdfast.planner import TensorWriteData, WriteItem, WriteItemType

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable):UserWarning"),
    pytest.mark.filterwarnings("ignore:B?Complex(Half|32) support is experimental:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
]

DTYPES = {str(dtype).removeprefix("torch.") for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
QUANTIZED = {"qint8", "qint32", "quint8", "quint2x4", "quint4x2"}
UNKNOWN_TO_TORCH_SAVE = {f"{sign}int{width}" for sign in ("", "u") for width in range(1, 8)}


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def of_dtype(name: str, *shape: int) -> torch.Tensor:
    """Bits that are values of every dtype."""
    dtype = getattr(torch, name)
    count = torch.Size(shape).numel() * dtype.itemsize
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # complex32 is experimental
        return (torch.arange(count) % 2).to(torch.uint8).view(dtype).view(shape)


def torch_loads(target: dict[str, Any], path: str) -> dict[str, Any]:
    dcp.load(target, checkpoint_id=path)
    return target


def read_metadata(path: str) -> TorchMetadata:
    return pickle.loads((Path(path) / ".metadata").read_bytes())


def archives(path: str) -> dict[str, bytes]:
    """The bytes of every tensor item by key, cut out as ``.metadata`` says."""
    places = {index.fqn: info for index, info in read_metadata(path).storage_data.items() if index.offset is not None}
    files = {info.relative_path: (Path(path) / info.relative_path).read_bytes() for info in places.values()}
    return {key: files[info.relative_path][info.offset : info.offset + info.length] for key, info in places.items()}


# What torch reads.


def test_torch_reads_nested_states_with_values_and_tied_weights(path: str) -> None:
    weight = numbered(30, 20)
    state = {
        "model": {"weight": weight, "tied": weight, "layers": [numbered(3), {"bias": numbered(4) + 1}]},
        "step": 7,
        "text": "ä",
        "options": {"betas": (0.9, 0.99), "names": ["a", "b"], "none": None},
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
    }
    holdfast.save(state, storage_writer=FileSystemWriter(path))
    zeros = torch.zeros(30, 20)
    target = {
        "model": {"weight": zeros, "tied": zeros.clone(), "layers": [torch.zeros(3), {"bias": torch.zeros(4)}]},
        "step": None,
        "text": None,
        "options": {"betas": None, "names": None, "none": 1},
        "array": None,
        "scalar": torch.tensor(0.0),
        "empty": torch.empty(0, 3),
    }
    torch_loads(target, path)
    assert torch.equal(target["model"]["weight"], weight)
    assert torch.equal(target["model"]["tied"], weight)
    assert torch.equal(target["model"]["layers"][0], numbered(3))
    assert torch.equal(target["model"]["layers"][1]["bias"], numbered(4) + 1)
    assert (target["step"], target["text"], target["options"]) == (7, "ä", state["options"])
    assert np.array_equal(target["array"], state["array"])
    assert target["array"].dtype == np.int16
    assert target["scalar"].item() == 2.5


WAYS: dict[str, Callable[[dict[str, Any], str], Any]] = {
    "our writer": lambda state, path: holdfast.save(state, storage_writer=FileSystemWriter(path)),
    "torch's writer": lambda state, path: holdfast.save(state, storage_writer=TorchWriter(path)),  # type: ignore[arg-type]
    "from native": lambda state, path: (holdfast.save(state, path + "-"), convert(path + "-", path, to="torch")),
    "torch": lambda state, path: dcp.save(state, checkpoint_id=path),
}


@pytest.mark.parametrize("way", WAYS)
def test_an_empty_dict_does_not_keep_torch_from_the_rest(path: str, way: str) -> None:
    """torch has no such keys: it would take the checkpoint for one of an old version, and look for other keys."""

    def state(value: float) -> dict[str, Any]:
        return {"a": {"w": torch.full((2,), value), "state": {}}, "c": {"n": value}}

    WAYS[way](state(3.0), path)
    assert sorted(read_metadata(path).state_dict_metadata) == ["a.w", "c.n"]
    for load in (torch_loads, holdfast.load):
        found = state(0.0)
        load(found, path)  # type: ignore[operator]
        assert found["a"]["w"].tolist() == [3, 3]
        assert (found["a"]["state"], found["c"]) == ({}, {"n": 3.0})


def test_torch_reads_without_a_template(path: str) -> None:
    holdfast.save({"a": {"b": numbered(4), 3: numbered(2)}, "n": 5}, storage_writer=FileSystemWriter(path))
    loaded = _load_state_dict_from_keys(checkpoint_id=path)
    assert torch.equal(loaded["a"]["b"], numbered(4))
    assert torch.equal(loaded["a"]["3"], numbered(2))
    assert loaded["n"] == 5


@pytest.mark.parametrize("name", sorted(DTYPES - QUANTIZED - UNKNOWN_TO_TORCH_SAVE))
def test_torch_reads_every_dtype_that_torch_save_knows(path: str, name: str, bits: Callable[..., bytes]) -> None:
    tensor = of_dtype(name, 5, 3)
    holdfast.save({"x": tensor}, storage_writer=FileSystemWriter(path))
    target = {"x": of_dtype(name, 5, 3)}
    target["x"].view(torch.uint8).zero_()
    torch_loads(target, path)
    assert bits(target["x"]) == bits(tensor)


@pytest.mark.parametrize("name", sorted(UNKNOWN_TO_TORCH_SAVE))
def test_torch_load_takes_even_dtypes_that_torch_save_refuses(path: str, name: str, bits: Callable[..., bytes]) -> None:
    tensor = of_dtype(name, 4)
    with pytest.raises(KeyError, match="is not recognized"):
        torch.save(tensor, io.BytesIO())
    holdfast.save({"x": tensor}, storage_writer=FileSystemWriter(path))
    assert bits(torch.load(io.BytesIO(archives(path)["x"]))) == bits(tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        numbered(6, 4).t(),
        numbered(8, 6)[::2, 1:5],
        numbered(5)[2:4],
        numbered(3).expand(4, 3),
        torch.view_as_complex(numbered(4, 2)).conj(),
        torch.view_as_complex(numbered(4, 2)).conj().imag,
        numbered(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.nn.Parameter(numbered(3)),
    ],
    ids=["transposed", "strided", "view", "expanded", "conjugate", "negative", "channels-last", "parameter"],
)
def test_torch_reads_tensors_of_every_layout(path: str, tensor: torch.Tensor) -> None:
    holdfast.save({"x": tensor}, storage_writer=FileSystemWriter(path))
    target = torch_loads({"x": torch.zeros(tensor.shape, dtype=tensor.dtype)}, path)
    assert torch.equal(target["x"], tensor.detach())
    assert len(archives(path)["x"]) < 2000 + tensor.nbytes  # a view brings nothing of what it is a view of


def test_torch_reads_quantised_tensors(path: str) -> None:
    scales, zero_points = torch.tensor([0.1, 0.5]), torch.tensor([1, 2])
    state = {
        "whole": torch.quantize_per_tensor(numbered(4, 3), 0.1, 3, torch.qint8),
        "part": torch.quantize_per_tensor(numbered(40, 3), 0.1, 3, torch.qint8)[:2],
        "channels": torch.quantize_per_channel(numbered(2, 3), scales, zero_points, 0, torch.quint8),
    }
    holdfast.save(state, storage_writer=FileSystemWriter(path))
    target = {key: torch.empty_like(tensor) for key, tensor in state.items()}
    torch_loads(target, path)
    for key, tensor in state.items():
        assert torch.equal(target[key].dequantize(), tensor.dequantize()), key


def test_tensors_made_of_tensors_are_there_by_their_parts(path: str) -> None:
    packed = torch.quantize_per_channel(
        numbered(4, 4), torch.ones(4), torch.zeros(4), 0, torch.quint4x2
    )  # torch itself cannot clone or slice these
    holdfast.save({"x": packed}, storage_writer=FileSystemWriter(path))
    target = torch_loads({"x": {"packed": torch.zeros(8, dtype=torch.uint8)}}, path)
    assert bytes(target["x"]["packed"]) == bytes(torch.empty(0, dtype=torch.uint8).set_(packed.untyped_storage()))


def test_a_tensor_may_change_dtype_or_shape_on_its_way(path: str) -> None:
    class Smaller(DefaultSavePlanner):
        def transform_object(self, write_item: WriteItem, object: Any) -> Any:
            data = super().transform_object(write_item, object)
            if write_item.index.fqn == "half":
                return data.half()
            return data.flatten()[:5] if write_item.index.fqn == "cut" else data

    state = {"half": numbered(4, 3), "cut": numbered(4, 3), "same": numbered(2)}
    metadata = holdfast.save(state, storage_writer=FileSystemWriter(path), planner=Smaller())
    assert metadata.state_dict_metadata["half"].properties.dtype is torch.float16
    assert read_metadata(path).state_dict_metadata["half"].properties.dtype is torch.float16
    target = torch_loads({"half": torch.zeros(4, 3).half(), "cut": torch.zeros(5), "same": torch.zeros(2)}, path)
    assert torch.equal(target["half"], numbered(4, 3).half())
    assert torch.equal(target["cut"], numbered(5))
    assert torch.equal(target["same"], numbered(2))


@pytest.mark.parametrize("given", [5, b"bytes", None])
def test_what_is_neither_tensor_nor_bytes_is_refused_by_name(path: str, given: object) -> None:
    class Wrong(DefaultSavePlanner):
        def transform_object(self, write_item: WriteItem, object: Any) -> Any:
            return given

    with pytest.raises(InvalidStateError, match="for the tensor 'x'"):
        holdfast.save({"x": numbered(2)}, storage_writer=FileSystemWriter(path), planner=Wrong())
    with pytest.raises(InvalidStateError, match="for the value of 'n'"):
        holdfast.save({"n": 1}, storage_writer=FileSystemWriter(path), planner=Wrong())
    assert not os.path.exists(path)


# Options.


def test_metadata_is_torchs_own(path: str) -> None:
    writer = FileSystemWriter(path)
    returned = holdfast.save({"a": numbered(3), "b": {1: "x"}}, storage_writer=writer)
    raw = (Path(path) / ".metadata").read_bytes()
    assert b"holdfast" not in raw
    metadata = read_metadata(path)
    assert type(metadata) is TorchMetadata
    assert metadata.version == returned.version == CURRENT_DCP_VERSION == "1.0.0"
    assert metadata.planner_data == {"a": ("a",), "b.1": ("b", "1")}
    assert {type(step) for steps in metadata.planner_data.values() for step in steps} == {str}
    assert (metadata.storage_meta.checkpoint_id, metadata.storage_meta.save_id) == (path, writer.save_id)
    assert {type(info) for info in metadata.storage_data.values()} == {TorchInfo}
    assert {index.fqn for index in metadata.storage_data} == {"a", "b.1"}


def test_a_rank_has_one_file_for_each_thread_or_each_item(path: str, tmp_path: Path) -> None:
    state = {**{f"t{size}": numbered(size) for size in (10, 20, 30, 40)}, "one": 1, "two": 2, "three": 3}
    holdfast.save(state, storage_writer=FileSystemWriter(path, thread_count=2))
    placed = {index.fqn: info for index, info in read_metadata(path).storage_data.items()}
    in_files: dict[str, list[str]] = {}
    for key, info in sorted(placed.items(), key=lambda item: item[1].offset):
        in_files.setdefault(info.relative_path, []).append(key)
    # Values in turn and first, then tensors, the largest first, each to the file that has least.
    assert in_files == {
        "__0_0.distcp": ["one", "three", "t40", "t10"],
        "__0_1.distcp": ["two", "t30", "t20"],
    }
    each = str(tmp_path / "each")
    holdfast.save(state, storage_writer=FileSystemWriter(each, single_file_per_rank=False))
    assert sorted(os.listdir(each)) == [".metadata", *(f"__0_{number}.distcp" for number in range(7))]
    for place in (path, each):
        target = {**{f"t{size}": torch.zeros(size) for size in (10, 20, 30, 40)}, "one": 0, "two": 0, "three": 0}
        torch_loads(target, place)
        assert all(torch.equal(target[f"t{size}"], numbered(size)) for size in (10, 20, 30, 40))
        assert (target["one"], target["two"], target["three"]) == (1, 2, 3)


@pytest.mark.parametrize("items", [0, 1, 3])
def test_no_file_is_made_for_nothing(path: str, items: int) -> None:
    state = {f"t{number}": numbered(3) for number in range(items)}
    holdfast.save(state, storage_writer=FileSystemWriter(path, thread_count=8))
    assert sorted(os.listdir(path)) == [".metadata", *(f"__0_{number}.distcp" for number in range(items))]
    torch_loads({key: torch.zeros(3) for key in state}, path)


def item(key: str, size: tuple[int, ...] | None) -> WriteItem:
    if size is None:
        return WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO)
    chunk = ChunkStorageMetadata(torch.Size([0] * len(size)), torch.Size(size))
    data = TensorWriteData(chunk, TensorProperties(dtype=torch.float16), torch.Size(size))
    return WriteItem(MetadataIndex(key, chunk.offsets), WriteItemType.TENSOR, tensor_data=data)


def test_items_are_split_as_torch_splits_them() -> None:
    items = [
        item("v0", None),
        item("t1", (4, 5)),
        item("v1", None),
        item("t2", (30,)),
        item("v2", None),
        item("t3", ()),
    ]
    assert [_item_size(items[number]) for number in (1, 3, 5)] == [40, 60, 2]
    assert _split_by_size_and_type(1, items) == [items]
    names = [[each.index.fqn for each in bucket] for bucket in _split_by_size_and_type(2, items)]
    assert names == [["v0", "v2", "t2"], ["v1", "t1", "t3"]]
    with pytest.raises(InvalidStateError, match="'v0' is a value"):
        _item_size(items[0])


@pytest.mark.parametrize("bins", [1, 2, 3, 5, 40])
def test_a_long_plan_is_split_as_torch_splits_it(bins: int) -> None:
    sizes = [37 * number % 23 + 1 for number in range(30)]
    state = {f"t{number}": numbered(size) for number, size in enumerate(sizes)}
    plans = (
        library.default_planner.create_default_local_save_plan({**state, "v0": 0, "v1": 1, "v2": 2}, True)
        for library in (holdfast, dcp)
    )
    ours, theirs = (
        [[each.index.fqn for each in bucket] for bucket in split(bins, list(plan.items))]
        for split, plan in zip((_split_by_size_and_type, torch_split), plans, strict=True)
    )
    assert ours == theirs


def test_an_id_and_a_path_for_each_save(path: str, tmp_path: Path) -> None:
    writer = FileSystemWriter(path)
    first = writer.save_id
    assert writer.checkpoint_id == Path(path)
    assert writer.metadata_path == Path(path) / ".metadata"
    assert writer.storage_meta() == StorageMeta(checkpoint_id=Path(path), save_id=first)
    writer.reset(tmp_path / "other")
    assert writer.save_id != first
    assert writer.checkpoint_id == tmp_path / "other"
    writer.reset()
    assert writer.checkpoint_id == tmp_path / "other"
    writer.reset(None)
    assert writer.metadata_path == tmp_path / "other" / ".metadata"
    assert pickle.loads(pickle.dumps(writer)).save_id == writer.save_id


def test_ranks_on_their_own_have_metadata_of_their_own(path: str) -> None:
    writer = FileSystemWriter(path, overwrite=False)
    planner = DefaultSavePlanner()
    for attempt in (1, 2):
        planner.set_up_planner({"x": numbered(3)}, writer.storage_meta(), True)
        writer.set_up_storage_writer(True, rank=2, use_collectives=False)
        if attempt == 2:
            with pytest.raises(AlreadyPublishedError, match="holds a checkpoint already"):
                writer.prepare_local_plan(planner.create_local_plan())
            break
        plan = writer.prepare_local_plan(planner.create_local_plan())
        assert plan.storage_data.prefix == "__2_"
        (plan,), metadata = planner.create_global_plan([plan])
        results = writer.write_data(planner.finish_plan(plan), planner).wait()
        writer.finish(metadata, [results])
        assert sorted(os.listdir(path)) == ["__2.metadata", "__2_0.distcp"]


def test_existing_checkpoints_are_refused_on_demand(path: str) -> None:
    holdfast.save({"x": 1}, storage_writer=FileSystemWriter(path, overwrite=False))
    before = sorted(os.listdir(path))
    with pytest.raises(AlreadyPublishedError, match="holds a checkpoint already; choose another name"):
        holdfast.save({"x": 2}, storage_writer=FileSystemWriter(path, overwrite=False))
    assert sorted(os.listdir(path)) == before
    assert torch_loads({"x": 0}, path)["x"] == 1


@pytest.mark.parametrize("sync", [True, False])
def test_files_are_synced_unless_told_otherwise(path: str, sync: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    real = os.fsync

    def recording(descriptor: int) -> None:
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        real(descriptor)

    os.makedirs(path)
    monkeypatch.setattr(os, "fsync", recording)
    writer = FileSystemWriter(path, sync_files=sync)
    holdfast.save({"x": numbered(5)}, storage_writer=writer)
    # Data, its name; the metadata under its first name; its last name.
    expected = ["__0_0.distcp", "checkpoint", f".metadata-{writer.save_id}.tmp", "checkpoint"]
    assert synced == (expected if sync else [])
    assert torch.equal(torch_loads({"x": torch.zeros(5)}, path)["x"], numbered(5))


def test_only_what_can_be_read_back_is_offered(path: str) -> None:
    with pytest.raises(ValueError, match="only Hugging Face storage"):
        FileSystemWriter(path, serialization_format=SerializationFormat.SAFETENSORS)
    with pytest.raises(ValueError, match="at least 1"):
        FileSystemWriter(path, thread_count=0)


def test_arguments_are_torchs_in_torchs_order() -> None:
    import inspect

    ours, theirs = (inspect.signature(each.__init__).parameters for each in (FileSystemWriter, TorchWriter))
    assert list(ours) == list(theirs)
    for name in set(ours) - {"self", "path", "serialization_format"}:
        assert ours[name].default == theirs[name].default, name


# Staging.


def test_a_staged_state_is_a_copy(path: str) -> None:
    writer = FileSystemWriter(path)
    weight = numbered(3).requires_grad_()
    state = {"w": weight, "list": [numbered(2), {"n": 1}], "pair": (numbered(2), "x")}
    staged = writer.stage(state)
    assert writer.per_thread_copy_ahead == 0
    assert not writer.should_synchronize_after_execute
    writer.synchronize_staging()
    with torch.no_grad():
        weight.zero_()
    state["list"][0].zero_()
    assert torch.equal(staged["w"], numbered(3))
    assert torch.equal(staged["list"][0], numbered(2))
    assert staged["pair"][1] == "x"
    assert type(staged["pair"]) is tuple
    other = writer.stage(state)
    assert other["w"].data_ptr() != staged["w"].data_ptr()
    assert isinstance(writer, AsyncStager)  # torch's async_save takes it for one
    assert not isinstance(_FileSystemWriter(path), AsyncStager)


def test_kept_copies_are_filled_again_while_they_fit(path: str) -> None:
    writer = FileSystemWriter(path, cache_staged_state_dict=True)
    state = {"w": numbered(3), "gone": numbered(2), "other": numbered(4)}
    memory = writer.stage(state)["w"].data_ptr()
    staged = writer.stage({"w": numbered(3) + 1, "other": numbered(4).double(), "new": numbered(1)})
    assert staged["w"].data_ptr() == memory
    assert torch.equal(staged["w"], numbered(3) + 1)
    assert staged["other"].dtype == torch.float64  # a copy into the old one would have been a cast
    assert list(staged) == ["w", "other", "new"]
    writer.close()
