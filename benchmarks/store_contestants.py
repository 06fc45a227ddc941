"""Who competes over object stores: obstore alone, holdfast, and torch's writer and reader over s3fs.

Each is a process of its own that holds the state, so that processor time and memory are the client's alone. obstore
alone is the limit: it moves as many bytes in as many objects and does nothing with them. It reads the objects that
holdfast has written, into memory that is there already, as holdfast does.
"""

from __future__ import annotations

import gc
import importlib.util
import multiprocessing
import resource
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import obstore
import torch
from obstore.store import ObjectStore, from_url
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from peak_memory import high_water_mark, reset_high_water_mark, resident
from states import Shapes, State, clear, different_keys, empty_state, random_state

OBSTORE = "obstore alone"
HOLDFAST = "holdfast"
HOLDFAST_ASYNC = "holdfast, async"
TORCH = "torch DCP, s3fs"

REQUESTS = 16
PART_BYTES = 16 << 20
RANGE_BYTES = 8 << 20
_END_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The folder ``name`` of a store at ``url``, and what a client needs to get there."""

    url: str
    config: Mapping[str, str]
    name: str = ""

    def __truediv__(self, name: str) -> Place:
        return replace(self, name=name)

    @property
    def server(self) -> tuple[str, str]:
        """What tells its store from those of other servers."""
        return self.config["endpoint"], self.url

    def client(self) -> ObjectStore:
        """The client of obstore, made once in a process, as a program would do."""
        if self.server not in _clients:
            # The types know each setting by its name alone.
            make: Any = from_url
            _clients[self.server] = make(self.url, config=dict(self.config), client_options={"allow_http": True})
        return _clients[self.server]

    def sizes(self) -> dict[str, int]:
        """The bytes of every object in the folder, by its key."""
        return {each["path"]: each["size"] for page in obstore.list(self.client(), f"{self.name}/") for each in page}

    def data_sizes(self) -> dict[str, int]:
        """The same of the objects with the tensors of a checkpoint of holdfast."""
        return {key: size for key, size in self.sizes().items() if "/data-" in key}

    def remove(self) -> None:
        """Remove every object in the folder."""
        obstore.delete(self.client(), list(self.sizes()))


_clients: dict[tuple[str, str], ObjectStore] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """One way to save into a place and to load from it; ``has_data`` is false for the limit: its bytes are its own."""

    save: Callable[[State, Place], None]
    load: Callable[[State, Place], None]
    has_data: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a client took: seconds, processor seconds, memory beyond the state, and the keys with wrong bytes."""

    seconds: float
    cpu_s: float
    beyond: int
    wrong: list[str] = field(default_factory=list)


class Client:
    """A process in which one contestant saves and loads; gone when the ``with`` block is left.

    ``objects`` are the sizes of what the limit moves.
    """

    def __init__(self, name: str, shapes: Shapes, objects: list[int]) -> None:
        self._name = name
        # Spawned: obstore hangs in a forked process.
        context = multiprocessing.get_context("spawn")
        self._line, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, name, shapes, objects), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._line.close()  # it ends when it sees that
        self._process.join(_END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def save(self, place: Place) -> Outcome:
        return self._do("save", place)

    def load(self, place: Place) -> Outcome:
        return self._do("load", place)

    def _do(self, action: str, place: Place) -> Outcome:
        what = f"{self._name}, {action}"
        try:
            self._line.send((action, place))
            outcome: Outcome = self._line.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise SystemExit(f"{what}: its process ended, see above") from None
        if outcome.wrong:
            raise SystemExit(f"{what} got other bytes: {len(outcome.wrong)} keys, first {outcome.wrong[0]!r}")
        return outcome


def lacking(name: str) -> str | None:
    """What has to be installed for this contestant; None where it can take part."""
    return "s3fs" if name == TORCH and importlib.util.find_spec("s3fs") is None else None


def _serve(line: Connection, name: str, shapes: Shapes, objects: list[int]) -> None:
    contestant = _MAKERS[name](objects)
    state = random_state(shapes) if contestant.has_data else {}
    target: State = {}
    while True:
        try:
            action, place = line.recv()
        except EOFError:
            return
        if action == "save":
            line.send(_measured(contestant.save, state, place))
            continue
        if len(target) < len(state):
            target = empty_state(shapes)
        clear(target)
        outcome = _measured(contestant.load, target, place)
        outcome.wrong.extend(different_keys(state, target))
        line.send(outcome)


def _measured(action: Callable[[State, Place], None], state: State, place: Place) -> Outcome:
    gc.collect()
    reset_high_water_mark()
    before, cpu_s = resident(), _cpu_seconds()
    begin = time.perf_counter()
    action(state, place)
    seconds = time.perf_counter() - begin
    return Outcome(seconds=seconds, cpu_s=_cpu_seconds() - cpu_s, beyond=max(0, high_water_mark() - before))


def _cpu_seconds() -> float:
    """What this process and its children that have ended took."""
    taken = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in taken)


