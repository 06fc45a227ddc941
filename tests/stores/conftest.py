"""What the tests of object stores share: the servers, a place in each that nobody else has, and a proxy that spoils."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import obstore
import pytest
import torch
from obstore.store import MemoryStore, from_url

import holdfast
from tests.stores import google
from tests.unit.conftest import assert_same_state
from tools import store_servers
from tools.store_servers import StoreServer
from torture import spoiling

MIB = 1 << 20
_numbers = itertools.count()

SERVERS = ["moto", "SeaweedFS", "Azurite"]
GOOGLE = "moto with Google's conditions"


def is_installed(name: str) -> bool:
    try:
        store_servers.SERVERS[name]()
    except store_servers.NotInstalled:
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class Place:
    """A folder of a store that nobody else has. ``client`` is obstore's own, with keys that begin at ``base``."""

    url: str
    base: str
    client: Any
    store: holdfast.Store
    server: StoreServer | None = None

    def _key(self, name: str) -> str:
        return f"{self.url}/{name}".removeprefix(self.base).strip("/")

    def objects(self, folder: str = "") -> dict[str, int]:
        """The sizes of all objects below a folder, by their names from there."""
        prefix = self._key(folder) + "/" if self._key(folder) else ""
        found = [each for page in obstore.list(self.client, prefix or None) for each in page]
        return {each["path"][len(prefix) :]: each["size"] for each in found}

    def get(self, name: str) -> bytes:
        return bytes(obstore.get(self.client, self._key(name)).bytes())

    def put(self, name: str, data: bytes) -> None:
        obstore.put(self.client, self._key(name), data)

    def remove(self, name: str) -> None:
        obstore.delete(self.client, self._key(name))

    def data_of(self, folder: str, number: int = 0) -> str:
        """The name of a data object of the checkpoint there."""
        return folder + "/" + [name for name in sorted(self.objects(folder)) if name.startswith("data-")][number]


def settings_of(server: StoreServer) -> dict[str, Any]:
    return {**server.config, **server.client_options}


def client_of(server: StoreServer) -> Any:
    options: Any = {"config": dict(server.config), "client_options": dict(server.client_options)}
    return from_url(server.url, **options)


@contextlib.contextmanager
def started(name: str) -> Iterator[StoreServer]:
    try:
        serving = store_servers.SERVERS[name]()
    except store_servers.NotInstalled as error:
        pytest.skip(str(error))
    with serving as server:
        yield server


@pytest.fixture(scope="session")
def serving() -> Iterator[Callable[[str], StoreServer]]:
    """Starts a server when it is first asked for."""
    with contextlib.ExitStack() as stack:
        known: dict[str, StoreServer] = {}

        def server(name: str) -> StoreServer:
            if name not in known:
                serving = google.speaking(server("moto")) if name == GOOGLE else started(name)
                known[name] = stack.enter_context(serving)
            return known[name]

        yield server


@pytest.fixture
def moto(serving: Callable[[str], StoreServer]) -> StoreServer:
    return serving("moto")


@pytest.fixture
def prefix() -> str:
    """The name of a folder that nobody else has, whichever process asks."""
    return f"test-{os.getpid()}-{next(_numbers)}"


def place_at(server: StoreServer, prefix: str, **options: Any) -> Place:
    url = f"{server.url}/{prefix}"
    store = holdfast.Store(url, config=settings_of(server), **options)
    return Place(url=url, base=server.url, client=client_of(server), store=store, server=server)


# test_servers.py is skipped for those that are not installed, and says why; once is enough.
@pytest.fixture(params=["memory", GOOGLE, *filter(is_installed, SERVERS)])
def place(request: pytest.FixtureRequest, serving: Callable[[str], StoreServer], prefix: str) -> Place:
    """A place in each of the servers, and in memory. Uploads have parts of 5 MiB."""
    if request.param != "memory":
        return place_at(serving(request.param), prefix, part_bytes=5 * MIB)
    url, client = f"memory://{prefix}", MemoryStore()
    store = holdfast.Store(url, config=client, part_bytes=5 * MIB)
    return Place(url=url, base=url, client=client, store=store)


@pytest.fixture
def bucket(moto: StoreServer, prefix: str) -> Place:
    """A place in moto alone, for what does not depend on the server."""
    return place_at(moto, prefix, part_bytes=5 * MIB)


@pytest.fixture(scope="session")
def open_proxy(serving: Callable[[str], StoreServer]) -> Iterator[spoiling.Proxy]:
    with spoiling.proxy(serving("moto")) as proxy:
        yield proxy


@pytest.fixture
def proxy(open_proxy: spoiling.Proxy) -> Iterator[spoiling.Proxy]:
    """A proxy to moto that spoils nothing yet; at the end nothing is held any more."""
    open_proxy.reset()
    yield open_proxy
    open_proxy.reset()


@pytest.fixture
def spoiled(proxy: spoiling.Proxy, moto: StoreServer, prefix: str) -> Place:
    """A place in moto behind the proxy; ``client`` goes past it."""
    url = f"{moto.url}/{prefix}"
    store = holdfast.Store(
        url, config=settings_of(proxy.server), part_bytes=5 * MIB, retry_s=0.7, request_s=20, requests=4
    )
    return Place(url=url, base=moto.url, client=client_of(moto), store=store, server=proxy.server)


@pytest.fixture
def same() -> Callable[..., None]:
    return assert_same_state


@pytest.fixture(autouse=True)
def _known_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the machine's own settings takes part, and nothing looks for credentials on the network."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_", "AZURE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def state_of(number: int = 1) -> dict[str, Any]:
    """A small state that tells its number."""
    return {"w": torch.full((64, 3), float(number)), "step": number}


@pytest.fixture
def state() -> Callable[..., dict[str, Any]]:
    return state_of
