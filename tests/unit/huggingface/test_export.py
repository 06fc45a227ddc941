"""holdfast.hf.export in one process: types, files, assets, what is refused; and conversions to folders."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from typer.testing import CliRunner

import holdfast
from holdfast import hf
from holdfast._huggingface.packing import RunPacker
from holdfast.cli import app

STATE = {
    "embed.weight": torch.arange(24.0).reshape(6, 4),
    "norm": torch.tensor(1.25),
    "nothing": torch.empty(0, 3),
    "steps": torch.arange(5),
    "mask": torch.tensor([True, False]),
    "small": torch.tensor([0.5, -2.0]).to(torch.float8_e4m3fn),
    "turned": torch.randn(70, 30).t(),
}


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and bool((one.float() == other.float()).all())


def test_other_readers_find_what_was_exported(tmp_path: Path) -> None:
    hf.export({"a": {"b": STATE}}, tmp_path / "model", options=hf.ExportOptions(metadata={"by": "me"}))
    found = load_file(tmp_path / "model" / "model.safetensors")
    assert found.keys() == {f"a.b.{key}" for key in STATE}
    assert all(same(found[f"a.b.{key}"], tensor) for key, tensor in STATE.items())
    with safe_open(tmp_path / "model" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "by": "me"}


def test_a_module_is_exported_as_its_state(tmp_path: Path) -> None:
    module = torch.nn.Linear(3, 2)
    hf.export(module, tmp_path / "model")
    found = load_file(tmp_path / "model" / "model.safetensors")
    assert same(found["weight"], module.weight)
    assert found.keys() == {"weight", "bias"}


def test_every_byte_is_checked_when_it_is_read_again(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    hf.export(STATE, folder)
    assert holdfast.verify(folder).ok
    assert holdfast.verify(folder).unchecked == ()
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    assert not holdfast.verify(folder).ok
    with pytest.raises(holdfast.CorruptError, match=r"model\.safetensors"):
        holdfast.read(folder)


def test_a_type_for_all_leaves_integers_and_scaled_numbers_alone(tmp_path: Path) -> None:
    hf.export(STATE, tmp_path / "model", dtype=torch.bfloat16)
    found = load_file(tmp_path / "model" / "model.safetensors")
    kept = {"steps", "mask", "small"}
    assert all(same(found[key], tensor if key in kept else tensor.bfloat16()) for key, tensor in STATE.items())


def test_the_first_pattern_that_fits_chooses_the_type(tmp_path: Path) -> None:
    rules = {"embed.*": torch.float16, "*": torch.float64}
    hf.export({"embed.weight": STATE["embed.weight"], "norm": STATE["norm"]}, tmp_path / "model", dtype=rules)
    found = load_file(tmp_path / "model" / "model.safetensors")
    assert (found["embed.weight"].dtype, found["norm"].dtype) == (torch.float16, torch.float64)
    with pytest.raises(ValueError, match=r"only floating types can be chosen, not torch\.int8"):
        hf.export(STATE, tmp_path / "other", dtype={"*": torch.int8})


def test_files_end_where_they_would_get_too_large(tmp_path: Path) -> None:
    state = {f"{number}": torch.full((1000,), float(number)) for number in range(7)}
    hf.export(state, tmp_path / "model", options=hf.ExportOptions(shard_bytes=8000))
    names = sorted(path.name for path in (tmp_path / "model").glob("*.safetensors"))
    assert names == [f"model-{number:05}-of-00004.safetensors" for number in range(1, 5)]
    weights = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())["weight_map"]
    assert [weights[key] for key in ("0", "1", "2", "6")] == [names[0], names[0], names[1], names[3]]
    assert all(same(holdfast.read(tmp_path / "model")[key], tensor) for key, tensor in state.items())


def test_files_and_types_like_those_of_another_folder(tmp_path: Path) -> None:
    first = {"a": torch.ones(4, dtype=torch.float16), "b": torch.ones(3, dtype=torch.bfloat16)}
    hf.export(first, tmp_path / "first", options=hf.ExportOptions(shard_bytes=8))
    trained = {"b": torch.rand(3), "a": torch.rand(4)}
    hf.export(trained, tmp_path / "second", like=tmp_path / "first")
    assert {path.name for path in (tmp_path / "second").glob("*.safetensors")} == {
        path.name for path in (tmp_path / "first").glob("*.safetensors")
    }
    found = holdfast.read(tmp_path / "second")
    assert same(found["a"], trained["a"].half())
    assert same(found["b"], trained["b"].bfloat16())
    with pytest.raises(holdfast.InvalidStateError, match="'c' has no file in the folder that this one is to be like"):
        hf.export({**trained, "c": torch.ones(1)}, tmp_path / "third", like=tmp_path / "first")
    assert sorted(os.listdir(tmp_path)) == ["first", "second"]


@pytest.mark.parametrize(("lost", "said"), [("pages", "nobody wrote bytes 4096 to"), ("fragments", "nobody wrote")])
def test_a_file_that_is_not_whole_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str, said: str
) -> None:
    written = RunPacker.write_spans

    def forgetful(packer: RunPacker, spans: Any) -> None:
        written(packer, spans)
        getattr(packer, lost).pop()

    monkeypatch.setattr(RunPacker, "write_spans", forgetful)
    with pytest.raises(holdfast.InternalError, match=f"'model.safetensors' is not whole: {said}"):
        hf.export({"a": torch.ones(3000)}, tmp_path / "model")
    assert os.listdir(tmp_path) == []


def test_nothing_is_written_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = RunPacker.write_spans

    def twice(packer: RunPacker, spans: Any) -> None:
        written(packer, spans)
        packer.fragments.append(packer.fragments[-1])

    monkeypatch.setattr(RunPacker, "write_spans", twice)
    with pytest.raises(holdfast.InternalError, match="were written twice"):
        hf.export({"a": torch.ones(3000)}, tmp_path / "model")


def test_assets_come_with_the_weights(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors", "model.safetensors.index.json", "old.bin"):
        (tmp_path / "base" / name).write_text(name)
    (tmp_path / "README.md").write_text("mine")
    hf.export(STATE, tmp_path / "model", assets=[tmp_path / "base", tmp_path / "README.md"])
    assert sorted(os.listdir(tmp_path / "model")) == [
        *("README.md", "config.json", "holdfast.json", "model.safetensors"),
        *("model.safetensors.index.json", "tokenizer.json"),
    ]
    with pytest.raises(ValueError, match="is not there"):
        hf.export(STATE, tmp_path / "other", assets=tmp_path / "nothing")


def test_one_error_names_all_that_no_folder_can_hold(tmp_path: Path) -> None:
    weight = torch.ones(3)
    state = {"w": weight, "tied": weight, "step": 3, "name": "x", "big": torch.ones(2, dtype=torch.complex64)}
    with pytest.raises(holdfast.InvalidStateError) as caught:
        hf.export(state, tmp_path / "model")
    assert set(caught.value.keys) == {"tied", "step", "name", "big"}
    assert "'tied' cannot be in a Hugging Face folder: it shares its memory with 'w'" in str(caught.value)
    with pytest.raises(holdfast.InvalidStateError, match=r"'big' .* no reader of all versions knows complex64"):
        hf.export({"big": state["big"]}, tmp_path / "model")
    assert os.listdir(tmp_path) == []


def test_a_checkpoint_becomes_a_folder_and_back(tmp_path: Path) -> None:
    holdfast.save({"model": STATE}, tmp_path / "checkpoint")
    done = holdfast.convert(tmp_path / "checkpoint", tmp_path / "model", to="hf")
    assert done.tensors == len(STATE)
    holdfast.convert(tmp_path / "model", tmp_path / "back", to="native")
    found = holdfast.read(tmp_path / "back")
    assert all(same(found[f"model.{key}"], tensor) for key, tensor in STATE.items())
    form = hf.FolderForm(dtype=torch.float16, options=hf.ExportOptions(shard_bytes=8))
    holdfast.convert(tmp_path / "checkpoint", tmp_path / "half", to=form)
    assert holdfast.read(tmp_path / "half")["model.norm"].dtype == torch.float16
    assert len(list((tmp_path / "half").glob("*.safetensors"))) > 1
    with pytest.raises(holdfast.AlreadyPublishedError):
        holdfast.convert(tmp_path / "checkpoint", tmp_path / "half", to="hf")


def test_the_command_line_makes_folders(tmp_path: Path) -> None:
    holdfast.save(STATE, tmp_path / "checkpoint")
    source, target = str(tmp_path / "checkpoint"), str(tmp_path / "model")
    run = CliRunner().invoke(app, ["convert", source, target, "--to", "hf", "--dtype", "bfloat16"])
    assert run.exit_code == 0, run.output
    assert holdfast.read(target)["norm"].dtype == torch.bfloat16
    for wrong in (["--to", "hf", "--dtype", "int8"], ["--to", "native", "--dtype", "float16"]):
        assert CliRunner().invoke(app, ["convert", source, f"{target}-2", *wrong], standalone_mode=False).exit_code
    assert not os.path.exists(f"{target}-2")


def test_an_export_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf.export(STATE, tmp_path / "model")
    before = holdfast.read(tmp_path / "model")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(holdfast.StorageError, match="No space left"):
            hf.export({"other": torch.ones(10_000)}, tmp_path / "model", overwrite=True)
    assert os.listdir(tmp_path) == ["model"]
    assert holdfast.read(tmp_path / "model").keys() == before.keys()


def test_a_conversion_for_which_there_is_no_memory_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", refuse)
        with pytest.raises(holdfast.StorageError, match="cannot allocate") as caught:
            hf.export({"a": torch.ones(4, dtype=torch.float64)}, tmp_path / "model", dtype=torch.float32)
    assert caught.value.errno == errno.ENOMEM
    assert os.listdir(tmp_path) == []
