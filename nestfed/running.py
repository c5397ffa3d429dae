"""An experiment carried out in a directory: one run, or a fair comparison of several methods."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

from nestfed.core import NestfedError
from nestfed.engine.checkpoint import write_atomically
from nestfed.engine.record import read as read_record
from nestfed.engine.sync import Record
from nestfed.experiment import Experiment, from_tables, identity

TUNING_SEED = 1000
"""Tuning uses seeds from here on, so that no reported seed was ever tuned on."""


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
    elif any(out.iterdir()):
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
) -> list[Record]:
    """Carry out one run in its directory; go on with an unfinished one, leave a finished one alone.

    Who holds what is told in clients.txt and drawn in clients.png. `profile` hears where the time went.
    """
    fresh = not out.exists()
    if leads():
        claim(out, experiment)
    if (out / "finished.json").exists():
        return read_record(out / "record.jsonl")
    try:
        return _run(experiment, out, label, progress, picture and leads(), profile)
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
) -> list[Record]:
    from nestfed.assemble import assemble

    made = assemble(experiment)
    if made.summary is not None and leads():
        write_atomically(out / "clients.txt", f"{made.summary}\n".encode())
        if picture:
            made.summary.draw(out / "clients.png")
    if experiment.run.sites == "alone":
        return _alone(experiment, made, out)
    if experiment.run.sites != "federated":
        raise NestfedError(f"run.sites must be federated or alone, not {experiment.run.sites!r}.")
    history = _simulate(experiment, made, made.clients, out, label, progress, profile)
    if leads():
        _finish(out, history)
    return history


def _simulate(
    experiment: Experiment,
    made: Any,
    clients: Any,
    out: Path,
    label: str,
    progress: bool | None,
    profile: Callable[[Mapping[str, float]], None] | None = None,
) -> list[Record]:
    from safetensors.torch import save_file

    from nestfed.engine.simulate import simulate

    spec = experiment.run
    metric = spec.metric or made.metric
    result = simulate(
        made.problem,
        made.algorithm,
        clients,
        rounds=spec.rounds,
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
    save_file(tensors, out / "model.safetensors")
    return result.history


def _alone(experiment: Experiment, made: Any, out: Path) -> list[Record]:
    """Train every client by itself; a record is the mean over clients, and the costs are their sums."""
    histories = []
    for n in range(len(made.clients)):
        single = replace(made.clients, parts=[made.clients.parts[n]], names=[made.clients.label(n)])
        histories.append(_simulate(experiment, made, single, out / f"client-{n}", f"client {n}", False))
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
    _finish(out, merged)
    return merged


def _finish(out: Path, history: Sequence[Record]) -> None:
    write_atomically(out / "finished.json", json.dumps(history[-1]).encode())


@dataclass(frozen=True)
class Job:
    """One run of a comparison, as plain data for another process."""

    tables: Mapping[str, Any]
    out: Path


def _work(job: Job) -> str | None:
    """Carry out a job in a worker process; return the sentence of an error that the user can mend."""
    import torch

    torch.set_num_threads(1)
    try:
        run(from_tables(job.tables), job.out, progress=False, picture=False)
    except NestfedError as error:
        return str(error)
    return None


def carry_out(jobs: Iterable[Job], workers: int, done: Callable[[Job, str | None], None]) -> None:
    """Run jobs in parallel, one thread each; `done` hears of each end and of its error, if any."""
    todo = [job for job in jobs if not (job.out / "finished.json").exists()]
    if not todo:
        return
    if workers <= 1 or len(todo) == 1:
        for job in todo:
            done(job, _work(job))
        return
    with ProcessPoolExecutor(min(workers, len(todo)), mp_context=get_context("spawn")) as pool:
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

    def final(self, metric: str) -> list[float]:
        """Return the metric's last value for every seed."""
        return [last(h, metric) for h in self.histories]


def last(history: Sequence[Record], metric: str) -> float:
    """Return a metric's last recorded value."""
    values = [r[metric] for r in history if r.get(metric) is not None]
    if not values:
        known = sorted(set().union(*history) - {"round", "iteration"}) if history else []
        raise NestfedError(f"The records hold no {metric!r}; they hold {', '.join(known)}.")
    return float(values[-1])


