"""Instrumental variable regression as a conditional problem: an instrument identifies a confounded effect."""

import argparse

import numpy as np
import torch

from nestfed import Conditional, algorithm, simulate
from nestfed.data.random import Purpose, Streams

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--rounds", type=int, default=60)
options = parser.parse_args()


class Instruments:
    """Clients that draw instruments z and, for each, m pairs (treatment, outcome) with a hidden confounder."""

    def __init__(self, inner: int, clients: int = 8, outer: int = 16) -> None:
        self.inner, self.clients, self.outer, self.streams = inner, clients, outer, Streams(0)

    def __len__(self) -> int:
        return self.clients

    def sample(self, n: int, t: int):  # type: ignore[no-untyped-def]
        """Return client n's batch at iteration t."""
        rng = self.streams.at(Purpose.BATCH, n, t)
        z = rng.normal(0.1 * n, 1, (self.outer, 1))
        hidden, noise = rng.normal(size=(2, self.outer, self.inner))
        treatment = z + hidden
        outcome = 2 * treatment - 3 * hidden + 0.1 * noise  # the effect is 2
        return (_float(z),), (_float(treatment), _float(outcome))


def _float(a: np.ndarray) -> torch.Tensor:
    return torch.tensor(a, dtype=torch.float32)


def effect(inner: int, method: str) -> float:
    """Return the estimated effect: E_z (E[y − θt | z])² minimised with m inner samples."""
    problem = Conditional(lambda u, outer: u**2, lambda x, outer, pair: pair[1] - x[0] * pair[0], torch.zeros(1))
    hyper = {"alpha": 0.05} | ({"beta": 0.5} if method != "fcsg" else {})
    return float(simulate(problem, algorithm(method, **hyper), Instruments(inner), rounds=options.rounds, q=5).x[0])


clients = Instruments(16)
pairs = [clients.sample(n, t)[1] for n in range(8) for t in range(50)]
t, y = (torch.cat([p[i].reshape(-1) for p in pairs]) for i in (0, 1))
print(f"truth 2.000, least squares {float(t @ y / (t @ t)):.3f}")
for m in (1, 4, 16, 64):  # the square has a bias of the residual's variance / m
    print(f"m = {m:>2}: " + "  ".join(f"{name} {effect(m, name):.3f}" for name in ("fcsg", "fcsg-m", "acc-fcsg-m")))
