"""Tuning is fair (validation data only, one rule for all), resumes after a crash, and always finds the same."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna.distributions import CategoricalDistribution
from safetensors.torch import load_file

from nestfed.core import METRICS, OBJECTIVES, Metric, NestfedError
from nestfed.engine.record import read as read_record
from nestfed.experiment.build import assemble
from nestfed.experiment.compare import compare
from nestfed.experiment.run import TUNING_SEED, run, run_jobs
from nestfed.experiment.spec import Experiment, from_tables, read
from nestfed.experiment.tune import (
    Halving,
    drawn,
    pauses,
    search_space,
    shown,
    tune,
    tuned_tables,
    validation,
    write_tuned,
)
from nestfed.metrics import find
from nestfed.problems.invariant import InvariantOptions
from tests.support import holder

SMALL = {"run.rounds": 4, "run.q": 1, "evaluation.every": 1, "partition.clients": 2}


def small(**grids: Any) -> Experiment:
    """The demo in small, with other grids."""
    experiment = read("average-precision").with_overrides(SMALL)
    tables = dict(experiment.source)
    tables["methods"] = {name: {**tables["methods"][name], "tune": grid} for name, grid in grids.items()}
    return from_tables(tables)


ETAS = {"algorithm.eta": [1.0, 10.0, 30.0, 100.0]}
ALPHAS = {"algorithm.alpha": [0.3, 1.0, 3.0], "problem.margin": [0.1, 0.5]}


def test_pauses_are_evaluations_at_a_quarter_and_at_half() -> None:
    assert pauses(40, 2) == [10, 20]
    assert pauses(100, 10) == [30, 50]
    assert pauses(50, 25) == [25], "one evaluation stops one half, not three quarters"
    assert pauses(2, 2) == []
    assert pauses(10, 10) == []


def test_the_better_half_continues_whoever_reports_first() -> None:
    values = {10: [0.5, 0.9, 0.1, 0.7, 0.6], 20: {1: 0.2, 3: 0.8, 4: 0.8}}
    study = optuna.create_study(direction="maximize", pruner=Halving(6, [10, 20], find("ap")))  # the sixth failed
    trials = [study.ask() for _ in range(6)]
    study.tell(5, state=optuna.trial.TrialState.FAIL)
    for trial, value in zip(trials, values[10]):
        trial.report(value, 10)
    assert [t.number for t in trials[:5] if not t.should_prune()] == [1, 3, 4]
    assert [t.number for t in reversed(trials[:5]) if not t.should_prune()] == [4, 3, 1]
    for number, value in values[20].items():  # type: ignore[attr-defined]
        trials[number].report(value, 20)
    assert [n for n in (1, 3, 4) if not trials[n].should_prune()] == [3, 4]  # 6/4, rounded up


def test_the_better_half_has_the_lower_values_of_a_loss() -> None:
    study = optuna.create_study(direction="minimize", pruner=Halving(4, [10], find("log_loss")))
    trials = [study.ask() for _ in range(4)]
    for trial, value in zip(trials, [0.5, math.inf, 0.1, 0.7]):
        trial.report(value, 10)
    assert [t.number for t in trials if not t.should_prune()] == [0, 2]


@pytest.mark.parametrize(("metric", "choose"), [("log_loss", min), ("accuracy", max)])
def test_the_metric_decides_in_its_own_direction(metric: str, choose: Any, tmp_path: Path) -> None:
    """Tuning by log-loss chooses the lowest one on validation data; it once chose the highest."""
    experiment = small(fedavg=ETAS).with_overrides({"evaluation.metric": metric})
    judge, tuned = tune(experiment, ["fedavg"], tmp_path, stopping=False, extend=0, workers=1)
    ends = {}
    for trial, place in zip(tuned["fedavg"].trials, sorted((tmp_path / "fedavg").glob("trial-*"))):
        ends[trial.settings["algorithm.eta"]] = read_record(place / "record.jsonl")[-1][f"val_{metric}"]
        assert trial.value == pytest.approx(ends[trial.settings["algorithm.eta"]])
    assert len(set(ends.values())) == 4
    assert ends[tuned["fedavg"].chosen["algorithm.eta"]] == pytest.approx(choose(ends.values()), rel=0.01)
    assert [float(row[2]) for row in shown(tuned, judge)[1]] == pytest.approx(
        sorted(ends.values(), reverse=judge.higher), abs=1e-4
    )
    halved = tune(experiment, ["fedavg"], tmp_path / "halved", extend=0, workers=1)[1]["fedavg"]
    places = sorted((tmp_path / "halved" / "fedavg").glob("trial-*"))
    (winner,) = [n for n, t in enumerate(halved.trials) if t.state == "finished"]
    records = {r["round"]: r[f"val_{metric}"] for r in read_record(places[winner] / "record.jsonl")}
    for trial in halved.trials:
        assert not judge.better(trial.value, records[trial.round]), "the better half continued"
    assert halved.chosen == next(t.settings for t in halved.trials if t.state == "finished")


def test_a_metric_that_is_not_a_number_is_the_worst_in_both_directions(tmp_path: Path) -> None:
    (tmp_path / "record.jsonl").write_text('{"round": 1, "val_log_loss": null, "val_ap": null}\n')
    assert validation(tmp_path, find("val_log_loss"), 1) == math.inf
    assert validation(tmp_path, find("val_ap"), 1) == -math.inf


def test_a_metric_of_a_plain_function_must_declare_its_direction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An objective of one's own returns `regret`: by name it is refused before any run, as a `Metric` it decides."""

    def objective(metric: str | Metric) -> Any:
        class Regret(InvariantOptions):
            def build(self, setting: Any) -> Any:
                made = super().build(setting)

                def regret(model: Any) -> dict[str, float]:
                    return {"regret": 1 - made.test(model)["accuracy"]}

                return dataclasses.replace(made, metric=metric, test=regret, validation=regret)

        return Regret

    regret = Metric("regret", higher=False)
    monkeypatch.setattr(OBJECTIVES, "_things", {**OBJECTIVES._things})
    for name, metric in (("unknown", "regret"), ("passed", regret)):
        OBJECTIVES.add(name, objective(metric))
    tables = {
        "partition": {"clients": 2},
        "problem": {"name": "unknown", "dim": 5, "inner": 4, "outer": 4},
        "run": {"rounds": 3, "q": 2},
        "methods": {"fcsg": {"tune": {"alpha": [0.001, 1.0]}}},
    }
    for start in (tune, lambda *args, **more: compare(args[0], args[1], 1, args[2], **more)):
        with pytest.raises(NestfedError, match=r'METRICS.add\("regret", Metric\("regret", higher=True\)\)'):
            start(from_tables(tables), ["fcsg"], tmp_path / "unknown", workers=1)
    tables["problem"]["name"] = "passed"  # type: ignore[index]
    found, tuned = tune(from_tables(tables), ["fcsg"], tmp_path / "passed", extend=0, workers=1)
    assert found == regret
    first, second = tuned["fcsg"].trials
    assert first.value is not None
    assert second.value is not None
    assert first.value != second.value
    assert tuned["fcsg"].chosen == min((first, second), key=lambda t: t.value or 0.0).settings
    monkeypatch.setattr(METRICS, "_things", {**METRICS._things, "regret": regret})
    tables["problem"]["name"] = "unknown"  # type: ignore[index]
    assert tune(from_tables(tables), ["fcsg"], tmp_path / "declared", extend=0, workers=1)[1] == tuned


