"""What is done to a store in the part ``stores``, and what must be there afterwards.

Everything runs in forked children of a process that has a server and a proxy, and has never used a store itself: the
client does not work after a fork. A child goes through the proxy or, to prepare and to judge, straight to the server.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import obstore  # noqa: F401  so that children find it imported
import torch

import holdfast
from holdfast._io.stores import Store, store_of
from tools import store_servers
from torture import managing, saves, spoiling
from torture.crew import Child

PLAIN = ("save", "save in parts", "save, all checked", "replace", "delete", "load", "verify")
OF_RUNS = ("manager", "follow")
SILENT = ("half body up", "flipped bit up")
"""Ways that damage what the store keeps, and tell nobody."""
_LIES = ("half body down", "flipped bit down", "404 though there")

_FOREIGN = ("data-somebody-0-0.safetensors", "index-somebody.safetensors")
"""Objects of an attempt whose saver may live: they stay whatever happens."""
_MANIFEST = "manifest.json"
CHILD_S = 240.0
_numbers = itertools.count(1)


@functools.cache
def world() -> tuple[store_servers.StoreServer, spoiling.Proxy]:
    """A server of this process, and a proxy before it; both are gone with the process."""
    torch.set_num_threads(1)  # children that are forked have no other threads
    stack = contextlib.ExitStack()
    server = stack.enter_context(store_servers.moto())
    proxy = stack.enter_context(spoiling.proxy(server))
    _open.append(stack)
    return server, proxy


_open: list[contextlib.ExitStack] = []


def new_url() -> str:
    """A folder in one of its own, where nobody has tried the store yet."""
    return f"{world()[0].url}/case-{next(_numbers)}/it"


def use(
    server: store_servers.StoreServer, url: str, *, mode: str = "", limit_s: float = 30, prove: bool = True
) -> Store:
    """Have all requests below ``url`` go to the ``server`` from now on."""
    return Store(
        url,
        config={**server.config, **server.client_options},
        requests=4,
        part_bytes=5 << 20,
        retry_s=limit_s,
        request_s=limit_s,
        check="all" if mode == "save, all checked" else "size",
        conditional="safe" if prove else "unsafe",
    )


def in_child(function: Callable[[], Any]) -> Any:
    """What the function returns in a child; RuntimeError where it raises or hangs."""
    end = Child(function).end(CHILD_S)
    if end.status != 0 or end.hung:
        raise RuntimeError(f"a child ended with {end}")
    return end.told


def state_of(version: int, mode: str = "") -> dict[str, Any]:
    more = {"more": torch.full((3 << 19,), float(version))} if mode == "save in parts" else {}
    return {**saves.state_of(version), **more}


def version_of(state: dict[str, Any], mode: str = "") -> int:
    """The version of a loaded state; Torn unless it is whole."""
    step = state.get("step")
    if type(step) is not int or not saves.equal(state, state_of(step, mode)):
        raise saves.Torn(f"step {step!r}, but not everything is of that version")
    return step


def save(url: str, version: int, mode: str = "", *, overwrite: bool = False) -> None:
    writer = holdfast.NativeWriter(url, overwrite=overwrite)
    holdfast.save(state_of(version, mode), storage_writer=writer)


def found(url: str, mode: str = "") -> int | str | None:
    """The version that is there, whole and verified; None for no checkpoint; a text that tells of damage."""
    try:
        return version_of(holdfast.read(url), mode)
    except holdfast.NotFoundError:
        return None
    except (saves.Torn, holdfast.CheckpointError) as error:
        return f"damaged: {type(error).__name__}: {error}"


def prepare(url: str, mode: str) -> None:
    """What is there before: an attempt of somebody else, and version 1 where there is something to be replaced."""
    use(world()[0], url, prove=False)
    if mode in OF_RUNS:
        for step in (1, 2):
            save(f"{url}/step-{step}", step)
        return
    for name in _FOREIGN:
        store_of(url).put(f"{url}/{name}", b"of somebody else")
    if before(mode):
        save(url, 1, mode)


def before(mode: str) -> int | None:
    return None if mode.startswith("save") else 1


def after(mode: str) -> int | None:
    return {"delete": None, "load": 1, "verify": 1, "manager": 3, "follow": 1}.get(mode, 2)


def operate(url: str, mode: str, version: int = 2, *, overwrite: bool = False) -> Any:
    """The operation that is disturbed."""
    if after(mode) == 2:
        save(url, version, mode, overwrite=overwrite)
    elif mode == "delete":
        return list(holdfast.delete(url).problems)
    elif mode == "load":
        target = {
            name: torch.zeros_like(each) if isinstance(each, torch.Tensor) else each
            for name, each in state_of(0).items()
        }
        holdfast.load(target, url)
        return version_of(target)
    elif mode == "verify":
        return holdfast.verify(url).ok
    elif mode == "follow":
        held = []
        for step in holdfast.follow(url, start="all", poll_s=0.01, until=lambda: True):
            held.append(version_of(holdfast.read(step.path)))
        return held
    else:
        return managed(url, 3)
    return None


def managed(root: str, step: int) -> int | None:
    """Resume, and save one step with a manager that keeps two; the step it resumed from."""
    due, keep = holdfast.Every(steps=1), holdfast.Latest(2)
    with (
        managing.quiet(),
        holdfast.CheckpointManager(root, save=due, keep=keep, stop=None, asynchronous=False) as manager,
    ):
        target = state_of(0)
        resumed = manager.resume(target)
        if resumed.step != version_of(target):
            raise saves.Torn(f"resumed from {resumed.step}, and the state is of {version_of(target)}")
        manager.save(step, state_of(step), force=True)
    return resumed.step


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What the caller of an operation was told: an error and its text, or the value that came back."""

    error: str | None = None
    message: str = ""
    value: Any = None


