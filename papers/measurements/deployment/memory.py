"""The coordinator's memory by the number of sites: 40 MB of parameters, and sites that answer all at once, or last first.

    python papers/measurements/deployment/memory.py     # a process for each number of sites and each order of answers

The sites' answers are made when the coordinator pulls them, so the peak is the coordinator's own. Everything that it does to
an answer (reading, checking, decoding, folding) is the library's.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from nestfed import Classify, FedAvg, Pairs
from nestfed.deploy.flower import Custom, server_app
from nestfed.deploy.flower.mailbox import block_of, content_of
from nestfed.deploy.wire import pack
from nestfed.experiment.build import Assembly
from nestfed.experiment.spec import RunSpec

WIDTH = 10_000_000
ROUNDS = 2


class Answering(Grid):
    """Sites that return the broadcast; each answer is made when it is pulled."""

    def __init__(self, sites: int, last_first: bool) -> None:
        self.sites, self.last_first = sites, last_first
        self.open: dict[str, tuple[Any, ...]] = {}
        self.pushed = 0

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any: ...

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return range(1, self.sites + 1)

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=node, last_activated_at="now") for node in self.get_node_ids()]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        names = []
        for message in messages:
            packed = block_of(message)
            self.pushed += 1
            names.append(f"message-{self.pushed}")
            shape = packed.header["shared.x"][1] if "shared.x" in packed.header else None
            kind, node = message.metadata.message_type, message.metadata.dst_node_id
            self.open[names[-1]] = (kind, node, dict(packed.words), message.metadata.group_id, shape)
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        found = []
        wanted = [i for i in message_ids if i in self.open]
        for name in wanted:
            kind, node, asked, group, shape = self.open[name]
            if self.last_first and any(k == kind and n > node for k, n, *_ in self.open.values()):
                continue
            del self.open[name]
            words = {k: asked[k] for k in ("protocol", "version", "digest")} | {"client": node - 1}
            arrays = {}
            if kind == "query.hello":
                rows = {"training": 100, "validation": 0, "test": 0}
                words |= {"group": None, "site": f"site-{node}", "rows": rows, "torch": torch.__version__}
            else:
                words |= {"group": group, "report": {"moved": 1.0, "examples": 10, "loss": 0.5}}
                arrays = {"fields.x": np.zeros(shape, np.float32)}
            found.append(Message(content_of(pack(words, arrays)), dst_node_id=1, message_type=kind))
        return found


def study(sites: int) -> Custom:
    def make() -> Assembly:
        x, y = torch.zeros(2, 1), torch.tensor([0, 1])
        problem = Classify(Wide())
        clients = Pairs.of({str(n): (x, y) for n in range(sites)}, outer=1, inner=2)
        return Assembly(problem, FedAvg(eta=0.1), clients, lambda model: {}, "")

    return Custom("wide", make, RunSpec(rounds=ROUNDS, q=1))


class Wide(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, 0] * self.weight.sum()


def measure(sites: int, last_first: bool) -> None:
    for name in ("_run_id", "_node_id", "_task_id"):
        setattr(TaskIdentity, name, 1)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        settings = {"sites": sites, "out": str(Path(folder) / "run"), "deadline": 600.0}
        server_app(study(sites))(Answering(sites, last_first), Context(1, 1, {}, RecordDict(), settings))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    sys.stdout.write(
        json.dumps({"sites": sites, "order": "last first" if last_first else "at once", "peak MB": round(peak)}) + "\n"
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(int(sys.argv[1]), sys.argv[2] == "last")
    else:
        for order in ("once", "last"):
            for some in (4, 12, 40):
                subprocess.run([sys.executable, __file__, str(some), order], check=True)
