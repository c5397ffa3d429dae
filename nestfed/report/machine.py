"""The versions and the machine of a run, for its directory."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def describe() -> dict[str, str]:
    """Return versions and hardware as text, without the names of the machine and its user."""
    return {"versions": ", ".join([f"Python {platform.python_version()}", *_versions()]), "machine": _machine()}


def _versions() -> list[str]:
    found = []
    for name in ("nestfed", "torch", "numpy"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:  # source code that is not installed
            continue
    return found


def _machine() -> str:
    processor = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                processor = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    cores = os.cpu_count() or 1
    return f"{processor}, {cores} core{'s' * (cores > 1)}, {platform.system()} {platform.machine()}"
