"""Ray Train: steps in the storage of the run, and reports of them that wait until every rank's part is durable.

The user's loop decides when to save. So this is a CheckpointManager in Ray's storage, and a report that gives Ray a
checkpoint only when it is published. Nothing is uploaded or copied: the ranks have written it where Ray wants it. What
was reported belongs to Ray, which deletes it. Ray's own uploads, of a folder by each rank, have no commit.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

import torch.distributed as dist

from holdfast._saver import SaveOptions
from holdfast._staging.one_at_a_time import AsyncSave
from holdfast._steps.manager import CheckpointManager
from holdfast._steps.policies import Every
from holdfast._steps.stopping import StopOn
from holdfast.integrations import imported

__all__ = ["manager", "report", "root"]

_train: Any = imported("ray", "ray.train")
if not hasattr(_train, "CheckpointUploadMode"):
    raise ImportError("holdfast.integrations.ray needs the second version of Ray Train: set RAY_TRAIN_V2_ENABLED=1")

_NO_SIGNALS = StopOn(signals=())  # Ray runs the loop in a thread, where no signal can be handled
_OPTIONS = SaveOptions()


def root() -> str:
    """The directory of the steps of this run, in the storage that RunConfig names. Every worker gets the same."""
    storage = _train.get_context().get_storage()
    kind = storage.storage_filesystem.type_name
    if kind != "local":
        raise ValueError(
            f"RunConfig(storage_path=...) is in a file system of the kind {kind!r}; use a directory "
            "that all nodes share, or make a CheckpointManager on the URL of an object store, and report metrics alone"
        )
    return os.path.join(storage.experiment_fs_path, "steps")


def manager(
    *,
    save: Every,
    stop: StopOn | None = _NO_SIGNALS,
    on_error: Literal["raise", "warn"] = "raise",
    asynchronous: bool | Literal["process"] = True,
    options: SaveOptions = _OPTIONS,
) -> CheckpointManager:
    """The CheckpointManager of this run, at ``root()``; all workers make it, after Ray has made the process group.

    It deletes nothing, because Ray refuses a run of which a reported checkpoint is gone. What stays is said by Ray's
    ``CheckpointConfig(num_to_keep=...)``: Ray deletes old steps after a new one was reported, so when that is durable.
    """
    workers = _train.get_context().get_world_size()
    there = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if workers != there:
        raise ValueError(
            f"{workers} workers are {there} ranks of torch.distributed: use TorchTrainer, which makes them one job"
        )
    return CheckpointManager(
        root(), save=save, stop=stop, on_error=on_error, asynchronous=asynchronous, options=options
    )


def report(metrics: Mapping[str, Any], handle: AsyncSave | str | os.PathLike[str] | None = None) -> None:
    """Report ``metrics``, and with a ``handle`` or the path of a durable checkpoint also that. All workers call it.

    It does not wait for a save in the background: Ray hears of the checkpoint when the handles of all workers are done,
    and a save that failed ends the run with its error, as an upload that failed would.
    """
    if handle is None:
        _train.report(dict(metrics))
        return
    path = os.path.abspath(handle.path if isinstance(handle, AsyncSave) else handle)
    storage = _train.get_context().get_storage()
    if os.path.commonpath([path, os.path.dirname(root())]) != os.path.dirname(root()):
        raise ValueError(f"{path!r} is not in {os.path.dirname(root())!r}, so Ray cannot keep it; save below root()")

    def when_durable(checkpoint: Any, name: str) -> Any:
        if isinstance(handle, AsyncSave):
            handle.result()
        return checkpoint

    _train.report(
        dict(metrics),
        checkpoint=_train.Checkpoint(path, filesystem=storage.storage_filesystem),
        checkpoint_upload_mode=_train.CheckpointUploadMode.ASYNC,
        checkpoint_upload_fn=when_durable,
        delete_local_checkpoint_after_upload=False,
    )