@pytest.mark.parametrize(("metric", "choose"), [("log_loss", min), ("auroc", max)])
def test_the_best_model_is_kept_by_the_metrics_direction(metric: str, choose: Any, tmp_path: Path) -> None:
    """With far too large a step the log-loss rises, so that the highest one is not that of the best model."""
    changes = {**SMALL, "problem.name": "classify", "algorithm.name": "fedavg", "algorithm.eta": 300.0}
    experiment = read("average-precision").with_overrides(
        {**changes, "evaluation.keep": "best", "evaluation.metric": metric}
    )
    records = run(experiment, tmp_path, progress=False, picture=False)
    values = [r[f"val_{metric}"] for r in records]
    assert choose(values) != values[-1]
    made = assemble(experiment)
    kept = sorted(load_file(tmp_path / "model.safetensors").items(), reverse=True)  # the weight, then the bias
    with torch.no_grad():
        found = made.evaluate(made.problem.bind(torch.cat([tensor.flatten() for _, tensor in kept])))
    assert found[f"val_{metric}"] == pytest.approx(choose(values))


def test_every_method_has_as_many_trials_on_tuning_seeds(tmp_path: Path) -> None:
    experiment = small(fedavg=ETAS, **{"fcsg-m": ALPHAS})
    _, tuned = tune(experiment, ["fedavg", "fcsg-m"], tmp_path, trials=3, workers=1)
    for name, outcome in tuned.items():
        assert len(outcome.trials) == 3
        assert len({json.dumps(t.settings, sort_keys=True) for t in outcome.trials}) == 3, "no point twice"
        places = sorted((tmp_path / name).glob("trial-*"))
        assert len(places) == 3
        for place in places:
            assert json.loads((place / "experiment.json").read_text())["run"]["seed"] == TUNING_SEED
        # of three, two go on after round 1 and one after round 2
        assert sorted(read_record(p / "record.jsonl")[-1]["round"] for p in places) == [1, 2, 4]
        best = [t for t in outcome.trials if t.state == "finished"]
        assert [t.settings for t in best] == [outcome.chosen]


