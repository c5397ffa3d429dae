"""The [warm_up] table of an experiment file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from nestfed.algorithms import Adam, FedAvg, Scaffold
from nestfed.cli.main import app
from nestfed.core import NestfedError
from nestfed.deploy.app import check_experiment, init
from nestfed.engine.record import read as read_record
from nestfed.engine.simulate import simulate
from nestfed.experiment.build import assemble, warm_up_method
from nestfed.experiment.run import run
from nestfed.experiment.spec import Experiment, from_tables, read
from nestfed.experiment.tune import pauses, tune, tuned_tables
from nestfed.report.html import write
from nestfed.report.summary import page_of_run

TABLES: dict[str, Any] = {
    "data": {"name": "digits", "binary": True, "validation": 0.2, "limit": 300},
    "partition": {"clients": 3},
    "model": {"name": "mlp", "hidden": []},
    "problem": {"name": "auroc", "batch": 8},
    "algorithm": {"name": "fmgda", "c_hat": 0.1, "c": 0.1},
    "run": {"rounds": 4, "q": 2},
}
WARM = {"rounds": 2, "algorithm": {"name": "fedavg", "eta": 0.1}, "problem": {"name": "classify", "batch": 6}}


def experiment(warm: Any = None, **tables: Any) -> Experiment:
    return from_tables({**TABLES, "warm_up": WARM if warm is None else warm, **tables})


FILE = """
[data]
name = "digits"
binary = true
limit = 300
[partition]
clients = 3
[model]
hidden = []
[problem]
name = "auroc"
batch = 8
[algorithm]
name = "fmgda"
c_hat = 0.1
c = 0.1
[run]
rounds = 4
q = 2
[warm_up]
rounds = 2
algorithm = { name = "fedavg", eta = 0.1 }
[warm_up.problem]
name = "classify"
batch = 6
"""


def test_a_run_with_a_warm_up(tmp_path: Path) -> None:
    """Its record, its settings, its identity and its report show the warm-up; rounds = 0 is a run without one."""
    history = run(experiment(), tmp_path / "warm", progress=False)
    assert [r["round"] for r in history] == list(range(5))
    made, plain = assemble(experiment()), assemble(experiment({"rounds": 0}))
    assert made.warm_up is not None
    assert made.warm_up.problem is not None
    first = simulate(
        made.warm_up.problem, FedAvg(0.1), made.warm_up.clients, rounds=2, q=2, progress=False, evaluate=made.evaluate
    )
    start = plain.problem.start(first.model)
    second = simulate(plain.problem, plain.algorithm, plain.clients, rounds=2, q=2, x0=start, progress=False,
                      evaluate=made.evaluate)  # fmt: skip
    assert history[-1]["auroc"] == second["auroc"]
    assert history[-1]["examples"] == first["examples"] + second["examples"]
    settings = json.loads((tmp_path / "warm" / "experiment.json").read_text())
    assert settings["warm_up"]["algorithm"] == WARM["algorithm"]
    assert settings["warm_up"]["problem"].items() >= {"name": "classify", "batch": 6}.items()
    page = write(page_of_run(tmp_path / "warm"), tmp_path / "report.html").read_text()
    assert "the first 2 rounds: fedavg, eta = 0.1, on classify" in page
    with pytest.raises(NestfedError, match="another experiment"):
        run(experiment().with_overrides({"warm_up.rounds": 1}), tmp_path / "warm", progress=False)
    none, without = experiment({**WARM, "rounds": 0}), from_tables(TABLES)
    assert none.digest() == without.digest() != experiment().digest()
    assert "warm_up" not in none.resolved()


def test_the_runs_own_objective(tmp_path: Path) -> None:
    """Without a problem of its own, the warm-up hands over the whole point, and draws batches for its own method."""
    warm = {"rounds": 2, "algorithm": {"name": "local-sgda", "eta_theta": 0.05, "eta_w": 0.05}}
    made = assemble(experiment(warm))
    assert made.warm_up is not None
    assert made.warm_up.problem is None
    history = run(experiment(warm), tmp_path / "a", progress=False)
    plain = assemble(from_tables(TABLES))
    first = simulate(plain.problem, made.warm_up.method, plain.clients, rounds=2, q=2, progress=False)
    second = simulate(plain.problem, plain.algorithm, plain.clients, rounds=2, q=2, x0=first.x, progress=False,
                      evaluate=plain.evaluate)  # fmt: skip
    assert history[-1]["val_auroc"] == second["val_auroc"]


def test_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text(FILE)
    for changes in ([], ["warm_up.rounds=1", "warm_up.algorithm.eta=0.2"]):
        found = CliRunner().invoke(app, ["run", str(path), *changes, "--out", str(tmp_path / f"out{len(changes)}")])
        assert found.exit_code == 0, found.output
    records = [read_record(tmp_path / out / "record.jsonl") for out in ("out0", "out2")]
    assert [r["round"] for r in records[1]] == list(range(5))
    assert records[0][-1]["auroc"] != records[1][-1]["auroc"]
    assert warm_up_method(read(path).with_overrides({"warm_up.algorithm.eta": 0.2})) == FedAvg(0.2)


def test_overrides() -> None:
    warm = experiment({**WARM, "server": {"name": "adam", "eta_g": 0.01}})
    assert warm_up_method(warm) == FedAvg(0.1).served_by(Adam(0.01))
    other = warm.with_overrides({"warm_up.algorithm.name": "scaffold", "warm_up.algorithm.eta": 0.3,
                                 "warm_up.server.name": ""})  # fmt: skip
    assert warm_up_method(other) == Scaffold(0.3), "another method has settings of its own"
    assert other.warm_up.problem == warm.warm_up.problem
    assert warm.with_overrides({"warm_up.problem.batch": 7}).resolved()["warm_up"]["problem"]["batch"] == 7


@pytest.mark.parametrize(
    ("warm", "sentence"),
    [
        ({**WARM, "rounds": 4}, r"The warm-up has 4 rounds \(warm_up.rounds\), which leaves none of the run's 4"),
        ({**WARM, "rounds": -1}, "warm_up.rounds must be a whole number of at least 0, not -1"),
        ({"rounds": 2}, r"\[warm_up\] has rounds but no method"),
        ({**WARM, "algorithm": {"name": "fedavgg"}}, "no algorithm 'fedavgg'; did you mean fedavg?"),
        ({**WARM, "algorithm": "fedavg"}, r"\[warm_up.algorithm\] must be a table, not 'fedavg'"),
        ({**WARM, "problem": {"name": "clasify"}}, "no problem 'clasify'; did you mean classify?"),
        ({**WARM, "problem": {"name": "classify", "outer": 3}}, "warm_up.problem.outer belongs to auprc"),
        ({**WARM, "problem": {"name": "classify", "batch": "a"}}, "warm_up.problem.batch must be a whole number"),
        ({**WARM, "steps": 3}, "no setting 'warm_up.steps'"),
        ({**WARM, "algorithm": {"name": "fmgda"}}, "fmgda works on problems of kind Minimax"),
    ],
)
def test_wrong_tables(warm: Any, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(NestfedError, match=sentence):
        run(experiment(warm), tmp_path / "a", progress=False)
    assert not (tmp_path / "a").exists()


def test_clients_alone_have_no_warm_up() -> None:
    with pytest.raises(NestfedError, match=r"run.sites = 'alone' trains each client alone and has no warm-up"):
        experiment(run={"rounds": 4, "sites": "alone"})


def test_tuned_and_compared(tmp_path: Path) -> None:
    """A step of the warm-up is tuned like a method's own; methods of one file may have a warm-up or none."""
    assert pauses(40, 2, 20) == [26, 30], "trials do not differ in the warm-up"
    tables = {
        "run": {"rounds": 3, "q": 2},
        "methods": {
            "fmgda": {"algorithm": TABLES["algorithm"], "tune": {"warm_up.algorithm.eta": [0.001, 0.3]},
                      "warm_up": {"rounds": 1}},
            "plain": {"algorithm": TABLES["algorithm"], "warm_up": {"rounds": 0}},
        },
    }  # fmt: skip
    compared = experiment(**tables)
    _, tuned = tune(compared, ["fmgda", "plain"], tmp_path, workers=1)
    best = max(tuned["fmgda"].trials, key=lambda t: t.value or 0)
    assert {t.settings["warm_up.algorithm.eta"] for t in tuned["fmgda"].trials} == {0.001, 0.3}
    chosen = from_tables(tuned_tables(compared, tuned))
    assert warm_up_method(chosen.for_method("fmgda")) == FedAvg(best.settings["warm_up.algorithm.eta"])
    assert chosen.for_method("fmgda").warm_up.rounds == 1
    assert warm_up_method(chosen.for_method("plain")) is None


def test_deployments_reject_it(tmp_path: Path) -> None:
    """One sentence, before anything is written or asked."""
    with pytest.raises(
        NestfedError, match="A deployment cannot have a warm-up, but the experiment has one of 2 rounds"
    ):
        init(tmp_path / "app", experiment(), 3)
    assert not (tmp_path / "app").exists()
    check_experiment(experiment({**WARM, "rounds": 0}), 3)
    from nestfed.deploy.flower.messages import study_of

    path = tmp_path / "a.toml"
    path.write_text(FILE)
    with pytest.raises(NestfedError, match="A deployment cannot have a warm-up"):
        study_of(path)
    assert study_of(experiment({"rounds": 0})).warm_up.rounds == 0
