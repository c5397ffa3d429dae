"""Policy evaluation as a conditional problem: the mean squared Bellman error has an expectation in a square."""

import argparse

import numpy as np
import torch

from nestfed import Conditional, algorithm, simulate
from nestfed.data.random import Purpose, Streams

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--rounds", type=int, default=200)
options = parser.parse_args()

STATES, GAMMA = 10, 0.7
rng = np.random.default_rng(0)
P = rng.dirichlet(np.full(STATES, 0.3), STATES)  # the policy's transitions
R = rng.normal(size=STATES)
TRUTH = torch.tensor(np.linalg.solve(np.eye(STATES) - GAMMA * P, R), dtype=torch.float32)


class Transitions:
    """Clients that visit some states more than others; from each they see m next states."""

    def __init__(self, inner: int, clients: int = 4, outer: int = 8) -> None:
        self.inner, self.clients, self.outer, self.streams = inner, clients, outer, Streams(0)
        self.visits = np.random.default_rng(1).dirichlet(np.ones(STATES), clients)

    def __len__(self) -> int:
        return self.clients

    def sample(self, n: int, t: int):  # type: ignore[no-untyped-def]
        """Return states (outer) and next states (inner) of client n at iteration t."""
        rng = self.streams.at(Purpose.BATCH, n, t)
        states = rng.choice(STATES, self.outer, p=self.visits[n])
        following = np.stack([rng.choice(STATES, self.inner, p=P[s]) for s in states])
        return (torch.from_numpy(states),), (torch.from_numpy(following),)


def bellman(value: torch.Tensor, outer, inner):  # type: ignore[no-untyped-def]
    """Return r(s) + γV(s') − V(s), one for each pair of state and next state."""
    (states,), (following,) = outer, inner
    reward = torch.tensor(R, dtype=value.dtype)[states]
    return reward[:, None] + GAMMA * value[following] - value[states][:, None]


print(
    f"values of {STATES} states, root mean squared error against the exact solution (0 everywhere: {float(TRUTH.square().mean().sqrt()):.3f})"
)
for m in (1, 4, 32):
    problem = Conditional(lambda u, outer: u**2, bellman, torch.zeros(STATES))
    method = algorithm("fcsg-m", alpha=0.5, beta=0.5)
    found = simulate(problem, method, Transitions(m), rounds=options.rounds, q=5).x
    print(f"m = {m:>2}: {float((found - TRUTH).square().mean().sqrt()):.3f}")
