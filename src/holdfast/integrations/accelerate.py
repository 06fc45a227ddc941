"""What an Accelerator has prepared, as one checkpoint in place of a folder of files.

With accelerate, the program decides when to save and where. ``save_state`` and ``load_state`` do at that place what the
methods of an Accelerator do, in one step. For due steps, retention, stop and resume there is a CheckpointManager:
``state_of`` is a state as it wants one.

A checkpoint holds models, optimizers, schedulers, the gradient scaler, registered objects, the counters of the
Accelerator and of its loaders, and for each rank its random generators and its stateful loaders. Nothing of it is
pickled. What cannot be kept so is refused.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast._async_saver import async_save
from holdfast._loader import LoadOptions, LoadReport, load
from holdfast._native.publish import format_at
from holdfast._saver import SaveOptions, save
from holdfast._staging.one_at_a_time import AsyncSave
from holdfast._state.per_rank import OnResize, PerRank, Rng
from holdfast._values.shown import few
from holdfast.errors import NotACheckpointError
from holdfast.integrations import default_options, guard_once, imported

if TYPE_CHECKING:
    from accelerate import Accelerator

_types = imported("accelerate", "accelerate.utils").DistributedType

logger = logging.getLogger("holdfast")

_LOAD = LoadOptions()


def save_state(
    accelerator: Accelerator,
    path: str | os.PathLike[str],
    *,
    asynchronous: bool = False,
    options: SaveOptions | None = None,
) -> AsyncSave | None:
    """Save all that ``accelerator`` has prepared at ``path``, as one checkpoint; all ranks call it.

    Without ``options``, a state on the CPU is written from where it is: ``asynchronous``, until the optimizer steps.

    Returns:
        With ``asynchronous``, the handle of the save in the background, as that of ``async_save``. Else None: the
        checkpoint is durable.
    """
    state, is_guarded = state_of(accelerator), guard_once(accelerator._optimizers)
    options = options or default_options(asynchronous, is_guarded)
    if asynchronous:
        return async_save(state, path, options=options)
    save(state, path, options=options)
    return None


def load_state(
    accelerator: Accelerator,
    path: str | os.PathLike[str],
    *,
    on_resize: OnResize = "raise",
    options: LoadOptions = _LOAD,
) -> LoadReport:
    """Load ``path`` into all that ``accelerator`` has prepared, in place; all ranks call it.

    ``on_resize`` says what becomes of generators and stateful loaders if other ranks load than saved, as for
    ``PerRank``. The log says what the checkpoint has, and nothing was prepared for.

    Raises:
        NotACheckpointError: accelerate itself has saved what is there.
        MismatchError: something was prepared that the checkpoint does not have; nothing is changed.
    """
    if format_at(path) is None and (pickles := sorted(Path(path).glob("random_states_*.pkl"))):
        raise NotACheckpointError(
            f"{os.fspath(path)!r} was saved by accelerate itself, and has pickles, as {pickles[0].name!r}; load it by "
            "accelerator.load_state, then save it by save_state to another path"
        )
    report = load(state_of(accelerator, on_resize=on_resize), path, options=options)
    of_ranks = tuple(f"{name}." for name in report.per_rank)  # what others have is not missed here
    if left := [key for key in report.unexpected if not key.startswith(of_ranks)]:
        logger.warning("%s has more than was prepared, which is not loaded: %s", path, few(left, len(left)))
    return report


def state_of(accelerator: Accelerator, *, on_resize: OnResize = "raise") -> dict[str, object]:
    """All that ``accelerator`` has prepared, as a state to save or to load into."""
    if refused := _refused(accelerator):
        raise ValueError(f"the state of this Accelerator cannot be kept by Holdfast: {refused}")
    unwrapped = [accelerator.unwrap_model(model, keep_torch_compile=False) for model in accelerator._models]
    loaders = enumerate(accelerator._dataloaders)
    state = {
        "models": unwrapped,
        "optimizers": list(accelerator._optimizers),
        "schedulers": list(accelerator._schedulers),
        "objects": list(accelerator._custom_objects),
        "loaders": {str(number): PerRank(loader, on_resize) for number, loader in loaders if _is_stateful(loader)},
        "rng": Rng(on_resize),
        "counters": _Counters(accelerator),
    }
    return state if accelerator.scaler is None else {**state, "scaler": accelerator.scaler}


class _Counters:
    """The batches since the optimizer's last step, and how often each loader was gone through."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        loaders = self._accelerator._dataloaders
        return {"step": self._accelerator.step, "iterations": [getattr(loader, "iteration", 0) for loader in loaders]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._accelerator.step = state["step"]
        for loader, iteration in zip(self._accelerator._dataloaders, state["iterations"], strict=True):
            if hasattr(loader, "iteration"):
                loader.iteration = iteration


def _is_stateful(loader: Any) -> bool:
    return bool(getattr(loader, "use_stateful_dataloader", False))


def _refused(accelerator: Accelerator) -> str:
    """What the Accelerator has that a checkpoint cannot hold, and what to do instead."""
    kind = accelerator.distributed_type
    project = accelerator.project_configuration
    own = (_types.DEEPSPEED, _types.MEGATRON_LM, _types.XLA)
    has_hooks = accelerator._save_model_state_pre_hook or accelerator._load_model_state_pre_hook
    reasons = {
        f"{kind.value} keeps its state to itself; use FSDP2": kind in own,
        "shards of FSDP1 are not kept; set fsdp_version=2": kind == _types.FSDP and not accelerator.is_fsdp2,
        "hooks before save_state write files of their own; register an object for checkpointing": bool(has_hooks),
        "automatic_checkpoint_naming names and deletes folders; use a CheckpointManager with state_of(accelerator)": (
            project.automatic_checkpoint_naming
        ),
    }
    return "; ".join(reason for reason, is_so in reasons.items() if is_so)
