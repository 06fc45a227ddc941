"""Limits: how large anything in a checkpoint may claim to be.

Readers check them before they allocate, so that a damaged or hostile file costs an error and not the memory. Writers
check them too, so that nothing is written that cannot be read back. Raising one is compatible, lowering is not.
"""

from __future__ import annotations

MAX_MANIFEST_BYTES = 1 << 30
"""The manifest is parsed whole; a gigabyte is far beyond the keys and values of any model."""

MAX_INDEX_BYTES = 8 << 30
"""The index is read whole; 8 GiB describe some hundred million chunks or a petabyte of block digests."""

MAX_METADATA_BYTES = 2 << 30
"""torch's ``.metadata`` is decoded whole; 2 GiB describe some ten million chunks."""

MAX_DIMENSIONS = 64
"""Torch and numpy allow no tensor of more than 64 dimensions."""

MAX_KEY_BYTES = 1 << 16
"""A key is a path of attribute names; 64 KiB of UTF-8 is no honest key."""

MAX_VALUE_DEPTH = 64
"""Values are decoded by recursion, which must end well before the interpreter's own limit."""

MAX_PATH_DEPTH = 256
"""The nesting of a state is walked by recursion, which must end well before the interpreter's own limit."""

MAX_REPEATED_ENTRIES = 1 << 20
"""A container that is in several places of a state is stored in each; below a million entries nobody minds."""

MAX_REPETITION = 16
"""Beyond that, how many entries are stored for each one in memory."""

MAX_HEADER_BYTES = 100_000_000
"""The cap that safetensors itself puts on a header: its library must open every file."""

MAX_FILES = 1 << 20
"""Each file costs a handle and an entry of the manifest; a million suffices for every rank of any job."""

MAX_TENSORS = 1 << 26
"""Each tensor costs an entry of the manifest and objects in memory."""

MAX_FILE_BYTES = 1 << 62
"""Offsets plus sizes stay within a signed 64-bit integer."""

MAX_VALUE_INLINE_BYTES = 64 << 10
"""Larger bytes and strings would bloat the manifest, so they are stored like tensors."""
