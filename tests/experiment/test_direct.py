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
    Adam,
    Classify,
    Evaluation,
    Examples,
    Exchange,
    FedAvg,
    Metric,
    Minimize,
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


OTHER = Classify(nn.Sequential(nn.Linear(5, 2), nn.Linear(2, 1), nn.Flatten(0)))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"grids": {"fedavg.eta": (0.01,)}}, "algorithm.eta is 0.01 instead of 0.5"),
        ({"methods": {"fedavg": FedAvg, "fixed": FedAvg(0.2)}}, r"fixed.seed-0 .*FedAvg\(eta=0.2\)' instead of"),
        ({"methods": {"fedavg": FedAvg, "fixed": lambda: FedAvg(0.2)}}, "fixed.seed-0 contains another experiment"),
        ({"rounds": 5}, "run.rounds is 5 instead of 3"),
        ({"q": 1}, "run.q is 1 instead of 2"),
        ({"exchange": Exchange(count=2)}, "exchange.count is 2 instead of its default"),
        ({"problem": OTHER}, "the model's parameters differ"),
        ({"problem": Classify(nn.Sequential(nn.Linear(5, 1), nn.Flatten(0)))}, "the starting point differs"),
        ({"problem": Minimize(lambda m, b: m(b[0]).square().mean(), linear())}, "problem.name is 'Minimize' instead of"),
        ({"clients": Examples.of(PARTS, batch=6)}, "client site 0 draws batches of another shape"),
        ({"clients": Examples.of({**PARTS, "site 1": (X[:40] + 1, Y[:40])}, batch=8)}, "client site 1 draws other data"),
        ({"evaluate": VALIDATE}, "another evaluation: after round 3 it finds"),
        ({"evaluate": held_out(X[180:], Y[180:], log_odds=True)}, "The evaluation returns .*log_loss"),
    ],
)  # fmt: skip
def test_a_finished_comparison_belongs_to_its_objects(change: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    """Nothing is tuned, and all runs are finished: they are not those of another problem, clients or metric."""
    given: dict[str, Any] = {
        **COMMON, "problem": ENTROPY, "clients": EXAMPLES, "methods": {"fedavg": FedAvg, "fixed": FedAvg(0.1)},
        "grids": {"fedavg.eta": (0.5,)}, "seeds": 2, "directory": tmp_path,
    }  # fmt: skip
    first = compare(**given)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(NestfedError, match=sentence):
        compare(**{**given, **change})
    assert compare(**given) == first
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()} == before


def test_finished_trials_and_sweeps_belong_to_their_objects(tmp_path: Path) -> None:
    how = {k: v for k, v in COMMON.items() if k != "evaluate"}
    given: dict[str, Any] = {**how, "grids": {"eta": (0.1, 1.0)}, "extend": 0, "directory": tmp_path / "tuning"}
    first = tune(ENTROPY, {"fedavg": FedAvg}, EXAMPLES, **given)
    assert tune(ENTROPY, {"fedavg": FedAvg}, EXAMPLES, **given) == first
    with pytest.raises(NestfedError, match="the model's parameters differ"):
        tune(OTHER, {"fedavg": FedAvg}, EXAMPLES, **given)
    with pytest.raises(NestfedError, match="another evaluation: after round"):
        tune(ENTROPY, {"fedavg": FedAvg}, EXAMPLES, **{**given, "validate": EVALUATE})
    over: dict[str, Any] = {**COMMON, "over": {"exchange.count": (2, 3)}, "seeds": 1, "directory": tmp_path / "sweep"}
    sweep(ENTROPY, {"fedavg": FedAvg(0.5)}, EXAMPLES, **over)
    with pytest.raises(NestfedError, match="the model's parameters differ"):
        sweep(OTHER, {"fedavg": FedAvg(0.5)}, EXAMPLES, **over)


