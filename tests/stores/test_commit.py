"""The commit in an object store: whatever the store answers, what is there decides, and nothing is published twice."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import pytest
import torch
from obstore.store import LocalStore

import holdfast
from holdfast import Store
from holdfast.errors import StorageError
from tests.stores.conftest import MIB, Place, place_at, settings_of, started
from tools.store_servers import StoreServer
from torture.spoiling import Proxy, Request

State = Callable[..., dict[str, Any]]
Same = Callable[..., None]


def is_put_of(name: str) -> Callable[[Request], bool]:
    return lambda request: request.method == "PUT" and name in request.path.rpartition("/")[2]


def is_read_of(name: str) -> Callable[[Request], bool]:
    return lambda request: request.method == "GET" and name in request.path.rpartition("/")[2]


is_manifest = is_put_of("manifest.json")


@pytest.mark.parametrize("overwrites", [False, True])
@pytest.mark.parametrize(
    "way", ["not arrived", "no reply", "cut reply", "500 done", "500 not done", "503 not done", "409 not done"]
)
def test_an_answer_that_says_the_wrong_thing_once(
    spoiled: Place, proxy: Proxy, state: State, same: Same, way: str, overwrites: bool
) -> None:
    url = f"{spoiled.url}/a"
    if overwrites:
        holdfast.save(state(1), url)
    proxy.spoil(way, where=is_manifest)
    holdfast.save(state(2), url, overwrite=overwrites)
    assert [request.way for request in proxy.spoiled()] == [way]
    same(holdfast.read(url), state(2))
    assert len(spoiled.objects("a")) == 3
    assert holdfast.sweep(spoiled.url).leftovers == ()


def test_published_though_every_answer_says_it_failed(spoiled: Place, proxy: Proxy, state: State, same: Same) -> None:
    proxy.spoil("500 done", always=True, where=is_manifest)
    holdfast.save(state(2), f"{spoiled.url}/a")
    assert len(proxy.spoiled()) > 1
    proxy.reset()
    same(holdfast.read(f"{spoiled.url}/a"), state(2))


def test_nobody_knows_if_it_cannot_be_read_back(spoiled: Place, proxy: Proxy, state: State, same: Same) -> None:
    """It is published, and that cannot be seen. Nothing may be removed then."""
    url = f"{spoiled.url}/a"
    holdfast.save(state(1), url)
    old = spoiled.objects("a")
    # The first read is before the save; the one after the put, and its tries, fail.
    proxy.spoil("500 not done", at=2, always=True, where=is_read_of("manifest.json"))
    with pytest.raises(holdfast.UncertainError, match="a"):
        holdfast.save(state(2), url)
    assert len(proxy.spoiled()) > 1
    proxy.reset()
    assert old.keys() <= spoiled.objects("a").keys()
    same(holdfast.read(url), state(2))
    assert holdfast.verify(url).ok


def test_a_store_that_refuses_the_manifest(spoiled: Place, proxy: Proxy, state: State, same: Same) -> None:
    url = f"{spoiled.url}/a"
    holdfast.save(state(1), url)
    proxy.spoil("403", always=True, where=is_manifest)
    with pytest.raises(holdfast.StorageError, match="credentials") as caught:
        holdfast.save(state(2), url)
    assert not isinstance(caught.value, holdfast.UncertainError)
    assert len(proxy.spoiled()) >= 1
    proxy.reset()
    same(holdfast.read(url), state(1))
    assert len(spoiled.objects("a")) == 3


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_loser_of_two_savers_is_told(
    spoiled: Place, proxy: Proxy, state: State, same: Same, overwrite: bool
) -> None:
    """Another save is published just before the put of the manifest, and stays."""
    url = f"{spoiled.url}/a"
    holdfast.save(state(5), f"{spoiled.url}/b")
    other = {name: spoiled.get(f"b/{name}") for name in spoiled.objects("b")}
    if overwrite:
        holdfast.save(state(1), url)

    def publish_other() -> None:
        for name, data in other.items():
            spoiled.put(f"a/{name}", data)

    proxy.call_at(publish_other, where=lambda request: is_manifest(request) and "/a/" in request.path)
    with pytest.raises(holdfast.AlreadyPublishedError, match="another save"):
        holdfast.save(state(2), url, overwrite=overwrite)
    same(holdfast.read(url), state(5))
    assert holdfast.verify(url).ok
    # What the loser uploaded is gone; what the winner replaced is the winner's to remove.
    assert len(holdfast.sweep(spoiled.url).leftovers) == overwrite


def test_a_checkpoint_that_is_deleted_while_it_is_replaced(
    spoiled: Place, proxy: Proxy, state: State, same: Same
) -> None:
    url = f"{spoiled.url}/a"
    holdfast.save(state(1), url)
    done: list[object] = []
    proxy.call_at(
        lambda: done.append(holdfast.delete(url)),
        where=lambda request: is_manifest(request) and not done,
    )
    holdfast.save(state(2), url)
    assert len(done) == 1
    same(holdfast.read(url), state(2))


@pytest.mark.parametrize("way", ["half body up", "200 not done"])
@pytest.mark.parametrize("check", ["size", "sample", "all"])
def test_a_store_that_keeps_less_than_it_says(
    spoiled: Place, proxy: Proxy, state: State, same: Same, check: Any, way: str
) -> None:
    """The checkpoint that is there stays, and nothing of the new one."""
    store = holdfast.Store(spoiled.url, config=spoiled.store.config, check=check)
    holdfast.save(state(1), store / "a")
    for name in ("data-",) if check == "size" else ("data-", "index-"):
        proxy.reset()
        proxy.spoil(way, where=is_put_of(name))
        with pytest.raises(holdfast.StorageError, match="do not trust"):
            holdfast.save(state(2), store / "a")
        assert len(proxy.spoiled()) == 1
        same(holdfast.read(store / "a"), state(1))
        assert len(spoiled.objects("a")) == 3


@pytest.mark.parametrize("name", ["data-", "index-"])
def test_a_store_that_changes_a_bit(spoiled: Place, proxy: Proxy, state: State, same: Same, name: str) -> None:
    """The bit is in the padding of the header, or in the index: both are looked at too."""
    store = holdfast.Store(spoiled.url, config=spoiled.store.config, check="all")
    holdfast.save(state(1), store / "a")
    proxy.spoil("flipped bit up", where=is_put_of(name))
    with pytest.raises(holdfast.StorageError, match="has not kept"):
        holdfast.save(state(2), store / "a")
    assert len(proxy.spoiled()) == 1
    same(holdfast.read(store / "a"), state(1))
    assert len(spoiled.objects("a")) == 3


def test_a_size_does_not_tell_of_a_bit_and_verify_does(spoiled: Place, proxy: Proxy, state: State) -> None:
    proxy.spoil("flipped bit up", where=is_put_of("data-"))
    holdfast.save(state(), f"{spoiled.url}/a")
    assert len(proxy.spoiled()) == 1
    assert not holdfast.verify(f"{spoiled.url}/a").ok


@pytest.mark.parametrize("name", ["data-", "index-"])
def test_what_nobody_looked_at_is_found_by_the_load(spoiled: Place, proxy: Proxy, state: State, name: str) -> None:
    store = holdfast.Store(spoiled.url, config=spoiled.store.config, check="off")
    proxy.spoil("half body up", where=is_put_of(name))
    holdfast.save(state(1), store / "a")
    assert len(proxy.spoiled()) == 1
    with pytest.raises(holdfast.CorruptError, match=name):
        holdfast.read(store / "a")


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_all_of_an_object_in_parts_is_looked_at(spoiled: Place, proxy: Proxy, kind: str) -> None:
    store = holdfast.Store(spoiled.url, config=spoiled.store.config, check="all", part_bytes=5 * MIB)
    state = {"x": torch.arange(11 * MIB // 8)}
    proxy.spoil("flipped bit up", at=2, where=lambda request: request.operation == "part")
    handle = holdfast.async_save(state, store / "a", async_checkpointer_type=holdfast.AsyncCheckpointerType(kind))
    with pytest.raises(holdfast.StorageError, match="has not kept"):
        handle.result(timeout=60)
    assert len(proxy.spoiled()) == 1
    assert spoiled.objects("a") == {}
    holdfast.async_save(state, store / "a", async_checkpointer_type=holdfast.AsyncCheckpointerType(kind)).result(
        timeout=60
    )
    assert holdfast.verify(store / "a").ok
    holdfast.release()


def test_check_off_asks_nothing_more(spoiled: Place, proxy: Proxy, state: State) -> None:
    counts = {}
    for check in ("off", "size", "all"):
        store = holdfast.Store(spoiled.url, config=spoiled.store.config, check=check)  # type: ignore[arg-type]
        holdfast.save(state(), store / "a")
        proxy.reset()
        holdfast.save(state(), store / "a")
        counts[check] = len(proxy.requests())
    assert counts["off"] < counts["size"] < counts["all"]


def test_an_upload_that_fails_after_its_status_was_sent(spoiled: Place, proxy: Proxy, same: Same) -> None:
    state = {"x": torch.arange(11 * MIB // 8)}
    proxy.spoil("200 with an error", where=lambda request: request.operation == "complete")
    try:
        holdfast.save(state, f"{spoiled.url}/a")
    except holdfast.StorageError:
        with pytest.raises(holdfast.NotFoundError):
            holdfast.read(f"{spoiled.url}/a")
    else:
        same(holdfast.read(f"{spoiled.url}/a"), state)
        assert holdfast.verify(f"{spoiled.url}/a").ok
    assert len(proxy.spoiled()) == 1


def test_a_store_that_ignores_conditions_is_refused(prefix: str, state: State) -> None:
    with started("rclone") as server:
        place = place_at(server, prefix)
        with pytest.raises(holdfast.StorageError, match="ignores the condition of a put"):
            holdfast.save(state(1), place.store / "a")
        assert [name for name in place.objects() if ".holdfast" not in name] == []
        store = holdfast.Store(place.url, config=settings_of(server), conditional="unsafe")
        holdfast.save(state(1), store / "a")
        holdfast.save(state(2), store / "a")
        assert len(place.objects("a")) == 3
        # It answers with the whole object where a part was asked for.
        with pytest.raises(holdfast.StorageError, match="use another store"):
            holdfast.read(store / "a")


def test_a_client_without_conditions_is_refused(tmp_path: Any, state: State) -> None:
    """Obstore's own for directories has no put on condition of a version."""
    store = holdfast.Store("s3://local/run", config=LocalStore(tmp_path))
    with pytest.raises(holdfast.StorageError, match="use another store"):
        holdfast.save(state(), store / "a")
    assert [each for each in tmp_path.rglob("*") if "data-" in each.name] == []


