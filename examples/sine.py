"""Meta-learning: train on 25 sine waves at five sites, then fit a new wave from ten points in a few steps."""

import argparse

import numpy as np

from nestfed import FederatedMAML

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--rounds", type=int, default=200)
options = parser.parse_args()
rng = np.random.default_rng(0)


def wave(points: int = 50) -> tuple[np.ndarray, np.ndarray]:
    """Return points of a wave with a random amplitude and phase."""
    x = rng.uniform(-5, 5, (points, 1))
    return x, rng.uniform(0.1, 5) * np.sin(x[:, 0] + rng.uniform(0, np.pi))


sites = [[wave() for _ in range(5)] for _ in range(5)]
unseen = [wave(110) for _ in range(100)]
est = FederatedMAML(inner_lr=0.05, shots=10, queries=10, rounds=options.rounds, verbose=None).fit(sites)
for steps in (0, 1, 5):
    print(f"R² on unseen waves after {steps} steps: {est.score(unseen, steps=steps):.3f}")
