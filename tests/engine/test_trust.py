"""Nothing changes a result without a word: another problem in a directory, a schedule, a model that does not learn."""

from __future__ import annotations

import copy
import json
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nestfed import (
    AUPRC,
    FAFED,
    FCSGM,
    STEM,
    AccFCSGM,
    Balanced,
    Classify,
    Conditional,
    Evaluation,
    Examples,
    Exchange,
    Execution,
    FedAvg,
    FederatedAUC,
    Minimax,
    Minimize,
    Paced,
    Pairs,
    WarmUp,
    simulate,
)
from nestfed.core import NestfedError, Server
from nestfed.engine import probe
from nestfed.problems.base import Ball, Box
from nestfed.study.lr_find import lr_find

rng = np.random.default_rng(0)
X = torch.tensor(rng.normal(size=(60, 5)), dtype=torch.float32)
Y = (X[:, 0] + 0.3 * torch.tensor(rng.normal(size=60)) > 0).float()


def linear(width: int = 5) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(width, 1), nn.Flatten(0))


def logistic(model: Any, batch: Any) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(batch[0]), batch[1])


def squared(model: Any, batch: Any) -> Tensor:
    return ((model(batch[0]) - batch[1]) ** 2).mean()


def clients(x: Tensor = X, y: Tensor = Y, batch: int = 6, count: int = 3) -> Examples:
    return Examples.of({f"site {n}": (x[n::count], y[n::count]) for n in range(count)}, batch=batch)


def run(f: Callable[..., Tensor] = logistic, model: Any = None, some: Any = None, **options: Any) -> Any:
    options = {"rounds": 2, "q": 2, "progress": False, **options}
    return simulate(Minimize(f, model or linear()), options.pop("method", FedAvg(0.1)), some or clients(), **options)


