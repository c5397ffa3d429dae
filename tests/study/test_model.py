"""A released model predicts as the estimator it comes from, and its directory is whole, checked and understood."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from torch import nn

from nestfed import FederatedAUC, FederatedClassifier, FederatedMinimax
from nestfed.core import NestfedError
from nestfed.metrics import Estimate
from nestfed.study import sealed
from nestfed.study.convert import model_of
from nestfed.study.decide import Calibration, Threshold
from nestfed.study.model import Architecture, StudyModel
from nestfed.study.reference import Reference, ScoreShares
from tests.study.released import INPUTS, KINDS, fitted, released, sites, table

pytestmark = pytest.mark.filterwarnings("ignore::nestfed.study.advice.NestfedWarning")


@pytest.mark.parametrize("kind", KINDS)
def test_it_predicts_as_its_estimator_after_a_round_trip(kind: str, tmp_path: Path) -> None:
    estimator, new = fitted(kind), table(seed=9)[INPUTS]
    new = new.assign(lab=new["lab"].fillna(1)) if kind == "unscaled" else new
    model = estimator.to_model("died").save(tmp_path / "m")
    again = StudyModel.load(tmp_path / "m")
    wanted = estimator.predict(new) if kind == "linear" else estimator.predict_proba(new)
    assert_allclose(again.predict(new), wanted, rtol=1e-12, atol=1e-14)
    assert again.digest == model.digest == sealed.read(tmp_path / "m", "model").digest
    assert again.to_json() == model.to_json()
    assert again.classes == (() if kind == "linear" else tuple(map(str, estimator.classes_)))
    text = new.astype(object).where(new.notna(), None).map(lambda v: v if v is None else str(v))
    assert_allclose(again.predict(text), wanted, rtol=1e-12, atol=1e-14)  # as a CSV file holds it


def test_everything_is_kept(tmp_path: Path) -> None:
    rate = Estimate(0.9, 0.8, 0.95)
    made = released("auc")
    made = replace(
        made,
        calibration=Calibration(2.0, -1.0, {"a": (1.5, -0.5)}),
        thresholds=(Threshold("sensitivity 0.9", 0.2, rate, rate, rate, rate),),
        provenance=replace(
            made.provenance,
            metrics={"auroc": rate, "ap": Estimate(0.5, float("nan"), float("nan"))},
            notes=("n",),
            study="5f",
        ),
        reference=Reference(720, np.full(5, 720), ScoreShares(np.array([0.0]), np.array([300, 420]))),
    )
    made.save(tmp_path / "m")
    again = StudyModel.load(tmp_path / "m")
    assert again.calibration == made.calibration
    assert again.thresholds == made.thresholds
    assert again.provenance.metrics["auroc"] == rate
    assert again.provenance.metrics["ap"].value == 0.5
    assert np.isnan(again.provenance.metrics["ap"].low)
    assert again.provenance.sites == made.provenance.sites
    assert again.provenance.notes == ("n",)
    assert again.reference is not None
    assert_array_equal(again.reference.known, np.full(5, 720))
    assert again.threshold() == 0.2
    json.loads((tmp_path / "m" / "model.json").read_text(), parse_constant=pytest.fail)  # no NaN, which JSON lacks


def test_calibration_of_a_site() -> None:
    one = Calibration(2.0, -1.0, {"a": (1.5, -0.5)})
    scores = np.array([-1000.0, 0.3, 1000.0])
    assert_allclose(one(scores), [0, 1 / (1 + np.exp(-(2 * 0.3 - 1))), 1], atol=1e-300)
    assert_allclose(one(scores, "a")[1], 1 / (1 + np.exp(-(1.5 * 0.3 - 0.5))))
    assert_array_equal(one(scores, "b"), one(scores))
    model = replace(released("auc"), calibration=one)
    new = table(seed=3)[INPUTS]
    assert_allclose(model.predict(new, "a")[:, 1], one(model.scores(model.inputs(new)), "a"))
    with pytest.raises(NestfedError, match="the model has no site 'aa'; did you mean a"):
        model.predict(new, "aa")


def test_a_rule_or_a_number_is_a_threshold() -> None:
    rate = Estimate(0.9, 0.8, 0.95)
    rules = tuple(
        Threshold(name, p, rate, rate, rate, rate) for name, p in (("sensitivity 0.9", 0.2), ("balanced", 0.4))
    )
    model = replace(released("auc"), thresholds=rules)
    assert [model.threshold(rule) for rule in ("", "balanced", "0.7")] == [0.2, 0.4, 0.7]
    assert replace(model, thresholds=()).threshold() == 0.5
    with pytest.raises(
        NestfedError, match=r"the model has no threshold 'sensitivity 0\.8'; did you mean sensitivity 0\.9"
    ):
        model.threshold("sensitivity 0.8")
    with pytest.raises(NestfedError, match="must be a probability from 0 to 1"):
        model.threshold("7")


# ---------------------------------------------------------------------------------------------------------
# Directories


def test_a_used_directory_is_kept_unless_forced(tmp_path: Path) -> None:
    first, second = released("auc"), released("hidden")
    digest = first.save(tmp_path / "m").digest
    with pytest.raises(NestfedError, match="already contains a NestFed model: replace it with --force"):
        second.save(tmp_path / "m")
    assert StudyModel.load(tmp_path / "m").digest == digest
    second.save(tmp_path / "m", force=True)
    assert StudyModel.load(tmp_path / "m").architecture == second.architecture
    assert "hidden.0.weight" in StudyModel.load(tmp_path / "m").parameters


@pytest.mark.parametrize("name", ["model.json", "model.safetensors", "MODEL_CARD.md", "model.pt2"])
def test_a_changed_file_is_noticed(name: str, tmp_path: Path) -> None:
    """A model.safetensors of another training was used without a word."""
    model = released("auc").save(tmp_path / "m")
    content = bytearray((tmp_path / "m" / name).read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "m" / name).write_bytes(content)
    with pytest.raises(NestfedError, match=f"{name} is missing or changed"):
        StudyModel.load(tmp_path / "m")
    assert model.digest


def test_descriptions_that_make_no_sense(tmp_path: Path) -> None:
    files = released("auc").files()
    whole = json.loads(files["model.json"])
    changes: list[tuple[dict[str, Any], str]] = [
        ({"format": 4}, "in format 4, but this is nestfed"),
        ({"classes": ["a", "b", "c"]}, "has 1 scores, which does not fit 3 classes"),
        ({"architecture": {**whole["architecture"], "shape": [3]}}, "takes .* inputs, but the encoding makes"),
        ({"architecture": {**whole["architecture"], "options": {"hidden": [3]}}}, "The parameters do not fit"),
        ({"encoding": {"kind": "magic"}}, "cannot be read: KeyError"),
        ({"provenance": {}}, "cannot be read: KeyError"),
    ]
    for i, (change, words) in enumerate(changes):
        sealed.write(tmp_path / str(i), {**files, "model.json": json.dumps({**whole, **change}).encode()})
        with pytest.raises(NestfedError, match=words):
            StudyModel.load(tmp_path / str(i))
    for name in files:
        sealed.write(tmp_path / name, {**files, name: b"{"})
        with pytest.raises(NestfedError, match="cannot be read"):
            StudyModel.load(tmp_path / name)
    with pytest.raises(NestfedError, match="contains no model: expected a model directory"):
        StudyModel.load(tmp_path)


def older(place: Path, estimator: Any, form: int, version: str) -> None:
    """Write what `nestfed train` wrote before models were sealed."""
    estimator.save(place)
    saved = json.loads((place / "estimator.json").read_text())
    (place / "estimator.json").write_text(json.dumps({**saved, "format": form, "nestfed": version}))
    (place / "SHA256SUMS").unlink()


def test_models_of_earlier_versions(tmp_path: Path) -> None:
    estimator = FederatedAUC(rounds=3, q=2).fit({n: (x, y) for n, (x, y) in sites("died").items()})
    place, new = tmp_path / "run" / "model", table(seed=4)[INPUTS]
    older(place, estimator, 2, "0.2.0")
    with pytest.raises(NestfedError, match=r"holds a saved FederatedAUC, not a released model: use FederatedAUC\.load"):
        StudyModel.load(tmp_path / "run")
    (place / "table.json").write_text('{"target": "died", "classes": ["no", "yes"], "objective": "auroc"}')
    model = StudyModel.load(tmp_path / "run")
    assert_allclose(model.predict(new), estimator.predict_proba(new), rtol=1e-14)
    assert (model.target, model.classes) == ("died", ("no", "yes"))
    older(tmp_path / "old", estimator, 1, "0.1.0")
    with pytest.raises(NestfedError, match=r"written by nestfed 0\.1\.0, .* train again, or install nestfed==0\.1\.0"):
        StudyModel.load(tmp_path / "old")
    (tmp_path / "old" / "estimator.json").write_text("{}")
    with pytest.raises(NestfedError, match="cannot be read"):
        StudyModel.load(tmp_path / "old")


def test_models_that_cannot_be_released() -> None:
    data = sites("died")
    own = FederatedClassifier(nn.Linear(5, 1), rounds=1, q=1).fit(data)
    with pytest.raises(NestfedError, match="A released model holds no code"):
        own.to_model()
    images = {n: (np.random.default_rng(0).normal(size=(8, 1, 3, 3)), np.arange(8) % 2) for n in "ab"}
    with pytest.raises(NestfedError, match="fitted to tables"):
        FederatedClassifier(rounds=1, q=1).fit(images).to_model()
    with pytest.raises(NestfedError, match="FederatedMinimax cannot become a released model"):
        model_of(FederatedMinimax(), "y")


def test_networks_by_name() -> None:
    assert Architecture("mlp", (3,), 1, {"hidden": []}).linear
    assert not Architecture("mlp", (3,)).linear
    assert Architecture("mlp", (3,), 2, {"hidden": [4]}).build()(torch.zeros(5, 3).double()).shape == (5, 2)
    assert "layers of [4]" in str(Architecture("mlp", (3,), 2, {"hidden": [4]}))


def test_arrays_without_names_work(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 3)).astype(np.float32), np.arange(60) % 2  # as new rows are read
    estimator = FederatedClassifier(rounds=2, q=2).fit(x, y)
    model = estimator.to_model().save(tmp_path / "m")
    frame = pd.DataFrame(x, columns=["x0", "x1", "x2"])
    assert_allclose(model.predict(frame), estimator.predict_proba(x), rtol=1e-14)
