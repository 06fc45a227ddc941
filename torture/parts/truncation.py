"""Files cut, grown, zeroed, missing, exchanged for each other or for those of other checkpoints."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import holdfast
from holdfast._native.verify import verify_checkpoint
from torture import torch_damage
from torture.part import Options, PartResult
from torture.samples import not_named, one_file_each, refusal, save, small_state

NAME = "truncation"

Damage = tuple[str, str, Callable[[], None], tuple[str, ...]]
"""What kind it is, how it is told, what does it, and the names of the files that may be blamed."""


def run(options: Options) -> PartResult:
    """Damage a copy of a checkpoint, look, put it right again."""
    chosen = random.Random(options.seed)
    cuts = 30 if options.quick else 2_000
    with one_file_each():
        path = save(small_state(), options.folder / "checkpoint")
        # The same names and sizes, other bytes; and the same state saved by another attempt.
        twin = save(small_state(seed=1), options.folder / "twin")
        other = save(small_state(), options.folder / "other", attempt="another")
    whole = {file.name: file.read_bytes() for file in path.iterdir()}
    damages = [*_manifest_lengths(path, whole, quick=options.quick, chosen=chosen), *_cuts(path, whole, chosen, cuts)]
    damages += [*_missing(path), *_foreign(path, twin, other), *_swapped(path)]
    violations: list[str] = []
    counts: dict[str, int] = {}
    for done, (kind, told, damage, blamed) in enumerate(damages, start=1):
        options.progress(done, len(damages))
        damage()
        problem = _problem(path, blamed)
        if problem is not None:
            violations.append(f"{told}: {problem}")
        _restore(path, whole)
        counts[kind] = counts.get(kind, 0) + 1
    violations += _ignored(path, whole)
    holdfast.load(path)
    return PartResult(
        fault="truncation, extension, swapped, missing, foreign files",
        must_hold="all detected, the file named",
        injected=len(damages),
        required=len(whole["manifest.json"]) + 2_000,
        violations=violations,
        counts=counts,
        torch=torch_damage.detected_cuts(options.folder / "torch", chosen, tries=20 if options.quick else 100),
    )


def _problem(path: Path, blamed: tuple[str, ...]) -> str | None:
    """What is wrong with how load and verify find the damage."""
    error = refusal(lambda: holdfast.load(path))
    if blamed == ("manifest.json",) and not os.path.lexists(path / "manifest.json"):
        return None if isinstance(error, holdfast.NotFoundError) else f"load: {error!r}"
    problems = [not_named(error, path / name) for name in blamed]
    if None not in problems:
        return f"load: {problems[0]}"
    try:
        report = verify_checkpoint(path)
    except holdfast.CorruptError as found:
        return None if not_named(found, Path(str(found.path))) is None else f"verify: {found.message}"
    return None if set(report.damaged_files) & set(blamed) else f"verify found damage in {report.damaged_files}"


def _restore(path: Path, whole: dict[str, bytes]) -> None:
    for file in path.iterdir():
        if file.name not in whole or file.is_symlink() or not file.is_file():
            shutil.rmtree(file) if file.is_dir() and not file.is_symlink() else file.unlink()
    for name, data in whole.items():
        file = path / name
        if not file.exists() or file.read_bytes() != data:
            file.write_bytes(data)


def _setter(file: Path, data: bytes) -> Callable[[], None]:
    def damage() -> None:
        file.write_bytes(data)

    return damage


def _cut(file: Path, length: int) -> Callable[[], None]:
    return lambda: os.truncate(file, length)


def _manifest_lengths(path: Path, whole: dict[str, bytes], *, quick: bool, chosen: random.Random) -> Iterator[Damage]:
    name = "manifest.json"
    data = whole[name]
    lengths = range(len(data))
    for length in chosen.sample(lengths, 30) if quick else lengths:
        yield "manifest cut", f"{name} cut to {length}", _cut(path / name, length), (name,)
    for extra in (b"\n", b" ", b"}", b"\x00", b"\x00" * 4096, data, data[:100]):
        yield "manifest grown", f"{name} grown by {extra[:9]!r}", _setter(path / name, data + extra), (name,)


def _cuts(path: Path, whole: dict[str, bytes], chosen: random.Random, count: int) -> Iterator[Damage]:
    names = sorted(name for name in whole if name != "manifest.json")
    edges = (0, 1, 7, 8, 9, 4095, 4096, 4097)
    for number in range(count):
        name = names[number % len(names)]
        file, size = path / name, len(whole[name])
        if number % 3 == 2:
            extra = chosen.choice((1, 8, 511, 4096, chosen.randrange(1, 9000)))
            grown = bytes(extra) if chosen.random() < 0.5 else chosen.randbytes(extra)
            yield "grown", f"{name} grown by {extra}", _setter(file, whole[name] + grown), (name,)
        elif number % 3 == 1 and chosen.random() < 0.3:
            # The size stays: a hole at the end, as after a crash. Headers alone are a matter of verify (see bitflips).
            header = 0 if name.startswith("index") else 8 + int.from_bytes(whole[name][:8], "little")
            length = chosen.randrange(header, size) if header < size else size
            zeroed = whole[name][:length] + bytes(size - length)
            if zeroed != whole[name]:
                yield "zeroed", f"{name} zeroed from {length}", _setter(file, zeroed), (name,)
        else:
            length = chosen.choice((*(edge for edge in edges if edge < size), size - 1, chosen.randrange(size)))
            yield "cut", f"{name} cut to {length}", _cut(file, length), (name,)


def _missing(path: Path) -> Iterator[Damage]:
    for file in sorted(path.iterdir()):
        yield "missing", f"{file.name} missing", file.unlink, (file.name,)


def _copier(source: Path, target: Path) -> Callable[[], None]:
    def damage() -> None:
        shutil.copyfile(source, target)

    return damage


def _foreign(path: Path, twin: Path, other: Path) -> Iterator[Damage]:
    names = tuple(sorted(file.name for file in path.iterdir()))
    for name in names:
        # Of a manifest that is whole but not of these files, the first file that differs is blamed.
        blamed = names if name == "manifest.json" else (name,)
        if (path / name).read_bytes() != (twin / name).read_bytes():
            yield "foreign", f"{name} of a twin", _copier(twin / name, path / name), blamed
        stranger = other / name.replace("sample", "another")
        if (path / name).read_bytes() != stranger.read_bytes():
            blamed = tuple(each.name for each in other.iterdir()) if name == "manifest.json" else (name,)
            yield "foreign", f"{name} of another attempt", _copier(stranger, path / name), blamed


def _swapped(path: Path) -> Iterator[Damage]:
    files = sorted(path.iterdir())
    for number, one in enumerate(files):
        for other in files[number + 1 :]:
            if one.read_bytes() == other.read_bytes():
                continue

            def swap(one: Path = one, other: Path = other) -> None:
                data = one.read_bytes()
                one.write_bytes(other.read_bytes())
                other.write_bytes(data)

            yield "swapped", f"{one.name} and {other.name} swapped", swap, (one.name, other.name)


def _ignored(path: Path, whole: dict[str, bytes]) -> list[str]:
    """What files beside the checkpoint do to it, which must be nothing."""
    beside = ("data-dead-0-0.safetensors", "index-dead.safetensors", "manifest-dead.tmp", "notes.txt", ".metadata.tmp")
    for name in beside:
        (path / name).write_bytes(b"garbage")
    error = refusal(lambda: holdfast.load(path)) or refusal(lambda: verify_checkpoint(path))
    _restore(path, whole)
    return [] if error is None else [f"files beside the checkpoint: {error!r}"]
