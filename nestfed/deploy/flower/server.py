"""The coordinator: agrees with the sites on the encoding of data, runs the loop, and writes a simulation's files."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from logging import INFO
from typing import Any

import numpy as np
import torch
from flwr.app import Context, RecordDict
from flwr.serverapp import Grid, ServerApp

from nestfed.algorithms.buffered import BUFFERS, with_buffers
from nestfed.core import NestfedError, refuse_mismatch
from nestfed.deploy.flower.federation import Flower
from nestfed.deploy.flower.gate import RejectedError
from nestfed.deploy.flower.log import shown_by_flower
from nestfed.deploy.flower.mailbox import HELLO
from nestfed.deploy.flower.messages import (
    Custom,
    arrays_of,
    plan_record,
    read_plan,
    stamp_of,
    study_of,
    write_plan,
)
from nestfed.deploy.flower.roster import POLL, Roster, Setup
from nestfed.deploy.site import Agreement, at_coordinator, finish, merge
from nestfed.engine import loop
from nestfed.engine.privacy import Noise
from nestfed.engine.round import Rules, RunState
from nestfed.engine.run_directory import RunDirectory
from nestfed.experiment.build import Assembly
from nestfed.experiment.run import claim
from nestfed.files import locked, write_atomically, write_model
from nestfed.problems.objective import Labelled

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
        plan, token = self.plan()
        made = study.make() if isinstance(study, Custom) else at_coordinator(study, plan)
        sites_evaluate = not isinstance(study, Custom) and isinstance(study.problem, Labelled)
        problem, exchange = made.problem, study.exchange
        method = with_buffers(problem, made.algorithm, study.evaluation.keep)
        _check(problem, method, study, setup.sites)
        flower = Flower(
            self.roster, plan, token, method, exchange, sites_evaluate=sites_evaluate,
            metric=study.evaluation.metric or made.metric,
        )  # fmt: skip
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

        weights = (lambda: sum(float(f.examples) for f in self.roster.facts.values())) if flower.weight else None
        rules = Rules(problem, method, exchange, setup.sites, noise, None, weights)
        run = loop.Plan(
            rules, study.run.rounds, study.run.q, study.run.seed, evaluation, None if sites_evaluate else judge,
            sites_evaluate,
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

    def plan(self) -> tuple[Agreement, str]:
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
        token = secrets.token_hex(8)
        plan = self._agree()
        write_plan(path, plan, token)
        return plan, token

    def _agree(self) -> Agreement:
        there = self.roster.nodes()
        if isinstance(self.study, Custom):
            return Agreement(self.setup.sites)
        facts = {self.roster.name(there[n]): self.roster.facts[n] for n in sorted(there)}
        plan = merge(facts, self.setup.sites, self.study.exchange.weights == "examples")
        if not plan.encoding.schema:
            return plan
        words, arrays = plan_record(plan)
        for node in there.values():
            self.roster.ask(
                node, "query.spread", RecordDict({"order": stamp_of(self.study), "plan": words, "scaling": arrays})
            )
        squares: dict[int, np.ndarray] = {}
        number = {node: n for n, node in there.items()}
        end = time.monotonic() + self.setup.deadline
        while len(squares) < len(there) and time.monotonic() < end:
            for node, kind, reply in self.roster.answers():
                if kind == "query.spread":
                    try:
                        self.roster.words(reply, "site")
                        values = arrays_of(reply.content["squares"])["squares"]  # type: ignore[arg-type]
                    except (RejectedError, KeyError) as error:
                        raise NestfedError(
                            f"Site {self.roster.name(node)} did not send sums of squares: {error}"
                        ) from error
                    if values.shape != plan.encoding.mean.shape or not np.isfinite(values).all() or (values < 0).any():
                        raise NestfedError(f"Site {self.roster.name(node)} sent invalid sums of squares.")
                    squares[number[node]] = values
                elif kind == HELLO:
                    self.roster.register(node, reply)
            time.sleep(POLL)
        if len(squares) < len(there):
            raise NestfedError("A site sent its sums but not its sums of squares; run again when it is connected.")
        return finish(plan, [squares[n] for n in sorted(squares)], facts)

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
