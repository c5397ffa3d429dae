"""Adapting: no rows change nothing, many rows give their own fit, and the rule takes what predicts rows left out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.linear_model import LogisticRegression
from typer.testing import CliRunner

from nestfed import FederatedLogistic
from nestfed.cli.model import adapt_command
from nestfed.core import NestfedError
from nestfed.metrics import Estimate, log_loss
from nestfed.study import adapt as module
from nestfed.study.adapt import FEW, RIDGES, adapt, adapt_file, adapt_table, choose, moved, recalibrated
from nestfed.study.decide import Calibration, Threshold
from nestfed.study.model import StudyModel
from tests.study.released import INPUTS, fitted, released, table

pytestmark = pytest.mark.filterwarnings("ignore::nestfed.study.advice.NestfedWarning")


def outcome(logit: np.ndarray, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).random(len(logit)) < 1 / (1 + np.exp(-logit))).astype(int)


@pytest.mark.parametrize("way", ["auto", "recalibrate", "coefficients"])
def test_no_rows_are_the_same_model(way: Any) -> None:
    model, new = replace(released("auc"), digest="parent"), table(seed=3)[INPUTS]
    found = adapt_table(model, new.iloc[:0], [], way=way)
    assert_array_equal(found.model.predict(new), model.predict(new))
    assert found.model.provenance.parent == "parent"
    assert found.change.way == "unchanged"


def test_many_rows_are_their_own_fit() -> None:
    """Recalibration reaches the unpenalised line, coefficients the unpenalised regression."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200_000, 3))
    common = x @ [1.0, 0.5, 0.0] - 1
    y = outcome(x @ [0.2, -0.5, 0.7] + 0.6)
    line = LogisticRegression(C=np.inf, tol=1e-10).fit(common[:, None], y)
    found = recalibrated(common, y)
    assert_allclose([found.slope, found.shift], [line.coef_[0, 0], line.intercept_[0]], atol=2e-3)
    own = LogisticRegression(C=np.inf, tol=1e-10).fit(x, y)
    for ridge in (RIDGES[-1], RIDGES[len(RIDGES) // 2]):
        change = moved(x, common, y, ridge)
        made = change(common, x)
        assert_allclose(made, own.decision_function(x), atol=2e-3 if ridge == RIDGES[-1] else 2e-2)


def test_the_minimum_is_stationary() -> None:
    """The gradient of the stated objective is 0: Σ (p − y)·column + penalty·δ."""
    rng = np.random.default_rng(1)
    x, logit = rng.normal(size=(60, 4)), rng.normal(size=60)
    y = outcome(logit + x[:, 0])
    change = moved(x, logit, y, 3.0)
    assert change.delta is not None
    off = 1 / (1 + np.exp(-change(logit, x))) - y
    assert_allclose(off @ x + 3.0 * change.delta, 0, atol=1e-8)
    assert_allclose(off.sum() + module.SHIFT * change.shift, 0, atol=1e-8)
    change = recalibrated(logit, y)
    off = 1 / (1 + np.exp(-change(logit, x))) - y
    shift = change.shift + (change.slope - 1) * logit.mean()
    assert_allclose(off.sum() + module.SHIFT * shift, 0, atol=1e-8)
    assert_allclose(off @ (logit - logit.mean()) + module.SLOPE * (change.slope - 1), 0, atol=1e-8)


def test_shrinkage_is_monotone() -> None:
    rng = np.random.default_rng(2)
    x, logit = rng.normal(size=(80, 4)), np.zeros(80)
    y = outcome(x @ [1.0, -1.0, 0.5, 0.0])
    size = [float(np.linalg.norm(np.asarray(moved(x, logit, y, ridge).delta))) for ridge in RIDGES]
    assert size == sorted(size)
    assert size[0] < 0.1 < size[-1]
    one = recalibrated(np.array([0.3]), np.array([1]))  # a single row moves it a little, in the right direction
    assert 0 < one(np.array([0.3]), np.zeros((1, 0)))[0] - 0.3 < 0.5
    rare = recalibrated(np.zeros(30), np.zeros(30, int))  # one class only: finite, below
    assert -3 < rare.shift < -1


def test_the_rule() -> None:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(4000, 3))
    common = x @ [1.0, 0.5, 0.0] - 1

    def ways(y: np.ndarray, rows: int, inputs: np.ndarray | None = x) -> str:
        some = slice(rows)
        return choose(None if inputs is None else inputs[some], common[some], y[some])[0].way

    same, shifted, other = outcome(common), outcome(0.5 * common + 1.5), outcome(x @ [-1.0, 0.5, 1.0])
    assert ways(same, 1500) == "unchanged"
    assert ways(shifted, 1500) == "recalibrated"
    assert ways(other, 1500).startswith("coefficients")
    assert ways(other, 1500, None) == "recalibrated"  # a hidden network
    few = int(np.flatnonzero(np.cumsum(other) == FEW)[0])
    assert ways(other, few) == "recalibrated"
    change, losses, why = choose(x[:1500], common[:1500], other[:1500])
    assert min(losses, key=lambda name: losses[name]).startswith("coefficients")
    assert losses["unchanged"] == pytest.approx(log_loss(common[:1500], other[:1500]))
    fresh = slice(1500, 4000)
    assert log_loss(change(common, x)[fresh], other[fresh]) < losses["recalibrated"]
    assert "within one standard error" in why


def test_persons_are_left_out_together() -> None:
    """With every row ten times, rows of the same person on both sides make the most flexible candidate look best."""
    rng = np.random.default_rng(4)
    x, person = np.repeat(rng.normal(size=(60, 20)), 10, axis=0), np.repeat(np.arange(60), 10)
    y = np.repeat(outcome(np.zeros(60)), 10)
    torn = choose(x, np.zeros(600), y)[1]
    whole = choose(x, np.zeros(600), y, groups=person)[1]
    last = f"coefficients, λ = {RIDGES[-1]:g}"
    assert torn[last] < torn["unchanged"]
    assert whole[last] > whole["unchanged"]
    gap = np.repeat(rng.normal(size=(1, 60)), 10, axis=1)
    assert_allclose(module._errors(gap, person), gap.std() / np.sqrt(60))  # as of 60 rows
    assert_allclose(module._errors(gap, None), gap.std() / np.sqrt(600))
    assert choose(x, np.zeros(600), y, groups=person // 10)[2].startswith("Recalibrated, because only 6 groups")


@pytest.mark.parametrize("kind", ["auc", "logistic", "unscaled"])
def test_the_model_computes_the_change(kind: str) -> None:
    model, new = released(kind), table(rows=300, seed=8, shift=6)
    new["lab"] = new["lab"].fillna(1)
    y = new["died"].to_numpy()
    x = model.inputs(new)
    a, b = model.calibration.at()
    logit = a * model.scores(x) + b
    for way in ("recalibrate", "coefficients"):
        found = adapt(model, x.numpy(), y, way=way)  # type: ignore[arg-type]
        wanted = 1 / (1 + np.exp(-found.change(logit, x.numpy())))
        assert_allclose(found.model.predict(new)[:, 1], wanted, rtol=1e-9)
        assert log_loss(np.log(wanted / (1 - wanted)), y) < log_loss(logit, y)


def test_what_does_not_hold_any_more_is_left_out(tmp_path: Path) -> None:
    rate = Estimate(0.9, 0.8, 0.95)
    parent = replace(
        released("auc"),
        calibration=Calibration(2.0, -1.0, {"a": (1.5, -0.5)}),
        thresholds=(Threshold("balanced", 0.2, rate, rate, rate, rate),),
    ).save(tmp_path / "parent")
    new = table(rows=300, seed=8, shift=6)
    new.to_csv(tmp_path / "rows.csv", index=False)
    found = adapt_file(tmp_path / "parent", tmp_path / "rows.csv", tmp_path / "child", way="recalibrate")
    child = StudyModel.load(tmp_path / "child")
    assert child.digest == found.model.digest != parent.digest
    assert child.provenance.parent == parent.digest
    assert child.thresholds == ()
    assert child.calibration.sites == {}
    assert any("Adapted to 300 rows" in note for note in child.provenance.notes)
    assert parent.digest in (tmp_path / "child" / "MODEL_CARD.md").read_text()
    with pytest.raises(NestfedError, match="already contains a NestFed model"):
        adapt_file(tmp_path / "parent", tmp_path / "rows.csv", tmp_path / "child")
    new.drop(columns="died").to_csv(tmp_path / "bare.csv", index=False)
    with pytest.raises(NestfedError, match="has no column 'died'"):
        adapt_file(tmp_path / "parent", tmp_path / "bare.csv", tmp_path / "next")
    new.assign(died=2).to_csv(tmp_path / "strange.csv", index=False)
    with pytest.raises(NestfedError, match="holds '2', expected one of 0, 1"):
        adapt_file(tmp_path / "parent", tmp_path / "strange.csv", tmp_path / "next")
    app = typer.Typer()
    app.command()(adapt_command)
    words = [str(tmp_path / "parent"), str(tmp_path / "rows.csv"), "--out", str(tmp_path / "next")]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0
    assert "recalibrated             log-loss 0." in result.output
    assert StudyModel.load(tmp_path / "next").provenance.parent == parent.digest


def test_a_reversed_score_is_reported() -> None:
    model, new = released("auc"), table(rows=600, seed=8)
    found = adapt_table(model, new, 1 - new["died"], way="recalibrate")
    assert found.change.slope < 0
    assert any("ranks the new rows in the wrong order" in note for note in found.model.provenance.notes)


def test_from_an_estimator() -> None:
    new = table(rows=300, seed=8, shift=6)
    for estimator in (fitted("auc"), fitted("logistic")):
        found = estimator.adapt(new[INPUTS], new["died"])
        assert found.losses["unchanged"] >= min(found.losses.values())
        text = estimator.adapt(
            new[INPUTS].assign(site="z"), new["died"].astype(str), groups=new.index, way="recalibrate"
        )
        assert text.change.way == "recalibrated"
    x = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
    plain = FederatedLogistic().fit(x, np.arange(60) % 2)
    assert plain.adapt(x, np.arange(60) % 2).model.classes == ("0", "1")


def test_what_cannot_be_adapted() -> None:
    new = table(rows=40, seed=8)
    with pytest.raises(NestfedError, match="needs a model of two classes"):
        adapt_table(released("classes"), new, new["grade"])
    with pytest.raises(NestfedError, match="can only be recalibrated"):
        adapt_table(released("hidden"), new, new["died"], way="coefficients")
    with pytest.raises(NestfedError, match="way must be"):
        adapt_table(released("auc"), new, new["died"], way="all")  # type: ignore[arg-type]
    with pytest.raises(NestfedError, match="40 rows and 39 labels"):
        adapt_table(released("auc"), new, new["died"][1:])
    with pytest.raises(NestfedError, match="at least two rows or groups of each class"):
        adapt_table(released("auc"), new, np.zeros(40, int), way="coefficients")
