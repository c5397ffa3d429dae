"""Run an experiment in a directory, or many runs in parallel."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from nestfed.algorithms import Alone
from nestfed.core import DivergedError, Fields, NestfedError
from nestfed.engine.record import read as read_record
from nestfed.engine.round import Record
from nestfed.engine.run_directory import Interrupted
from nestfed.engine.simulate import simulate, verify
from nestfed.experiment.build import Assembly, assemble
from nestfed.experiment.choice import resampled
from nestfed.experiment.own import OwnExperiment
from nestfed.experiment.spec import Experiment, difference, identity
from nestfed.files import locked, make_directory, reject_foreign, write_atomically, write_model
from nestfed.metrics import find
from nestfed.report import plot
from nestfed.report.drawing import drawable
from nestfed.report.machine import describe
from nestfed.report.scores import curves_of
from nestfed.report.summary import BY_CLIENT

TUNING_SEED = 1000
"""The first seed of tuning, so that no reported seed is used for tuning."""
DIVERGED = "diverged.json"
"""The file that marks a diverged run of a comparison; such a run is not repeated."""


RESAMPLED = "validation.json"
"""The file of a trial with its metric on resampled validation rows, which give the noise of a choice."""


def resamples(out: Path, step: int) -> list[float]:
    """Return a trial's metric on resampled validation rows after a round; empty if it is unknown."""
    try:
        found = json.loads((out / RESAMPLED).read_text(encoding="utf-8"))
        return [float("nan") if v is None else float(v) for v in found["values"]] if found["round"] == step else []
    except (OSError, ValueError, TypeError, KeyError):
        return []


def claim(out: Path, experiment: Experiment) -> None:
    """Create a run's directory, or reject one that belongs to another experiment."""
    reject_foreign(out, "run", "experiment.json")
    path = make_directory(out) / "experiment.json"
    settings = json.dumps(experiment.resolved(), indent=2, sort_keys=True)
    if path.exists():
        try:
            held = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise NestfedError(f"{path} cannot be read: {error}.") from error
        if what := difference(identity(json.loads(settings)), identity(held)):
            raise NestfedError(f"{out} contains another experiment: {what}; choose another directory with --out.")
    else:
        write_atomically(path, settings.encode())


def leads() -> bool:
    """Return whether this process writes: under `torchrun` only rank 0 does."""
    return os.environ.get("RANK", "0") == "0"


def run(
    experiment: Experiment,
    out: Path,
    *,
    progress: bool | None = None,
    picture: bool = True,
    profile: Callable[[Mapping[str, float]], None] | None = None,
    until: int = 0,
    tuning: bool = False,
) -> list[Record]:
    """Run an experiment in a directory. Resume an unfinished run; do not repeat a finished one.

    - `progress`: show a progress bar; None = only on a terminal.
    - `picture`: draw the clients' examples in clients.png (clients.txt lists them).
    - `profile`: called with the seconds by activity.
    - `until`: pause after this round; 0 = run to the end.
    - `tuning`: do not evaluate on the test data.
    """
    from nestfed.experiment.build import method, warm_up_method

    method(experiment)  # reject a wrong method first: its directory may be that of a comparison
    warm_up_method(experiment)
    fresh = not out.exists()
    if leads():
        claim(out, experiment)
    if (out / "finished.json").exists():
        return read_record(out / "record.jsonl")
    with locked(out) if leads() else nullcontext():
        try:
            return _run(experiment, out, progress, picture and leads(), profile, until, tuning)
        except NestfedError:
            if fresh and leads() and not read_record(out / "record.jsonl"):
                shutil.rmtree(out)  # nothing was done, so leave nothing behind
            raise


def _run(
    experiment: Experiment,
    out: Path,
    progress: bool | None,
    picture: bool,
    profile: Callable[[Mapping[str, float]], None] | None,
    until: int,
    tuning: bool,
) -> list[Record]:
    made = _assembled(experiment, tuning)
    if leads() and not (out / "machine.json").exists():
        write_atomically(out / "machine.json", json.dumps(describe()).encode())
    if made.summary is not None and leads():
        write_atomically(out / "clients.txt", f"{made.summary}\n".encode())
        if picture and drawable():
            plot.clients(made.summary, out / "clients.png")
    history = _simulate(experiment, made, out, progress, until, profile, tuning)
    if leads():
        _finish(experiment, out, history, until)
    return history


def _assembled(experiment: Experiment, tuning: bool) -> Assembly:
    """Build the objects of a run; tuning does not see the test data."""
    made = assemble(experiment)
    return replace(made, test=lambda model: {}, ranks=None, by_client=None) if tuning else made


def _arguments(experiment: Experiment, made: Assembly) -> dict[str, Any]:
    """Return the arguments of `simulate` that decide what a run finds."""
    spec, evaluation = experiment.run, experiment.evaluation
    if evaluation.keep == "best":
        decisive = find(evaluation.metric or made.metric)
        evaluation = replace(evaluation, metric=replace(decisive, name=f"val_{decisive.name}"))
    alone = Alone(made.algorithm) if spec.sites == "alone" else None
    return {
        "problem": made.problem,
        "method": alone or made.algorithm,
        "clients": made.clients,
        "q": spec.q,
        "seed": spec.seed,
        "evaluate": None if alone else made.evaluate,
        "measure": partial(_mean_over_clients, made, alone) if alone else None,
        "evaluation": evaluation,
        "exchange": experiment.exchange,
    }


