"""Checkpoints: the state between two rounds in a file that is whole or not there."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nestfed.core import NestfedError
from nestfed.engine.sync import RunState

FORMAT = "1"
_NAME = re.compile(r"round-(\d+)-([0-9a-f]{16})\.safetensors")
_TENSORS = ("shared", "server", "private", "kept")
_NUMBERS = tuple(f.name for f in fields(RunState) if f.name not in (*_TENSORS, "seen"))
_CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_BLOCK = 2**24
"""Bytes that are written or read at once, so that a checkpoint needs no second copy of the state in memory."""


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that it is whole or not there, also after a power cut."""
    with _written(path.parent / f".{path.name}.{os.getpid()}.tmp", lambda: path) as file:
        file.write(content)


@contextmanager
def _written(temporary: Path, name: Callable[[], Path]) -> Iterator[IO[bytes]]:
    """Open a file that gets its name when all is written and on the disk."""
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(name())
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise NestfedError(f"Cannot write {name()}: {error.strerror or error}.") from error


def write(directory: Path, state: RunState, fingerprint: str, keep: int = 2) -> Path:
    """Save the state; its name holds the round and a digest of the content. Older ones but `keep` are deleted."""
    tensors: dict[str, Tensor] = {"seen": state.seen}
    for group in _TENSORS:
        tensors |= {f"{group}.{k}": v for k, v in getattr(state, group).items()}
    numbers = {name: getattr(state, name) for name in _NUMBERS}
    metadata = {"format": FORMAT, "fingerprint": fingerprint, "numbers": json.dumps(numbers)}
    digest = hashlib.sha256()

    def path() -> Path:
        return directory / f"round-{state.round:08d}-{digest.hexdigest()[:16]}.safetensors"

    with _written(directory / f".round-{state.round:08d}.{os.getpid()}.tmp", path) as file:
        for block in _blocks(tensors, metadata):
            digest.update(block)
            file.write(block)
    for old in _found(directory)[keep:]:
        old.unlink(missing_ok=True)
    return path()


def _blocks(tensors: dict[str, Tensor], metadata: dict[str, str]) -> Iterator[Any]:
    """Return the bytes of a safetensors file, piece by piece: the length of the header, the header, the numbers."""
    header: dict[str, Any] = {"__metadata__": metadata}
    place = 0
    # The widest numbers first, so that all are aligned, as the format wants it.
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


def read(directory: Path, fingerprint: str, device: torch.device) -> tuple[RunState | None, list[str]]:
    """Return the newest whole checkpoint of this experiment, or None, and what had to be passed over."""
    warnings = []
    for path in _found(directory):
        match = _NAME.fullmatch(path.name)
        if match is None or _digest(path) != match[2]:
            warnings.append(f"{path} is damaged and was passed over.")
            continue
        try:
            with safe_open(path, "pt") as file:
                header = file.metadata()
                tensors = {k: file.get_tensor(k).to(device) for k in file.keys()}  # noqa: SIM118
            numbers = json.loads(header["numbers"])
        except (SafetensorError, KeyError, ValueError, TypeError) as error:
            warnings.append(f"{path} cannot be read and was passed over ({error}).")
            continue
        if header.get("format") != FORMAT:
            raise NestfedError(f"{path} was written by another version of nestfed; start in another directory.")
        if header["fingerprint"] != fingerprint:
            raise NestfedError(f"{directory} holds another experiment's checkpoints; choose another directory.")
        groups: dict[str, Any] = {
            group: {k.split(".", 1)[1]: v for k, v in tensors.items() if k.startswith(f"{group}.")}
            for group in _TENSORS
        }
        return RunState(seen=tensors["seen"].cpu(), **groups, **numbers), warnings
    return None, warnings


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()[:16]


def _found(directory: Path) -> list[Path]:
    """Return the checkpoints, newest first."""
    return sorted((p for p in directory.glob("round-*.safetensors") if _NAME.fullmatch(p.name)), reverse=True)
