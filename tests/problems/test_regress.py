"""Regression: the squared error against least squares, and its metrics over sites from sums."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression
from sklearn.metrics import mean_absolute_error, mean_squared_error, r2_score

from nestfed.core import NestfedError
from nestfed.experiment.build import assemble
from nestfed.experiment.run import run
from nestfed.experiment.spec import from_tables
from nestfed.metrics import ErrorTotals
from nestfed.problems.regress import Regress, RegressOptions
from nestfed.queries import TEST, Rows, at_hand
from nestfed.queries.errors import ERRORS, judged_errors, totals_of
from nestfed.testing import check_problem

pd = pytest.importorskip("pandas")


def table(path: Path) -> Path:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 3))
    frame = pd.DataFrame(x, columns=["a", "b", "c"]).assign(site=rng.choice(["p", "q"], 400))
    frame.assign(cost=x @ [1.0, -2.0, 0.5] + 3 + 0.3 * rng.normal(size=400)).to_csv(path, index=False)
    return path


def settings(path: Path) -> dict[str, dict[str, object]]:
    return {
        "data": {"file": str(path), "target": "cost", "columns": ["site"], "target_kind": "number", "validation": 0.2},
        "partition": {"kind": "column", "column": "site"},
        "model": {"name": "mlp", "hidden": []},
        "problem": {"name": "regress"},
        "algorithm": {"name": "fedavg", "eta": 0.1},
        "run": {"rounds": 40, "q": 5},
    }


def test_an_experiment_finds_the_least_squares_fit(tmp_path: Path) -> None:
    path = table(tmp_path / "t.csv")
    history = run(from_tables(settings(path)), tmp_path / "out", progress=False, picture=False)
    made = assemble(from_tables(settings(path)))
    clients, test = made.clients.arrays, history[-1]
    fit = LinearRegression().fit(clients[0].numpy(), clients[1].numpy())
    frame = pd.read_csv(path)
    assert test["rmse"] < 1.1 * 0.3
    assert test["r2"] > 0.97
    assert test["val_rmse"] > 0
    assert np.sqrt(np.mean((fit.predict(clients[0].numpy()) - clients[1].numpy()) ** 2)) == pytest.approx(0.3, abs=0.04)
    assert len(clients[1]) + round(0.25 * 400) + round(0.2 * 300) == len(frame)


def test_gradients() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Flatten(0))
    x, y = torch.randn(20, 2), torch.randn(20)
    problem, clients = RegressOptions(batch=4).build(model, (x, y), [np.arange(10), np.arange(10, 20)])
    check_problem(problem, clients)
    assert isinstance(problem, Regress)
    with pytest.raises(NestfedError, match="one number per example"):
        Regress(torch.nn.Linear(2, 2)).loss(torch.zeros(6), (x, y))


def test_a_class_is_not_a_number(tmp_path: Path) -> None:
    path = table(tmp_path / "t.csv")
    for changes, words in (
        ({"problem.name": "classify"}, "classify needs a class as its target: set data.target_kind = 'class'"),
        (
            {"data.target_kind": "class", "data.target": "site", "data.columns": [], "partition.kind": "even"},
            "'number'",
        ),
        ({"data.binary": True}, "data.binary needs one class per example"),
        ({"data.held_out": "clients"}, "a number as its target"),
        ({"data.target": "site", "data.columns": [], "partition.kind": "even"}, "'site' of .* holds the text"),
        ({"data.target_kind": "text"}, "data.target_kind must be class, number or survival"),
    ):
        with pytest.raises(NestfedError, match=words):
            assemble(from_tables(settings(path)).with_overrides(changes))


def test_metrics_over_sites_are_those_of_all_rows() -> None:
    rng = np.random.default_rng(1)
    y = 1e4 + rng.normal(size=90)
    p = y + 0.5 * rng.normal(size=90)
    parts = np.split(np.arange(90), [20, 50])
    sites = [{TEST: Rows(p[part, None], y[part], scores=lambda x, part=part: p[part] + x[0])} for part in parts]
    replies = list(at_hand(sites)(ERRORS, TEST, x=np.zeros(1), center=1e4).values())
    found = judged_errors(replies)
    assert found["rmse"] == pytest.approx(np.sqrt(mean_squared_error(y, p)))
    assert found["mae"] == pytest.approx(mean_absolute_error(y, p))
    assert found["r2"] == pytest.approx(r2_score(y, p), rel=1e-9)
    total = ErrorTotals.of(p[:20], y[:20]) + ErrorTotals.of(p[20:], y[20:])
    assert total.metrics()["mae"] == pytest.approx(found["mae"])


def test_a_diverged_model_has_no_metrics_and_a_false_reply_is_rejected() -> None:
    y = np.arange(5.0)
    ask = at_hand([{TEST: Rows(y[:, None], y, scores=lambda x: np.full(5, np.inf))}])
    reply = ask(ERRORS, TEST, x=np.zeros(1))[0]
    assert int(reply["unscored"]) == 5
    assert all(np.isnan(v) for v in judged_errors([reply]).values())
    with pytest.raises(ValueError, match="negative"):
        totals_of({**reply, "sums": np.array([0.0, -1, 0, 0, 0])})
    assert "negative" in ERRORS.invalid({**reply, "sums": np.array([0.0, -1, 0, 0, 0])}, x=np.zeros(1))
