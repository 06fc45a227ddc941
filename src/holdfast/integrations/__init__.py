"""Checkpoints of training frameworks, each in a module of its own that is imported by name.

Every adapter keeps one native checkpoint for each step, by way of a CheckpointManager or of what that is made of. No
framework is imported here, and none is a dependency: an adapter whose framework is missing says what to install.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Iterable
from types import ModuleType
from typing import Literal, NamedTuple

import torch

from holdfast._async_saver import guard
from holdfast._saver import SaveOptions


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


_BUFFER_BYTES = 5 << 20
_guarded: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def default_options(asynchronous: bool | Literal["process"], is_guarded: bool) -> SaveOptions:
    """The options of saves if a user names none; ``is_guarded``: the optimizers wait, as ``guard_once`` has them.

    On the CPU a snapshot would take the memory of the state once more: there it is written from where it is.
    """
    if torch.cuda.is_available() or asynchronous == "process" or (asynchronous and not is_guarded):
        return SaveOptions()
    return SaveOptions(stage="overlap" if asynchronous else "copy", max_host_bytes=_BUFFER_BYTES, prove=True)


def guard_once(optimizers: Iterable[object]) -> bool:
    """Have the next step of each of ``optimizers`` wait for the save under way; whether all of them can."""
    known = [getattr(each, "optimizer", each) for each in optimizers if each is not None]  # accelerate wraps them
    guarded = [each for each in known if isinstance(each, torch.optim.Optimizer)]
    for optimizer in set(guarded).difference(_guarded):
        guard(optimizer)
    _guarded.update(guarded)
    return len(guarded) == len(known)


def imported(adapter: str, module: str) -> ModuleType:
    """``module`` of the framework of ``adapter``; an ImportError that says what to install if it is not there."""
    package, oldest, newest = TESTED[adapter]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        said = f"holdfast.integrations.{adapter} needs {module}, which cannot be imported ({error}). "
        install = f"Install it: pip install '{package}'; tested with {oldest} to {newest}."
        raise ImportError(said + install, name=module) from error
