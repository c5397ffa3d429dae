"""A fair comparison of several methods: tune each alike, then run it with every seed."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nestfed.core import Metric, NestfedError
from nestfed.engine.record import read as read_record
from nestfed.experiment.run import DIVERGED, Job, carry_out
from nestfed.experiment.spec import Experiment
from nestfed.experiment.tune import tune
from nestfed.files import locked
from nestfed.report.summary import MethodResult


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
    tell: Callable[[str], None] = lambda sentence: None,
) -> tuple[Metric, list[MethodResult]]:
    """Tune every method by the validation metric (see `nestfed.experiment.tune`), then run it with every seed.

    Tuning sees validation data only and seeds that are not reported; trials have up to `trial_rounds` rounds (0: all)
    with each of `trial_seeds` seeds, and with `stopping` the worse half of them stops early. Return the metric and an
    outcome per method.
    """
    workers = workers or os.cpu_count() or 1
    if seeds < 1:
        raise NestfedError(f"seeds must be at least 1, not {seeds}.")
    how: dict[str, Any] = {"trials": trials, "rounds": trial_rounds, "stopping": stopping, "seeds": trial_seeds}
    out.mkdir(parents=True, exist_ok=True)
    with locked(out):
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
    """Run every method with its settings and every seed; return what was run."""
    runs = {
        name: [
            Job(
                experiment.for_method(name).with_overrides({**settings, "run.seed": experiment.run.seed + s}).source,
                out / name / f"seed-{experiment.run.seed + s}",
                picture=name == next(iter(chosen)) and s == 0,  # all hold the same
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

    carry_out(jobs, workers, on_run)
    return runs
