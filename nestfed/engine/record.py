"""The record of a run: one JSON line per round, the source of truth of every table and plot."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path

from nestfed.core import NestfedError
from nestfed.engine.checkpoint import write_atomically
from nestfed.engine.sync import Record


def line(record: Record) -> str:
    """Return one line; a number that JSON does not know becomes null."""
    clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    return json.dumps(clean) + "\n"


def read(path: Path) -> list[Record]:
    """Return the records of a file; a last line cut short by a crash is left out."""
    if not path.exists():
        return []
    records = []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            records.append(json.loads(text))
        except ValueError as error:
            if number >= len(lines) - 1:
                break
            raise NestfedError(f"{path}, line {number} is not a record.") from error
    return records


class Log:
    """A record file that is written line by line."""

    def __init__(self, path: Path, keep: Iterable[Record]) -> None:
        write_atomically(path, "".join(map(line, keep)).encode())
        self._file = path.open("a", encoding="utf-8")

    def add(self, record: Record) -> None:
        """Append a line and hand it to the system at once."""
        self._file.write(line(record))
        self._file.flush()

    def settle(self) -> None:
        """Wait until all lines are on the disk, so that a checkpoint never knows more rounds than the record."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()
