"""Files of checkpoints to compare: what two saves of the same state have in common, whenever they were made."""

from __future__ import annotations

import re
from pathlib import Path

# What a manifest says of the time of the save, and the digest over that.
_TIME = re.compile(rb',"saved_at":"[^"]*"|,"digest":"[0-9a-f]{16}"\}$')


def timeless(file: Path) -> bytes:
    """The bytes of ``file``, one of a checkpoint; those of a manifest without what changes with the time."""
    data = file.read_bytes()
    return _TIME.sub(b"", data) if file.name == "manifest.json" else data