def attempted(url: str, mode: str, version: int = 2, *, overwrite: bool = False) -> dict[str, Any]:
    """The fields of what ``operate`` told."""
    try:
        return {"value": operate(url, mode, version, overwrite=overwrite)}
    except holdfast.CheckpointError as error:
        return {"error": type(error).__name__, "message": str(error)}


def disturbed(url: str, mode: str, limit: float) -> dict[str, Any]:
    """Prepare, and do it through the proxy."""
    prepare(url, mode)
    use(world()[1].server, url, mode=mode, limit_s=limit)
    return attempted(url, mode, overwrite=mode == "replace")


def untrue(url: str, mode: str, way: str, told: Told) -> Iterator[str]:
    """What is wrong with what the caller was told, whatever is there."""
    if told.error is None:
        if mode == "load" and told.value != 1:
            yield f"version {told.value} was loaded"
        if mode == "verify" and not told.value and way not in _LIES:
            yield "verify tells of damage, and there is none"
        return
    allowed = {"StorageError", "UncertainError"}
    if way in _LIES or way in SILENT:
        allowed |= {"CorruptError"}
    if way == "404 though there":
        allowed |= {"NotFoundError", "NotACheckpointError", "AlreadyPublishedError", "BusyError"}
    if told.error not in allowed:
        yield f"raised {told.error}: {told.message}"
    if url.rpartition("/")[0] not in told.message:
        yield f"the error names nothing: {told.message}"
    secret = world()[0].config["secret_access_key"]
    if secret in told.message or "Signature" in told.message or "Credential=" in told.message:
        yield f"the error tells a secret: {told.message}"


def judged(url: str, mode: str, way: str, told: Told, *, spoilt: str, lost: bool = False) -> dict[str, Any]:
    """What is wrong with what is there, and with a second try; ``lost``: nobody was told anything."""
    use(world()[0], url, mode=mode, prove=False)
    there = found(url, mode)
    problems = [] if lost else list(untrue(url, mode, way, told))
    wanted: set[int | str | None] = {after(mode)} if told.error is None else {before(mode)}
    if lost or told.error == "UncertainError":
        wanted = {before(mode), after(mode)}
    is_silent = way in SILENT and isinstance(there, str) and told.error in (None, "UncertainError")
    if is_silent and mode == "save, all checked" and told.error is None:
        problems.append(f"not noticed when all is checked: {there}")
    if there not in wanted and not is_silent:
        problems.append(f"told {told.error or 'that it is done'} ({told.message}), and there is {there}")
    names = set(store_of(url).sizes(url))
    # What was replaced or deleted stays where its manifest could not be read, or its objects not be listed or removed.
    is_clean = told.error is None and not lost and spoilt not in ("delete", "list") and way not in _LIES
    is_clean &= mode not in ("load", "verify") and not isinstance(there, str)
    if is_clean and len(names - set(_FOREIGN)) != (1 if mode == "delete" else 3):
        problems.append(f"left: {sorted(names)}")
    problems += _again(url, mode, there)
    if missing := set(_FOREIGN) - set(store_of(url).sizes(url)):
        problems.append(f"objects of another attempt are gone: {sorted(missing)}")
    return {"problems": problems, "there": found(url, mode)}


def _again(url: str, mode: str, there: int | str | None) -> Iterator[str]:
    """What is wrong with the same once more, undisturbed."""
    is_there = mode.startswith("save") and there == 2
    told = Told(**attempted(url, mode, 3, overwrite=mode == "replace" or isinstance(there, str)))
    expected: set[str | None] = {"AlreadyPublishedError" if is_there else None}
    if mode == "delete" and there is None:
        expected |= {"NotFoundError", "NotACheckpointError"}
    if told.error not in expected:
        yield f"the second try: {told.error}: {told.message}"
    wanted = 3 if after(mode) == 2 and not is_there else after(mode)
    if (now := found(url, mode)) != wanted:
        yield f"after the second try there is {now}"


def judged_run(root: str, mode: str) -> dict[str, Any]:
    """What is wrong with a run after one of its processes was killed, and for the next one."""
    use(world()[0], root, prove=False)
    problems, steps = list[str](), holdfast.Steps(root)
    there = {step.step: found(step.path) for step in steps.steps()}
    problems += [f"step {step} has {version}" for step, version in there.items() if step != version]
    newest = max(there, default=0)
    if newest not in (2, 3) or (mode == "follow" and list(there) != [1, 2]):
        problems.append(f"there are the steps {sorted(there)}")
    if (held := operate(root, "follow")) != sorted(there):
        problems.append(f"followed {held}, and there are {sorted(there)}")
    if (resumed := managed(root, 4)) != newest:
        problems.append(f"resumed from {resumed}, and there is {newest}")
    # What a reader held that was killed stays for hours.
    kept = {step.step for step in steps.steps()}
    if kept != {newest, 4} and not (mode == "follow" and {newest, 4} <= kept):
        problems.append(f"in the end there are the steps {sorted(kept)}")
    for number in {1, 2} - kept:
        if (names := set(store_of(root).sizes(f"{root}/step-{number}"))) != {_MANIFEST}:
            problems.append(f"of the deleted step {number} there is {sorted(names)}")
    return {"problems": problems}


def now(url: str, mode: str) -> int | str | None:
    """What is there now."""
    use(world()[0], url, mode=mode, prove=False)
    return found(url, mode)


def clear(url: str) -> None:
    """Remove all: listings of a full bucket take long."""
    parent = url.rpartition("/")[0]
    use(world()[0], parent, prove=False)
    store_of(parent).delete([f"{parent}/{each.name}" for each in store_of(parent).listed(parent)])
