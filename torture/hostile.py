"""Looks at every hostile checkpoint in a process of its own, under watch.

``python -m torture.hostile FOLDER [--quick] [FORMAT]`` prints one JSON object per case: its name, and what is wrong
with what came of it. A case is wrong when a look at it ends in anything but an error of the library, takes 100 ms of
processor time or more (where keys take long to tell apart, 2 s), makes the process grow by 64 MiB or more, opens
something outside of the checkpoint, writes, or runs code.
"""

from __future__ import annotations

import codecs
import json
import resource
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

import holdfast
from holdfast._native.verify import verify_checkpoint
from holdfast._torch_format.reader import verify_torch_checkpoint
from holdfast.interop import convert
from torture import hostile_folders, hostile_keys, hostile_native, hostile_torch, watch
from torture.forge import Change, Forgery, honest
from torture.samples import chunks_of

MOST_SECONDS = 0.1
SLOW_SECONDS = 2.0
MOST_BYTES = 64 << 20
_TRIES = 6
_HANGS_S = 20

Look = Callable[[Path], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A hostile checkpoint: ``make`` puts it at a path; ``looks`` are the ways to look at it that must fail."""

    name: str
    make: Callable[[Path], object]
    looks: dict[str, Look]
    seconds: float = MOST_SECONDS


class NotRefused(Exception):
    """A look found nothing wrong."""


def _read_all(path: Path) -> None:
    with holdfast.open(path) as checkpoint:
        for key in checkpoint:
            found = checkpoint[key]
            if isinstance(found, holdfast.StoredTensor):
                found[...]


def _verify(path: Path) -> None:
    report = verify_checkpoint(path)
    if not report.ok:
        raise holdfast.CorruptError("verify tells of damage")


def _verify_torch(path: Path) -> None:
    report = verify_torch_checkpoint(path)
    if not report.ok:
        raise holdfast.CorruptError("verify tells of damage")


def _convert(path: Path) -> None:
    convert(path / "state.pt", path / "target", to="native", overwrite=True)


NATIVE_LOOKS: dict[str, Look] = {"open": _read_all, "load": holdfast.load, "verify": _verify}
TORCH_LOOKS: dict[str, Look] = {"open": _read_all}
FOLDER_LOOKS: dict[str, Look] = {"open": _read_all, "load": holdfast.load, "verify": holdfast.verify}
PT_LOOKS: dict[str, Look] = {"convert": _convert}


def native_cases(folder: Path) -> Iterator[Case]:
    """All hostile checkpoints in the native format."""
    template = folder / "honest"
    honest(template)
    data_file = next(chunk.name for chunk in chunks_of(template) if chunk.key == "weight")

    def forged(change: Change) -> Callable[[Path], object]:
        def make(path: Path) -> None:
            forgery = Forgery.of(template)
            change(forgery)
            forgery.write(path)

        return make

    def planted(plant: hostile_native.Plant) -> Callable[[Path], object]:
        def make(path: Path) -> None:
            shutil.copytree(template, path)
            shutil.copyfile(template / data_file, path.parent / "outside")
            plant(path)

        return make

    yield Case(name="honest", make=forged(lambda forgery: None), looks={})
    for name, change in hostile_native.CHANGES.items():
        looks = NATIVE_LOOKS
        if name == "kind json of what is no JSON":
            looks = {"open": _read_all, "load": holdfast.load}  # verify decodes no values
        yield Case(name=f"native: {name}", make=forged(change), looks=looks)
    for name, change in hostile_native.slow_changes().items():
        yield Case(name=f"native: {name}", make=forged(change), looks=NATIVE_LOOKS, seconds=SLOW_SECONDS)
    for name, change in hostile_native.VERIFY_ONLY.items():
        yield Case(name=f"native: {name}", make=forged(change), looks={"verify": _verify})
    for name, plant in hostile_native.planted(data_file).items():
        yield Case(name=f"native: {name}", make=planted(plant), looks=NATIVE_LOOKS)


def torch_cases(folder: Path) -> Iterator[Case]:
    """All hostile checkpoints in torch's format."""
    for name, make in hostile_torch.cases(folder).items():
        yield Case(name=f"torch: {name}", make=make, looks=TORCH_LOOKS)
    for name, make in hostile_torch.slow_cases(folder).items():
        yield Case(name=f"torch: {name}", make=make, looks=TORCH_LOOKS, seconds=SLOW_SECONDS)


def folder_cases() -> Iterator[Case]:
    """All hostile Hugging Face folders."""
    yield Case(name="folder: honest", make=hostile_folders.exported, looks=FOLDER_LOOKS)
    for name, make in hostile_folders.CASES.items():
        yield Case(name=f"folder: {name}", make=make, looks=FOLDER_LOOKS)


def pt_cases(folder: Path) -> Iterator[Case]:
    """All hostile files of torch.save's, which only a conversion reads."""

    def put(write: Callable[[Path], object]) -> Callable[[Path], object]:
        def make(path: Path) -> None:
            (path / "target").mkdir(parents=True)
            write(path / "state.pt")

        return make

    yield Case(name="pt: honest", make=put(lambda path: torch.save({"a": torch.ones(3)}, path)), looks=PT_LOOKS)
    for name, write in hostile_keys.pt_files().items():
        yield Case(name=f"pt: {name}", make=put(write), looks=PT_LOOKS, seconds=SLOW_SECONDS)


def problems_of(case: Case, path: Path, canary: Path) -> list[str]:
    """What is wrong with what comes of looking at ``case``."""
    problems: list[str] = []
    for title, look in case.looks.items():
        found = None
        for _ in range(_TRIES):
            # Twice too slow on a machine that does something else is no finding.
            found = watch.watched(partial(look, path), path)
            if found.seconds < case.seconds:
                break
        assert found is not None
        if found.error is None:
            problems.append(f"{title}: accepted")
        elif not isinstance(found.error, holdfast.CheckpointError) or isinstance(found.error, holdfast.InternalError):
            problems.append(f"{title}: {type(found.error).__name__}: {str(found.error)[:300]}")
        elif "\n" in found.error.message or len(found.error.message) > 4000:
            problems.append(f"{title}: a message of {len(found.error.message)} characters or several lines")
        if found.seconds >= case.seconds:
            problems.append(f"{title}: took {found.seconds:.3f} s")
        if found.grown >= MOST_BYTES:
            problems.append(f"{title}: grew by {found.grown >> 20} MiB")
        problems += [f"{title}: {event}" for event in found.events]
        if canary.exists():
            problems.append(f"{title}: ran code from the checkpoint")
            canary.unlink()
    return problems


def main(folder: Path, formats: list[str], *, is_quick: bool) -> None:
    """Look at every case, or at a sixth of the slow ones and all others; and tell."""
    warnings.simplefilter("ignore")
    folder = folder.resolve()
    canary = folder / "canary"
    hostile_torch.CANARY = canary
    cases: list[Case] = []
    if "native" in formats:
        cases += native_cases(folder)
    if "torch" in formats:
        cases += torch_cases(folder)
    if "folder" in formats:
        cases += folder_cases()
    if "pt" in formats:
        cases += pt_cases(folder)
    if is_quick:
        slow = [case for case in cases if case.seconds == SLOW_SECONDS]
        cases = [case for case in cases if case not in slow or case in slow[::6]]
    # Whatever is imported, allocated or started at the first look is there afterwards; names in archives may need this.
    codecs.lookup("cp437")
    for case in cases:
        if case.name.endswith("honest"):
            case.make(folder / "case")
            for look in (case.looks or NATIVE_LOOKS).values():
                look(folder / "case")
            shutil.rmtree(folder / "case")
    watch.install()
    limit = _virtual_bytes() + (16 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    signal.signal(signal.SIGALRM, _hangs)
    for case in cases:
        if not case.looks or case.name.endswith("honest"):
            continue
        path = folder / "case"
        signal.alarm(_HANGS_S)
        try:
            case.make(path)
            problems = problems_of(case, path, canary)
        except Exception as error:
            problems = [f"the case itself failed: {type(error).__name__}: {error}"]
        finally:
            signal.alarm(0)
            for each in (path, folder / "outside", folder / "other"):
                shutil.rmtree(each, ignore_errors=True)
                each.unlink(missing_ok=True)
        print(json.dumps({"name": case.name, "looks": len(case.looks), "problems": problems}), flush=True)


def _hangs(number: int, frame: object) -> None:
    raise TimeoutError("it hangs")


def _virtual_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    formats = [argument for argument in sys.argv[2:] if argument != "--quick"]
    main(Path(sys.argv[1]), formats or ["native", "torch", "folder", "pt"], is_quick="--quick" in sys.argv)
