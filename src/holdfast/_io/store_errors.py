"""What the errors of an object store mean, in the words of this library, and without secrets."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping

from holdfast.errors import StorageError, first_line

_LEAST_SECRET = 8
_IS_SECRET = re.compile(r"key|secret|token|password|sas|signature|credential|authorization", re.I)
_QUERY = re.compile(r"(://[^\s?\"'<>]*)\?[^\s\"'<>)]*")
_USER = re.compile(r"://[^\s/\"'<>]*@")
_CODE, _TEXT = re.compile(r"<Code>([^<]{1,100})</Code>"), re.compile(r"<Message>([^<]{1,300})</Message>")
_CODE_OF_KEY = re.compile(r"\(code: (\w+)\)")  # where one request removes many
_ANY_URL, _STATUS = re.compile(r"\w+://[^\s\"'<>]*"), re.compile(r"status code: \d\d\d ")
_MACHINE = re.compile(r"://(169\.254\.169\.254|metadata\.google\.internal)[/:]")
_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|The specified (bucket|container) does not exist")
_NO_RANGE = re.compile(
    r"\b416 |InvalidRange|non-partial response|[Rr]ange.*(larger|exceed|beyond|[Nn]ot [Ss]atisfiable)"
)
_NO_ACCESS = re.compile(
    r"ExpiredToken|TokenRefreshRequired|InvalidToken|RequestExpired|AccessDenied|InvalidAccessKeyId"
    r"|SignatureDoesNotMatch|AuthenticationFailed|AuthorizationFailure|IdentityToken|\b40[13] |credential"
)
_WRONG_REGION = re.compile(r"redirect|PermanentRedirect|AuthorizationHeaderMalformed|IllegalLocation")
_REFUSED = re.compile(r"status code: 4(?!08|09|12|29)\d\d ")


def refusal(
    error: BaseException, action: str, url: str, *, bucket: str, config: Mapping[str, object], retry_s: float
) -> StorageError:
    """The error for people, of which ``errno`` tells programs what it is about."""
    from obstore import exceptions

    said, text = said_by(error, config), _answer_in(error, url)
    advice, number = f"the store gave no answer that helps for up to {retry_s:g} s; try again", errno.ETIMEDOUT
    if _NO_BUCKET.search(text):
        said, advice, number = f"there is no bucket {bucket!r}", "check the URL", errno.ENXIO
    elif isinstance(error, FileNotFoundError):
        return StorageError(f"cannot {action} {url!r}: there is no such object", errno=errno.ENOENT, path=url)
    elif isinstance(error, (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)) or _NO_ACCESS.search(
        text
    ):
        advice, number = "check the credentials, and what they allow", errno.EACCES
    elif _MACHINE.search(str(error)):  # who has none is sent there to ask for some
        advice, number = "no credentials are set, and the machine gives none", errno.EACCES
    elif _WRONG_REGION.search(text):
        advice, number = "check the region, such as AWS_REGION or Store(url, config={'region': ...})", errno.EINVAL
    elif _NO_RANGE.search(text) or isinstance(
        error, (exceptions.NotSupportedError, exceptions.InvalidPathError, ValueError, NotImplementedError)
    ):
        advice, number = "use another store, or another name", errno.EINVAL
    elif _REFUSED.search(text):
        advice, number = "the store refuses this request, so it is no use to try again", errno.EINVAL
    return StorageError(f"cannot {action} {url!r}: {said}; {advice}", errno=number, path=url)


def _answer_in(error: BaseException, url: str) -> str:
    """What a store says, by its code if it gives one. Names of objects are left out: they may look like any answer."""
    text = _ANY_URL.sub("", str(error).partition("\n\nDebug source")[0])
    code = _CODE.search(text) or _CODE_OF_KEY.search(text)
    if code is None:
        key = url.partition("://")[2].partition("/")[2]
        return text.replace(key, "") if key else text
    status = _STATUS.search(text)
    return f"{'' if status is None else status[0]}{code[1]}"


def said_by(error: BaseException, config: Mapping[str, object]) -> str:
    """What ``error`` says, in one line, without secrets."""
    text = str(error).partition("\n\nDebug source")[0]
    code, message = _CODE.search(text), _TEXT.search(text)
    if code is not None:
        text = f"{code[1]}: {message[1]}" if message is not None else code[1]
    return without_secrets(first_line(text) or type(error).__name__, config)[:400]


def without_secrets(text: str, config: Mapping[str, object]) -> str:
    """``text`` without signatures in URLs, and without the values of settings that are secret."""
    secrets = [str(value) for name, value in config.items() if _IS_SECRET.search(name)]
    secrets += [value for name, value in os.environ.items() if _IS_SECRET.search(name)]
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= _LEAST_SECRET:
            text = text.replace(secret, "...")
    return _USER.sub("://...@", _QUERY.sub(r"\1", text))
