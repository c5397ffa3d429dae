"""Checkpoints: the state between two rounds, in a file that is written completely or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nestfed.core import Fields, NestfedError
from nestfed.engine.identity import difference
from nestfed.engine.round import RunState
from nestfed.files import written

FORMAT = "2"
_NAME = re.compile(r"round-(\d+)-([0-9a-f]{16})\.safetensors")
_OF_STATE = ("shared", "server", "kept", "tables")
_TENSORS = (*_OF_STATE, "private")
_NUMBERS = tuple(f.name for f in fields(RunState) if f.name not in (*_OF_STATE, "seen"))
_CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_BLOCK = 2**24
"""Bytes to write or read at a time, so that a checkpoint needs no second copy of the state in memory."""


class Saved(NamedTuple):
    """The content of a checkpoint: the server's state, and the clients' private fields, one row each."""

    state: RunState
    private: dict[str, Tensor]


def write(directory: Path, state: RunState, private: Fields, fingerprint: str, keep: int = 2) -> Path:
    """Save a run between two rounds. The file name contains the round and a digest; only the newest `keep` files stay."""
    tensors: dict[str, Tensor] = {"seen": state.seen} | {f"private.{k}": v for k, v in private.items()}
    for group in _OF_STATE:
        tensors |= {f"{group}.{k}": v for k, v in getattr(state, group).items()}
    numbers = {name: getattr(state, name) for name in _NUMBERS}
    metadata = {"format": FORMAT, "fingerprint": fingerprint, "numbers": json.dumps(numbers)}
    digest = hashlib.sha256()

    def path() -> Path:
        return directory / f"round-{state.number:08d}-{digest.hexdigest()[:16]}.safetensors"

    with written(directory / f".round-{state.number:08d}.{os.getpid()}.tmp", path) as file:
        for block in _blocks(tensors, metadata):
            digest.update(block)
            file.write(block)
    for old in _found(directory)[keep:]:
        old.unlink(missing_ok=True)
    return path()


def _blocks(tensors: dict[str, Tensor], metadata: dict[str, str]) -> Iterator[Any]:
    """Yield the bytes of a safetensors file in blocks: the length of the header, the header, the numbers."""
    header: dict[str, Any] = {"__metadata__": metadata}
    place = 0
    # The format requires alignment: put the widest numbers first.
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    for name in order:
        v = tensors[name]
        end = place + v.numel() * v.element_size()
        header[name] = {"dtype": _CODES[v.dtype], "shape": list(v.shape), "data_offsets": [place, end]}
        place = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        content = tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        for start in range(0, len(content), _BLOCK):
            yield content[start : start + _BLOCK].numpy().data


def read(
    directory: Path, fingerprint: str, device: torch.device, like: Saved | None = None, rounds: range | None = None
) -> tuple[Saved | None, list[str]]:
    """Return the newest intact checkpoint of this experiment, or None, and a warning for each skipped file.

    With `like`, the fields must have the same names, types and shapes. With `rounds`, only checkpoints after one of these
    rounds count: those of a warm-up have other fields.
    """
    warnings = []
    for path in _found(directory):
        match = _NAME.fullmatch(path.name)
        if rounds is not None and match is not None and int(match[1]) not in rounds:
            continue
        try:
            if match is None or _digest(path) != match[2]:
                warnings.append(f"{path} is damaged and was skipped.")
                continue
            with safe_open(path, "pt") as file:
                header = file.metadata() or {}
                # A matrix product rounds differently if an address is not a multiple of 16, and numbers in a file may
                # start anywhere. A copy made by torch is aligned, so the run resumes bit for bit. Private fields may be
                # large; they are copied into the run's own tables anyway.
                tensors = {
                    k: file.get_tensor(k).to(device, copy=not k.startswith("private."))
                    for k in file.keys()  # noqa: SIM118
                }
            if header.get("format") != FORMAT:
                raise NestfedError(f"{path} was written by another version of nestfed; choose another directory.")
            if header.get("fingerprint") != fingerprint:
                what = difference(fingerprint, header.get("fingerprint", ""))
                raise NestfedError(
                    f"{directory} contains checkpoints of another experiment{f': {what}' if what else ''}. Choose another "
                    "directory."
                )
            return _saved(tensors, json.loads(header["numbers"]), like), warnings
        except (SafetensorError, OSError, KeyError, ValueError, TypeError, RecursionError) as error:
            reason = str(error).rstrip(".")
            warnings.append(f"{path} cannot be read and was skipped ({reason}).")
    if warnings:
        warnings.append(f"No valid checkpoint is left in {directory}: the run starts from the beginning.")
    return None, warnings


def _saved(tensors: dict[str, Tensor], numbers: Any, like: Saved | None) -> Saved:
    """Return the content of a checkpoint after checking it, because the file may come from anywhere."""
    seen = tensors.pop("seen")
    groups: dict[str, Any] = {group: {} for group in _TENSORS}
    for name, value in tensors.items():
        group, _, key = name.partition(".")
        groups[group][key] = value
    if not isinstance(numbers, dict) or set(numbers) != set(_NUMBERS):
        raise ValueError("its counters are not those of a run")
    for name, value in numbers.items():
        _check_number(name, value)
    if seen.dim() != 1 or (like is not None and seen.dtype != like.state.seen.dtype):
        raise ValueError("its list of clients is damaged")
    private = groups.pop("private")
    found = Saved(RunState(seen=seen.cpu(), **groups, **numbers), private)
    if like is not None:
        _check_fields("shared", found.state.shared, like.state.shared)
        _check_fields("server", found.state.server, like.state.server)
        _check_tables(found.state, like.state.tables)
        # The file may have private fields of more clients than this process.
        own = {k: v.new_empty((len(seen), *v.shape[1:]), device="meta") for k, v in like.private.items()}
        _check_fields("private", private, own)
    return found


def _check_number(name: str, value: Any) -> None:
    kinds = (int, float) if name in ("seconds", "best") else int
    if isinstance(value, bool) or not (isinstance(value, kinds) or (name == "best" and value is None)):
        raise ValueError(f"its {name} is {value!r}")
    if value is not None and name != "best" and value < 0:
        raise ValueError(f"its {name} is below 0")


def _check_fields(group: str, found: Fields, right: Fields) -> None:
    def form(fields: Fields) -> dict[str, Any]:
        return {k: (v.dtype, tuple(v.shape)) for k, v in fields.items()}

    if form(found) != form(right):
        raise ValueError(f"its {group} fields differ from this run's")


def _check_tables(state: RunState, right: Fields) -> None:
    """Check tables of contributions, one row per client; the shape of a row is free."""
    good = state.tables.keys() == right.keys() and all(
        v.dim() >= 1 and len(v) == len(state.seen) and v.dtype == right[k].dtype for k, v in state.tables.items()
    )
    if not good:
        raise ValueError("its tables of contributions differ from this run's")


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()[:16]


def _found(directory: Path) -> list[Path]:
    """Return the checkpoints, newest first."""
    return sorted((p for p in directory.glob("round-*.safetensors") if _NAME.fullmatch(p.name)), reverse=True)