def _obstore(objects: list[int]) -> Contestant:
    memory = bytearray(sum(objects))
    torch.frombuffer(memory, dtype=torch.uint8).random_(generator=torch.Generator().manual_seed(0))
    view = memoryview(memory)
    pool = ThreadPoolExecutor(REQUESTS)

    def save(state: State, place: Place) -> None:
        start = 0
        for number, size in enumerate(objects):
            mine = view[start : start + size]
            buffers = (mine[at : at + PART_BYTES] for at in range(0, size, PART_BYTES))
            key = f"{place.name}/data-{number}"
            obstore.put(place.client(), key, buffers, chunk_size=PART_BYTES, max_concurrency=REQUESTS)
            start += size

    def load(state: State, place: Place) -> None:
        client = place.client()

        def read(key: str, begin: int, end: int, into: memoryview) -> None:
            into[:] = memoryview(obstore.get_range(client, key, start=begin, end=end))

        reads, start = [], 0
        for key, size in place.data_sizes().items():
            for begin in range(0, size, RANGE_BYTES):
                end = min(begin + RANGE_BYTES, size)
                reads.append(pool.submit(read, key, begin, end, view[start + begin : start + end]))
            start += size
        for each in reads:
            each.result()

    return Contestant(save=save, load=load, has_data=False)


def _holdfast(objects: list[int]) -> Contestant:
    import holdfast  # late, so that the others can be measured without it

    def save(state: State, place: Place) -> None:
        holdfast.save(state, checkpoint_url(place))

    def load(state: State, place: Place) -> None:
        holdfast.load(state, checkpoint_url(place))

    return Contestant(save=save, load=load)


def _holdfast_async(objects: list[int]) -> Contestant:
    import holdfast

    def save(state: State, place: Place) -> None:
        holdfast.async_save(state, checkpoint_url(place)).result()

    return Contestant(save=save, load=_holdfast(objects).load)


def checkpoint_url(place: Place) -> str:
    """The URL of a checkpoint; its store is made once in a process."""
    from holdfast import Store

    if place.server not in _stores:
        config = {**place.config, "allow_http": "true"}
        _stores[place.server] = Store(place.url, config=config, requests=REQUESTS, part_bytes=PART_BYTES)
    return f"{place.url}/{place.name}"


_stores: dict[tuple[str, str], object] = {}


def _torch(objects: list[int]) -> Contestant:
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    # torch says on every call that there is no process group; that is what is measured here.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)

    def settings(place: Place) -> dict[str, Any]:
        key, secret = place.config["access_key_id"], place.config["secret_access_key"]
        region = {"region_name": place.config["region"]}
        return {"key": key, "secret": secret, "endpoint_url": place.config["endpoint"], "client_kwargs": region}

    def save(state: State, place: Place) -> None:
        writer = FsspecWriter(f"{place.url}/{place.name}", **settings(place))
        state_dict_saver.save(dict(state), storage_writer=writer)

    def load(state: State, place: Place) -> None:
        reader = FsspecReader(f"{place.url}/{place.name}", **settings(place))
        state_dict_loader.load(dict(state), storage_reader=reader)

    return Contestant(save=save, load=load)


_MAKERS: Mapping[str, Callable[[list[int]], Contestant]] = {
    OBSTORE: _obstore,
    HOLDFAST: _holdfast,
    HOLDFAST_ASYNC: _holdfast_async,
    TORCH: _torch,
}
