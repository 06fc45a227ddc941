"""What goes wrong with a store is told in words that help, ends in time, and is never taken for an empty place."""

from __future__ import annotations

import errno
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import holdfast
from holdfast import events
from holdfast.cli import app
from tests.stores.conftest import MIB, Place, settings_of
from tools.store_servers import StoreServer
from torture import relay
from torture.spoiling import Proxy, Request

State = Callable[..., dict[str, Any]]
LIMIT_S = 120.0


def run_python(program: str, **environment: str) -> str:
    """What a process of its own prints; its errors are in the failure."""
    source = str(Path(holdfast.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1", **environment},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def resume_at(url: str) -> object:
    with holdfast.CheckpointManager(url, save=holdfast.Every(steps=1), stop=None) as checkpoints:
        return checkpoints.resume({"w": torch.zeros(64, 3), "step": 0})


DOORS: dict[str, Callable[[str], object]] = {
    "save": lambda url: holdfast.save({"x": 1}, url),
    "async_save": lambda url: holdfast.async_save({"x": 1}, url).result(timeout=LIMIT_S),
    "load": lambda url: holdfast.load({"x": 0}, url),
    "read": holdfast.read,
    "open": holdfast.open,
    "verify": holdfast.verify,
    "sweep": holdfast.sweep,
    "delete": holdfast.delete,
    "steps": lambda url: holdfast.Steps(url).steps(),
    "latest": lambda url: holdfast.Steps(url).latest(),
    "resume": resume_at,
    "follow": lambda url: next(holdfast.follow(url, until=lambda: True), None),
}


@pytest.mark.parametrize("door", DOORS)
def test_a_bucket_that_is_not_there_is_not_an_empty_one(moto: StoreServer, prefix: str, door: str) -> None:
    url = f"s3://no-{prefix}/run"
    holdfast.Store(url, config=settings_of(moto))
    with pytest.raises(holdfast.StorageError, match=f"there is no bucket 's3://no-{prefix}'") as caught:
        DOORS[door](url)
    assert caught.value.errno == errno.ENXIO
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize("way", ["403", "expired token"])
@pytest.mark.parametrize("door", DOORS)
def test_a_store_that_lets_nobody_in(
    spoiled: Place, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, way: str, door: str
) -> None:
    for at in range(1, 40):
        proxy.spoil(way, at=at)
    with pytest.raises(holdfast.StorageError, match=r"credentials.*") as caught:
        DOORS[door](f"{spoiled.url}/run")
    assert caught.value.errno == errno.EACCES
    assert spoiled.url in str(caught.value)
    assert len(proxy.spoiled()) <= 4  # nothing is tried again and again


def test_wrong_credentials(serving: Callable[[str], StoreServer], prefix: str) -> None:
    server = serving("SeaweedFS")
    wrong = {**settings_of(server), "secret_access_key": "this-is-not-the-secret-of-it"}
    holdfast.Store(f"{server.url}/{prefix}", config=wrong)
    with pytest.raises(holdfast.StorageError, match="credentials") as caught:
        holdfast.save({"x": 1}, f"{server.url}/{prefix}/a")
    assert "this-is-not" not in str(caught.value)


def test_a_store_that_wants_fewer_requests_gets_them(
    spoiled: Place, proxy: Proxy, state: State, same: Callable[..., None]
) -> None:
    for at in (1, 4, 6, 8):
        proxy.spoil("503 not done", at=at)
    holdfast.save(state(2), f"{spoiled.url}/a")
    assert len(proxy.spoiled()) == 4
    same(holdfast.read(f"{spoiled.url}/a"), state(2))


@pytest.mark.parametrize("operation", ["put", "get"])
def test_a_store_that_never_answers_otherwise(spoiled: Place, proxy: Proxy, state: State, operation: str) -> None:
    url = f"{spoiled.url}/a"
    holdfast.save(state(1), url)

    def is_data(request: Request) -> bool:
        return request.operation == operation and "/data-" in request.path

    proxy.spoil("503 not done", always=True, where=is_data)
    with pytest.raises(holdfast.StorageError, match="data-") as caught:
        holdfast.save(state(2), url) if operation == "put" else holdfast.read(url)
    assert "SlowDown" in str(caught.value)
    assert caught.value.errno == errno.ETIMEDOUT
    assert len(proxy.spoiled()) > 1
    proxy.reset()
    assert holdfast.read(url)["step"] == 1
    assert len(spoiled.objects("a")) == 3


@pytest.mark.parametrize("operation", ["put", "get"])
def test_a_request_that_stalls_ends(spoiled: Place, proxy: Proxy, state: State, operation: str) -> None:
    url = f"{spoiled.url}/a"
    holdfast.save(state(1), url)
    holdfast.Store(spoiled.url, config=spoiled.store.config, request_s=0.5, retry_s=0)
    proxy.spoil(
        "late" if operation == "put" else "stall",
        always=True,
        where=lambda request: request.operation == operation and "/data-" in request.path,
    )
    with pytest.raises(holdfast.StorageError, match="data-"):
        holdfast.save(state(2), url) if operation == "put" else holdfast.read(url)
    assert len(proxy.spoiled()) >= 1
    proxy.reset()
    assert holdfast.read(url)["step"] == 1


@pytest.mark.parametrize("operation", ["put", "get"])
@pytest.mark.parametrize("name", ["manifest.json", "data-"])
def test_an_interrupt_arrives_while_a_request_stalls(
    spoiled: Place, proxy: Proxy, state: State, operation: str, name: str
) -> None:
    """However long the store is silent."""
    url = f"{spoiled.url}/a"
    holdfast.save(state(1), url)
    proxy.reset()
    proxy.spoil(
        "stall", always=True, where=lambda request: request.operation == operation and f"/{name}" in request.path
    )

    def interrupt() -> None:
        proxy.wait_held()
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        holdfast.save(state(2), url) if operation == "put" else holdfast.read(url)
    thread.join(LIMIT_S)
    proxy.release()
    proxy.reset()
    # The stalled put was done: it is whole, and either the new or the old one.
    assert holdfast.read(url)["step"] in ((1, 2) if operation == "put" and name == "manifest.json" else (1,))
    assert holdfast.verify(url).ok


def test_a_read_that_fails_does_not_wait_for_one_that_stalls(spoiled: Place, proxy: Proxy) -> None:
    """The store may be silent for ten minutes, and the other request is refused at once."""
    holdfast.save({"x": torch.arange(20 * MIB // 8)}, f"{spoiled.url}/a")
    holdfast.Store(spoiled.url, config=spoiled.store.config, request_s=600)

    def is_data(request: Request) -> bool:
        return request.method == "GET" and "/data-" in request.path

    proxy.spoil("stall", where=is_data)
    proxy.call_at(proxy.wait_held, at=2, where=is_data)
    proxy.spoil("403", at=3, where=is_data)
    with pytest.raises(holdfast.StorageError, match="credentials"):
        holdfast.read(f"{spoiled.url}/a")
    stalled, *_ = [request for request in proxy.spoiled() if request.way == "stall"]
    assert stalled.told is None


@pytest.mark.parametrize("name", ["credential", "NoSuchBucket", "a 403 b", "416 InvalidRange", "redirect"])
def test_a_name_that_looks_like_an_answer_is_none(spoiled: Place, proxy: Proxy, state: State, name: str) -> None:
    """A put of which nobody knows was once taken for a refusal, and the data that it may publish was removed."""
    url = f"{spoiled.url}/{name}/a"
    holdfast.save(state(1), url)
    holdfast.Store(spoiled.url, config=spoiled.store.config, retry_s=0)
    proxy.spoil(
        "500 not done", always=True, where=lambda request: request.method == "PUT" and "manifest" in request.path
    )
    with pytest.raises(holdfast.UncertainError):
        holdfast.save(state(2), url)
    assert len(spoiled.objects(f"{name}/a")) == 5
    for door in ("read", "steps", "delete"):
        proxy.reset()
        proxy.spoil("500 not done", always=True)
        with pytest.raises(holdfast.StorageError, match="no answer that helps") as caught:
            DOORS[door](url)
        assert caught.value.errno == errno.ETIMEDOUT


ANSWERS: dict[str, tuple[int, str, int, str]] = {
    "another region": (301, "<Code>PermanentRedirect</Code>", errno.EINVAL, "check the region"),
    "another region, as signed": (400, "<Code>AuthorizationHeaderMalformed</Code>", errno.EINVAL, "check the region"),
    "too long": (400, "<Code>KeyTooLongError</Code><Message>Too long</Message>", errno.EINVAL, "refuses this request"),
    "expired": (400, "<Code>ExpiredToken</Code>", errno.EACCES, "check the credentials"),
    "unknown identity": (400, "<Code>InvalidIdentityToken</Code>", errno.EACCES, "check the credentials"),
    "too many": (429, "", errno.ETIMEDOUT, "no answer that helps"),
    "too slow": (503, "<Code>SlowDown</Code>", errno.ETIMEDOUT, "no answer that helps"),
    "no text": (500, "", errno.ETIMEDOUT, "no answer that helps"),
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_what_a_store_answers_leads_to_what_can_be_done(prefix: str, answer: str) -> None:
    status, body, number, advice = ANSWERS[answer]
    reply = relay.Reply(status, [("Content-Type", "application/xml")], f"<Error>{body}</Error>".encode())
    with relay.relaying(lambda call: reply) as server:
        config = {"endpoint": f"http://{server.place}", "allow_http": True, "region": "here"}
        keys = {"access_key_id": "h1dden-key", "secret_access_key": "h1dden-secret"}
        holdfast.Store(f"s3://{prefix}", config={**config, **keys}, retry_s=0)
        for door in ("save", "read", "steps", "delete", "sweep"):
            with pytest.raises(holdfast.StorageError, match=advice) as caught:
                DOORS[door](f"s3://{prefix}/run")
            assert caught.value.errno == number
            assert b"h1dden" not in pickle.dumps(caught.value)


def test_who_has_no_credentials_is_told(prefix: str) -> None:
    """The client asks an address of the machine for some, where nobody may answer."""
    with relay.relaying(lambda call: None) as silent:
        # It must not be asked here, so somebody else is asked in its name.
        holdfast.Store(f"s3://{prefix}", config={"proxy_url": f"http://{silent.place}", "region": "a"}, retry_s=0)
        with pytest.raises(holdfast.StorageError, match="no credentials are set") as caught:
            holdfast.read(f"s3://{prefix}/run")
    assert caught.value.errno == errno.EACCES


def test_without_obstore_directories_work_and_urls_say_what_to_install(tmp_path: Path) -> None:
    said = run_python(
        f"""
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "obstore":
            raise ModuleNotFoundError("No module named 'obstore'", name="obstore")
sys.meta_path.insert(0, Blocked())
import holdfast
holdfast.save({{"x": 1}}, {str(tmp_path / "a")!r})
assert holdfast.read({str(tmp_path / "a")!r}) == {{"x": 1}}
for door in (
    holdfast.read,
    holdfast.verify,
    lambda url: holdfast.save({{"x": 1}}, url),
    lambda url: holdfast.async_save({{"x": 1}}, url).result(),
    lambda url: holdfast.Steps(url).steps(),
):
    try:
        door("s3://bucket/run")
    except holdfast.CheckpointError as error:
        print("told:", error)
"""
    )
    told = [line for line in said.splitlines() if line.startswith("told:")]
    assert len(told) == 5
    assert all("pip install holdfast[stores]" in line for line in told)
    assert "Traceback" not in said


FORKS = """
import os, sys
import holdfast
holdfast.save({"x": 1}, "memory://run/a")
reading, writing = os.pipe()
child = os.fork()
if not child:
    try:
        holdfast.read("memory://run/a")
        said = "read it"
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
    os.write(writing, said.encode())
    os._exit(0)
os.waitpid(child, 0)
print(os.read(reading, 10_000).decode())
print(holdfast.read("memory://run/a"))
"""


def test_a_forked_child_is_told_that_the_client_does_not_work() -> None:
    said = run_python(FORKS)
    assert "was forked from one that had used an object store" in said
    assert "CheckpointError" in said
    assert "{'x': 1}" in said


def test_a_child_that_was_forked_before_may_use_it() -> None:
    said = run_python(
        """
import os
import holdfast
holdfast.Store("memory://run")
child = os.fork()
if not child:
    holdfast.save({"x": 1}, "memory://run/a")
    os._exit(3 if holdfast.read("memory://run/a") == {"x": 1} else 4)
print("ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    )
    assert "ended with 3" in said


@pytest.mark.parametrize(
    "url", ["s3://user:h1dden-word@bucket/run", "s3://bucket/run?sig=h1dden-word", "s3://us:h1dden-w@h1dden-word@b/r"]
)
@pytest.mark.parametrize("door", [*DOORS, "Store"])
def test_a_url_with_a_password_or_a_query_is_refused_and_not_repeated(
    url: str, door: str, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[events.Event] = []
    with events.subscribe(told.append), pytest.raises((ValueError, holdfast.CheckpointError)) as caught:
        {**DOORS, "Store": holdfast.Store}[door](url)
    assert "is no URL of an object store" in str(caught.value)
    shown: list[str] = []
    error: BaseException | None = caught.value
    while error is not None:
        shown += [str(error), repr(error), *getattr(error, "__notes__", [])]
        error = error.__cause__ or error.__context__
    shown += [repr(event) for event in told] + [caplog.text]
    assert [text for text in shown if "h1dden" in text] == []


@pytest.mark.parametrize("command", ["show", "verify", "sweep", "steps"])
def test_the_words_of_the_command_line(moto: StoreServer, prefix: str, command: str) -> None:
    url = f"s3://no-{prefix}/run"
    holdfast.Store(url, config=settings_of(moto))
    done = CliRunner().invoke(app, [command, url], env={"COLUMNS": "250"})
    assert done.exit_code != 0
    assert "there is no bucket" in done.output + str(done.exception)
