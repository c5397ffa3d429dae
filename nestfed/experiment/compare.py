"""A fair comparison of methods: tune each in the same way, then run it with every seed."""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nestfed.core import Metric, NestfedError
from nestfed.engine.record import read as read_record
from nestfed.experiment.run import DIVERGED, Job, run_jobs
from nestfed.experiment.spec import Experiment
from nestfed.experiment.tune import tune
from nestfed.files import locked, make_directory, reject_foreign
from nestfed.report.summary import MethodResult

LOG = logging.getLogger(__name__)


def compare(
    experiment: Experiment,
    methods: Sequence[str],
    seeds: int,
    out: Path,
    *,
    trials: int = 0,
    trial_rounds: int = 0,
    stopping: bool = False,
    trial_seeds: int = 1,
    workers: int | None = None,
    tell: Callable[[str], None] = LOG.info,
) -> tuple[Metric, list[MethodResult]]:
    """Tune every method on validation data (see `nestfed.experiment.tune`), then run it with every seed.

    Tuning uses validation data only, and seeds that are not reported. Return the metric and one result per method.

    - `trials`: trials per method; 0 = its whole grid.
    - `trial_rounds`: rounds of a trial; 0 = those of a run.
    - `stopping`: stop the worse half of the trials early.
    - `trial_seeds`: seeds per trial.
    - `workers`: parallel processes; None = one per core.
    - `tell`: called with progress messages; by default they go to the log.
    """
    workers = workers or os.cpu_count() or 1
    if seeds < 1:
        raise NestfedError(f"seeds must be at least 1, not {seeds}.")
    how: dict[str, Any] = {"trials": trials, "rounds": trial_rounds, "stopping": stopping, "seeds": trial_seeds}
    reject_foreign(out, "comparison or tuning", "trials.log", "*/seed-*", "*/trial-*")
    with locked(make_directory(out)):
        metric, tuned = tune(experiment, methods, out, workers=workers, tell=tell, **how)
        chosen = {name: tuned[name].chosen for name in methods}
        runs = _with_all_seeds(experiment, chosen, seeds, out, workers, tell)
    return metric, [
        MethodResult(
            name,
            tuned[name].chosen,
            len(tuned[name].trials),
            [read_record(j.out / "record.jsonl") for j in runs[name]],
            [json.loads((j.out / DIVERGED).read_text()) for j in runs[name] if (j.out / DIVERGED).exists()],
        )
        for name in methods
    ]


def _with_all_seeds(
    experiment: Experiment,
    chosen: Mapping[str, Mapping[str, Any]],
    seeds: int,
    out: Path,
    workers: int,
    tell: Callable[[str], None],
) -> dict[str, list[Job]]:
    """Run every method with its settings and every seed; return the jobs."""
    runs = {
        name: [
            Job(
                experiment.for_method(name).with_overrides({**settings, "run.seed": experiment.run.seed + s}).source,
                out / name / f"seed-{experiment.run.seed + s}",
                picture=name == next(iter(chosen)) and s == 0,  # the clients are the same in all runs
            )
            for s in range(seeds)
        ]
        for name, settings in chosen.items()
    }
    jobs = [job for of_method in runs.values() for job in of_method]
    total, count = sum(not job.done() for job in jobs), itertools.count(1)

    def on_run(job: Job, error: NestfedError | None) -> None:
        if error is not None and not (job.out / DIVERGED).exists():
            raise NestfedError(f"{job.out.parent.name}, {job.out.name}: {error}") from error
        tell(f"run {next(count)}/{total}")

    run_jobs(jobs, workers, on_run)
    return runs