def test_trials_never_see_test_data(tmp_path: Path) -> None:
    tune(small(fedavg=ETAS), ["fedavg"], tmp_path, workers=1)
    for place in (tmp_path / "fedavg").glob("trial-*"):
        assert not (place / "roc.json").exists()
        for record in read_record(place / "record.jsonl"):
            assert "val_ap" in record
            assert not {"ap", "auroc"} & set(record)


def test_trials_may_be_shorter_than_runs(tmp_path: Path) -> None:
    metric, outcomes = compare(small(fedavg=ETAS), ["fedavg"], 1, tmp_path, trial_rounds=2, stopping=False, workers=1)
    ends = [read_record(p / "record.jsonl")[-1]["round"] for p in (tmp_path / "fedavg").glob("trial-*")]
    assert ends == [2, 2, 2, 2]
    assert outcomes[0].histories[0][-1]["round"] == 4
    assert metric.name in outcomes[0].histories[0][-1]


def test_a_trial_with_several_seeds_is_judged_by_their_mean(tmp_path: Path) -> None:
    experiment = small(fedavg=ETAS)
    _, tuned = tune(experiment, ["fedavg"], tmp_path, seeds=2, stopping=False, workers=1)
    values = []
    for n, trial in enumerate(tuned["fedavg"].trials):
        places = [tmp_path / "fedavg" / name for name in (f"trial-{n:03d}", f"trial-{n:03d}-again-1")]
        assert [json.loads((p / "experiment.json").read_text())["run"]["seed"] for p in places] == [
            TUNING_SEED,
            TUNING_SEED + 1,
        ]
        ends = [read_record(p / "record.jsonl")[-1]["val_ap"] for p in places]
        assert ends[0] != ends[1]
        values.append(sum(ends) / 2)
        assert trial.value == pytest.approx(values[-1])
    assert tuned["fedavg"].chosen == tuned["fedavg"].trials[values.index(max(values))].settings
    with pytest.raises(NestfedError, match="contains another tuning"):
        tune(experiment, ["fedavg"], tmp_path, stopping=False, workers=1)


