"""holdfast.json: what an export leaves beside the files of a folder, so that every byte of them can be checked later.

It names the files, and has the table of chunks with their digests that a native checkpoint has in its index. There is
one way to write it, which ends with a digest over all of it, and nothing else is read. Programs that do not know it
leave it alone; if one of them writes the files anew, it does not fit them any more, and readers say so.
"""

from __future__ import annotations

import re

import msgspec

from holdfast._native.manifest import FileEntry, WriterEntry
from holdfast._values.digest import digest, to_hex
from holdfast._values.dtypes import MAX_FILES, MAX_INDEX_BYTES, MAX_MANIFEST_BYTES
from holdfast.errors import CorruptError, UnsupportedVersionError

NOTES_NAME = "holdfast.json"
FORMAT = "holdfast-folder"
VERSION = 1

_NO_DIGEST = "0" * 16
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}\.safetensors")
_ATTEMPT = re.compile(r"[0-9a-zA-Z_-]{1,64}")
_START = re.compile(rb'\{"format":"holdfast-folder","version":([0-9]{1,9}),')


class FolderNotes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What holdfast.json says.

    ``files`` are those of the folder, in the order of their names; the ``digest`` of each covers its header and the
    digests of its blocks, as in a native checkpoint. ``chunks`` is the index as a native checkpoint has it; in it,
    tensors have the numbers of their names in sorted order. ``mapping`` has the rules of the export, as JSON.
    """

    format: str = FORMAT
    version: int = VERSION
    attempt: str
    writer: WriterEntry
    files: tuple[FileEntry, ...]
    chunks: bytes
    mapping: object = None
    digest: str = _NO_DIGEST


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(FolderNotes).decode


def encode_notes(notes: FolderNotes) -> bytes:
    """The bytes of ``notes``, their digest computed."""
    data = _encode(msgspec.structs.replace(notes, digest=_NO_DIGEST))
    return b'%b%b"}' % (data[: -len(_NO_DIGEST) - 2], to_hex(digest(data)).encode())


def decode_notes(data: bytes, *, path: str) -> FolderNotes:
    """The notes whose bytes are ``data``; CorruptError for anything that ``encode_notes`` does not write.

    UnsupportedVersionError when a newer holdfast wrote them. Whether they fit the files is for others to say.
    """
    if len(data) > MAX_MANIFEST_BYTES + 2 * MAX_INDEX_BYTES:
        raise _damaged(path, f"it has {len(data)} bytes")
    start = _START.match(data)
    if start is None:
        raise _damaged(path, "it does not start as such a file does")
    if int(start[1]) > VERSION:
        known = f"this holdfast reads up to {VERSION}"
        raise UnsupportedVersionError(f"{path} has format version {int(start[1])}, but {known}; upgrade holdfast")
    try:
        notes = _decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _damaged(path, f"it is not the expected JSON ({error})") from error
    # Duplicate members, spaces, a wrong digest: all show as a difference to the one way of writing it.
    if encode_notes(notes) != data:
        raise _damaged(path, "its bytes are not those that were written")
    if notes.format != FORMAT or notes.version != VERSION or _ATTEMPT.fullmatch(notes.attempt) is None:
        raise _damaged(path, "its version or its attempt is none")
    names = [file.name for file in notes.files]
    if len(names) > MAX_FILES or names != sorted(set(names)):
        raise _damaged(path, "its files are too many, or not in order")
    # No separator is in such a name: none can lead out of the folder.
    if not all(map(_FILE_NAME.fullmatch, names)):
        raise _damaged(path, "it names a file that no folder has")
    return notes


def _damaged(path: str, problem: str) -> CorruptError:
    advice = "remove it to load the folder without checks, or use another copy"
    return CorruptError(f"{path} is damaged: {problem}; {advice}", path=path)
