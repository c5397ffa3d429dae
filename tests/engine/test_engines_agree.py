"""Where clients run changes no number: workers = vmap = loop = threads = two ranks, for every method."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nestfed import Classify, Examples
from nestfed.algorithms import FedAvg, Scaffold
from nestfed.core import NestfedError
from tests.methods import CASES, FEW, run_some
from tests.support import alive, children, close, ended, forked, images, on_two_ranks, simulate


@pytest.mark.parametrize("name", FEW)
def test_workers(name: str, tmp_path: Path) -> None:
    """With absent clients; the contract compares loop, vmap and two workers for every method without."""
    loop = run_some(name, mode="loop", workers=1)
    close(run_some(name, mode="vmap", workers=2), loop)
    close(run_some(name, mode="loop", workers=3), loop)
    run_some(name, 2, mode="loop", workers=1, directory=tmp_path)
    close(run_some(name, 4, mode="loop", workers=2, directory=tmp_path), loop)


def test_two_ranks(tmp_path: Path) -> None:
    """Every method; and a run resumes on two ranks where one process stopped, and the other way round."""

    def rounds(name: str) -> int:
        return 4 if name in FEW else 2

    def work() -> dict[str, Any]:
        results = {name: run_some(name, rounds(name), mode="loop") for name in CASES}
        for name in FEW:
            run_some(name, 2, mode="loop", directory=tmp_path / f"two-{name}")
        resumed = {name: dict(run_some(name, mode="loop", directory=tmp_path / f"one-{name}").shared) for name in FEW}
        return {n: (dict(r.shared), dict(r.private), r.history, resumed.get(n)) for n, r in results.items()}

    for name in FEW:
        run_some(name, 2, mode="loop", workers=1, directory=tmp_path / f"one-{name}")
    ranks = on_two_ranks(work, tmp_path)
    for name in CASES:
        loop = run_some(name, rounds(name), mode="loop", workers=1)
        for shared, _, history, resumed in (ranks[0][name], ranks[1][name]):
            torch.testing.assert_close(shared, dict(loop.shared), rtol=1e-10, atol=1e-10)
            if name in FEW:
                torch.testing.assert_close(resumed, dict(loop.shared), rtol=1e-10, atol=1e-10)
            assert [r["examples"] for r in history] == [r["examples"] for r in loop.history]
            assert [r["loss"] for r in history] == pytest.approx([r["loss"] for r in loop.history])
        for k, v in loop.private.items():  # each rank holds the private fields of its own clients only
            both = torch.cat([ranks[0][name][1][k], ranks[1][name][1][k]])
            torch.testing.assert_close(both, v, rtol=1e-10, atol=1e-10)
        if name in FEW:
            close(run_some(name, mode="loop", workers=1, directory=tmp_path / f"two-{name}"), loop)
            lines = (tmp_path / f"two-{name}" / "record.jsonl").read_text().splitlines()
            assert len(lines) == 4  # one record, whoever wrote it


@pytest.mark.parametrize("name", ["fcsg-m", "scaffold", "local-scgdm", "fmgda"])
@pytest.mark.long
def test_compiled(name: str) -> None:
    close(run_some(name, 4, mode="vmap", compile=True), run_some(name, 4, mode="loop", workers=1), 1e-9)


# --- convolutions, dropout, many clients ---


def test_convolutions_and_dropout() -> None:
    problem, clients = images()
    options: dict[str, Any] = {"rounds": 3, "q": 2, "progress": False}
    loop = simulate(problem, Scaffold(0.1), clients, mode="loop", workers=1, **options)
    for other in ({"mode": "vmap"}, {"mode": "loop", "workers": 2}, {"mode": "vmap", "workers": 2}):
        close(simulate(problem, Scaffold(0.1), clients, **other, **options), loop)  # type: ignore[arg-type]
    torch.set_num_threads(2)
    try:
        close(simulate(problem, Scaffold(0.1), clients, mode="loop", workers=1, **options), loop)
    finally:
        torch.set_num_threads(1)


def test_more_clients_than_fit_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, clients = images(20)
    options: dict[str, Any] = {"rounds": 2, "q": 2, "progress": False, "participation": 13}
    loop = simulate(problem, Scaffold(0.1), clients, mode="loop", workers=1, **options)
    monkeypatch.setattr("nestfed.engine.local.WIDEST", 4)
    close(simulate(problem, Scaffold(0.1), clients, mode="vmap", **options), loop)


def test_private_fields_on_disk(tmp_path: Path) -> None:
    problem, clients = images()
    options: dict[str, Any] = {"q": 2, "progress": False, "mode": "loop"}
    loop = simulate(problem, Scaffold(0.1), clients, workers=1, rounds=3, **options)
    for workers in (1, 2):
        disk = simulate(problem, Scaffold(0.1), clients, workers=workers, rounds=3, memory_gb=1e-9, **options)
        close(disk, loop)
    simulate(problem, Scaffold(0.1), clients, rounds=2, memory_gb=1e-9, directory=tmp_path, **options)
    close(simulate(problem, Scaffold(0.1), clients, rounds=3, memory_gb=1e-9, directory=tmp_path, **options), loop)
    assert not [p for p in tmp_path.iterdir() if p.suffix not in (".safetensors", ".jsonl", ".json")]


def test_batches_in_pieces() -> None:
    problem, clients = images()
    plain = Classify(nn.Sequential(nn.Flatten(-3), nn.Linear(72, 3)).double())
    options: dict[str, Any] = {"rounds": 3, "q": 2, "progress": False, "workers": 1}
    for mode in ("loop", "vmap"):
        whole = simulate(plain, FedAvg(0.1), clients, mode=mode, **options)  # type: ignore[arg-type]
        close(simulate(plain, FedAvg(0.1), clients, mode=mode, accumulate=4, **options), whole)  # type: ignore[arg-type]
    # Dropout masks belong to a piece, so with them only the cost stays.
    assert simulate(problem, FedAvg(0.1), clients, accumulate=2, **options).history[-1]["examples"] == 3 * 2 * 5 * 6


def test_sixteen_bits_stay_near() -> None:
    _, held = images()
    clients = Examples((held.arrays[0].float(), held.arrays[1]), held.parts, batch=6)
    plain = Classify(nn.Sequential(nn.Flatten(-3), nn.Linear(72, 3)))
    options: dict[str, Any] = {"rounds": 3, "q": 2, "progress": False, "workers": 1}
    full = simulate(plain, FedAvg(0.1), clients, **options)
    rough = simulate(plain, FedAvg(0.1), clients, precision="bf16", **options)
    assert rough.x.dtype == torch.float32
    assert not torch.equal(rough.x, full.x)
    torch.testing.assert_close(rough.x, full.x, rtol=0.05, atol=0.02)


# --- workers and death ---


class Deadly(Examples):
    """Clients of whom one kills its process at iteration 5."""

    def draw(self, ns: Any, ts: range) -> Any:
        if 3 in ns and 5 in ts:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().draw(ns, ts)


class Broken(Examples):
    """Clients of whom one breaks its process at iteration 5."""

    def draw(self, ns: Any, ts: range) -> Any:
        if 3 in ns and 5 in ts:
            raise ValueError("a broken client")
        return super().draw(ns, ts)


def test_a_worker_that_dies_is_noticed_and_named(tmp_path: Path) -> None:
    problem, clients = images()
    options: dict[str, Any] = {"q": 2, "progress": False, "mode": "loop", "workers": 2, "directory": tmp_path}
    began = time.monotonic()
    with pytest.raises(
        NestfedError, match=r"Worker 2 of 2, which ran clients 2…4 in round 3, was killed by SIGKILL"
    ) as e:
        simulate(problem, FedAvg(0.1), Deadly(clients.arrays, clients.parts, batch=6), rounds=5, **options)
    assert time.monotonic() - began < 10
    assert str(tmp_path) in str(e.value)
    assert not active_children()
    # The run resumes from the round before and ends as it would have.
    whole = simulate(problem, FedAvg(0.1), clients, rounds=5, **{**options, "directory": None})
    again = simulate(problem, FedAvg(0.1), clients, rounds=5, **options)
    assert torch.equal(again.x, whole.x)


def test_a_worker_that_fails_reports_why() -> None:
    problem, clients = images()
    broken = Broken(clients.arrays, clients.parts, batch=6)
    with pytest.raises(NestfedError, match=r"The clients' sample failed at client 3 .* ValueError: a broken client"):
        simulate(problem, FedAvg(0.1), broken, rounds=5, q=2, progress=False, mode="loop", workers=2)


class Slowly(Examples):
    """Clients of whom all fail in round 2, the later ones later."""

    def draw(self, ns: Any, ts: range) -> Any:
        if not ts.start:
            return super().draw(ns, ts)
        time.sleep(0.1 * min(ns))
        raise ValueError("a broken client")


def test_workers_that_fail_after_the_first_are_silent(capfd: pytest.CaptureFixture[str]) -> None:
    problem, clients = images()
    slow = Slowly(clients.arrays, clients.parts, batch=6)
    with pytest.raises(NestfedError, match="a broken client"):
        simulate(problem, FedAvg(0.1), slow, rounds=2, q=2, progress=False, mode="loop", workers=2)
    assert "Traceback" not in capfd.readouterr().err


def test_a_bad_number_in_a_worker_is_named() -> None:
    problem, clients = images()
    x = clients.arrays[0].clone()
    x[70] = float("nan")
    with pytest.raises(NestfedError, match="client 3, iteration"):
        simulate(
            problem, FedAvg(0.1), Examples((x, clients.arrays[1]), clients.parts, batch=19), rounds=5, q=2,
            progress=False, mode="loop", workers=2,
        )  # fmt: skip


class Slow(Examples):
    def draw(self, ns: Any, ts: range) -> Any:
        time.sleep(0.2)
        return super().draw(ns, ts)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
@pytest.mark.long
def test_no_orphans(how: signal.Signals, tmp_path: Path) -> None:
    problem, clients = images()
    slow = Slow(clients.arrays, clients.parts, batch=6)
    options: dict[str, Any] = {"q": 1, "progress": False, "mode": "loop", "workers": 2, "directory": tmp_path / "run"}
    log = tmp_path / "log"
    parent = forked(lambda: simulate(problem, FedAvg(0.1), slow, rounds=10_000, **options), log)
    deadline = time.monotonic() + 30
    record = tmp_path / "run" / "record.jsonl"
    while not (record.exists() and record.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)  # before the first round Ctrl-C is Python's own
    workers = children(parent)
    assert len(workers) == 2
    if how == signal.SIGINT:
        os.killpg(parent, how)  # as a terminal does it
    else:
        os.kill(parent, how)
    assert ended(parent) == (2 if how == signal.SIGINT else -how)
    if how == signal.SIGINT:
        assert "Stopped after round" in log.read_text()
        assert list((tmp_path / "run").glob("round-*.safetensors"))
    deadline = time.monotonic() + 5
    while any(alive(w) for w in workers) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(alive(w) for w in workers)