def test_only_validation_metrics_are_read(tmp_path: Path) -> None:
    """With test metrics that say the opposite, the same is chosen."""
    experiment = small(fedavg=ETAS)
    _, first = tune(experiment, ["fedavg"], tmp_path, workers=1)
    (tmp_path / "trials.log").unlink()
    ends = {}
    for place in (tmp_path / "fedavg").glob("trial-*"):
        records = read_record(place / "record.jsonl")
        turned = [{**r, "ap": 1 - r["val_ap"], "auroc": 1 - r["val_auroc"]} for r in records]
        (place / "record.jsonl").write_text("".join(json.dumps(r) + "\n" for r in turned))
        if (place / "finished.json").exists():
            ends[place.name] = turned[-1]
    _, second = tune(experiment, ["fedavg"], tmp_path, workers=1)
    assert second == first
    finished = [t for t in first["fedavg"].trials if t.state == "finished"]
    assert max(t.value for t in finished) == max(e["val_ap"] for e in ends.values())  # type: ignore[type-var]


def test_the_last_bits_do_not_choose_the_step(tmp_path: Path) -> None:
    """The demo's FedAvg was tuned to 30 or to 100, whichever was ahead by the last bit; the smaller one is chosen."""
    experiment = small(fedavg=ETAS)
    tune(experiment, ["fedavg"], tmp_path, stopping=False, extend=0, workers=1)
    places = sorted((tmp_path / "fedavg").glob("trial-*"))
    etas = {json.loads((p / "experiment.json").read_text())["algorithm"]["eta"]: p for p in places}
    chosen = []
    for ahead in (30.0, 100.0):
        (tmp_path / "trials.log").unlink()
        for eta, place in etas.items():
            *start, end = read_record(place / "record.jsonl")
            value = {30.0: 0.95, 100.0: 0.95}.get(eta, 0.9)
            end |= {"val_ap": math.nextafter(value, 1.0) if eta == ahead else value}
            (place / "record.jsonl").write_text("".join(json.dumps(r) + "\n" for r in (*start, end)))
        _, tuned = tune(experiment, ["fedavg"], tmp_path, stopping=False, extend=0, workers=1)
        chosen.append(tuned["fedavg"].chosen["algorithm.eta"])
    assert chosen == [30.0, 30.0]


def test_a_best_step_at_the_end_of_its_grid_is_marked_and_the_grid_extended_at_most_twice(tmp_path: Path) -> None:
    """Steps far too small: larger ones are tried, one at a time, also after an interruption; other settings stay."""
    tables = small(fedavg={"algorithm.eta": [1e-5, 1e-4], "problem.batch": [10, 20]})
    experiment = tables.with_overrides({"evaluation.metric": "log_loss"})
    metric, tuned = tune(experiment, ["fedavg"], tmp_path / "whole", workers=1)
    outcome = tuned["fedavg"]
    assert [t.settings["algorithm.eta"] for t in outcome.trials[4:]] == [1e-3, 1e-2]
    best = min(outcome.trials[:4], key=lambda t: (-t.round, t.value or math.inf)).settings["problem.batch"]
    assert [t.settings["problem.batch"] for t in outcome.trials[4:]] == [best, best]
    assert [t.state for t in outcome.trials[4:]] == ["finished", "finished"], (
        "what is beyond the grid does not stop early"
    )
    assert outcome.chosen["algorithm.eta"] == 1e-2
    assert outcome.ends == {"algorithm.eta": "largest"}
    assert [row[1] for row in shown(tuned, metric)[1] if row[4] == "chosen"] == [f"eta=0.01 (largest) batch={best}"]

    def tell(sentence: str, heard: list[str] = []) -> None:  # noqa: B006
        heard.append(sentence)
        if len(heard) == 8:  # 4 + 2 + 1 trials of the grid, and one beyond it
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(experiment, ["fedavg"], tmp_path / "cut", workers=1, tell=tell)
    assert tune(experiment, ["fedavg"], tmp_path / "cut", workers=1)[1] == tuned
    none = tune(experiment, ["fedavg"], tmp_path / "none", extend=0, workers=1)[1]["fedavg"]
    assert len(none.trials) == 4
    assert none.ends == {"algorithm.eta": "largest"}
    part = tune(experiment, ["fedavg"], tmp_path / "part", trials=2, workers=1)[1]["fedavg"]
    assert len(part.trials) == 2, "a part of a grid has no ends"
    assert not part.ends


