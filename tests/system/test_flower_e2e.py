"""Deployment as institutions see it: SuperLink and SuperNodes as processes on loopback, with TLS and authentication.

All tests share one federation. Rounds are few and problems tiny, because a round costs seconds of Flower's own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="deployment is an extra: pip install 'nestfed[flower]'")

from safetensors.torch import load_file

from nestfed.deploy.app import write_app
from nestfed.deploy.certificates import write_key
from nestfed.deploy.local import LOOPBACK, SUPERNODE, Local, free_port
from nestfed.deploy.processes import Processes, marked
from nestfed.engine.record import read as read_record
from nestfed.experiment.run import run as simulated
from nestfed.experiment.spec import Experiment, from_tables

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        " " in sys.prefix, reason="Flower's SuperLink needs a Python environment without a space in its path"
    ),
]
SITES = 3
PATIENCE = 600.0


def experiment(problem: str, algorithm: dict[str, Any], rounds: int, q: int = 4) -> Experiment:
    return from_tables(
        {
            "data": {"name": "digits", "binary": True},
            "partition": {"kind": "dirichlet", "clients": SITES, "alpha": 0.5},
            "model": {"name": "mlp", "hidden": []},
            "problem": {"name": problem, **({"outer": 3, "inner": 8} if problem == "auprc" else {"batch": 10})},
            "algorithm": algorithm,
            "run": {"rounds": rounds, "q": q, "seed": 3},
            "evaluation": {"every": 10},
            "execution": {"mode": "loop"},
        }
    )


FCSGM = {"name": "fcsg-m", "alpha": 0.5, "beta": 0.5}
FMGDA = {"name": "fmgda", "c_hat": 0.1, "c": 0.1}


def until(condition: Callable[[], Any], what: str, seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds:g} s for: {what}"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Local]:
    folder = tmp_path_factory.mktemp("federation")
    with Processes(folder / "logs") as processes:
        local = Local(folder, processes)
        local.superlink()
        local.register(*range(SITES))
        for n in range(SITES):
            local.supernode(n)
        yield local
        mark = processes.mark
        assert len(marked(mark)) >= 2 * (SITES + 1)
    assert not marked(mark)
    assert not [line for line in listing() if str(folder) in line]


def listing() -> list[str]:
    return subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout.splitlines()


def supervised(federation: Local, condition: Callable[[], Any]) -> Callable[[], Any]:
    """Return a condition that starts sites again that have ended, every ten seconds, whenever it is looked at."""
    revived = time.monotonic()

    def looked_at() -> Any:
        nonlocal revived
        if time.monotonic() - revived > 10:
            federation.revive()
            revived = time.monotonic()
        return condition()

    return looked_at


def submit(federation: Local, study: Experiment, out: Path, **rules: Any) -> subprocess.Popen[bytes]:
    app = federation.folder / f"app-{out.name}"
    if not app.exists():
        write_app(app, study, SITES, out=str(out), **rules)
    return federation.run(app)


def finished(federation: Local, run: subprocess.Popen[bytes], out: Path) -> None:
    """Wait for the end of a run, with a supervisor for the sites."""
    until(
        supervised(federation, lambda: (out / "finished.json").exists() or run.poll() is not None),
        f"the end of {out.name}",
    )
    run.wait(PATIENCE)
    assert (out / "finished.json").exists(), federation.processes.tail("run", 40)


def same_as_simulation(study: Experiment, out: Path, folder: Path, asked_again: bool = False) -> None:
    history = simulated(study, folder / f"{out.name}-simulated", progress=False)
    ours, theirs = (load_file(f / "model.safetensors") for f in (out, folder / f"{out.name}-simulated"))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    records = read_record(out / "record.jsonl")
    assert [r["round"] for r in records] == [r["round"] for r in history]
    for one, two in zip(records, history):
        for column in ("iteration", "participants", "examples", "bytes_up"):
            assert one[column] == two[column]
        # A site that has to be asked again costs another download.
        assert one["bytes_down"] >= two["bytes_down"] if asked_again else one["bytes_down"] == two["bytes_down"]
    end = records[-1]
    assert end["auroc"] == pytest.approx(history[-1]["auroc"], abs=end["auroc_error"] + 1e-6)
    assert end["ap"] == pytest.approx(history[-1]["ap"], abs=end["ap_error"] + 1e-6)


def test_equal_to_simulation_and_strangers_stay_out(federation: Local, tmp_path: Path) -> None:
    """FCSG-M over three sites, while one with an unregistered key and one without TLS try to get in."""
    study, out = experiment("auprc", FCSGM, rounds=2), tmp_path / "fcsgm"
    write_key(federation.secrets / "site-7.key")
    federation.supernode(7)
    del federation.sites[7]  # nobody starts it again
    plain = [
        federation.command("flower-supernode"), "--insecure", "--superlink", f"{LOOPBACK}:{federation.port}",
        "--max-retries", "2", "--host", LOOPBACK, "--port", str(free_port()), "--node-config", "client=1",
    ]  # fmt: skip
    federation.processes.start("plain", plain, federation.environment("plain"))
    run = submit(federation, study, out)
    finished(federation, run, out)
    same_as_simulation(study, out, tmp_path)
    for stranger in ("site-7", "plain"):
        until(lambda name=stranger: federation.processes.running[name].poll() is not None, f"{stranger} to give up", 60)
        assert federation.processes.running[stranger].returncode != 0
        said = federation.processes.tail(stranger, 100)
        assert "Failed to initialize the connection to the SuperLink" in said
        assert "SuperNode ID" not in said
        federation.processes.stop(stranger)
    lines = (out / "sites.log").read_text().splitlines()
    assert [line.partition(" site ")[2] for line in lines] == [
        "site-0: fewer than two classes reach its min_cell in its training rows."  # true of its part
    ]


def test_killed_and_back(federation: Local, tmp_path: Path) -> None:
    """SIGKILL of a site in the middle, then of the SuperLink: FMGDA, with state on every site, is none the worse."""
    study, out = experiment("auroc", FMGDA, rounds=4), tmp_path / "fmgda"
    submit(federation, study, out)

    def after(round_: int) -> Callable[[], bool]:
        return lambda: (read_record(out / "record.jsonl") or [{"round": -1}])[-1]["round"] >= round_

    until(after(1), "round 1")
    federation.processes.stop("site-1", signal.SIGKILL)

    until(supervised(federation, after(2)), "round 2 with the site that came back")
    # The SuperLink alone: its ServerApp lives on for some seconds, and the one that follows has to wait for its end.
    link = federation.processes.running.pop("superlink")
    os.kill(link.pid, signal.SIGKILL)
    link.wait()
    federation.processes.stop("run")
    left = marked(f"{federation.processes.mark}-superlink")
    assert left
    assert not (out / "finished.json").exists()
    broken_off(federation)
    federation.superlink()
    finished(federation, submit(federation, study, out), out)
    same_as_simulation(study, out, tmp_path, asked_again=True)
    assert not set(left) & set(marked(federation.processes.mark))


def broken_off(federation: Local) -> None:
    """Break connections off in the middle of the TLS handshake, which a SuperNode takes for the end: so it must end."""
    sites = [federation.processes.running[f"site-{n}"] for n in range(SITES)]
    with socket.socket() as port:
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port.bind((LOOPBACK, federation.port))
        port.listen()
        port.settimeout(1)

        def ended() -> bool:
            with contextlib.suppress(OSError):
                connection, _ = port.accept()
                with connection:
                    connection.settimeout(1)
                    connection.recv(4096)
            return any(site.poll() is not None for site in sites)

        until(ended, "a SuperNode that cannot go on to end", 120)
    assert all(site.poll() in (None, 1) for site in sites)


BAD = """
import numpy as np
from flwr.app import Array, ArrayRecord

