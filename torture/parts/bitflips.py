"""Single bits flipped: every one of a small manifest, many in index, headers, paddings and data."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import holdfast
from holdfast._native.catalog import read_catalog
from holdfast._native.verify import verify_checkpoint
from torture import torch_damage
from torture.part import Options, PartResult
from torture.samples import Chunk, chunks_of, large_state, not_named, one_file_each, refusal, save, small_state

NAME = "bitflips"
REQUIRED = {"manifest": 10_000, "index": 8_000, "header": 4_000, "data": 9_000}


def run(options: Options) -> PartResult:
    """Flip, look, flip back."""
    chosen = random.Random(options.seed)
    counts = {kind: 20 if options.quick else count for kind, count in REQUIRED.items()}
    with one_file_each():
        small = save(small_state(), options.folder / "small")
    large = save(large_state(), options.folder / "large")
    violations: list[str] = []
    struck = dict.fromkeys(counts, 0)
    total = 8 * (small / "manifest.json").stat().st_size + sum(list(counts.values())[1:])
    flips = (
        *(("manifest", flip) for flip in _manifest_flips(small, chosen, counts["manifest"] if options.quick else None)),
        *(("index", flip) for flip in _index_flips(small, chosen, counts["index"])),
        *(("header", flip) for flip in _header_flips(small, chosen, counts["header"])),
        *(("data", flip) for flip in _data_flips((small, large), chosen, counts["data"])),
    )
    for done, (kind, (path, file, at, bit)) in enumerate(flips, start=1):
        options.progress(done, total)
        with open(file, "r+b", buffering=0) as opened:
            original = os.pread(opened.fileno(), 1, at)
            os.pwrite(opened.fileno(), bytes([original[0] ^ 1 << bit]), at)
            problem = _problem(kind, path, file, at)
            os.pwrite(opened.fileno(), original, at)
        struck[kind] += 1
        if problem is not None:
            violations.append(f"bit {bit} of byte {at} of {file.name}: {problem}")
    for path in (small, large):
        holdfast.load(path)
    tries = 20 if options.quick else 300
    return PartResult(
        fault="bit flips: every bit of a small manifest; index, headers, paddings, data",
        must_hold="all detected, file and key named",
        injected=sum(struck.values()),
        required=total,
        violations=violations,
        counts={f"bits of {kind}": count for kind, count in struck.items()},
        torch=torch_damage.detected_flips(options.folder / "torch", chosen, tries=tries),
    )


Flip = tuple[Path, Path, int, int]
_known: dict[Path, list[Chunk]] = {}


def _manifest_flips(path: Path, chosen: random.Random, count: int | None) -> Iterator[Flip]:
    file = path / "manifest.json"
    bits = range(8 * file.stat().st_size)
    return ((path, file, bit // 8, bit % 8) for bit in (bits if count is None else chosen.sample(bits, count)))


def _index_flips(path: Path, chosen: random.Random, count: int) -> Iterator[Flip]:
    (file,) = path.glob("index-*")
    size = file.stat().st_size
    # Every byte once, its header and padding included, then any.
    places = [*range(size), *(chosen.randrange(size) for _ in range(count))]
    return ((path, file, at, chosen.randrange(8)) for at in places[:count])


def _header_flips(path: Path, chosen: random.Random, count: int) -> Iterator[Flip]:
    headers = {Path(path, entry.name): entry.header for entry in read_catalog(path).manifest.files}
    places = [(file, at) for file, size in headers.items() for at in range(size)]
    return ((path, file, at, chosen.randrange(8)) for file, at in chosen.sample(places, count))


def _data_flips(paths: tuple[Path, ...], chosen: random.Random, count: int) -> Iterator[Flip]:
    for number in range(count):
        path = paths[number % len(paths)] if number % 4 == 0 else paths[0]
        chunk = chosen.choice(_chunks(path))
        # The first and last bytes of chunks more often than their share.
        at = chosen.choice((chunk.begin, chunk.end - 1, *(chosen.randrange(chunk.begin, chunk.end) for _ in range(6))))
        yield path, path / chunk.name, at, chosen.randrange(8)


def _chunks(path: Path) -> list[Chunk]:
    if path not in _known:
        _known[path] = chunks_of(path)
    return _known[path]


def _problem(kind: str, path: Path, file: Path, at: int) -> str | None:
    """What is wrong with how the flip at byte ``at`` of ``file`` is found."""
    if kind in ("manifest", "index"):
        return not_named(refusal(lambda: holdfast.open(path)), file)
    if kind == "header":
        # A load does not need the headers of data files; other readers do, and verify looks at them.
        damaged = [(damage.file, damage.key) for damage in verify_checkpoint(path).damage]
        return None if damaged == [(file.name, None)] else f"verify found {damaged}"
    key = next(chunk.key for chunk in _chunks(path) if chunk.name == file.name and chunk.begin <= at < chunk.end)
    return not_named(refusal(lambda: holdfast.load(path)), file, key=key, at=at)
