"""Tuning: try the settings of each method's grid on validation data, in parallel and resumable.

A method's trials are an Optuna study in `trials.log`; each trial is an ordinary run in its own directory. After a quarter
and after half of the rounds, the worse half of a method's trials stops. This rule waits for all trials, so the result
does not depend on their speed, and it is the same for all methods. `nestfed.experiment.choice` has the rule that chooses.

If the best value is at the end of a grid of step sizes, the next step beyond it is tried too, at most twice (`EXTEND`).
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import logging
import math
import os
import random
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import RandomSampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from nestfed.core import DivergedError, Metric, NestfedError
from nestfed.engine.record import read as read_record
from nestfed.experiment import choice
from nestfed.experiment.build import assemble
from nestfed.experiment.own import OwnExperiment
from nestfed.experiment.run import TUNING_SEED, Job, resamples, run_jobs
from nestfed.experiment.spec import Experiment
from nestfed.files import locked, make_directory, reject_foreign, write_atomically
from nestfed.metrics import find
from nestfed.report.summary import in_words

if TYPE_CHECKING:
    from optuna.study import Study

LOG = logging.getLogger(__name__)
TRIALS = 10
"""The default number of trials for a grid with ranges."""
STOPS = (0.25, 0.5)
"""The worse half of the trials stops after these shares of the rounds."""
EXTEND = 2
"""How often a grid whose best step size is at its end is extended by the next one."""
STATES = {TrialState.COMPLETE: "finished", TrialState.PRUNED: "stopped", TrialState.FAIL: "failed"}


@dataclass(frozen=True)
class Trial:
    """The result of one trial."""

    settings: Mapping[str, Any]
    state: str
    """finished, stopped (early, in the worse half) or failed (diverged)."""
    value: float | None
    """The last validation metric."""
    round: int
    """The round of `value`."""


@dataclass(frozen=True)
class Tuned:
    """The result of tuning one method."""

    method: str
    chosen: Mapping[str, Any]
    trials: Sequence[Trial] = ()
    """Empty if the grid has a single point."""
    ends: Mapping[str, choice.End] = field(default_factory=dict)
    """The chosen step sizes that are the smallest or the largest of those tried."""


class Halving(optuna.pruners.BasePruner):
    """Stops the worse half of `count` trials after each rung; failed trials rank last."""

    def __init__(
        self,
        count: int,
        rungs: Sequence[int],
        metric: Metric,
        steps: Callable[[FrozenTrial], tuple[float, ...]] = lambda trial: (),
    ) -> None:
        self.count, self.rungs, self.metric, self.steps = count, rungs, metric, steps

    def prune(self, study: Study, trial: FrozenTrial) -> bool:
        """Return whether a trial stops; all trials must have reported their value at this round."""
        step = trial.last_step
        if step is None or step not in self.rungs:
            return False

        trials = [t for t in study.trials if step in t.intermediate_values]
        order = choice.rank(self.metric, [choice.Option(t.intermediate_values[step], self.steps(t)) for t in trials])
        kept = math.ceil(self.count / 2 ** sum(rung <= step for rung in self.rungs))
        return trial.number not in [trials[i].number for i in order[:kept]]


def search_space(experiment: Experiment, method: str) -> dict[str, BaseDistribution]:
    """Return what a method's [methods.NAME.tune] says: for every dotted setting a list of values, or a range.

    A range is {low, high}, on a logarithmic scale with log = true; if both ends are whole numbers, so are all values.
    """
    space: dict[str, BaseDistribution] = {}
    for key, given in experiment.grid(method).items():
        where = f"methods.{method}.tune.{key!r}"
        if isinstance(given, list) and given:
            space[key] = CategoricalDistribution([_scalar(value) for value in given])
        elif isinstance(given, Mapping) and {"low", "high"} <= set(given) <= {"low", "high", "log"}:
            low, high, log = given["low"], given["high"], given.get("log", False)
            whole = isinstance(low, int) and isinstance(high, int)
            try:
                space[key] = IntDistribution(low, high, log) if whole else FloatDistribution(low, high, log)
            except (TypeError, ValueError) as error:
                raise NestfedError(f"{where} is not a valid range: {error}") from error
        else:
            raise NestfedError(f"{where} must be a list of values to try, or a range {{low, high, log}}.")
    return space


def _scalar(value: Any) -> Any:
    """Return a value that Optuna can store; a table or list becomes JSON."""
    return json.dumps(value) if isinstance(value, dict | list) else value


def _settings(experiment: Experiment, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return a trial's settings as written in the file, in the same order."""
    grid = experiment.grid(method)
    originals = {k: {_scalar(v): v for v in given} if isinstance(given, list) else {} for k, given in grid.items()}
    return {k: originals[k].get(params[k], params[k]) for k in grid}


