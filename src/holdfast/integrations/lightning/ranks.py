"""HoldfastCallback: what is different on each rank goes into every checkpoint, and comes back to the same rank.

Lightning saves no random generators, and under DDP the loaders of rank 0 alone. A generator is set as late as possible,
because whatever runs between the load and the first batch may draw numbers.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel

from holdfast import hf
from holdfast._state.per_rank import OnResize, PerRank, Rng
from holdfast.errors import MismatchError
from holdfast.integrations import guard_once, imported

_trainer: Any = imported("lightning", "lightning.pytorch")

__all__ = ["HoldfastCallback"]

logger = logging.getLogger("holdfast")

Paths = str | os.PathLike[str]
State = dict[str, Any]


class HoldfastCallback(_trainer.Callback):
    """Has every checkpoint hold the random generators and loaders of each rank; with ``export``, exports the model.

    Args:
        on_resize: what to do if other ranks resume than saved, as for ``PerRank``. A function gets the states of the
            loaders, a list for each old rank, this rank, and the number of ranks now. Generators then stay as they are.
        export: the path of a Hugging Face folder, written when the training has ended; or a function called then on
            every rank with the model: ``partial(hf.export, path=..., mapping=...)``.
    """

    def __init__(self, *, on_resize: OnResize = "raise", export: Paths | Callable[..., object] | None = None) -> None:
        PerRank(None, on_resize)  # which checks it
        self._on_resize, self._export = on_resize, export
        self._generators, self._saved = Rng().value, State()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: State) -> None:
        """Called on every rank. Each gets the states of all, because under DDP only the first one saves."""
        loaders = checkpoint["loops"]["fit_loop"]["state_dict"].get("combined_loader", [])
        states = [{"generators": self._generators.state_dict(), "loaders": loaders}] * trainer.world_size
        if trainer.world_size > 1:
            torch.distributed.all_gather_object(states, states[0])
        checkpoint["callbacks"][self.state_key] = {f"rank-{rank}": state for rank, state in enumerate(states)}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: State) -> None:
        """Choose what this rank gets, before the loops are restored."""
        saved, rank, ranks = checkpoint["callbacks"].get(self.state_key), trainer.global_rank, trainer.world_size
        if trainer.state.fn != "fit" or saved is None:
            if trainer.state.fn == "fit":
                logger.warning("the checkpoint has no random generators, and loaders of the first rank at most")
            return
        states = [saved[f"rank-{number}"] for number in range(len(saved))]
        if ranks == len(states):
            self._saved, loaders = states[rank]["generators"], states[rank]["loaders"]
            self._restore()
        elif self._on_resize == "raise":
            said = f"{len(states)} ranks saved, {ranks} resume, and no state of a loader belongs to any of these"
            raise MismatchError(f"{said}; resume on as many, or say HoldfastCallback(on_resize='fresh' or a function)")
        else:
            split: Any = self._on_resize if callable(self._on_resize) else lambda *_: []
            loaders = split([state["loaders"] for state in states], rank, ranks)
            done = "as on_resize made them" if loaders else "fresh"
            logger.warning("%d ranks saved, %d resume: loaders are %s, generators stay", len(states), ranks, done)
        checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = loaders

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Once more: what came after the load may have drawn numbers."""
        self._restore()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """In the middle of an epoch, once more: the iterator just made is one that was there at the save."""
        guard_once(trainer.optimizers)
        if trainer.fit_loop.restarted_mid_epoch and not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            self._restore()
        self._saved = {}

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Export the model, which every rank takes part in."""
        if self._export is not None:
            is_flat = isinstance(trainer.model, FullyShardedDataParallel)  # whose module has no tensors of its own
            model = trainer.strategy.lightning_module_state_dict() if is_flat else pl_module
            buffers = hf.ExportOptions(replica_check=[name for name, _ in pl_module.named_buffers()])
            export = self._export if callable(self._export) else partial(hf.export, path=self._export, options=buffers)
            export(model)

    def _restore(self) -> None:
        if self._saved:
            self._generators.load_state_dict(self._saved)