from nestfed.deploy.flower.mailbox import block_of, content_of
from nestfed.deploy.wire import pack

honest = app._registered_funcs["train.default"]


def dishonest(message, context):
    reply = honest(message, context)
    if context.node_config["client"] == 2:
        packed, kind = block_of(reply), block_of(message).words["round"]
        words, arrays = dict(packed.words), dict(packed.arrays())
        x = arrays["fields.x"].copy()
        if kind == 0:
            x[3] = np.nan
        elif kind == 1:
            x = x[:-1]
        elif kind == 2:
            words["group"] = "1"
        elif kind == 3:
            x = np.zeros(12_500_000)
        reply.content = content_of(pack(words, arrays | {"fields.x": x}))
        if kind == 4:
            reply.content["more"] = ArrayRecord({"x": Array(np.zeros(3))})
    return reply


app._registered_funcs["train.default"] = dishonest
"""


def restarted(federation: Local, n: int, command: Sequence[str]) -> None:
    """Start a site again by another command."""
    federation.processes.stop(f"site-{n}")
    federation.commands[n] = command
    log = federation.processes.logs / f"site-{n}.log"
    before = len(log.read_text())
    federation.supernode(n, **federation.sites[n])
    until(supervised(federation, lambda: "SuperNode ID" in log.read_text()[before:]), f"site {n} to connect", 120)


def test_a_dishonest_site(federation: Local, tmp_path: Path) -> None:
    """NaN, a wrong shape, an old round, 100 MB, other records: dropped with its name, and the others train on.

    The dishonest site runs the delivered code, in a process for every message.
    """
    study, out = experiment("classify", {"name": "fedavg", "eta": 0.1}, rounds=5), tmp_path / "bad"
    restarted(federation, 2, (*SUPERNODE, "--isolation", "subprocess"))
    app = federation.folder / "app-bad"
    write_app(app, study, SITES, out=str(out), least=2)
    with (app / "federated" / "client.py").open("a") as file:
        file.write(BAD)
    finished(federation, federation.run(app), out)
    log = [line for line in (out / "sites.log").read_text().splitlines() if " round " in line]
    for line, (number, sentence) in zip(
        log,
        enumerate(
            (
                "its x holds infinite or NaN values",
                "its fields.x has shape",
                "it answered '1' instead of '3'",
                "it sent more bytes than the",
                "it sent other records than requested",
            ),
            1,
        ),
        strict=True,
    ):
        assert f"round {number}: the answer of site site-2 is rejected: {sentence}" in line
    assert [r["participants"] for r in read_record(out / "record.jsonl")] == [0, 2, 2, 2, 2, 2]
    # FedAvg over the two honest ones alone.
    from dataclasses import replace

    from nestfed.experiment.build import assemble
    from tests.support import simulate

    made = assemble(study)
    clients = replace(made.clients, parts=made.clients.parts[:2], names=[])
    expected = simulate(made.problem, made.algorithm, clients, rounds=5, q=4, seed=3, mode="loop", progress=False)
    ours = load_file(out / "model.safetensors")
    torch.testing.assert_close(ours, dict(expected.model.state_dict()), rtol=1e-5, atol=1e-6)


def workers(federation: Local, n: int) -> list[int]:
    """Return the worker of a site, if it has one."""
    found = marked(f"{federation.processes.mark}-site-{n}")
    return [pid for pid in found if b"nestfed.deploy.flower.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_a_worker_killed_in_a_round(federation: Local, tmp_path: Path) -> None:
    """It costs time only: the site starts again, and the numbers are the same."""
    study, out = experiment("auroc", FMGDA, rounds=4, q=300), tmp_path / "worker"
    restarted(federation, 2, SUPERNODE)
    log = federation.processes.logs / "site-1.log"
    before = len(log.read_text())
    run = submit(federation, study, out)
    until(supervised(federation, lambda: "ROUND 3]" in log.read_text()[before:]), "round 3 at site 1")
    (worker,), site = workers(federation, 1), federation.processes.running["site-1"]
    os.kill(worker, signal.SIGKILL)
    until(lambda: site.poll() is not None, "the SuperNode to end with its worker", 30)
    assert site.returncode == 1
    assert "nestfed: the site's worker ended (-9)" in log.read_text()
    finished(federation, run, out)
    assert workers(federation, 1) not in ([], [worker])
    same_as_simulation(study, out, tmp_path, asked_again=True)


CODE = """
from pathlib import Path

