"""What distributed tests share: one pool of worker processes for the whole session."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pool import Pool


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Worker processes: ``pool.run(world, function, *arguments)`` returns the results by rank."""
    # Workers import the module by name, and get sys.path from here.
    sys.path.insert(0, str(Path(__file__).parent))
    made: Pool = importlib.import_module("pool").Pool(tmp_path_factory.mktemp("pool"))
    try:
        yield made
    finally:
        made.close()
        sys.path.remove(str(Path(__file__).parent))
