"""torch's loader of sharded optimizer states (FSDP1), under torch's module name."""

from __future__ import annotations

from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict

__all__ = ["load_sharded_optimizer_state_dict"]
