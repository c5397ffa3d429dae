"""What tests of several rooms need: runs with flat options, comparisons, a small network, other processes."""

from __future__ import annotations

import dataclasses
import os
import runpy
import signal
import socket
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import distributed, nn

import nestfed.engine.simulate as engine
from nestfed.core import NestfedError
from nestfed.data.clients import Examples
from nestfed.data.random import Purpose, Streams
from nestfed.engine.options import Evaluation, Exchange, Execution, Gaussian
from nestfed.problems.classify import Classify

HOMES = {"evaluation": Evaluation, "exchange": Exchange, "execution": Execution}


def grouped(options: dict[str, Any]) -> dict[str, Any]:
    """Return options with those of `Evaluation`, `Exchange` and `Execution` put together.

    `participation` is a count or a share, as the tests' cases have it; `clip` and `noise` are those of `Gaussian`.
    """
    rest = dict(options)
    part = rest.pop("participation", None)
    if part is not None:
        rest["count" if isinstance(part, int) else "share"] = part
    if "noise" in rest:
        rest["privacy"] = Gaussian(rest.pop("clip"), rest.pop("noise"))
    for name, kind in HOMES.items():
        own = {f.name: rest.pop(f.name) for f in dataclasses.fields(kind) if f.name in rest}
        if own:
            rest[name] = dataclasses.replace(rest.get(name, kind()), **own)
    return rest


def simulate(problem: Any, method: Any, clients: Any, **options: Any) -> engine.Result:
    """Run `nestfed.simulate`."""
    return engine.simulate(problem, method, clients, **grouped(options))


def answering(exchange: Exchange, seed: int, clients: int, round: int) -> list[int]:
    """Return the clients that are asked in a round and answer, by the rule itself."""
    luck = Streams(seed).at(Purpose.FAILURE, 0, round).random(clients)
    return [n for n in exchange.draw(Streams(seed), clients, round) if luck[n] >= exchange.failures]


# --- comparisons ---


def identical(left: Any, right: Any) -> None:
    """Compare to the last bit; the order of names does not matter."""
    if isinstance(left, dict):
        assert set(left) == set(right)
        right = {k: right[k] for k in left}
    for a, b in zip(torch.utils._pytree.tree_leaves(left), torch.utils._pytree.tree_leaves(right), strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def close(one: Any, other: Any, tolerance: float = 1e-10) -> None:
    """Compare two results: fields and losses within the tolerance, costs exactly."""
    torch.testing.assert_close(dict(one.shared), dict(other.shared), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(dict(one.private), dict(other.private), rtol=tolerance, atol=tolerance)
    assert len(one.history) == len(other.history)
    for a, b in zip(one.history, other.history):
        for column in ("round", "iteration", "participants", "examples", "bytes_up", "bytes_down"):
            assert a[column] == b[column]
        assert (a["loss"] is None) == (b["loss"] is None)
        for column in ("loss", "drift"):
            assert a[column] is None or a[column] == pytest.approx(b[column], rel=1e-6, abs=1e-12)


# --- convolutions and dropout ---


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(4 * 16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(torch.tanh(self.conv(x))).flatten(-3))


def images(clients: int = 5) -> tuple[Any, Any]:
    """Return a convolution with dropout in float64, and clients with random images."""
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.normal(size=(100, 2, 6, 6)))
    y = torch.from_numpy(rng.integers(3, size=100))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Net().double()
    return Classify(model), Examples((x, y), np.array_split(np.arange(100), clients), batch=6)


def bad_images(n: int = 3, value: float = float("nan")) -> tuple[Any, Any, Any]:
    """Return a problem and two sets of clients: good ones, and ones with a bad value at client n."""
    problem, clients = images()
    good = Examples(clients.arrays, clients.parts, batch=20)  # all that a client holds
    x = clients.arrays[0].clone()
    x[int(clients.parts[n][0])] = value
    return problem, good, dataclasses.replace(good, arrays=(x, clients.arrays[1]))


# --- processes ---


def forked(work: Callable[[], Any], log: Path) -> int:
    """Start a process that does something, and return its number.

    It ends with 0, with 2 after a NestfedError, with 1 after a crash, and writes what it prints to `log`. A fork has
    imported everything already, which takes a new Python seconds. Its own process group gets signals as from a terminal.
    """
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        forkserver._forkserver._forkserver_pid = None  # it is the parent's
        os.setpgid(0, 0)
        for name, what in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
            signal.signal(name, what)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        torch.set_num_threads(1)
        warnings.simplefilter("default")  # a run that starts again warns, which is not a failure
        work()
        code = 0
    except NestfedError as error:
        os.write(2, f"{error}\n".encode())
        code = 2
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def ended(pid: int) -> int:
    """Wait for the end of a process; return its exit code, or minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Said(NamedTuple):
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str


def in_new_process(work: Callable[[], Any], cwd: Path, path: Path | None = None) -> Said:
    """Do something as a new process would that has not imported nestfed and finds other packages in `path`.

    It is a fork that forgets the modules of nestfed; the large libraries it keeps.
    """

    def start() -> None:
        for name in [m for m in sys.modules if m.partition(".")[0] in ("nestfed", "nestfed_papers")]:
            del sys.modules[name]
        os.chdir(cwd)
        os.environ["COLUMNS"] = "200"
        sys.path[:0] = [str(path)] if path else []
        sys.stderr = (cwd / ".err").open("w")
        work()

    code = ended(forked(start, cwd / ".out"))
    return Said(code, (cwd / ".out").read_text(), (cwd / ".err").read_text())


def nestfed_command(*words: str, cwd: Path, path: Path | None = None) -> Said:
    """Run `python -m nestfed` as if in a new process."""

    def work() -> None:
        sys.argv = ["nestfed", *words]
        runpy.run_module("nestfed", run_name="__main__", alter_sys=True)

    return in_new_process(work, cwd, path)


def on_two_ranks(work: Callable[[], Any], folder: Path) -> list[Any]:
    """Run `work` on two ranks of torch.distributed; return what it returned on each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def rank(r: int) -> None:
        os.environ |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(r)}
        torch.save(work(), folder / f"rank-{r}.pt")
        distributed.destroy_process_group()

    ranks = [forked(lambda r=r: rank(r), folder / f"rank-{r}.log") for r in range(2)]  # type: ignore[misc]
    codes = [ended(pid) for pid in ranks]
    assert codes == [0, 0], [(folder / f"rank-{r}.log").read_text() for r in range(2)]
    return [torch.load(folder / f"rank-{r}.pt", weights_only=False) for r in range(2)]


def children(pid: int) -> list[int]:
    """Return the processes that a process started."""
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(p) for p in found.stdout.split()]


def alive(pid: int) -> bool:
    """Return whether a process runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except OSError:
        return False


HOLD = """
import sys
from pathlib import Path
from nestfed.files import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def holder(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a process that locks a directory."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
