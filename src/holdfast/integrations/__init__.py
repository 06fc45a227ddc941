"""Checkpoints of training frameworks, each in a module of its own that is imported by name.

Every adapter keeps one native checkpoint for each step, by way of a CheckpointManager or of what that is made of. No
framework is imported here, and none is a dependency: an adapter whose framework is missing says what to install.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import NamedTuple


class Tested(NamedTuple):
    """The versions of a framework that ``make test-integrations`` has run with."""

    package: str
    oldest: str
    newest: str


TESTED = {
    "accelerate": Tested("accelerate", "1.15", "1.15"),
    "lightning": Tested("lightning", "2.6", "2.6"),
    "ray": Tested("ray[train]", "2.60", "2.60"),
    "torchtitan": Tested("torchtitan", "0.3", "0.3"),
    "transformers": Tested("transformers", "5.23", "5.23"),
}
"""The framework of each adapter, by the name of its module."""


def imported(adapter: str, module: str) -> ModuleType:
    """``module`` of the framework of ``adapter``; an ImportError that says what to install if it is not there."""
    package, oldest, newest = TESTED[adapter]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        said = f"holdfast.integrations.{adapter} needs {module}, which cannot be imported ({error}). "
        install = f"Install it: pip install '{package}'; tested with {oldest} to {newest}."
        raise ImportError(said + install, name=module) from error
