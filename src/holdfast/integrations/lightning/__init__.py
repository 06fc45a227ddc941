"""Lightning: native checkpoints of its Trainer and of Fabric, on one device, under DDP, and of sharded models.

Lightning decides when a checkpoint is made, what it is called and which one goes: ``ModelCheckpoint`` has paths and a
list of the best. So this is not built on CheckpointManager, but on what that is made of (``save``, ``async_save``,
``load``, ``delete``), and keeps what it promises: one commit for each checkpoint, a torn save that nobody finds, and no
deletion before the save under way is published.
"""

from __future__ import annotations

from holdfast.integrations.lightning.ranks import HoldfastCallback
from holdfast.integrations.lightning.saves import HoldfastIO, latest
from holdfast.integrations.lightning.sharded import (
    FabricFSDPStrategy,
    FabricModelParallelStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
)

__all__ = [
    "FSDPStrategy",
    "FabricFSDPStrategy",
    "FabricModelParallelStrategy",
    "HoldfastCallback",
    "HoldfastIO",
    "ModelParallelStrategy",
    "latest",
]
