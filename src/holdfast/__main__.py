"""``python -m holdfast``: the command line, where the ``holdfast`` script is not on the path."""

from __future__ import annotations

from holdfast.cli import main

if __name__ == "__main__":
    main()
