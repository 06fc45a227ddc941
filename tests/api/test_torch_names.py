"""Every name of torch that the package imports is there, or a test says which one has moved; newer torches."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import stateful as torch_stateful

import holdfast
from holdfast import ChunkStorageMetadata
from holdfast._version import NEWEST_TESTED_TORCH
from holdfast.stateful import Stateful, StatefulT

PACKAGE = Path(holdfast.__file__).parent


def names_of_torch() -> list[tuple[str, str, str]]:
    """(module of torch, name, file that imports it), wherever in a file that is."""
    return sorted(
        {
            (node.module, name.name, path.relative_to(PACKAGE).as_posix())
            for path in PACKAGE.rglob("*.py")
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch" and node.module
            for name in node.names
        }
    )


def is_there(module: str, name: str) -> bool:
    try:
        return hasattr(importlib.import_module(module), name) or bool(importlib.import_module(f"{module}.{name}"))
    except ImportError:
        return False


def test_what_is_imported_from_torch_is_there() -> None:
    names = names_of_torch()
    assert len(names) > 20
    moved = [f"{module}.{name}, which {file} imports" for module, name, file in names if not is_there(module, name)]
    assert not moved, f"torch {torch.__version__} has no " + "; no ".join(moved)


# What torch has and we have not. Tensors with the attributes of a CheckpointableTensor are known by these.
LEFT_OUT = {"CheckpointableTensor", "logging_handlers", "protocol"}


def test_every_public_name_of_torchs_package_is_here() -> None:
    theirs = {module.name for module in pkgutil.iter_modules(dcp.__path__)}
    theirs |= {name for name, value in vars(dcp).items() if getattr(value, "__module__", "").startswith(dcp.__name__)}
    missing = {name for name in theirs - LEFT_OUT if not name.startswith("_") and not hasattr(holdfast, name)}
    assert not missing, f"torch {torch.__version__} has {sorted(missing)} in {dcp.__name__}"


MAJOR, MINOR = NEWEST_TESTED_TORCH


KNOWN = ["2.9.0", "2.11.0", f"{MAJOR}.{MINOR}.1+cu130"]
NEWER = [f"{MAJOR}.{MINOR + 1}.0a0+git1", "2.99.0", f"{MAJOR + 1}.0.0"]
# Torch is imported once, and the package in a copy of the process for each version.
IMPORTS = f"""
import os, sys, torch
for version in {KNOWN + NEWER}:
    if os.fork() == 0:
        print("version:", version, file=sys.stderr, flush=True)
        torch.__version__ = version
        import holdfast, holdfast.interop
        os._exit(0)
    assert os.wait()[1] == 0
"""


def test_a_torch_newer_than_those_that_were_tested_is_one_line_in_the_log() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True)
    told = {lines[0]: lines[1:] for lines in map(str.splitlines, done.stderr.split("version: ")[1:])}
    said = f"newer than {MAJOR}.{MINOR}, the newest that this version of holdfast was tested with"
    assert {version: len(lines) for version, lines in told.items()} == dict.fromkeys(KNOWN, 0) | dict.fromkeys(NEWER, 1)
    assert all(said in line for version in NEWER for line in told[version])
    assert f"(tested up to {MAJOR}.{MINOR};" in (Path(__file__).parents[2] / "README.md").read_text()


def test_modules_and_names_that_others_import_from_torchs_package_are_there() -> None:
    first, second = (ChunkStorageMetadata(torch.Size([low]), torch.Size([4])) for low in (0, 2))
    assert holdfast.resharding._check_shard_metadata_pair_overlap(first, second)  # type: ignore[arg-type]
    narrowed = holdfast.resharding._shards_get_overlap_region_wrt_saved_tensor(first, second)  # type: ignore[arg-type]
    assert narrowed == [(0, 2, 0, 2)]
    assert holdfast.logger._dcp_method_logger()(lambda: 3)() == 3
    assert holdfast.utils.CheckpointException is holdfast.api.CheckpointException
    assert (StatefulT.__bound__, StatefulT.__name__) == (Stateful, torch_stateful.StatefulT.__name__)
