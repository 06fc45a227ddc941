"""What torch keeps for each thread, put back at the end of a block, also where an interrupt comes into the way back.

Else a training would go on without gradients, or on the stream of a copy. Each is an ``Ending``: enter it twice.
"""

from __future__ import annotations

from functools import partial

import torch

from holdfast._values.ending import Ending


def grad_mode() -> Ending:
    """Whether operations are recorded, as it is now."""
    return Ending(partial(torch._C._set_grad_enabled, torch.is_grad_enabled()))


def cuda_stream(device: torch.device) -> Ending:
    """The current stream of ``device``, and the current device, as they are now."""
    stream, current = torch.cuda.current_stream(device), torch.cuda.current_device()

    def put_back() -> None:
        torch.cuda.set_stream(stream)
        torch.cuda._maybe_exchange_device(current)  # which makes no context where there is none

    return Ending(put_back)
