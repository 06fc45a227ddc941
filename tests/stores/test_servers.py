"""Each server keeps a checkpoint. The run shows here which servers are not installed, and were left out elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import holdfast
from tests.stores.conftest import SERVERS, place_at
from tools.store_servers import StoreServer


@pytest.mark.parametrize("name", SERVERS)
def test_a_server_keeps_a_checkpoint(
    serving: Callable[[str], StoreServer], prefix: str, state: Callable[..., dict[str, Any]], name: str
) -> None:
    place = place_at(serving(name), prefix)
    holdfast.save(state(), place.store / "a")
    assert holdfast.read(place.store / "a")["step"] == 1
    assert len(place.objects("a")) == 3
