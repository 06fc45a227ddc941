"""Bugs to be seeded: one promise each, broken by a change to the source, and the tests that have to notice.

Some are written by hand, as text and replacement, so that a source that has moved on fails loudly. The rest is made
from the source: every check that refuses a file or a plan, an ``if`` with nothing but a ``raise``, turned off.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

_IO = ("tests/unit/io/test_posix.py", "tests/unit/io/test_output_file.py")
_PUBLISH = ("tests/unit/native/test_publish.py",)
_CRASH = ("tests/faults/test_torture_samples.py::test_crash_states",)
_FORKS = ("tests/faults/test_forked_children.py",)
_FORMATS = ("tests/unit/test_two_formats.py",)
_INTERRUPTS = ("tests/faults/test_interrupts.py",)
_DAMAGE = ("tests/faults/test_damaged_files.py",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """``text``, which is once in ``file`` (under src/holdfast), becomes ``replacement``; one of ``tests`` must fail."""

    name: str
    file: str
    text: str
    replacement: str
    tests: tuple[str, ...]

    def changed(self, source: Path) -> str:
        """The code of the file with the bug in it; ValueError unless it fits exactly once."""
        code = (source / "holdfast" / self.file).read_text()
        if code.count(self.text) != 1:
            raise ValueError(f"{self.name}: the text is {code.count(self.text)} times in {self.file}: {self.text!r}")
        return code.replace(self.text, self.replacement)

    def seed(self, source: Path) -> None:
        """Put the bug into the copy of the package at ``source``."""
        (source / "holdfast" / self.file).write_text(self.changed(source))


BY_HAND = (
    # Durability: each fsync, each fsync of a directory, and their order.
    Bug(
        name="no fsync at all",
        file="_io/posix.py",
        text="        os.fsync(descriptor)\n",
        replacement="        pass\n",
        tests=_CRASH,
    ),
    Bug(
        name="no fsync of the manifest",
        file="_io/posix.py",
        text="        sync_file(made[0], path)\n",
        replacement="",
        tests=_CRASH,
    ),
    Bug(
        name="no fsync of the index",
        file="_io/locks.py",
        text="            posix.sync_file(file.descriptor, path)\n",
        replacement="",
        tests=_CRASH,
    ),
    Bug(
        name="no fsync of data files",
        file="_io/direct.py",
        text="posix.sync_file(self._file.descriptor, self.path)\n",
        replacement="pass\n",
        tests=_CRASH,
    ),
    Bug(
        name="no fsync of the directory by the writers",
        file="_native/writer.py",
        text="            posix.sync_directory(self.path)\n",
        replacement="            pass\n",
        tests=_PUBLISH,
    ),
    Bug(
        name="no fsync of the directory before publishing",
        file="_native/publish.py",
        text="            posix.sync_directory(directory)\n            if overwrite:",
        replacement="            if overwrite:",
        tests=_CRASH,
    ),
    Bug(
        name="no fsync of the directory after publishing",
        file="_native/publish.py",
        text="    posix.sync_directory(directory)\n    turn.remove_other()\n",
        replacement="    turn.remove_other()\n",
        tests=_CRASH,
    ),
    Bug(
        name="no fsync of the parents of new directories",
        file="_io/posix.py",
        text="        sync_directory(os.path.dirname(directory) or os.curdir)\n",
        replacement="",
        tests=_CRASH,
    ),
    Bug(
        name="old files removed before the new name is durable",
        file="_native/publish.py",
        text="    posix.sync_directory(directory)\n    turn.remove_other()\n    for name in replaced:",
        replacement="    for name in replaced:\n        os.unlink(os.path.join(directory, name))\n"
        "    posix.sync_directory(directory)\n    turn.remove_other()\n    for name in ():",
        tests=_CRASH,
    ),
    Bug(
        name="a failed fsync is tried again",
        file="_io/posix.py",
        text="        os.fsync(descriptor)\n",
        replacement="        try:\n            os.fsync(descriptor)\n        except OSError:\n"
        "            os.fsync(descriptor)\n",
        tests=("tests/faults/test_torture_samples.py::test_short_transfers_and_failed_syncs", *_IO),
    ),
    Bug(
        name="a failed fsync is ignored",
        file="_io/posix.py",
        text="        os.fsync(descriptor)\n",
        replacement="        with contextlib.suppress(OSError):\n            os.fsync(descriptor)\n",
        tests=_IO,
    ),
    # The commit.
    Bug(
        name="overwrite=False replaces",
        file="_native/publish.py",
        text="            posix.link_new(staged, target)\n",
        replacement="            posix.replace(staged, target)\n",
        tests=_PUBLISH,
    ),
    Bug(
        name="an existing manifest is not noticed by link",
        file="_io/posix.py",
        text="            if not _same_file(source, target):\n",
        replacement="            if False:\n",
        tests=_IO,
    ),
    Bug(
        name="files are created over others",
        file="_io/posix.py",
        text="os.O_CREAT | os.O_EXCL | os.O_WRONLY",
        replacement="os.O_CREAT | os.O_WRONLY",
        tests=_IO,
    ),
    Bug(
        name="links are followed",
        file="_io/posix.py",
        text="os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK",
        replacement="os.O_RDONLY | os.O_NONBLOCK",
        tests=_IO,
    ),
    Bug(
        name="a published checkpoint is taken away by a late failure",
        file="_native/publish.py",
        text="        if not may_be_published(directory, attempt):\n",
        replacement="        if True:\n",
        tests=(*_PUBLISH, "tests/faults/test_storage_failures.py"),
    ),
    Bug(
        name="a failed save leaves its index",
        file="_native/publish.py",
        text="                for path in itertools.takewhile(lambda path: path != taken, written):\n",
        replacement="                for path in ():\n",
        tests=(*_PUBLISH, "tests/faults/test_storage_failures.py"),
    ),
    # Children.
    Bug(
        name="a child ends the saves of its parent",
        file="_native/publish.py",
        text="        self._is_inherited = True\n",
        replacement="        pass\n",
        tests=_FORKS,
    ),
    Bug(
        name="a child keeps the locks of its parent",
        file="_io/locks.py",
        text="        self._is_inherited = True\n        self.discard()\n",
        replacement="        self._is_inherited = True\n",
        tests=_FORKS,
    ),
    Bug(
        name="a child writes to the memory of its parent",
        file="_process.py",
        text="    _inherited[id(holder)] = holder",
        replacement="    pass",
        tests=_FORKS,
    ),
    # One format in the place of the other.
    Bug(
        name="no note about two formats",
        file="_native/publish.py",
        text="        posix.write_new(self.note, _note(self._own, digests))\n",
        replacement="        pass\n",
        tests=_FORMATS,
    ),
    Bug(
        name="files of the other format removed before its head",
        file="_native/publish.py",
        text="        for head in self._heads:\n",
        replacement="        for name in self._files:\n            posix.remove(os.path.join(self._directory, name))\n"
        "        for head in self._heads:\n",
        tests=_FORMATS,
    ),
    Bug(
        name="the other format is left where it is",
        file="_native/publish.py",
        text="        if not self._heads:\n",
        replacement="        if True:\n",
        tests=_FORMATS,
    ),
    Bug(
        name="the native format counts, whatever is beside it",
        file="_native/publish.py",
        text="        if len(found) < 2:\n",
        replacement="        if True:\n",
        tests=_FORMATS,
    ),
    Bug(
        name="savers publish without taking turns",
        file="_native/publish.py",
        text="        self._is_alone = self._lock.acquire()\n",
        replacement="        self._is_alone = True\n",
        tests=_FORMATS,
    ),
    # Interrupts.
    Bug(
        name="what was opened is kept in a second step",
        file="_process.py",
        text="    return next(map(OpenDescriptor, opening))\n",
        replacement="    number = next(opening)\n    return OpenDescriptor(number)\n",
        tests=_INTERRUPTS,
    ),
    Bug(
        name="the collector's pause is ended once",
        file="_state/modes.py",
        text="        finally:\n            pause.end()\n",
        replacement="        finally:\n            pass\n",
        tests=_INTERRUPTS,
    ),
    Bug(
        name="a snapshot that the caller may have changed is published",
        file="_staging/jobs.py",
        text="        if self._handle.is_given_up and not self._handle.is_staged.is_set():\n",
        replacement="        if False:\n",
        tests=_INTERRUPTS,
    ),
    # Digests.
    Bug(
        name="the manifest's digest is not compared",
        file="_native/manifest.py",
        text="    if to_hex(digest(undigested)).encode() != end[1]:\n",
        replacement="    if False:\n",
        tests=("tests/unit/native/test_manifest.py",),
    ),
    Bug(
        name="the index's digest is not compared",
        file="_native/catalog.py",
        text="    if len(data) != entry.bytes or to_hex(digest(data)) != entry.digest:\n",
        replacement="    if len(data) != entry.bytes:\n",
        tests=_DAMAGE,
    ),
    Bug(
        name="blocks read from the page cache are not verified",
        file="_engine/read.py",
        text="is_intact(self._boxes[place], start, view, expected):\n",
        replacement="is_intact(self._boxes[place], start, view, expected) and False:\n",
        tests=(*_DAMAGE, "tests/unit/native/test_fetch.py"),
    ),
    Bug(
        name="blocks read through a slab are not verified",
        file="_engine/read.py",
        text="is_intact(self._boxes[place], start, view[at : at + nbytes], expected):\n",
        replacement="is_intact(self._boxes[place], start, view[at : at + nbytes], expected) and False:\n",
        tests=(*_DAMAGE, "tests/unit/native/test_fetch.py", "tests/unit/test_checkpoint_open.py"),
    ),
    Bug(
        name="blocks moved to plain memory are not verified",
        file="_engine/read.py",
        text="is_intact(box, start, view[at : at + nbytes], wanted):\n",
        replacement="is_intact(box, start, view[at : at + nbytes], wanted) and False:\n",
        tests=(*_DAMAGE, "tests/unit/native/test_fetch.py"),
    ),
    # Coverage and bounds that are no plain if and raise.
    Bug(
        name="a save is not checked to be whole",
        file="_native/merge.py",
        text='        check_index(index, files=files, tensors=entries, path="the new checkpoint")\n',
        replacement="        pass\n",
        tests=("tests/unit/native/test_merge.py",),
    ),
    Bug(
        name="a loaded index is not checked",
        file="_native/catalog.py",
        text="    check_index(index, files=manifest.files, tensors=manifest.tensors, path=index_path)\n",
        replacement="",
        tests=("tests/unit/native/test_catalog.py", *_DAMAGE),
    ),
    Bug(
        name="the plan of a save is not checked to tile",
        file="_save_plan/from_plans.py",
        text="    _check_tiling(rows, heads)\n",
        replacement="",
        tests=("tests/unit/plan/test_global_plan.py",),
    ),
    Bug(
        name="the metadata of other storage is not checked to tile",
        file="planner_helpers.py",
        text="    for key, detail in tiling_faults(metadata):\n",
        replacement="    for key, detail in ():\n",
        tests=("tests/faults/test_hostile_findings.py", "tests/compat/test_torch_beside_ours.py"),
    ),
    Bug(
        name="replicas are not compared",
        file="_save_plan/from_plans.py",
        text="    looked = np.flatnonzero(said)\n",
        replacement="    looked = np.flatnonzero(said)[:0]\n",
        tests=("tests/unit/plan/test_global_plan.py",),
    ),
    Bug(
        name="keys may take any time",
        file="_values/deadline.py",
        text="        if self._left_s < 0:\n",
        replacement="        if False:\n",
        tests=("tests/unit/values/test_effort.py",),
    ),
    Bug(
        name="one key after the other is allowed the time of many",
        file="_values/deadline.py",
        text="            self.count(len(some) * KEY_S)\n",
        replacement="            self.count(_STEP * KEY_S)\n",
        tests=("tests/unit/values/test_effort.py",),
    ),
    Bug(
        name="containers may be in any number of places",
        file="_state/nested.py",
        text="        if total > MAX_REPEATED_ENTRIES and total > MAX_REPETITION * self._entries:\n",
        replacement="        if False:\n",
        tests=("tests/unit/state/test_containers.py",),
    ),
    Bug(
        name="what may differ is written by several ranks",
        file="_save_plan/together.py",
        text="            if not to_lowest_rank and self.keys[number] not in self.lenient and ",
        replacement="            if not to_lowest_rank and ",
        tests=("tests/unit/plan/test_global_plan.py",),
    ),
    Bug(
        name="targets with one memory are filled at once",
        file="default_planner/load_planner.py",
        text="        for tie in ties_of(self._memory, others, self.state_dict):\n",
        replacement="        for tie in ties_of({}, [], ()):\n",
        tests=("tests/unit/test_tied_targets.py",),
    ),
    Bug(
        name="autograd is not told of what is loaded",
        file="_state/tensor_bytes.py",
        text="        torch.autograd.graph.increment_version(tensor)\n",
        replacement="",
        tests=("tests/unit/test_save_load_autograd.py",),
    ),
    Bug(
        name="modules are not told with which versions was saved",
        file="_loader.py",
        text="        loading.tell_versions(report)\n",
        replacement="",
        tests=("tests/unit/test_save_load_versions.py",),
    ),
    Bug(
        name="a file of any size is read whole",
        file="_io/posix.py",
        text="            while total <= limit and size <= limit:\n",
        replacement="            while True:\n",
        tests=_IO,
    ),
    # The state of optimizers that have none yet.
    Bug(
        name="state of a sharded parameter made whole",
        file="default_planner/empty_targets.py",
        text="parameter.device if name in others else parameter for",
        replacement="parameter.device for",
        tests=("tests/distributed/test_fresh_optimizers.py::test_each_rank_reads_its_shard_alone",),
    ),
    Bug(
        name="what cannot be placed passed over",
        file="default_planner/empty_targets.py",
        text="            refused.append(",
        replacement="            str(",
        tests=("tests/unit/test_empty_containers.py",),
    ),
)

CHECKED = {
    "_native/manifest.py": ("tests/unit/native/test_manifest.py", "tests/unit/native/test_stored_paths.py"),
    "_native/index.py": ("tests/unit/native/test_index.py",),
    "_native/header.py": ("tests/unit/native/test_header.py",),
    "_native/catalog.py": (
        "tests/unit/native/test_catalog.py",
        "tests/unit/native/test_environment_errors.py",
        *_DAMAGE,
    ),
    "_native/paths.py": ("tests/unit/native/test_stored_paths.py",),
    "_native/merge.py": ("tests/unit/native/test_merge.py",),
    "_io/direct.py": ("tests/unit/io",),
    "_io/posix.py": ("tests/unit/io",),
    "_native/publish.py": (*_PUBLISH, "tests/faults/test_storage_failures.py"),
    "_save_plan/from_plans.py": ("tests/unit/plan/test_global_plan.py", "tests/unit/plan/test_local_plan.py"),
}
"""The files whose checks are turned off one after the other, and the tests that have to notice."""

HARMLESS: dict[str, str] = {
    "_native/manifest.py: version < 1": "the version is compared again when the entries are checked",
    "_native/manifest.py: manifest.format != FORMAT or manifest.version != VERSION": "the frame was checked before",
    "_io/posix.py: current == missing[-1]": "only where neither / nor the current directory exists",
}
"""Checks that can be turned off without harm, by name, and why: another one says no a moment later."""


def all_bugs(source: Path) -> list[Bug]:
    """Every bug that can be seeded into the package at ``source``; ValueError where the lists have grown stale."""
    made = [bug for file, tests in CHECKED.items() for bug in _checks(source, file, tests)]
    names = {bug.name for bug in made}
    stale = HARMLESS.keys() - names
    if stale:
        raise ValueError(f"these checks are listed as harmless, and are not there: {sorted(stale)}")
    for bug in (*BY_HAND, *made):
        ast.parse(bug.changed(source))
    return [*BY_HAND, *(bug for bug in made if bug.name not in HARMLESS)]


def _checks(source: Path, file: str, tests: tuple[str, ...]) -> list[Bug]:
    """A bug for each ``if`` of ``file`` that only raises: the condition is never true."""
    code = (source / "holdfast" / file).read_text()
    lines = code.splitlines(keepends=True)
    found: list[Bug] = []
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.If) or not isinstance(node.body[-1], ast.Raise):
            continue
        begin, end = node.lineno - 1, node.body[0].lineno - 1
        text = "".join(lines[begin : node.body[-1].end_lineno])
        head = lines[begin][: node.col_offset] + ("elif" if lines[begin].lstrip().startswith("elif") else "if")
        body = "".join(lines[end : node.body[-1].end_lineno])
        condition = " ".join((ast.get_source_segment(code, node.test) or "").split())
        if code.count(text) != 1:
            raise ValueError(f"{file}:{node.lineno}: the check is there more than once: {text!r}")
        name = f"{file}: {condition}"
        same = sum(bug.name.startswith(name) for bug in found)
        name += f" ({same + 1})" if same else ""
        found.append(Bug(name=name, file=file, text=text, replacement=f"{head} False:\n{body}", tests=tests))
    if not found:
        raise ValueError(f"{file} has no checks to turn off")
    return found
