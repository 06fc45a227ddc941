"""The version of this library, in one place, and the newest torch that it was tested with."""

__version__ = "0.1.0"
"""The version of this library, as text."""

NEWEST_TESTED_TORCH = (2, 15)
