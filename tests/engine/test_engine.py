"""A run's life: checkpoints, interruptions, bad numbers, who takes part, what is returned."""

from __future__ import annotations

import json
import math
import os
import signal
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nestfed_papers.toys import Quadratic
from torch import nn
from torch.utils.checkpoint import checkpoint as recompute

from nestfed import Classify, Examples, Minimize
from nestfed.algorithms import METHODS, FedAdam, FedAMS, FedAvg, FedYogi, Scaffold
from nestfed.core import Batch, Clients, Metric, NestfedError
from nestfed.data.random import Streams
from nestfed.engine import checkpoint
from nestfed.engine.options import Evaluation, Exchange
from nestfed.engine.program import Span, batch_keys
from nestfed.engine.record import read as read_record
from nestfed.engine.round import RunState
from nestfed.engine.run_directory import Interrupted
from nestfed.problems.base import Box
from tests.methods import CASES, FEW, Q, method, setting
from tests.support import answering, ended, forked, identical, images, simulate

OPTIONS: dict[str, Any] = {"q": 2, "progress": False, "mode": "loop", "workers": 1}


def columns(history: Any) -> list[dict[str, Any]]:
    return [{k: v for k, v in record.items() if k != "seconds"} for record in history]


# --- resuming ---


@pytest.mark.parametrize(("name", "mode"), [*((name, "loop") for name in FEW), ("scaffold", "vmap")])
def test_resumes_to_the_last_bit(name: str, mode: str, tmp_path: Path) -> None:
    """With everything that clients keep, some of whom sat out the round before the break.

    `check_resume` does this with every method and mode="vmap", but does not look into the record's file.
    """
    s = setting(name)
    part = None if METHODS[name].single else 3
    options: dict[str, Any] = {"q": Q, "seed": 5, "progress": False, "mode": mode, "participation": part}
    whole = simulate(s.problem, method(name), s.clients, rounds=5, **options)
    simulate(s.problem, method(name), s.clients, rounds=3, directory=tmp_path, **options)
    again = simulate(s.problem, method(name), s.clients, rounds=5, directory=tmp_path, **options)
    identical(dict(again.shared), dict(whole.shared))
    identical(dict(again.private), dict(whole.private))
    assert columns(again.history) == columns(whole.history)
    assert columns(read_record(tmp_path / "record.jsonl")) == columns(whole.history)


def test_resumes_workers_to_the_last_bit(tmp_path: Path) -> None:
    problem, clients = images()
    options = {**OPTIONS, "workers": 2, "participation": 4}
    whole = simulate(problem, Scaffold(0.1), clients, rounds=5, **options)
    simulate(problem, Scaffold(0.1), clients, rounds=3, directory=tmp_path, **options)
    again = simulate(problem, Scaffold(0.1), clients, rounds=5, directory=tmp_path, **options)
    identical(dict(again.shared), dict(whole.shared))
    identical(dict(again.private), dict(whole.private))


def test_a_finished_run_is_only_read(tmp_path: Path) -> None:
    problem, clients = images()
    first = simulate(problem, FedAvg(0.1), clients, rounds=2, directory=tmp_path, **OPTIONS)
    again = simulate(problem, FedAvg(0.1), clients, rounds=2, directory=tmp_path, **OPTIONS)
    assert torch.equal(first.x, again.x)
    assert first.history == again.history


def test_another_experiment_is_refused(tmp_path: Path) -> None:
    problem, clients = images()
    simulate(problem, FedAvg(0.1), clients, rounds=2, directory=tmp_path, **OPTIONS)
    with pytest.raises(NestfedError, match="another experiment"):
        simulate(problem, FedAvg(0.2), clients, rounds=2, directory=tmp_path, **OPTIONS)


@pytest.mark.parametrize("how", ["cut short", "one bit", "empty"])
def test_a_damaged_checkpoint_is_passed_over(how: str, tmp_path: Path) -> None:
    problem, clients = images()
    options = {**OPTIONS, "checkpoint_every": 2}
    whole = simulate(problem, Scaffold(0.1), clients, rounds=6, **options)
    simulate(problem, Scaffold(0.1), clients, rounds=4, directory=tmp_path, **options)
    newest = sorted(tmp_path.glob("round-*.safetensors"))[-1]
    assert "00000004" in newest.name
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes({"cut short": bytes(content[:-9]), "one bit": bytes(content), "empty": b""}[how])
    with pytest.warns(UserWarning, match="is damaged and was skipped"):
        again = simulate(problem, Scaffold(0.1), clients, rounds=6, directory=tmp_path, **options)
    assert torch.equal(again.x, whole.x)
    assert columns(again.history) == columns(whole.history)