@dataclass(frozen=True)
class _Search:
    """The trials of one method."""

    method: str
    experiment: Experiment
    variant: Experiment
    study: Study
    plan: Sequence[int]
    """The rounds at which trials pause, and their last round."""
    metric: Metric
    """The metric on validation data."""
    out: Path
    seeds: int
    """Seeds per trial; their mean counts."""

    whole: bool
    """The trials cover the whole grid, so that it has ends."""

    def settings(self, trial: FrozenTrial) -> dict[str, Any]:
        return _trial_settings(self.experiment, self.method, trial)

    def extensions(self) -> list[FrozenTrial]:
        """Return the trials beyond the grid."""
        return [t for t in self.study.trials if _BEYOND in t.user_attrs]

    def options(self) -> list[choice.Option]:
        """Return the trials as options; those that stopped early or failed have no value."""
        keys = step_settings(self.variant, self.experiment.grid(self.method))
        options = []
        for t in self.study.trials:
            steps = _steps(keys, self.settings(t))
            if t.state not in (TrialState.COMPLETE, TrialState.PRUNED) or t.last_step != self._farthest():
                options.append(choice.Option(None, steps))
                continue
            jobs = self.jobs(t, t.last_step)
            rows = [resamples(job.out, t.last_step) for job in jobs]
            each = [validation(job.out, self.metric, t.last_step) for job in jobs]
            means = [fmean(values) for values in zip(*rows)] if all(rows) else []
            options.append(
                choice.Option(t.intermediate_values[t.last_step], steps, means, each if len(each) > 1 else ())
            )
        return options

    def _farthest(self) -> int:
        """Return the last round that any trial reached; those that failed later do not count."""
        return max(t.last_step or 0 for t in self.study.get_trials(states=(TrialState.COMPLETE, TrialState.PRUNED)))

    def extend(self) -> bool:
        """Add a trial with the next step size if the best one is at the end of those tried; return whether it did."""
        if not self.whole:
            return False
        settings = [self.settings(t) for t in self.study.trials]
        first = settings[choice.best(self.metric, self.options())]
        for key in step_settings(self.variant, self.experiment.grid(self.method)):
            tried = [_size(s[key]) for s in settings]
            after = choice.beyond(_size(first[key]), tried) if isinstance(first[key], int | float) else None
            if after is not None:
                attrs = {_BEYOND: json.dumps({**first, key: after})}
                self.study.add_trial(optuna.trial.create_trial(state=TrialState.RUNNING, user_attrs=attrs))
                return True
        return False

    def jobs(self, trial: FrozenTrial, until: int) -> list[Job]:
        made = []
        for s in range(self.seeds):
            # A trial needs no final point, and a run with keep = "uniform" cannot pause.
            fixed = {"run.seed": TUNING_SEED + self.experiment.run.seed + s, "evaluation.keep": "last"}
            experiment = self.variant.with_overrides({**self.settings(trial), **fixed}).alone()
            name = f"trial-{trial.number:03d}" + (f"-again-{s}" if s else "")
            made.append(Job(experiment, self.out / self.method / name, until, tuning=True))
        return made

    def check(self) -> None:
        """Reject trials of other objects of the user's; all trials here have passed this check, so one is enough."""
        for trial in self.study.trials[:1]:
            if trial.state != TrialState.RUNNING:
                self.jobs(trial, self.plan[-1])[0].check()

    def running(self, step: int) -> list[FrozenTrial]:
        """Return the trials that run to a round; those beyond the grid do not pause."""
        running = self.study.get_trials(states=(TrialState.RUNNING,))
        return [t for t in running if step == self.plan[-1] or _BEYOND not in t.user_attrs]

    def judged(self, jobs: Mapping[int, Sequence[Job]], step: int, errors: Mapping[Path, str]) -> None:
        """Report the value of each running trial at a round, then stop the worse half."""
        failed = {number: errors[job.out] for number, runs in jobs.items() for job in runs if job.out in errors}
        if len(failed) == len(jobs) and not self.study.get_trials(states=(TrialState.COMPLETE, TrialState.PRUNED)):
            raise NestfedError(f"All trials of {self.method} failed; the first error: {failed[min(failed)]}")
        for number in failed:
            self.study.tell(number, state=TrialState.FAIL)
        going = {t.number: t for t in self.running(step) if t.number in jobs}
        for number, trial in going.items():
            if step not in trial.intermediate_values:
                value = fmean(validation(job.out, self.metric, step) for job in jobs[number])
                optuna.trial.Trial(self.study, trial._trial_id).report(value, step)
        for trial in self.running(step):
            if trial.number in going:
                if step == self.plan[-1]:
                    self.study.tell(trial.number, trial.intermediate_values[step])
                elif optuna.trial.Trial(self.study, trial._trial_id).should_prune():
                    self.study.tell(trial.number, state=TrialState.PRUNED)

    def outcome(self) -> Tuned:
        trials = []
        for t in self.study.trials:
            value = t.intermediate_values[t.last_step] if t.last_step is not None else None
            trials.append(Trial(self.settings(t), STATES[t.state], value, t.last_step or 0))

        settings = [trial.settings for trial in trials]
        # Choose among the trials that got farthest; those that failed later do not count.
        chosen = settings[choice.choose(self.metric, self.options())]
        ends = {}
        for key in step_settings(self.variant, self.experiment.grid(self.method)) if self.whole else ():
            if where := choice.end(_size(chosen[key]), [_size(s[key]) for s in settings]):
                ends[key] = where
        return Tuned(self.method, chosen, trials, ends)


