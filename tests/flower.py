"""A deployment in memory: Flower's messages between a coordinator and sites, without a network."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, no_object_id_recompute
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity
from safetensors.torch import load_file

from nestfed.deploy import pace
from nestfed.deploy.flower import Custom, client_app, roster, server_app
from nestfed.deploy.flower import federation as rounds_of
from nestfed.deploy.flower.mailbox import block_of, content_of
from nestfed.deploy.wire import Packed, pack
from nestfed.experiment.build import Assembly
from nestfed.experiment.spec import RunSpec
from tests.methods import Q, method, setting
from tests.support import HOMES, grouped, simulate
from tests.toys import SEED

Tamper = Callable[[int, int, Message], "Message | None"]
"""(client, round, reply) → the reply that the coordinator gets; None if it never arrives."""


class LocalGrid(Grid):
    """Carries messages to apps in this process, every one through Flower's own serialisation."""

    def __init__(self, apps: dict[int, Any], configs: dict[int, dict[str, Any]], tamper: Tamper | None = None) -> None:
        self.apps, self.configs, self.tamper = apps, configs, tamper
        self.replies: dict[str, Message] = {}
        self.messages: list[tuple[int, Message, Message | None]] = []
        self.away: set[int] = set()
        self.spoil: Callable[[str, int, Message], Message] = lambda kind, client, reply: reply
        """(kind, client, reply) → the reply that the coordinator gets."""

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any: ...

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return [node for node in self.apps if node not in self.away]

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=node, last_activated_at="now") for node in self.get_node_ids()]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        names = []
        for message in messages:
            node = message.metadata.dst_node_id
            copy = travelled(message)
            copy.metadata.__dict__["_message_id"] = f"message-{len(self.messages)}"
            names.append(copy.metadata.message_id)
            context = Context(1, node, self.configs[node], RecordDict(), {})
            reply: Message | None = travelled(self.apps[node](copy, context))
            if self.tamper is not None and reply is not None and message.metadata.message_type == "train":
                reply = self.tamper(self.configs[node]["client"], int(copy.metadata.group_id), reply)
            if reply is not None:
                reply = self.spoil(message.metadata.message_type, self.configs[node]["client"], reply)
            self.messages.append((node, copy, reply))
            if reply is not None:
                self.replies[names[-1]] = reply
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self.replies.pop(i) for i in message_ids if i in self.replies]


def travelled(message: Message) -> Message:
    """Return a message as it arrives."""
    with no_object_id_recompute():  # as Flower does
        parts = {i: part.deflate() for i, part in get_all_nested_objects(message).items()}
        copy = inflate_object_from_contents(message.object_id, parts)
    copy.metadata.__dict__["_message_id"] = message.metadata.message_id
    return copy


class Clock:
    """Time that passes only while somebody sleeps, so that deadlines mean the same on a busy machine."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    perf_counter = monotonic

    def time(self) -> float:
        return time.time()

    def strftime(self, form: str) -> str:
        return "2026-01-01 00:00:00"


def alone(patch: pytest.MonkeyPatch) -> None:
    """Give the coordinator a clock of its own, and tell Flower what its processes know of themselves."""
    clock = Clock()
    for module in (roster, rounds_of, pace):
        patch.setattr(module, "time", clock)
    for name in ("_run_id", "_node_id", "_task_id"):
        patch.setattr(TaskIdentity, name, 1)


def federation(study: Any, folder: Path, sites: int, tamper: Tamper | None = None) -> LocalGrid:
    app = client_app(study)
    configs = {
        100 + n: {"client": n, "site": f"clinic-{n}", "state": str(folder / f"state-{n}"), "min-cell": 0}
        for n in range(sites)
    }
    return LocalGrid(dict.fromkeys(configs, app), configs, tamper)


def opened(message: Message | None) -> Packed:
    assert message is not None
    return block_of(message)


def arrays_of(message: Message | None, prefix: str = "") -> dict[str, np.ndarray]:
    """The arrays of a message whose names begin with the prefix."""
    return {k.removeprefix(prefix): v for k, v in opened(message).arrays().items() if k.startswith(prefix)}


def rewritten(reply: Message, words: dict[str, Any] | None = None, arrays: dict[str, Any] | None = None) -> Message:
    """The message with other words and arrays; None removes one."""
    packed = opened(reply)
    said, sent = {**packed.words, **(words or {})}, {**packed.arrays(), **(arrays or {})}
    block = pack({k: v for k, v in said.items() if v is not None}, {k: v for k, v in sent.items() if v is not None})
    return sealed(reply, block)


def sealed(reply: Message, block: bytes) -> Message:
    """The message with other bytes."""
    reply.content = content_of(block)
    return reply


def deploy(study: Any, folder: Path, sites: int, tamper: Tamper | None = None, **config: Any) -> LocalGrid:
    grid = federation(study, folder, sites, tamper)
    coordinate(study, folder, grid, sites=sites, **config)
    return grid


def coordinate(study: Any, folder: Path, grid: LocalGrid, **config: Any) -> None:
    settings = {"out": str(folder / "run"), "deadline": 5.0, **{k.replace("_", "-"): v for k, v in config.items()}}
    server_app(study)(grid, Context(1, 1, {}, RecordDict(), settings))


def checkpointed(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(max((folder / "run").glob("round-*.safetensors")))


def toy(name: str, rounds: int = 4, **run: Any) -> Custom:
    s, algorithm = setting(name), method(name)
    options = grouped({"participation": run.pop("participation", None) or None, **run})
    tables = {k: options.pop(k) for k in HOMES if k in options}
    spec = RunSpec(rounds=rounds, q=Q, seed=SEED, **options)
    return Custom(name, lambda: Assembly(s.problem, algorithm, s.clients, lambda model: {}, ""), spec, **tables)


def simulated(name: str, rounds: int = 4, **options: Any) -> Any:
    s = setting(name)
    return simulate(
        s.problem, method(name), s.clients, rounds=rounds, q=Q, seed=SEED, mode="loop", progress=False, **options
    )
