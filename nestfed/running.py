"""An experiment carried out in a directory: one run, or a fair comparison of several methods."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import dataclass, replace
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from statistics import fmean
from typing import Any

from nestfed.core import DivergedError, NestfedError
from nestfed.drawing import drawable
from nestfed.engine.checkpoint import write_atomically
from nestfed.engine.lock import locked
from nestfed.engine.record import read as read_record
from nestfed.engine.sync import Record
from nestfed.experiment import Experiment, from_tables, identity
from nestfed.report.machine import describe

TUNING_SEED = 1000
"""Tuning uses seeds from here on, so that no reported seed was ever tuned on."""
DIVERGED = "diverged.json"
"""In the directory of a comparison's run that diverged, and would again."""


def claim(out: Path, experiment: Experiment) -> None:
    """Make a run's directory, or refuse one that belongs to another experiment."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NestfedError(f"Cannot make the directory {out}: {error.strerror}.") from error
    path = out / "experiment.json"
    settings = json.dumps(experiment.resolved(), indent=2, sort_keys=True)
    if path.exists():
        try:
            held = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise NestfedError(f"{path} cannot be read: {error}.") from error
        if identity(held) != identity(json.loads(settings)):
            raise NestfedError(f"{out} holds another experiment; choose another directory with --out.")
    elif any(not p.name.startswith(".") for p in out.iterdir()):  # what a killed process left does not count
        raise NestfedError(f"{out} is not empty and holds no run; choose another directory with --out.")
    else:
        write_atomically(path, settings.encode())


def leads() -> bool:
    """Tell whether this process writes: not if `torchrun` started it as one of the others."""
    return os.environ.get("RANK", "0") == "0"


def run(
    experiment: Experiment,
    out: Path,
    *,
    label: str = "",
    progress: bool | None = None,
    picture: bool = True,
    profile: Callable[[Mapping[str, float]], None] | None = None,
    until: int = 0,
    tuning: bool = False,
) -> list[Record]:
    """Carry out one run in its directory; go on with an unfinished one, leave a finished one alone.

    Who holds what is told in clients.txt and drawn in clients.png. `profile` hears where the time went. With `until`
    the run pauses after that round. In `tuning` the test data are not looked at.
    """
    fresh = not out.exists()
    if leads():
        claim(out, experiment)
    if (out / "finished.json").exists():
        return read_record(out / "record.jsonl")
    with locked(out) if leads() else nullcontext():
        try:
            return _run(experiment, out, label, progress, picture and leads(), profile, until, tuning)
        except NestfedError:
            if fresh and leads() and not read_record(out / "record.jsonl"):
                shutil.rmtree(out)  # nothing was done, so nothing is left
            raise


def _run(
    experiment: Experiment,
    out: Path,
    label: str,
    progress: bool | None,
    picture: bool,
    profile: Callable[[Mapping[str, float]], None] | None,
    until: int,
    tuning: bool,
) -> list[Record]:
    from nestfed.assemble import assemble

    made = assemble(experiment)
    if tuning:
        made = replace(made, test=lambda model: {}, ranks=None)
    if leads() and not (out / "machine.json").exists():
        write_atomically(out / "machine.json", json.dumps(describe()).encode())
    if made.summary is not None and leads():
        write_atomically(out / "clients.txt", f"{made.summary}\n".encode())
        if picture and drawable():
            made.summary.draw(out / "clients.png")
    if experiment.run.sites == "alone":
        return _alone(experiment, made, out, until)
    if experiment.run.sites != "federated":
        raise NestfedError(f"run.sites must be federated or alone, not {experiment.run.sites!r}.")
    history = _simulate(experiment, made, made.clients, out, label, progress, until, profile)
    if leads():
        _finish(experiment, out, history)
    return history


def _simulate(
    experiment: Experiment,
    made: Any,
    clients: Any,
    out: Path,
    label: str,
    progress: bool | None,
    until: int,
    profile: Callable[[Mapping[str, float]], None] | None = None,
) -> list[Record]:
    import torch
    from safetensors.torch import save

    from nestfed.engine.simulate import simulate

    spec = experiment.run
    metric = spec.metric or made.metric
    result = simulate(
        made.problem,
        made.algorithm,
        clients,
        rounds=min(spec.rounds, until or spec.rounds),
        q=spec.q,
        seed=spec.seed,
        device=spec.device,
        mode=spec.mode,  # type: ignore[arg-type]
        workers=spec.workers,
        compile=spec.compile,
        precision=spec.precision,  # type: ignore[arg-type]
        accumulate=spec.accumulate,
        memory_limit=round(spec.memory_gb * 1e9),
        evaluate=made.evaluate,
        every=spec.every,
        output=spec.output,  # type: ignore[arg-type]
        best=f"val_{metric}" if spec.output == "best" else "",
        participation=spec.participation or None,
        failures=spec.failures,
        encode=spec.encode,
        reduce=spec.reduce,
        noise=spec.noise,
        on_nan=spec.on_nan,
        directory=out,
        checkpoint_every=spec.checkpoint_every,
        progress=progress,
        label=label,
        profile=profile is not None,
    )
    if profile is not None:
        profile(result.profile)
    if not leads():
        return result.history
    if hasattr(result.model, "state_dict"):
        tensors = {k: v.contiguous().clone() for k, v in result.model.state_dict().items()}
    else:
        tensors = {"x": result.x.contiguous()}
    write_atomically(out / "model.safetensors", save(tensors))
    if made.ranks is not None:
        from nestfed.report.scores import curves_of

        with torch.no_grad():
            found = curves_of(*made.ranks(made.problem.bind(result.x)))
        if found:
            write_atomically(out / "roc.json", json.dumps(found).encode())
    return result.history


def _alone(experiment: Experiment, made: Any, out: Path, until: int) -> list[Record]:
    """Train every client by itself; a record is the mean over clients, and the costs are their sums."""
    histories = []
    for n in range(len(made.clients)):
        single = replace(made.clients, parts=[made.clients.parts[n]], names=[made.clients.label(n)])
        histories.append(_simulate(experiment, made, single, out / f"client-{n}", f"client {n}", False, until))
    merged = []
    for rows in zip(*histories):
        record = dict(rows[0])
        for key in record:
            values = [r[key] for r in rows if r.get(key) is not None]
            if key in ("examples", "seconds", "participants"):
                record[key] = sum(values)
            elif key in ("bytes_up", "bytes_down"):
                record[key] = 0
            elif key not in ("round", "iteration"):
                record[key] = fmean(values) if values else None
        merged.append(record)
    write_atomically(out / "record.jsonl", "".join(json.dumps(r) + "\n" for r in merged).encode())
    _finish(experiment, out, merged)
    return merged


def _finish(experiment: Experiment, out: Path, history: Sequence[Record]) -> None:
    if history[-1]["round"] >= experiment.run.rounds:
        write_atomically(out / "finished.json", json.dumps(history[-1]).encode())


@dataclass(frozen=True)
class Job:
    """One run of a comparison, as plain data for another process."""

    tables: Mapping[str, Any]
    out: Path
    until: int = 0
    """The round after which it pauses, if not at its end."""
    tuning: bool = False
    """Only the validation data are evaluated on."""
    picture: bool = False
    """Draw who holds what."""

    def done(self) -> bool:
        """Tell whether there is nothing left to do."""
        if (self.out / "finished.json").exists() or (self.out / DIVERGED).exists():
            return True
        return self.until > 0 and any(r["round"] >= self.until for r in read_record(self.out / "record.jsonl"))


def _work(job: Job) -> NestfedError | None:
    """Carry out a job in a worker process; return an error that the user can mend."""
    import torch

    from nestfed.engine.simulate import Interrupted

    torch.set_num_threads(1)
    try:
        run(from_tables(job.tables), job.out, progress=False, picture=job.picture, until=job.until, tuning=job.tuning)
    except Interrupted:
        raise
    except NestfedError as error:
        if isinstance(error, DivergedError) and not job.tuning and read_record(job.out / "record.jsonl"):
            write_atomically(job.out / DIVERGED, json.dumps(str(error)).encode())
        return error
    return None


def _leave_with_parent() -> None:
    """End this worker when the command that started it is gone, so that no two ever write to one directory."""
    parent = parent_process()

    def watch() -> None:
        if parent is not None:
            connection.wait([parent.sentinel])
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def carry_out(jobs: Iterable[Job], workers: int, done: Callable[[Job, NestfedError | None], None]) -> None:
    """Run jobs in parallel, one thread each; `done` hears of each end and of its error, if any."""
    todo = [job for job in jobs if not job.done()]
    if not todo:
        return
    if workers <= 1 or len(todo) == 1:
        for job in todo:
            done(job, _work(job))
        return
    context = get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(todo)), mp_context=context, initializer=_leave_with_parent) as pool:
        futures = {pool.submit(_work, job): job for job in todo}
        try:
            for future in as_completed(futures):
                done(futures[future], future.result())
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


@dataclass(frozen=True)
class Outcome:
    """What a comparison found for one method."""

    method: str
    chosen: Mapping[str, Any]
    """The settings that tuning chose."""
    trials: int
    histories: Sequence[Sequence[Record]]
    """One per seed."""
    diverged: Sequence[str] = ()
    """What was said of the seeds that diverged; they count with the last model that was evaluated before."""

    def final(self, metric: str) -> list[float]:
        """Return the metric's last value for every seed."""
        return [last(h, metric) for h in self.histories]

    def fate(self) -> str:
        """Return a sentence on the seeds that diverged; nothing if none did."""
        if not self.diverged:
            return ""
        return (
            f"{self.method} diverged with {len(self.diverged)} of {len(self.histories)} seeds, which count with the last "
            f"model that was evaluated before: {self.diverged[0]}"
        )


def last(history: Sequence[Record], metric: str) -> float:
    """Return a metric's last recorded value."""
    values = [r[metric] for r in history if r.get(metric) is not None]
    if not values:
        known = sorted(set().union(*history) - {"round", "iteration"}) if history else []
        raise NestfedError(f"The records hold no {metric!r}; they hold {', '.join(known)}.")
    return float(values[-1])


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
) -> tuple[str, list[Outcome]]:
    """Tune every method by the validation metric (see `nestfed.tuning`), then run it with every seed.

    Tuning sees validation data only and seeds that are not reported; trials have up to `trial_rounds` rounds (0: all)
    with each of `trial_seeds` seeds, and with `stopping` the worse half of them stops early. Return the metric and an
    outcome per method.
    """
    from nestfed.tuning import tune

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
        Outcome(
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