_BEYOND = "settings"
"""The attribute of a trial beyond the grid: Optuna's categories cannot grow."""


def step_settings(variant: Experiment, grid: Mapping[str, Any]) -> list[str]:
    """Return the settings of a grid that are step sizes, the method's first, then the server's."""
    known = [f"algorithm.{step}" for step in variant.steps()]
    return [key for key in (*known, "server.eta_g") if key in grid]


def _size(value: Any) -> float:
    """Return a step size as a number; a schedule counts with its scale."""
    return float(value.get("scale", 1.0) if isinstance(value, Mapping) else value)


def _steps(keys: Sequence[str], settings: Mapping[str, Any]) -> tuple[float, ...]:
    return tuple(_size(settings[key]) for key in keys)


def _trial_settings(experiment: Experiment, method: str, trial: FrozenTrial) -> dict[str, Any]:
    if _BEYOND in trial.user_attrs:
        found: dict[str, Any] = json.loads(trial.user_attrs[_BEYOND])
        return found
    return _settings(experiment, method, trial.params)


def validation(out: Path, metric: Metric, step: int) -> float:
    """Return a run's validation metric at a round; NaN counts as the worst value."""
    records = [r for r in read_record(out / "record.jsonl") if metric.name in r]
    if not records:
        raise NestfedError(f"The records in {out} have no {metric.name!r}: tuning needs a metric on validation data.")
    found = [r[metric.name] for r in records if r["round"] == step]
    return float(found[-1]) if found and found[-1] is not None else metric.floor


def pauses(rounds: int, every: int, before: int = 0) -> list[int]:
    """Return the rounds after which the worse half stops; they are rounded up to an evaluation.

    Shares are of the rounds after a warm-up of `before` rounds: in it, the trials of a method do not differ yet.
    """
    steps = {math.ceil((before + share * (rounds - before)) / every) * every for share in STOPS}
    return sorted(step for step in steps if step < rounds)


def trial_rounds(variant: Experiment, most: int) -> int:
    """Return the rounds of a trial, at most `most` (0 = no limit)."""
    return min(most or variant.run.rounds, variant.run.rounds)


def number(space: Mapping[str, BaseDistribution], trials: int) -> int:
    """Return the number of trials: `trials`, but at most the points of a grid; 0 = the whole grid."""
    if any(not isinstance(d, CategoricalDistribution) for d in space.values()):
        return trials or TRIALS
    size = math.prod(len(d.choices) for d in space.values() if isinstance(d, CategoricalDistribution))
    return min(trials or size, size)


def drawn(space: dict[str, BaseDistribution], count: int) -> list[dict[str, Any]]:
    """Return the points to try, drawn with a fixed seed: from the ranges if there are any, else from the grid.

    Points of a grid alternate between the values of its first setting, usually the step size. Grids of equal shape get
    points at equal positions. Otherwise chance would decide which method gets the good step sizes.
    """
    lists = {k: list(d.choices) for k, d in space.items() if isinstance(d, CategoricalDistribution)}
    if len(lists) < len(space):
        study = optuna.create_study(sampler=RandomSampler(seed=TUNING_SEED))
        return [study.ask(space).params for _ in range(count)]
    places = list(itertools.product(*(range(len(values)) for values in lists.values())))
    random.Random(TUNING_SEED).shuffle(places)
    seen: Counter[int] = Counter()
    turns = []
    for place in places:
        turns.append((seen[place[0]], place))
        seen[place[0]] += 1
    turns.sort(key=lambda turn: turn[0])
    return [{k: lists[k][i] for k, i in zip(lists, place)} for _, place in turns[:count]]


