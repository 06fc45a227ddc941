"""Hostile indexes, by name: what to change in the table of chunks of an honest checkpoint."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from torture.forge import Change, Forgery, index_bytes, number_of


def column(name: str, row: int, number: int) -> Change:
    """Another number in a column of the index."""

    def change(forgery: Forgery) -> None:
        forgery.index[name].reshape(-1)[row] = number

    return change


def rows(order: Callable[[int], list[int]]) -> Change:
    """Rows of the index left out, twice, or in another order (their digests with them; each has one or none)."""

    def change(forgery: Forgery) -> None:
        chosen = order(len(forgery.index["tensor"]))
        counts = (forgery.index["bytes"] > 0).astype(int)
        first = np.cumsum(counts) - counts
        digests = [forgery.index["digests"][first[row] : first[row] + counts[row]] for row in chosen]
        for name in ("tensor", "file", "offset", "bytes", "lo", "length"):
            forgery.index[name] = forgery.index[name][chosen]
        forgery.index["digests"] = np.concatenate(digests) if digests else np.array([], np.uint64)

    return change


def split_weight(first: int, second: int, start: int) -> Change:
    """``weight`` in two chunks of so many rows, the second from row ``start`` on."""

    def change(forgery: Forgery) -> None:
        index = forgery.index
        (row,) = np.flatnonzero(index["tensor"] == 0)
        for name in ("tensor", "file", "offset", "bytes", "lo", "length"):
            index[name] = np.insert(index[name], row + 1, index[name][row], axis=0)
        index["digests"] = np.insert(index["digests"], row, index["digests"][row])
        index["length"][row, 0], index["length"][row + 1, 0] = first, second
        index["lo"][row + 1, 0] = start
        index["bytes"][row], index["bytes"][row + 1] = first * 24, second * 24
        index["offset"][row + 1] = int(index["offset"][row]) + first * 24

    return change


def claimed_size(elements: int, dtype: str = "uint8", kind: str | None = None) -> Change:
    """A tensor of so many bytes, on which manifest and index agree; only the file is shorter."""

    def change(forgery: Forgery) -> None:
        entry = next(entry for entry in forgery.manifest["tensors"] if entry["key"] == "weight")
        entry.update(dtype=dtype, shape=[elements])
        forgery.manifest["tensors"] = [each for each in forgery.manifest["tensors"] if each["key"] != "tied"]
        # ``tied`` came last, so no number changes.
        if kind is not None:
            entry["kind"] = kind
        (row,) = np.flatnonzero(forgery.index["tensor"] == 0)
        file = int(forgery.index["file"][row])
        size = elements * {"uint8": 1, "float32": 4, "complex128": 16}[dtype]
        forgery.manifest["files"][file]["bytes"] = 4096 + size
        forgery.index["bytes"][row] = size
        forgery.index["lo"][row] = 0
        forgery.index["length"][row] = 1
        forgery.index["length"][row, 0] = elements
        blocks = min(-(-size // (1 << 20)), 1 << 16)
        forgery.index["digests"] = np.insert(forgery.index["digests"], row, [5] * (blocks - 1))

    return change


def raw_index(make: Callable[[Forgery], bytes]) -> Change:
    """An index file of these bytes."""

    def change(forgery: Forgery) -> None:
        forgery.raw["index"] = make(forgery)

    return change


def index_header(old: bytes, new: bytes) -> Change:
    """Other text in the header of the index, of the same length once padded."""

    def make(forgery: Forgery) -> bytes:
        data = index_bytes(forgery.index)
        body = data[8:4096].rstrip()
        assert old in body, old
        return data[:8] + body.replace(old, new, 1).ljust(4088)[:4088] + data[4096:]

    return raw_index(make)


def index_changes() -> dict[str, Change]:
    """Every case."""
    cases: dict[str, Change] = {}
    for name in ("tensor", "file", "offset", "bytes", "lo", "length"):
        for title, number in {
            "one more": None,
            "99": 99,
            "2**31": 2**31,
            "2**60": 2**60,
            "2**62 + 1": 2**62 + 1,
            "2**63": 2**63,
            "2**64 - 1": 2**64 - 1,
        }.items():
            cases[f"index {name} {title}"] = column(name, 0, number) if number is not None else _one_more(name)
    cases.update(
        {
            "chunks that overlap": split_weight(3, 2, 2),
            "chunks with a gap": split_weight(2, 1, 3),
            "chunks that leave the end out": split_weight(2, 1, 2),
            "chunks beyond the shape": split_weight(2, 3, 2),
            "chunks that wrap around": split_weight(2, 2, 2**62),
            "chunks in the wrong order": split_weight(2, 2, 0),
            "a chunk of bytes in two": _split_blob,
            "chunk missing": rows(lambda n: list(range(n - 1))),
            "all chunks missing": rows(lambda n: []),
            "chunk twice": rows(lambda n: [0, *range(n)]),
            "rows backwards": rows(lambda n: list(range(n))[::-1]),
            "digest missing": _digests(lambda d: d[:-1]),
            "digest too many": _digests(lambda d: np.append(d, np.uint64(1))),
            "no digests": _digests(lambda d: d[:0]),
            "digest of another block": _digests(lambda d: np.roll(d, 1)),
            "65 dimensions": _dimensions(65),
            "0 dimensions": _dimensions(0),
            "index of no bytes": raw_index(lambda f: b""),
            "index of 7 bytes": raw_index(lambda f: b"1234567"),
            "index header of 2**63 bytes": raw_index(lambda f: b"\xff" * 8 + index_bytes(f.index)[8:]),
            "index header of brackets": raw_index(lambda f: index_bytes(f.index)[:8] + b"[" * 4088),
            "index header of 4,000 nested objects": raw_index(
                lambda f: index_bytes(f.index)[:8] + b'{"a":' * 817 + b"123"
            ),
            "index with a column of 2**60 rows": index_header(b'"shape":[', b'"shape":[1152921504606846976,'),
            "index with a column twice": index_header(b'{"__metadata__"', b'{"lo":{},"__metadata__"'),
            "index with another column": index_header(b'"lo":', b'"low":'),
            "index with a column of floats": index_header(b'"U8"', b'"F8_E4M3"'),
            "index with overlapping columns": index_header(b'"data_offsets":[0,', b'"data_offsets":[1,'),
            "index with a negative offset": index_header(b'"data_offsets":[0,', b'"data_offsets":[-1,'),
            "index with other notes": index_header(b'"holdfast-index"', b'"holdfast-other"'),
            "index with code in its notes": index_header(b'"version":"1"}', b'"version":"1","code":"x"}'),
            "index columns in another order": raw_index(lambda f: index_bytes(f.index, order=tuple(sorted(f.index)))),
            "index with bytes after it": raw_index(lambda f: index_bytes(f.index) + b"x"),
            "index that is cut": raw_index(lambda f: index_bytes(f.index)[:-1]),
            "claim of 2**40 bytes": claimed_size(2**40),
            "claim of 2**60 bytes": claimed_size(2**60),
            "claim of 2**60 elements of 4 bytes": claimed_size(2**60, "float32"),
            "claim of 2**57 elements of 16 bytes": claimed_size(2**57, "complex128"),
            "claim of a blob of 2**36 bytes": claimed_size(2**36, kind="bytes"),
            "claim of JSON of 2**36 bytes": claimed_size(2**36, kind="json"),
        }
    )
    return cases


def _one_more(name: str) -> Change:
    def change(forgery: Forgery) -> None:
        flat = forgery.index[name].reshape(-1)
        flat[0] += np.uint64(1)

    return change


def _split_blob(forgery: Forgery) -> None:
    number = number_of(forgery, "blob")
    index = forgery.index
    (row,) = np.flatnonzero(index["tensor"] == number)
    for name in ("tensor", "file", "offset", "bytes", "lo", "length"):
        index[name] = np.insert(index[name], row + 1, index[name][row], axis=0)
    counts = (index["bytes"] > 0).astype(int)
    index["digests"] = np.insert(index["digests"], int(np.cumsum(counts)[row]), np.uint64(3))
    half = int(index["bytes"][row]) // 2
    rest = int(index["bytes"][row]) - half
    index["length"][row, 0], index["length"][row + 1, 0], index["lo"][row + 1, 0] = half, rest, half
    index["bytes"][row], index["bytes"][row + 1] = half, rest
    index["offset"][row + 1] = int(index["offset"][row]) + half


def _digests(change: Callable[[np.ndarray], np.ndarray]) -> Change:
    def apply(forgery: Forgery) -> None:
        forgery.index["digests"] = change(forgery.index["digests"])

    return apply


def _dimensions(count: int) -> Change:
    def apply(forgery: Forgery) -> None:
        rows_ = len(forgery.index["tensor"])
        for name, fill in (("lo", 0), ("length", 1)):
            wide = np.full((rows_, count), fill, np.uint64)
            used = min(count, forgery.index[name].shape[1])
            wide[:, :used] = forgery.index[name][:, :used]
            forgery.index[name] = wide

    return apply
