"""What a round costs, in counts that do not depend on the clock: a slip in efficiency is noticed here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import simulate
from test_contract import CASES, Q, method, setting
from test_engines_agree import images
from torch.utils._python_dispatch import TorchDispatchMode

from nestfed.algorithms import METHODS, FedAvg, Scaffold
from nestfed.data.clients import Examples
from nestfed.data.random import Streams
from nestfed.engine.local import Local, Share
from nestfed.engine.program import Span
from nestfed.engine.round import RunState, size
from nestfed.engine.workers import Workers


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("vectorised", [False, True], ids=["loop", "vmap"])
def test_evaluations_per_step(name: str, vectorised: bool) -> None:
    """No method evaluates a batch more often than its box says."""
    s, algorithm = setting(name), method(name)
    template = algorithm.init(s.problem, s.problem.x0)
    state = RunState.start(algorithm, template, len(s.clients))
    clients = s.clients.seeded(1)
    local = Local(s.problem, algorithm, clients, template, 1, torch.device("cpu"), vectorised)
    N, steps = len(clients), 3
    for start in (0, 7):
        share = Share(range(N), Span(start, start + steps), 0, -1, [False] * N)
        with torch.no_grad():
            tally = local.run(state.shared, state.private, share)
        # Where a method starts its estimate anew, there is no point before to correct it by.
        points = sum(1 if algorithm.restarts(t) else algorithm.evaluations for t in range(start, start + steps))
        # The toy with tasks notes its inner value only.
        expected = points * (2 if CASES[name].setting == "compositional" else 1)
        assert tally.evaluations == N * expected


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
    clients = clients.seeded(0)
    template = algorithm.init(problem, problem.x0)
    state = RunState.start(algorithm, template, len(clients))
    local = Local(problem, algorithm, clients, template, 0, torch.device("cpu"))
    q = 4
    share = Share([0, 1, 2], Span(0, q), 0, -1, [False] * 3)
    with torch.no_grad():
        local.run(state.shared, state.private, share)
        with Calls() as calls:
            local.run(state.shared, state.private, share)
    vector = problem.x0.numel() * 8
    batches = 3 * q * 6 * 2 * 36 * 8
    activations = 3 * q * 6 * 4 * 16 * 8
    # gradients gathered: q; private written: one a field; batches relaid: at most twice; masks and layouts: some
    assert calls.copied <= 3 * (q + fields) * vector + 2 * batches + 8 * activations


def test_operations_do_not_grow_with_clients_when_vectorised() -> None:
    counts = []
    for clients in (4, 20):
        problem, held = images(clients)
        algorithm = Scaffold(0.1)
        template = algorithm.init(problem, problem.x0)
        state = RunState.start(algorithm, template, clients)
        local = Local(problem, algorithm, held.seeded(0), template, 0, torch.device("cpu"), True)
        share = Share(range(clients), Span(0, 3), 0, -1, [False] * clients)
        with torch.no_grad(), Calls() as calls:
            local.run(state.shared, state.private, share)
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
    assert calls == [(1, 7)] * 10
    calls.clear()
    simulate(problem, FedAvg(0.1), clients, mode="vmap", **options)
    assert calls == [(5, 7)] * 2


def test_one_round_trip_per_worker_and_round() -> None:
    problem, clients = images()
    clients = clients.seeded(0)
    algorithm = FedAvg(0.1)
    template = algorithm.init(problem, problem.x0)
    state = RunState.start(algorithm, template, len(clients))
    workers = Workers(Local(problem, algorithm, clients, template, 0, torch.device("cpu")), state.shared, {}, 2, 5)
    sent: list[int] = []
    for i, pipe in enumerate(workers._pipes):
        workers._pipes[i] = Weighing(pipe, sent)  # type: ignore[call-overload]
    try:
        for r in range(3):
            tally = workers.run(state.shared, {}, Share(range(5), Span(0, 2), r, -1, [False] * 5))
    finally:
        workers.close()
    assert workers.trips == 6
    assert tally.evaluations == 10
    # No vector goes through a pipe, whatever the model's size.
    assert max(sent) < 400 < size(state.shared)


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
