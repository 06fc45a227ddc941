"""The Store: its settings, which of several serves a URL, clients that are given, and the secrets that it keeps."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pickle
import traceback
import urllib.request
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from obstore.store import MemoryStore, S3Store
from rich.console import Console

import holdfast
from holdfast import Store, events
from tests.stores.conftest import MIB, Place, client_of, settings_of
from tests.stores.test_errors import DOORS
from tools.store_servers import StoreServer
from torture import relay
from torture.spoiling import Proxy

State = Callable[..., dict[str, Any]]


def test_it_is_a_path() -> None:
    store = Store("memory://run/a/")
    assert os.fspath(store) == store.url == "memory://run/a"
    assert store / "step-1" == "memory://run/a/step-1"
    assert store / Path("b/c") == "memory://run/a/b/c"
    assert repr(store) == "Store('memory://run/a')"


@pytest.mark.parametrize(
    "options",
    [
        {"requests": 0},
        {"part_bytes": 5 * MIB - 1},
        {"retry_s": -1},
        {"request_s": 0},
        {"retry_s": float("nan")},
        {"request_s": float("nan")},
        {"check": "some"},
        {"conditional": "never"},
        {"config": {"endpoint": None}},
        {"config": {"endpoint": ["a"]}},
    ],
)
def test_settings_that_make_no_sense(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"is|are|>"):
        Store("s3://bucket/refused", **options)


@pytest.mark.parametrize("url", ["", "bucket/run", "/tmp/run", "https://host/run", "file:///tmp/run", "s3:/bucket"])
def test_what_is_no_url_of_a_store(url: str) -> None:
    with pytest.raises(ValueError, match="no URL of an object store"):
        Store(url)


def test_a_refused_store_serves_nothing(moto: StoreServer, prefix: str) -> None:
    url = f"{moto.url}/{prefix}"
    Store(url, config=settings_of(moto))
    with pytest.raises(ValueError, match="check"):
        Store(url, config={}, check="some")  # type: ignore[arg-type]
    holdfast.save({"x": 1}, f"{url}/a")


def test_the_same_store_in_another_process(moto: StoreServer, prefix: str) -> None:
    store = Store(
        f"{moto.url}/{prefix}",
        config=settings_of(moto),
        requests=3,
        part_bytes=6 * MIB,
        retry_s=7,
        request_s=8,
        check="all",
        conditional="unsafe",
    )
    again = pickle.loads(pickle.dumps(store))
    assert again.settings == store.settings
    assert (again.url, again.check, again.part_bytes, again.requests) == (store.url, "all", 6 * MIB, 3)
    holdfast.save({"x": 1}, again / "a")


@pytest.mark.parametrize("made", [lambda: Store("memory://here"), lambda: Store("s3://b/x", config=MemoryStore())])
def test_what_no_other_process_can_have_is_not_pickled(made: Callable[[], Store]) -> None:
    with pytest.raises(holdfast.InvalidStateError, match="this process alone"):
        pickle.dumps(made())


def test_the_longest_url_wins() -> None:
    clients = {name: MemoryStore() for name in ("s3://own/a", "s3://own/a/b", "s3://own/ab")}
    for url in reversed(clients):
        Store(url, config=clients[url])
    for url in ("s3://own/a/x", "s3://own/a/b/x", "s3://own/a/bc/x", "s3://own/ab/x"):
        holdfast.save({"x": url}, url)
    held = {
        url: sorted({each["path"].split("/")[0] for page in client.list() for each in page} - {".holdfast"})
        for url, client in clients.items()
    }
    assert held == {"s3://own/a": ["bc", "x"], "s3://own/a/b": ["x"], "s3://own/ab": ["x"]}
    assert holdfast.read("s3://own/a/b/x") == {"x": "s3://own/a/b/x"}


def test_the_url_of_a_given_client_is_where_its_keys_begin() -> None:
    client = MemoryStore()
    store = Store("s3://anything", config=client)
    holdfast.save({"x": 1}, store)
    names = {each["path"].partition("-")[0] for page in client.list() for each in page}
    assert {"manifest.json", "index"} <= names
    holdfast.delete(store)
    with pytest.raises(holdfast.NotFoundError):
        holdfast.read(store)
    holdfast.save({"x": 2}, store)
    assert holdfast.read("s3://anything") == {"x": 2}


def test_the_scheme_may_be_in_capitals(prefix: str) -> None:
    holdfast.save({"x": 1}, f"MEMORY://{prefix}/a")
    assert holdfast.read(f"memory://{prefix}/a") == {"x": 1}


def test_memory_is_one_for_all_urls_of_the_process(prefix: str) -> None:
    holdfast.save({"x": 1}, f"memory://{prefix}/a")
    Store(f"memory://{prefix}")
    assert holdfast.read(f"memory://{prefix}/a") == {"x": 1}


def make_bucket(server: StoreServer, name: str) -> None:
    # Moto wants a signature, and takes any.
    signature = {"authorization": "AWS4-HMAC-SHA256 Credential=tests/20260101/us-east-1/s3/aws4_request, Signature=a"}
    request = urllib.request.Request(f"{server.endpoint}/{name}", method="PUT", headers=signature)
    with urllib.request.urlopen(request, timeout=60) as reply:
        assert reply.status == 200


def test_the_environment_makes_a_store(
    moto: StoreServer, prefix: str, monkeypatch: pytest.MonkeyPatch, state: State
) -> None:
    for name, value in moto.config.items():
        monkeypatch.setenv(f"AWS_{name.upper()}", value)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    # A bucket that no other test names, so that its store is made from this environment.
    make_bucket(moto, prefix)
    holdfast.save(state(), f"s3://{prefix}/a")
    assert holdfast.read(f"s3://{prefix}/a")["step"] == 1


def test_settings_that_obstore_does_not_know_are_named(prefix: str) -> None:
    Store(f"s3://{prefix}/run", config={"no_such_setting": "x", "secret_access_key": "h1dden-secret"})
    with pytest.raises(holdfast.StorageError, match="no_such_setting") as caught:
        holdfast.read(f"s3://{prefix}/run")
    assert "h1dden" not in str(caught.value)


def test_requests_are_divided_among_the_ranks_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store("s3://bucket/divided", requests=16)
    counts = []
    for ranks in ("1", "4", "100", "none"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        counts.append(store.requests)
    assert counts == [16, 4, 1, 16]


SECRETS = ("h1dden-access-key", "h1dden-secret-key", "h1dden-token", "h1dden-of-the-environment")


@pytest.mark.parametrize("way", [None, "403", "expired token", "500 not done", "not arrived", "409 not done"])
def test_no_secret_is_told(
    spoiled: Place,
    proxy: Proxy,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    state: State,
    way: str | None,
) -> None:
    """Not in errors, logs, events, representations, or in the bucket."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRETS[3])
    names = dict(zip(("access_key_id", "secret_access_key", "token"), SECRETS, strict=False))
    store = Store(spoiled.url, config={**spoiled.store.config, **names}, retry_s=0.2)
    told: list[Any] = []
    caplog.set_level(logging.DEBUG)
    with events.subscribe(told.append):
        if way is None:
            for door in DOORS.values():
                with contextlib.suppress(holdfast.NotFoundError):
                    told.append(door(f"{store.url}/run"))
        else:
            for door in ("save", "read", "steps", "resume"):
                proxy.reset()
                for at in range(1, 12):
                    proxy.spoil(way, at=at)
                try:
                    told.append(DOORS[door](f"{store.url}/run"))
                except holdfast.CheckpointError as error:
                    told += [error, error.__cause__, error.__context__]
            assert way == "409 not done" or any(isinstance(each, holdfast.StorageError) for each in told)
    rich = io.StringIO()
    Console(file=rich, width=500).print(store, store.settings)
    shown = [caplog.text, repr(store), repr(store.settings), rich.getvalue(), *map(repr, told), *map(str, told)]
    assert [text for text in shown if "h1dden" in text] == []
    assert [name for name in spoiled.objects() if b"h1dden" in spoiled.get(name)] == []


