"""One training over the sites of a deployment, by the same loop as a simulation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from logging import INFO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nestfed.algorithms.buffered import BUFFERS, with_buffers
from nestfed.core import NestfedError, refuse_mismatch
from nestfed.deploy.flower.federation import Flower
from nestfed.deploy.flower.messages import Custom
from nestfed.engine import loop
from nestfed.engine.privacy import Noise
from nestfed.engine.round import Record, Rules, RunState
from nestfed.engine.run_directory import RunDirectory
from nestfed.experiment.build import Assembly
from nestfed.experiment.site import at_coordinator, evaluation_questions, metrics_of
from nestfed.experiment.study import Training
from nestfed.files import make_directory, write_atomically
from nestfed.problems.objective import Labelled
from nestfed.queries import TEST, TRAINING, VALIDATION


@dataclass(frozen=True)
class Finished:
    """A finished training."""

    made: Assembly
    x: Tensor
    history: list[Record]


def train(
    flower: Flower,
    study: Any,
    out: Path,
    *,
    training: Training | None = None,
    start: torch.nn.Module | None = None,
) -> Finished:
    """Train over the sites of a federation, or resume after the last finished round.

    - `study`: the experiment that trains, or a `Custom` problem.
    - `training`: what the sites are asked to train, if the study has several trainings.
    - `start`: a model to start from.
    """
    roster, setup = flower.roster, flower.roster.setup
    made = study.make() if isinstance(study, Custom) else at_coordinator(study, flower.plan)
    problem, exchange, evaluation = made.problem, study.exchange, study.evaluation
    method = with_buffers(problem, made.algorithm, evaluation.keep)
    _check(problem, method, study, setup.sites)
    flower.prepare(method, exchange, training)
    noise = Noise.plan(exchange, setup.sites)
    if noise:
        # Every site knows the seed and so who takes part: sampling does not amplify privacy.
        statement = replace(noise, rate=1.0).statement(study.run.rounds, method.shared)
        write_atomically(setup.out / "privacy.txt", f"{statement}\n".encode())
        roster.log(statement, INFO)
    if evaluation.keep == "best":
        evaluation = replace(evaluation, metric=f"val_{evaluation.metric or made.metric}")

    def judge(state: RunState) -> Mapping[str, float]:
        with torch.no_grad():
            found = made.evaluate(problem.bind(method.solution(state.shared, {})))
        return {k: float(v) for k, v in found.items()}

    sites_evaluate = not isinstance(study, Custom) and isinstance(study.problem, Labelled)
    parts = _judged_parts(training) if sites_evaluate else ()
    questions = evaluation_questions(study, flower.plan, parts) if parts else ()
    pool = partial(metrics_of, study, flower.plan, made.metric, parts=parts) if parts else None
    weights = None
    if flower.weight is not None:
        weights = lambda: sum(float(rows[TRAINING]) for rows in roster.rows.values())  # noqa: E731
    rules = Rules(problem, method, exchange, setup.sites, noise, None, weights)
    run = loop.Plan(
        rules, study.run.rounds, study.run.q, study.run.seed, evaluation, None if sites_evaluate else judge,
        questions, pool,
    )  # fmt: skip
    name = "" if training is None else f" {training.name}"
    # A site keeps only a few versions of its private fields, so write a checkpoint every round.
    book = RunDirectory(
        make_directory(out), f"{roster.study.digest()} {flower.token}{name}", flower, method=method,
        rounds=study.run.rounds, evaluation=evaluation, checkpoint_every=1, warn=roster.note,
    )  # fmt: skip
    x0 = problem.x0 if start is None else problem.start(start)
    state = RunState.start(method, method.init(problem, x0), setup.sites)
    state = book.resume(state, torch.device("cpu"), grow=True)
    with book, torch.no_grad():
        loop.drive(run, state, flower, book)
    return Finished(made, state.outcome(method.solution(state.shared, {}), evaluation.keep), book.history)


def _judged_parts(training: Training | None) -> tuple[str, ...]:
    """Return the parts of the tables on which sites judge the rounds; a study's last trainings are judged afterwards."""
    if training is None:
        return (TEST, VALIDATION)
    return () if training.final else (VALIDATION,)


def _check(problem: Any, method: Any, study: Any, sites: int) -> None:
    """Reject what cannot be deployed."""
    refuse_mismatch(problem, method)
    study.exchange.check(sites)
    if BUFFERS in method.private:
        raise NestfedError(
            "buffers = 'private' keeps running statistics at the sites, so the coordinator would have no complete model: use "
            "'average' for a deployment."
        )
    if study.exchange.failures:
        raise NestfedError("exchange.failures simulates failures; set it to 0 for a deployment.")
    if method.single and sites > 1:
        raise NestfedError(f"{method.name} is a single-machine method, but there are {sites} sites.")
    if study.evaluation.keep == "uniform" and not study.exchange.reduction.plain:
        raise NestfedError(
            "evaluation.keep = 'uniform' averages the clients' points, so it needs exchange.reduce = 'mean' and no privacy."
        )
