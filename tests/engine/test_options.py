"""The options of a run: wrong ones are rejected by name, weights and the kept point are what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nestfed import Minimize
from nestfed.algorithms import FedAvg, Scaffold
from nestfed.core import Clients, Metric, NestfedError
from nestfed.engine.local import Local
from nestfed.engine.loop import Plan, rounds, send
from nestfed.engine.options import Evaluation, Exchange, Execution, Gaussian
from nestfed.engine.record import read as read_record
from nestfed.engine.round import Rules, RunState
from nestfed.engine.run_directory import RunDirectory
from nestfed.engine.store import Tables
from nestfed.queries import Query, Question
from tests.support import answering, simulate

# --- wrong values ---


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Evaluation, {"every": 0}), (Evaluation, {"every": 2.0}), (Evaluation, {"every": True}),
        (Evaluation, {"keep": "first"}), (Evaluation, {"metric": 3}),
        (Exchange, {"count": -1}), (Exchange, {"count": 0.5}), (Exchange, {"count": True}),
        (Exchange, {"share": 0}), (Exchange, {"share": 1.1}), (Exchange, {"share": "half"}),
        (Exchange, {"share": float("nan")}), (Exchange, {"share": True}),
        (Exchange, {"failures": 1}), (Exchange, {"failures": -0.1}), (Exchange, {"failures": "some"}),
        (Exchange, {"weights": "size"}), (Exchange, {"encode": "int4"}), (Exchange, {"encode": 8}),
        (Exchange, {"reduce": "mode"}), (Exchange, {"reduce": None}), (Exchange, {"on_nan": "ignore"}),
        (Exchange, {"privacy": 1.0}),
        (Execution, {"mode": "fast"}), (Execution, {"workers": -1}), (Execution, {"workers": 1.0}),
        (Execution, {"compile": "yes"}), (Execution, {"device": "gpu 7"}), (Execution, {"device": None}),
        (Execution, {"precision": "fp8"}), (Execution, {"accumulate": 0}), (Execution, {"memory_gb": -1}),
        (Execution, {"memory_gb": float("inf")}), (Execution, {"memory_gb": "2"}),
        (Execution, {"checkpoint_every": 0}), (Execution, {"profile": 1}),
    ],
)  # fmt: skip
def test_a_wrong_value_is_rejected_by_name(kind: Any, options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(NestfedError, match=rf"^{kind.__name__.lower()}\.{name} must be .*, not .*\.$"):
        kind(**options)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"count": 2, "share": 0.5}, ("exchange.count", "exchange.share")),
        ({"weights": "examples", "reduce": "median"}, ("exchange.weights", "exchange.reduce")),
        ({"weights": "examples", "privacy": Gaussian(1.0, 1.0)}, ("exchange.weights", "privacy")),
        ({"reduce": "clip:1.0", "privacy": Gaussian(1.0, 1.0)}, ("exchange.reduce", "exchange.privacy")),
        ({"count": 2, "privacy": Gaussian(1.0, 1.0)}, ("exchange.count", "exchange.privacy")),
    ],
)
def test_what_does_not_go_together_is_rejected_by_name(options: dict[str, Any], names: tuple[str, ...]) -> None:
    with pytest.raises(NestfedError) as error:
        Exchange(**options)
    assert all(name in str(error.value) for name in names)


@pytest.mark.parametrize("options", [{"clip": 0.0}, {"noise": -1.0}, {"noise": float("inf")}, {"clip": "1"}])
def test_wrong_noise_is_rejected_by_name(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(NestfedError, match=rf"^exchange\.privacy\.{name} must be a finite number above 0"):
        Gaussian(**{"clip": 1.0, "noise": 1.0, **options})


# --- weights ---

SIZES = (1, 2, 7, 40)
TARGETS = torch.tensor([[1.0, -2.0], [0.5, 3.0], [-4.0, 0.25], [2.0, 1.0]], dtype=torch.float64)
ETA, Q, ROUNDS = 0.3, 2, 4


class Sized(Clients):
    """Client n minimises ½‖x − c_n‖² and holds SIZES[n] examples."""

    def __len__(self) -> int:
        return len(SIZES)

    def sample(self, n: int, t: int) -> Tensor:
        return TARGETS[n]

    def examples(self, n: int) -> int:
        return SIZES[n]


def quadratic() -> Minimize:
    return Minimize(lambda x, c: ((x - c) ** 2).sum() / 2, torch.tensor([3.0, -1.0], dtype=torch.float64))


@pytest.mark.parametrize("exchange", [{}, {"count": 2}, {"share": 0.6, "failures": 0.2}], ids=["all", "two", "some"])
@pytest.mark.parametrize("how", [{"mode": "loop"}, {"mode": "vmap"}, {"mode": "loop", "workers": 2}], ids=str)
def test_weights_by_examples_are_the_weighted_mean(exchange: dict[str, Any], how: dict[str, Any]) -> None:
    options: dict[str, Any] = {"rounds": ROUNDS, "q": Q, "seed": 3, "progress": False, **exchange, **how}
    found = simulate(quadratic(), FedAvg(ETA), Sized(), weights="examples", **options)
    x, drifts, losses = quadratic().x0, [], []
    for r in range(ROUNDS):
        who = answering(Exchange(**exchange), 3, len(SIZES), r)
        if not who:
            losses, drifts = [*losses, None], [*drifts, 0.0]
            continue
        w = torch.tensor([float(SIZES[n]) for n in who], dtype=torch.float64)
        w = w / w.sum()
        points, seen = [], []
        for n in who:  # two gradient steps each; the loss is the mean over the steps, before each of them
            y, before = x, []
            for _ in range(Q):
                before.append(((y - TARGETS[n]) ** 2).sum() / 2)
                y = y - ETA * (y - TARGETS[n])
            points.append(y)
            seen.append(sum(before) / Q)
        losses.append(float((w * torch.stack(seen)).sum()))  # type: ignore[arg-type]
        x = (w[:, None] * torch.stack(points)).sum(0)
        drifts.append(float((w * ((torch.stack(points) - x) ** 2).sum(1)).sum()))
    torch.testing.assert_close(found.x, x, rtol=1e-12, atol=1e-12)
    assert [r["loss"] for r in found.history] == pytest.approx(losses)
    assert [r["drift"] for r in found.history] == pytest.approx(drifts)
    equal = simulate(quadratic(), FedAvg(ETA), Sized(), **options)
    assert not torch.allclose(equal.x, x)


def test_a_server_that_counts_the_absent_counts_their_examples() -> None:
    """SCAFFOLD moves its c by |S|/N times the mean change: with weights, by the part of all examples."""
    options: dict[str, Any] = {"rounds": 1, "q": 1, "seed": 0, "count": 2, "progress": False, "mode": "loop"}
    who = answering(Exchange(count=2), 0, len(SIZES), 0)
    found = simulate(quadratic(), Scaffold(ETA), Sized(), weights="examples", **options)
    # After one step from x0, a client's own c is its gradient there, x0 − c_n; all were 0 before.
    total = sum((SIZES[n] * (quadratic().x0 - TARGETS[n]) for n in who), torch.zeros(2, dtype=torch.float64))
    torch.testing.assert_close(found.shared["c"], total / sum(SIZES), rtol=1e-12, atol=1e-12)


def test_clients_that_do_not_count_their_examples_cannot_be_weighted() -> None:
    class Uncounted(Sized):
        def examples(self, n: int) -> int:
            return 0 if n == 2 else 5

    with pytest.raises(NestfedError, match=r"exchange\.weights = 'examples' needs clients that count their examples"):
        simulate(quadratic(), FedAvg(ETA), Uncounted(), rounds=1, weights="examples", progress=False)


# --- the point that is kept ---


@pytest.mark.parametrize(
    ("metric", "best"), [("log_loss", 3), (Metric("cost", higher=False), 3), ("auroc", 1)], ids=str
)
def test_the_best_point_is_that_of_the_metrics_direction(metric: Any, best: int, tmp_path: Path) -> None:
    """The values at rounds 0 to 5, with a gap; a resumed run keeps the same point."""
    values = [0.5, 0.9, float("nan"), 0.1, 0.4, 0.3]
    points: list[Tensor] = []
    simulate(
        quadratic(), FedAvg(ETA), Sized(), rounds=5, q=Q, progress=False, evaluate=lambda x: points.append(x) or {}
    )

    def judge(x: Tensor) -> dict[str, float]:
        (round,) = (r for r, point in enumerate(points) if torch.equal(point, x))
        return {metric if isinstance(metric, str) else metric.name: values[round]}

    options: dict[str, Any] = {"q": Q, "evaluate": judge, "keep": "best", "metric": metric, "progress": False}
    assert torch.equal(simulate(quadratic(), FedAvg(ETA), Sized(), rounds=5, **options).x, points[best])
    for stop in (2, 4, 5):
        again = simulate(quadratic(), FedAvg(ETA), Sized(), rounds=stop, directory=tmp_path, **options)
    assert torch.equal(again.x, points[best])


def test_an_undeclared_metric_is_rejected_before_round_1() -> None:
    class Untouched(Sized):
        def sample(self, n: int, t: int) -> Tensor:
            raise AssertionError("a client was asked")

    def judge(x: Tensor) -> dict[str, float]:
        raise AssertionError("the model was evaluated")

    options: dict[str, Any] = {"rounds": 1, "evaluate": judge, "keep": "best", "progress": False}
    with pytest.raises(NestfedError, match=r"regret.*whether higher is better"):
        simulate(quadratic(), FedAvg(ETA), Untouched(), metric="regret", **options)
    with pytest.raises(NestfedError, match=r"evaluation\.keep = 'best' needs the name of a metric"):
        simulate(quadratic(), FedAvg(ETA), Untouched(), **options)


# --- interrupted between a round and its evaluation ---


def without_time(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in r.items() if k != "seconds"} for r in history]


@pytest.mark.parametrize("error", [NestfedError("no room"), ValueError("no room"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("method", [FedAvg(ETA), Scaffold(ETA)], ids=lambda m: m.name)
@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.filterwarnings("ignore:.* has no checkpoint")
def test_an_evaluation_that_fails_leaves_a_run_that_resumes_with_the_same_record(
    error: BaseException, method: Any, every: int, tmp_path: Path
) -> None:
    calls = {"good": 0}

    def judge(x: Tensor) -> dict[str, float]:
        return {"auroc": float(x.sum())}

    def failing(x: Tensor) -> dict[str, float]:
        calls["good"] += 1
        if calls["good"] == 4:  # after round 3
            raise error
        return judge(x)

    options: dict[str, Any] = {"q": Q, "rounds": 5, "checkpoint_every": every, "progress": False, "mode": "loop"}
    options |= {"keep": "best", "metric": "auroc"}
    whole = simulate(quadratic(), method, Sized(), evaluate=judge, **options)
    with pytest.raises(type(error)):
        simulate(quadratic(), method, Sized(), evaluate=failing, directory=tmp_path, **options)
    again = simulate(quadratic(), method, Sized(), evaluate=judge, directory=tmp_path, **options)
    assert without_time(again.history) == without_time(whole.history)
    assert without_time(read_record(tmp_path / "record.jsonl")) == without_time(whole.history)
    assert torch.equal(again.x, whole.x)


@pytest.mark.parametrize("stop", [0, 1, 3, 4])
def test_metrics_that_come_with_the_next_round_are_not_lost(stop: int, tmp_path: Path) -> None:
    """Where clients evaluate, round r's metrics come with round r + 1: the run ends before they arrive."""

    def run(folder: Path, until: int) -> list[dict[str, Any]]:
        problem, method, exchange, evaluation = quadratic(), FedAvg(ETA), Exchange(), Evaluation()
        template = method.init(problem, problem.x0)
        local = Local(problem, method, Sized(), Tables({}), 0, exchange)
        asked = (Question(Query("total", "a test", lambda rows: {}, {})),)
        rules = Rules(problem, method, exchange, 4)
        plan = Plan(
            rules,
            4,
            Q,
            0,
            evaluation,
            questions=asked,
            pool=lambda found: {"auroc": float(found[0]["total.training"]["x"])},
        )
        folder.mkdir(exist_ok=True)
        book = RunDirectory(folder, "", local, method=method, rounds=4, evaluation=evaluation, checkpoint_every=1)
        state = book.resume(RunState.start(method, template, 4), torch.device("cpu"))
        with book:
            loop = rounds(plan, state, book)
            work = next(loop, None)
            while work is not None and state.round < until:
                reply = local.run(work.order, work.shared)
                if work.order.questions:
                    reply.answers = {0: {"total.training": {"x": work.shared["x"].sum().numpy()}}}
                work = send(loop, reply)
        return without_time(read_record(folder / "record.jsonl"))

    whole = run(tmp_path / "whole", 5)
    assert [r["round"] for r in whole] == [0, 1, 2, 3, 4]
    assert all("auroc" in r for r in whole)
    cut = run(tmp_path / "cut", stop)
    assert len(cut) == (stop + 1 if stop else 0)
    assert not stop or "auroc" not in cut[-1]
    assert run(tmp_path / "cut", 5) == whole