def _storage(path: Path) -> JournalStorage:
    """Open the file of all studies; remove the partial line and the lock of a crash (the directory is locked)."""
    if path.exists():
        text = path.read_bytes()
        if not text.endswith(b"\n"):
            write_atomically(path, text[: text.rfind(b"\n") + 1])
    Path(f"{path}.lock").unlink(missing_ok=True)
    return JournalStorage(JournalFileBackend(str(path)))


def _open(
    experiment: Experiment,
    method: str,
    variant: Experiment,
    metric: Metric,
    out: Path,
    trials: int,
    stopping: bool,
    seeds: int,
) -> _Search:
    """Open or resume a method's study, with all its trials drawn."""
    if variant.evaluation.patience:
        raise NestfedError("Tuning stops the worse half of the trials by its own rule: set evaluation.patience = 0.")
    space = search_space(experiment, method)
    count = number(space, trials)
    rungs = pauses(variant.run.rounds, variant.evaluation.every, variant.warm_up.rounds) if stopping else []
    grid = experiment.grid(method)
    several = [seeds] if seeds > 1 else []
    content = json.dumps([variant.resolved(), experiment.run.seed, grid, count, rungs, *several], sort_keys=True)
    identity = hashlib.sha256(content.encode()).hexdigest()
    study = optuna.create_study(
        study_name=method,
        storage=_storage(out / "trials.log"),
        direction="maximize" if metric.higher else "minimize",
        load_if_exists=True,
        pruner=Halving(
            count, rungs, metric, lambda t: _steps(step_settings(variant, grid), _trial_settings(experiment, method, t))
        ),
    )
    if study.user_attrs.get("identity", identity) != identity:
        raise NestfedError(
            f"{out} contains another tuning of {method}: other settings, another grid or number of trials; choose another "
            "directory with --out."
        )
    study.set_user_attr("identity", identity)
    for params in drawn(space, count)[len(study.trials) :]:
        study.add_trial(optuna.trial.create_trial(state=TrialState.RUNNING, params=params, distributions=space))
    whole = count == number(space, 0) and not any(isinstance(v, Mapping) for v in grid.values())
    return _Search(method, experiment, variant, study, (*rungs, variant.run.rounds), metric, out, seeds, whole)


