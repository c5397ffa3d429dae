"""`compare`, `tune` and `sweep` on one's own objects find what `simulate` finds, and resume and report as files do."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nestfed import (  # fmt: skip
    AUPRC,
    FCSGM,
    Classify,
    Evaluation,
    Examples,
    Exchange,
    FedAvg,
    Metric,
    Pairs,
    compare,
    held_out,
    simulate,
    sweep,
    tune,
)
from nestfed.core import NestfedError
from nestfed.experiment.compare import Comparison
from nestfed.experiment.run import TUNING_SEED

generator = torch.Generator().manual_seed(0)
X = torch.randn(240, 5, generator=generator)
Y = (X @ torch.tensor([2.0, -1.0, 0.5, 0.0, 0.0]) + 0.5 * torch.randn(240, generator=generator) > 0.8).long()
PARTS = {f"site {n}": (X[n:120:3], Y[n:120:3]) for n in range(3)}
EXAMPLES, PAIRS = Examples.of(PARTS, batch=8), Pairs.of(PARTS, outer=2, inner=4)
VALIDATE, EVALUATE = held_out(X[120:180], Y[120:180]), held_out(X[180:], Y[180:])


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 1), nn.Flatten(0))


ENTROPY, RANKING = Classify(linear()), AUPRC(linear())
COMMON: dict[str, Any] = {"rounds": 3, "q": 2, "metric": "ap", "evaluate": EVALUATE, "validate": VALIDATE, "workers": 1}


def test_a_comparison_is_that_of_simulate(tmp_path: Path) -> None:
    """Every reported value is that of `simulate` with the chosen step, and the step is the best of trials by hand."""
    etas = (0.001, 1.0, 0.1)
    table = compare(ENTROPY, {"fedavg": FedAvg, "fixed": FedAvg(0.5)}, EXAMPLES, grids={"fedavg.eta": etas}, seeds=2, extend=0, **COMMON)  # fmt: skip
    judged = {
        eta: simulate(ENTROPY, FedAvg(eta), EXAMPLES, rounds=3, q=2, seed=TUNING_SEED, evaluate=VALIDATE)["ap"]
        for eta in etas
    }
    chosen = table["fedavg"].chosen["algorithm.eta"]
    assert judged[chosen] >= 0.99 * max(judged.values())
    assert judged[0.001] < 0.99 * max(judged.values()), "a wrong choice would show"
    for method, eta in (("fedavg", chosen), ("fixed", 0.5)):
        runs = [simulate(ENTROPY, FedAvg(eta), EXAMPLES, rounds=3, q=2, seed=s, evaluate=EVALUATE) for s in range(2)]
        assert table[method].final("ap") == pytest.approx([run["ap"] for run in runs])
    assert (table["fedavg"].trials, table["fixed"].trials) == (3, 0)
    text = str(table)
    assert text.splitlines()[0].split()[:4] == ["method", "ap", "on", "test"]
    assert f"eta={chosen}" in text
    assert "Mean ± standard deviation over 2 seeds" in text
    report = table.report(tmp_path)
    assert "fixed" in report.read_text()
    assert (tmp_path / "curves.png").exists()
    with pytest.raises(NestfedError, match="did you mean fedavg"):
        table["fedavgg"]


def test_a_problem_and_clients_by_method_in_worker_processes_with_functions_that_no_file_holds(tmp_path: Path) -> None:
    """Lambdas cross into worker processes; the same call finds the finished runs; other grids are refused."""
    methods: Any = {"fedavg": FedAvg, "fcsg-m": partial(FCSGM, beta=0.5)}
    regret = Metric("regret", higher=False)
    judge = lambda model: {"regret": 1 - EVALUATE(model)["ap"]}  # noqa: E731
    given: Any = ({"fedavg": ENTROPY, "fcsg-m": RANKING}, methods, {"fedavg": EXAMPLES, "fcsg-m": lambda seed: PAIRS})
    how: Any = {**COMMON, "metric": regret, "evaluate": judge, "validate": judge, "seeds": 2, "extend": 0}
    grids = {"eta": (0.1, 1.0), "alpha": (0.1, 1.0)}
    both = [compare(*given, grids=grids, directory=tmp_path / str(w), **{**how, "workers": w}) for w in (1, 2)]
    assert [o.method for o in both[0].results] == ["fedavg", "fcsg-m"]
    for one, other in zip(both[0].results, both[1].results):
        assert one.final("regret") == other.final("regret")
        assert one.chosen == other.chosen
    assert both[0].metric == regret
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("record.jsonl")}
    again = compare(*given, grids=grids, directory=tmp_path / "1", **how)
    assert again == both[0]
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("record.jsonl")} == before, "nothing runs twice"
    assert Comparison.read(tmp_path / "1") == again
    with pytest.raises(NestfedError, match="another tuning"):
        compare(*given, grids={**grids, "eta": (0.1, 2.0)}, directory=tmp_path / "1", **how)


def test_tuning_returns_methods_that_are_ready() -> None:
    how = {k: v for k, v in COMMON.items() if k != "evaluate"}
    tuning = tune(ENTROPY, {"fedavg": FedAvg}, EXAMPLES, grids={"eta": (0.001, 0.1, 1.0)}, **how)
    method = tuning.methods["fedavg"]
    assert method == FedAvg(tuning.tuned["fedavg"].chosen["algorithm.eta"])
    assert "chosen" in str(tuning)
    assert simulate(ENTROPY, method, EXAMPLES, rounds=1)["loss"] > 0


def test_a_sweep_is_a_comparison_at_every_point(tmp_path: Path) -> None:
    """One table and one picture; a point is the comparison with that setting, and clients vary by label."""
    few = Examples.of(dict(list(PARTS.items())[:2]), batch=8)
    how = {k: v for k, v in COMMON.items() if k != "q"}
    found = sweep(
        ENTROPY, {"fedavg": FedAvg(0.5)}, EXAMPLES, over={"q": (1, 4), "clients": {"all": EXAMPLES, "two": few}},
        seeds=2, directory=tmp_path / "runs", **how,
    )  # fmt: skip
    assert [dict(settings) for settings, _ in found.points] == [
        {"q": q, "clients": c} for q in (1, 4) for c in ("all", "two")
    ]
    for settings, comparison in found.points:
        clients = {"all": EXAMPLES, "two": few}[settings["clients"]]
        alone = [simulate(ENTROPY, FedAvg(0.5), clients, rounds=3, q=settings["q"], seed=s, evaluate=EVALUATE) for s in (0, 1)]  # fmt: skip
        assert comparison["fedavg"].final("ap") == pytest.approx([run["ap"] for run in alone])
    table = found.table()
    assert table.columns[:4] == ["q", "clients", "method", "ap on test"]
    assert [row[:3] for row in table.rows] == [[q, c, "fedavg"] for q in ("1", "4") for c in ("all", "two")]
    report = found.report(tmp_path / "out")
    assert "ap on test against q" in report.read_text()
    assert (tmp_path / "out" / "sweep.png").read_bytes().startswith(b"\x89PNG")
    shares = sweep(ENTROPY, {"fedavg": FedAvg(0.5)}, EXAMPLES, over={"exchange.share": (0.5, 1.0)}, seeds=1, **COMMON)
    sent = [comparison["fedavg"].histories[0][-1]["bytes_up"] for _, comparison in shares.points]
    assert sent[0] < sent[1]


def test_options_are_those_of_simulate() -> None:
    options: Any = {"exchange": Exchange(count=2), "evaluation": Evaluation(every=2, keep="best")}
    table = compare(ENTROPY, {"fedavg": FedAvg(0.5)}, EXAMPLES, seeds=1, **COMMON, **options)
    history = table["fedavg"].histories[0]
    assert [r["round"] for r in history if r.get("ap") is not None] == [0, 2, 3]
    assert {r["participants"] for r in history[1:]} == {2}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"grids": {"etta": (1.0,)}}, "no hyper-parameter 'etta'; did you mean eta"),
        ({"grids": {"fedavgg.eta": (1.0,)}}, "no method 'fedavgg'"),
        ({"grids": {"eta": 1.0}}, r"grids\['eta'\] must be a list"),
        ({"grids": {"eta": (lambda t: 1.0,)}}, "must be numbers or text"),
        ({"grids": {}}, "cannot be built: .*eta"),
        ({"grids": {"eta": (0.1, 1.0)}, "validate": None}, "needs validation data"),
        ({"metric": "speed"}, "no metric 'speed'"),
        ({"evaluate": lambda model: 1.0}, "evaluate must return named numbers"),
        ({"methods": {"fedavg": "fedavg"}, "grids": {"eta": (1.0,)}}, "A method must be a class"),
        ({"methods": [FedAvg]}, "methods must be a mapping"),
    ],
)  # fmt: skip
def test_mistakes_are_one_sentence(change: dict[str, Any], sentence: str) -> None:
    how: dict[str, Any] = {**COMMON, "seeds": 1, "methods": {"fedavg": FedAvg}, "grids": {"eta": (0.1,)}, **change}
    with pytest.raises(NestfedError, match=sentence):
        compare(ENTROPY, how.pop("methods"), EXAMPLES, **how)


def test_mistakes_of_a_sweep_are_one_sentence() -> None:
    for over, sentence in (({"quu": (1, 2)}, "no setting 'quu'"), ({"clients": (1, 2)}, "mapping from a label"), ({"q": 3}, "must be a list")):  # fmt: skip
        with pytest.raises(NestfedError, match=sentence):
            sweep(ENTROPY, {"fedavg": FedAvg(0.5)}, EXAMPLES, over=over, seeds=1, **COMMON)
