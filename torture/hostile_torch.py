"""placeholder"""
from __future__ import annotations
from pathlib import Path
CANARY = Path("x")
def cases(folder): return {}