def test_going_on_after_an_end_at_any_moment_finds_the_same(tmp_path: Path) -> None:
    experiment = small(fedavg=ETAS)
    _, whole = tune(experiment, ["fedavg"], tmp_path / "whole", workers=1)
    done: dict[Path, int] = {}
    for stop in (1, 3, 2):  # ended in the first stage, in a later one, …
        heard = 0

        def tell(sentence: str, stop: int = stop) -> None:
            nonlocal heard
            heard += 1
            if heard == stop:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            tune(experiment, ["fedavg"], tmp_path / "cut", workers=1, tell=tell)
        for path in (tmp_path / "cut").glob("fedavg/*/finished.json"):
            done.setdefault(path, path.stat().st_mtime_ns)
        with (tmp_path / "cut" / "trials.log").open("ab") as file:  # and in the middle of a line, with the file locked
            file.write(b'{"op_code":6,"wor')
        (tmp_path / "cut" / "trials.log.lock").symlink_to("trials.log")
    _, resumed = tune(experiment, ["fedavg"], tmp_path / "cut", workers=1)
    assert resumed == whole
    assert all(path.stat().st_mtime_ns == then for path, then in done.items()), "a finished trial is not repeated"


def test_trials_may_finish_in_any_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they do in parallel processes."""
    experiment = small(fedavg=ETAS)
    _, forwards = tune(experiment, ["fedavg"], tmp_path / "forwards", workers=1)
    monkeypatch.setattr(
        "nestfed.experiment.tune.run_jobs", lambda jobs, workers, done: run_jobs([*jobs][::-1], workers, done)
    )
    _, backwards = tune(experiment, ["fedavg"], tmp_path / "backwards", workers=1)
    assert backwards == forwards


def test_trials_that_fail_are_the_worst_and_all_failing_is_said(tmp_path: Path) -> None:
    game = {"problem.name": "auroc", "run.rounds": 12, "run.q": 10, "evaluation.every": 12}
    experiment = small(fedavg={}).with_overrides(game)
    tables = dict(experiment.source)
    tables["methods"] = {"local-sgda": {"algorithm": {"name": "local-sgda", "eta_w": 0.1}}}
    grid = {"algorithm.eta_theta": [1000.0, 0.01, 3000.0]}
    tables["methods"]["local-sgda"]["tune"] = grid
    experiment = from_tables(tables)
    _, tuned = tune(experiment, ["local-sgda"], tmp_path / "some", extend=0, workers=1)
    assert tuned["local-sgda"].chosen == {"algorithm.eta_theta": 0.01}
    assert sorted(t.state for t in tuned["local-sgda"].trials) == ["failed", "failed", "finished"]
    grid["algorithm.eta_theta"] = [1000.0, 3000.0]
    with pytest.raises(NestfedError, match="All trials of local-sgda failed"):
        tune(experiment, ["local-sgda"], tmp_path / "all", workers=1)


def test_some_of_a_grid_are_fair_to_every_step_size() -> None:
    """Three by three points: every step size comes before any comes again, at equal places for every method."""
    one = drawn({"algorithm.eta": CategoricalDistribution([1, 2, 3]), "a": CategoricalDistribution([7, 8, 9])}, 9)
    two = drawn({"algorithm.c_hat": CategoricalDistribution([1, 2, 3]), "z": CategoricalDistribution([7, 8, 9])}, 9)
    assert [list(p.values()) for p in one] == [list(p.values()) for p in two]
    assert len({tuple(p.values()) for p in one}) == 9
    for turn in range(3):
        assert sorted(p["algorithm.eta"] for p in one[3 * turn : 3 * turn + 3]) == [1, 2, 3]


def test_an_error_not_caused_by_the_settings_stops_the_tuning(tmp_path: Path) -> None:
    """Another process holds a trial's directory: that trial has not failed, and the same call resumes later."""
    experiment = small(fedavg=ETAS)
    busy = tmp_path / "cut" / "fedavg" / "trial-001"
    busy.mkdir(parents=True)
    with (
        holder(busy) as process,
        pytest.raises(NestfedError, match=str(process.pid)),
    ):
        tune(experiment, ["fedavg"], tmp_path / "cut", workers=1)
    _, resumed = tune(experiment, ["fedavg"], tmp_path / "cut", workers=1)
    _, whole = tune(experiment, ["fedavg"], tmp_path / "whole", workers=1)
    assert resumed == whole
    with holder(tmp_path / "whole") as process, pytest.raises(NestfedError, match=str(process.pid)):
        tune(experiment, ["fedavg"], tmp_path / "whole", workers=1)


