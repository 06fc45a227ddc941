"""Manifests: what is encoded decodes to the same, and nothing hostile decodes at all."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import xxhash

from holdfast._native.manifest import (
    FEATURES,
    FORMAT,
    VERSION,
    FileEntry,
    IndexEntry,
    Manifest,
    Quantizer,
    TensorEntry,
    ValueEntry,
    WriterEntry,
    decode_manifest,
    encode_manifest,
)
from holdfast._native.values import encode_value
from holdfast._values.dtypes import MAX_KEY_BYTES, MAX_MANIFEST_BYTES
from holdfast.errors import CorruptError, InvalidStateError, UnsupportedVersionError

PATH = "checkpoint/manifest.json"


def example(**changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "requires": ("pickle",),
        "attempt": "a-1_Z",
        "writer": WriterEntry(holdfast="0.1.0", torch="2.13.0", python="3.11.2", world_size=2),
        "files": (
            FileEntry(name="data-a-1_Z-0-0.safetensors", bytes=5000, header=4096, digest="0123456789abcdef"),
            FileEntry(name="data-a-1_Z-1-10.safetensors", bytes=4096, header=4096, digest="f" * 16),
        ),
        "index": IndexEntry(name="index-a-1_Z.safetensors", bytes=4200, digest="0" * 16),
        "tensors": (
            TensorEntry(key="model.w", dtype="bfloat16", shape=(2, 3), path=("model", "w"), requires_grad=True),
            TensorEntry(key="model.tied", dtype="bfloat16", shape=(2, 3), path=("model", "tied"), alias_of="model.w"),
            TensorEntry(key="list.0", dtype="int64", shape=(), path=("list", {"list": 0})),
            TensorEntry(key="list.1.0", dtype="bool", shape=(0,), path=("list", {"list": 1}, {"tuple": 0})),
            TensorEntry(
                key="state.0.exp", dtype="float32", shape=(4,), path=("state", {"key": 0}, "exp"), kind="numpy"
            ),
            TensorEntry(key="blob", dtype="uint8", shape=(9,), kind="bytes"),
            TensorEntry(key="pickled", dtype="uint8", shape=(9,), kind="pickle"),
            TensorEntry(
                key="q",
                dtype="qint8",
                shape=(2, 3),
                quantizer=Quantizer(scheme="per_channel_affine", axis=1, scales=(0.5, 1.0, 2.0), zero_points=(0, 1, 2)),
            ),
            TensorEntry(
                key="p",
                dtype="quint8",
                shape=(2,),
                quantizer=Quantizer(scheme="per_tensor_affine", scale=0.1, zero_point=0),
            ),
        ),
        "values": (
            ValueEntry(key="step", value=encode_value(3, key="step"), position=0),
            ValueEntry(
                key="list.1.1",
                value=encode_value((1.5, math.nan), key=""),
                position=4,
                path=("list", {"list": 1}, {"tuple": 1}),
            ),
            ValueEntry(key="empty", value=encode_value({}, key=""), position=6),
        ),
        "metadata": encode_value({"note": "ü", 1: b"x"}, key="metadata"),
    }
    fields.update(changes)
    return Manifest(**fields)


def small() -> Manifest:
    return example(
        requires=(),
        tensors=(TensorEntry(key="w", dtype="int8", shape=(3,)),),
        values=(ValueEntry(key="v", value={"tuple": [1]}, position=0),),
        metadata=None,
    )


def sealed(text: bytes) -> bytes:
    """The text with its digest made right, as someone would who knows how."""
    assert text.endswith(b'"}')
    zeroed = text[:-18] + b"0" * 16 + b'"}'
    return text[:-18] + xxhash.xxh3_64_hexdigest(zeroed).encode() + b'"}'


def hostile(change: Callable[[dict[str, Any]], object]) -> bytes:
    """The example with its parsed JSON changed, then written canonically and with a right digest."""
    parsed = json.loads(encode_manifest(example()))
    change(parsed)
    return sealed(msgspec.json.encode(parsed))


def replaced(old: bytes, new: bytes) -> bytes:
    data = encode_manifest(example())
    assert old in data
    return sealed(data.replace(old, new, 1))


def refusal(data: bytes) -> CorruptError:
    with pytest.raises(CorruptError) as caught:
        decode_manifest(data, path=PATH)
    assert type(caught.value) is CorruptError
    assert caught.value.path == PATH
    assert PATH in str(caught.value)
    assert "\n" not in str(caught.value)
    return caught.value


def test_manifests_survive() -> None:
    for manifest in (example(), small(), example(tensors=(), values=(), files=(), requires=())):
        data = encode_manifest(manifest)
        decoded = decode_manifest(data, path=PATH)
        assert msgspec.structs.replace(decoded, digest=manifest.digest) == manifest
        assert encode_manifest(decoded) == data
        assert decoded.digest.encode() == data[-18:-2]


def test_the_written_form_is_compact_json_in_order_without_defaults() -> None:
    data = encode_manifest(small())
    assert list(json.loads(data)) == [
        *(
            "format",
            "version",
            "requires",
            "attempt",
            "writer",
            "files",
            "index",
            "tensors",
            "values",
            "metadata",
            "digest",
        )
    ]
    assert data.startswith(b'{"format":"holdfast","version":1,"requires":[],"attempt":"a-1_Z","writer":{"holdfast":')
    assert (
        b'"tensors":[{"key":"w","dtype":"int8","shape":[3]}],"values":[{"key":"v","value":{"tuple":[1]},"position":0}]'
        in data
    )
    assert ("holdfast", 1, frozenset({"pickle"})) == (FORMAT, VERSION, FEATURES)


def test_the_digest_is_over_the_file_with_the_digest_zeroed() -> None:
    data = encode_manifest(example())
    assert data == sealed(data)
    assert json.loads(data)["digest"] == xxhash.xxh3_64_hexdigest(data[:-18] + b"0" * 16 + b'"}')


def test_a_digest_that_was_there_before_does_not_matter() -> None:
    assert encode_manifest(example(digest="f" * 16)) == encode_manifest(example())


def test_every_bit_flip_is_corrupt() -> None:
    data = encode_manifest(small())
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        refusal(bytes(flipped))


def test_every_truncation_and_any_addition_is_corrupt() -> None:
    data = encode_manifest(small())
    for length in range(len(data)):
        refusal(data[:length])
    for wrong in (data + b"\n", b" " + data, data + data, data[1:]):
        refusal(wrong)


def test_every_bit_flip_under_a_right_digest_is_refused_or_another_good_manifest() -> None:
    data = encode_manifest(small())
    for bit in range(8 * (len(data) - 18)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        resealed = sealed(bytes(flipped))
        try:
            decoded = decode_manifest(resealed, path=PATH)
        except (CorruptError, UnsupportedVersionError):
            continue
        assert encode_manifest(decoded) == resealed


# --- versions and features ------------------------------------------------------------------------------------------


def test_a_newer_version_asks_for_an_upgrade_whatever_its_layout() -> None:
    for text in (
        b'{"format":"holdfast","version":2,"new":[{}],"digest":"0000000000000000"}',
        b'{"format":"holdfast","version":999999999,"digest":"0000000000000000"}',
        encode_manifest(small()).replace(b'"version":1,', b'"version":12,'),
    ):
        with pytest.raises(UnsupportedVersionError, match=r"version \d+.*upgrade"):
            decode_manifest(sealed(text), path=PATH)


def test_a_damaged_version_is_corrupt_and_not_newer() -> None:
    for wrong in (b"3", b"9", b"0", b"11"):
        refusal(encode_manifest(small()).replace(b'"version":1,', b'"version":%b,' % wrong))


def test_versions_that_never_were_are_corrupt() -> None:
    for wrong in (b"0", b"-1", b"01", b"1.0", b'"1"', b"null", b"1" * 30, b"1e0"):
        refusal(sealed(encode_manifest(small()).replace(b'"version":1,', b'"version":%b,' % wrong)))


def test_unknown_features_are_named_even_if_they_bring_unknown_fields() -> None:
    for data in (
        hostile(lambda m: m.update(requires=["pickle", "striping"])),
        hostile(lambda m: (m.update(requires=["striping"]), m["tensors"][0].update(stripes=3))),
    ):
        with pytest.raises(UnsupportedVersionError, match=r"'striping'.*upgrade"):
            decode_manifest(data, path=PATH)


def test_what_it_requires_is_written_once_and_in_order() -> None:
    refusal(hostile(lambda m: m.update(requires=["pickle", "pickle"])))


# --- hostile content under a right digest ---------------------------------------------------------------------------


def tensor(number: int, **changes: object) -> Callable[[dict[str, Any]], object]:
    return lambda m: m["tensors"][number].update(changes)


def file(**changes: object) -> Callable[[dict[str, Any]], object]:
    return lambda m: m["files"][0].update(changes)


def quantizer(number: int, **changes: object) -> Callable[[dict[str, Any]], object]:
    return lambda m: m["tensors"][number]["quantizer"].update(changes)


def named(name: str) -> Callable[[dict[str, Any]], object]:
    return file(name=name)


HOSTILE: dict[str, Callable[[dict[str, Any]], object]] = {
    "unknown field": lambda m: m.update(more=1, digest=m.pop("digest")),
    "missing field": lambda m: m.pop("attempt"),
    "fields in another order": lambda m: m.update(attempt=m.pop("attempt"), digest=m.pop("digest")),
    "attempt empty": lambda m: m.update(attempt=""),
    "attempt with a slash": lambda m: m.update(attempt="a/b"),
    "attempt of dots": lambda m: m.update(attempt=".."),
    "attempt too long": lambda m: m.update(attempt="a" * 65),
    "attempt with a newline": lambda m: m.update(attempt="a-1_Z\n"),
    "attempt not ASCII": lambda m: m.update(attempt="ä"),
    "a time without a zone": lambda m: m["writer"].update(saved_at="2026-01-31T12:00:00"),
    "a time that is text": lambda m: m["writer"].update(saved_at="\x1b[2Jyesterday"),
    "a time that is a number": lambda m: m["writer"].update(saved_at=5),
    "world size 0": lambda m: m["writer"].update(world_size=0),
    "world size true": lambda m: m["writer"].update(world_size=True),
    "endless version": lambda m: m["writer"].update(torch="2" * 300),
    "unknown field of the writer": lambda m: m["writer"].update(host="h"),
    "file name ..": named(".."),
    "file name empty": named(""),
    "file name absolute": named("/etc/passwd"),
    "file name of the parent": named("../data-a-1_Z-0-0.safetensors"),
    "file name in a directory": named("data-a-1_Z-0-0.safetensors/x"),
    "file name that climbs out": named("data-a-1_Z-/../../x-0-0.safetensors"),
    "file name with NUL": named("data-a-1_Z-0-0.safetensors\x00"),
    "file name with newline": named("data-a-1_Z-0-0.safetensors\n"),
    "file name of another attempt": named("data-b-0-0.safetensors"),
    "file name of a longer attempt": named("data-a-1_Z-0-0-0.safetensors"),
    "file name with a leading zero": named("data-a-1_Z-00-0.safetensors"),
    "file name with a sign": named("data-a-1_Z--1-0.safetensors"),
    "file name with other digits": named("data-a-1_Z-٠-0.safetensors"),
    "file name in capitals": named("DATA-a-1_Z-0-0.safetensors"),
    "file name without suffix": named("data-a-1_Z-0-0"),
    "file name of the index": named("index-a-1_Z.safetensors"),
    "file name of the manifest": named("manifest.json"),
    "file named twice": named("data-a-1_Z-1-10.safetensors"),
    "file of negative size": file(bytes=-1),
    "file larger than 2**62": file(bytes=2**62 + 1),
    "file smaller than its header": file(bytes=4095),
    "file size fractional": file(bytes=5000.0),
    "header 0": file(header=0),
    "header negative": file(header=-4096),
    "header not on a page": file(header=4097),
    "header larger than safetensors allows": file(header=100_003_840, bytes=2**40),
    "digest too short": file(digest="0" * 15),
    "digest in capitals": file(digest="A" * 16),
    "digest with a newline": file(digest="0" * 15 + "\n"),
    "unknown field of a file": file(mode=511),
    "index of another attempt": lambda m: m["index"].update(name="index-b.safetensors"),
    "index outside": lambda m: m["index"].update(name="../index-a-1_Z.safetensors"),
    "index empty": lambda m: m["index"].update(bytes=0),
    "index too large": lambda m: m["index"].update(bytes=(8 << 30) + 1),
    "index digest malformed": lambda m: m["index"].update(digest="x" * 16),
    "key twice": tensor(2, key="model.w"),
    "key of a tensor and a value": tensor(2, key="step"),
    "key of two values": lambda m: m["values"][0].update(key="empty"),
    "key too long": tensor(2, key="ü" * (MAX_KEY_BYTES // 2 + 1)),
    "key not a string": tensor(2, key=1),
    "dtype unknown": tensor(0, dtype="float31"),
    "dtype with prefix": tensor(0, dtype="torch.float32"),
    "shape negative": tensor(0, shape=[-1, 2]),
    "shape negative twice": tensor(0, shape=[-2, -3]),
    "shape too large": tensor(2, shape=[2**59]),
    "shape too large in product": tensor(2, shape=[2**31, 2**31]),
    "shape empty but with absurd strides": tensor(2, shape=[0, 2**61, 2**61]),
    "shape of absurd numbers": tensor(2, shape=[10**4000]),
    "shape of 65 dimensions": tensor(2, shape=[1] * 65),
    "shape fractional": tensor(2, shape=[1.0]),
    "shape a number": tensor(2, shape=3),
    "alias of nothing": tensor(1, alias_of="model.nothing"),
    "alias of itself": tensor(1, alias_of="model.tied"),
    "alias of a value": tensor(1, alias_of="step"),
    "alias of an alias": tensor(4, alias_of="model.tied", dtype="bfloat16", shape=[2, 3], kind=None),
    "alias of another dtype": tensor(1, dtype="float16"),
    "alias of another shape": tensor(1, shape=[3, 2]),
    "alias of bytes": tensor(6, alias_of="blob"),
    "kind unknown": tensor(0, kind="eval"),
    "kind written though None": tensor(0, kind=None),
    "kind bytes of two dimensions": tensor(5, shape=[3, 3]),
    "kind bytes of no dimension": tensor(5, shape=[]),
    "kind bytes of another dtype": tensor(5, dtype="int8"),
    "kind json of another dtype": tensor(5, dtype="int8", kind="json"),
    "kind opaque of two dimensions": tensor(5, shape=[3, 3], kind="opaque"),
    "kind numpy of a dtype that numpy lacks": tensor(4, dtype="bfloat16"),
    "pickle that is not required": lambda m: m.update(requires=[]),
    "gradient of an integer": tensor(2, requires_grad=True),
    "gradient of bytes": tensor(5, requires_grad=True),
    "gradient of an array": tensor(4, requires_grad=True),
    "gradient written though False": tensor(2, requires_grad=False),
    "gradient not a boolean": tensor(0, requires_grad=1),
    "quantised without a quantizer": lambda m: m["tensors"][7].pop("quantizer"),
    "quantizer of a plain dtype": tensor(7, dtype="int8"),
    "quantizer of an unknown scheme": quantizer(7, scheme="per_row"),
    "quantizer without an axis": lambda m: m["tensors"][7]["quantizer"].pop("axis"),
    "quantizer of a wrong axis": quantizer(7, axis=2),
    "quantizer of a negative axis": quantizer(7, axis=-1),
    "quantizer of the other axis": quantizer(7, axis=0),
    "quantizer with too few scales": quantizer(7, scales=[0.5, 1.0]),
    "quantizer with too few zero points": quantizer(7, zero_points=[0]),
    "quantizer with both forms": quantizer(7, scale=1.0),
    "quantizer with a null scale": quantizer(8, scale=None),
    "quantizer with a whole number as scale": quantizer(8, scale=1),
    "quantizer without a zero point": lambda m: m["tensors"][8]["quantizer"].pop("zero_point"),
    "quantizer with another field": quantizer(8, more=1),
    "quantizer with a zero point of 2**63": quantizer(8, zero_point=2**63),
    "quantizer with a zero point of 400 digits": quantizer(8, zero_point=10**400),
    "quantizer with a zero point of 400 digits among others": quantizer(7, zero_points=[0, 10**400, 1]),
    "more features than there will ever be": lambda m: m.update(requires=[f"f{number:05}" for number in range(2000)]),
    "value of an unknown type": lambda m: m["values"][0].update(value={"exec it": "x"}),
    "value not canonical": lambda m: m["values"][0].update(value={"int": "0x1"}),
    "value missing": lambda m: m["values"][0].pop("value"),
    "value nested too deep": lambda m: m["values"][0].update(value=json.loads("[" * 70 + "]" * 70)),
    "value with two equal keys": lambda m: m["values"][0].update(value={"dict": [[1, 2], [True, 3]]}),
    "metadata of an unknown type": lambda m: m.update(metadata={"no type": "x"}),
    "path that is just the key": lambda m: m["values"][0].update(path=["step"]),
    "path of another leaf": tensor(1, path=["model", "w"]),
    "path of a leaf without path": tensor(1, path=["step"]),
    "path through a leaf": tensor(1, path=["model", "w", "x"]),
    "path that others lead through": tensor(2, path=["model"]),
    "path with a container of two kinds": tensor(2, path=["model", {"list": 0}]),
    "path of the state as a list": tensor(2, path=[{"list": 0}]),
    "path empty": tensor(2, path=[]),
    "path too deep": tensor(2, path=["x"] * 257),
    "path with a huge position": tensor(2, path=["list", {"list": 2**40}]),
    "path written though absent": tensor(2, path=None),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_content_under_a_right_digest_is_refused(case: str) -> None:
    refusal(hostile(HOSTILE[case]))


def test_the_cases_differ_from_a_good_manifest_by_what_they_say() -> None:
    assert hostile(lambda m: None) == encode_manifest(example())


@pytest.mark.parametrize(
    ("case", "key", "words"),
    [
        ("key twice", "model.w", "two entries"),
        ("dtype unknown", "model.w", "float31"),
        ("shape negative", "model.w", "negative"),
        ("alias of nothing", "model.tied", "model.nothing"),
        ("kind unknown", "model.w", "eval"),
        ("value of an unknown type", "step", "exec"),
        ("path too deep", "list.0", "257"),
        ("quantizer of a wrong axis", "q", "quantizer"),
    ],
)
def test_refusals_name_the_key_and_the_reason(case: str, key: str, words: str) -> None:
    error = refusal(hostile(HOSTILE[case]))
    assert error.key == key
    assert repr(key) in str(error)
    assert words in str(error)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"requires"', b' "requires"'),
        (b'"attempt":', b'"attempt": '),
        (b'"attempt":"a-1_Z",', b'"attempt":"a-1_Z","attempt":"a-1_Z",'),
        (b'"attempt":"a-1_Z",', b'"attempt":"x","attempt":"a-1_Z",'),
        (b'"key":"step"', b'"key":"other","key":"step"'),
        (b'"a-1_Z"', b'"a\\u002d1_Z"'),
        (b'"shape":[2,3]', b'"shape":[2,3.0]'),
        (b'"shape":[2,3]', b'"shape":[2,03]'),
        (b'"shape":[2,3]', b'"shape":[2,3,]'),
        (b'"scale":0.1', b'"scale":0.10'),
        (b'"scale":0.1', b'"scale":1e-1'),
        (b'"scale":0.1', b'"scale":NaN'),
        (b'"scale":0.1', b'"scale":1e999'),
        (b'"value":3', b'"value":3e0'),
        (b'"value":3', b'"value":-0'),
        (b'"value":3', b'"value":' + b"[" * 100_000 + b"]" * 100_000),
        (b'"value":3', b'"value":' + b"[" * 100_000),
        (b'"value":3', b'"value":' + b"9" * 5000),
        (b'"value":3', b'"value":"\xff"'),
        (b'"value":3', b'"value":"\xed\xa0\x80"'),
        (b'"value":3', b'"value":"\\ud800"'),
        (b'"value":3', b'"value":{"dict":[],"dict":[]}'),
        (b'"key":"blob"', b'"key":"\\ud800"'),
        (b'"key":"blob"', b'"key":"bl\x00ob"'),
        (b'"note"', b'"n\\u006fte"'),
    ],
    ids=range(25),
)
def test_other_ways_to_write_the_same_or_worse_are_refused(old: bytes, new: bytes) -> None:
    refusal(replaced(old, new))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"null",
        b'{"format":"holdfast"}',
        b'{"format":"other","version":1,"digest":"0000000000000000"}',
        sealed(b'{"format":"holdfast","version":1,"digest":"0000000000000000"}'),
        sealed(b'{"format":"holdfast","version":1}"digest":"0000000000000000"}'),
        sealed(b'{"format":"holdfast","version":1,"requires":[3],"digest":"0000000000000000"}'),
        b"\x89PNG\r\n\x1a\n" + bytes(100),
        b"\x80\x02}q\x00." * 30,
    ],
    ids=range(10),
)
def test_other_files_are_refused(data: bytes) -> None:
    refusal(data)


def test_a_manifest_beyond_the_limit_is_refused_before_it_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode_manifest(small())
    monkeypatch.setattr("holdfast._native.manifest.MAX_MANIFEST_BYTES", len(data) - 1)
    assert len(data) < MAX_MANIFEST_BYTES
    assert str(len(data)) in str(refusal(data))
    with pytest.raises(InvalidStateError):
        encode_manifest(small())


@pytest.mark.parametrize(
    "changes",
    [
        {"tensors": (TensorEntry(key="\ud800", dtype="int8", shape=()),)},
        {"tensors": (TensorEntry(key="k" * (MAX_KEY_BYTES + 1), dtype="int8", shape=()),)},
        {"tensors": (TensorEntry(key="k", dtype="int8", shape=(2**62,)),)},
        {"tensors": (TensorEntry(key="k", dtype="int8", shape=(), path=("x",) * 300),)},
        {"tensors": (TensorEntry(key="k", dtype="int8", shape=(), path=({"key": "\ud800"},)),)},
        {"tensors": (TensorEntry(key="k", dtype="int8", shape=(), path=({"key": ["\ud800"]},)),)},
        {"values": (ValueEntry(key="v", value={"no type": 1}, position=0),)},
        {"values": (ValueEntry(key="v", value="\ud800", position=0),)},
        {"values": (ValueEntry(key="v", value=1, position=-1),)},
        {"values": (ValueEntry(key="v", value=1, position=99),)},
        {"values": (ValueEntry(key="v", value=1, position=1), ValueEntry(key="u", value=1, position=1))},
        {"values": (ValueEntry(key="v", value=1, position=1), ValueEntry(key="u", value=1, position=0))},
        {"metadata": {"no type": "dict"}},
        {"metadata": math.nan},
        {"attempt": "../x"},
        {"files": (FileEntry(name="x", bytes=4096, header=4096, digest="0" * 16),)},
        {
            "tensors": (
                TensorEntry(
                    key="q",
                    dtype="qint8",
                    shape=(),
                    quantizer=Quantizer(scheme="per_tensor_affine", scale=math.nan, zero_point=0),
                ),
            )
        },
    ],
    ids=range(17),
)
def test_nothing_is_written_that_could_not_be_read(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidStateError) as caught:
        encode_manifest(example(requires=(), **changes) if "tensors" in changes else example(**changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("scheme", "fields"),
    [
        ("per_tensor_affine", {"scale": 2.0, "zero_point": -3}),
        ("per_tensor_symmetric", {"scale": 2.0, "zero_point": 0}),
        ("per_channel_affine", {"axis": 0, "scales": (1.0, 2.0), "zero_points": (0, 1)}),
        ("per_channel_symmetric", {"axis": 0, "scales": (1.0, 2.0), "zero_points": (0, 0)}),
        ("per_channel_affine_float_qparams", {"axis": 0, "scales": (1.0, 2.0), "zero_points": (0.5, -1.0)}),
    ],
)
def test_every_way_to_quantise_survives(scheme: str, fields: dict[str, Any]) -> None:
    entry = TensorEntry(key="q", dtype="quint4x2", shape=(2, 5), quantizer=Quantizer(scheme=scheme, **fields))
    data = encode_manifest(example(tensors=(entry,), values=(), requires=()))
    assert decode_manifest(data, path=PATH).tensors == (entry,)


def test_odd_but_honest_keys_survive() -> None:
    keys = [
        "",
        " ",
        "\x00",
        "a\nb",
        '"',
        "\\",
        "ü\U0001f40e",
        "__metadata__",
        "a@[0:1]",
        "..",
        "/",
        "k" * MAX_KEY_BYTES,
    ]
    tensors = tuple(TensorEntry(key=key, dtype="int8", shape=()) for key in keys)
    data = encode_manifest(example(tensors=tensors, values=(), requires=()))
    assert decode_manifest(data, path=PATH).tensors == tensors


def test_an_attempt_that_leads_elsewhere_is_refused_even_if_all_names_agree_with_it() -> None:
    def elsewhere(manifest: dict[str, Any]) -> None:
        renamed = json.loads(json.dumps(manifest).replace("a-1_Z", "../../a"))
        manifest.update(renamed)

    assert "attempt" in refusal(hostile(elsewhere)).message


@pytest.mark.parametrize("limit", ["MAX_TENSORS", "MAX_FILES"])
def test_more_entries_than_anyone_needs_are_refused(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    data = encode_manifest(example())
    monkeypatch.setattr(f"holdfast._native.manifest.{limit}", 1)
    assert "there are more than 1" in refusal(data).message


def test_an_alias_of_something_that_is_no_tensor_is_refused() -> None:
    def alias(manifest: dict[str, Any]) -> None:
        entry = manifest["tensors"][1]
        entry.update(dtype="uint8", shape=[9], alias_of="blob")

    fault = refusal(hostile(alias))
    assert fault.key == "model.tied"
    assert "is no tensor" in fault.message
