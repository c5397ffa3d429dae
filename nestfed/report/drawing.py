"""Access to matplotlib, an optional dependency (`nestfed[plot]`)."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nestfed.core import NestfedError


def drawable() -> bool:
    """Return whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def pyplot() -> Any:
    """Return matplotlib's pyplot with a backend that needs no screen."""
    if not drawable():
        raise NestfedError("Plots need matplotlib: pip install 'nestfed[plot]'.")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def save(figure: Any, path: Path) -> Path:
    """Write a figure atomically and close it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{os.getpid()}-{path.name}")
    figure.savefig(temporary, dpi=130)
    temporary.replace(path)
    pyplot().close(figure)
    return path
