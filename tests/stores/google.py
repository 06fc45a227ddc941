"""Google Cloud Storage's conditions in front of moto, which has S3's: no server of Google's own runs on loopback.

Objects have generations there, and a put asks for one where S3 compares tags. The rest is the same for the client.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

from tools.store_servers import StoreServer
from torture import relay

_SIGNATURE = "AWS4-HMAC-SHA256 Credential=tests/20260101/us-east-1/s3/aws4_request, Signature=any"  # moto wants one
_CONDITION = "x-goog-if-generation-match"


@contextlib.contextmanager
def speaking(moto: StoreServer) -> Iterator[StoreServer]:
    """The server as a client of Google Cloud Storage has it."""
    place = moto.endpoint.partition("://")[2]
    tags: dict[str, str] = {}  # by generation
    relays: list[relay.Relay] = []

    def answer(call: relay.Call) -> relay.Reply:
        headers = [("authorization", _SIGNATURE)]
        for name, value in call.headers:
            if name.lower() != _CONDITION:
                headers += [(name, value)] * (name.lower() != "authorization")
            elif value == "0":
                headers.append(("If-None-Match", "*"))
            else:
                headers.append(("If-Match", tags.get(value, '"of none"')))
        reply = relays[0].passed_on(relay.Call(call.method, call.target, headers, call.body), place)
        for name, value in tuple(reply.headers):
            if name.lower() == "etag":
                generation = str(int(value.strip('"').partition("-")[0][:12], 16) + 2)
                tags[generation] = value
                reply.headers.append(("x-goog-generation", generation))
        return reply

    with relay.relaying(answer) as speaker:
        relays.append(speaker)
        endpoint = f"http://{speaker.place}"
        names = ("client_email", "private_key", "private_key_id")
        account = {"gcs_base_url": endpoint, "disable_oauth": True, **dict.fromkeys(names, "")}
        url = moto.url.replace("s3://", "gs://")
        config = {"service_account_key": json.dumps(account)}
        yield StoreServer(name="Google's", pid=moto.pid, url=url, endpoint=endpoint, config=config)
