"""Differential privacy for clients: Gaussian noise on the sum of clipped changes, and the resulting ε.

In every round the server adds N(0, (noise · clip)²) to each number of Σ clipped(upload − broadcast), over all shared
fields jointly. It divides by the expected number of participants, which reveals nothing about who took part (McMahan et
al. 2018). The accountant is Google's (`pip install 'nestfed[privacy]'`).
"""

from __future__ import annotations

import hashlib
import logging
import math
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module

import numpy as np
import torch
from torch import Tensor

from nestfed.core import Fields, NestfedError
from nestfed.engine.options import Exchange

FAR = 100.0
"""The ε beyond which the PLD accountant is not asked: it takes many seconds, and the promise is empty either way."""


@dataclass(frozen=True)
class Noise:
    """The noise of a run, in units of the clipping norm."""

    multiplier: float
    clip: float
    clients: int
    rate: float
    """The probability that a client takes part in a round; 1 = always."""

    @classmethod
    def plan(cls, exchange: Exchange, clients: int) -> Noise | None:
        """Return the noise of a run, or None."""
        if exchange.privacy is None:
            return None
        return cls(exchange.privacy.noise, exchange.privacy.clip, clients, float(exchange.share))

    @property
    def expected(self) -> float:
        """The expected number of participants, by which sums are divided."""
        return self.rate * self.clients

    def draw(self, fields: Fields, round: int, seed: int | None) -> dict[str, Tensor]:
        """Return the noise of a round's sums: secret without a seed, reproducible with one."""
        key = (
            secrets.token_bytes(16) if seed is None else hashlib.sha256(f"noise {seed} {round}".encode()).digest()[:16]
        )
        generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
        scale = self.multiplier * self.clip
        return {
            k: torch.from_numpy(generator.normal(scale=scale, size=tuple(fields[k].shape))).to(fields[k])
            for k in sorted(fields)
        }

    def mean(self, sums: Fields, base: Fields, round: int, seed: int | None) -> dict[str, Tensor]:
        """Return the broadcast plus the noisy mean of the changes, given their sums."""
        noise = self.draw(sums, round, seed)
        return {k: base[k] + (v + noise[k]) / self.expected for k, v in sums.items()}

    @property
    def delta(self) -> float:
        """The δ for which ε is reported, well below 1 / clients."""
        return min(1e-5, 0.1 / self.clients)

    def statement(self, rounds: int, names: tuple[str, ...]) -> str:
        """Return ε and its assumptions in one sentence."""
        sampling = (
            "all clients in every round"
            if self.rate >= 1
            else f"each client in each round with probability {self.rate:g}, by draws that stay secret"
        )
        rdp = epsilon(self.multiplier, self.rate, rounds, self.delta)
        tighter = ""
        if rdp <= FAR:
            pld = epsilon(self.multiplier, self.rate, rounds, self.delta, "pld")
            tighter = f"; {pld:.4g} by the tighter PLD accountant"
        return (
            f"Privacy: ε = {rdp:.4g} (RDP accountant{tighter}) at δ = {self.delta:.3g} for what the server publishes in "
            f"{rounds} rounds; the unit is "
            f"one client with all its examples (added or removed); {sampling}; changes clipped to {self.clip:g} and noise of "
            f"{self.multiplier:g} times that on the sum, over the fields {', '.join(names)} jointly; accountants of "
            "dp-accounting; the server is trusted with single uploads, and metrics must come from public data."
        )


def epsilon(noise: float, rate: float, rounds: int, delta: float, accountant: str = "rdp") -> float:
    """Return ε after a number of rounds of the Gaussian mechanism on a Poisson sample of the clients.

    accountant: rdp (Rényi divergences), or pld (privacy loss distributions), which is tighter.
    """
    if rounds == 0:
        return 0.0
    try:
        library = import_module("dp_accounting")
        rdp, pld = import_module("dp_accounting.rdp"), import_module("dp_accounting.pld")
    except ImportError as error:
        raise NestfedError("exchange.privacy needs an accountant: pip install 'nestfed[privacy]'.") from error
    event = library.GaussianDpEvent(noise)
    sampled = event if rate >= 1 else library.PoissonSampledDpEvent(rate, event)
    counting = rdp.RdpAccountant() if accountant == "rdp" else pld.PLDAccountant()
    with _quiet():
        counting.compose(sampled, rounds)
        found = float(counting.get_epsilon(delta))
    return found if math.isfinite(found) else float("inf")


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the accountant's warning for each skipped Rényi order; skipping only makes ε larger."""
    log, root, nothing = logging.getLogger("absl"), logging.getLogger(), logging.NullHandler()
    level = log.level
    log.setLevel(logging.ERROR)
    root.addHandler(nothing)  # absl would configure logging for the whole process if the user has not
    try:
        yield
    finally:
        log.setLevel(level)
        root.removeHandler(nothing)