# --- A run directory knows its problem


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"f": squared}, "all gradients at x0 have changed"),
        ({"some": clients(batch=5)}, r"site 0 draws batches of another shape: \[\(5, 5\), \(5,\)\] instead of"),
        ({"some": clients(X + 0.1)}, "site 0 draws other data"),
        ({"some": clients(X, 1 - Y)}, "site 0 draws other data"),
        ({"model": nn.Sequential(nn.Linear(5, 1, bias=False), nn.Flatten(0))}, "parameters differ .0.bias is missing"),
    ],
)
def test_a_directory_rejects_another_problem(change: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    first = run(directory=tmp_path)
    with pytest.raises(NestfedError, match=sentence):
        run(directory=tmp_path, rounds=4, **change)
    again = run(directory=tmp_path, rounds=4)
    assert again.history[: len(first.history)] == first.history


def zero() -> nn.Module:
    model = linear()
    for p in model.parameters():
        nn.init.zeros_(p)
    return model


def pull(model: Any) -> Tensor:
    return 10 * sum((p**2).sum() for p in model.parameters())


MANY = {f"site {n}": (X[n::8], Y[n::8]) for n in range(8)}
LAST = {**MANY, "site 7": (X[7::8] + 5, Y[7::8])}


def minimize(**options: Any) -> Minimize:
    return Minimize(logistic, zero(), **options)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"problem": minimize(penalty=pull)}, "all gradients at a point near x0 have changed"),
        ({"problem": minimize(domain=Ball(0.05))}, "the domain differs"),
        ({"problem": minimize(domain=Box(-100.0, 100.0))}, "the domain differs"),
        ({"clients": Examples.of(LAST, batch=4)}, "client site 7 draws other data"),
        ({"clients": Paced(Examples.of(MANY, batch=4), lambda n, t, q: 1 if n == 5 else q)},
         "client site 5 takes 1 local steps in round 1 instead of 2"),
        ({"execution": Execution(precision="bf16")}, "execution.precision is 'bf16' instead of 'full'"),
        ({"problem": Minimize(logistic, zero().double()),
          "clients": Examples.of({k: (x.double(), y.double()) for k, (x, y) in MANY.items()}, batch=4)},
         "parameters are float64 instead of float32"),
        ({"x0": torch.full((6,), 0.1)}, "the starting point differs"),
        ({"q": 3}, "another experiment: q is 3 instead of 2"),
        ({"method": FedAvg(0.2)}, r"the method is FedAvg\(eta=0.2\) instead of FedAvg\(eta=0.1\)"),
        ({"exchange": Exchange(share=0.5)}, "exchange.share is 0.5 instead of 1.0"),
        ({"warm_up": WarmUp(1, FedAvg(0.1))}, "the warm-up is 1 rounds of FedAvg.* instead of none"),
        ({"evaluate": lambda m: {"b": 1.0}}, "The evaluation returns b, but the record in .* has a"),
        ({"evaluate": lambda m: {"a": 2.0 + float(m[0].bias.detach())}}, "another evaluation: after round 2 it finds a = "),
    ],
)  # fmt: skip
def test_a_directory_rejects_what_shows_neither_at_x0_nor_in_a_few_clients(
    change: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    """Nothing is trained before the error."""
    given: dict[str, Any] = {
        "problem": minimize(), "method": FedAvg(0.1), "clients": Examples.of(MANY, batch=4), "rounds": 2, "q": 2,
        "evaluate": lambda m: {"a": 1.0 + float(m[0].bias.detach())}, "directory": tmp_path, "progress": False,
    }  # fmt: skip
    simulate(**given)
    before = (tmp_path / "record.jsonl").read_bytes()
    for rounds in (2, 4):
        with pytest.raises(NestfedError, match=sentence):
            simulate(**{**given, "rounds": rounds, **change})
        assert (tmp_path / "record.jsonl").read_bytes() == before
    longer = simulate(**{**given, "rounds": 4, "evaluation": Evaluation(every=2)})
    assert torch.equal(longer.x, simulate(**{**given, "rounds": 4, "directory": None}).x)


def test_another_warm_up_is_named(tmp_path: Path) -> None:
    given: dict[str, Any] = {"rounds": 4, "directory": tmp_path}
    run(warm_up=WarmUp(2, FedAvg(0.1)), **given)
    for warm_up, sentence in (
        (WarmUp(1, FedAvg(0.1)), "the warm-up is 1 rounds of .* instead of 2 rounds of"),
        (WarmUp(2, FedAvg(0.3)), r"in the warm-up, the method is FedAvg\(eta=0.3\) instead of"),
        (None, "the warm-up is none instead of 2 rounds"),
    ):
        with pytest.raises(NestfedError, match=sentence):
            run(warm_up=warm_up, **given)


def test_a_random_evaluation_resumes(tmp_path: Path) -> None:
    """Its values say nothing; its names do."""
    run(directory=tmp_path, evaluate=lambda m: {"a": rng.normal()})
    assert len(run(directory=tmp_path, rounds=4, evaluate=lambda m: {"a": rng.normal()}).history) == 5
    with pytest.raises(NestfedError, match="returns b, but"):
        run(directory=tmp_path, rounds=6, evaluate=lambda m: {"b": rng.normal()})


def test_an_undefined_metric_resumes(tmp_path: Path) -> None:
    def judge(model: Any) -> dict[str, float]:
        return {"a": float("nan"), "b": 1.0}

    run(directory=tmp_path, evaluate=judge)
    assert len(run(directory=tmp_path, rounds=4, evaluate=judge).history) == 5


def test_a_probe_of_an_older_version_is_compared_as_far_as_it_goes(tmp_path: Path) -> None:
    run(directory=tmp_path)
    file = tmp_path / probe.FILE
    held = json.loads(file.read_text())
    old = {k: held[k] for k in ("parameters", "batches", "gradients", "nestfed")}
    file.write_text(json.dumps(old))
    run(directory=tmp_path, rounds=3)
    with pytest.raises(NestfedError, match="all gradients at x0"):
        run(directory=tmp_path, rounds=4, f=squared)
    problem, some = Minimize(logistic, linear()), clients().seeded(0)
    now = probe.Probe.of(problem, some, 0, problem.x0)
    assert {k: asdict(now)[k] for k in ("parameters", "gradients")} == {
        "parameters": {k: tuple(v) for k, v in old["parameters"].items()}, "gradients": old["gradients"],
    }  # fmt: skip


def test_a_point_where_the_objective_fails_is_left_out(tmp_path: Path) -> None:
    """The probe looks at a point that no run visits; an error there is no error of the run."""

    def f(model: Any, batch: Any) -> Tensor:
        if float(model[0].weight.detach().abs().max()) > 0.9:
            raise ValueError("too large")
        return logistic(model, batch)

    def small() -> nn.Module:
        with torch.no_grad():
            model = linear()
            model[0].weight.fill_(0.6)
        return model

    for rounds in (1, 2):
        run(f, small(), directory=tmp_path, rounds=rounds, method=FedAvg(0.001), execution=Execution(mode="loop"))
    assert json.loads((tmp_path / probe.FILE).read_text())["moved"] == {}


def test_drawing_stops_if_it_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "PATIENCE", -1.0)
    problem, some = minimize(), Examples.of(MANY, batch=4).seeded(0)
    few = probe.Probe.of(problem, some, 0, problem.x0)
    assert list(few.batches) == ["site 0", "site 2", "site 4", "site 6"]
    monkeypatch.undo()
    every = probe.Probe.of(problem, some, 0, problem.x0)
    assert len(every.batches) == 8
    assert few.difference(every) == every.difference(few) == ""


