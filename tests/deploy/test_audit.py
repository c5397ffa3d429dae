"""The audit log: what it says of a run, and that no line can be changed, added or removed unnoticed."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path

import pytest

from nestfed.core import NestfedError
from nestfed.deploy.audit import Audit, events, shown

LINES = 5


def log(folder: Path) -> Path:
    audit = Audit(folder, "coordinator")
    for number in range(LINES):
        audit.add("round finished", round=number, sites=["a", "ß"])
    return folder / "log.jsonl"


def test_a_log_that_nobody_changed(tmp_path: Path) -> None:
    """The chain, recomputed by hand."""
    path = log(tmp_path)
    lines = path.read_bytes().splitlines()
    before = "0" * 64
    for line in lines:
        assert json.loads(line)["before"] == before
        before = hashlib.sha256(line).hexdigest()
    assert (tmp_path / "head").read_text().strip() == before
    assert [e["round"] for e in events(tmp_path)] == list(range(LINES))
    assert shown(events(tmp_path)[3]).endswith("coordinator: round finished (round 3, sites a, ß)")


CHANGES: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "a changed line": lambda lines: [*lines[:2], lines[2].replace(b'"a"', b'"b"'), *lines[3:]],
    "a changed last line": lambda lines: [*lines[:-1], lines[-1].replace(b'"a"', b'"b"')],
    "a removed line": lambda lines: [*lines[:2], *lines[3:]],
    "a removed first line": lambda lines: lines[1:],
    "a removed last line": lambda lines: lines[:-1],
    "two removed last lines": lambda lines: lines[:-2],
    "an added line": lambda lines: [*lines[:2], lines[2], *lines[2:]],
    "exchanged lines": lambda lines: [lines[0], lines[2], lines[1], *lines[3:]],
    "no JSON": lambda lines: [*lines[:2], b"?", *lines[3:]],
    "an empty log": lambda lines: [],
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed(change: str, tmp_path: Path) -> None:
    path = log(tmp_path)
    lines = CHANGES[change](path.read_bytes().splitlines())
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    with pytest.raises(NestfedError, match=r"was changed|is damaged"):
        events(tmp_path)


def test_a_crash_leaves_a_log_that_continues(tmp_path: Path) -> None:
    """Between a line and the head, and in the middle of a line."""
    path = log(tmp_path)
    head = (tmp_path / "head").read_bytes()
    Audit(tmp_path, "coordinator").add("round finished", round=LINES)
    (tmp_path / "head").write_bytes(head)
    assert len(events(tmp_path)) == LINES + 1
    with path.open("ab") as file:
        file.write(b'{"time": "20')
    with pytest.raises(NestfedError, match="in the middle of line 7"):
        events(tmp_path)
    Audit(tmp_path, "coordinator").add("round finished", round=LINES + 1)
    assert [e["round"] for e in events(tmp_path)] == list(range(LINES + 2))


def test_long_lines(tmp_path: Path) -> None:
    for n in range(3):
        Audit(tmp_path, "coordinator").add("study agreed", sites=["x" * 100] * 200 * n)
    assert len(events(tmp_path)) == 3


def _write(folder: Path, who: str) -> None:
    for number in range(20):
        Audit(folder, who).add("round finished", round=number)


def test_processes_that_write_at_once(tmp_path: Path) -> None:
    """Flower runs a site's messages in processes of their own."""
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write, args=(tmp_path, f"w{i}")) for i in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    found = events(tmp_path)
    assert len(found) == 60
    assert {e["who"] for e in found} == {"w0", "w1", "w2"}
