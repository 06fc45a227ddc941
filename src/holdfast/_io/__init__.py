"""The only door to the file system: everything that opens, reads, writes, names or removes a file is in here.

Invariant: what the operating system refuses comes out as ``StorageError`` with its errno, what no honest writer leaves
behind as ``CorruptError``; an ``OSError`` never leaves this package. It never looks at what the bytes mean.
"""

from __future__ import annotations
