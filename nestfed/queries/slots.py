"""The declared arrays of a message, and the check of a header against them, before anything is decoded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

Header = Mapping[str, tuple[str, tuple[int, ...]]]
"""The type and the shape of every array of a message."""


@dataclass(frozen=True)
class AtMost:
    """A size that the sender decides, up to a limit."""

    limit: int

    def __str__(self) -> str:
        return f"at most {self.limit}"


@dataclass(frozen=True)
class Slot:
    """One array of a message: its type, with byte order as in "<f8", and its sizes."""

    dtype: str
    shape: tuple[int | AtMost, ...] = ()

    @property
    def most_bytes(self) -> int:
        """The largest number of bytes of the array."""
        return np.dtype(self.dtype).itemsize * prod(n.limit if isinstance(n, AtMost) else n for n in self.shape)

    def misfit(self, dtype: str, shape: tuple[int, ...]) -> str:
        """Return how an array of this type and shape differs, or nothing."""
        if dtype != self.dtype:
            return f"is {np.dtype(dtype)} instead of {np.dtype(self.dtype)}"
        fits = len(shape) == len(self.shape) and all(
            0 <= n <= limit.limit if isinstance(limit, AtMost) else n == limit for n, limit in zip(shape, self.shape)
        )
        return "" if fits else f"has shape {shape} instead of ({', '.join(map(str, self.shape))})"


Slots = Mapping[str, Slot]


def misfit(header: Header, slots: Slots) -> str:
    """Return what is wrong with a message's header, as the end of a sentence about its sender, or nothing."""
    if header.keys() != slots.keys():
        return f"it sent {', '.join(sorted(header)) or 'nothing'} instead of {', '.join(sorted(slots)) or 'nothing'}."
    for name, slot in slots.items():
        if difference := slot.misfit(*header[name]):
            return f"its {name} {difference}."
    return ""


def most_bytes(slots: Slots) -> int:
    """Return the largest number of bytes of all arrays."""
    return sum(slot.most_bytes for slot in slots.values())
