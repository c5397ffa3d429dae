"""A fair comparison of methods: tune each in the same way, then run it with every seed."""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nestfed.core import Metric, NestfedError, unknown
from nestfed.engine.record import read as read_record
from nestfed.experiment.run import DIVERGED, Job, run_jobs
from nestfed.experiment.spec import Experiment
from nestfed.experiment.tune import EXTEND, tune
from nestfed.files import locked, make_directory, reject_foreign, write_atomically
from nestfed.report import html, plot
from nestfed.report.drawing import drawable
from nestfed.report.page import Table
from nestfed.report.summary import MethodResult, comparison_table, page_of_comparison
from nestfed.report.text import as_text

LOG = logging.getLogger(__name__)
FILE = "comparison.json"


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
    extend: int = EXTEND,
    title: str = "",
    workers: int | None = None,
    tell: Callable[[str], None] = LOG.info,
) -> tuple[Metric, list[MethodResult]]:
    """Tune every method on validation data (see `nestfed.experiment.tune`), then run it with every seed.

    Tuning uses validation data only, and seeds that are not reported. Return the metric and one result per method.

    - `trials`: trials per method; 0 = its whole grid.
    - `trial_rounds`: rounds of a trial; 0 = those of a run.
    - `stopping`: stop the worse half of the trials early.
    - `trial_seeds`: seeds per trial.
    - `extend`: how many trials with the next step size a method gets while its best one is at the end of its whole grid.
    - `title`: of the report.
    - `workers`: parallel processes; None = one per core.
    - `tell`: called with progress messages; by default they go to the log.
    """
    workers = workers or os.cpu_count() or 1
    if seeds < 1:
        raise NestfedError(f"seeds must be at least 1, not {seeds}.")
    how: dict[str, Any] = {"trials": trials, "rounds": trial_rounds, "stopping": stopping, "seeds": trial_seeds}
    how["extend"] = extend
    reject_foreign(out, "comparison or tuning", "trials.log", "*/seed-*", "*/trial-*")
    with locked(make_directory(out)):
        metric, tuned = tune(experiment, methods, out, workers=workers, tell=tell, **how)
        chosen = {name: tuned[name].chosen for name in methods}
        _with_all_seeds(experiment, chosen, seeds, out, workers, tell)
        content = {
            "title": title,
            "metric": {"name": metric.name, "higher": metric.higher},
            "seeds": [experiment.run.seed + s for s in range(seeds)],
            "methods": {
                name: {"chosen": t.chosen, "trials": len(t.trials), "ends": t.ends} for name, t in tuned.items()
            },
        }
        text = json.dumps(content, indent=2).encode()
        if not (out / FILE).exists() or (out / FILE).read_bytes() != text:
            write_atomically(out / FILE, text)
    found = Comparison.read(out)
    return metric, list(found.results)


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison. `print(comparison)` shows its table."""

    place: Path
    title: str
    metric: Metric
    seeds: Sequence[int]
    results: Sequence[MethodResult]
    """One per method."""
    keep: Any = field(default=None, repr=False, compare=False)
    """A temporary directory that lives as long as this object."""

    @classmethod
    def read(cls, place: Path, keep: Any = None) -> Comparison:
        """Read the comparison in a directory."""
        try:
            found = json.loads((place / FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise NestfedError(f"{place} contains no finished comparison: {FILE} cannot be read ({error}).") from error
        results = []
        for name, of in found["methods"].items():
            runs = [place / name / f"seed-{seed}" for seed in found["seeds"]]
            histories = [read_record(run / "record.jsonl") for run in runs]
            diverged = [json.loads((run / DIVERGED).read_text()) for run in runs if (run / DIVERGED).exists()]
            results.append(MethodResult(name, of["chosen"], of["trials"], histories, diverged, of["ends"]))
        return cls(place, found["title"], Metric(**found["metric"]), found["seeds"], results, keep)

    def __getitem__(self, method: str) -> MethodResult:
        """Return the result of a method."""
        found = {result.method: result for result in self.results}
        if method not in found:
            raise unknown("method", method, found)
        return found[method]

    def table(self) -> Table:
        """Return final values, the rounds to the worst final mean, costs and tuning, one row per method."""
        return comparison_table(self.results, self.metric)

    def __str__(self) -> str:
        return as_text(self.table())

    def report(self, directory: str | Path | None = None) -> Path:
        """Write report.html, and curves.png if matplotlib is installed; return the report's path."""
        place = self.place if directory is None else Path(directory)
        if drawable():
            self.draw(place / "curves.png")
        page = page_of_comparison(self.place, self.metric, self.results, title=self.title)
        return html.write(page, place / "report.html")

    def draw(self, path: Path) -> Path:
        """Draw the metric against rounds, examples and bytes."""
        shown = {o.method: o.histories for o in self.results}
        return plot.curves(shown, self.metric.name, path, self.title)


def _with_all_seeds(
    experiment: Experiment,
    chosen: Mapping[str, Mapping[str, Any]],
    seeds: int,
    out: Path,
    workers: int,
    tell: Callable[[str], None],
) -> None:
    """Run every method with its settings and every seed."""
    runs = {
        name: [
            Job(
                experiment.for_method(name).with_overrides({**settings, "run.seed": experiment.run.seed + s}),
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
