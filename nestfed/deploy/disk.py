"""Whether there is disk left to work with."""

from __future__ import annotations

import shutil
from pathlib import Path

LEAST = 500 * 2**20
"""Free bytes that a run or a site should have."""


def free(place: Path) -> int:
    """Return the free bytes of the disk on which a folder is, or will be."""
    there = next(folder for folder in (place.absolute(), *place.absolute().parents) if folder.is_dir())
    return shutil.disk_usage(there).free


def scarce(place: Path) -> str:
    """Return a warning if little disk is left for a folder, or nothing."""
    left = free(place)
    return f"only {left >> 20} MiB of disk are free for {place}: make {LEAST >> 20} MiB free." if left < LEAST else ""
