"""The record of a run: one JSON line per round, the source of every table and plot."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from nestfed.core import NestfedError
from nestfed.engine.round import Record
from nestfed.files import write_atomically

COSTS = ("round", "iteration", "participants", "loss", "drift", "examples", "bytes_up", "bytes_down", "seconds")
"""The fields of every record; all other fields are metrics."""


def metrics_of(record: Record) -> dict[str, float]:
    """Return the known metrics of a record."""
    return {k: v for k, v in record.items() if k not in COSTS and v is not None}


def metric_names(records: Iterable[Record]) -> list[str]:
    """Return the names of the metrics in some records; undefined ones have a name too."""
    return next((names for r in records if (names := [k for k in r if k not in COSTS])), [])


def last_known(history: Sequence[Record], column: str) -> float | None:
    """Return the last value of a metric or cost that is known; None if there is none."""
    return next((float(r[column]) for r in reversed(history) if r.get(column) is not None), None)


def line(record: Record) -> str:
    """Return one line of JSON; infinite numbers and NaN become null."""
    clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    return json.dumps(clean) + "\n"


def read(path: Path) -> list[Record]:
    """Return the records of a file; skip a last line that a crash cut short."""
    if not path.exists():
        return []
    records: list[Record] = []
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise NestfedError(f"{path} cannot be read: {error.strerror}.") from error
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            record = json.loads(text)
            if not isinstance(record, dict) or not isinstance(record.get("round"), int):
                raise ValueError("it has no round")
            records.append(record)
        except (ValueError, RecursionError) as error:
            if number >= len(lines) - 1:
                break
            raise NestfedError(f"{path}, line {number} is not a record.") from error
    return records


class Log:
    """A record file, written line by line; a line is written completely or not at all."""

    def __init__(self, path: Path, keep: Iterable[Record]) -> None:
        content = "".join(map(line, keep)).encode()
        write_atomically(path, content)
        self._path, self._length = path, len(content)
        with self._guarded():
            self._file = path.open("ab", buffering=0)

    def add(self, record: Record) -> None:
        """Append a line without buffering."""
        content = line(record).encode()
        with self._guarded():
            rest = content
            while rest:
                rest = rest[self._file.write(rest) :]
        self._length += len(content)

    def settle(self) -> None:
        """Flush all lines to disk, so that a checkpoint never has more rounds than the record."""
        with self._guarded():
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            with suppress(AttributeError, OSError):  # remove the partial line that a full disk leaves
                self._file.truncate(self._length)
            raise NestfedError(f"Cannot write {self._path}: {error.strerror or error}.") from error