def test_a_checkpoint_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, clients = images()
    simulate(problem, FedAvg(0.1), clients, rounds=2, directory=tmp_path, **OPTIONS)
    before = {p.name: p.read_bytes() for p in tmp_path.glob("round-*")}

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(NestfedError, match="No space left on device"):
        simulate(problem, FedAvg(0.1), clients, rounds=4, directory=tmp_path, **OPTIONS)
    assert {p.name: p.read_bytes() for p in tmp_path.glob("round-*")} == before
    assert not list(tmp_path.glob(".*"))


def test_two_checkpoints_are_kept(tmp_path: Path) -> None:
    problem, clients = images()
    simulate(problem, FedAvg(0.1), clients, rounds=5, directory=tmp_path, checkpoint_every=1, **OPTIONS)
    assert [p.name[:14] for p in sorted(tmp_path.glob("round-*"))] == ["round-00000004", "round-00000005"]


def test_a_checkpoint_is_a_safetensors_file(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    problem, clients = images()
    result = simulate(problem, Scaffold(0.1), clients, rounds=1, directory=tmp_path, **OPTIONS)
    held = load_file(next(iter(tmp_path.glob("round-*"))))
    assert torch.equal(held["shared.x"], result.x)
    assert torch.equal(held["private.own"], result.private["own"])
    with pytest.raises(NestfedError, match="another experiment"):
        checkpoint.read(tmp_path, "other", torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_arrays_read_are_aligned_as_torch_aligns_them(dtype: torch.dtype, tmp_path: Path) -> None:
    """A matrix product rounds by the address of its numbers, so a checkpoint's bits alone are not enough to resume."""
    places = []
    for length in range(0, 64, 8):  # of the header, after which the numbers begin
        fingerprint = "f" * length
        shared = {"c": torch.ones(3, dtype=dtype), "x": torch.ones(5, dtype=dtype)}
        state = RunState(shared, {"v": torch.ones(3, dtype=dtype)}, torch.zeros(1), kept={"best": shared["c"]})
        (tmp_path / str(length)).mkdir()
        checkpoint.write(tmp_path / str(length), state, {}, fingerprint)
        found, _ = checkpoint.read(tmp_path / str(length), fingerprint, torch.device("cpu"))
        assert found is not None
        groups = (found.state.shared, found.state.server, found.state.kept)
        places += [v.data_ptr() % 64 for group in groups for v in group.values()]
    assert set(places) == {0}


@pytest.mark.parametrize("mode", ["loop", "vmap"])
def test_resumes_matrix_products_to_the_last_bit(mode: str, tmp_path: Path) -> None:
    """With shapes whose products do round by address."""
    _, held = images()
    clients = Examples(held.arrays, held.parts, batch=1)
    layers = [nn.Flatten(-3), nn.Linear(72, 6), nn.Tanh(), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)]
    problem = Classify(nn.Sequential(*layers).double())
    options = {**OPTIONS, "mode": mode}
    whole = simulate(problem, Scaffold(0.1), clients, rounds=6, **options)
    for stop in range(1, 6):
        simulate(problem, Scaffold(0.1), clients, rounds=stop, directory=tmp_path, **options)
    again = simulate(problem, Scaffold(0.1), clients, rounds=6, directory=tmp_path, **options)
    identical(dict(again.shared), dict(whole.shared))
    identical(dict(again.private), dict(whole.private))


def test_a_record_cut_short_is_repaired(tmp_path: Path) -> None:
    problem, clients = images()
    whole = simulate(problem, FedAvg(0.1), clients, rounds=6, **OPTIONS)
    simulate(problem, FedAvg(0.1), clients, rounds=4, directory=tmp_path, checkpoint_every=2, **OPTIONS)
    sorted(tmp_path.glob("round-*"))[-1].unlink()  # the crash came before the checkpoint of round 4
    path = tmp_path / "record.jsonl"
    path.write_text(path.read_text()[:-20])
    assert len(read_record(path)) == 3
    again = simulate(problem, FedAvg(0.1), clients, rounds=6, directory=tmp_path, **OPTIONS)
    assert columns(again.history) == columns(whole.history)
    assert all(json.loads(line) for line in path.read_text().splitlines())


# --- interruption ---


class Slow(Examples):
    def draw(self, ns: Any, ts: range) -> Any:
        time.sleep(0.02)
        return super().draw(ns, ts)


@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_saves_and_says_how_to_continue(workers: int, tmp_path: Path) -> None:
    problem, clients = images()
    slow = Slow(clients.arrays, clients.parts, batch=6)
    options = {**OPTIONS, "workers": workers}
    out, log = tmp_path / "out", tmp_path / "log"
    pid = forked(lambda: simulate(problem, Scaffold(0.1), slow, rounds=100_000, directory=out, **options), log)
    deadline = time.monotonic() + 60
    record = out / "record.jsonl"
    while (not record.exists() or len(record.read_text().splitlines()) < 2) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(pid, signal.SIGINT)
    assert ended(pid) == 2
    assert "Stopped after round" in log.read_text()
    assert f"run it again to resume from {out}" in log.read_text()
    done = len(read_record(record))
    again = simulate(problem, Scaffold(0.1), clients, rounds=done + 2, directory=out, **options)
    whole = simulate(problem, Scaffold(0.1), clients, rounds=done + 2, **options)
    assert torch.equal(again.x, whole.x)
    identical(dict(again.private), dict(whole.private))


def test_an_interruption_without_a_directory() -> None:
    problem, clients = images()

    calls = []

    def measure(shared: Any, private: Any) -> dict[str, float]:
        calls.append(1)
        if len(calls) == 2:  # after round 1
            os.kill(os.getpid(), signal.SIGINT)
        return {}

    with pytest.raises(Interrupted, match=r"Stopped after round 1 of 3 \(nothing is saved\)"):
        simulate(problem, FedAvg(0.1), clients, rounds=3, measure=measure, **OPTIONS)


# --- bad numbers ---


@pytest.mark.parametrize("mode", ["loop", "vmap"])
def test_a_bad_number_names_client_and_iteration(mode: str, tmp_path: Path) -> None:
    problem, clients = images()
    good = Examples(clients.arrays, clients.parts, batch=2, names=[f"hospital {n}" for n in range(5)], seed=1)
    drawn = {int(i): t for t in range(40, -1, -1) for i in good.indices(3, t)}  # the first time for each example
    spoilt, reached = next((i, t) for i, t in drawn.items() if t > 5)
    x = clients.arrays[0].clone()
    x[spoilt] = float("nan")
    bad = replace(good, arrays=(x, clients.arrays[1]))
    options = {**OPTIONS, "mode": mode, "checkpoint_every": 1}
    rounds = reached // 2
    text = rf"at client hospital 3, iteration {reached} \(round {rounds + 1}\)"
    with pytest.raises(NestfedError, match=text) as error:
        simulate(problem, Scaffold(0.1), bad, rounds=10_000, directory=tmp_path, **options)
    assert f"The last good checkpoint is in {tmp_path}" in str(error.value)
    # That is the state after the last good round.
    healed = simulate(problem, Scaffold(0.1), good, rounds=rounds, directory=tmp_path, **options)
    assert torch.equal(healed.x, simulate(problem, Scaffold(0.1), good, rounds=rounds, **options).x)


def test_divergence_is_reported() -> None:
    toy = Quadratic(4, 3)
    with pytest.raises(NestfedError, match="the step size is too large"):
        simulate(toy.problem, FedAvg(1e200), toy.clients, rounds=50, q=5, progress=False)


# --- what is returned ---


@pytest.mark.parametrize(
    "method", [FedAdam(0.1, 0.3), FedYogi(0.1, 0.3), FedAMS(0.1, 0.3), Scaffold(0.5, eta_g=1.5), FedAvg(0.5)]
)
def test_the_server_stays_in_the_feasible_set(method: Any) -> None:
    toy = Quadratic(4, 6, seed=1)
    problem = Minimize(toy.problem.f, torch.zeros(6, dtype=torch.float64), domain=Box(-0.1, 0.1))
    seen: list[float] = []

    def measure(shared: Any, private: Any) -> dict[str, float]:
        seen.append(float(shared["x"].abs().max()))
        return {}

    simulate(problem, method, toy.clients, rounds=8, q=2, measure=measure, progress=False)
    assert max(seen) <= 0.1
    assert max(seen) > 0.09, "it was at the border"


def test_a_nan_is_not_the_best() -> None:
    toy = Quadratic(4, 3, seed=1)
    values = iter([math.nan, 1.0, 3.0, math.nan, 2.0])
    found = simulate(
        toy.problem, FedAvg(0.1), toy.clients, rounds=4, q=2, progress=False, keep="best",
        metric=Metric("score", higher=True),
        evaluate=lambda model: {"score": next(values)},
    )  # fmt: skip
    short = simulate(toy.problem, FedAvg(0.1), toy.clients, rounds=2, q=2, progress=False)
    torch.testing.assert_close(found.x, short.x, rtol=0, atol=0)


def test_outputs() -> None:
    problem, clients = images()
    seen: list[torch.Tensor] = []
    scores = [0.1, 0.5, 0.9, 0.3, 0.2, 0.0]

    def measure(shared: Any, private: Any) -> dict[str, float]:
        seen.append(shared["x"].clone())
        return {"score": scores[len(seen) - 1]}

    options: dict[str, Any] = {**OPTIONS, "rounds": 5, "measure": measure}
    last = simulate(problem, FedAvg(0.1), clients, **options)
    assert torch.equal(last.x, seen[-1])
    assert torch.equal(torch.cat([p.reshape(-1) for p in last.model.parameters()]), last.x)
    seen.clear()
    best = simulate(problem, FedAvg(0.1), clients, keep="best", metric=Metric("score", higher=True), **options)
    assert torch.equal(best.x, seen[2])
    seen.clear()
    least = simulate(problem, FedAvg(0.1), clients, keep="best", metric=Metric("score", higher=False), **options)
    assert torch.equal(least.x, seen[5])
    seen.clear()
    with pytest.raises(NestfedError, match=r"evaluation\.metric is 'auroc', but the evaluation returns score"):
        simulate(problem, FedAvg(0.1), clients, keep="best", metric="auroc", **options)


def test_uniform_output_is_the_mean_of_the_clients_at_the_drawn_iteration() -> None:
    problem, clients = images()
    options: dict[str, Any] = {**OPTIONS, "q": 3, "rounds": 4, "keep": "uniform"}
    drawn = set()
    for seed in range(4):
        held = clients.seeded(seed)
        points, means = [problem.x0] * 5, []
        with torch.no_grad():
            for t in range(12):
                for n in range(5):
                    key = batch_keys(Streams(seed), [n], Span(t, t + 1), torch.device("cpu"))[0, 0]
                    points[n] = points[n] - 0.1 * problem.grad(points[n], Batch(held.sample(n, t), key, eager=True))
                means.append(torch.stack(points).mean(0))
                if t % 3 == 2:
                    points = [means[-1]] * 5
        for workers in (1, 2) if seed == 0 else (1,):
            found = simulate(problem, FedAvg(0.1), clients, seed=seed, **{**options, "workers": workers}).x
            near = [t for t, mean in enumerate(means) if torch.allclose(mean, found, rtol=0, atol=1e-12)]
            assert len(near) == 1
            drawn.add(near[0])
    assert 2 < len(drawn) <= 4


# --- who takes part ---


def test_participation_and_failures() -> None:
    problem, clients = images()
    options = {**OPTIONS, "rounds": 30, "mode": "vmap"}
    by_count = simulate(problem, FedAvg(0.05), clients, participation=2, **options)
    assert [r["participants"] for r in by_count.history] == [2] * 30
    by_chance = [
        r["participants"] for r in simulate(problem, FedAvg(0.05), clients, participation=0.4, **options).history
    ]
    assert 0 in by_chance or 1 in by_chance
    assert 1.2 < np.mean(by_chance) < 2.8
    failing = simulate(problem, FedAvg(0.05), clients, participation=4, failures=0.5, **options)
    answered = [r["participants"] for r in failing.history]
    assert 1.2 < np.mean(answered) < 2.8
    once = failing.shared["x"].numel() * 8
    assert failing.history[-1]["bytes_down"] == 30 * 4 * once
    assert failing.history[-1]["bytes_up"] == sum(answered) * once
    assert failing.history[-1]["examples"] == sum(answered) * 2 * 6


def test_a_round_without_answers_changes_nothing() -> None:
    problem, clients = images()
    result = simulate(problem, Scaffold(0.1), clients, rounds=12, participation=0.05, **OPTIONS)
    empty = [i for i, r in enumerate(result.history) if r["participants"] == 0]
    assert empty
    assert result.history[empty[0]]["loss"] is None
    first = next(i for i, r in enumerate(result.history) if r["participants"])
    assert [r["iteration"] for r in result.history] == [2 * max(0, i + 1 - first) for i in range(12)]


@pytest.mark.parametrize("name", [n for n in CASES if not METHODS[n].single])
def test_iteration_0_waits_for_somebody(name: str) -> None:
    """Whoever comes first initialises the estimators, just as if the empty rounds before had not been."""
    s = setting(name)
    options: dict[str, Any] = {"q": Q, "progress": False, "participation": 0.3}
    seed = next(
        seed for seed in range(200)
        if not answering(Exchange(share=0.3), seed, len(s.clients), 0)
        and answering(Exchange(share=0.3), seed, len(s.clients), 1)
    )  # fmt: skip
    empty = simulate(s.problem, method(name), s.clients, rounds=1, seed=seed, **options)
    assert (empty.history[-1]["participants"], empty.history[-1]["iteration"]) == (0, 0)
    late = simulate(s.problem, method(name), s.clients, rounds=2, seed=seed, **options)
    who = answering(Exchange(share=0.3), seed, len(s.clients), 1)

    class Those(Clients):
        """The same clients, renumbered: only those who came."""

        def __len__(self) -> int:
            return len(who)

        def examples(self, n: int) -> int:
            return s.clients.examples(who[n])

        def sample(self, n: int, t: int) -> Any:
            clients = s.clients.seeded(seed)
            return clients.sample(who[n], t)

    if METHODS[name].name in ("scaffold", "codasca", "feddyn"):
        return  # their server counts the absent
    alone = simulate(s.problem, method(name), Those(), rounds=1, q=Q, seed=seed, progress=False)
    for field, value in alone.shared.items():
        torch.testing.assert_close(late.shared[field], value, rtol=1e-9, atol=1e-12)


def test_an_error_in_the_users_own_code_is_a_sentence() -> None:
    problem, clients = images()

    def broken(model: Any, batch: Any) -> torch.Tensor:
        return model(batch[0].reshape(-1, 7)).sum()

    for mode in ("loop", "vmap"):
        with pytest.raises(NestfedError, match=r"failed at clients? 0.* in round 1: RuntimeError: ") as caught:
            simulate(Minimize(broken, problem.flat.source), FedAvg(0.1), clients, rounds=1, **{**OPTIONS, "mode": mode})
        assert isinstance(caught.value.__cause__, RuntimeError)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"count": 6}, "exchange.count must be at most the number of clients, 5, not 6"),
        ({"count": -1}, "exchange.count must be"),
        ({"share": 1.5}, r"\(0, 1\]"),
        ({"failures": 1.0}, r"\[0, 1\)"),
        ({"mode": "fast"}, "auto, vmap or loop"),
        ({"workers": -1}, "workers must be"),
        ({"workers": 2, "device": "meta"}, "needs device = cpu"),
        ({"precision": "fp8"}, "full or bf16"),
        ({"accumulate": 0}, "accumulate must be"),
        ({"compile": True, "mode": "loop"}, "compile needs vectorised"),
        ({"keep": "first"}, "last, uniform or best"),
        ({"keep": "best", "evaluate": lambda model: {}}, "name of a metric"),
        ({"keep": "best", "metric": "auroc"}, "evaluate or measure"),
        ({"rounds": -1}, "rounds must be"),
        ({"q": 0}, "q must be"),
    ],
)
def test_wrong_options_are_refused_before_work_starts(wrong: dict[str, Any], sentence: str) -> None:
    problem, clients = images()
    with pytest.raises(NestfedError, match=sentence):
        simulate(problem, FedAvg(0.1), clients, **{"rounds": 1, "q": 1, "progress": False, **wrong})


