"""What distributed tests share: one crew of rank processes for the whole session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tools.crew import Crew


@pytest.fixture(scope="session")
def pool() -> Iterator[Crew]:
    """Rank processes: ``pool.run(world, function, *arguments)`` returns the results by rank."""
    with Crew(for_tests=True) as crew:
        yield crew
