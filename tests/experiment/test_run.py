"""Running an experiment in a directory."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from safetensors.torch import load_file

from nestfed.core import DivergedError, NestfedError
from nestfed.engine.record import read as read_record
from nestfed.experiment.build import assemble
from nestfed.experiment.compare import compare
from nestfed.experiment.run import Job, run, run_jobs
from nestfed.experiment.spec import from_tables
from nestfed.experiment.sweep import points_of, sweep_points

ALONE = {
    "data": {"name": "digits", "binary": True, "validation": 0.1, "limit": 300},
    "partition": {"clients": 3},
    "problem": {"name": "classify", "batch": 8},
    "algorithm": {"name": "fedavg", "eta": 0.1},
    "run": {"rounds": 3, "q": 4, "sites": "alone"},
}


def test_clients_that_train_alone_are_judged_by_their_own_models(tmp_path: Path) -> None:
    experiment = from_tables(ALONE)
    last = run(experiment, tmp_path / "run", progress=False)[-1]
    made = assemble(experiment)
    each = []
    for n in range(3):
        module = made.problem.module(made.problem.x0)
        module.load_state_dict(load_file(tmp_path / "run" / f"client-{n}.safetensors"))
        each.append(made.evaluate(module.eval()))
    for name in each[0]:
        assert last[name] == pytest.approx(fmean(found[name] for found in each), rel=1e-6)
    assert len({found["log_loss"] for found in each}) == 3
    assert last["examples"] == 3 * 3 * 4 * 8
    assert last["bytes_up"] == last["bytes_down"] == 0
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_clients_that_train_alone_have_no_common_best_model() -> None:
    with pytest.raises(NestfedError, match=r"evaluation.keep = 'last'"):
        from_tables({**ALONE, "evaluation": {"keep": "best", "metric": "auroc"}})


@pytest.mark.long
def test_jobs_in_parallel_processes(tmp_path: Path) -> None:
    """Two new processes do what this one does, and an error comes back from them."""
    tables: dict[str, Any] = {
        "partition": {"clients": 3},
        "problem": {"name": "invariant", "dim": 4, "inner": 4, "outer": 4},
        "algorithm": {"name": "fcsg-m", "alpha": 0.2, "beta": 0.5},
        "run": {"rounds": 2, "q": 2},
        "execution": {"mode": "loop"},
    }
    kinds = {"good": tables, "bad": {**tables, "algorithm": {"name": "fcsg-m", "alpha": 1e200, "beta": 0.5}}}
    found: dict[int, dict[str, Any]] = {}
    for workers in (1, 2):
        jobs = [Job(from_tables(kinds[name]), tmp_path / str(workers) / name) for name in kinds]
        errors: dict[str, Any] = {}
        run_jobs(jobs, workers, lambda job, error, errors=errors: errors.update({job.out.name: error}))  # type: ignore[misc]
        assert errors["good"] is None
        assert isinstance(errors["bad"], DivergedError)
        records = read_record(jobs[0].out / "record.jsonl")
        found[workers] = {"error": str(errors["bad"]), "records": [{**r, "seconds": 0} for r in records]}
    assert found[1] == found[2]


def test_a_finished_comparison_belongs_to_its_settings(tmp_path: Path) -> None:
    """It is not the result of other settings, also if nothing is tuned; the same settings run nothing again."""
    tables = {**ALONE, "run": {"rounds": 2, "q": 2}, "methods": {"fedavg": {"algorithm": {"eta": 0.1}}}}
    experiment = from_tables(tables)
    metric, first = compare(experiment, ["fedavg"], 1, tmp_path, workers=1)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}
    for change, sentence in (
        ({"run.rounds": 4}, "run.rounds is 4 instead of 2"),
        ({"run.q": 1}, "run.q is 1 instead of 2"),
        ({"partition.clients": 4}, "partition.clients is 4 instead of 3"),
        ({"problem.batch": 4}, "problem.batch is 4 instead of 8"),
    ):
        with pytest.raises(NestfedError, match=rf"seed-0 contains another experiment: {sentence}"):
            compare(experiment.with_overrides(change), ["fedavg"], 1, tmp_path, workers=1)
    assert compare(experiment, ["fedavg"], 1, tmp_path, workers=1) == (metric, first)
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()} == before


def test_what_is_swept_is_not_tuned(tmp_path: Path) -> None:
    """Tuning would replace the value of the point: all rows would be the same run."""
    for own, sentence in (
        ({"tune": {"eta": [0.1, 1.0]}}, "tuning fedavg would choose it too"),
        ({"algorithm": {"eta": 0.2}}, "fedavg has its own algorithm table"),
    ):
        tables = {**ALONE, "run": {"rounds": 2, "q": 2}, "methods": {"fedavg": own}}
        points = points_of(from_tables(tables), {"algorithm.eta": [0.01, 0.3]})
        with pytest.raises(NestfedError, match=f"algorithm.eta is swept, but {sentence}"):
            sweep_points(points, ["fedavg"], 1, tmp_path / "out", workers=1)
    assert not (tmp_path / "out").exists()


def test_a_missing_method_is_named_even_if_the_directory_is_taken(tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text("of a comparison")
    with pytest.raises(NestfedError, match=r"no algorithm: set algorithm\.name"):
        run(from_tables({k: v for k, v in ALONE.items() if k != "algorithm"}), tmp_path)
    with pytest.raises(NestfedError, match="is not empty and contains no run"):
        run(from_tables(ALONE), tmp_path)
    with pytest.raises(NestfedError, match="is not empty and contains no comparison or tuning"):
        compare(from_tables(ALONE), ["fedavg"], 1, tmp_path)
    with pytest.raises(NestfedError, match="There is no algorithm 'fedvag'"):
        compare(from_tables(ALONE), ["fedvag"], 1, tmp_path / "new")
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"run": {"rounds": -1}}, "^run.rounds must be a whole number of at least 0, not -1"),
        ({"run": {"q": 0}}, "^run.q must be a whole number of at least 1, not 0"),
        ({"evaluation": {"metric": "acuracy"}}, "^There is no metric 'acuracy'; did you mean accuracy?"),
    ],
)
def test_wrong_settings_are_rejected_when_the_file_is_read(table: dict[str, Any], sentence: str) -> None:
    with pytest.raises(NestfedError, match=sentence):
        from_tables({**ALONE, **table})