def test_device_option() -> None:
    problem, clients = images()
    on = simulate(problem, FedAvg(0.1), clients, rounds=2, device="cpu:0", **{**OPTIONS, "mode": "vmap"})
    assert torch.equal(on.x, simulate(problem, FedAvg(0.1), clients, rounds=2, **{**OPTIONS, "mode": "vmap"}).x)
    assert on.x.device.type == "cpu"


# --- modules ---


class Recomputing(nn.Module):
    """Forgets its activations and computes them again for the backward pass."""

    def __init__(self, forget: bool) -> None:
        super().__init__()
        self.first, self.second, self.forget, self.passes = nn.Linear(72, 8), nn.Linear(8, 3), forget, 0

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return torch.tanh(self.first(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(-3)
        h = recompute(self.middle, x, use_reentrant=False) if self.forget else self.middle(x)
        return self.second(h)


def test_activation_checkpointing() -> None:
    _, clients = images()
    found = []
    for forget in (False, True):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            problem = Classify(Recomputing(forget).double())
        found.append(simulate(problem, Scaffold(0.1), clients, rounds=3, **OPTIONS).x)
        assert problem.flat._train.passes == (2 if forget else 1) * (3 * 2 * 5 + 1)  # one to inspect the problem
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-12)


class Tied(nn.Module):
    """Two layers with one weight, and a recurrence of torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(6, 6)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(self.rnn(x.flatten(1, 2))[0]))).mean(1)[..., :3]


def test_shared_weights_and_recurrences_train_as_torch_does() -> None:
    _, clients = images(1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = Tied().double()
    ours = simulate(Classify(module), FedAvg(0.1), clients, rounds=2, **OPTIONS).model
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for t in range(4):
        x, y = clients.seeded(0).sample(0, t)
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()
    assert ours.second.weight is ours.first.weight
    for one, other in zip(ours.parameters(), module.parameters()):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_batches_that_cannot_be_cut() -> None:
    problem = Minimize(lambda x, b: (b[0] @ x).sum() * b[1], torch.zeros(3))

    class Odd:
        def __len__(self) -> int:
            return 1

        def sample(self, n: int, t: int) -> Any:
            return torch.ones(4, 3), torch.tensor(2.0)

    with pytest.raises(NestfedError, match="cannot be split into pieces"):
        simulate(problem, FedAvg(0.1), Odd(), rounds=1, accumulate=2, progress=False, mode="loop")


def test_profile() -> None:
    problem, clients = images()
    for workers in (1, 2):
        result = simulate(problem, Scaffold(0.1), clients, rounds=2, profile=True, **{**OPTIONS, "workers": workers})
        table = result.profile
        assert list(table) == ["drawing", "gradients", "updates", "averaging", "rest", "evaluation", "saving"]
        assert all(v >= 0 for v in table.values())
        assert table["gradients"] > 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(result.x, simulate(problem, Scaffold(0.1), clients, rounds=2, **{**OPTIONS, "workers": 2}).x)


def test_patience_ends_a_run_after_its_best_point_and_resumes_as_ended(tmp_path: Path) -> None:
    """The metric is best after round 2; with patience 3 rounds 3, 4 and 5 are worse, and the run ends after round 6."""
    s, made = setting("fedavg"), method("fedavg")
    target = simulate(s.problem, made, s.clients, rounds=2, **OPTIONS).x
    options = OPTIONS | {"evaluate": lambda x: {"log_loss": float((x - target).norm())}, "every": 1}
    options |= {"keep": "best", "metric": "log_loss", "patience": 3, "directory": tmp_path}
    ended = simulate(s.problem, made, s.clients, rounds=50, **options)
    assert ended.history[-1]["round"] == 6
    assert torch.equal(ended.x, target)
    again = simulate(s.problem, made, s.clients, rounds=50, **options)
    assert columns(again.history) == columns(ended.history)
    assert torch.equal(again.x, target)
    with pytest.raises(NestfedError, match=r"evaluation\.patience = 3 .* needs evaluation\.keep = 'best'"):
        Evaluation(patience=3)