def _simulate(
    experiment: Experiment,
    made: Assembly,
    out: Path,
    progress: bool | None,
    until: int,
    profile: Callable[[Mapping[str, float]], None] | None,
    tuning: bool,
) -> list[Record]:
    spec = experiment.run
    alone = spec.sites == "alone"
    result = simulate(
        **_arguments(experiment, made),
        rounds=min(spec.rounds, until or spec.rounds),
        execution=replace(experiment.execution, profile=profile is not None),
        directory=out,
        progress=progress,
        warm_up=made.warm_up,
    )
    if profile is not None:
        profile(result.profile)
    if not leads():
        return result.history
    if result.points is not None:
        for n, (model, x) in enumerate(zip(result.models, result.points)):
            write_model(out / f"client-{n}.safetensors", model, x)
    if alone:
        return result.history
    write_model(out / "model.safetensors", result.model, result.x)
    if tuning and made.validated is not None:
        with torch.no_grad():
            scores, labels = made.validated(made.problem.bind(result.x))
        values = resampled(find(experiment.evaluation.metric or made.metric), scores, labels)
        content = {"round": result.history[-1]["round"], "values": values}
        write_atomically(out / RESAMPLED, json.dumps(content).encode())
    if made.by_client is not None:
        with torch.no_grad():
            found = made.by_client(made.problem.bind(result.x))
        known = {client: {k: v for k, v in own.items() if math.isfinite(v)} for client, own in found.items()}
        write_atomically(out / BY_CLIENT, json.dumps(known).encode())
    if made.ranks is not None:
        with torch.no_grad():
            scores, labels = made.ranks(made.problem.bind(result.x))
        if scores.ndim == 1 and (curves := curves_of(scores, labels)):
            write_atomically(out / "roc.json", json.dumps(curves).encode())
    return result.history


def _mean_over_clients(made: Assembly, alone: Alone, shared: Fields, private: Fields) -> dict[str, float]:
    """Return the metrics of each client's own model, averaged over the clients where they are defined."""
    points = alone.own_points(made.problem, shared, private)
    with torch.no_grad():
        each = [made.evaluate(made.problem.bind(x)) for x in points]
    known = {k: [found[k] for found in each if not math.isnan(found[k])] for k in each[0]}
    return {k: fmean(values) if values else math.nan for k, values in known.items()}


def _finish(experiment: Experiment, out: Path, history: Sequence[Record], until: int) -> None:
    last, rounds = history[-1]["round"], experiment.run.rounds
    if last >= rounds or last < min(rounds, until or rounds):  # `evaluation.patience` has ended the run
        write_atomically(out / "finished.json", json.dumps(history[-1]).encode())


@dataclass(frozen=True)
class Job:
    """One run of a comparison, for a worker process."""

    experiment: Experiment
    out: Path
    until: int = 0
    """Pause after this round; 0 = run to the end."""
    tuning: bool = False
    """Evaluate only on validation data."""
    picture: bool = False
    """Draw the clients' examples."""

    def done(self) -> bool:
        """Return whether the job needs no more work."""
        if (self.out / "finished.json").exists() or (self.out / DIVERGED).exists():
            return True
        return self.until > 0 and any(r["round"] >= self.until for r in read_record(self.out / "record.jsonl"))

    def check(self) -> None:
        """Reject a directory that contains another run: other settings, or other objects of the user's."""
        if (self.out / "experiment.json").exists():
            claim(self.out, self.experiment)
            if isinstance(self.experiment, OwnExperiment):  # settings do not say what the objects are
                arguments = _arguments(self.experiment, _assembled(self.experiment, self.tuning))
                rounds, execution = self.experiment.run.rounds, self.experiment.execution
                verify(**arguments, rounds=rounds, execution=execution, directory=self.out)


def _work(job: Job) -> NestfedError | None:
    """Run a job in a worker process; return an error that the user can fix."""
    torch.set_num_threads(1)
    try:
        run(job.experiment, job.out, progress=False, picture=job.picture, until=job.until, tuning=job.tuning)
    except Interrupted:
        raise
    except NestfedError as error:
        if isinstance(error, DivergedError) and not job.tuning and read_record(job.out / "record.jsonl"):
            write_atomically(job.out / DIVERGED, json.dumps(str(error)).encode())
        return error
    return None


_INHERITED: list[Job] = []


def _work_inherited(number: int) -> NestfedError | None:
    return _work(_INHERITED[number])


def _start_worker(environment: Mapping[str, str]) -> None:
    """Take over the parent's environment; end when the parent ends, so that two processes never write to one directory."""
    os.environ.clear()
    os.environ.update(environment)
    parent = parent_process()

    def watch() -> None:
        if parent is not None:
            connection.wait([parent.sentinel])
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def run_jobs(jobs: Iterable[Job], workers: int, done: Callable[[Job, NestfedError | None], None]) -> None:
    """Run jobs in parallel, one thread each; call `done` after each job with its error, if any.

    A job that is done is not repeated, but its directory must contain this job.
    """
    todo = []
    for job in jobs:
        if job.done():
            job.check()
        else:
            todo.append(job)
    if not todo:
        return
    if workers <= 1 or len(todo) == 1:
        for job in todo:
            done(job, _work(job))
        return
    portable = all(job.experiment.portable for job in todo)
    # What cannot be sent to another process, such as the user's functions, is inherited by a fork.
    # All others are forks of one new process that has imported what is slow, once for all calls in this process.
    context = get_context("forkserver" if portable else "fork")
    context.set_forkserver_preload([__name__, "torch._dynamo", *(m for m in ("sklearn.datasets",) if m in sys.modules)])
    _INHERITED[:] = [] if portable else todo
    with ProcessPoolExecutor(min(workers, len(todo)), context, _start_worker, (dict(os.environ),)) as pool:
        futures = {
            pool.submit(_work, job) if portable else pool.submit(_work_inherited, i): job for i, job in enumerate(todo)
        }
        try:
            for future in as_completed(futures):
                done(futures[future], future.result())
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
