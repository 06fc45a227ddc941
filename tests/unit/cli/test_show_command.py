"""holdfast show: what it prints is what was saved, for people and for programs."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import holdfast
from holdfast import NativeWriter
from holdfast.cli import app

ODD_NAMES = ["[red]x[/red]", "[/]", ":smile:", "日本語", "a.b.c", "sp ace", "[link=file:///x]", "%s", "\\n"]


def run(*arguments: object, env: dict[str, str] | None = None) -> str:
    result = CliRunner().invoke(app, ["show", *map(str, arguments)], env=env)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return result.stdout


def run_json(*arguments: object) -> Any:
    return json.loads(run(*arguments, "--json"))


def line_of(output: str, label: str) -> str:
    (line,) = [line for line in output.splitlines() if f"─ {label} " in f"{line} "]
    return line


@pytest.fixture
def path(tmp_path: Path) -> Path:
    weight = torch.ones(300, 1000, dtype=torch.bfloat16)
    state = {
        "model": {"layers.0.weight": weight, "head": weight, "scale": torch.tensor(1.0)},
        "optimizer": {"state": {0: {"step": torch.tensor(3)}}, "groups": [{"lr": 0.5, "betas": (0.9, 0.99)}]},
        "pair": (torch.ones(2), "x"),
        "array": np.arange(4),
        "blob": b"\x00" * 100_000,
        "note": "a\n[bold]b",
        "nan": float("nan"),
    }
    writer = NativeWriter(tmp_path / "checkpoint", attempt="try1", user_metadata={"run": "[b]7"})
    holdfast.save(state, storage_writer=writer)
    return tmp_path / "checkpoint"


def test_the_tree_has_every_leaf_with_its_properties(path: Path) -> None:
    output = run(path)
    lines = [line.rstrip() for line in output.splitlines()]
    assert lines[0] == str(path)
    weight = line_of(output, "weight").split("weight")[1]
    assert weight.split() == ["bfloat16", "[300,", "1000]", "585.9", "KiB", "1", "chunk"]
    assert line_of(output, "head").endswith("= model.layers.0.weight")
    assert line_of(output, "scale").split()[-5:] == ["[]", "4", "B", "1", "chunk"]
    assert line_of(output, "lr").endswith(" 0.5")
    assert line_of(output, "betas").endswith(" (0.9, 0.99)")
    assert line_of(output, "note").endswith(r"'a\n[bold]b'")
    assert line_of(output, "nan").endswith(" nan")
    assert "bytes " in line_of(output, "blob")
    assert line_of(output, "(0)")
    assert line_of(output, "[0]")


def test_the_tree_nests_and_keeps_the_order_of_the_state(path: Path) -> None:
    tops = [line[3:].split()[0] for line in run(path).splitlines() if line[:3] in ("├─ ", "└─ ")]
    assert tops == ["model", "optimizer", "pair", "array", "blob", "note", "nan"]


def test_the_totals_describe_the_checkpoint(path: Path) -> None:
    output = run(path)
    nbytes = sum(file.stat().st_size for file in path.iterdir())
    assert f"7 tensors (1 tied), 5 values, {nbytes / 1024:.1f} KiB on disk in 3 files" in output
    assert f"written by holdfast {holdfast.__version__} / torch {torch.__version__}" in output
    assert "world size 1, attempt try1" in output
    assert "user metadata {'run': '[b]7'}" in output


def test_lines_fit_eighty_columns_and_have_no_colour_when_piped(path: Path) -> None:
    output = run(path, env={"COLUMNS": "20"})
    assert "\x1b" not in output
    tree = output.splitlines()[1:]
    assert max(map(len, tree)) <= 80
    # A narrow terminal neither wraps nor cuts.
    assert output == run(path, env={"COLUMNS": "300"})


def test_colour_changes_nothing_but_colour(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = run(path, env={"FORCE_COLOR": "1", "TERM": "xterm-256color"})
    assert "\x1b[" in coloured
    for style in {part.split("m")[0] for part in coloured.split("\x1b[")[1:]}:
        coloured = coloured.replace(f"\x1b[{style}m", "")
    assert coloured == run(path)


@pytest.mark.parametrize("name", ODD_NAMES)
@pytest.mark.parametrize("colour", [{}, {"FORCE_COLOR": "1", "TERM": "xterm"}], ids=["plain", "colour"])
def test_odd_names_are_shown_verbatim(tmp_path: Path, name: str, colour: dict[str, str]) -> None:
    tied = torch.ones(3)
    holdfast.save({name: tied, "tied": tied, "value": name}, tmp_path / "odd")
    output = run(tmp_path / "odd", env=colour)
    lines = output.splitlines()
    if name == "a.b.c":  # parts between dots are branches
        assert all(part in line for part, line in zip("abc", lines[1:4], strict=True))
        lines = ["", name, *lines[4:]]
    assert name in lines[1]
    assert f"= {name}" in lines[2]
    assert repr(name) in lines[3]
    assert set(run_json(tmp_path / "odd")["keys"]) == {name, "tied", "value"}


@pytest.mark.parametrize("name", ["a\nb", "\x1b[31mred", "tab\there", "cr\rlf", "\u202eright"])
def test_names_that_a_terminal_would_act_upon_are_escaped_in_the_tree_and_exact_in_json(
    tmp_path: Path, name: str
) -> None:
    holdfast.save({name: torch.ones(3)}, tmp_path / "odd")
    lines = run(tmp_path / "odd").splitlines()
    assert lines[1].startswith(f"└─ {name!r} ")
    assert len(lines) == 5
    assert list(run_json(tmp_path / "odd")["keys"]) == [name]


def test_a_long_key_stays_on_one_line(tmp_path: Path) -> None:
    name = "very_long_" * 40
    holdfast.save({name: torch.ones(3), "b": torch.ones(3)}, tmp_path / "long")
    assert any(f"{name}  float32  [3]" in line for line in run(tmp_path / "long").splitlines())


def test_flat_keys_of_a_large_model_are_a_tree_with_columns(tmp_path: Path) -> None:
    parts = ("self_attn.q_proj.weight", "post_attention_layernorm.weight")
    state = {f"model.layers.{number}.{part}": torch.ones(2, 2) for number in range(2) for part in parts}
    holdfast.save(state, tmp_path / "llama")
    lines = [line for line in run(tmp_path / "llama").splitlines() if "weight" in line]
    assert len(lines) == 4
    assert len({line.index("  float32  [2, 2]") for line in lines}) == 1
    shallow = run(tmp_path / "llama", "--depth", "2").splitlines()
    assert "layers" in shallow[2]
    assert shallow[2].endswith("4 keys")
    assert not any("weight" in line for line in shallow)


def test_the_time_of_the_save_is_shown_in_utc(path: Path) -> None:
    before = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    holdfast.save({"a": 1}, path)
    saved_at = run_json(path)["totals"]["saved_at"]
    assert before <= saved_at <= time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    assert f", saved at {saved_at}\n" in run(path)


def test_a_directory_of_checkpoints_says_what_lies_below(tmp_path: Path) -> None:
    for step in (9, 10, 200):
        holdfast.save({"w": torch.ones(1000)}, tmp_path / f"step-{step}")
    holdfast.save({"w": torch.ones(3)}, storage_writer=holdfast.FileSystemWriter(tmp_path / "torch"))
    (tmp_path / "logs").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    next((tmp_path / "step-10").glob("data-*")).unlink()
    (tmp_path / "step-200" / "manifest.json").write_text("{}")
    first, *lines = run(tmp_path).splitlines()
    assert first.endswith(tmp_path.name)
    assert [line.split()[0] for line in lines] == ["step-9", "step-10", "step-200", "torch"]
    assert lines[0].endswith("  whole")
    assert "damaged: data-" in lines[1]
    assert "is damaged: it does not start" in lines[2]
    found = run_json(tmp_path)["checkpoints"]
    assert [each["whole"] for each in found] == [True, False, False, True]
    assert found[0]["bytes"] == sum(file.stat().st_size for file in (tmp_path / "step-9").iterdir())
    assert found[0]["saved_at"].endswith("Z")


def test_json_has_every_key_and_nothing_else_is_printed(path: Path) -> None:
    found = run_json(path)
    assert found["path"] == str(path)
    assert found["keys"] == {
        "model.layers.0.weight": stored("bfloat16", [300, 1000], 600_000),
        "model.head": {**stored("bfloat16", [300, 1000], 600_000), "alias_of": "model.layers.0.weight"},
        "model.scale": stored("float32", [], 4),
        "optimizer.state.0.step": stored("int64", [], 8),
        "optimizer.groups.0.lr": {"kind": "value", "value": 0.5},
        "optimizer.groups.0.betas": {"kind": "value", "value": {"tuple": [0.9, 0.99]}},
        "pair.0": stored("float32", [2], 8),
        "pair.1": {"kind": "value", "value": "x"},
        "array": {**stored("int64", [4], 32), "kind": "numpy"},
        "blob": {**stored("uint8", [100_000], 100_000), "kind": "bytes"},
        "note": {"kind": "value", "value": "a\n[bold]b"},
        "nan": {"kind": "value", "value": {"float": "nan"}},
    }
    totals = found["totals"]
    assert totals["bytes"] == sum(file.stat().st_size for file in path.iterdir())
    assert (totals["tensors"], totals["tied"], totals["values"], totals["files"]) == (7, 1, 5, 3)
    assert (totals["attempt"], totals["world_size"], totals["format_version"]) == ("try1", 1, 1)
    assert (totals["holdfast"], totals["torch"]) == (holdfast.__version__, torch.__version__)
    assert found["user_metadata"] == {"dict": [["run", "[b]7"]]}


def stored(dtype: str, shape: list[int], nbytes: int) -> dict[str, object]:
    return {"kind": "tensor", "dtype": dtype, "shape": shape, "bytes": nbytes, "chunks": 1, "alias_of": None}


def test_chunks_say_where_the_bytes_are(path: Path) -> None:
    found = run_json(path, "--chunks")["keys"]
    (chunk,) = found["model.scale"]["stored"]
    assert chunk.keys() == {"lo", "length", "file", "offset", "bytes"}
    with (path / chunk["file"]).open("rb") as file:
        file.seek(chunk["offset"])
        assert file.read(chunk["bytes"]) == np.float32(1).tobytes()
    assert found["model.head"]["stored"] == found["model.layers.0.weight"]["stored"]
    (chunk,) = found["model.layers.0.weight"]["stored"]
    assert (chunk["lo"], chunk["length"]) == ([0, 0], [300, 1000])
    line = f"[0:300, 0:1000] 585.9 KiB, {chunk['file']} at {chunk['offset']}"
    assert sum(line in shown for shown in run(path, "--chunks").splitlines()) == 1


@pytest.mark.parametrize(
    ("pattern", "keys"),
    [
        ("model.*", {"model.layers.0.weight", "model.head", "model.scale"}),
        (
            "*.0.*",
            {"model.layers.0.weight", "optimizer.state.0.step", "optimizer.groups.0.lr", "optimizer.groups.0.betas"},
        ),
        ("note", {"note"}),
        ("n???", {"note"}),
        ("[an]*", {"array", "note", "nan"}),
        ("MODEL.*", set()),
        ("model", set()),
    ],
)
def test_a_pattern_selects_keys_and_case_counts(path: Path, pattern: str, keys: set[str]) -> None:
    assert set(run_json(path, pattern)["keys"]) == keys
    output = run(path, pattern)
    assert f"{len(keys)} of 12 keys shown: those that match {pattern}\n" in output
    assert ("─ blob" in output) == ("blob" in keys)


def test_a_tie_to_a_key_that_is_not_shown_is_still_marked(path: Path) -> None:
    assert line_of(run(path, "model.head"), "head").endswith("= model.layers.0.weight")


def test_an_empty_state_has_totals_and_no_tree(tmp_path: Path) -> None:
    holdfast.save({"nothing": {}}, tmp_path / "empty")
    lines = run(tmp_path / "empty").splitlines()
    assert lines[1:3] == ["└─ nothing  {}", lines[2]]
    assert lines[2].startswith("0 tensors, 1 value, ")


def test_data_files_are_not_read(path: Path) -> None:
    for file in path.glob("data-*"):
        file.unlink()
    assert "layers.0.weight" in run(path)


def test_a_tree_of_thousands_of_tensors(tmp_path: Path) -> None:
    state = {f"layers.{number}.weight": torch.ones(2) for number in range(7500)}
    holdfast.save({"model": state}, tmp_path / "many")
    assert run(tmp_path / "many").count("float32") == 7500
