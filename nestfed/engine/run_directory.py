"""What a run writes down, and how it goes on from that: its history, its record, its checkpoints."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch

from nestfed.core import NestfedError
from nestfed.engine import checkpoint
from nestfed.engine.ranks import Group
from nestfed.engine.record import Log
from nestfed.engine.record import read as read_record
from nestfed.engine.round import Record, RunState
from nestfed.files import sweep


class Diary:
    """A run's history; with a directory also its record and its checkpoints, which the leading rank writes."""

    def __init__(self, path: Path | None, identity: str, group: Group, clients: int) -> None:
        self.path, self.identity, self.group, self.clients = path, identity, group, clients
        self.history: list[Record] = []
        self.saved = -1
        """Rounds that were over at the last checkpoint."""
        self._log: Log | None = None

    def resume(self, state: RunState, place: torch.device) -> RunState:
        """Return the state of the newest good checkpoint, or the given one if there is none, and open the record."""
        if self.path is None:
            return state
        found: RunState | None = None
        if self.group.leads:
            sweep(self.path)
            found, passed_over = checkpoint.read(self.path, self.identity, place, state)
            if found is None and not passed_over and (lost := _recorded(self.path / "record.jsonl")):
                passed_over = [
                    f"{self.path} has no checkpoint of its {lost} rounds: the run starts from the beginning."
                ]
            if found is not None and len(found.seen) != self.clients:
                raise NestfedError(
                    f"{self.path} holds the checkpoint of {len(found.seen)} clients, not {self.clients}."
                )
            for sentence in passed_over:
                warnings.warn(sentence, stacklevel=3)
        tables = state.private
        found = self.group.scatter(found, self.clients, state)
        if found is not None:
            state, self.saved = found, found.round
            if self.group.count == 1:
                for k, v in tables.items():
                    state.private[k] = v.copy_(state.private[k])
            self.history = [r for r in read_record(self.path / "record.jsonl") if r["round"] <= state.round]
        if self.group.leads:
            self._log = Log(self.path / "record.jsonl", self.history)
        return state

    def add(self, record: Record) -> None:
        """Write a round's line."""
        self.history.append(record)
        if self._log is not None:
            self._log.add(record)

    def save(self, state: RunState) -> None:
        """Write a checkpoint."""
        if self.path is not None:
            whole = self.group.gather(state, self.clients)
            if self._log is not None:
                self._log.settle()
                checkpoint.write(self.path, whole, self.identity)
            self.saved = state.round

    def rescue(self, state: RunState) -> str:
        """Save what is good after a round that failed; return a sentence on where it is, if there is anything."""
        if self.path is None or not state.round:
            return ""
        if not state.private:  # otherwise some clients are already in the round that failed
            self.save(state)
        return f"The last good checkpoint is in {self.path}, after round {self.saved}." if self.saved >= 0 else ""

    def close(self) -> None:
        """Close the record."""
        if self._log is not None:
            self._log.close()


def _recorded(path: Path) -> int:
    """Return how many rounds a record that nobody can go on from holds."""
    try:
        return max((int(r["round"]) for r in read_record(path)), default=0)
    except NestfedError:
        return 1  # it cannot be read, but something was there
