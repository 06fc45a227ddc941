"""Answers about one checkpoint, of every format: what it is, its tree, its tables, its ranks; errors as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import holdfast
from tests.unit.view.conftest import HOSTILE

GOLDEN = Path(__file__).parents[2] / "compat" / "data" / "v1-0.1.0"


def test_a_native_checkpoint_is_summed_up(serve, run):
    told = serve(run / "step-2").ask("/api/checkpoint?checkpoint=0")
    assert (told["format"], told["tensors"], told["values"], told["tied"]) == ("native", 7, 2, 1)
    assert told["ties"] == [["model.weight", "model.tied"]]
    assert told["dtypes"][0] == {"dtype": "float32", "tensors": 6, "elements": 42, "bytes": 168}
    assert told["bytes"] == holdfast.Steps(run).steps()[1].bytes
    assert told["saved_at"] > 1.7e9
    assert told["ranks"] == 1
    assert told["has_digests"] is True
    assert {"key": "note", "kind": "str", "shown": repr(HOSTILE)} in told["user_metadata"]


def test_torchs_format_and_folders_are_told_in_the_same_words(serve, run, tmp_path):
    state = holdfast.load(run / "step-2")
    torchs, folder = tmp_path / "torchs", tmp_path / "folder"
    holdfast.save(state, torchs, no_dist=True, storage_writer=holdfast.FileSystemWriter(torchs))
    folder.mkdir()
    save_file({"a.weight": torch.ones(2, 2), "b": torch.zeros(3)}, folder / "model.safetensors")
    browser = serve(torchs, folder)
    sources = browser.ask("/api/sources")["sources"]
    assert [(each["kind"], each["checkpoint"]) for each in sources] == [("checkpoint", 0), ("checkpoint", 1)]
    told = [browser.ask(f"/api/checkpoint?checkpoint={number}") for number in (0, 1)]
    assert [each["format"] for each in told] == ["torch", "huggingface"]
    assert [each["tensors"] for each in told] == [7, 2]
    assert [each["has_digests"] for each in told] == [False, False]
    for number in (0, 1):
        rows = browser.ask(f"/api/tensors?checkpoint={number}&sort=key")["rows"]
        keys = [row["key"] for row in rows]
        assert keys == sorted(keys)
        row = next(row["tensor"] for row in rows if row["key"].endswith("weight"))
        for path in ("tensor", "slice", "statistics", "blocks", "chunks"):
            assert browser.request(f"/api/{path}?checkpoint={number}&tensor={row}")[0] == 200
    assert browser.ask("/api/ranks?checkpoint=0")["ranks"][0]["rank"] == 0
    assert "do not say" in browser.ask("/api/ranks?checkpoint=1")["why"]
    assert "step" in [row["key"] for row in browser.ask("/api/values?checkpoint=0")["rows"]]


def test_the_tree_goes_down_level_by_level(serve, run):
    browser = serve(run / "step-1")
    top = browser.ask("/api/tree?checkpoint=0&under=")
    assert (top["tensors"], top["bytes"]) == (7, 48 + 3 * 20 + 12 + 4)
    named = {child["name"]: child for child in top["children"]}
    assert set(named) == {"model", "", HOSTILE}
    assert named["model"] == {
        **{"name": "model", "under": "model.", "tensor": None, "tensors": 5, "bytes": 108, "dtype": None, "shape": None}
    }
    assert named[HOSTILE]["under"] is None
    assert named[""]["shape"] == [2]
    level = browser.ask("/api/tree?checkpoint=0&under=model.layers.")
    assert [child["name"] for child in level["children"]] == ["0", "9", "10"]  # of equal size: as numbers
    assert level["rest"] == {"children": 0, "tensors": 0, "bytes": 0}


@pytest.mark.parametrize(
    "keys", [["a", "a.b", "a-b", "a.b.c", "a/b"], ["", ".", "..", ".a", "a."], ["x" * 100, "x.\n"]]
)
def test_every_key_is_a_leaf_of_the_tree_once(serve, tmp_path, keys):
    holdfast.save({key: torch.ones(number + 1) for number, key in enumerate(keys)}, tmp_path / "a", no_dist=True)
    browser = serve(tmp_path / "a")
    waiting, found = [""], []
    while waiting:
        under = waiting.pop()
        escaped = under.encode("utf-8").hex("%", 1) if under else ""
        level = browser.ask(f"/api/tree?checkpoint=0&under={'%' + escaped if escaped else ''}")
        for child in level["children"]:
            found += [under + child["name"]] if child["tensor"] is not None else []
            waiting += [child["under"]] if child["under"] is not None else []
        assert level["bytes"] == sum(child["bytes"] for child in level["children"])
    assert sorted(found) == sorted(keys)


def test_large_levels_are_cut_and_say_so(serve, tmp_path):
    holdfast.save({f"k{number}": torch.ones(1) for number in range(600)}, tmp_path / "a", no_dist=True)
    level = serve(tmp_path / "a").ask("/api/tree?checkpoint=0&under=")
    assert len(level["children"]) == 500
    assert level["rest"] == {"children": 100, "tensors": 100, "bytes": 400}


def test_the_table_is_searched_sorted_and_cut(serve, run):
    browser = serve(run / "step-1")
    every = browser.ask("/api/tensors?checkpoint=0")
    assert every["total"] == len(every["rows"]) == 7
    assert [row["tensor"] for row in every["rows"]] == list(range(7))
    assert every["rows"][1]["alias_of"] == "model.weight"
    for sort in ("key", "bytes", "dtype", "chunks", "elements"):
        up, down = (browser.ask(f"/api/tensors?checkpoint=0&sort={sort}&descending={each}")["rows"] for each in (0, 1))
        column = [row[sort] for row in up]
        assert column == sorted(column)
        assert [row[sort] for row in down] == column[::-1]
    assert browser.ask("/api/tensors?checkpoint=0&search=LAYERS")["total"] == 3
    assert browser.ask("/api/tensors?checkpoint=0&search=model.*.9")["rows"][0]["key"] == "model.layers.9"
    assert browser.ask("/api/tensors?checkpoint=0&search=layers.*")["total"] == 0
    assert browser.ask("/api/tensors?checkpoint=0&search=%5B")["total"] == 0
    part = browser.ask("/api/tensors?checkpoint=0&first=5&count=1")
    assert (part["total"], part["first"], len(part["rows"])) == (7, 5, 1)
    assert browser.ask("/api/tensors?checkpoint=0&first=100")["rows"] == []


def test_hostile_keys_and_values_are_text_in_ascii(serve, run):
    browser = serve(run / "step-1")
    for path in ("tensors", "tree", "values", "checkpoint"):
        data = browser.request(f"/api/{path}?checkpoint=0")[2]
        assert data.isascii()
        json.loads(data, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert HOSTILE in [row["key"] for row in browser.ask("/api/tensors?checkpoint=0")["rows"]]
    assert browser.ask("/api/values?checkpoint=0")["rows"] == [
        {"key": "step", "kind": "int", "shown": "1"},
        {"key": "</script>", "kind": "str", "shown": "'</script>'"},
    ]


def test_long_values_are_cut_and_pickles_stay_shut(serve, tmp_path):
    state = {"long": "x" * 10_000, "huge": 10**5000, "bytes": b"x" * 100_000, "set": {1}}
    holdfast.save(state, tmp_path / "a", no_dist=True)
    writer = holdfast.NativeWriter(tmp_path / "b", allow_pickle=True)
    holdfast.save({"run": print, "odd": {"a": print}}, storage_writer=writer, no_dist=True)
    browser = serve(tmp_path / "a", tmp_path / "b")
    rows = {row["key"]: row for row in browser.ask("/api/values?checkpoint=0")["rows"]}
    assert len(rows["long"]["shown"]) == 500
    assert "too long" in rows["huge"]["shown"]
    assert rows["bytes"]["shown"] == "<bytes, 100,000 bytes>"
    pickles = browser.ask("/api/values?checkpoint=1")["rows"]
    assert {row["kind"] for row in pickles} == {"pickle"}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("name", ["rich", "pieces", "quantised", "values"])
def test_every_kind_of_tensor_is_shown(serve, name):
    browser = serve(GOLDEN / name)
    total = browser.ask("/api/checkpoint?checkpoint=0")["tensors"]
    for row in range(total):
        told = browser.ask(f"/api/tensor?checkpoint=0&tensor={row}")
        at = ",".join("0" for _ in told["shape"])
        cells = browser.ask(f"/api/slice?checkpoint=0&tensor={row}&at={at}&rows=2&columns=3")
        assert len(cells["values"]) == cells["rows"], told
        assert all(len(line) == cells["columns"] for line in cells["values"]), told
        numbers = browser.ask(f"/api/statistics?checkpoint=0&tensor={row}")
        assert numbers["elements"] == int(np.prod(told["shape"])), told
        header = json.loads(browser.request(f"/api/chunks?checkpoint=0&tensor={row}")[2][4:].partition(b"}")[0] + b"}")
        assert header["total"] == told["chunks"], told
        assert browser.ask(f"/api/blocks?checkpoint=0&tensor={row}")["state"] == "unknown"
    assert total or name == "values"


def test_what_is_damaged_is_an_error_and_the_server_lives(serve, run, tmp_path):
    manifest = run / "step-1" / "manifest.json"
    browser = serve(run, run / "step-2")
    steps = browser.ask("/api/run?source=0")["steps"]
    data = manifest.read_bytes()
    manifest.write_bytes(data.replace(b"float32", b"float23"))
    status, kind, message = browser.error(f"/api/checkpoint?checkpoint={steps[0]['checkpoint']}")
    assert (status, kind) == (422, "CorruptError")
    assert "manifest.json" in message
    assert browser.ask("/api/run?source=0")["steps"][0]["state"] == "damaged"
    index = next((run / "step-2").glob("index-*"))
    index.write_bytes(index.read_bytes()[:-1])
    assert browser.error(f"/api/tree?checkpoint={steps[1]['checkpoint']}")[:2] == (422, "CorruptError")
    assert browser.ask("/api/sources")["sources"][1]["kind"] == "checkpoint"


def test_damaged_data_is_an_error_of_the_tensor_alone(serve, run):
    data = next((run / "step-1").glob("data-*"))
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    browser = serve(run / "step-1")
    told = [browser.request(f"/api/slice?checkpoint=0&tensor={row}")[0] for row in (0, 2, 3, 4, 5, 6)]
    assert sorted(told)[-1] == 422
    assert told.count(200) == 5


def test_a_pickle_in_torchs_format_is_refused(serve, tmp_path):
    path = tmp_path / "torchs"
    holdfast.save({"a": torch.ones(2)}, path, no_dist=True, storage_writer=holdfast.FileSystemWriter(path))
    browser = serve(path)
    assert browser.request("/api/checkpoint?checkpoint=0")[0] == 200
    (path / ".metadata").write_bytes(b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R.")
    status, kind, _ = browser.error("/api/checkpoint?checkpoint=0")
    assert status == 422
    assert kind in ("UnsafeError", "CorruptError")
