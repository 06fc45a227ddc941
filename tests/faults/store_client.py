"""A process with obstore in it that does what the lines of its input say: to be killed, and so that tests may fork.

A line is JSON: a call, whether it goes through the proxy, and its arguments. So is the answer: what the call returned,
or the name of its error.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from typing import Any

import obstore

RETRIES: Any = {
    "max_retries": 3,
    "retry_timeout": timedelta(seconds=5),
    "backoff": {"init_backoff": timedelta(milliseconds=5), "max_backoff": timedelta(milliseconds=20), "base": 2},
}
PART = 5 << 20


def store(url: str, config: dict[str, str], client_options: dict[str, Any]) -> Any:
    return obstore.store.from_url(
        url, config=config, client_options={**client_options, "timeout": "5s"}, retry_config=RETRIES
    )


def done(store: Any, call: str, arguments: list[Any]) -> Any:
    if call == "list":
        return sorted(entry["path"] for entries in obstore.list(store) for entry in entries)
    key, *rest = arguments
    if call in ("put", "create"):
        data = rest[0].encode("latin-1")
        obstore.put(store, key, data, mode="create" if call == "create" else "overwrite", use_multipart=False)
        return "put"
    if call == "put in parts":
        data = rest[0].encode("latin-1")
        obstore.put(store, key, (data[start : start + PART] for start in range(0, len(data), PART)), chunk_size=PART)
        return "put"
    if call == "get":
        return bytes(obstore.get(store, key).bytes()).decode("latin-1")
    if call == "get range":
        return bytes(obstore.get_range(store, key, start=rest[0], end=rest[1])).decode("latin-1")
    if call == "head":
        return obstore.head(store, key)["size"]
    raise ValueError(call)


def main() -> None:
    stores = [store(**each) for each in json.loads(sys.argv[1])]
    for line in sys.stdin:
        call, is_spoiled, arguments = json.loads(line)
        try:
            answer = done(stores[is_spoiled], call, arguments)
        except Exception as error:
            answer = type(error).__name__
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