def rounds_to(histories: Sequence[Sequence[Record]], metric: str, target: float) -> int | None:
    """Return the first round at which the mean over seeds of a metric reached the target."""
    by_round: dict[int, list[float]] = {}
    for record in itertools.chain(*histories):
        if record.get(metric) is not None:
            by_round.setdefault(record["round"], []).append(record[metric])
    reached = (r for r, v in sorted(by_round.items()) if len(v) == len(histories) and fmean(v) >= target)
    return next(reached, None)


def compare(
    experiment: Experiment,
    methods: Sequence[str],
    seeds: int,
    out: Path,
    *,
    workers: int | None = None,
    tell: Callable[[str], None] = lambda sentence: None,
) -> tuple[str, list[Outcome]]:
    """Tune every method on its grid by the validation metric, then run it with every seed.

    Tuning sees validation data only and seeds that are not reported. Trials that fail (a divergent step size, say)
    count as the worst. Return the metric and an outcome per method.
    """
    from nestfed.assemble import assemble

    workers = workers or os.cpu_count() or 1
    if seeds < 1:
        raise NestfedError(f"seeds must be at least 1, not {seeds}.")
    variants = {name: experiment.for_method(name) for name in methods}
    grids = {name: experiment.grid(name) for name in methods}
    validated: dict[str, bool] = {}
    for name, variant in variants.items():
        tuned = variant.with_overrides({k: v[0] for k, v in grids[name].items()})
        made = assemble(tuned)
        metric = experiment.run.metric or made.metric
        validated[name] = bool(variant.data.validation) or made.validates
        if grids[name] and not validated[name] and variant.data != type(variant.data)():
            raise NestfedError(f"Tuning {name} needs validation data: set data.validation, for example 0.1.")
    trials: dict[str, list[tuple[dict[str, Any], Job]]] = {}
    for name, variant in variants.items():
        combinations = [dict(zip(grids[name], values)) for values in itertools.product(*grids[name].values())]
        trials[name] = []
        for i, changes in enumerate(combinations if len(combinations) > 1 else []):
            trial = variant.with_overrides({**changes, "run.seed": TUNING_SEED + experiment.run.seed})
            trials[name].append((changes, Job(trial.source, out / name / f"trial-{i:03d}")))
    failed: dict[Path, str] = {}
    total = sum(map(len, trials.values()))
    count = itertools.count(1)

    def on_trial(job: Job, error: str | None) -> None:
        if error:
            failed[job.out] = error
        tell(f"tuning {next(count)}/{total}")

    carry_out([job for found in trials.values() for _, job in found], workers, on_trial)
    chosen: dict[str, dict[str, Any]] = {}
    for name in methods:
        chosen[name] = {k: v[0] for k, v in grids[name].items()}
        if trials[name]:
            alive = [(changes, job) for changes, job in trials[name] if (job.out / "finished.json").exists()]
            if not alive:
                raise NestfedError(f"Every trial of {name} failed, the first with: {failed[trials[name][0][1].out]}")
            judge = f"val_{metric}" if validated[name] else metric
            chosen[name] = max(alive, key=lambda a: last(read_record(a[1].out / "record.jsonl"), judge))[0]
    runs = {
        name: [
            Job(
                variants[name].with_overrides({**chosen[name], "run.seed": experiment.run.seed + s}).source,
                out / name / f"seed-{experiment.run.seed + s}",
            )
            for s in range(seeds)
        ]
        for name in methods
    }
    total, count = seeds * len(methods), itertools.count(1)

    def on_run(job: Job, error: str | None) -> None:
        if error:
            raise NestfedError(f"{job.out.parent.name}, {job.out.name}: {error}")
        tell(f"run {next(count)}/{total}")

    carry_out([job for jobs in runs.values() for job in jobs], workers, on_run)
    return metric, [
        Outcome(name, chosen[name], len(trials[name]), [read_record(j.out / "record.jsonl") for j in runs[name]])
        for name in methods
    ]