def test_a_run_can_be_extended_on_any_engine(tmp_path: Path) -> None:
    whole = run(rounds=6, execution=Execution(mode="loop"))
    run(directory=tmp_path, execution=Execution(mode="vmap"))
    run(directory=tmp_path, rounds=4, execution=Execution(mode="loop", workers=2))
    last = run(directory=tmp_path, rounds=6, execution=Execution(mode="loop"))
    torch.testing.assert_close(last.x, whole.x, rtol=1e-4, atol=1e-6)


def test_one_flipped_unit_is_not_another_problem(tmp_path: Path) -> None:
    """A ReLU near 0 flips with the processor and changes one client's gradient; the run is not rejected for it."""
    found = probe.Probe.of(Minimize(logistic, linear()), clients().seeded(0), 0, Minimize(logistic, linear()).x0)
    moved = {name: list(g) for name, g in found.gradients.items()}
    moved["site 0"] = [1.03 * v for v in moved["site 0"]]
    assert found.difference(probe.Probe(found.parameters, found.batches, moved)) == ""
    every = {name: [1.03 * v for v in g] for name, g in found.gradients.items()}
    assert "objective" in found.difference(probe.Probe(found.parameters, found.batches, every))


def test_another_version_of_the_library_warns(tmp_path: Path) -> None:
    run(directory=tmp_path)
    held = json.loads((tmp_path / probe.FILE).read_text())
    (tmp_path / probe.FILE).write_text(json.dumps({**held, "nestfed": "0.1.9"}))
    with pytest.warns(UserWarning, match="was started with nestfed 0.1.9"):
        run(directory=tmp_path, rounds=3)


def test_other_metrics_are_rejected(tmp_path: Path) -> None:
    run(directory=tmp_path, evaluate=lambda m: {"ap": 0.5})
    with pytest.raises(NestfedError, match=r"returns auroc, but the record in .* has ap"):
        run(directory=tmp_path, rounds=4, evaluate=lambda m: {"auroc": 0.5})


# --- Schedules


def test_any_function_of_t_resumes(tmp_path: Path) -> None:
    whole = run(rounds=4, method=FedAvg(lambda t: 0.1 / (1 + t)))
    run(directory=tmp_path, method=FedAvg(lambda t: 0.1 / (1 + t)))
    split = run(directory=tmp_path, rounds=4, method=FedAvg(lambda t: 0.1 / (1 + t)))
    assert torch.equal(split.x, whole.x)
    with pytest.raises(NestfedError):
        run(directory=tmp_path, rounds=6, method=FedAvg(lambda t: 0.2 / (1 + t)))


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        (FedAvg(lambda t: 0.1 - 0.01 * t), r"eta must be a finite number above 0, not -0.09, .* at iteration 19"),
        (FedAvg(lambda t: 0.1 if t < 13 else float("nan")), "eta is nan at iteration 13"),
        (FedAvg(lambda t: 1 / (5 - t) ** 2), "fails at iteration 5: ZeroDivisionError"),
        (AccFCSGM(0.1, lambda t: 0.1 * t), r"beta must be in \(0, 1\], not 1.9, .* at iteration 19"),
    ],
)
def test_a_schedule_that_leaves_its_range_is_rejected_before_the_start(method: Any, sentence: str) -> None:
    def untouched(model: Any, batch: Any) -> Tensor:
        raise AssertionError("the run has started")

    with pytest.raises(NestfedError, match=sentence):
        run(untouched, rounds=10, method=method)


def test_a_weight_need_not_be_defined_at_0() -> None:
    run(rounds=3, method=AccFCSGM(0.1, lambda t: 1 / t))


# --- Randomness


