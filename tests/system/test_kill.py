"""Killed at any moment, on a full disk, in a read-only directory, with damaged files: nothing is lost, nothing is silent.

Processes are real and die by SIGKILL; they are forked from this one, which has imported everything, so that a hundred
of them take less than minutes.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from nestfed.algorithms import FedAvg, Scaffold
from nestfed.core import NestfedError
from nestfed.engine import checkpoint
from nestfed.engine.record import read as read_record
from tests.methods import method, setting
from tests.support import alive, ended, forked, images, simulate
from tests.system.study import EXPERIMENT

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")

Action = Callable[[Path], Any]


@pytest.fixture(scope="module")
def imported() -> None:
    """Import here what every child would import again."""
    for name in (
        "torch._dynamo",
        "matplotlib.pyplot",
        "sklearn.datasets",
        "nestfed.cli.main",
        "nestfed.experiment.build",
        "nestfed.experiment.run",
    ):
        import_module(name)


def command(*words: str) -> Action:
    def act(out: Path) -> None:
        from nestfed.cli.main import main

        sys.argv = ["nestfed", *words, "--out", str(out)]
        main()

    return act


def simulation(name: str, **options: Any) -> Action:
    def act(out: Path) -> None:
        s = setting(name)
        options_ = {"q": 3, "progress": False, "checkpoint_every": 2, "rounds": 12, "participation": 4, **options}
        result = simulate(s.problem, method(name), s.clients, directory=out, **options_)
        held = {k: v.tolist() for k, v in (*result.shared.items(), *result.private.items())}
        (out / "held.json").write_text(json.dumps(held, sort_keys=True))

    return act


def remains(out: Path) -> dict[str, Any]:
    """Return all that a run leaves and that must not depend on how often it was killed."""
    found: dict[str, Any] = {}
    for path in sorted(out.rglob("*")):
        name = str(path.relative_to(out))
        if path.is_dir() or path.suffix in (".png", ".html", ".log"):
            continue
        if path.name in ("record.jsonl", "finished.json"):
            lines = [json.loads(line) for line in path.read_text().splitlines()]  # every line is whole
            found[name] = [{k: v for k, v in record.items() if k != "seconds"} for record in lines]
        elif path.name == "records.jsonl":  # of a reproduction: all but the times
            runs = [json.loads(line) for line in path.read_text().splitlines()][1:]
            found[name] = [{**run, "curve": [p[:4] + p[5:] for p in run["curve"]]} for run in runs]
        elif path.name.startswith("round-"):
            # Its time is in it; and who was killed between writing one and deleting an old one leaves three.
            found["newest"] = max(found.get("newest", ""), path.name[:14])
        else:
            found[name] = path.read_bytes()
    return found


def survive(action: Action, folder: Path, kills: int, seed: int) -> int:
    """Kill a run at random moments until it has died so often; compare with one that was left alone."""
    luck = random.Random(seed)
    began = time.monotonic()
    assert ended(forked(lambda: action(folder / "whole"), folder / "log")) == 0, (folder / "log").read_text()
    length = time.monotonic() - began
    expected = remains(folder / "whole")
    done = 0
    for turn in itertools.count():
        out = folder / f"turn-{turn}"
        while True:
            pid = forked(lambda out=out: action(out), folder / "log")  # type: ignore[misc]
            deadline = time.monotonic() + luck.uniform(0, length)
            code = None
            while code is None and (done >= kills or time.monotonic() < deadline):
                found, status = os.waitpid(pid, os.WNOHANG)
                code = os.waitstatus_to_exitcode(status) if found else None
                time.sleep(0.001)
            if code is None:
                os.kill(pid, signal.SIGKILL)
                code = ended(pid)  # perhaps it was quicker
            if code != -signal.SIGKILL:
                assert code == 0, (folder / "log").read_text()
                break
            done += 1
        assert remains(out) == expected
        if done >= kills:
            return done
    raise AssertionError


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    path = tmp_path / "study.toml"
    path.write_text(EXPERIMENT)
    return path


def test_a_few_kills(tmp_path: Path) -> None:
    assert survive(simulation("scaffold", mode="loop", workers=1), tmp_path, 3, seed=1) >= 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("scaffold", {"mode": "loop", "workers": 1}),
        ("fcsg-m", {"mode": "vmap", "workers": 1, "keep": "uniform"}),
        ("local-scgdm", {"mode": "loop", "workers": 2}),
        ("fmgda", {"mode": "vmap", "workers": 1, "reduce": "median", "encode": "int8"}),
    ],
)
@pytest.mark.usefixtures("imported")
def test_simulations_are_killed(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    assert survive(simulation(name, **options), tmp_path, 20, seed=2) >= 20


@pytest.mark.slow
@pytest.mark.usefixtures("imported")
def test_the_command_run_is_killed(experiment: Path, tmp_path: Path) -> None:
    assert survive(command("run", str(experiment)), tmp_path, 15, seed=3) >= 15


@pytest.mark.slow
@pytest.mark.usefixtures("imported")
def test_a_comparison_with_its_tuning_is_killed(experiment: Path, tmp_path: Path) -> None:
    words = ("compare", str(experiment), "--seeds", "1", "--workers", "1")
    assert survive(command(*words), tmp_path, 15, seed=4) >= 15


@pytest.mark.slow
@pytest.mark.usefixtures("imported")
def test_a_comparison_with_several_workers_is_killed(experiment: Path, tmp_path: Path) -> None:
    words = ("compare", str(experiment), "--seeds", "2", "--workers", "2")
    assert survive(command(*words), tmp_path, 8, seed=5) >= 8


@pytest.mark.slow
@pytest.mark.usefixtures("imported")
def test_a_reproduction_is_killed(tmp_path: Path) -> None:
    words = ("reproduce", "scgdm-figure2", "--budget", "quick")
    assert survive(command(*words), tmp_path, 8, seed=6) >= 8


def test_nobody_is_left_behind(tmp_path: Path) -> None:
    """A run with workers that is killed while they work takes them along, and frees its directory."""
    pid = forked(
        lambda: simulation("scaffold", mode="loop", workers=2, rounds=100_000)(tmp_path / "out"), tmp_path / "log"
    )
    deadline = time.monotonic() + 30
    workers: list[int] = []
    while len(workers) < 2 and time.monotonic() < deadline:
        children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
        workers = [int(p) for p in children.stdout.split()]
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    ended(pid)
    again = forked(
        lambda: simulation("scaffold", mode="loop", workers=2, rounds=2)(tmp_path / "next"), tmp_path / "log"
    )
    assert ended(again) == 0
    while any(map(alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(workers) == 2
    assert not any(map(alive, workers))


def test_what_a_killed_process_was_writing_is_swept_away(tmp_path: Path) -> None:
    problem, clients = images()
    simulate(problem, FedAvg(0.1), clients, rounds=2, directory=tmp_path, progress=False)
    (tmp_path / ".round-00000003.12345.tmp").write_bytes(b"half")
    (tmp_path / ".record.jsonl.12345.tmp").write_bytes(b"half")
    simulate(problem, FedAvg(0.1), clients, rounds=3, directory=tmp_path, progress=False)
    assert not list(tmp_path.glob(".*"))


# --- the disk ---


@pytest.mark.parametrize("limit", [0, 700, 20_000])
def test_a_disk_that_takes_no_more(limit: int, tmp_path: Path) -> None:
    """No file may grow beyond a limit: the run stops with a sentence, and resumes when there is room again."""

    def cramped() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        simulation("scaffold", mode="loop", workers=1)(tmp_path / "out")

    code = ended(forked(cramped, Path("/dev/null")))
    assert code in (0, 2)  # a sentence, not a crash
    assert code == 2 or limit == 20_000
    record = tmp_path / "out" / "record.jsonl"
    assert not record.exists() or record.read_text()[-2:] in ("", "}\n")
    assert not list((tmp_path / "out").glob(".*.tmp"))
    act = simulation("scaffold", mode="loop", workers=1)
    assert ended(forked(lambda: act(tmp_path / "out"), tmp_path / "log")) == 0
    assert ended(forked(lambda: act(tmp_path / "whole"), tmp_path / "log")) == 0
    assert remains(tmp_path / "out") == remains(tmp_path / "whole")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=32k", "none", str(place)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"this process may not mount a small disk: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=False)


def test_a_full_disk(small_disk: Path, tmp_path: Path) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(16_000))
    act = simulation("scaffold", mode="loop", workers=1)
    assert ended(forked(lambda: act(small_disk / "out"), tmp_path / "log")) == 2
    assert "No space left on device" in (tmp_path / "log").read_text()
    assert read_record(small_disk / "out" / "record.jsonl")[-1]["round"] >= 1
    ballast.unlink()
    code = ended(forked(lambda: act(small_disk / "out"), tmp_path / "log"))
    assert code == 0, (tmp_path / "log").read_text()
    assert ended(forked(lambda: act(tmp_path / "whole"), tmp_path / "log")) == 0
    assert remains(small_disk / "out") == remains(tmp_path / "whole")


def without_privileges() -> None:
    """Give up root's right to write wherever it likes."""
    if os.geteuid() == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        head, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        assert libc.capget(head, data) == 0
        data[0] &= ~0b110  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH
        assert libc.capset(head, data) == 0


