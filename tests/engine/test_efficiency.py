"""What a round costs, in counts that do not depend on the clock: a slip in efficiency is noticed here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from nestfed.algorithms import METHODS, FedAvg, Scaffold
from nestfed.data.clients import Examples
from nestfed.data.random import Streams
from nestfed.engine.encode import Encoding
from nestfed.engine.local import Local
from nestfed.engine.options import Exchange
from nestfed.engine.program import Span
from nestfed.engine.round import Order, RunState
from nestfed.engine.store import Tables, private_fields
from nestfed.engine.workers import Workers
from tests.methods import CASES, Q, method, setting
from tests.support import images, simulate


def local(problem: Any, algorithm: Any, clients: Any, seed: int = 0, vectorised: bool = False) -> tuple[Local, Any]:
    """Return clients in this process, and what they share before the first round."""
    template = algorithm.init(problem, problem.x0)
    fields = private_fields(algorithm, template, Encoding())
    store = Tables.start(fields, range(len(clients)), limit=0, folder=None, shared=False)
    made = Local(problem, algorithm, clients.seeded(seed), store, seed, Exchange(), vectorised=vectorised)
    return made, RunState.start(algorithm, template, len(clients)).shared


def order(count: int, span: Span, round: int = 0) -> Order:
    """Return an order for the first clients, who all took part in the round before."""
    return Order(round, span, range(count), [round] * count)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("vectorised", [False, True], ids=["loop", "vmap"])
def test_evaluations_per_step(name: str, vectorised: bool) -> None:
    """No method evaluates a batch more often than its box says."""
    s, algorithm = setting(name), method(name)
    here, shared = local(s.problem, algorithm, s.clients, 1, vectorised)
    N, steps = len(s.clients), 3
    for start in (0, 7):
        tables = RunState.start(algorithm, algorithm.init(s.problem, s.problem.x0), N).tables
        reply = here.run(replace(order(N, Span(start, start + steps)), tables=tables), shared)
        # A method that restarts its estimate has no previous point to correct it by.
        points = sum(1 if algorithm.restarts(t, steps) else algorithm.evaluations for t in range(start, start + steps))
        # The toy with tasks notes its inner value only.
        expected = points * (2 if CASES[name].setting == "compositional" else 1)
        assert reply.evaluations == N * expected


class Calls(TorchDispatchMode):
    """Counts torch's operations, and the bytes that copies move."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.copied = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operations += 1
        if func._schema.name in ("aten::clone", "aten::copy_", "aten::_to_copy", "aten::cat", "aten::stack"):
            self.copied += result.numel() * result.element_size()
        return result


@pytest.mark.parametrize(("algorithm", "fields"), [(FedAvg(0.1), 0), (Scaffold(0.1), 1)], ids=["fedavg", "scaffold"])
def test_bytes_copied_in_a_round(algorithm: Any, fields: int) -> None:
    """A client's round copies its gradients together and its private fields back, and nothing else of size d."""
    problem, clients = images()
    here, shared = local(problem, algorithm, clients)
    q = 4
    here.run(order(3, Span(0, q)), shared)
    with Calls() as calls:
        here.run(order(3, Span(0, q)), shared)
    vector = problem.x0.numel() * 8
    batches = 3 * q * 6 * 2 * 36 * 8
    activations = 3 * q * 6 * 4 * 16 * 8
    # gradients gathered: q; private written: one a field; batches relaid: at most twice; masks and layouts: some
    assert calls.copied <= 3 * (q + fields) * vector + 2 * batches + 8 * activations


def test_operations_do_not_grow_with_clients_when_vectorised() -> None:
    counts = []
    for clients in (4, 20):
        problem, held = images(clients)
        here, shared = local(problem, Scaffold(0.1), held, vectorised=True)
        with Calls() as calls:
            here.run(order(clients, Span(0, 3)), shared)
        counts.append(calls.operations)
    assert counts[0] == counts[1]


def test_a_round_is_drawn_at_once() -> None:
    """One gather for all iterations of a client (loop), or of all clients (vmap)."""
    problem, clients = images()
    calls: list[tuple[int, int]] = []

    class Counted(Examples):
        def draw(self, ns: Any, ts: range) -> Any:
            calls.append((len(ns), len(ts)))
            return super().draw(ns, ts)

    clients = Counted(clients.arrays, clients.parts, batch=clients.batch)
    options: dict[str, Any] = {"rounds": 2, "q": 7, "progress": False, "workers": 1}
    simulate(problem, FedAvg(0.1), clients, mode="loop", **options)
    before = [(1, 1)]  # the first batch of a client is inspected before round 1
    assert calls == before + [(1, 7)] * 10
    calls.clear()
    simulate(problem, FedAvg(0.1), clients, mode="vmap", **options)
    assert calls == before + [(5, 7)] * 2


def test_one_round_trip_per_worker_and_round() -> None:
    problem, clients = images()
    here, shared = local(problem, FedAvg(0.1), clients)
    workers = Workers(here, shared, 2, 5)
    sent: list[int] = []
    for i, pipe in enumerate(workers._pipes):
        workers._pipes[i] = Weighing(pipe, sent)  # type: ignore[call-overload]
    try:
        for r in range(3):
            reply = workers.run(order(5, Span(0, 2), r), shared)
    finally:
        workers.close()
    assert workers.trips == 6
    assert reply.evaluations == 10
    # No vector goes through a pipe, whatever the model's size.
    assert max(sent) < 400 < Encoding().sizes(shared)[0]


class Weighing:
    """A pipe that notes how much passes through it."""

    def __init__(self, pipe: Any, sent: list[int]) -> None:
        self._pipe, self._sent = pipe, sent

    def send(self, value: Any) -> None:
        from multiprocessing.reduction import ForkingPickler

        self._sent.append(len(ForkingPickler.dumps(value)))
        self._pipe.send(value)

    def recv(self) -> Any:
        from multiprocessing.reduction import ForkingPickler

        value = self._pipe.recv()
        self._sent.append(len(ForkingPickler.dumps(value)))
        return value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipe, name)


def test_a_generator_is_moved_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    streams = Streams(3)
    streams.at(0, 1, 0)  # type: ignore[arg-type]  # makes the generator, once
    made: list[int] = []
    monkeypatch.setattr(np.random, "Philox", lambda *a: made.append(1))
    for t in range(100):
        streams.at(0, 1, t)  # type: ignore[arg-type]
    assert not made


def test_costs_are_counted_alike_everywhere() -> None:
    for name in ("fedavg", "fmgda", "local-scgdm"):
        s = setting(name)
        options: dict[str, Any] = {"rounds": 2, "q": Q, "progress": False}
        found = [
            simulate(s.problem, method(name), s.clients, **options, **how).history[-1]["examples"]  # type: ignore[arg-type]
            for how in ({"mode": "loop", "workers": 1}, {"mode": "loop", "workers": 2}, {"mode": "vmap"})
        ]
        assert len(set(found)) == 1
        assert METHODS[name].name == name
