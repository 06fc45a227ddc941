"""Mappings as values: rules, JSON, and every fault that ``check`` finds; with tables of real models."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from holdfast import Mapping
from holdfast.mapping import (
    Cast,
    Concat,
    Deinterleave,
    Drop,
    Interleave,
    Move,
    Offset,
    Split,
    Stack,
    Tie,
    Transpose,
    Unstack,
)

LAYER = "model.layers.{i}"
EXPERTS = Mapping(
    [
        Move(
            (f"{LAYER}.mlp.experts.{{e}}.gate_proj.weight", f"{LAYER}.mlp.experts.{{e}}.up_proj.weight"),
            f"{LAYER}.mlp.experts.gate_up_proj",
            (Stack(0), Concat(1)),
        ),
        Move(f"{LAYER}.mlp.experts.{{e}}.down_proj.weight", f"{LAYER}.mlp.experts.down_proj", (Stack(0),)),
    ]
)
FUSED = Mapping(
    [
        Move(
            f"{LAYER}.self_attn.qkv_proj.weight",
            tuple(f"{LAYER}.self_attn.{letter}_proj.weight" for letter in "qkv"),
            (Split(0),),
        ),
        Move(
            f"{LAYER}.mlp.gate_up_proj.weight",
            (f"{LAYER}.mlp.gate_proj.weight", f"{LAYER}.mlp.up_proj.weight"),
            (Split(0),),
        ),
    ]
)
ALL = Mapping(
    [
        *EXPERTS.rules,
        Move(("a", "b", "c"), "qkv", (Concat(0, (4, 1, 1)),)),
        Move("list", "parts.{e}", (Unstack(-1),)),
        Move("t.{name...}", "u.{name...}", (Transpose(-2, -1), Interleave(0, 4), Deinterleave(1, parts=3, only=(0,)))),
        Tie("lm_head.weight", "model.embed_tokens.weight"),
        Drop(outside="{name...}.rotary_emb.inv_freq"),
        Drop(inside="cache.{name}"),
        Cast("model.{name...}", "bfloat16"),
        Offset("{name...}.norm.weight", -1.0),
    ],
    strict=True,
)

Shape = tuple[int, ...]


def experts(layers: int = 2, number: int = 4) -> tuple[dict[str, Shape | None], dict[str, Shape | None]]:
    """Keys and shapes of Qwen3-MoE, small: outside and inside."""
    outside: dict[str, Shape | None] = {"model.embed_tokens.weight": (64, 32)}
    inside: dict[str, Shape | None] = {"model.embed_tokens.weight": (64, 32)}
    for layer in range(layers):
        inside[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = (number, 32, 32)
        inside[f"model.layers.{layer}.mlp.experts.down_proj"] = (number, 32, 16)
        for expert in range(number):
            start = f"model.layers.{layer}.mlp.experts.{expert}"
            outside |= {f"{start}.{name}_proj.weight": (16, 32) for name in ("gate", "up")}
            outside[f"{start}.down_proj.weight"] = (32, 16)
    return outside, inside


def fused() -> tuple[dict[str, Shape | None], dict[str, Shape | None]]:
    """Keys and shapes of phi3, fused as in its files, apart inside."""
    outside: dict[str, Shape | None] = {}
    inside: dict[str, Shape | None] = {}
    for layer in range(2):
        start = f"model.layers.{layer}"
        outside[f"{start}.self_attn.qkv_proj.weight"] = (64, 32)
        inside |= {
            f"{start}.self_attn.{name}_proj.weight": (rows, 32) for name, rows in zip("qkv", (32, 16, 16), strict=True)
        }
        outside[f"{start}.mlp.gate_up_proj.weight"] = (96, 32)
        inside |= {f"{start}.mlp.{name}_proj.weight": (48, 32) for name in ("gate", "up")}
    return outside, inside


def test_json_both_ways() -> None:
    assert Mapping.from_json(ALL.to_json()) == ALL
    assert Mapping.from_json(ALL.to_json().encode()) == ALL
    told = json.loads(ALL.to_json())
    assert (told["format"], told["version"], told["strict"]) == ("holdfast-mapping", 1, True)
    assert [rule["rule"] for rule in told["rules"]][-5:] == ["tie", "drop", "drop", "cast", "offset"]
    assert Mapping.from_json(json.dumps(told, indent=2)) == ALL


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda told: told["rules"].append({"rule": "melt", "outside": "a"}), "Invalid value 'melt'"),
        (lambda told: told["rules"][0]["operations"].append({"operation": "fold"}), "Invalid value 'fold'"),
        (lambda told: told["rules"][0].update(more=1), "unknown field `more`"),
        (lambda told: told.update(more=1), "unknown field `more`"),
        (lambda told: told.update(version=2), "it has version 2"),
        (lambda told: told.update(format="other"), "Invalid value 'other'"),
        (lambda told: told["rules"][0].update(outside=5), "got `int`"),
        (lambda told: told["rules"][0]["operations"][0].update(dim=1 << 40), "no dimensions"),
        (lambda told: told["rules"][0].update(outside="a" * 2000), "1 to 1024 characters"),
    ],
)
def test_json_that_is_no_mapping_is_refused(change: Callable[[object], None], said: str) -> None:
    told = json.loads(ALL.to_json())
    change(told)
    with pytest.raises(ValueError, match=re.escape(said)):
        Mapping.from_json(json.dumps(told))


def test_other_text_is_refused() -> None:
    for text in ("", "{", "[]", "null", "[" * 100_000, '{"format":"holdfast-mapping","rules":[' + "[" * 5000):
        with pytest.raises(ValueError, match="this is no mapping"):
            Mapping.from_json(text)
    with pytest.raises(ValueError, match="bytes of JSON"):
        Mapping.from_json(" " * (65 << 20))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Move("a.{i}", "b"), "Stack or Unstack"),
        (lambda: Move("a.{i}", "b.{j}"), "same names in braces"),
        (lambda: Move(("a.{i}", "b"), "c.{i}", (Concat(0),)), "all patterns of one side"),
        (lambda: Move("a", "b", (Stack(0),)), "a number for the list"),
        (lambda: Move("a.{e}", "b", (Unstack(0),)), "a Stack is of a list"),
        (lambda: Move(("a", "b"), "c"), "do not make"),
        (lambda: Move("a", ("b", "c")), "do not make"),
        (lambda: Move(("a", "b"), ("c", "d"), (Split(0),)), "a Split is of one tensor"),
        (lambda: Move(("a", "b"), "c", (Concat(0, (1, 2, 3)),)), "3 parts for 2 tensors"),
        (lambda: Move("{a b}", "c"), "braces that are no name"),
        (lambda: Move("{x", "c"), "braces that are no name"),
        (lambda: Move("{x...}.{y...}", "{y...}.{x...}"), "two names that stand for several"),
        (lambda: Move("", "c"), "1 to 1024 characters"),
        (lambda: Move((), "c"), "one pattern or more"),
        (lambda: Move(("a", "a"), "c", (Concat(0),)), "none twice"),
        (lambda: Concat(0, (0, 1)), "positive numbers"),
        (lambda: Interleave(groups=0), "positive numbers"),
        (lambda: Stack(99), "no dimensions"),
        (lambda: Tie("a.{i}", "b"), "same names in braces"),
        (Drop, "one of both"),
        (lambda: Drop(outside="a", inside="b"), "one of both"),
        (lambda: Cast("a", "int8"), "floating dtype"),
        (lambda: Cast("a", "float99"), "floating dtype"),
        (lambda: Mapping(["a"]), "is no rule"),
    ],
)
def test_rules_that_mean_nothing_are_refused(make: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        make()


def test_models_fit() -> None:
    assert EXPERTS.check(*experts()) == ()
    assert EXPERTS.check(None, experts()[1]) == ()
    assert FUSED.check(*fused()) == ()
    prefixes = Mapping([Move("language_model.model.{rest...}", "model.language_model.{rest...}")])
    assert prefixes.check({"language_model.model.norm.weight": (3,)}, {"model.language_model.norm.weight": (3,)}) == ()
    # gpt-oss as others have it: gate and up interleaved, inner dimension first.
    other = Mapping([Move("experts.gate_up", ("gate", "up"), (Transpose(1, 2), Deinterleave(1), Split(1)))])
    assert other.check({"experts.gate_up": (4, 8, 12)}, {"gate": (4, 6, 8), "up": (4, 6, 8)}) == ()


def test_every_fault_is_told_at_once() -> None:
    outside, inside = experts()
    del outside["model.layers.0.mlp.experts.2.up_proj.weight"]
    outside["model.layers.1.mlp.experts.0.down_proj.weight"] = (32, 17)
    outside["extra"] = (1,)
    inside["model.layers.1.mlp.experts.gate_up_proj"] = (4, 33, 32)
    inside["w"] = inside["lost"] = (2,)
    outside["w"] = (3,)
    inside |= {"twin": (1,), "k": None, "part": (4,), "h": (2, 2)}
    rules = [
        *EXPERTS.rules,
        Move("w", "h"),
        Tie("twin", "nobody"),
        Move("kk", "k", (Transpose(),)),
        Move("ab", ("part", "other part"), (Split(0),)),
    ]
    found = {(fault.kind, fault.side, fault.key): fault.problem for fault in Mapping(rules).check(outside, inside)}
    assert sorted(found) == sorted(
        [
            ("missing", "outside", "model.layers.0.mlp.experts.2.up_proj.weight"),
            ("shape", "outside", "model.layers.1.mlp.experts.0.down_proj.weight"),
            ("unclaimed", "outside", "extra"),
            ("shape", "inside", "model.layers.1.mlp.experts.gate_up_proj"),
            *(
                ("unclaimed", "outside", f"model.layers.1.mlp.experts.{expert}.{name}_proj.weight")
                for expert in range(4)
                for name in ("gate", "up")
            ),
            ("missing", "outside", "lost"),
            ("twice", "outside", "w"),
            ("shape", "outside", "w"),
            ("tie", "inside", "twin"),
            ("kind", "inside", "k"),
            ("missing", "inside", "other part"),
        ]
    )
    problem = found["shape", "inside", "model.layers.1.mlp.experts.gate_up_proj"]
    assert "[4, 33, 32]" in problem
    assert "2 equal parts" in problem
    assert "dimension 1" in problem


def test_keys_that_two_rules_name() -> None:
    twice = Mapping([Move("x.{rest...}", "a.{rest...}"), Move("y", "a.b")])
    assert [(each.kind, each.key) for each in twice.check(None, {"a.b": (1,)})] == [("twice", "a.b")]
    assert twice.check(None, {"a.c": (1,)}) == ()
    exceptions = Mapping([Move("x.{rest...}", "a.{rest...}"), Drop(inside="a.b"), Tie("a.c", "a.d")])
    assert exceptions.check({"x.d": (1,)}, {"a.b": (1,), "a.c": (1,), "a.d": (1,)}) == ()
    dtypes = Mapping([Cast("a.{rest...}", "float16"), Cast("a.b", "bfloat16")])
    assert [(each.kind, each.key) for each in dtypes.check(None, {"a.b": (1,)})] == [("twice", "a.b")]


def test_a_rule_that_makes_one_name_twice() -> None:
    mapping = Mapping([Move(("{i}.{name}", "{name}.{i}"), "x.{i}.{name}", (Concat(0),))])
    assert mapping.check(None, {"x.1.b": (2,)}) == ()
    assert [each.kind for each in mapping.check(None, {"x.1.1": (2,)})] == ["twice"]


def test_keys_without_a_rule_pass_unless_strict() -> None:
    keys = {"a": (1,), "b": None}
    assert Mapping().check(keys, keys) == ()
    faults = Mapping(strict=True).check(None, keys)
    assert [(each.kind, each.key) for each in faults] == [("unclaimed", "a"), ("unclaimed", "b")]


def test_lists_must_be_whole() -> None:
    unstack = Mapping([Move("all", "each.{e}", (Unstack(0),))])
    assert unstack.check({"all": (3, 2)}, {f"each.{number}": (2,) for number in range(3)}) == ()
    faults = unstack.check(None, {"each.0": (2,), "each.3": (2,)})
    assert [(each.kind, each.key) for each in faults] == [("missing", "each.1"), ("missing", "each.2")]
    faults = unstack.check(None, {"each.0": (2,), "each.1": (3,)})
    assert [(each.kind, "cannot be joined" in each.problem) for each in faults] == [("shape", True)]
    stack = Mapping([Move("each.{e}", "all", (Stack(0),))])
    assert [each.kind for each in stack.check(None, {"all": (0, 2)})] == ["shape"]
    assert [each.kind for each in stack.check(None, {"all": ()})] == ["shape"]
    far = unstack.check(None, {"each.0": (2,), "each.999999999": (2,)})
    assert [(each.kind, "999999989 more" in each.problem) for each in far][-1] == ("missing", True)
    assert len(far) < 100


def test_names_in_braces() -> None:
    def outside(pattern: str, inside_pattern: str, key: str) -> list[str]:
        faults = Mapping([Move(pattern, inside_pattern)], strict=True).check({}, {key: (1,)})
        return [fault.key for fault in faults if fault.kind == "missing"]

    assert outside("b.{i}", "a.{i}", "a.12") == ["b.12"]
    assert outside("b.{i}", "a.{i}", "a.012") == outside("b.{i}", "a.{i}", "a.x") == []
    assert outside("b.{name}", "a.{name}", "a.x7") == ["b.x7"]
    assert outside("b.{name}", "a.{name}", "a.x.y") == []
    assert outside("b.{name...}", "a.{name...}", "a.x.0.y") == ["b.x.0.y"]
    assert outside("{i}.b.{name}_{i}", "a_{i}.{name}.{i}", "a_3.n.3") == ["3.b.n_3"]
    assert outside("{i}.b.{name}_{i}", "a_{i}.{name}.{i}", "a_3.n.4") == []
    assert outside("100%s.{i}", "a.1.{i}", "a.1.5") == ["100%s.5"]
    assert outside("100%s.{i}", "a.1.{i}", "a.2.5") == []


def test_dtypes_and_offsets_of_keys() -> None:
    assert ALL.dtype_of("model.x.y") == torch.bfloat16
    assert ALL.dtype_of("other") is None
    assert ALL.offset_of("model.norm.weight") == -1.0
    assert ALL.offset_of("model.norm.bias") == 0.0


def test_work_for_many_keys_grows_with_them_alone() -> None:
    """100,000 tensors outside: calls are counted, because times depend on the machine."""
    mapping = Mapping([*FUSED.rules, *EXPERTS.rules, *(Move(f"old.{n}", f"new.{n}") for n in range(1000))])

    def calls(layers: int) -> int:
        outside, inside = experts(layers, number=64)
        count = 0

        def note(frame: object, event: str, argument: object) -> None:
            nonlocal count
            count += event == "call"

        before = sys.getprofile()
        sys.setprofile(note)
        try:
            assert mapping.check(outside, inside) == ()
        finally:
            sys.setprofile(before)
        return count

    few, many = calls(8), calls(80)
    assert many < 12 * few
    assert many < 20 * 80 * 64 * 3


def test_transformers_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="pip install 'transformers"):
        Mapping.from_transformers(torch.nn.Linear(1, 1))


def test_transformers_is_imported_late() -> None:
    source = Path(sys.modules[Mapping.__module__].__file__ or "").with_name("transformers.py").read_text()
    assert not re.search(r"^(import|from) transformers", source, re.M)
