"""The audit log of a study: one line of JSON for each event, each with the hash of the line before.

A line that was changed, added or removed breaks the chain. The last hash is also in the file `head`, so that lines cut
off at the end are noticed as well. Whoever can write to the folder could forge a whole log: note the head elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from nestfed.core import NestfedError
from nestfed.files import locked, make_directory, write_atomically

FOLDER, LOG, HEAD = "audit", "log.jsonl", "head"
"""The folder in a run's directory or a site's state, and the files in it."""
FIRST = "0" * 64
"""What the first line has as the hash of the line before."""
PATIENCE = 60.0
"""Seconds to wait for another process that writes to the log."""
OWN = ("time", "who", "what", "before")
"""The keys of every line."""

Event = Mapping[str, Any]


@dataclass(frozen=True)
class Audit:
    """An audit log in a folder, to which one party writes."""

    folder: Path
    who: str

    def add(self, what: str, **facts: Any) -> None:
        """Append an event; it is on disk when this returns."""
        with locked(make_directory(self.folder), PATIENCE):
            with (self.folder / LOG).open("a+b") as file:
                before = _cleaned(file)
                line = {"time": now(), "who": self.who, "what": what, **facts, "before": before}
                text = json.dumps(line, ensure_ascii=False).encode()
                file.write(text + b"\n")
                file.flush()
                os.fsync(file.fileno())
            write_atomically(self.folder / HEAD, f"{_hash(text)}\n".encode())


def now() -> str:
    """Return the time in UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def events(folder: Path) -> list[Event]:
    """Return the events of a log, after checking that no line was changed or removed."""
    path = folder / LOG
    if not path.is_file():
        raise NestfedError(f"{folder} has no audit log: expected the folder `audit` of a run or of a site's state.")
    lines = path.read_bytes().split(b"\n")
    if lines.pop():
        raise NestfedError(f"{path} ends in the middle of line {len(lines) + 1}: a crash or a cut.")
    found: list[Event] = []
    hashes = [FIRST]
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text)
            before = line["before"]
        except (ValueError, KeyError, TypeError) as error:
            raise NestfedError(f"Line {number} of {path} is damaged.") from error
        if before != hashes[-1]:
            raise NestfedError(
                f"{path} was changed: line {number - 1} is not the one that line {number} follows, so it was altered, or a "
                "line beside it was added or removed."
            )
        hashes.append(_hash(text))
        found.append(line)
    # After a crash between a line and the head, the head is one line behind.
    if _head(folder) not in hashes[-2:]:
        raise NestfedError(f"{path} was changed: its last line is not the one that {folder / HEAD} names.")
    return found


def _head(folder: Path) -> str:
    try:
        return (folder / HEAD).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _hash(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()


def _cleaned(file: IO[bytes]) -> str:
    """Return the hash of the last line, or of no line; remove a part of a line that a crash left."""
    size, block, tail = file.seek(0, os.SEEK_END), 4096, b""
    while tail.count(b"\n") < 2 and len(tail) < size:
        file.seek(max(0, size - block))
        tail = file.read()
        block *= 2
    *lines, rest = tail.split(b"\n")
    if rest:
        file.truncate(size - len(rest))
    return _hash(lines[-1]) if lines else FIRST


def shown(event: Event) -> str:
    """Return an event as a line for people."""
    facts = ", ".join(f"{k} {_plain(v)}" for k, v in event.items() if k not in OWN)
    return f"{event['time']}  {event['who']}: {event['what']}{f' ({facts})' if facts else ''}"


def _plain(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
