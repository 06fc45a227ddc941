"""Links, pipes and devices planted where files are made and read; permissions, umasks, read-only places."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import holdfast
from holdfast._native.sweep import sweep
from holdfast._native.verify import verify_checkpoint
from torture.crew import Child
from torture.part import Options, PartResult
from torture.samples import get_ready_to_fork
from torture.saves import Torn, found_version, save, state_of

NAME = "permissions"
OTHER_USER = 65534
ATTEMPT = "planted"
MADE = {
    "data": f"data-{ATTEMPT}-0-0.safetensors",
    "index": f"index-{ATTEMPT}.safetensors",
    "staged": f"manifest-{ATTEMPT}.tmp",
}
HANGS_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """``prepare`` gets a directory for itself, with ``outside`` beside it; then ``act`` must be refused, or not.

    ``keeps`` is the version that must still be there afterwards; None when nothing may be visible.
    """

    name: str
    prepare: Callable[[Path], object]
    act: Callable[[Path], object]
    refused: bool = True
    keeps: int | None = None
    user: int | None = None
    check: Callable[[Path], str | None] = lambda path: None


def _save(path: Path) -> None:
    save(path / "checkpoint", "replacing", version=2, attempt=ATTEMPT)


def _save_fresh(path: Path) -> None:
    save(path / "checkpoint", "fresh", version=2, attempt=ATTEMPT)


def _load(path: Path) -> None:
    holdfast.load(path / "checkpoint")


def _verify(path: Path) -> None:
    report = verify_checkpoint(path / "checkpoint")
    if not report.ok:
        raise holdfast.CorruptError(f"damaged: {report.damaged_files}", path=path / report.damaged_files[0])


def _old(path: Path) -> None:
    save(path / "checkpoint", "fresh", version=1, attempt="old")


PLANTS: dict[str, Callable[[Path, Path], object]] = {
    "a link to a file outside": lambda place, outside: place.symlink_to(outside / "file"),
    "a link to nothing outside": lambda place, outside: place.symlink_to(outside / "new"),
    "a link to a directory outside": lambda place, outside: place.symlink_to(outside),
    "a hard link to a file outside": lambda place, outside: os.link(outside / "file", place),
    "a pipe": lambda place, outside: os.mkfifo(place),
    "a directory": lambda place, outside: place.mkdir(),
    "a device": lambda place, outside: os.mknod(place, 0o020666, os.makedev(1, 3)),
}


def _planted(name: str, plant: Callable[[Path, Path], object], *, old: bool) -> Callable[[Path], object]:
    def prepare(path: Path) -> None:
        if old:
            _old(path)
        else:
            (path / "checkpoint").mkdir()
        place = path / "checkpoint" / name
        if os.path.lexists(place):
            place.unlink()
        plant(place, path / "outside")

    return prepare


def _making() -> Iterator[Case]:
    """Something has the name of each file that a save makes."""
    for title, plant in PLANTS.items():
        for kind, name in MADE.items():
            yield Case(
                name=f"{title} has the name of the {kind} file",
                prepare=_planted(name, plant, old=True),
                act=_save,
                keeps=1,
            )
        yield Case(
            name=f"{title} has the name of the manifest, overwrite off",
            prepare=_planted("manifest.json", plant, old=False),
            act=_save_fresh,
        )


def _reading() -> Iterator[Case]:
    """Something else is there in place of each file that a load reads."""
    for title, plant in PLANTS.items():
        for name in ("manifest.json", "index-old.safetensors", "data-old-0-0.safetensors"):
            for act in (_load, _verify):
                verb = act.__name__.strip("_")
                yield Case(name=f"{verb}: {title} in place of {name}", prepare=_planted(name, plant, old=True), act=act)


def _replaced_link(path: Path) -> str | None:
    manifest = path / "checkpoint" / "manifest.json"
    return "the link is still there" if manifest.is_symlink() else None


def _parents() -> Iterator[Case]:
    yield Case(
        name="the manifest is a link to a file outside, overwrite on: the link is replaced",
        prepare=_planted("manifest.json", PLANTS["a link to a file outside"], old=True),
        act=_save,
        refused=False,
        keeps=2,
        check=_replaced_link,
    )
    yield Case(
        name="the checkpoint is a link to nothing",
        prepare=lambda path: (path / "checkpoint").symlink_to(path / "outside" / "new"),
        act=_save,
    )
    yield Case(name="the checkpoint is a file", prepare=lambda path: (path / "checkpoint").write_text("x"), act=_save)
    yield Case(name="the checkpoint is a pipe", prepare=lambda path: os.mkfifo(path / "checkpoint"), act=_save)
    yield Case(
        name="a parent is a file",
        prepare=lambda path: (path / "parent").write_text("x"),
        act=lambda path: save(path / "parent" / "checkpoint", "fresh", version=2),
    )
    yield Case(
        name="a parent is a link to itself",
        prepare=lambda path: (path / "parent").symlink_to("parent"),
        act=lambda path: save(path / "parent" / "checkpoint", "fresh", version=2),
    )
    yield Case(
        name="a name too long",
        prepare=lambda path: None,
        act=lambda path: save(path / ("n" * 300), "fresh", version=2),
    )
    yield Case(name="a NUL in the path", prepare=lambda path: None, act=lambda path: save(path / "a\0b", "fresh"))


def _modes(**modes: int) -> Callable[[Path], object]:
    """Version 1, with these modes: of the directory, its parent, or files by the beginning of their names."""

    def prepare(path: Path) -> None:
        _old(path)
        for file in (path / "checkpoint").iterdir():
            for begin, mode in modes.items():
                if file.name.startswith(begin):
                    file.chmod(mode)
        if "directory" in modes:
            (path / "checkpoint").chmod(modes["directory"])
        if "parent" in modes:
            path.chmod(modes["parent"])

    return prepare


def _users() -> Iterator[Case]:
    """What another user may not do."""
    user = OTHER_USER
    yield Case(name="uid: directory not writable", prepare=_modes(directory=0o755), act=_save, keeps=1, user=user)
    yield Case(name="uid: directory not searchable", prepare=_modes(directory=0o766), act=_save, keeps=1, user=user)
    yield Case(name="uid: load, not searchable", prepare=_modes(directory=0o766), act=_load, keeps=1, user=user)
    yield Case(name="uid: load, manifest not readable", prepare=_modes(manifest=0o600), act=_load, keeps=1, user=user)
    yield Case(name="uid: load, index not readable", prepare=_modes(index=0o600), act=_load, keeps=1, user=user)
    yield Case(name="uid: load, data not readable", prepare=_modes(data=0o600), act=_load, keeps=1, user=user)
    yield Case(name="uid: verify, data not readable", prepare=_modes(data=0o600), act=_verify, keeps=1, user=user)
    yield Case(
        name="uid: parent not writable",
        prepare=lambda path: path.chmod(0o755),
        act=_save,
        user=user,
    )
    yield Case(
        name="uid: sticky directory with another's manifest",
        prepare=_modes(directory=0o1777),
        act=_save,
        keeps=1,
        user=user,
    )
    yield Case(
        name="uid: directory may be written and not read",
        prepare=_modes(directory=0o733),
        act=_save,
        user=user,
        keeps=1,
    )
    yield Case(
        name="uid: everything readable",
        prepare=_modes(directory=0o755),
        act=_load,
        refused=False,
        keeps=1,
        user=user,
    )
    yield Case(
        name="uid: sweep of what may not be removed",
        prepare=_dead(0o755),
        act=_sweep_all,
        user=user,
        keeps=1,
        check=lambda path: None if _dead_file(path).exists() else "it is gone",
    )
    yield Case(
        name="uid: sweep of what may not be opened",
        prepare=_dead(0o777, 0o600),
        act=_sweep_unknown,
        refused=False,
        user=user,
        keeps=1,
        check=lambda path: None if _dead_file(path).exists() else "it is gone",
    )


def _dead_file(path: Path) -> Path:
    return path / "checkpoint" / "data-dead-0-0.safetensors"


def _dead(directory_mode: int, file_mode: int = 0o666) -> Callable[[Path], object]:
    def prepare(path: Path) -> None:
        _old(path)
        _dead_file(path).write_bytes(b"dead")
        _dead_file(path).chmod(file_mode)
        (path / "checkpoint").chmod(directory_mode)

    return prepare


def _sweep_all(path: Path) -> None:
    report = sweep(path / "checkpoint", delete=True)
    if report.problems:
        raise holdfast.StorageError(report.problems[0], path=path / "checkpoint")


def _sweep_unknown(path: Path) -> None:
    (leftover,) = sweep(path / "checkpoint", delete=True).leftovers
    if leftover.verdict != "unknown":
        raise RuntimeError(f"the sweep says {leftover.verdict}")


def _umask(mask: int, user: int | None = None) -> Case:
    def act(path: Path) -> None:
        os.umask(mask)
        save(path / "checkpoint", "fresh", version=2, attempt=ATTEMPT)

    def check(path: Path) -> str | None:
        modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in (path / "checkpoint").iterdir()}
        wrong = {name: oct(mode) for name, mode in modes.items() if mode != 0o666 & ~mask}
        return f"modes {wrong}" if wrong else None

    return Case(
        name=f"umask {mask:03o}",
        prepare=lambda path: path.chmod(0o777),
        act=act,
        refused=False,
        keeps=2,
        check=check,
        user=user,
    )


def _no_rights(path: Path) -> None:
    os.umask(0o777)
    save(path / "checkpoint", "fresh", version=2)


@contextmanager
def _mounted(path: Path) -> Iterator[bool]:
    """A small file system at ``path``; False where that may not be done."""
    path.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "holdfast-torture", str(path)]
    if subprocess.run(command, capture_output=True).returncode:
        yield False
        return
    try:
        yield True
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def _read_only_mount(folder: Path) -> list[str]:
    """What is wrong with a save to, a load from and a sweep of a file system that became read-only."""
    problems: list[str] = []
    with _mounted(folder / "mount") as is_there:
        if not is_there:
            return ["skipped"]
        path = folder / "mount" / "checkpoint"
        save(path, "fresh", version=1)
        _left = path / "data-dead-0-0.safetensors"
        _left.write_bytes(b"dead")
        subprocess.run(["mount", "-o", "remount,ro", str(folder / "mount")], check=True)
        for place, mode in ((path, "replacing"), (folder / "mount" / "new", "fresh")):
            try:
                save(place, mode)
                problems.append("a save to a read-only file system succeeded")
            except holdfast.StorageError as error:
                problems += [] if error.path and "Read-only" in error.message else [f"read-only: {error}"]
        report = sweep(folder / "mount", delete=True)
        problems += [] if _left.exists() and report.removed_files == 0 else ["a sweep of a read-only file system"]
        problems += [] if found_version(path) == 1 else ["a load from a read-only file system"]
    return problems


def _snapshot(path: Path) -> dict[str, Any]:
    return {
        str(file.relative_to(path)): (file.lstat().st_mode, file.read_bytes() if file.is_file() else None)
        for file in sorted(path.rglob("*"))
    }


def problems_of(case: Case, folder: Path) -> list[str]:
    """What is wrong with what comes of ``case``."""
    path = folder / "case"
    path.mkdir(mode=0o777)
    path.chmod(0o777)
    outside = path / "outside"
    outside.mkdir()
    (outside / "file").write_text("precious")
    case.prepare(path)
    before = _snapshot(outside)
    files_before = _names(path / "checkpoint")
    end = Child(lambda: _act(case, path)).end(timeout_s=HANGS_S)
    problems: list[str] = []
    if end.told is None:
        problems.append("it hangs" if end.hung else f"it died of {end.signal}")
    elif case.refused:
        problems += end.told["problems"] or ([] if end.told["error"] else ["it was not refused"])
    elif end.told["error"]:
        problems.append(end.told["error"])
    if _snapshot(outside) != before:
        problems.append("something outside was changed")
    if case.refused and _names(path / "checkpoint") != files_before:
        problems.append(f"it left {sorted(_names(path / 'checkpoint') ^ files_before)}")
    # As root, for whom no mode counts.
    version: object = None
    with suppress(holdfast.CheckpointError, Torn):
        version = found_version(path / "checkpoint")
    if case.keeps is not None and version != case.keeps:
        problems.append(f"version {version} is there instead of {case.keeps}")
    wrong = case.check(path)
    shutil.rmtree(path)
    return problems if wrong is None else [*problems, wrong]


def _names(path: Path) -> set[str]:
    return set(os.listdir(path)) if path.is_dir() else set()


def _act(case: Case, path: Path) -> dict[str, Any]:
    if case.user is not None:
        os.setgroups([])
        os.setgid(case.user)
        os.setuid(case.user)
    try:
        case.act(path)
    except (holdfast.StorageError, holdfast.CorruptError, holdfast.AlreadyPublishedError) as error:
        where = getattr(error, "path", None) or error.message
        is_named = str(path) in str(where) and "\n" not in error.message
        return {"error": str(error), "problems": [] if is_named else [f"not named: {error!r}"]}
    except BaseException as error:
        return {"error": repr(error), "problems": [f"a {type(error).__name__}: {error}"]}
    return {"error": None, "problems": []}


def run(options: Options) -> PartResult:
    """Every case, or every third."""
    if os.geteuid() != 0:
        return PartResult(
            fault="symlinks planted, permissions, read-only, umask, pipes",
            must_hold="refused, named, nothing written outside",
            injected=0,
            required=30,
            violations=[],
            skipped="it takes root to be another user",
        )
    get_ready_to_fork()
    options.folder.chmod(0o755)
    found_version_warm(options.folder)
    cases = [*_making(), *_reading(), *_parents(), *_users()]
    cases += [_umask(mask) for mask in (0o000, 0o022, 0o027, 0o077)]
    cases += [_umask(0o077, OTHER_USER)]
    cases.append(Case(name="umask 777", prepare=lambda path: path.chmod(0o777), act=_no_rights, user=OTHER_USER))
    if options.quick:
        cases = cases[options.seed % 3 :: 3]
    violations: list[str] = []
    for done, case in enumerate(cases, start=1):
        options.progress(done, len(cases) + 1)
        violations += [f"{case.name}: {problem}" for problem in problems_of(case, options.folder)]
    mount = _read_only_mount(options.folder)
    notes = ["no file system may be mounted here: the read-only one was left out"] if mount == ["skipped"] else []
    violations += [] if notes else mount
    return PartResult(
        fault="symlinks planted, permissions, read-only, umask, pipes and devices; a second uid",
        must_hold="refused, named, nothing written outside",
        injected=len(cases) + (0 if notes else 1),
        required=30,
        violations=violations,
        notes=notes,
    )


def found_version_warm(folder: Path) -> None:
    """Save and load once, so that children find everything imported."""
    holdfast.save(state_of(1), folder / "warm")
    found_version(folder / "warm")