def test_a_seed_that_diverges_does_not_end_a_comparison(tmp_path: Path) -> None:
    """It counts with the last model that was evaluated before, is reported, and is not run again."""
    game = {"problem.name": "auroc", "run.rounds": 12, "run.q": 10, "evaluation.every": 1}
    experiment = small(fedavg={}).with_overrides(game)
    tables = dict(experiment.source)
    tables["methods"] = {
        name: {"algorithm": {"name": "local-sgda", "eta_w": 0.1, "eta_theta": eta}}
        for name, eta in (("sound", 0.01), ("wild", 3000.0))
    }
    experiment = from_tables(tables)
    _, (sound, wild) = compare(experiment, ["sound", "wild"], 2, tmp_path, workers=1)
    assert sound.divergence() == ""
    assert "wild diverged with 2 of 2 seeds" in wild.divergence()
    assert wild.final("auroc") == [h[-1]["auroc"] for h in wild.histories]
    assert all(h[-1]["round"] < 12 for h in wild.histories)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.json*")}
    assert compare(experiment, ["sound", "wild"], 2, tmp_path, workers=1)[1] == [sound, wild]
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.json*")} == before


def test_ranges(tmp_path: Path) -> None:
    experiment = small(fedavg={"algorithm.eta": {"low": 0.1, "high": 100.0, "log": True}, "problem.batch": [5, 20]})
    found = [tune(experiment, ["fedavg"], tmp_path / name, trials=4, workers=1)[1]["fedavg"] for name in "ab"]
    assert found[0] == found[1], "deterministic"
    drawn = [t.settings["algorithm.eta"] for t in found[0].trials]
    assert len(set(drawn)) == 4
    assert all(0.1 <= eta <= 100 for eta in drawn)
    assert min(drawn) < 10**0.5 * 10**0.5 < max(drawn), "on a scale of orders of magnitude"
    whole = search_space(small(fedavg={"problem.batch": {"low": 2, "high": 9}}), "fedavg")["problem.batch"]
    assert isinstance(whole, optuna.distributions.IntDistribution)
    for wrong in ([], 3.0, {"low": 1}, {"low": 2.0, "high": 1.0}, {"low": 0.0, "high": 1.0, "log": True}):
        with pytest.raises(NestfedError, match=r"methods.fedavg.tune.'algorithm.eta'"):
            search_space(small(fedavg={"algorithm.eta": wrong}), "fedavg")


def test_another_tuning_in_the_same_place_is_refused(tmp_path: Path) -> None:
    tune(small(fedavg={"algorithm.eta": [1.0, 10.0]}), ["fedavg"], tmp_path, workers=1)
    with pytest.raises(NestfedError, match="another tuning of fedavg"):
        tune(small(fedavg={"algorithm.eta": [1.0, 30.0]}), ["fedavg"], tmp_path, workers=1)
    bare = small(fedavg=ETAS).with_overrides({"data.validation": 0.0})
    with pytest.raises(NestfedError, match="validation data"):
        tune(bare, ["fedavg"], tmp_path / "bare", workers=1)


