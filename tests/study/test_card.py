"""The model card is complete, and the difference of two models names what changed and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from numpy.testing import assert_allclose
from typer.testing import CliRunner

from nestfed.cli.model import diff_command
from nestfed.data.encoding import Column, TableEncoding
from nestfed.metrics import Estimate
from nestfed.report.page import Table
from nestfed.study.adapt import adapt_table
from nestfed.study.card import card, markdown
from nestfed.study.coefficients import coefficients
from nestfed.study.convert import linear_parameters
from nestfed.study.decide import Calibration, Threshold
from nestfed.study.difference import difference
from nestfed.study.model import Architecture, Provenance, StudyModel
from nestfed.study.reference import Reference
from tests.study.released import INPUTS, KINDS, fitted, released, table

pytestmark = pytest.mark.filterwarnings("ignore::nestfed.study.advice.NestfedWarning")


def wide(columns: int = 90) -> StudyModel:
    """A linear model of many columns, one with many categories."""
    schema = (*(Column(f"lab | {i}") for i in range(columns)), Column("code", tuple(f"c{i:03}" for i in range(60))))
    width = sum(map(len, schema))
    encoding = TableEncoding(schema, np.full(width, 1 / 60), np.full(width, 0.25), np.arange(width) < 2)
    rate = Estimate(0.9, 0.85, 0.95)
    return StudyModel(
        Architecture("mlp", (width + 2,), 1, {"hidden": []}),
        linear_parameters(np.arange(width + 2.0)[None], np.array([0.5])),
        encoding,
        "died",
        ("no", "yes"),
        Calibration(2.0, -1.0, {"north": (1.0, 0.0)}),
        (Threshold("sensitivity 0.9", 0.125, rate, rate, rate, rate),),
        Provenance(
            "FMGDA", "AUROC", sites={"north": (90, 9), "south": (200, 50)}, metrics={"auroc": rate}, notes=("Odd.",)
        ),
        Reference(349, np.full(width, 300)),
    )


def test_the_card_is_complete() -> None:
    model = wide()
    text = card(model, [Table("By subgroup", ["group", "AUROC"], [["a|b", 0.8125], ["c", None]], "A note.")])
    for i in range(90):
        assert f"| lab \\| {i} | number |" in text
    for i in range(60):
        assert f"c{i:03} 1.7%" in text
    for words in (
        "| north | 99 | 90 | 9 |",
        "| all sites | 349 | 290 | 59 |",
        "| AUROC | 0.9000 (0.8500 to 0.9500) |",
        "| sensitivity 0.9 | 0.125 |",
        "| a\\|b | 0.8125 |",
        "| c | – |",
        "A note.",
        "These sites have their own map: north",
        "Sites with fewer than 20 training rows of a class: north.",
        "- Odd.",
        "Safetensors and ONNX files run no code; a `.pt2` file\ncan",
    ):
        assert words in text, words
    assert "…" not in text
    rows = [line for line in text.splitlines() if line.startswith("| lab \\| 0 |")]
    assert "14.0%" in rows[0]  # 49 of 349 missing


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_card(kind: str) -> None:
    text = card(released(kind))
    assert ("## Coefficients" in text) == (kind != "hidden")
    assert all(f"\n| {name} |" in text for name in INPUTS)


def test_markdown_stays_a_table() -> None:
    made = markdown(Table("", ["a", "b"], [["x|y", "line\nbreak"], ["<script>", 0.123456]]))
    assert made.splitlines() == ["| a | b |", "| --- | --- |", "| x\\|y | line break |", "| &lt;script> | 0.1235 |"]


def test_coefficients_in_the_columns_units() -> None:
    """They give the model's log-odds without its encoding, where nothing is clipped or missing."""
    for kind in ("auc", "logistic", "unscaled", "linear"):
        model, new = released(kind), table(seed=6)
        new = new[(new["age"].between(40, 80)) & (new["lab"] < 3)]
        found = {one.name: one.per_unit for one in coefficients(model)}
        by_hand = found["(intercept)"] + found["age"] * new["age"] + found["lab"] * new["lab"]
        by_hand += [found.get(f"ward={ward}", 0.0) for ward in new["ward"]]  # the reference category has none
        a, b = model.calibration.at()
        assert_allclose(by_hand, a * model.scores(model.inputs(new)) + b, rtol=1e-5, atol=1e-5)
    logistic = fitted("logistic")
    found = {one.name: one.per_unit for one in coefficients(logistic.to_model())}
    assert_allclose([found[name] for name in logistic.columns_], logistic.coef_[0])
    assert_allclose(found["(intercept)"], logistic.intercept_[0])
    assert not coefficients(released("hidden"))
    assert len(coefficients(released("classes"))) == 3 * 7