class Noisy(nn.Module):
    """One way to draw random numbers inside a module."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.inner = kind, nn.Linear(5, 8)
        self.out = nn.Linear(8, 1)
        if kind == "lstm":
            self.lstm = nn.LSTM(8, 8, num_layers=2, dropout=0.5, batch_first=True)
        if kind == "attention":
            self.attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
        if kind == "encoder":
            self.encoder = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.5, batch_first=True)
        if kind == "dropout2d":
            self.drop = nn.Dropout2d(0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.inner(x))
        if self.kind == "lstm":
            h = self.lstm(h[:, None].expand(-1, 3, -1))[0][:, -1]
        elif self.kind == "attention":
            sequence = h[:, None].expand(-1, 3, -1)
            h = self.attention(sequence, sequence, sequence)[0].mean(1)
        elif self.kind == "encoder":
            h = self.encoder(h[:, None].expand(-1, 3, -1)).mean(1)
        elif self.kind == "dropout2d":
            h = self.drop(h[:, :, None, None]).flatten(1)
        elif self.kind == "functional":
            h = F.dropout(h, 0.5, self.training)
        elif self.kind == "sdpa":
            sequence = h[:, None].expand(-1, 3, -1)
            p = 0.5 if self.training else 0.0
            h = F.scaled_dot_product_attention(sequence, sequence, sequence, dropout_p=p).mean(1)
        elif self.kind == "rand" and self.training:
            h = h + 0.3 * torch.randn_like(h) * torch.rand(1)
        return self.out(h).flatten()


def noisy(kind: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return Noisy(kind)


KINDS = ["lstm", "attention", "encoder", "dropout2d", "functional", "sdpa", "rand"]


@pytest.mark.parametrize("kind", KINDS)
def test_all_randomness_is_keyed(kind: str) -> None:
    def trained(seed: int = 0, **execution: Any) -> Tensor:
        torch.manual_seed(int(torch.randint(1000, ()).item()))  # the global generator must not matter
        return run(model=noisy(kind), seed=seed, execution=Execution(**execution)).x

    one = trained(mode="loop", workers=1)
    assert torch.equal(one, trained(mode="loop", workers=1))
    torch.testing.assert_close(one, trained(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(one, trained(mode="loop", workers=2), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(one, trained(seed=1, mode="loop"))


@pytest.mark.parametrize("kind", KINDS)
def test_both_points_of_a_correction_see_the_same_numbers(kind: str) -> None:
    problem, some = Minimize(logistic, noisy(kind)), clients().seeded(0)
    probe.inspect(problem, some, 0, [0, 1])
    first = problem.grad(problem.x0, probe.first_batch(problem, some, 0, 0))
    torch.rand(7)
    assert torch.equal(first, problem.grad(problem.x0, probe.first_batch(problem, some, 0, 0)))
    assert not torch.allclose(first, problem.grad(problem.x0, probe.first_batch(problem, some, 1, 0)))


def test_what_cannot_be_vectorised_is_not(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="nestfed"):
        run(model=noisy("rand"))
    assert "one after another" in caplog.text
    with pytest.raises(NestfedError, match="cannot be vectorised over clients: use mode = 'loop'"):
        run(model=noisy("rand"), execution=Execution(mode="vmap"))
    run(model=noisy("functional"), execution=Execution(mode="vmap"))


def test_the_global_generator_is_left_alone() -> None:
    torch.manual_seed(11)
    before = torch.get_rng_state()
    run(model=noisy("rand"))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("name", ["numpy", "random"])
@pytest.mark.parametrize("where", ["module", "f", "penalty"])
def test_numbers_that_no_key_seeds_are_rejected(name: str, where: str) -> None:
    draw = {"numpy": lambda: float(np.random.rand()), "random": random.random}[name]

    class Shaken(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).flatten() * (draw() if where == "module" else 1.0)

    def f(model: Any, batch: Any) -> Tensor:
        return logistic(model, batch) * (draw() if where == "f" else 1.0)

    penalty = (lambda model: model.weight.square().sum() * draw()) if where == "penalty" else None
    for _ in range(3):  # a generator changes more of its state at some draws than at others
        with pytest.raises(NestfedError, match=f"draws from the global generator of {name}, which does not depend on"):
            simulate(Minimize(f, Shaken(5, 1), penalty=penalty), FedAvg(0.1), clients(), rounds=1)


# --- A model that does not learn


OUTER = linear()


@pytest.mark.parametrize("mode", ["auto", "vmap", "loop"])
@pytest.mark.parametrize(
    "f",
    [
        lambda model, batch: logistic(OUTER, batch),
        lambda model, batch: logistic(lambda x: model(x).detach(), batch),
        lambda model, batch: ((model(batch[0]) > 0).float() - batch[1]).abs().mean(),
    ],
    ids=["another network", "detached", "not differentiable"],
)
def test_a_model_that_does_not_learn_is_rejected(f: Any, mode: str) -> None:
    with pytest.raises(NestfedError, match="does not depend on the model's parameters, so nothing would be trained"):
        run(f, execution=Execution(mode=mode))


@pytest.mark.parametrize("kind", ["minimize", "conditional", "minimax"])
def test_a_model_that_only_its_penalty_trains_is_rejected(kind: str) -> None:
    def penalty(model: Any) -> Tensor:
        return sum((p.square().sum() for p in model.parameters()), torch.zeros(()))

    def problem(judged: Any) -> Any:
        if kind == "minimize":
            return Minimize(lambda m, b: logistic(judged or m, b), linear(), penalty=penalty)
        if kind == "conditional":
            g = lambda m, outer, inner: (judged or m)(inner[0].flatten(0, 1)).view(*inner[0].shape[:2])  # noqa: E731
            return Conditional(lambda u, outer: u, g, linear(), penalty=penalty)
        return Minimax(lambda m, w, b: w.sum() * logistic(judged or m, b), linear(), torch.ones(1), penalty=penalty)

    some = Pairs.of({"a": (X, Y)}) if kind == "conditional" else clients()
    with pytest.raises(NestfedError, match="nothing would be trained"):
        probe.inspect(problem(OUTER), some, 0, [0])
    probe.inspect(right := problem(None), some, 0, [0])
    batch = probe.first_batch(right, some, 0, 0)  # in a gradient the penalty counts
    grad = right.grads(right.x0, right.w0, batch)[0] if kind == "minimax" else right.grad(right.x0, batch)
    alone = copy.copy(right)
    alone.penalty = None
    plain = alone.grads(alone.x0, alone.w0, batch)[0] if kind == "minimax" else alone.grad(alone.x0, batch)
    torch.testing.assert_close(grad - plain, 2 * right.x0)


def test_a_gradient_of_zero_is_not_rejected() -> None:
    result = run(lambda model, batch: 0 * model(batch[0]).sum())
    torch.testing.assert_close(result.x, Minimize(logistic, linear()).x0)


def test_a_batch_that_happens_to_use_no_parameter_is_not_rejected() -> None:
    def f(model: Any, batch: Any) -> Tensor:
        return logistic(model, batch) if batch[1].sum() > 3 else torch.zeros(())

    some = Examples.of({"none": (X[Y == 0], Y[Y == 0]), "all": (X[Y == 1], Y[Y == 1])}, batch=6)
    probe.inspect(Minimize(f, linear()), some.seeded(0), 0, [0, 1])
    with pytest.raises(NestfedError, match="nothing would be trained"):
        probe.inspect(Minimize(f, linear()), some.seeded(0), 0, [0])


# --- Frozen parameters


@pytest.mark.parametrize("mode", ["vmap", "loop"])
def test_frozen_parameters_stay_and_are_not_sent(mode: str) -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1), nn.Flatten(0))
    model[0].requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    result = run(model=model, execution=Execution(mode=mode), evaluate=lambda m: {"out": float(m(X).sum())})
    after = result.model.state_dict()
    assert torch.equal(after["0.weight"], before["0.weight"])
    assert not torch.equal(after["2.weight"], before["2.weight"])
    assert result.x.numel() == 5
    assert result["bytes_up"] == 2 * 3 * 5 * 4  # rounds, clients, numbers, bytes
    assert not result.model[0].weight.requires_grad
    probing = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))
    probing.load_state_dict({"0.weight": before["2.weight"], "0.bias": before["2.bias"]})
    features = torch.tanh(F.linear(X, before["0.weight"], before["0.bias"]))
    same = run(model=probing, some=clients(features), execution=Execution(mode=mode))
    torch.testing.assert_close(result.x, same.x, rtol=1e-5, atol=1e-6)
    assert result["out"] == pytest.approx(result.model(X).sum().item(), rel=1e-5)


def test_a_model_without_trainable_parameters_is_rejected() -> None:
    with pytest.raises(NestfedError, match=r"Linear has no parameters to train; all are frozen"):
        Minimize(logistic, nn.Linear(5, 1).requires_grad_(False))


# --- The model in f is the user's module


class Named(nn.Module):
    """A module with an attribute, a method and a part that f uses."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.body, self.head = 2.0, nn.Linear(5, 4), nn.Linear(4, 1)

    def features(self, x: Tensor) -> Tensor:
        return torch.tanh(self.body(x)) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x)).flatten()


