"""Object stores: the only door to them, as ``posix`` is to files. Requests, their limits, and what their errors mean.

A URL such as ``s3://bucket/run/step-100`` names a place as a path does. Which client serves it is remembered for the
process: the one of the ``Store`` whose URL it begins with, or else one that is made from the environment.

Invariants: no key, token or signature is ever in a message. No answer about a conditional put is believed here: whoever
commits reads back what is there. Every request runs in a thread that nobody has to wait for, so that an interrupt or
the failure of another thread ends the wait at once, however long the store is silent.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, cast

import msgspec

from holdfast._io import posix
from holdfast._io.pipeline import in_other_thread, ranks_of_host
from holdfast._io.store_errors import refusal, said_by
from holdfast._io.urls import checked_url, root_of
from holdfast._process import reset_in_child
from holdfast.errors import CheckpointError, CorruptError, InvalidStateError, StorageError, first_line

if TYPE_CHECKING:
    from obstore.store import ObjectStore

Result = TypeVar("Result")
Setting = str | bool | int | float
Check = Literal["size", "sample", "all", "off"]

_CLIENT_OPTIONS = frozenset(
    {"allow_http", "allow_invalid_certificates", "proxy_url", "proxy_ca_certificate", "proxy_excludes"}
    | {"root_certificate", "user_agent", "pool_idle_timeout", "pool_max_idle_per_host", "read_timeout"}
)
_PREFIXES = {"s3": "AWS", "gs": "GOOGLE"}
_LEAST_PART_BYTES = 5 << 20  # what S3 asks of every part but the last
_MOST_PARTS = 10_000


Version = dict[str, str]
"""What tells the contents of an object from others it had or will have: "e_tag", and "version" where there is one."""


class Found(NamedTuple):
    """An object as a store lists it: its name in the folder, its bytes, and what tells its contents from others."""

    name: str
    bytes: int
    version: Version
    modified_s: float


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of a ``Store``."""

    url: str
    config: dict[str, Setting]
    requests: int
    part_bytes: int
    retry_s: float
    request_s: float
    check: Check
    conditional: Literal["safe", "unsafe"]

    def __repr__(self) -> str:  # the config has secrets
        return f"StoreSettings({self.url!r})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("url", self.url)]