def test_the_probe_is_asked_once(moto: StoreServer, spoiled: Place, proxy: Proxy, state: State) -> None:
    holdfast.save(state(), f"{spoiled.url}/a")
    proxy.reset()
    holdfast.save(state(), f"{spoiled.url}/b")
    assert [request for request in proxy.requests() if "probe" in request.path] == []
    assert len(proxy.requests()) <= 10


def test_what_stays_of_a_replaced_checkpoint_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = "memory://told/step"
    holdfast.save({"a": torch.ones(3)}, path)

    def refuse(self: Store, urls: list[str]) -> None:
        raise StorageError("no right to delete", errno=errno.EACCES, path=path)

    monkeypatch.setattr(Store, "delete", refuse)
    holdfast.save({"a": torch.zeros(3)}, path)
    assert "was replaced, and the objects of before stay: no right to delete" in caplog.text
    assert holdfast.read(path)["a"].tolist() == [0, 0, 0]


def test_what_stays_of_a_save_that_failed_is_told(
    spoiled: Place, proxy: Proxy, state: State, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"{spoiled.url}/a"
    proxy.spoil("403", always=True, where=is_manifest)
    proxy.spoil("403", always=True, where=lambda request: request.operation == "delete")
    with pytest.raises(holdfast.StorageError, match="credentials"):
        holdfast.save(state(), url)
    assert f"a save to {url!r} failed, and its objects stay: cannot remove" in caplog.text
    proxy.reset()
    assert len(spoiled.objects("a")) == 2
