"""Bugs to be seeded: one promise each, broken by a change to one function, and the tests that have to notice.

A bug names a function and what is done to it: a call left out, a condition that never holds. Where the function or what
is to be changed in it is gone, the bug fails loudly. The rest is made from the source: every check that refuses a file
or a plan, an ``if`` that ends in a ``raise``, turned off.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

_IO = ("tests/unit/io/test_posix.py", "tests/unit/io/test_direct_output.py")
_PUBLISH = ("tests/unit/native/test_publish.py",)
_CRASH = ("tests/faults/test_torture_samples.py::test_crash_states",)
_FORKS = ("tests/faults/test_forked_children.py",)
_FORMATS = ("tests/unit/test_two_formats.py",)
_INTERRUPTS = ("tests/faults/test_interrupts.py",)
_DAMAGE = ("tests/faults/test_damaged_files.py",)
_DELETE = ("tests/unit/native/test_delete.py",)
_LISTING = ("tests/unit/steps/test_listing.py",)
_FOLLOWING = ("tests/unit/steps/test_following.py",)
_EXPORT = ("tests/unit/huggingface/test_export.py",)
_FOLDERS = ("tests/unit/huggingface/test_folders.py",)
_MAPPED = ("tests/unit/test_save_load_mapped.py", "tests/unit/mapping/test_mappings.py")
_CONVERTED = ("tests/unit/huggingface/test_mapped_folders.py",)
_STORES = ("tests/faults/test_torture_samples.py::test_object_stores",)

_COMMIT = "_native/store_commit.py:commit"

Change = Callable[[ast.AST], int]
"""Changes the code of a function in place; how many places it changed."""


class _Rewriting(ast.NodeTransformer):
    """Replaces every node for which ``rewrite`` has another; counts them."""

    def __init__(self, rewrite: Callable[[ast.AST], ast.AST | None]) -> None:
        self._rewrite = rewrite
        self.count = 0

    def visit(self, node: ast.AST) -> ast.AST:
        other = self._rewrite(node)
        if other is None:
            return self.generic_visit(node)
        self.count += 1
        return ast.copy_location(other, node)


def _rewritten(rewrite: Callable[[ast.AST], ast.AST | None]) -> Change:
    def change(function: ast.AST) -> int:
        rewriting = _Rewriting(rewrite)
        rewriting.generic_visit(function)
        return rewriting.count

    return change


def without(call: str) -> Change:
    """Statements that are just this call do nothing."""
    return _rewritten(lambda node: ast.Pass() if isinstance(node, ast.Expr) and _calls(node.value, call) else None)


def instead(text: str, other: str) -> Change:
    """The expression ``text`` is ``other``."""
    wanted = ast.unparse(ast.parse(text, mode="eval"))
    made = ast.parse(other, mode="eval").body

    def rewrite(node: ast.AST) -> ast.AST | None:
        return made if isinstance(node, ast.expr) and ast.unparse(node) == wanted else None

    return _rewritten(rewrite)


def never(mentioned: str) -> Change:
    """Conditions of ``if``, ``elif`` and ``while`` that mention this are False."""
    return _condition(mentioned, is_true=False)


def always(mentioned: str) -> Change:
    """Conditions of ``if``, ``elif`` and ``while`` that mention this are True."""
    return _condition(mentioned, is_true=True)


def statement(call: str, other: str) -> Change:
    """Statements that are just this call are the code ``other`` instead; ``CALL`` in it is the call itself."""

    def rewrite(node: ast.AST) -> ast.AST | None:
        if not isinstance(node, ast.Expr) or not _calls(node.value, call):
            return None
        block = ast.parse("if True:\n    pass").body[0]
        assert isinstance(block, ast.If)
        block.body = ast.parse(other.replace("CALL", ast.unparse(node.value))).body
        return block

    return _rewritten(rewrite)


def first(code: str) -> Change:
    """This code comes before all else."""

    def change(function: ast.AST) -> int:
        assert isinstance(function, ast.FunctionDef)
        function.body[:0] = ast.parse(code).body
        return 1

    return change


def _calls(node: ast.AST, call: str) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == call


def _condition(mentioned: str, *, is_true: bool) -> Change:
    def change(function: ast.AST) -> int:
        tests = [node for node in ast.walk(function) if isinstance(node, (ast.If, ast.While))]
        chosen = [node for node in tests if mentioned in ast.unparse(node.test)]
        for node in chosen:
            node.test = ast.Constant(is_true)
        return len(chosen)

    return change


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """``change`` done to ``function`` of the ``file`` (under src/holdfast); one of ``tests`` must fail."""

    name: str
    file: str
    function: str
    change: Change
    tests: tuple[str, ...]

    def changed(self, source: Path) -> ast.Module:
        """The file with the bug in it; ValueError where there is nothing to change."""
        tree = ast.parse((source / "holdfast" / self.file).read_text())
        if not self.change(dict(_functions(tree))[self.function]):
            raise ValueError(f"{self.name}: nothing of this kind is in {self.function} of {self.file}")
        return ast.fix_missing_locations(tree)

    def seed(self, source: Path) -> None:
        """Put the bug into the copy of the package at ``source``."""
        (source / "holdfast" / self.file).write_text(ast.unparse(self.changed(source)))


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Every function and method with its name, as ``Class.method`` or ``function.inner``; the module itself is ""."""
    waiting: list[tuple[str, ast.AST]] = [("", tree)]
    while waiting:
        name, node = waiting.pop()
        if not isinstance(node, ast.ClassDef):
            yield name, node
        for child in ast.walk(node):
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)) and child is not node and _owner(node, child):
                waiting.append((f"{name}.{child.name}".lstrip("."), child))


