"""Messages between the ranks of one job, as pickles.

Plans carry what planners put into them, objects of the user's own classes included, so only pickle can take them. The
bytes go from one process of a job to another over the job's own connection and live as long as one save or load; those
processes run the same program already. They are never written to a file and never read from one: what a checkpoint
holds does not pass through here.
"""

from __future__ import annotations

import pickle
from typing import Any


def encode_message(value: object) -> bytes:
    """``value`` as bytes for another rank of this job; whatever pickling raises passes through."""
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def decode_message(data: bytes) -> Any:
    """The value that another rank of this job encoded."""
    return pickle.loads(data)