def test_tuned_file_is_the_experiment_with_the_choice(tmp_path: Path) -> None:
    experiment = small(fedavg=ETAS, **{"fcsg-m": {"algorithm.alpha": [1.0]}})
    metric, tuned = tune(experiment, ["fedavg", "fcsg-m"], tmp_path / "t", workers=1)
    assert metric == find("ap")
    assert tuned["fcsg-m"].chosen == {"algorithm.alpha": 1.0}
    assert not tuned["fcsg-m"].trials
    written = read(write_tuned(experiment, tuned, tmp_path / "tuned.toml"))
    assert set(written.methods) == {"fedavg", "fcsg-m"}
    for name, outcome in tuned.items():
        wanted = experiment.for_method(name).with_overrides(outcome.chosen)
        assert written.for_method(name).resolved() == wanted.resolved()
        assert not search_space(written, name)
    assert "tune" in experiment.methods["fedavg"], "what was given is left as it was"
    assert tuned_tables(experiment, {})["methods"] == {}


def test_a_paused_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    experiment = read("average-precision").with_overrides({**SMALL, "algorithm.name": "fcsg-m", "algorithm.alpha": 0.3})
    whole = run(experiment, tmp_path / "whole", progress=False, picture=False)
    for until in (1, 3):
        paused = run(experiment, tmp_path / "cut", progress=False, picture=False, until=until)
        assert paused[-1]["round"] == until
        assert not (tmp_path / "cut" / "finished.json").exists()
    resumed = run(experiment, tmp_path / "cut", progress=False, picture=False)
    for one, other in zip(whole, resumed, strict=True):
        assert {**one, "seconds": 0} == {**other, "seconds": 0}
    models = {(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "cut")}
    assert len(models) == 1


def test_compare_tunes_with_the_same_machinery(tmp_path: Path) -> None:
    experiment = small(fedavg=ETAS)
    metric, (outcome,) = compare(experiment, ["fedavg"], 2, tmp_path / "c", stopping=True, workers=1)
    _, tuned = tune(experiment, ["fedavg"], tmp_path / "t", workers=1)
    assert (metric, outcome.trials, outcome.chosen) == (find("ap"), 4, tuned["fedavg"].chosen)
    assert [h[-1]["round"] for h in outcome.histories] == [4, 4]
    assert math.isfinite(sum(outcome.final("ap")))
    _, (thorough,) = compare(experiment, ["fedavg"], 1, tmp_path / "d", extend=0, workers=1)
    ends = [read_record(p / "record.jsonl")[-1] for p in sorted((tmp_path / "d" / "fedavg").glob("trial-*"))]
    assert [r["round"] for r in ends] == [4] * 4, "by default every trial of a comparison runs to its end"
    assert thorough.trials == 4


# --- Real processes ---

WORDS = ("tune", "average-precision", "run.rounds=16", "run.q=5", "evaluation.every=2", "--trials", "4", "--method", "fedavg")  # fmt: skip


def start(cwd: Path, out: str, workers: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "nestfed", *WORDS, "--workers", str(workers), "--out", out],
        cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def children(pid: int) -> set[int]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parts = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(parts[1]) == pid:
            found.add(int(path.parent.name))
    return found


@pytest.mark.slow
def test_killed_by_the_system_and_started_again(tmp_path: Path) -> None:
    """SIGKILL in the middle: the workers end too, the same command resumes, and the choice is that of a whole one."""
    killed = 0
    for progress in (2, 4):
        started = start(tmp_path, "cut", 2)
        while started.poll() is None and len(list((tmp_path / "cut").glob("*/trial-*/record.jsonl"))) < progress:
            time.sleep(0.02)
        workers = children(started.pid)
        killed += started.poll() is None
        started.kill()
        started.wait()
        limit = time.monotonic() + 20
        while any(Path(f"/proc/{w}").exists() for w in workers) and time.monotonic() < limit:
            time.sleep(0.05)
        assert not any(Path(f"/proc/{w}").exists() for w in workers), "no worker outlives its command"
    assert killed == 2
    said = []
    for out, workers_ in (("cut", 2), ("whole", 1)):
        started = start(tmp_path, out, workers_)
        text, errors = started.communicate(timeout=400)
        assert started.returncode == 0, errors
        said.append(text.replace(out, "OUT"))
    assert said[0] == said[1]
    same = {(tmp_path / out / "tuned.toml").read_bytes() for out in ("cut", "whole")}
    assert len(same) == 1
