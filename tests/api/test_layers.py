"""The layer rules that import-linter cannot express, because it sees all of torch as one package.

Every module is parsed, none is imported: an import inside a function counts as much as one at the top.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "holdfast"
MODULES = sorted(PACKAGE.rglob("*.py"))

TORCHS_CHECKPOINTS = "torch.distributed.checkpoint"
RUNS_CODE_FROM_FILES = ("pickle", TORCHS_CHECKPOINTS, "torch.save", "torch.load", "torch.serialization")
MAY_RUN_CODE = ("_torch_codec", "_torch_classes")
FILE_SYSTEM_VERBS = (
    "open read write pread pwrite preadv pwritev rename replace link symlink unlink remove mkdir makedirs rmdir"
)
FILE_SYSTEM = (
    *("shutil", "tempfile", "fcntl"),
    *(f"os.{verb}" for verb in f"{FILE_SYSTEM_VERBS} truncate ftruncate fsync fdatasync posix_fallocate".split()),
)


def imported_names(tree: ast.Module) -> Iterator[str]:
    """Every dotted name that the module imports, and every attribute chain such as ``torch.save`` that it uses."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def uses(source: str, forbidden: tuple[str, ...]) -> set[str]:
    """The forbidden names, or names inside them, that the source imports or reaches."""
    found = set(imported_names(ast.parse(source)))
    return {name for name in found for bad in forbidden if name == bad or name.startswith(bad + ".")}


def top_part(path: Path) -> str:
    """``_native`` for holdfast/_native/writer.py, ``saver`` for holdfast/_saver.py."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def test_there_are_modules_to_check() -> None:
    assert PACKAGE / "errors.py" in MODULES


@pytest.mark.parametrize("path", [path for path in MODULES if top_part(path) not in MAY_RUN_CODE], ids=relative)
def test_only_torchs_codec_may_run_code_from_files(path: Path) -> None:
    assert uses(path.read_text(encoding="utf-8"), RUNS_CODE_FROM_FILES) == set()


@pytest.mark.parametrize("path", [path for path in MODULES if top_part(path) != "_torch_classes"], ids=relative)
def test_there_is_one_edge_to_torchs_checkpoint_classes(path: Path) -> None:
    assert uses(path.read_text(encoding="utf-8"), (TORCHS_CHECKPOINTS,)) == set()


PURE = [path for path in MODULES if top_part(path) in ("_values", "_plan")]


@pytest.mark.parametrize("path", PURE, ids=relative)
def test_pure_layers_know_neither_torch_nor_the_system(path: Path) -> None:
    assert uses(path.read_text(encoding="utf-8"), ("torch", "os", "pathlib", "threading", *FILE_SYSTEM)) == set()


@pytest.mark.parametrize("path", [path for path in MODULES if top_part(path) != "_io"], ids=relative)
def test_there_is_one_door_to_the_file_system(path: Path) -> None:
    assert uses(path.read_text(encoding="utf-8"), FILE_SYSTEM) == set()


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_every_module_says_what_it_is_for(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), "a module starts with a docstring"
    has_code = any(isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AnnAssign)) for node in tree.body)
    futures = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    assert futures or not has_code, "a module with code imports annotations from __future__"


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "def f():\n    import torch.distributed.checkpoint as dcp",
        "from torch.distributed import checkpoint",
        "from torch.distributed.checkpoint.metadata import Metadata",
        "import torch\ntorch.load('x')",
        "from torch import save",
    ],
)
def test_the_check_sees_each_way_to_import(source: str) -> None:
    assert uses(source, RUNS_CODE_FROM_FILES)


@pytest.mark.parametrize("source", ["import torch", "from torch import Tensor", "from . import pickle", "x = 'pickle'"])
def test_the_check_lets_the_rest_pass(source: str) -> None:
    assert not uses(source, RUNS_CODE_FROM_FILES)