def test_a_served_method_and_a_function_are_tuned() -> None:
    """The server's step, both steps, and the arguments of a function: the best of trials by hand with `simulate`."""
    how = {k: v for k, v in COMMON.items() if k != "evaluate"}
    served = FedAvg(0.5).served_by(Adam(0.1))
    steps = (0.001, 1.0)

    def by_hand(method: Any) -> float:
        return simulate(ENTROPY, method, EXAMPLES, rounds=3, q=2, seed=TUNING_SEED, evaluate=VALIDATE)["ap"]

    def best(make: Any) -> float:
        found = {step: by_hand(make(step)) for step in steps}
        assert min(found.values()) < 0.99 * max(found.values()), "a wrong choice would show"
        return max(found, key=found.__getitem__)

    tuning = tune(ENTROPY, {"a": served}, EXAMPLES, grids={"eta_g": steps}, extend=0, **how)
    chosen = best(lambda step: FedAvg(0.5).served_by(Adam(step)))
    assert tuning.methods["a"] == FedAvg(0.5).served_by(Adam(chosen))
    assert tuning.tuned["a"].ends == {"server.eta_g": "largest" if chosen == 1.0 else "smallest"}
    both = tune(ENTROPY, {"a": served}, EXAMPLES, grids={"a.eta": steps, "a.eta_g": steps}, extend=0, **how)
    assert len(both.tuned["a"].trials) == 4
    made = both.methods["a"]
    assert max(t.value or 0 for t in both.tuned["a"].trials) == pytest.approx(by_hand(made), rel=0.01)
    function = tune(ENTROPY, {"a": lambda eta: FedAvg(eta).served_by(Adam(0.1))}, EXAMPLES, grids={"eta": steps}, extend=0, **how)  # fmt: skip
    assert function.methods["a"] == FedAvg(best(lambda step: FedAvg(step).served_by(Adam(0.1)))).served_by(Adam(0.1))
    assert set(function.tuned["a"].ends) == {"algorithm.eta"}


def test_a_metric_that_validate_lacks_is_named_before_any_trial(tmp_path: Path) -> None:
    how = {**COMMON, "validate": lambda model: {"error": 1.0}}
    with pytest.raises(NestfedError, match="The metric is 'ap', but validate returns error"):
        compare(ENTROPY, {"fedavg": FedAvg}, EXAMPLES, grids={"eta": (0.1, 1.0)}, directory=tmp_path / "c", **how)
    assert not list(tmp_path.rglob("trial-*"))


def test_options_are_those_of_simulate() -> None:
    options: Any = {"exchange": Exchange(count=2), "evaluation": Evaluation(every=2, keep="best")}
    table = compare(ENTROPY, {"fedavg": FedAvg(0.5)}, EXAMPLES, seeds=1, **COMMON, **options)
    history = table["fedavg"].histories[0]
    assert [r["round"] for r in history if r.get("ap") is not None] == [0, 2, 3]
    assert {r["participants"] for r in history[1:]} == {2}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"grids": {"etta": (1.0,)}}, "^There is no hyper-parameter 'etta'; did you mean eta"),
        ({"grids": {"fedavgg.eta": (1.0,)}}, "no method 'fedavgg'"),
        ({"grids": {"eta": 1.0}}, r"grids\['eta'\] must be a list"),
        ({"grids": {"eta": (lambda t: 1.0,)}}, "must be numbers or text"),
        ({"grids": {}}, "cannot be built: .*eta"),
        ({"grids": {"eta": (0.1, 1.0)}, "validate": None}, "needs validation data: pass validate="),
        ({"methods": {"fedavg": lambda eta: eta}}, "'fedavg' must return an object such as FedAvg"),
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
    for over, sentence in (({"quu": (1, 2)}, "no setting 'quu'"), ({"clients": (1, 2)}, "mapping from a label"), ({"q": 3}, "must be a list"), ({"eta": (0.1, 1.0)}, "'eta', which is a hyper-parameter of fedavg")):  # fmt: skip
        with pytest.raises(NestfedError, match=sentence):
            sweep(ENTROPY, {"fedavg": FedAvg(0.5)}, EXAMPLES, over=over, seeds=1, **COMMON)
