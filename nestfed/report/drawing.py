"""The way to matplotlib, which is an extra (`nestfed[plot]`)."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nestfed.core import NestfedError


def drawable() -> bool:
    """Tell whether pictures can be drawn here."""
    return find_spec("matplotlib") is not None


def pyplot() -> Any:
    """Return matplotlib's pyplot, which needs no screen here."""
    if not drawable():
        raise NestfedError("Pictures need matplotlib: pip install 'nestfed[plot]'.")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def save(figure: Any, path: Path) -> Path:
    """Write a figure as one that is whole or not there, and forget it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{os.getpid()}-{path.name}")
    figure.savefig(temporary, dpi=130)
    temporary.replace(path)
    pyplot().close(figure)
    return path
