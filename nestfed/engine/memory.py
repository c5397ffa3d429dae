"""Memory shared by worker processes, backed by a file on disk if it is large."""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from nestfed.core import NestfedError


def table(shape: tuple[int, ...], dtype: torch.dtype, folder: Path | None = None) -> Tensor:
    """Return zeros shared with forked processes; with a folder, in a file there.

    The file is unnamed, so it disappears with the last process that uses it.
    """
    count = prod(shape)
    if count == 0:
        return torch.zeros(shape, dtype=dtype)
    length = count * dtype.itemsize
    if folder is None:
        memory = mmap.mmap(-1, length)
    else:
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                if sys.platform == "linux":  # reserve the space now: without it, a full disk would end the process
                    os.posix_fallocate(file.fileno(), 0, length)
                else:
                    file.truncate(length)
                memory = mmap.mmap(file.fileno(), length)
        except OSError as error:
            raise NestfedError(
                f"Cannot keep {length / 1e9:.1f} GB of private fields in {folder}: {error.strerror}."
            ) from error
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def physical() -> int:
    """Return the bytes of memory that this process may use."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(limit).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            total = min(total, int(text))
    return total
