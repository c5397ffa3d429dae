"""Show nestfed's log where Flower shows its own: in `flwr run --stream` and on a site's terminal."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager

_NESTFED, _FLOWER = logging.getLogger("nestfed"), logging.getLogger("flwr")


class _ToFlower(logging.Handler):
    """Pass records to Flower's handlers. Their format omits the logger's name, so the message gets it."""

    def emit(self, record: logging.LogRecord) -> None:
        named = copy.copy(record)
        named.msg = f"nestfed: {record.msg}"
        for handler in _FLOWER.handlers:
            if named.levelno >= handler.level:
                handler.handle(named)


_HANDLER = _ToFlower()


@contextmanager
def shown_by_flower() -> Iterator[None]:
    """Show the log, from level INFO unless another level is set, while a Flower app works."""
    if _HANDLER in _NESTFED.handlers:
        yield
        return
    level = _NESTFED.level
    _NESTFED.addHandler(_HANDLER)
    _NESTFED.setLevel(level or logging.INFO)
    try:
        yield
    finally:
        _NESTFED.removeHandler(_HANDLER)
        _NESTFED.setLevel(level)
