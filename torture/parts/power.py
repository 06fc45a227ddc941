"""A power cut at every call of a save that changes the file system, on ext4 and xfs.

The file systems are images on loop devices. The cut is the ioctl that stops them without writing anything more, log
included; then they are mounted again, which recovers from their journals, as after a crash.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from torture import exports, libraries, saves, shim, stepping, torch_dcp
from torture.crew import Case, Child
from torture.part import Options, PartResult
from torture.shim import Action, Fault, armed, counts

NAME = "power"
IN_SLICES = True
IMAGE_BYTES = {"ext4": 32 << 20, "xfs": 300 << 20}
MAKE = {"ext4": ["-E", "lazy_itable_init=0,lazy_journal_init=0", "-J", "size=4"], "xfs": []}
_SHAPES = ("small", "blob")
_AFTER_RETURN = 0


def run(options: Options) -> PartResult:
    """Count the calls of each save, then cut the power at each of them and right after it has returned."""
    reason = why_not()
    if reason is not None:
        return _result(skipped=reason)
    systems = [system for system in IMAGE_BYTES if shutil.which(f"mkfs.{system}")]
    notes = [f"{system}: skipped, there is no mkfs.{system}" for system in IMAGE_BYTES if system not in systems]
    shapes = _SHAPES[:1] if options.quick else _SHAPES
    modes = (
        "fresh",
        "replacing",
        *saves.TORCH_FORMAT_MODES[:2],
        *saves.ACROSS_MODES,
        *saves.EXPORT_MODES,
        *stepping.MODES,
    )
    plain: list[Case] = [
        {"folder": str(options.folder), "system": system, "mode": mode, "shape": shape, "library": library}
        for system in systems
        for mode in modes
        for shape, library in [*((shape, "holdfast") for shape in shapes), ("small", "torch")]
        if (library == "holdfast" or mode in (*saves.MODES, stepping.RETIRE))
        and (shape == "small" or mode not in stepping.MODES)
    ]
    cases = [
        {**case, "number": number, "action": int(action)}
        for case, outcome in options.crew.each(count_calls, plain)
        for number in range(outcome["calls"] + 1)
        for action in ((Action.CUT_BEFORE, Action.CUT_AFTER) if number else (Action.CUT_BEFORE,))
    ]
    cases = options.share_of(cases)
    if options.quick:
        cases = random.Random(options.seed).sample(cases, min(60, len(cases)))
    violations: list[str] = []
    points: Counter[str] = Counter()
    torch_problems: Counter[str] = Counter()
    for done, (case, outcome) in enumerate(options.crew.each(cut_at, cases), start=1):
        options.progress(done, len(cases))
        points[case["library"]] += 1
        problem = outcome.get("problem") or outcome.get("failure")
        if problem and case["library"] == "torch" and "failure" not in outcome:
            torch_problems[problem] += 1
        elif problem:
            moment = f"{Action(case['action']).name} call {case['number']}" if case["number"] else "after it returned"
            violations.append(
                f"{case['library']}, {case['system']}, {case['mode']}, {case['shape']}, {moment}: {problem}"
            )
    return _result(
        injected=points["holdfast"],
        violations=violations,
        notes=notes,
        systems=systems,
        torch=torch_dcp.in_words(torch_problems, points["torch"]) if points["torch"] else None,
    )


def _result(
    *,
    injected: int = 0,
    violations: list[str] | None = None,
    notes: list[str] | None = None,
    torch: str | None = None,
    skipped: str | None = None,
    systems: Sequence[str] = tuple(IMAGE_BYTES),
) -> PartResult:
    return PartResult(
        fault="power cut at every file-changing call of a save, native, in torch's format, and of one over the other, "
        f"of an export, and of what is done to the steps of a run ({'; '.join(stepping.MODES)}), "
        f"{' and '.join(systems)}",
        must_hold="nothing torn visible, nothing acknowledged lost, the next save succeeds",
        injected=injected,
        required=200,
        violations=violations or [],
        notes=notes or [],
        torch=torch,
        skipped=skipped,
    )


def why_not() -> str | None:
    """Why the power cannot be cut here; None where it can."""
    if os.geteuid() != 0:
        return "only root can mount file systems"
    if shutil.which("mkfs.ext4") is None:
        return "there is no mkfs.ext4"
    with tempfile.TemporaryDirectory() as folder:
        try:
            with Image(Path(folder), "ext4") as disk, disk.mounted():
                return None
        except subprocess.CalledProcessError as error:
            return f"no file system can be mounted: {error.stderr.decode().strip()}"


class Image:
    """A new file system in ``folder``; ``mounted()`` is where it is while the block lasts."""

    def __init__(self, folder: Path, system: str) -> None:
        self._file, self._mount = folder / "image", folder / "mount"
        self._system = system

    def __enter__(self) -> Image:
        self._mount.mkdir(parents=True)
        with open(self._file, "wb") as file:
            file.truncate(IMAGE_BYTES[self._system])
        _command(f"mkfs.{self._system}", "-q", *MAKE[self._system], str(self._file))
        return self

    def __exit__(self, *details: object) -> None:
        shutil.rmtree(self._file.parent)

    @contextlib.contextmanager
    def mounted(self) -> Iterator[Path]:
        """Where the file system is mounted, until the end of the block."""
        _command("mount", "-o", "loop", str(self._file), str(self._mount))
        try:
            yield self._mount
        finally:
            _command("umount", str(self._mount))


def _command(*words: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    subprocess.run(words, check=True, capture_output=True, env=environment)


def count_calls(*, folder: str, system: str, mode: str, shape: str, library: str) -> Case:
    """How many calls a save makes when nothing happens."""
    with Image(Path(folder) / f"count-{os.getpid()}", system) as disk, disk.mounted() as mount:
        path = _prepare(mount, mode, shape, library)

        def child() -> int:
            with armed(mount, Fault()):
                libraries.save(path, mode, shape, library)
            return counts().calls

        return {"calls": Child(child).end().told}


def cut_at(*, folder: str, system: str, mode: str, shape: str, library: str, number: int, action: int) -> Case:
    """Cut the power at a call, or after the save has returned, and judge what is there after the next mount."""
    published = Path(folder) / f"published-{os.getpid()}"  # on another file system
    with Image(Path(folder) / f"cut-{os.getpid()}", system) as disk:
        with disk.mounted() as mount:
            path = _prepare(mount, mode, shape, library)

            def child() -> None:
                with armed(mount, Fault(action=Action(action), number=number)):
                    libraries.save(path, mode, shape, library, published.touch)
                if number == _AFTER_RETURN:
                    shim.cut_power(mount)
                    os.kill(os.getpid(), signal.SIGKILL)

            end = Child(child).end()
        if end.signal != signal.SIGKILL or end.hung:
            return {"failure": f"the fault did not strike: {end}"}
        with disk.mounted():
            problem = libraries.problem_after(
                path, mode, shape, library, acknowledged=number == _AFTER_RETURN, published=published.exists()
            )
            published.unlink(missing_ok=True)
            return {"problem": problem}


def _prepare(mount: Path, mode: str, shape: str, library: str) -> Path:
    """Where to save; version 1 is there if it is to be replaced, and nothing but its own save has made it durable."""
    path = mount / "run" / "checkpoint"
    if mode in stepping.MODES:
        stepping.prepare(path, mode, library)
    elif saves.BEFORE[mode] is not None:
        if library == "torch":
            torch_dcp.save(path, 1)
            os.sync()  # as if it had been there for long: otherwise it would be lost at any cut
        else:
            saves.save(path, saves.first_mode(mode), shape, version=1)
            if mode in saves.EXPORT_MODES:
                exports.add_own(path)
                os.sync()  # what is the user's is not for an export to have durable
    return path
