"""The same study with its tables at hand and over three real SuperNodes with TLS and keys."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import tomli_w
from typer.testing import CliRunner

from nestfed.cli.main import app
from nestfed.study.metric_table import MetricTable
from nestfed.study.model import StudyModel

SITES = ("north", "south", "west")


def tables(folder: Path) -> dict[str, str]:
    """Three hospitals with a category, gaps, and patients with several rows."""
    rng, found = np.random.default_rng(1), {}
    for n, name in enumerate(SITES):
        rows = 300 - 60 * n
        age, ward = rng.normal(60 + 4 * n, 12, rows), rng.choice(["a", "b", "c"], rows)
        risk = 0.06 * (age - 62) + 0.9 * (ward == "c") + 0.4 * n - 1
        table = pd.DataFrame(
            {
                "age": np.where(rng.random(rows) < 0.1, np.nan, age.round(1)),
                "ward": ward,
                "patient": rng.integers(0, rows // 2, rows),
                "died": (rng.random(rows) < 1 / (1 + np.exp(-risk))).astype(int),
            }
        )
        found[name] = str(folder / f"{name}.csv")
        table.to_csv(found[name], index=False)
    return found


def invoke(*words: str) -> str:
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("flwr"), reason="needs flwr")
def test_deployed_over_real_supernodes(tmp_path: Path) -> None:
    methods: dict[str, Any] = {
        "auroc": {"algorithm": {"name": "fmgda", "c_hat": 1.0, "c": 1.0}, "tune": {"eta": [0.1]}},
        "fedavg": {"problem": {"name": "classify"}, "tune": {"eta": [0.1]}},
    }
    file = tmp_path / "study.toml"
    study = {
        "data": {
            "target": "died", "classes": ["0", "1"], "group": "patient", "subgroups": ["ward"], "validation": 0.25,
        },
        "model": {"name": "mlp", "hidden": []},
        "problem": {"name": "auroc"},
        "run": {"rounds": 4, "q": 4},
        "evaluation": {"every": 2, "keep": "best", "metric": "auroc"},
        "study": {"thresholds": ["sensitivity 0.8"]},
        "sites": tables(tmp_path),
        "methods": methods,
    }  # fmt: skip
    file.write_text(tomli_w.dumps(study))
    here, there = tmp_path / "here", tmp_path / "there"
    invoke("train", str(file), "--out", str(here))
    shown = invoke("deploy", "local", str(file), "--min-cell", "0", "--out", str(there))
    assert "report.html" in shown
    both = [MetricTable.from_json(json.loads((place / "metrics.json").read_text())).frame() for place in (here, there)]
    keys = ["model", "group", "metric"]
    pd.testing.assert_frame_equal(*(one.set_index(keys) for one in both), check_exact=False, rtol=1e-4, atol=1e-5)
    new = pd.read_csv(study["sites"]["west"]).drop(columns=["died", "patient"])
    wanted = StudyModel.load(here).predict(new)
    copies = sorted((there / "flower" / "state").glob("*/model"))
    assert len(copies) == 3
    for place in (there, *copies):
        np.testing.assert_allclose(StudyModel.load(place).predict(new), wanted, atol=1e-5)
    predictions = tmp_path / "predictions.csv"
    invoke("predict", str(copies[0]), study["sites"]["west"], "--out", str(predictions))  # rows it never sent
    assert len(pd.read_csv(predictions)) == len(new)
    invoke("deploy", "audit", str(there))