@pytest.mark.parametrize("what", ["the directory above", "the directory"])
@pytest.mark.skipif(sys.platform != "linux", reason="gives up root's rights by Linux's capabilities")
def test_a_read_only_directory(what: str, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    out = place / "out" if what == "the directory above" else place
    act = simulation("fcsg-m", mode="loop", workers=1)
    place.chmod(0o555)

    def read_only() -> None:
        without_privileges()
        act(out)

    assert ended(forked(read_only, tmp_path / "log")) == 2
    log = (tmp_path / "log").read_text()
    assert log.startswith("Cannot ")
    assert log.rstrip().endswith("Permission denied.")
    assert not list(place.iterdir())
    place.chmod(0o755)
    assert ended(forked(lambda: act(out), tmp_path / "log")) == 0


# --- damaged files ---


def run_to(directory: Path, rounds: int) -> Any:
    problem, clients = images(2)
    return simulate(
        problem, Scaffold(0.1), clients, rounds=rounds, q=1, directory=directory, progress=False, mode="loop", workers=1,
        checkpoint_every=1,
    )  # fmt: skip


def damages(content: bytes, every: int) -> Iterator[bytes]:
    """Return the content cut at lengths, and with single bits flipped."""
    for length in range(0, len(content), every):
        yield content[:length]
    for place in range(0, len(content), every):
        spoilt = bytearray(content)
        spoilt[place] ^= 1 << place % 8
        yield bytes(spoilt)


def read_damaged(folder: Path, every: int) -> int:
    run_to(folder, 3)
    older, newest = sorted(folder.glob("round-*"))
    with checkpoint.safe_open(newest, "pt") as file:
        fingerprint = file.metadata()["fingerprint"]
    content = newest.read_bytes()
    tried = 0
    for damaged in damages(content, every):
        newest.write_bytes(damaged)
        found, skipped = checkpoint.read(folder, fingerprint, torch.device("cpu"))
        assert found is not None
        assert found.state.round == 2
        assert skipped == [f"{newest} is damaged and was skipped."]
        tried += 1
    newest.write_bytes(content)
    assert checkpoint.read(folder, fingerprint, torch.device("cpu"))[0].state.round == 3  # type: ignore[union-attr]
    assert older.exists()
    return tried


def test_a_checkpoint_cut_or_flipped_somewhere(tmp_path: Path) -> None:
    assert read_damaged(tmp_path, 101) > 50


@pytest.mark.slow
def test_a_checkpoint_cut_at_every_length_and_with_every_byte_flipped(tmp_path: Path) -> None:
    assert read_damaged(tmp_path, 1) > 5000


def test_a_run_without_valid_checkpoints_says_so(tmp_path: Path) -> None:
    whole = run_to(tmp_path, 3)
    for path in tmp_path.glob("round-*"):
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.warns(UserWarning, match="damaged") as caught:
        again = run_to(tmp_path, 3)
    assert str(caught[-1].message) == f"No valid checkpoint is left in {tmp_path}: the run starts from the beginning."
    assert torch.equal(again.x, whole.x)
    for path in tmp_path.glob("round-*"):
        path.unlink()
    with pytest.warns(UserWarning, match="has no checkpoint of its 3 rounds: the run starts from the beginning"):
        run_to(tmp_path, 3)


def test_a_made_up_checkpoint_is_not_a_state(tmp_path: Path) -> None:
    """Its digest is right, its content is not: it is passed over by name, whatever is wrong with it."""
    import hashlib

    from safetensors.torch import save

    whole = run_to(tmp_path, 3)
    newest = max(tmp_path.glob("round-*"))
    with checkpoint.safe_open(newest, "pt") as file:
        words = file.metadata()
        tensors = {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118
    numbers = json.loads(words["numbers"])
    made_up: list[tuple[dict[str, torch.Tensor], dict[str, str]]] = [
        ({k: v for k, v in tensors.items() if k != "seen"}, words),
        ({k: v for k, v in tensors.items() if k != "shared.c"}, words),
        ({**tensors, "shared.x": tensors["shared.x"][:-1].clone()}, words),
        ({**tensors, "shared.x": tensors["shared.x"].float()}, words),
        ({**tensors, "other.x": torch.zeros(1)}, words),
        ({**tensors, "private.own": torch.zeros(1, 1)}, words),
        ({**tensors, "seen": torch.zeros(2, 2)}, words),
        (tensors, {**words, "numbers": "[]"}),
        (tensors, {**words, "numbers": "{}"}),
        (tensors, {**words, "numbers": "[" * 100_000}),
        (tensors, {**words, "numbers": json.dumps({**numbers, "round": -1})}),
        (tensors, {**words, "numbers": json.dumps({**numbers, "round": "3"})}),
        (tensors, {**words, "numbers": json.dumps({**numbers, "t": True})}),
        (tensors, {**words, "numbers": json.dumps({**numbers, "more": 1})}),
        (tensors, {k: v for k, v in words.items() if k != "numbers"}),
    ]
    newest.unlink()
    for held, said in made_up:
        content = save(held, said)
        path = tmp_path / f"round-00000009-{hashlib.sha256(content).hexdigest()[:16]}.safetensors"
        path.write_bytes(content)
        with pytest.warns(UserWarning, match=f"{path.name} cannot be read and was skipped"):
            again = run_to(tmp_path, 3)
        assert torch.equal(again.x, whole.x)
        path.unlink()


@pytest.mark.parametrize("text", ["3", "[]", '{"rounds": 3}', '{"round": "x"}', "[" * 100_000, "\x00"])
def test_a_line_that_is_not_a_record_is_named(text: str, tmp_path: Path) -> None:
    run_to(tmp_path, 3)
    path = tmp_path / "record.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], text, *lines[1:]]) + "\n")
    with pytest.raises(NestfedError, match="line 2 is not a record"):
        read_record(path)
    path.write_text("\n".join([*lines, text[:1]]))  # what a crash may leave at the end
    assert len(read_record(path)) == 3


def test_nothing_warns_when_nothing_is_wrong(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_to(tmp_path, 2)
        run_to(tmp_path, 3)
