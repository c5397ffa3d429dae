"""Randomness as a pure function of (seed, purpose, client, iteration): a counter-based generator."""

from __future__ import annotations

from enum import IntEnum

import numpy as np


class Purpose(IntEnum):
    """What a stream of random numbers is for; streams of different purposes are independent."""

    BATCH = 0
    INNER = 1
    PARTICIPATION = 2
    FAILURE = 3
    DROPOUT = 4
    OUTPUT = 5
    PROBLEM = 6
    TASKS = 7
    ENCODE = 8
    ITEMS = 9


class Streams:
    """All random numbers of one seed.

    Philox is keyed by (seed, purpose, client) and its counter starts at the iteration, so every stream allows
    random access. One generator is reused, because setting its state costs a tenth of creating a new one.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed % 2**64
        self._bits = np.random.Philox(0)
        self._state = self._bits.state
        self._generator = np.random.Generator(self._bits)

    def at(self, purpose: Purpose, client: int, iteration: int) -> np.random.Generator:
        """Return the generator for this purpose, client and iteration. It is valid until the next call."""
        self._state["state"]["key"][:] = self.seed, purpose * 2**48 + client
        self._state["state"]["counter"][:] = 0, 0, iteration, 0
        self._state["buffer_pos"] = 4
        self._state["has_uint32"] = 0
        self._bits.state = self._state
        return self._generator

    def __getstate__(self) -> int:
        return self.seed

    def __setstate__(self, seed: int) -> None:
        self.__init__(seed)  # type: ignore[misc]
