"""The [server] table of an experiment file: any method under any server, tuned as a method's own options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nestfed.algorithms import FCSGM, Adam, Momentum
from nestfed.core import NestfedError
from nestfed.engine.record import read as read_record
from nestfed.experiment.build import method
from nestfed.experiment.compare import compare
from nestfed.experiment.run import run
from nestfed.experiment.spec import Experiment, from_tables, read
from nestfed.experiment.tune import tune, tuned_tables
from nestfed.report.html import write
from nestfed.report.summary import page_of_run

TABLES: dict[str, Any] = {
    "data": {"name": "digits", "binary": True, "validation": 0.2},
    "partition": {"clients": 3},
    "model": {"name": "mlp", "hidden": []},
    "problem": {"name": "auprc", "outer": 3, "inner": 8},
    "algorithm": {"name": "fcsg-m", "alpha": 0.5},
    "run": {"rounds": 2, "q": 2},
}
ADAM = {"name": "adam", "eta_g": 0.01}


def experiment(**tables: Any) -> Experiment:
    return from_tables({**TABLES, **tables})


def test_a_file_names_the_server(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text(
        '[problem]\nname = "auprc"\n[algorithm]\nname = "fcsg-m"\nalpha = 0.5\n[server]\nname = "adam"\neta_g = 0.01\n'
    )
    assert method(read(path)) == FCSGM(alpha=0.5).served_by(Adam(0.01))


def test_a_run_under_a_server(tmp_path: Path) -> None:
    """Its settings, its identity and its report name the server; a run without one is as it was."""
    served = experiment(server=ADAM)
    plain, other = (
        run(experiment(), tmp_path / "plain", progress=False),
        run(served, tmp_path / "served", progress=False),
    )
    assert plain[-1]["val_ap"] != other[-1]["val_ap"]
    assert json.loads((tmp_path / "served" / "experiment.json").read_text())["server"] == ADAM
    assert "server" not in json.loads((tmp_path / "plain" / "experiment.json").read_text())
    assert served.digest() != experiment().digest()
    with pytest.raises(NestfedError, match="another experiment"):
        run(served.with_overrides({"server.eta_g": 0.02}), tmp_path / "served", progress=False)
    page = write(page_of_run(tmp_path / "served"), tmp_path / "report.html").read_text()
    assert "fcsg-m+adam" in page
    assert "eta_g = 0.01" in page
    assert "fcsg-m+adam" not in write(page_of_run(tmp_path / "plain"), tmp_path / "report.html").read_text()


def test_overrides_of_a_server() -> None:
    served = experiment(server=ADAM)
    other = served.with_overrides({"server.name": "momentum", "server.beta": 0.5})
    assert method(other) == FCSGM(alpha=0.5).served_by(Momentum(0.01, 0.5)), "it keeps the options that both have"
    assert method(served.with_overrides({"server.name": ""})) == FCSGM(alpha=0.5)


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"name": "adan", "eta_g": 0.1}, "no server 'adan'; did you mean adam?"),
        ({"eta_g": 0.1}, r"\[server\] has options but no name"),
        ({"name": "adam", "lr": 0.1}, "There is no hyper-parameter 'lr'"),
        ({"name": "adam"}, "adam needs eta_g"),
        ({"name": 3}, "server.name must be text, not 3"),
        ({"name": "adam", "eta_g": "x"}, "adam: eta_g must be a number, not 'x'"),
    ],
)
def test_wrong_tables(table: dict[str, Any], sentence: str) -> None:
    with pytest.raises(NestfedError, match=sentence):
        method(experiment(server=table))


def test_a_method_with_a_server_of_its_own_is_rejected() -> None:
    with pytest.raises(NestfedError, match="scaffold has a server's rule of its own"):
        method(experiment(server=ADAM, algorithm={"name": "scaffold", "eta": 0.1}))


def test_tuning_and_comparing(tmp_path: Path) -> None:
    """A server's options are tuned like a method's; methods of one file may have different servers, or none."""
    tables = {
        "server": ADAM,
        "methods": {
            "served": {"algorithm": {"name": "fcsg-m", "alpha": 0.5}, "tune": {"server.eta_g": [0.001, 0.1]}},
            "rolling": {"algorithm": {"name": "fcsg", "alpha": 0.5}, "server": {"name": "momentum"}},
            "scaffold": {"algorithm": {"eta": 0.5}, "server": {"name": ""}},
        },
    }
    made = experiment(**tables)
    names = ["served", "rolling", "scaffold"]
    assert [method(made.for_method(n)).name for n in names] == ["fcsg-m+adam", "fcsg+momentum", "scaffold"]
    _, tuned = tune(made, ["served"], tmp_path / "tuned", extend=0, workers=1)
    assert {t.settings["server.eta_g"] for t in tuned["served"].trials} == {0.001, 0.1}
    best = max(tuned["served"].trials, key=lambda t: t.value or 0.0)
    assert tuned["served"].chosen == best.settings
    chosen = from_tables(tuned_tables(made, tuned)).for_method("served")
    assert chosen.server.hyper["eta_g"] == best.settings["server.eta_g"]
    _, results = compare(made, names, 1, tmp_path / "compared", workers=1)
    assert [r.method for r in results] == names
    for name in names:
        assert len(read_record(tmp_path / "compared" / name / "seed-0" / "record.jsonl")) == 3
