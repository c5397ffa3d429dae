"""Checkpoints: the state between two rounds in a file that is whole or not there."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import fields
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from nestfed.core import NestfedError
from nestfed.engine.sync import RunState

FORMAT = "1"
_NAME = re.compile(r"round-(\d+)-([0-9a-f]{16})\.safetensors")
_TENSORS = ("shared", "server", "private", "kept")
_NUMBERS = tuple(f.name for f in fields(RunState) if f.name not in (*_TENSORS, "seen"))


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that it is whole or not there, also after a power cut."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise NestfedError(f"Cannot write {path}: {error.strerror or error}.") from error


def write(directory: Path, state: RunState, fingerprint: str, keep: int = 2) -> Path:
    """Save the state; its name holds the round and a digest of the content. Older ones but `keep` are deleted."""
    tensors: dict[str, Tensor] = {"seen": state.seen}
    for group in _TENSORS:
        tensors |= {f"{group}.{k}": v.contiguous() for k, v in getattr(state, group).items()}
    numbers = {name: getattr(state, name) for name in _NUMBERS}
    metadata = {"format": FORMAT, "fingerprint": fingerprint, "numbers": json.dumps(numbers)}
    content = save(tensors, metadata)
    digest = hashlib.sha256(content).hexdigest()[:16]
    path = directory / f"round-{state.round:08d}-{digest}.safetensors"
    write_atomically(path, content)
    for old in _found(directory)[keep:]:
        old.unlink(missing_ok=True)
    return path


def read(directory: Path, fingerprint: str, device: torch.device) -> tuple[RunState | None, list[str]]:
    """Return the newest whole checkpoint of this experiment, or None, and what had to be passed over."""
    warnings = []
    for path in _found(directory):
        content = path.read_bytes()
        match = _NAME.fullmatch(path.name)
        if match is None or hashlib.sha256(content).hexdigest()[:16] != match[2]:
            warnings.append(f"{path} is damaged and was passed over.")
            continue
        try:
            tensors = {k: v.to(device) for k, v in load(content).items()}
            header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
            numbers = json.loads(header["numbers"])
        except (SafetensorError, KeyError, ValueError) as error:
            warnings.append(f"{path} cannot be read and was passed over ({error}).")
            continue
        if header.get("format") != FORMAT:
            raise NestfedError(f"{path} was written by another version of nestfed; start in another directory.")
        if header["fingerprint"] != fingerprint:
            raise NestfedError(f"{directory} holds another experiment's checkpoints; choose another directory.")
        groups = {
            group: {k.split(".", 1)[1]: v for k, v in tensors.items() if k.startswith(f"{group}.")}
            for group in _TENSORS
        }
        return RunState(seen=tensors["seen"].cpu(), **groups, **numbers), warnings
    return None, warnings


def _found(directory: Path) -> list[Path]:
    """Return the checkpoints, newest first."""
    return sorted((p for p in directory.glob("round-*.safetensors") if _NAME.fullmatch(p.name)), reverse=True)
