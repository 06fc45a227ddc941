"""The one edge to torch's own checkpoint classes: plans, metadata, planners and storages in both shapes."""

from __future__ import annotations

import logging

import torch

from holdfast._version import NEWEST_TESTED_TORCH

if tuple(int(part) for part in torch.__version__.split(".")[:2]) > NEWEST_TESTED_TORCH:
    logging.getLogger("holdfast").warning(
        "torch %s is newer than %d.%d, the newest that this version of holdfast was tested with",
        *(torch.__version__, *NEWEST_TESTED_TORCH),
    )
