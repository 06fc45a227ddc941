"""What a benchmark ran on, so that its numbers can be read later. Reads only; knows nothing of the contestants."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

_PACKAGES = ("holdfast", "torch", "safetensors", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One machine, as far as it bears on the speed of a disk."""

    date: str
    kernel: str
    processor: str
    cores: int
    memory_gib: float
    file_system: str
    python: str
    packages: dict[str, str]

    def lines(self) -> list[str]:
        """The same for people."""
        packages = ", ".join(f"{name} {version}" for name, version in self.packages.items())
        return [
            f"{self.processor}, {self.cores} cores, {self.memory_gib:.0f} GiB; {self.kernel}; {self.file_system}",
            f"Python {self.python}; {packages}",
        ]


def describe_machine(folder: Path) -> Machine:
    """This machine, with the file system that holds ``folder``."""
    return Machine(
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        kernel=f"{platform.system()} {platform.release()}",
        processor=_processor(),
        cores=os.cpu_count() or 0,
        memory_gib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        file_system=_file_system(folder),
        python=platform.python_version(),
        packages={name: _version(name) for name in _PACKAGES},
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _file_system(folder: Path) -> str:
    """The type of the file system of the longest mount point above ``folder``."""
    try:
        mounts = [line.split() for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    except OSError:
        return "unknown file system"
    resolved = folder.resolve()
    above = [(point, kind) for _, point, kind, *_ in mounts if resolved.is_relative_to(point)]
    return max(above, key=lambda mount: len(mount[0]))[1] if above else "unknown file system"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
