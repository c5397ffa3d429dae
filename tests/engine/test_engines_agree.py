"""Where clients run changes no number: workers = vmap = loop = threads = two ranks, for every method."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import simulate
from test_contract import CASES, Q, method, setting
from torch import nn

from nestfed import Classify, Examples
from nestfed.algorithms import METHODS, FedAvg, Scaffold
from nestfed.core import NestfedError

EVERY = pytest.mark.parametrize("name", CASES)
HERE = Path(__file__).parents[1]
PATHS = [str(p) for p in (HERE, HERE.parent, *sorted(HERE.iterdir())) if p.is_dir()]


def run(name: str, rounds: int = 4, **options: Any) -> Any:
    """Four of five clients a round, so that some sit out."""
    s = setting(name)
    options = {"q": Q, "seed": 5, "progress": False, "participation": None if METHODS[name].single else 4, **options}
    return simulate(s.problem, method(name), s.clients, rounds=rounds, **options)


def close(one: Any, other: Any, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(dict(one.shared), dict(other.shared), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(dict(one.private), dict(other.private), rtol=tolerance, atol=tolerance)
    assert len(one.history) == len(other.history)
    for a, b in zip(one.history, other.history):
        for column in ("round", "iteration", "participants", "examples", "bytes_up", "bytes_down"):
            assert a[column] == b[column]
        assert (a["loss"] is None) == (b["loss"] is None)
        for column in ("loss", "drift"):
            assert a[column] is None or a[column] == pytest.approx(b[column], rel=1e-6, abs=1e-12)


@EVERY
def test_workers(name: str) -> None:
    loop = run(name, mode="loop", workers=1)
    close(run(name, mode="loop", workers=3), loop)
    close(run(name, mode="vmap", workers=2), loop)


@EVERY
def test_workers_go_on_where_one_process_stopped(name: str, tmp_path: Path) -> None:
    run(name, 2, mode="loop", workers=1, directory=tmp_path)
    close(run(name, 4, mode="loop", workers=2, directory=tmp_path), run(name, 4, mode="loop", workers=1))


def on_two_ranks(program: list[str]) -> None:
    """Run Python on two ranks, which find their number in RANK and each other on a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join([*PATHS, os.environ.get("PYTHONPATH", "")])
    told = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": path}
    ranks = [
        subprocess.Popen([sys.executable, *program], env={**os.environ, **told, "OMP_NUM_THREADS": "1", "RANK": str(r)})
        for r in range(2)
    ]
    assert [p.wait(300) for p in ranks] == [0, 0]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run every method on two ranks, once."""
    folder = tmp_path_factory.mktemp("ranks")
    for name in CASES:
        run(name, 2, mode="loop", workers=1, directory=folder / f"one-{name}")
    on_two_ranks([str(HERE / "ranks.py"), str(folder)])
    return folder


def test_two_ranks(two_ranks: Path) -> None:
    ranks = [torch.load(two_ranks / f"rank-{r}.pt", weights_only=False) for r in range(2)]
    for name in CASES:
        loop = run(name, mode="loop", workers=1)
        for shared, _, history, resumed in (ranks[0][name], ranks[1][name]):
            torch.testing.assert_close(shared, dict(loop.shared), rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(resumed, dict(loop.shared), rtol=1e-10, atol=1e-10)
            assert [r["examples"] for r in history] == [r["examples"] for r in loop.history]
            assert [r["loss"] for r in history] == pytest.approx([r["loss"] for r in loop.history])
        for k, v in loop.private.items():  # each rank holds the private fields of its own clients only
            both = torch.cat([ranks[0][name][1][k], ranks[1][name][1][k]])
            torch.testing.assert_close(both, v, rtol=1e-10, atol=1e-10)


def test_one_process_goes_on_where_two_ranks_stopped(two_ranks: Path) -> None:
    for name in CASES:
        loop = run(name, mode="loop", workers=1)
        close(run(name, mode="loop", workers=1, directory=two_ranks / f"two-{name}"), loop)
        lines = (two_ranks / f"two-{name}" / "record.jsonl").read_text().splitlines()
        assert len(lines) == 4  # one record, whoever wrote it


@pytest.mark.parametrize("name", ["fcsg-m", "scaffold", "local-scgdm", "fmgda"])
@pytest.mark.slow
def test_compiled(name: str) -> None:
    close(run(name, 4, mode="vmap", compile=True), run(name, 4, mode="loop", workers=1), 1e-9)


# --- convolutions, dropout, many clients ---


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(4 * 16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(torch.tanh(self.conv(x))).flatten(-3))


def images(clients: int = 5) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.normal(size=(100, 2, 6, 6)))
    y = torch.from_numpy(rng.integers(3, size=100))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Net().double()
    return Classify(model), Examples((x, y), np.array_split(np.arange(100), clients), batch=6)


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
    assert not [p for p in tmp_path.iterdir() if p.suffix not in (".safetensors", ".jsonl")]


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


def children(pid: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(p) for p in found.stdout.split()]


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
    # The run goes on from the round before, to the end that it would have had.
    whole = simulate(problem, FedAvg(0.1), clients, rounds=5, **{**options, "directory": None})
    again = simulate(problem, FedAvg(0.1), clients, rounds=5, **options)
    assert torch.equal(again.x, whole.x)


def test_a_worker_that_breaks_tells_why() -> None:
    problem, clients = images()
    broken = Broken(clients.arrays, clients.parts, batch=6)
    with pytest.raises(RuntimeError, match="a broken client"):
        simulate(problem, FedAvg(0.1), broken, rounds=5, q=2, progress=False, mode="loop", workers=2)


def test_a_bad_number_in_a_worker_is_named() -> None:
    problem, clients = images()
    x = clients.arrays[0].clone()
    x[70] = float("nan")
    with pytest.raises(NestfedError, match="client 3, iteration"):
        simulate(
            problem, FedAvg(0.1), Examples((x, clients.arrays[1]), clients.parts, batch=19), rounds=5, q=2,
            progress=False, mode="loop", workers=2,
        )  # fmt: skip


SLEEPY = """
import sys, time
import torch
torch.set_num_threads(1)
sys.path[:0] = {path!r}
from test_engines_agree import images
from support import simulate
from nestfed import Examples
from nestfed.algorithms import FedAvg

class Slow(Examples):
    def draw(self, ns, ts):
        time.sleep(0.2)
        return super().draw(ns, ts)

problem, clients = images()
print("ready", flush=True)
simulate(problem, FedAvg(0.1), Slow(clients.arrays, clients.parts, batch=6), rounds=10_000, q=1, progress=False,
         mode="loop", workers=2, directory={folder!r})
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_no_orphans(how: signal.Signals, tmp_path: Path) -> None:
    code = SLEEPY.format(path=PATHS, folder=str(tmp_path))
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    deadline = time.monotonic() + 30
    while len(workers := children(parent.pid)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(workers) == 2
    if how == signal.SIGINT:
        os.killpg(parent.pid, how)  # as a terminal does it
    else:
        parent.send_signal(how)
    _, errors = parent.communicate(timeout=30)
    if how == signal.SIGINT:
        assert "Stopped after round" in errors
        assert list(tmp_path.glob("round-*.safetensors"))
    deadline = time.monotonic() + 5
    while any(alive(w) for w in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(w) for w in workers)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except OSError:
        return False
