"""What a site's process keeps between messages, so that it reads its rows and builds its objects once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
Key = tuple[Any, ...]
"""What a value was made from; compared by ==."""


class Kept:
    """The last value of each kind, for as long as it is asked for with the same key."""

    def __init__(self) -> None:
        self._values: dict[str, tuple[Key, Any]] = {}

    def get(self, kind: str, key: Key, make: Callable[[], T]) -> T:
        """Return the value of this kind; make it if the last one had another key."""
        if kind not in self._values or self._values[kind][0] != key:
            self._values.pop(kind, None)  # not two at once: they may be large
            self._values[kind] = (key, make())
        value: T = self._values[kind][1]
        return value


def stamp_of_file(path: str | Path) -> Key:
    """Return what changes when a file changes; nothing if it cannot be read, as its reader will say why."""
    try:
        found = Path(path).stat()
    except OSError:
        return ()
    return (str(path), found.st_mtime_ns, found.st_size, found.st_ino)