def test_a_server_that_repeats_secrets_is_not_quoted(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As S3 does with the id of a key that it does not know."""
    monkeypatch.setenv("SOMEBODYS_PASSWORD", SECRETS[3])
    said = f"<Code>InvalidAccessKeyId</Code><Message>{' '.join(SECRETS)} is unknown</Message>"
    body = f"<Error>{said}</Error>".encode()
    names = dict(zip(("access_key_id", "secret_access_key", "token"), SECRETS, strict=False))
    with relay.relaying(lambda call: relay.Reply(403, [("Content-Type", "application/xml")], body)) as server:
        config = {"endpoint": f"http://{server.place}", "allow_http": True, "region": "here", **names}
        Store(f"s3://{prefix}", config=config)
        for door in DOORS.values():
            with pytest.raises(holdfast.StorageError, match=r"InvalidAccessKeyId.*is unknown") as caught:
                door(f"s3://{prefix}/run")
            assert "h1dden" not in str(caught.value)


def test_a_given_client_is_used_for_all(moto: StoreServer, prefix: str, state: State) -> None:
    from obstore.store import S3Store

    config: Any = dict(moto.config)
    client = S3Store("bucket", prefix=prefix, config=config, client_options={"allow_http": True})
    store = Store(f"s3://bucket/{prefix}", config=client)
    holdfast.save(state(), store / "a")
    assert holdfast.read(f"s3://bucket/{prefix}/a")["step"] == 1
    assert [step.step for step in holdfast.Steps(store).steps()] == []
    direct = Place(url=f"s3://bucket/{prefix}", base="s3://bucket", client=client_of(moto), store=store)
    assert "a/manifest.json" in direct.objects()


def test_a_provider_of_credentials_is_asked_again_when_they_expire(moto: StoreServer, prefix: str) -> None:
    asked: list[int] = []

    def provider() -> Any:
        asked.append(1)
        expires = datetime.now(timezone.utc)  # at once
        keys = {name: moto.config[name] for name in ("access_key_id", "secret_access_key")}
        return {**keys, "token": None, "expires_at": expires}

    place: Any = {"endpoint": moto.endpoint, "region": "here", "client_options": {"allow_http": True}}
    store = Store(
        f"{moto.url}/{prefix}", config=S3Store("bucket", prefix=prefix, credential_provider=provider, **place)
    )
    holdfast.async_save({"x": 1}, store / "a").result(timeout=60)
    assert holdfast.read(store / "a") == {"x": 1}
    assert len(asked) > 1


def test_nothing_secret_is_in_the_frames_of_an_error(prefix: str) -> None:
    """Tools that report errors show variables, by their repr."""
    config = {"no_such_setting": "x", "secret_access_key": "h1dden-secret", "proxy_url": "http://u:h1dden-word@a"}
    Store(f"s3://{prefix}/run", config=config)
    del config
    try:
        holdfast.read(f"s3://{prefix}/run")
    except holdfast.StorageError as error:
        trace = traceback.TracebackException.from_exception(error, capture_locals=True)
        ours = [frame for frame in trace.stack if f"{os.sep}holdfast{os.sep}" in frame.filename]
        assert any(frame.name == "_made" for frame in ours)
        assert [(frame.name, frame.locals) for frame in ours if "h1dden" in repr(frame.locals)] == []