def titles(a: StudyModel, b: StudyModel) -> set[str]:
    return {table.title for table in difference(a, b)}


def test_what_changed_is_named() -> None:
    model = wide()
    assert titles(model, model) == set()
    assert titles(model, replace(model, calibration=Calibration(2.0, -1.0, {"north": (1.0, 0.1)}))) == {"Calibration"}
    assert titles(model, replace(model, thresholds=())) == {"Thresholds"}
    settings = replace(model, provenance=replace(model.provenance, settings={"rounds": "5"}))
    assert titles(model, settings) == {"Settings"}
    sites = replace(model, provenance=replace(model.provenance, sites={"north": (90, 9)}))
    (changed,) = difference(model, sites)
    assert changed.rows == [["south", "200 / 50", "–"]]
    weights = {**model.parameters, "head.weight": model.parameters["head.weight"] + torch.eye(1, 152) * 2}
    (changed,) = difference(model, replace(model, parameters=weights))
    assert changed.title == "Coefficients per unit"
    assert [row[0] for row in changed.rows] == ["lab | 0", "(intercept)"]
    assert changed.rows[0][3] == "+16"  # 2 by the calibration's 2, per 1/0.25 units
    mean = replace(model, encoding=replace(model.encoding, mean=model.encoding.mean + np.eye(1, 150, 5)[0]))
    assert titles(model, mean) == {"Scale", "Coefficients per unit"}


def test_between_models_of_other_columns() -> None:
    a, b = wide(90), wide(80)
    by_title = {table.title: table for table in difference(a, b)}
    assert [row[0] for row in by_title["Columns"].rows] == [f"lab | {i}" for i in range(80, 90)]
    fewer = Column("code", tuple(f"c{i:03}" for i in range(1, 61)))
    other = replace(a, encoding=replace(a.encoding, schema=(*a.encoding.schema[:-1], fewer)))
    (columns,) = [table for table in difference(a, other) if table.title == "Columns"]
    assert columns.rows == [["code", "60 categories, with c000", "60 categories, with c060"]]
    assert "Coefficients per unit" in titles(released("hidden"), released("auc"))
    shown = {table.title: table for table in difference(released("hidden"), released("auc"))}["Coefficients per unit"]
    assert shown.rows[0][3] == "of other shapes"


def test_the_command(tmp_path: Path) -> None:
    model = released("auc").save(tmp_path / "a")
    new = table(rows=300, seed=8, shift=6)
    adapt_table(model, new, new["died"], way="recalibrate").model.save(tmp_path / "b")
    app = typer.Typer()
    app.command()(diff_command)
    result = CliRunner().invoke(app, [str(tmp_path / "a"), str(tmp_path / "b")], catch_exceptions=False)
    assert result.exit_code == 0
    for words in ("Calibration", "all sites", "adapted from", model.digest):
        assert words in result.output
    result = CliRunner().invoke(app, [str(tmp_path / "a"), str(tmp_path / "a")], catch_exceptions=False)
    assert result.output == "The models are equal.\n"
