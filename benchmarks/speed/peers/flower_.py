"""Flower's simulator: FedAvg, one processor and one thread for each of its workers."""

from __future__ import annotations

import os
import time

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from net import FashionNet, data, given, parts
from torch.nn import functional as F

FOLDER, CLIENTS, PART, ROUNDS = given()
client, server = ClientApp(), ServerApp()


@client.train()
def train(msg, context):
    torch.set_num_threads(1)
    n = int(context.node_config["partition-id"])
    x, y = data(FOLDER)
    own = parts(FOLDER, CLIENTS)[n]
    model = FashionNet()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    generator = torch.Generator().manual_seed(n)
    for _ in range(10):
        rows = own[torch.randint(len(own), (50,), generator=generator).numpy()]
        optimizer.zero_grad()
        F.cross_entropy(model(torch.from_numpy(x[rows])), torch.from_numpy(y[rows])).backward()
        optimizer.step()
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(own)})}
    return Message(content=RecordDict(content), reply_to=msg)


@server.main()
def main(grid, context):
    strategy = FedAvg(
        fraction_train=PART / CLIENTS,
        fraction_evaluate=0.0,
        min_train_nodes=1,
        min_evaluate_nodes=0,
        min_available_nodes=CLIENTS,
    )

    def report(number, arrays):
        print("round", time.perf_counter(), flush=True)
        return MetricRecord({"x": 0.0})

    strategy.start(grid, ArrayRecord(FashionNet().state_dict()), num_rounds=ROUNDS, evaluate_fn=report)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    run_simulation(
        server, client, CLIENTS,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": os.cpu_count()}},
    )  # fmt: skip