def _owner(node: ast.AST, child: ast.AST) -> bool:
    """Whether ``child`` is in ``node`` with no other function or class between."""
    for each in ast.iter_child_nodes(node):
        if each is child:
            return True
        if not isinstance(each, (ast.FunctionDef, ast.ClassDef)) and _owner(each, child):
            return True
    return False


BY_HAND: tuple[tuple[str, str, Change, tuple[str, ...]], ...] = (
    # Deleted checkpoints, and the steps of a run.
    ("a deletion is not durable before files go", "_hide", without("directory.sync"), _DELETE),
    ("a manifest with two names stays", "_hide_native", without("directory.remove"), _DELETE),
    ("of two formats the one that counts goes first", "_hide", instead("kind == counts", "kind != counts"), _DELETE),
    (
        "who reads what is deleted finds damage",
        "was_replaced",
        instead("error.errno == errno.ENOENT", "False"),
        _DELETE,
    ),
    (
        "two may delete at once",
        "RunDirectory.delete",
        instead("locks.locked_directory(self.root)", "contextlib.nullcontext()"),
        _LISTING,
    ),
    ("what has no files is the latest", "Steps.is_whole", first("return not step.problem"), _LISTING),
    ("all may be deleted during a look", "Steps._until_settled", first("return look()"), _LISTING),
    ("metrics of another save count", "_reported", instead("reported.attempt == step.attempt", "True"), _LISTING),
    ("NaN is a number", "ranked.goodness", instead("not math.isnan(value)", "True"), _LISTING),
    ("what readers hold goes", "Steps.delete.why_it_stays", never("held()"), _FOLLOWING),
    ("dead readers hold for ever", "RunDirectory.held", instead("reader.verdict != 'dead'", "True"), _FOLLOWING),
    ("what was replaced while it was taken is held", "_Reader.hold", always("read_summary"), _FOLLOWING),
    ("a reader leaves its folder", "_Reader.close", without("self.release"), _FOLLOWING),
    # Durability: each fsync, each fsync of a directory, and their order.
    ("no fsync at all", "sync_file", without("os.fsync"), _CRASH),
    ("no fsync of the manifest", "write_new", without("sync_file"), _CRASH),
    ("no fsync of the index", "new_file", without("posix.sync_file"), _CRASH),
    ("no fsync of data files", "OutputFile.finish", without("posix.sync_file"), _CRASH),
    ("no fsync of the directory by the writers", "NativeWriter._written", without("self._place.sync"), _PUBLISH),
    ("no fsync of the directory before publishing", "_native:publish", without("posix.sync_directory"), _CRASH),
    ("no fsync of the directory after publishing", "_conclude", without("posix.sync_directory"), _CRASH),
    ("no fsync of the parents of new directories", "make_directories", without("sync_directory"), _CRASH),
    (
        "old files removed before the new name is durable",
        "_conclude",
        statement("posix.sync_directory", "for name in replaced:\n    os.unlink(os.path.join(directory, name))\nCALL"),
        _CRASH,
    ),
    (
        "a failed fsync is tried again",
        "sync_file",
        statement("os.fsync", "try:\n    CALL\nexcept OSError:\n    CALL"),
        ("tests/faults/test_torture_samples.py::test_short_transfers_and_failed_syncs", *_IO),
    ),
    ("a failed fsync is ignored", "sync_file", statement("os.fsync", "try:\n    CALL\nexcept OSError:\n    pass"), _IO),
    # The commit.
    ("overwrite=False replaces", "_native:publish", instead("posix.link_new", "posix.replace"), _PUBLISH),
    ("an existing manifest is not noticed by link", "link_new", never("samestat"), _IO),
    ("files are created over others", "create_new", instead("os.O_CREAT | os.O_EXCL", "os.O_CREAT"), _IO),
    ("links are followed", "open_regular", instead("os.O_RDONLY | os.O_NOFOLLOW", "os.O_RDONLY"), _IO),
    (
        "a published checkpoint is taken away by a late failure",
        "_native:publish",
        always("published is False"),
        (*_PUBLISH, "tests/faults/test_storage_failures.py"),
    ),
    (
        "a failed save leaves its index",
        "_native:publish",
        without("posix.remove"),
        (*_PUBLISH, "tests/faults/test_storage_failures.py"),
    ),
    # The commit in an object store.
    (
        "a commit in a store is not read back",
        _COMMIT,
        instead("_read_back(directory, data, before)", "Head(data, {})"),
        _STORES,
    ),
    ("a store is believed that there was one", _COMMIT, statement("store.put_if", "if not CALL: return None"), _STORES),
    ("a commit in a store has no condition", _COMMIT, statement("store.put_if", "store.put(url, data)"), _STORES),
    (
        "what is replaced in a store is removed before",
        "StorePlace.publish",
        first("self._remove_replaced(path)"),
        _STORES,
    ),
    (
        "a save to a store removes what may be published",
        "StorePlace.clear",
        instead("self._may_be_published", "False"),
        _STORES,
    ),
    # Children.
    ("a child ends the saves of its parent", "Held.forget_parent", instead("True", "False"), _FORKS),
    ("a child keeps the locks of its parent", "LockedFile.forget_parent", without("self.discard"), _FORKS),
    (
        "a child writes to the memory of its parent",
        "forget_in_child",
        instead("_inherited[id(holder)]", "{}[0]"),
        _FORKS,
    ),
    # One format in the place of the other.
    ("no note about two formats", "Turn.announce", without("posix.write_new"), _FORMATS),
    (
        "files of the other format removed before its head",
        "Turn.remove_other",
        first("for name in self._files:\n    posix.remove(os.path.join(self._directory, name))"),
        _FORMATS,
    ),
    ("the other format is left where it is", "Turn.remove_other", first("return"), _FORMATS),
    ("the native format counts, whatever is beside it", "format_at", always("len(found)"), _FORMATS),
    ("savers publish without taking turns", "Turn.take", instead("self.lock.acquire()", "True"), _FORMATS),
    # Interrupts.
    (
        "what was opened is kept in a second step",
        "_process:opened",
        instead("next(map(OpenDescriptor, opening))", "OpenDescriptor(next(opening))"),
        _INTERRUPTS,
    ),
    ("the collector's pause is ended once", "collector_paused.paused", without("pause.end"), _INTERRUPTS),
    (
        "a snapshot that the caller may have changed is published",
        "_background.py:_go_on",
        never("is_given_up"),
        _INTERRUPTS,
    ),
    # Digests.
    (
        "the manifest's digest is not compared",
        "_check_frame",
        never("digest(undigested)"),
        ("tests/unit/native/test_manifest.py",),
    ),
    ("the index's digest is not compared", "_read_index_bytes", never("entry.digest"), _DAMAGE),
    (
        "blocks read from the page cache are not verified",
        "SegmentJob._read_hot",
        never("is_intact"),
        (*_DAMAGE, "tests/unit/native/test_fetch.py"),
    ),
    (
        "blocks read through a slab are not verified",
        "SegmentJob._copy",
        never("is_intact"),
        (*_DAMAGE, "tests/unit/native/test_fetch.py", "tests/unit/test_checkpoint_open.py"),
    ),
    (
        "blocks moved to plain memory are not verified",
        "SegmentJob._move",
        never("is_intact"),
        (*_DAMAGE, "tests/unit/native/test_fetch.py"),
    ),
    # Coverage and bounds that are no plain if and raise.
    (
        "a save is not checked to be whole",
        "_chunks_as_reported",
        instead("check_coverage(tensor, lo, length, sizes)", "()"),
        ("tests/unit/native/test_merge.py",),
    ),
    (
        "a loaded index is not checked",
        "decode_catalog",
        without("check_index"),
        ("tests/unit/native/test_catalog.py", *_DAMAGE),
    ),
    (
        "the plan of a save is not checked to tile",
        "joint_plan",
        without("_check_tiling"),
        ("tests/unit/save_plan/test_plans.py",),
    ),
    (
        "the metadata of other storage is not checked to tile",
        "check_tiling",
        instead("tiling_faults(metadata)", "()"),
        ("tests/faults/test_hostile_findings.py", "tests/compat/test_torch_beside_ours.py"),
    ),
    (
        "replicas are not compared",
        "check_contents",
        instead("np.flatnonzero(said)", "np.flatnonzero(said)[:0]"),
        ("tests/unit/save_plan/test_plans.py",),
    ),
    ("keys may take any time", "Effort.count", never("self._left_s"), ("tests/unit/values/test_deadline.py",)),
    (
        "one key after the other is allowed the time of many",
        "Effort.fill",
        instead("len(some) * KEY_S", "_STEP * KEY_S"),
        ("tests/unit/values/test_deadline.py",),
    ),
    (
        "containers may be in any number of places",
        "_EntryCount.count",
        never("MAX_REPEATED_ENTRIES"),
        ("tests/unit/state/test_nested.py",),
    ),
    (
        "what may differ is written by several ranks",
        "_choose_writers",
        instead("key not in plan.lenient", "True"),
        ("tests/unit/save_plan/test_plans.py",),
    ),
    (
        "targets with one memory are filled at once",
        "DefaultLoadPlanner._without_ties",
        instead("ties_of(self._memory, others, self.state_dict)", "()"),
        ("tests/unit/test_tied_targets.py",),
    ),
    (
        "autograd is not told of what is loaded",
        "Target.__init__",
        without("torch.autograd.graph.increment_version"),
        ("tests/unit/test_save_load_autograd.py",),
    ),
    (
        "modules are not told with which versions was saved",
        "_hand_back",
        without("tell_versions"),
        ("tests/unit/test_save_load_versions.py",),
    ),
    ("a file of any size is read whole", "_io/posix:read_whole", always("limit"), _IO),
    # Hugging Face folders.
    ("a file with a hole is published", "FolderWriter.finish", without("check_tiled"), _EXPORT),
    ("what is no whole page is lost", "RunPacker.write_part", without("self.fragments.append"), _EXPORT),
    (
        "a page has two writers",
        "RunPacker.write_part",
        instead("-(-start // ALIGNMENT) * ALIGNMENT", "start - start % ALIGNMENT"),
        ("tests/distributed/test_export_ranks.py::test_a_dtype_is_rounded_alike_wherever_a_tensor_is",),
    ),
    ("integers are cast", "_dtype_rule.rule", instead("not DTYPES[has].is_floating", "False"), _EXPORT),
    ("numbers of eight bits are cast", "_dtype_rule.rule", instead("DTYPES[has].itemsize == 1", "False"), _EXPORT),
    ("a link may lead out of a folder", "_huggingface/folder.py:_link", never("_HUB_LINK"), _FOLDERS),
    ("an index may lead out of a folder", "_weight_map", never("_SAFE_NAME"), _FOLDERS),
    ("a key may be twice in a header", "decode_any_header", never("count_strings"), _FOLDERS),
    (
        "holdfast.json may have chunks elsewhere than the headers",
        "_noted_index",
        instead("_misplaced(index, headers, tensors)", "np.zeros(len(index), dtype=bool)"),
        _FOLDERS,
    ),
    # Mappings.
    ("tied tensors are not compared", "_Inside._check_tie", first("return"), _MAPPED),
    ("offsets are added to shared memory twice", "finish_reading", instead("planner.left_out", "()"), _MAPPED),
    ("two tensors may get one name", "_Matching._own", never("owner is not inside"), _MAPPED),
    ("an offset is not taken off again", "FolderForm.writer", instead("-rules.offset_of(key)", "0.0"), _CONVERTED),
    ("a rule does not say the type", "FolderForm.writer.dtype", instead("by_rule is None", "True"), _CONVERTED),
    ("steps are left out of what is read", "Patch.around", instead("step * (length - 1) + 1", "length"), _CONVERTED),
    ("a conversion forgets offsets", "MappedCheckpoint._read_source", never("self._added"), _CONVERTED),
    (
        "a conversion leaves out what is not the same",
        "MappedCheckpoint._untied",
        instead("not _is_equal(self._source[key], self._source[other])", "False"),
        _CONVERTED,
    ),
    (
        "what has no place inside is lost",
        "Mapping.from_outside",
        instead("faults or [*self.check(outside, inside)]", "faults"),
        _CONVERTED,
    ),
    ("ties are left out inside", "Mapping.from_outside", instead("[*inside] if ties else ()", "()"), _CONVERTED),
    ("the parts of a Split may be others", "_undone", never("operation.parts"), _CONVERTED),
    # The state of optimizers that have none yet.
    (
        "state of a sharded parameter made whole",
        "default_planner:_made",
        instead("parameter.device if name in others else parameter", "parameter.device"),
        ("tests/distributed/test_fresh_optimizers.py::test_each_rank_reads_its_shard_alone",),
    ),
    (
        "what cannot be placed passed over",
        "fill_empty_containers",
        without("refused.append"),
        ("tests/unit/test_empty_containers.py",),
    ),
)
"""Name, function (with its folder where another one has that name), change, tests."""