class Store(os.PathLike[str]):
    """An object store, or a folder in one: ``store / "step-100"`` can be given wherever a path can.

    A URL alone does it too: it is served by the ``Store`` of this process whose URL it begins with, or by a client
    with the settings of the environment (AWS_*, GOOGLE_*, AZURE_*).

    Args:
        url: such as "s3://bucket/run", "gs://bucket/run", "az://container/run", or "memory://run".
        config: settings of the store, as obstore has them: endpoint, region, access_key_id, account_name... Or a store
            object of obstore, which then serves ``url``.
        requests: how many requests are under way at once, divided among the ranks of a host.
        part_bytes: bytes of one part of an upload. More, where an object would have more than 10,000 parts.
        retry_s: for so long a request that fails for a passing reason is tried again.
        request_s: so long one request may take, with all its bytes.
        check: how to make sure that the store has what it was sent, before a checkpoint is published: the "size" of
            each object, also a "sample" of its blocks, "all" of them, or "off".
        conditional: "safe" refuses a store that ignores the condition of a put, because two saves could then replace
            each other unseen. "unsafe" goes on, and only reads back what was published.
    """

    def __init__(
        self,
        url: str,
        *,
        config: Mapping[str, Setting] | ObjectStore | None = None,
        requests: int = 16,
        part_bytes: int = 16 << 20,
        retry_s: float = 180,
        request_s: float = 60,
        check: Check = "size",
        conditional: Literal["safe", "unsafe"] = "safe",
    ) -> None:
        self.url = checked_url(url)
        if requests < 1 or part_bytes < _LEAST_PART_BYTES or not retry_s >= 0 or not request_s > 0:
            raise ValueError(
                f"requests is 1 or more, part_bytes {_LEAST_PART_BYTES} or more, retry_s and request_s > 0"
            )
        if check not in ("size", "sample", "all", "off") or conditional not in ("safe", "unsafe"):
            raise ValueError("check is 'size', 'sample', 'all' or 'off', and conditional is 'safe' or 'unsafe'")
        self._given = None if config is None or isinstance(config, Mapping) else config
        self.config = dict(config) if isinstance(config, Mapping) else {}
        for name, value in self.config.items():
            if not isinstance(value, Setting):
                raise ValueError(f"the setting {name!r} is text, a number or a bool, not a {type(value).__name__}")
        self.part_bytes, self.retry_s, self.request_s = part_bytes, retry_s, request_s
        self.check: Check = check
        self.is_safe = conditional == "safe"
        self._requests = requests
        # Keys are counted from here: from the bucket, or for a client that was given, from the URL.
        self.base = self.url if self._given is not None else root_of(self.url)
        self._client: ObjectStore | None = None
        self._making = threading.Lock()
        self.is_proven = False
        """Whether conditional puts were seen to work."""
        _stores[self.url] = self

    def __fspath__(self) -> str:
        return self.url

    def __truediv__(self, name: str | os.PathLike[str]) -> str:
        """The URL of ``name`` in this store."""
        return f"{self.url}{'' if self.url.endswith('/') else '/'}{os.fspath(name)}"

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return _made_again, (self.settings,)

    @property
    def settings(self) -> StoreSettings:
        """The arguments that make the same store in another process; InvalidStateError where no other can have it."""
        if self._given is not None or self.base == "memory://":
            raise InvalidStateError(
                f"{self!r} is of this process alone, so no other one can use it: let a thread write, or give the Store "
                "settings instead of a client"
            )
        return StoreSettings(
            url=self.url,
            config=self.config,
            requests=self._requests,
            part_bytes=self.part_bytes,
            retry_s=self.retry_s,
            request_s=self.request_s,
            check=self.check,
            conditional="safe" if self.is_safe else "unsafe",
        )

    @property
    def keeps_buffers(self) -> bool:
        """Whether what is put stays where it is until all of an object is there."""
        return type(self.client).__name__ == "MemoryStore"

    @property
    def requests(self) -> int:
        """How many requests this process may have under way."""
        return max(1, self._requests // ranks_of_host(otherwise=1))

    @property
    def client(self) -> ObjectStore:
        """The client, made when first asked for."""
        _obstore()
        with self._making:
            if self._client is None:
                self._client = self._made()
            return self._client

    def _made(self) -> ObjectStore:
        global _memory
        if self._given is not None:
            return self._given
        from obstore.store import MemoryStore, from_url

        if self.base == "memory://":
            _memory = made = _memory or MemoryStore()
            return made
        config = {name.lower(): value for name, value in self.config.items()}
        prefix = next((prefix for start, prefix in _PREFIXES.items() if self.base.startswith(start)), "AZURE")
        variables = {name: f"{prefix}_{name}".upper() for name in _CLIENT_OPTIONS}
        # The client does not look for these where it is given any.
        options: dict[str, object] = {
            name: os.environ[variable] for name, variable in variables.items() if variable in os.environ
        }
        options.update({name: config.pop(name) for name in _CLIENT_OPTIONS & config.keys()})
        if "allow_http" in options:
            options["allow_http"] = str(options["allow_http"]).lower() in ("1", "true", "yes")
        retries = {
            "max_retries": 1000,  # the time is what counts
            "retry_timeout": timedelta(seconds=self.retry_s),
            "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=10), "base": 2},
        }
        request = timedelta(seconds=self.request_s)
        options = {"timeout": request, "connect_timeout": min(request, timedelta(seconds=10)), **options}
        make: Any = from_url
        try:
            return cast("ObjectStore", make(self.base, config=config, client_options=options, retry_config=retries))
        except BaseException as error:
            if isinstance(error, (KeyboardInterrupt, SystemExit, MemoryError)):
                raise
            problem = f"cannot use the store {self.base!r}: {said_by(error, self.config)}"
            config.clear()  # some tools show the variables of a traceback
            options.clear()
            raise StorageError(problem, errno=errno.EINVAL, path=self.url) from None

    # --- requests ---

    def get(
        self, url: str, span: tuple[int, int] | None = None, *, limit: int | None = None
    ) -> tuple[memoryview, Found]:
        """The bytes of an object, or bytes [start, stop) of it, and what the store says of the whole.

        CorruptError for an object of more bytes than ``limit``; none of them is read then.
        """

        def request(client: ObjectStore, key: str) -> tuple[memoryview, Found]:
            result = _obstore().get(client, key, options=None if span is None else {"range": span})
            found = _found(cast(Any, result.meta))
            if limit is not None and found.bytes > limit:
                raise CorruptError(f"{url!r} is larger than {limit} bytes; use another checkpoint", path=url)
            return memoryview(result.bytes()), found

        data, found = self._request("read", url, request)
        start, stop = span or (0, found.bytes)
        wanted = min(stop, found.bytes) - start
        if data.nbytes != wanted:
            problem = f"the store sent {data.nbytes} bytes instead of {wanted}"
            raise StorageError(f"cannot read {url!r}: {problem}; try again", errno=errno.EIO, path=url)
        return data, found

    def head(self, url: str) -> Found | None:
        """What the store says of an object; None where there is none."""
        try:
            return self._request("look at", url, lambda client, key: _found(cast(Any, _obstore().head(client, key))))
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise
            return None

    def put(self, url: str, data: bytes) -> str:
        """Have ``data`` be the object, whatever it was before. Returns its tag, or "" if the store gives none."""

        def request(client: ObjectStore, key: str) -> str:
            result: Any = _obstore().put(client, key, data, use_multipart=False)
            return (result["e_tag"] or "").strip('"')

        return self._request("write", url, request)

    def put_if(self, url: str, data: bytes, version: Version | None) -> bool:
        """Have ``data`` be the object if it still has this ``version``, or if there is none; whether the store says so.

        Either answer may be wrong, and so may an error be: read back what is there.
        """
        mode: Any = "create" if version is None else version

        def request(client: ObjectStore, key: str) -> bool:
            from obstore import exceptions

            try:
                _obstore().put(client, key, data, mode=mode, use_multipart=False)
            except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
                return False
            return True

        return self._request("publish", url, request)

    def put_parts(self, url: str, size: int, buffers: Iterable[memoryview]) -> None:
        """Have the ``buffers``, of ``size`` bytes in all, be the object. Each is let go when it was sent.

        To be called by a thread that may wait long: this one does.
        """
        part = self.part_of(size)
        # As many parts are held as are under way, whatever their size.
        at_once = max(1, min(self.requests, MOST_UPLOAD_BYTES // part))

        def request(client: ObjectStore, key: str) -> None:
            if size <= part:
                _obstore().put(client, key, b"".join(buffers), use_multipart=False)
            else:
                _obstore().put(client, key, iter(buffers), chunk_size=part, max_concurrency=at_once)

        self._in_words("write", url, request)

    def part_of(self, size: int) -> int:
        """The bytes of a part of an object of ``size`` bytes. As many are held until the first of them is sent."""
        return max(self.part_bytes, -(-size // _MOST_PARTS // 4096) * 4096)

    def delete(self, urls: list[str]) -> None:
        """Guarantee that there are no such objects."""
        if not urls:
            return
        keys = [self._key(url) for url in urls]
        try:
            self._request("remove", urls[0], lambda client, _: _obstore().delete(client, keys))
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise
            # Azure says so, and may have left the others.
            for url in urls if len(urls) > 1 else ():
                self.delete([url])

    def rename(self, url: str, new_url: str) -> None:
        """Give an object another name, within the store."""
        new_key = self._key(new_url)
        self._request("rename", url, lambda client, key: _obstore().rename(client, key, new_key))

    def listed(self, url: str) -> list[Found]:
        """The objects in the folder ``url``, by name, and in the folders below it: those have "/" in their names."""
        folder = f"{url.rstrip('/')}/"

        def request(client: ObjectStore, key: str) -> list[Found]:
            found = [each for page in _obstore().list(client, f"{key}/" if key else None) for each in page]
            return [_found(cast(Any, each)) for each in found]

        start = len(self._key(folder))
        found = self._request("list", url.rstrip("/"), request)
        return sorted(each._replace(name=each.name[start:].lstrip("/")) for each in found)

    def folder(self, url: str) -> tuple[list[str], list[Found]]:
        """The names of the folders right in ``url``, and the objects right in it."""

        def request(client: ObjectStore, key: str) -> tuple[list[str], list[Found]]:
            result: Any = _obstore().list_with_delimiter(client, f"{key}/" if key else None)
            folders = [prefix.rstrip("/").rpartition("/")[2] for prefix in result["common_prefixes"]]
            objects = [_found(each) for each in result["objects"]]
            return sorted(folders), sorted(each._replace(name=each.name.rpartition("/")[2]) for each in objects)

        return self._request("list", url.rstrip("/"), request)

    def sizes(self, url: str) -> dict[str, int]:
        """The objects right in the folder ``url``, and the bytes of each."""
        return {each.name: each.bytes for each in self.folder(url)[1]}

    def _key(self, url: str) -> str:
        return url[len(self.base) :].lstrip("/")

    def _request(self, action: str, url: str, request: Callable[[ObjectStore, str], Result]) -> Result:
        """What ``request`` returns, in the words of this library; ends early where this thread is to give up."""
        with posix.reporting(action, url):
            return in_other_thread(lambda: self._in_words(action, url, request))

    def _in_words(self, action: str, url: str, request: Callable[[ObjectStore, str], Result]) -> Result:
        client = self.client
        try:
            return request(client, self._key(url))
        except (CheckpointError, KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # a panic of the client is no Exception
            bucket = self.base if self._given is None else self.url
            raise refusal(error, action, url, bucket=bucket, config=self.config, retry_s=self.retry_s) from None


_stores: dict[str, Store] = {}
_memory: ObjectStore | None = None
_used_in: int | None = None
_was_used_by_parent = False

MOST_UPLOAD_BYTES = 128 << 20
"""So many bytes of one object may be on their way at once."""


@reset_in_child
def _forget() -> None:
    global _was_used_by_parent
    _was_used_by_parent = _was_used_by_parent or _used_in is not None


def store_of(url: str) -> Store:
    """The store that serves ``url``: the one made for the longest part of it, or one made from the environment."""
    scheme, _, rest = checked_url(url).partition("://")
    parts = rest.split("/")
    for count in range(len(parts), 0, -1):
        found = _stores.get(f"{scheme}://{'/'.join(parts[:count])}")
        if found is not None:
            return found
    root = root_of(url)
    return _stores.get(root) or Store(root)


def _obstore() -> Any:
    """The package; a clear error where it is missing, or where it would hang."""
    global _used_in
    if _was_used_by_parent:
        raise CheckpointError(
            "this process was forked from one that had used an object store, whose client does not work after a fork; "
            "start processes by 'spawn' or 'forkserver', or use the store first in the child"
        )
    try:
        import obstore
    except ImportError as error:
        raise CheckpointError(
            f"a URL of an object store needs the package obstore, which cannot be imported ({first_line(error)}): "
            "pip install holdfast[stores]"
        ) from None
    _used_in = os.getpid()
    return obstore


def _found(meta: Mapping[str, Any]) -> Found:
    version = {name: meta[name] for name in ("e_tag", "version") if meta.get(name) is not None}
    return Found(meta["path"], int(meta["size"]), version, meta["last_modified"].timestamp())


def _made_again(settings: StoreSettings) -> Store:
    return Store(**msgspec.structs.asdict(settings))
