"""Storage of clients' private fields between rounds: tables in a simulation, versions on disk at a deployed site."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from nestfed.core import Fields, NestfedError
from nestfed.engine import checkpoint, memory
from nestfed.engine.encode import RESIDUAL, Encoding
from nestfed.engine.program import AnyAlgorithm
from nestfed.engine.round import Order, RunState, put
from nestfed.files import make_directory

KEEP = 3
"""Versions of its private fields that a site keeps before the last one requested."""


def private_fields(method: AnyAlgorithm, template: Any, encoding: Encoding) -> dict[str, Tensor]:
    """Return a client's private fields before its first round: the method's, and residuals if uploads are encoded."""
    found = {k: getattr(template, k) for k in method.private}
    if encoding.up:
        found |= {RESIDUAL + k: torch.zeros_like(getattr(template, k)) for k in method.shared}
    return found


class Store(Protocol):
    """Reads clients' private fields before a round, one row each, and writes the new ones after it."""

    def read(self, order: Order, start: int, stop: int) -> dict[str, Tensor]:
        """Return the fields of the clients at positions start … stop−1 of an order."""

    def write(self, order: Order, ns: Sequence[int], fields: Fields) -> None:
        """Replace the fields of some clients of an order."""


class Tables:
    """All clients' private fields as tables in memory, or on disk if they are large."""

    def __init__(self, fields: dict[str, Tensor], first: int = 0) -> None:
        self.fields, self.first = fields, first
        """`first` is the client of row 0."""

    @classmethod
    def start(cls, fields: Fields, block: range, *, limit: int, folder: Path | None, shared: bool) -> Tables:
        """Return the tables of a block of clients; with `shared`, forked processes share them."""
        made = {k: _new_table(v, len(block), limit=limit, folder=folder, shared=shared) for k, v in fields.items()}
        return cls(made, block.start)

    def read(self, order: Order, start: int, stop: int) -> dict[str, Tensor]:
        """Return rows; a single row is a view, which avoids copying a large model."""
        rows = [n - self.first for n in order.asked[start:stop]]
        if len(rows) == 1:
            return {k: v[rows[0] : rows[0] + 1] for k, v in self.fields.items()}
        return {k: v[rows] for k, v in self.fields.items()}

    def write(self, order: Order, ns: Sequence[int], fields: Fields) -> None:
        """Write rows."""
        rows = [n - self.first for n in ns]
        # A method may return a field unchanged or swapped, so a value may still be a view of these tables.
        tables = {v.untyped_storage().data_ptr() for v in self.fields.values()}
        safe = {k: v.clone() if v.untyped_storage().data_ptr() in tables else v for k, v in fields.items()}
        for k, v in safe.items():
            put(self.fields[k], rows, v)


def _new_table(value: Tensor, rows: int, *, limit: int, folder: Path | None, shared: bool) -> Tensor:
    """Return a table with `value` in every row."""
    need = rows * value.numel() * value.element_size()
    large = need > (limit or memory.physical() // 2)
    if value.device.type != "cpu" or not (large or shared):
        return value.expand(rows, *value.shape).clone()
    # A large table of a run without a directory is a temporary file.
    place = (folder or Path(tempfile.gettempdir())) if large else None
    return memory.table((rows, *value.shape), value.dtype, place).copy_(value)


class LostStateError(NestfedError):
    """A site does not have the version of its private fields that the order names."""


class Versions:
    """One client's private fields on its own disk, one folder per version, each written completely or not at all.

    The order names the version to start from. If an answer was lost, late or rejected, the client therefore continues
    from the version before it.
    """

    def __init__(self, folder: Path, identity: str, start: Fields) -> None:
        self.folder, self.identity, self.start = folder, identity, start

    def read(self, order: Order, start: int, stop: int) -> dict[str, Tensor]:
        """Return the fields of the version that the order names."""
        (version,) = order.seen[start:stop]
        if not self.start or version < 0:
            return {k: v[None] for k, v in self.start.items()}
        path = self._path(version)
        found, _ = checkpoint.read(path, self.identity, torch.device("cpu")) if path.is_dir() else (None, [])
        if found is None:
            raise LostStateError(f"its private fields after round {version} are missing in {self.folder}.")
        return {k: v[None] for k, v in found.private.items()}

    def write(self, order: Order, ns: Sequence[int], fields: Fields) -> None:
        """Save the next version, and delete those that can no longer be requested."""
        if not fields:
            return
        path = make_directory(self._path(order.round + 1))
        version = RunState({}, {}, torch.zeros(1), round=order.round + 1)
        checkpoint.write(path, version, {k: v[0] for k, v in fields.items()}, self.identity, keep=1)
        for old in sorted(self.folder.glob("version-*")):
            if int(old.name.removeprefix("version-")) < order.seen[0] - KEEP:
                shutil.rmtree(old, ignore_errors=True)

    def _path(self, version: int) -> Path:
        return self.folder / f"version-{version:08d}"