@pytest.mark.parametrize("mode", ["vmap", "loop"])
def test_the_model_is_the_users_module(mode: str) -> None:
    seen = []

    def f(model: Named, batch: Any) -> Tensor:
        assert isinstance(model, Named)
        assert model.scale == 2.0
        scores = model.head(model.features(batch[0])).flatten()
        return F.binary_cross_entropy_with_logits(scores, batch[1])

    def judge(model: Any) -> dict[str, float]:
        assert isinstance(model, Named)
        assert not model.training
        seen.append((model, model(X).detach()))
        return {"norm": sum(float(p.norm()) for p in model.parameters())}

    with torch.random.fork_rng():
        torch.manual_seed(2)
        module = Named()
    by_parts = run(f, copy.deepcopy(module), execution=Execution(mode=mode), evaluate=judge)
    whole = run(logistic, copy.deepcopy(module), execution=Execution(mode=mode))
    torch.testing.assert_close(by_parts.x, whole.x)
    for model, outputs in seen:  # a model that the user keeps does not change with later rounds
        assert torch.equal(model(X), outputs)
    assert not torch.equal(seen[0][1], seen[-1][1])


@pytest.mark.parametrize("mode", ["vmap", "loop"])
def test_a_penalty_is_one_line(mode: str) -> None:
    def penalised(model: Any, batch: Any) -> Tensor:
        return logistic(model, batch) + 0.1 * sum(p.square().sum() for p in model.parameters())

    one = run(penalised, execution=Execution(mode=mode))
    problem = Minimize(
        logistic, linear(), penalty=lambda model: 0.1 * sum(p.square().sum() for p in model.parameters())
    )
    two = simulate(problem, FedAvg(0.1), clients(), rounds=2, q=2, progress=False, execution=Execution(mode=mode))
    torch.testing.assert_close(one.x, two.x)
    x = linear()[0]
    by_hand = 0.2 * torch.cat([x.weight.flatten(), x.bias]).detach()
    batch = clients().seeded(0).sample(0, 0)
    difference = problem.grad(problem.x0, batch) - Minimize(logistic, linear()).grad(problem.x0, batch)
    torch.testing.assert_close(difference, by_hand, rtol=1e-4, atol=1e-6)


