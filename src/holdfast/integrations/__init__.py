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


def default_options(asynchronous: bool | Literal["process"]) -> SaveOptions:
    """The options of saves if a user names none; in the background they rely on ``guard_once``.

    A state in host memory would need that memory twice for a snapshot. So it is written from where it is, through small
    buffers: in the background until the optimizer's next step, with a proof that nothing else has changed it. What is
    on an accelerator is copied into host memory, of which there is more.
    """
    if torch.accelerator.is_available() or asynchronous == "process":
        return SaveOptions()
    if not asynchronous:
        return SaveOptions(max_host_bytes=_BUFFER_BYTES)
    return SaveOptions(stage="overlap", max_host_bytes=_BUFFER_BYTES, prove=True)


def guard_once(optimizers: Iterable[object]) -> None:
    """Have the next step of each of ``optimizers`` wait for the save under way."""
    for each in optimizers:
        optimizer = getattr(each, "optimizer", each)  # accelerate has a class around it
        if isinstance(optimizer, torch.optim.Optimizer) and optimizer not in _guarded:
            guard(optimizer)
            _guarded.add(optimizer)


def imported(adapter: str, module: str) -> ModuleType:
    """``module`` of the framework of ``adapter``; an ImportError that says what to install if it is not there."""
    package, oldest, newest = TESTED[adapter]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        said = f"holdfast.integrations.{adapter} needs {module}, which cannot be imported ({error}). "
        install = f"Install it: pip install '{package}'; tested with {oldest} to {newest}."
        raise ImportError(said + install, name=module) from error
