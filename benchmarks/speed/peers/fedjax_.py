"""FedJAX: FedAvg with its jitted back end."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import fedjax
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from fedjax.algorithms import fed_avg

FOLDER, CLIENTS, PART, ROUNDS = Path(sys.argv[1]), *map(int, sys.argv[2:5])


def forward(batch):
    net = hk.Sequential([
        hk.Conv2D(5, 3, padding="VALID"), jnp.tanh, hk.MaxPool((2, 2, 1), (2, 2, 1), "VALID"),
        hk.Conv2D(10, 3, padding="VALID"), jnp.tanh, hk.MaxPool((2, 2, 1), (2, 2, 1), "VALID"),
        hk.Flatten(), hk.Linear(100), jnp.tanh, hk.Linear(10),
    ])  # fmt: skip
    return net(batch["x"])


def main() -> None:
    x = np.load(FOLDER / "x.npy").reshape(-1, 28, 28, 1)
    y = np.load(FOLDER / "y.npy").astype(np.int32)
    held = np.array_split(np.load(FOLDER / "order.npy"), CLIENTS)
    data = {str(n): {"x": x[rows], "y": y[rows]} for n, rows in enumerate(held)}
    federated = fedjax.InMemoryFederatedData(data)
    model = fedjax.create_model_from_haiku(
        hk.transform(forward), {"x": np.zeros((1, 28, 28, 1), np.float32), "y": np.zeros(1, np.int32)},
        lambda batch, output: fedjax.metrics.unreduced_cross_entropy_loss(batch["y"], output), {},
    )  # fmt: skip
    algorithm = fed_avg.federated_averaging(
        fedjax.model_grad(model), fedjax.optimizers.sgd(0.05), fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=50, num_epochs=None, num_steps=10, drop_remainder=True),
    )  # fmt: skip
    sampler = fedjax.client_samplers.UniformGetClientSampler(federated, PART, 0)
    state = algorithm.init(model.init(jax.random.PRNGKey(0)))
    for number in range(ROUNDS):
        sampler.set_round_num(number)
        state, _ = algorithm.apply(state, sampler.sample())
        jax.block_until_ready(state.params)
        print("round", time.perf_counter(), flush=True)


if __name__ == "__main__":
    main()
