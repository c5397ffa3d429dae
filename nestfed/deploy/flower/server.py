"""The coordinator: agrees with the sites on the encoding of data, runs the loop, and writes a simulation's files."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from logging import INFO
from typing import Any

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from nestfed.algorithms.buffered import BUFFERS, with_buffers
from nestfed.core import NestfedError, refuse_mismatch
from nestfed.deploy.flower.federation import Flower
from nestfed.deploy.flower.log import shown_by_flower
from nestfed.deploy.flower.messages import Custom, read_plan, study_of, write_plan
from nestfed.deploy.flower.roster import Roster, Setup
from nestfed.engine import loop
from nestfed.engine.privacy import Noise
from nestfed.engine.round import Rules, RunState
from nestfed.engine.run_directory import RunDirectory
from nestfed.experiment.build import Assembly
from nestfed.experiment.run import claim
from nestfed.experiment.site import at_coordinator, evaluation_questions, metrics_of
from nestfed.files import locked, write_atomically, write_model
from nestfed.problems.objective import Labelled
from nestfed.queries import TRAINING, VALIDATION
from nestfed.queries import agreement as agree
from nestfed.queries.agreement import Agreement

PREDECESSOR = 60.0
"""Seconds to wait for the directory's lock. The ServerApp of a killed SuperLink needs about ten to end."""


class Coordinator:
    """One run of a federation."""

    def __init__(self, study: Any, setup: Setup, grid: Grid) -> None:
        self.study, self.setup, self.roster = study, setup, Roster(study, setup, grid)

    def run(self) -> None:
        """Run the experiment, or resume it after the last finished round."""
        claim(self.setup.out, self.study)
        with shown_by_flower(), locked(self.setup.out, PREDECESSOR):
            if (self.setup.out / "finished.json").exists():
                self.roster.log(f"{self.setup.out} contains a finished run; choose another `out` for a new one.", INFO)
                return
            try:
                self._run()
            except NestfedError as error:
                self.roster.log(f"stopped: {error}")
                raise

    def _run(self) -> None:
        study, setup = self.study, self.setup
        flower = Flower(self.roster, study.exchange)
        plan, token = self.plan(flower)
        made = study.make() if isinstance(study, Custom) else at_coordinator(study, plan)
        sites_evaluate = not isinstance(study, Custom) and isinstance(study.problem, Labelled)
        problem, exchange = made.problem, study.exchange
        method = with_buffers(problem, made.algorithm, study.evaluation.keep)
        _check(problem, method, study, setup.sites)
        flower.prepare(plan, token, method)
        noise = Noise.plan(exchange, setup.sites)
        if noise:
            # Every site knows the seed and so who takes part: sampling does not amplify privacy.
            statement = replace(noise, rate=1.0).statement(study.run.rounds, method.shared)
            write_atomically(setup.out / "privacy.txt", f"{statement}\n".encode())
            self.roster.log(statement, INFO)
        evaluation = study.evaluation
        if evaluation.keep == "best":
            evaluation = replace(evaluation, metric=f"val_{evaluation.metric or made.metric}")

        def judge(state: RunState) -> Mapping[str, float]:
            with torch.no_grad():
                found = made.evaluate(problem.bind(method.solution(state.shared, {})))
            return {k: float(v) for k, v in found.items()}

        questions = evaluation_questions(study, plan) if sites_evaluate else ()
        pool = partial(metrics_of, study, plan, made.metric) if sites_evaluate else None
        weights = None
        if flower.weight is not None:
            weights = lambda: sum(float(rows[TRAINING]) for rows in self.roster.rows.values())  # noqa: E731
        rules = Rules(problem, method, exchange, setup.sites, noise, None, weights)
        run = loop.Plan(
            rules, study.run.rounds, study.run.q, study.run.seed, evaluation, None if sites_evaluate else judge,
            questions, pool,
        )  # fmt: skip
        # A site keeps only a few versions of its private fields, so write a checkpoint every round.
        book = RunDirectory(
            setup.out, f"{study.digest()} {token}", flower, method=method, rounds=study.run.rounds,
            evaluation=evaluation, checkpoint_every=1, warn=self.roster.note,
        )  # fmt: skip
        state = RunState.start(method, method.init(problem, problem.x0), setup.sites)
        state = book.resume(state, torch.device("cpu"), grow=True)
        with book, torch.no_grad():
            loop.drive(run, state, flower, book)
        self._finish(made, state.outcome(method.solution(state.shared, {}), evaluation.keep), book)

    # -- before the first round

    def plan(self, flower: Flower) -> tuple[Agreement, str]:
        """Return the saved agreement, or make one with the connected sites."""
        path = self.setup.out / "plan.safetensors"
        if found := read_plan(path):
            return replace(found[0], clients=self.setup.sites), found[1]
        total, least = self.setup.sites, self.setup.least
        if not self.roster.wait(lambda: len(self.roster.nodes()) >= total) and len(self.roster.nodes()) < least:
            raise NestfedError(
                f"Only {len(self.roster.nodes())} of {total} sites connected within {self.setup.deadline:g} s; "
                f"{least} are needed."
            )
        self.roster.flush()
        self._check_rows()
        token = secrets.token_hex(8)
        plan = Agreement(total) if isinstance(self.study, Custom) else self._agree(flower)
        write_plan(path, plan, token)
        return plan, token

    def _agree(self, flower: Flower) -> Agreement:
        study, roster = self.study, self.roster
        if not isinstance(study.problem, Labelled):
            return Agreement(self.setup.sites)
        rules = agree.Rules(
            self.setup.sites, study.exchange.weights == "examples", not study.exchange.reduction.plain, self.setup.least
        )

        def reject(n: int, sentence: str) -> None:
            if (node := roster.nodes().get(n)) is not None:
                roster.reject(node, sentence)

        found = agree.agree(flower.ask_all, rules, roster.called, reject)
        if study.problem.binary and not 0 < found.p < 1:
            raise NestfedError(
                f"{study.problem.name} needs positive and negative rows, but all sites together tell of "
                f"{found.totals.positives} positives in {found.totals.rows} training rows. A site does not tell of fewer than "
                "its min-cell."
            )
        return found

    def _check_rows(self) -> None:
        """Reject a study that needs rows which no site has, or may tell of."""
        study, known = self.study, self.roster.rows.values()
        if study.exchange.weights == "examples" and not any(rows[TRAINING] for rows in known):
            raise NestfedError(
                "exchange.weights = 'examples', but the sites of this problem do not count examples; set it to 'equal'."
            )
        labelled = not isinstance(study, Custom) and isinstance(study.problem, Labelled)
        if labelled and study.evaluation.keep == "best" and not any(rows[VALIDATION] for rows in known):
            raise NestfedError(
                "evaluation.keep = 'best' needs validation rows, but no site has any, or has as many as its min_cell: set "
                "data.validation to a larger share, or keep = 'last'."
            )

    def _finish(self, made: Assembly, x: torch.Tensor, book: RunDirectory) -> None:
        write_model(self.setup.out / "model.safetensors", made.problem.module(x), x)
        write_atomically(self.setup.out / "finished.json", json.dumps(book.history[-1]).encode())


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


def server_app(source: Any) -> ServerApp:
    """Return the coordinator's app for an experiment file, an `Experiment`, or a `Custom` problem."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        study = study_of(source)
        Coordinator(study, Setup.read(study, context.run_config), grid).run()

    return app
