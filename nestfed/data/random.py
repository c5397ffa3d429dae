"""Randomness as a pure function of (seed, purpose, client, iteration): a counter-based generator."""

from __future__ import annotations

import random
from collections.abc import Sequence
from enum import IntEnum

import numpy as np

_FACTORS = np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157)
_INCREMENTS = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B)
_LOW, _HALF = np.uint64(2**32 - 1), np.uint64(32)


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

    def keys(self, purpose: Purpose, clients: Sequence[int], iterations: range) -> np.ndarray:
        """Return `at(purpose, n, t).integers(2**62)` for all clients and iterations at once, one row per client.

        It computes the generator's first number, ten rounds of Philox-4×64 (Salmon et al. 2011), for the whole table.
        """
        one = np.array([[1]], dtype=np.uint64)
        k0, k1 = one * np.uint64(self.seed), (purpose * 2**48 + np.asarray(clients, dtype=np.uint64))[:, None]
        c0, c1, c2, c3 = (
            one,
            0 * one,
            np.asarray(iterations, dtype=np.uint64)[None, :],
            0 * one,
        )  # it counts, then draws
        for _ in range(10):
            (high0, low0), (high1, low1) = _product(_FACTORS[0], c0), _product(_FACTORS[1], c2)
            c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
            k0, k1 = k0 + _INCREMENTS[0], k1 + _INCREMENTS[1]  # modulo 2^64, like all sums and products here
        first: np.ndarray = np.broadcast_to(c0 >> np.uint64(2), (len(clients), len(iterations)))
        return first.astype(np.int64)

    def __getstate__(self) -> int:
        return self.seed

    def __setstate__(self, seed: int) -> None:
        self.__init__(seed)  # type: ignore[misc]


def global_states() -> dict[str, object]:
    """Return the states of the global generators of numpy and `random`, to find out whether something draws from them."""
    _, words, *rest = np.random.get_state()
    return {"numpy": (np.asarray(words).tobytes(), *rest), "random": random.getstate()}


def _product(a: np.uint64, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the high and low 64 bits of a product, from products of halves."""
    a1, a0, b1, b0 = a >> _HALF, a & _LOW, b >> _HALF, b & _LOW
    middle = a1 * b0 + (a0 * b0 >> _HALF)
    return a1 * b1 + (middle >> _HALF) + ((a0 * b1 + (middle & _LOW)) >> _HALF), a * b