def test_g_gets_the_module_too() -> None:
    some = Pairs.of({f"site {n}": (X[n::3], Y[n::3].long()) for n in range(3)}, outer=2, inner=6)

    class Checked(AUPRC):
        def bind(self, x: Tensor, *, train: bool = False) -> Any:
            model = super().bind(x, train=train)
            assert isinstance(model, nn.Sequential)
            return model

    simulate(Checked(linear()), AccFCSGM(0.1), some, rounds=1, progress=False, evaluate=lambda m: {"a": len(list(m))})


# --- Fair seconds


@pytest.mark.long
def test_the_first_run_of_a_process_is_not_charged_torchs_imports() -> None:
    """In a new process, the first of two equal runs takes about as long as the second."""
    code = """
import torch
from nestfed import Examples, Execution, FedAvg, Minimize, simulate
x = torch.linspace(-1, 1, 60).reshape(12, 5)
clients = Examples.of({"a": (x,), "b": (x + 1,)}, batch=6)
problem = Minimize(lambda model, batch: model(batch[0]).square().mean(), torch.nn.Linear(5, 1))
for _ in range(2):
    run = simulate(problem, FedAvg(0.1), clients, rounds=3, q=5, progress=False, execution=Execution(mode="vmap"))
    print(run["seconds"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second = map(float, done.stdout.split())
    assert first < second + 0.5  # torch's imports take more than a second


# --- Clipping


@pytest.mark.parametrize("method", [AccFCSGM(1e-4, 0.01), STEM(1e-4, 0.01)], ids=lambda m: m.name)
def test_variance_reduction_survives_clipping(method: Any) -> None:
    """F(x) = E ½‖x − ξ‖², whose gradient is x − E ξ, with gradients of a batch twice as long as the clipping norm.

    The noise cancels in a correction, so the estimate comes close to the true gradient. If each gradient is clipped, it
    can only come close to the mean of the clipped ones, which is far shorter.
    """
    d, generator = 10, torch.Generator().manual_seed(0)
    noise = 3 * torch.randn(4000, d, generator=generator, dtype=torch.float64)
    noise -= noise.mean(0) - 0.25
    start = torch.zeros(d, dtype=torch.float64)
    problem = Minimize(lambda x, batch: 0.5 * (x - batch[0]).square().sum(1).mean(), start, clip=1.0)
    some = Examples((noise,), [np.arange(4000)], batch=20)
    errors: list[float] = []
    estimator = method.shared[1]

    def measure(shared: Any, private: Any) -> dict[str, float]:
        errors.append(float((shared[estimator] - (shared["x"] - 0.25)).norm()))
        return {}

    simulate(problem, method, some, rounds=60, q=10, measure=measure, progress=False)
    batches = -noise.view(200, 20, d).mean(1)
    lengths = batches.norm(dim=1, keepdim=True)
    assert (lengths > 1).double().mean() > 0.95
    separately = (batches / lengths.clamp_min(1.0)).mean(0) + 0.25  # the best if each gradient is clipped
    assert np.mean(errors[40:]) < 0.6 * float(separately.norm())


def test_an_estimate_is_never_longer_than_the_clipping_norm() -> None:
    problem = Minimize(logistic, linear(), clip=0.01)
    for method in (AccFCSGM(0.1), STEM(0.1), FAFED(0.1), FCSGM(0.1)):
        shared = simulate(problem, method, clients(), rounds=3, q=2, progress=False).shared
        assert shared[method.shared[1]].norm() <= 0.01 * (1 + 1e-5)


# --- One clear sentence each


class Worded:
    """Clients whose batches contain text."""

    def __len__(self) -> int:
        return 2

    def sample(self, n: int, t: int) -> Any:
        return X[:4], ["a", "b"]


class Failing(Examples):
    """Clients whose second one cannot be read after the first iteration."""

    def indices(self, n: int, t: int) -> np.ndarray:
        if n == 1 and t:
            raise OSError("disk on fire")
        return super().indices(n, t)


class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """A dataset without a length."""

    def __iter__(self) -> Any:
        yield X[0], 0


class Renaming(Server):
    """Returns another field than it got."""

    def update(self, state: Any, old: Any, mean: Any, fraction: float) -> Any:
        return state, {"y": mean["x"]}


@dataclass(frozen=True)
class Renamed(FedAvg):
    """FedAvg with that server."""

    name = "renamed"

    @property
    def server(self) -> Server:
        return Renaming()


@dataclass(frozen=True)
class Undeclared(FedAvg):
    """Declares a field that its state lacks."""

    name = "undeclared"
    shared = ("x", "z")


@dataclass(frozen=True)
class Short(FedAvg):
    """Sends half of its point."""

    name = "short"

    def send(self, s: Any, t: int) -> Any:
        return s._replace(x=s.x[:2])


class Arrays(Worded):
    """Clients whose batches are arrays of numpy."""

    def sample(self, n: int, t: int) -> Any:
        return X[:4].numpy(), Y[:4].numpy()


def returning(hook: str, value: Any) -> FedAvg:
    """Return FedAvg with a hook that returns something else."""
    kind = type("Wrong", (FedAvg,), {"name": "wrong", hook: lambda self, *arguments: value})
    return dataclass(frozen=True)(kind)(0.1)


def nan(model: Any, batch: Any) -> Tensor:
    return logistic(model, batch) * torch.log(torch.zeros(()))


LOOP = Execution(mode="loop", workers=2)
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "a list": (lambda: run(some=[(X, Y)]), r"list has no sample\(n, t\).*for arrays use Examples.of"),
    "a name": (lambda: run(method="fedavg"), r"^The method must be an object such as FedAvg\(eta=0.1\), not 'fedavg'"),
    "a class": (lambda: run(method=FedAvg), r"^The method must be an object such as FedAvg\(eta=0.1\), not <class"),
    "a dictionary": (lambda: run(exchange={"share": 0.5}), r"^exchange must be an object such as Exchange\(\), not {"),
    "a seed": (lambda: run(seed="a"), "^seed must be a whole number of at least 0, not 'a'"),
    "a device": (lambda: run(execution=Execution(device="xpu")), "^execution.device = 'xpu' is not available here: "),
    "no batch": (lambda: run(some=Examples.of({"a": (X, Y)}, batch=0)), "^A batch size must be .* at least 1, not 0"),
    "plain batches": (
        lambda: simulate(AUPRC(linear()), FCSGM(0.1), clients(), rounds=1),
        "^auprc needs batches .outer, inner. from Pairs clients",
    ),
    "pairs": (
        lambda: simulate(Classify(linear()), FedAvg(0.1), Pairs.of({"a": (X, Y)}), rounds=1),
        "^classify needs batches .x, y. from Examples clients",
    ),
    "labels": (lambda: Balanced.of({"a": (X, Y + 1)}), "^Balanced needs labels 0 and 1, not 2"),
    "no rounds to try": (
        lambda: lr_find(FederatedAUC(rounds=0), [(X, Y)]),
        "^rounds must be a whole number of at least 1, not 0",
    ),
    "no rounds": (lambda: FederatedAUC(rounds=0).fit([(X, Y)]), "^rounds must be a whole number of at least 1, not 0"),
    "text": (lambda: run(some=Worded()), "The batch of client 0 contains 'a': sample must return tensors"),
    "names": (lambda: Examples.of({"a": (np.array(["x", "y"]),)}), "Clients hold arrays of numbers, but got ndarray"),
    "a stream": (lambda: FederatedAUC(rounds=1).fit([Stream(), Stream()]), "without a length .* IterableDataset"),
    "a float": (lambda: run(evaluate=lambda m: 0.5), r"evaluate must return named numbers such as .*, not 0.5\."),
    "a word": (lambda: run(measure=lambda s, p: {"a": "b"}), "measure must return named numbers"),
    "a column": (lambda: run(evaluate=lambda m: {"loss": 1.0}), "'loss', which is a column of the record"),
    "a server": (lambda: run(method=Renamed(0.1)), "The server of renamed returns the fields y, but it shares x"),
    "a field": (lambda: run(method=Undeclared(0.1)), "undeclared declares the field 'z', but its state has x"),
    "short": (
        lambda: run(method=Short(0.1)),
        r"^short sends x with shape \(2,\), but its shared field x has shape \(6,\)",
    ),
    "step": (
        lambda: run(method=returning("step", torch.zeros(6))),
        r"^The step of wrong must return its state, a \w+, but it returns a Tensor\.",
    ),
    "send": (
        lambda: run(method=returning("send", {"x": torch.zeros(6)})),
        r"^The send of wrong must return its state, a \w+, but it returns a dict\.",
    ),
    "receive": (lambda: run(method=returning("receive", None)), r"^The receive of wrong .* it returns a NoneType\."),
    "f's float": (lambda: run(lambda m, b: 1.0), r"^f must return one number as a tensor, not a float\."),
    "the same metric": (
        lambda: run(evaluate=lambda m: {"a": 1.0}, measure=lambda s, p: {"a": 2.0}),
        r"^evaluate and measure both return 'a': rename one of them\.",
    ),
    "arrays": (
        lambda: run(some=Arrays()),
        "^The batch of client 0 contains an object of type ndarray: sample must return tensors",
    ),
    "float64": (
        lambda: run(some=clients(X.double())),
        r"^The batch of client site 0 has torch.float64, but the model's parameters are torch.float32: convert the data",
    ),
    "NaN": (
        lambda: run(nan),
        "The loss is infinite, NaN or too large at client site 0, iteration 0 .* in f or the model",
    ),
    "a worker": (
        lambda: run(some=Failing.of({"a": (X, Y), "b": (X, Y)}, batch=4), execution=LOOP),
        r"^The clients' sample failed at client b in round 1: OSError: disk on fire$",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_one_clear_sentence(case: str) -> None:
    call, sentence = WRONG[case]
    with pytest.raises(NestfedError, match=sentence) as error:
        call()
    assert "\n" not in str(error.value)


def test_numpy_arrays_are_accepted() -> None:
    parts = [np.arange(n, 60, 3) for n in range(3)]
    arrays = Examples((X.numpy(), Y.numpy()), parts, batch=6)  # type: ignore[arg-type]
    assert torch.equal(run(some=arrays).x, run(some=Examples((X, Y), parts, batch=6)).x)
    table = Examples.of({"a": (pd.DataFrame(X.numpy()), pd.Series(Y.numpy(), index=range(100, 160)))}, batch=6)
    assert torch.equal(run(some=table).x, run(some=Examples.of({"a": (X, Y)}, batch=6)).x)