def tune(
    experiment: Experiment,
    methods: Sequence[str],
    out: Path,
    *,
    trials: int = 0,
    rounds: int = 0,
    stopping: bool = True,
    seeds: int = 1,
    extend: int = EXTEND,
    workers: int | None = None,
    tell: Callable[[str], None] = LOG.info,
) -> tuple[Metric, dict[str, Tuned]]:
    """Try settings for each method and choose the best on validation data; return the metric and the results.

    Call it again with the same `out` to resume.

    - `trials`: trials per method, at most its whole grid; 0 = the whole grid.
    - `rounds`: rounds of a trial; 0 = those of a run.
    - `stopping`: stop the worse half of the trials early.
    - `seeds`: seeds per trial; their mean counts.
    - `extend`: how many trials with the next step size a method gets while its best one is at the end of its whole grid.
    - `workers`: parallel processes; None = one per core.
    - `tell`: called with progress messages; by default they go to the log.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if trials < 0:
        raise NestfedError(f"trials must be at least 0 (0 = the whole grid), not {trials}.")
    if not methods:
        raise NestfedError("No methods to tune: name at least one.")
    metrics, found, variants = {}, {}, {}
    for name in methods:
        variant = experiment.for_method(name)
        variants[name] = variant = variant.with_overrides({"run.rounds": trial_rounds(variant, rounds)})
        space = search_space(experiment, name)
        start = {k: d.choices[0] if isinstance(d, CategoricalDistribution) else d.low for k, d in space.items()}  # type: ignore[attr-defined]
        start = _settings(experiment, name, start)
        made = assemble(variant.with_overrides(start))
        metrics[name] = find(experiment.evaluation.metric or made.metric)
        if all(d.single() for d in space.values()):
            found[name] = Tuned(name, start)
        elif made.validation is None:
            how = "pass validate=" if isinstance(experiment, OwnExperiment) else "set data.validation, for example 0.1"
            raise NestfedError(f"Tuning {name} needs validation data: {how}.")
        elif isinstance(experiment, OwnExperiment):
            experiment.check_metric("validate", made.validation, made.problem)
    reject_foreign(out, "comparison or tuning", "trials.log", "*/seed-*", "*/trial-*")
    with locked(make_directory(out)):
        searches = [
            _open(experiment, n, variants[n], _on_validation(metrics[n]), out, trials, stopping, seeds)
            for n in methods
            if n not in found
        ]
        for search in searches:
            search.check()
        workers = workers or os.cpu_count() or 1
        _search(searches, workers, tell)
        for extra in range(extend):
            # A resumed tuning already has some of these trials.
            longer = [s for s in searches if len(s.extensions()) == extra and s.extend()]
            _search(longer, workers, tell)
    found |= {s.method: s.outcome() for s in searches}
    return metrics[methods[-1]], {name: found[name] for name in methods}


def _on_validation(metric: Metric) -> Metric:
    """Return a metric with the name of its validation value in records."""
    return replace(metric, name=f"val_{metric.name}")


def _search(searches: Sequence[_Search], workers: int, tell: Callable[[str], None]) -> None:
    """Run all trials, stage by stage."""
    for stage in range(max((len(s.plan) for s in searches), default=0)):
        todo = {
            s.method: {t.number: s.jobs(t, s.plan[stage]) for t in s.running(s.plan[stage])}
            for s in searches
            if stage < len(s.plan)
        }
        errors: dict[Path, str] = {}
        jobs = [job for of_method in todo.values() for of_trial in of_method.values() for job in of_trial]
        total, count = sum(not job.done() for job in jobs), itertools.count(1)

        def on_trial(job: Job, error: NestfedError | None, errors: dict[Path, str] = errors, of: int = total) -> None:
            if isinstance(error, DivergedError):
                errors[job.out] = str(error)
            elif error is not None:  # for example a full disk: not caused by the settings
                raise NestfedError(f"{job.out.parent.name}, {job.out.name}: {error}") from error
            tell(f"tuning, to round {job.until}: {next(count)}/{of}")  # noqa: B023 (called before the next stage)

        run_jobs(jobs, workers, on_trial)
        for search in searches:
            if todo.get(search.method):
                search.judged(todo[search.method], search.plan[stage], errors)


def tuned_tables(experiment: Experiment, tuned: Mapping[str, Tuned]) -> dict[str, Any]:
    """Return the experiment's tables with the chosen settings instead of the grids."""
    tables = copy.deepcopy(dict(experiment.source))
    for name, outcome in tuned.items():
        table = tables.setdefault("methods", {}).setdefault(name, {})
        table.pop("tune", None)
        table["algorithm"] = dict(
            experiment.for_method(name).source["algorithm"]
        )  # a method's own table replaces the whole section
        for key, value in outcome.chosen.items():
            section, _, setting = key.partition(".")
            table.setdefault(section, {})[setting] = value
    tables["methods"] = {name: table for name, table in tables.get("methods", {}).items() if name in tuned}
    return tables


def write_tuned(experiment: Experiment, tuned: Mapping[str, Tuned], path: Path) -> Path:
    """Write an experiment file with the chosen settings, for `nestfed compare`."""
    import tomli_w

    text = tomli_w.dumps(tuned_tables(experiment, tuned))
    tomllib.loads(text)
    write_atomically(path, text.encode())
    return path


def shown(tuned: Mapping[str, Tuned], metric: Metric) -> tuple[list[str], list[list[str]]]:
    """Return a table of all trials, best first, with the chosen one marked."""
    rows = []
    for outcome in tuned.values():
        settings = in_words(outcome.chosen, outcome.ends)
        if not outcome.trials:
            rows.append([outcome.method, settings or "as in the file", "", "", "nothing to choose"])
        for trial in sorted(outcome.trials, key=lambda t: (-t.round, -metric.signed(t.value))):
            chosen = trial.state == "finished" and trial.settings == outcome.chosen
            value = "" if trial.value is None else f"{trial.value:.4f}"
            settings = in_words(trial.settings, outcome.ends if chosen else {})
            rows.append([outcome.method, settings, value, str(trial.round), "chosen" if chosen else trial.state])
    return ["method", "settings", f"{metric.name} on validation", "after round", ""], rows