Path({place!r}).touch()
"""


def test_delivered_code_runs_only_where_a_site_chose_so(federation: Local, tmp_path: Path) -> None:
    """The code leaves a file at a site that starts a process for every message, and none at those with a worker."""
    study = experiment("classify", {"name": "fedavg", "eta": 0.1}, rounds=1)
    place = tmp_path / "executed"

    def deliver(name: str) -> None:
        app, out = federation.folder / f"app-{name}", tmp_path / name
        write_app(app, study, SITES, out=str(out))
        with (app / "federated" / "client.py").open("a") as file:
            file.write(CODE.format(place=str(place)))
        finished(federation, federation.run(app), out)
        same_as_simulation(study, out, tmp_path)

    assert all(len(workers(federation, n)) == 1 for n in range(SITES))
    deliver("workers-only")
    assert not place.exists()
    restarted(federation, 0, (*SUPERNODE, "--isolation", "subprocess"))
    deliver("one-ordinary")
    assert place.exists()
    assert workers(federation, 0) == []
    restarted(federation, 0, SUPERNODE)


ANOTHER = """
import sys

from nestfed.deploy.flower import private_site
from nestfed.deploy.supernode import supernode

private_site.VERSION = "0.0."
supernode(sys.argv[1:])
"""


def test_another_flower_works_the_ordinary_way(federation: Local, tmp_path: Path) -> None:
    """A site whose Flower is not the known version says why, and takes part with a process for every message."""
    study, out = experiment("auprc", FCSGM, rounds=2), tmp_path / "another"
    restarted(federation, 0, (sys.executable, "-c", ANOTHER))
    finished(federation, submit(federation, study, out), out)
    same_as_simulation(study, out, tmp_path)
    said = (federation.processes.logs / "site-0.log").read_text()
    assert said.count("nestfed: without a worker, Flower starts a process for every message: Flower is version") == 1
    assert workers(federation, 0) == []
    assert len(workers(federation, 1)) == 1
    restarted(federation, 0, SUPERNODE)


def carrying(word: str) -> list[int]:
    """Return the processes that have a word in their surroundings."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if word.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_local_leaves_no_process_behind(how: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C, or even a kill, of `nestfed deploy local` while everything is starting up."""
    word = f"NESTFED_TEST={tmp_path.name}-{os.getpid()}-{how}"
    key, _, value = word.partition("=")
    command = [
        sys.executable,
        "-m",
        "nestfed",
        "deploy",
        "local",
        "average-precision",
        "--method",
        "fcsg-m",
        "--sites",
        "2",
    ]
    process = subprocess.Popen(
        [*command, "--insecure", "--out", str(tmp_path / "run"), "algorithm.alpha=1.0"],
        env={**os.environ, key: value},
        stderr=subprocess.PIPE,
        text=True,
        # A shell that started these tests in the background makes all its children ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    logs = tmp_path / "run" / "flower" / "logs"
    # The SuperLink with a SuperExec, two SuperNodes with a worker each, `flwr run`, and ourselves.
    until(lambda: (logs / "run.log").exists() and len(carrying(word)) >= 8, "all processes", 120)
    process.send_signal(how)
    _, said = process.communicate(timeout=60)
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert "run the same command again to resume" in said
        assert not carrying(word)
    until(lambda: not carrying(word), "all processes to end", 60)
