"""A message between coordinator and site: plain words and named arrays in one block of bytes (safetensors, no pickle).

The header of the block names every array with its type, shape and place, so it can be checked before any array is decoded.
Types have no byte order of their own: all numbers are little-endian.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save
from torch import Tensor

from nestfed.core import NestfedError
from nestfed.queries.slots import Header, Slots, misfit, most_bytes

DTYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1", "U8": "|u1", "BOOL": "|b1",
}  # fmt: skip
"""The types of arrays in messages, by their names in safetensors."""
MOST_HEADER = 2**20
"""The largest accepted header, in bytes; it holds the words and a line for each array."""
MOST_ARRAYS = 10_000
WORDS = "words"


class RejectedError(NestfedError):
    """A message that must not be used."""


def pack(words: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> bytes:
    """Return a message as bytes."""
    ready = {k: np.ascontiguousarray(v).reshape(v.shape) for k, v in arrays.items()}
    return save(ready, {WORDS: json.dumps(words)})


def numbers(fields: Mapping[str, Tensor], prefix: str = "") -> dict[str, np.ndarray]:
    """Return tensors as arrays for a message."""
    return {f"{prefix}{k}": v.detach().cpu().contiguous().numpy() for k, v in fields.items()}


def tensors(arrays: Mapping[str, np.ndarray], prefix: str = "") -> dict[str, Tensor]:
    """Return a message's arrays that begin with the prefix as tensors."""
    return {k.removeprefix(prefix): torch.from_numpy(np.array(v)) for k, v in arrays.items() if k.startswith(prefix)}


@dataclass(frozen=True)
class Packed:
    """A message whose header was read; its arrays are still bytes."""

    words: Mapping[str, Any]
    header: Header
    places: Mapping[str, int]
    """The first byte of each array in the block."""
    block: memoryview

    def arrays(self, slots: Slots | None = None) -> dict[str, np.ndarray]:
        """Return the arrays, after comparing the header with what was declared; read-only views of the block."""
        if slots is not None and (sentence := misfit(self.header, slots)):
            raise RejectedError(sentence)
        return {
            k: np.frombuffer(self.block, dtype, prod(shape), self.places[k]).reshape(shape)
            for k, (dtype, shape) in self.header.items()
        }


def unpack(block: bytes, most: int | None = None) -> Packed:
    """Read a message's words and header; raise a RejectedError if they are invalid or it has more than `most` bytes."""
    if most is not None and len(block) > most:
        raise RejectedError(f"it sent {len(block):,} bytes, but at most {most:,} are allowed.")
    try:
        size = int.from_bytes(block[:8], "little")
        if len(block) < 8 or size > min(MOST_HEADER, len(block) - 8):
            raise ValueError("its header is longer than the message")
        found = json.loads(bytes(block[8 : 8 + size]).decode())
        words = json.loads(found.pop("__metadata__")[WORDS])
        if not isinstance(words, dict) or len(found) > MOST_ARRAYS:
            raise ValueError("its words are missing")
        header, places, end = {}, {}, 8 + size
        for name, entry in sorted(found.items(), key=lambda item: item[1]["data_offsets"]):
            start, stop = entry["data_offsets"]
            dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
            if not all(type(n) is int and n >= 0 for n in (start, stop, *shape)):
                raise ValueError("its sizes are invalid")
            if 8 + size + start != end or stop - start != prod(shape) * np.dtype(dtype).itemsize:
                raise ValueError("its arrays do not fit their places")
            header[name], places[name] = (dtype, shape), end
            end = 8 + size + stop
        if end != len(block):
            raise ValueError("its arrays do not fill the message")
    except RejectedError:
        raise
    except Exception as error:  # a hostile header can raise anything, RecursionError and MemoryError included
        raise RejectedError("it sent a message that cannot be read.") from error
    return Packed(words, header, places, memoryview(block))


def most_of(slots: Slots) -> int:
    """Return the largest number of bytes of a message with these arrays."""
    return most_bytes(slots) + MOST_HEADER