CHECKED = {
    "_native/manifest.py": ("tests/unit/native/test_manifest.py", "tests/unit/native/test_paths.py"),
    "_native/index.py": ("tests/unit/native/test_index.py",),
    "_native/catalog.py": (
        "tests/unit/native/test_catalog.py",
        "tests/unit/native/test_environment_errors.py",
        *_DAMAGE,
    ),
    "_native/paths.py": ("tests/unit/native/test_paths.py",),
    "_native/merge.py": ("tests/unit/native/test_merge.py", "tests/unit/native/test_report.py"),
    "_io/direct.py": (
        "tests/unit/io",
        *_DAMAGE,
        "tests/unit/native/test_environment_errors.py",
        "tests/unit/events/test_listeners.py",
    ),
    "_io/posix.py": ("tests/unit/io", "tests/unit/test_arguments.py"),
    "_native/publish.py": (*_PUBLISH, *_FORMATS, "tests/faults/test_storage_failures.py"),
    "_save_plan/plans.py": ("tests/unit/save_plan/test_plans.py",),
    "_native/delete.py": _DELETE,
    "_steps/listing.py": (*_LISTING, *_FOLLOWING),
    "_steps/runs.py": (*_LISTING, "tests/unit/steps/test_manager.py"),
    "_steps/following.py": _FOLLOWING,
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
    places: dict[str, list[str]] = {}
    for path in sorted((source / "holdfast").rglob("*.py")):
        for function, _ in _functions(ast.parse(path.read_text())):
            places.setdefault(function, []).append(str(path.relative_to(source / "holdfast")))
    bugs = []
    for name, function, change, tests in BY_HAND:
        folder, _, function = function.rpartition(":")
        files = [file for file in places.get(function, []) if file.startswith(folder)]
        if len(files) != 1:
            raise ValueError(f"{name}: {function} is in {files}, and must be in one file")
        bugs.append(Bug(name=name, file=files[0], function=function, change=change, tests=tests))
    made = [bug for file, tests in CHECKED.items() for bug in _checks(source, file, tests)]
    stale = HARMLESS.keys() - {bug.name for bug in made}
    if stale:
        raise ValueError(f"these checks are listed as harmless, and are not there: {sorted(stale)}")
    bugs += [bug for bug in made if bug.name not in HARMLESS]
    for bug in bugs:
        bug.changed(source)
    return bugs


def _checks(source: Path, file: str, tests: tuple[str, ...]) -> list[Bug]:
    """A bug for each ``if`` of ``file`` that ends in a ``raise``: the condition is never true."""
    found: dict[str, Bug] = {}
    for node in ast.walk(ast.parse((source / "holdfast" / file).read_text())):
        if isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise):
            name = f"{file}: {ast.unparse(node.test)}"
            same = sum(each == name or each.startswith(f"{name} (") for each in found)
            change = _turned_off(ast.unparse(node.test), same)
            name += f" ({same + 1})" if same else ""
            found[name] = Bug(name=name, file=file, function="", change=change, tests=tests)
    if not found:
        raise ValueError(f"{file} has no checks to turn off")
    return list(found.values())


def _turned_off(condition: str, before: int) -> Change:
    """The check with this condition is off, ``before`` others that have the same one are not."""

    def change(module: ast.AST) -> int:
        checks = [
            node for node in ast.walk(module) if isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise)
        ]
        same = [node for node in checks if ast.unparse(node.test) == condition]
        same[before].test = ast.Constant(False)
        return 1

    return change
