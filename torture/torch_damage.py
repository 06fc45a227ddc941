"""The same damage done to checkpoints of torch.distributed.checkpoint: what its own load makes of it."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save


def _state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    return {"weight": torch.randn(40, 30, generator=generator), "bias": torch.randn(300, generator=generator)}


def _saved(path: Path) -> list[Path]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_save(_state(), checkpoint_id=path)
    return sorted(each for each in path.iterdir())


def _outcome(path: Path) -> str:
    """What torch's load does: "error", "same", or "changed" for other values and no error."""
    target = {key: torch.zeros_like(value) for key, value in _state().items()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp_load(target, checkpoint_id=path)
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        return "error"
    return "same" if all(torch.equal(target[key], value) for key, value in _state().items()) else "changed"


def _tally(file: Path, path: Path, damages: list[Callable[[bytes], bytes]]) -> dict[str, int]:
    whole = file.read_bytes()
    tally = {"error": 0, "same": 0, "changed": 0}
    for damage in damages:
        file.write_bytes(damage(whole))
        tally[_outcome(path)] += 1
    file.write_bytes(whole)
    return tally


def detected_flips(path: Path, chosen: random.Random, *, tries: int) -> str:
    """How many of ``tries`` bit flips in a data file torch's load notices, in words."""
    file = next(each for each in _saved(path) if each.suffix == ".distcp")
    size = os.stat(file).st_size

    def flipped(at: int, bit: int) -> Callable[[bytes], bytes]:
        return lambda whole: whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :]

    tally = _tally(file, path, [flipped(chosen.randrange(size), chosen.randrange(8)) for _ in range(tries)])
    return f"{tally['error']} of {tries} noticed, {tally['changed']} loaded as other values"


def detected_cuts(path: Path, chosen: random.Random, *, tries: int) -> str:
    """How many of ``tries`` truncations of a data file torch's load notices, in words."""
    file = next(each for each in _saved(path) if each.suffix == ".distcp")
    size = os.stat(file).st_size

    def cut(length: int) -> Callable[[bytes], bytes]:
        return lambda whole: whole[:length]

    tally = _tally(file, path, [cut(chosen.randrange(size)) for _ in range(tries)])
    return f"{tally['error']} of {tries} cuts noticed"
