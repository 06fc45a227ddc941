"""torch's decorator that logs calls, under torch's module name, for functions of your own.

This library logs under the name ``holdfast`` and never calls it.
"""

from __future__ import annotations

from holdfast._torch_classes.torchs import logger as _torchs

_dcp_logger = _torchs._dcp_logger
_dcp_method_logger = _torchs._dcp_method_logger
