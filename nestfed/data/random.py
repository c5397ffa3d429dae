"""Randomness as a pure function of (seed, purpose, client, iteration): a counter-based generator."""

from __future__ import annotations

import random
from collections.abc import Sequence
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np

_FACTORS = np.array([0xD2E7470EE14C6C93, 0xCA5A826395121157], dtype=np.uint64)[:, None, None]
_INCREMENTS = np.array([0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B], dtype=np.uint64)[:, None, None]
_LOW, _HALF = np.uint64(2**32 - 1), np.uint64(32)
_HIGH_FACTORS, _LOW_FACTORS = _FACTORS >> _HALF, _FACTORS & _LOW


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
    JUDGE = 10


class Streams:
    """All random numbers of one seed.

    Philox is keyed by (seed, purpose, client) and its counter starts at the iteration, so every stream allows
    random access. One generator is reused, because setting its state costs a tenth of creating a new one.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed % 2**64

    @cached_property
    def _generator(self) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(0))

    @cached_property
    def _state(self) -> dict[str, Any]:
        return dict(self._generator.bit_generator.state)

    def at(self, purpose: Purpose, client: int, iteration: int) -> np.random.Generator:
        """Return the generator for this purpose, client and iteration. It is valid until the next call."""
        self._state["state"]["key"][:] = self.seed, purpose * 2**48 + client
        self._state["state"]["counter"][:] = 0, 0, iteration, 0
        self._state["buffer_pos"] = 4
        self._state["has_uint32"] = 0
        self._generator.bit_generator.state = self._state
        return self._generator

    def keys(self, purpose: Purpose, clients: Sequence[int], iterations: range) -> np.ndarray:
        """Return `at(purpose, n, t).integers(2**62)` for all clients and iterations at once, one row per client.

        It computes the generator's first number, ten rounds of Philox-4×64 (Salmon et al. 2011), for the whole table.
        """
        shape = (2, len(clients), len(iterations))
        key, odd, even = np.empty(shape, np.uint64), np.zeros(shape, np.uint64), np.empty(shape, np.uint64)
        key[0], key[1] = self.seed, (purpose * 2**48 + np.asarray(clients, dtype=np.uint64))[:, None]
        even[0], even[1] = 1, np.asarray(iterations, dtype=np.uint64)  # the generator counts, then draws
        for _ in range(10):
            high, low = _product(even)
            even, odd = high[::-1] ^ odd ^ key, low[::-1]
            key = key + _INCREMENTS  # modulo 2^64, like all sums and products here
        return (even[0] >> np.uint64(2)).astype(np.int64)

    def __getstate__(self) -> int:
        return self.seed

    def __setstate__(self, seed: int) -> None:
        self.__init__(seed)  # type: ignore[misc]


def global_states() -> dict[str, object]:
    """Return the states of the global generators of numpy and `random`, to find out whether something draws from them."""
    _, words, *rest = np.random.get_state()
    return {"numpy": (np.asarray(words).tobytes(), *rest), "random": random.getstate()}


def _product(b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the high and low 64 bits of b times Philox's factors, from products of halves."""
    b1, b0 = b >> _HALF, b & _LOW
    middle = _HIGH_FACTORS * b0 + (_LOW_FACTORS * b0 >> _HALF)
    high = _HIGH_FACTORS * b1 + (middle >> _HALF) + ((_LOW_FACTORS * b1 + (middle & _LOW)) >> _HALF)
    return high, _FACTORS * b
