"""The coordinator: agrees with the sites on the encoding of data, runs the loop, and writes a simulation's files."""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from logging import INFO
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from nestfed.core import NestfedError, __version__
from nestfed.deploy import certificates
from nestfed.deploy.flower.federation import Flower
from nestfed.deploy.flower.log import shown_by_flower
from nestfed.deploy.flower.messages import Custom, read_plan, study_of, write_plan
from nestfed.deploy.flower.released import release
from nestfed.deploy.flower.roster import Roster
from nestfed.deploy.flower.setup import Setup
from nestfed.deploy.flower.study import Deployed
from nestfed.deploy.flower.training import train
from nestfed.experiment.run import claim
from nestfed.experiment.target import Target
from nestfed.files import locked, write_atomically, write_model
from nestfed.problems.objective import Labelled
from nestfed.queries import TRAINING, VALIDATION
from nestfed.queries import agreement as agree
from nestfed.queries.agreement import Agreement
from nestfed.study import findings, survival_release
from nestfed.study import release as written
from nestfed.study.hazards import survive
from nestfed.study.outcome import find_out

PROGRESS = "progress.log"
"""The steps of a study, for `nestfed deploy local` and people who wait."""
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
            self._announce()
            try:
                self._run()
            except NestfedError as error:
                self.roster.log(f"stopped: {error}")
                self.roster.audit.add("run stopped", reason=str(error))
                raise

    def _announce(self) -> None:
        """Log what the people who run the coordinator should know."""
        roster, setup = self.roster, self.setup
        roster.audit.add("run started", digest=self.study.digest(), sites=setup.sites, version=__version__)
        if not setup.enrolled:
            roster.log(
                "this study does not list its sites' keys, so every site's number and name are taken at its word.", INFO
            )
        for sentence in certificates.warnings(setup.certificates) if setup.certificates else ():
            roster.log(sentence)

    def _run(self) -> None:
        study, out = self.study, self.setup.out
        flower = Flower(self.roster, study.exchange)
        flower.agreed(*self.plan(flower))
        if flower.several:
            last: Mapping[str, Any] = self._conduct(flower)
        else:
            done = train(flower, study, out)
            model = out / "model.safetensors"
            write_model(model, done.made.problem.module(done.x), done.x)
            digest = hashlib.sha256(model.read_bytes()).hexdigest()
            self.roster.audit.add("model released", file=model.name, sha256=digest)
            last = done.history[-1]
        write_atomically(out / "finished.json", json.dumps(last).encode())

    def _tell(self, sentence: str) -> None:
        """Log where a study is, and write it down for those who wait."""
        self.roster.log(sentence, INFO)
        with (self.setup.out / PROGRESS).open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {sentence}\n")

    def _conduct(self, flower: Flower) -> dict[str, Any]:
        """Conduct a study, write what it leaves, and send the model to the sites."""
        study, out, roster = self.study, self.setup.out, self.roster
        sites = Deployed(flower, study, written.trainings(out, study))
        if Target.of(study.data).is_survival:
            return self._survive(flower, sites)
        outcome = find_out(study, sites, self._tell)
        written.keep_file(study, out)
        # The directory belongs to this study, so a model in it is that of an attempt that was cut off.
        model, _ = written.write(outcome, out, {"deployed over": f"{len(sites.names)} sites"}, force=True)
        roster.audit.add("model released", file="model", sha256=model.digest)
        there = release(flower, model, findings.tables(outcome))
        self._tell(f"{findings.headline(outcome)} The model is at {', '.join(there) or 'no site'}.")
        return {"model": model.digest, "sites": there}

    def _survive(self, flower: Flower, sites: Deployed) -> dict[str, Any]:
        """Conduct a survival study, write what it leaves, and send the model to the sites, if there is one."""
        study, out, roster = self.study, self.setup.out, self.roster
        found = survive(study, sites, self._tell)
        written.keep_file(study, out)
        facts = {"deployed over": f"{len(sites.names)} sites"}
        model, _ = survival_release.write(found, out, facts, force=True)
        roster.log(survival_release.headline(found), INFO)
        if model is None:
            return {"model": None, "sites": []}
        roster.audit.add("model released", file="model", sha256=model.digest)
        return {"model": model.digest, "sites": list(release(flower, model, survival_release.tables(found)))}

    # -- before the first round

    def plan(self, flower: Flower) -> tuple[Agreement, str]:
        """Return the saved agreement, or make one with the connected sites."""
        path = self.setup.out / "plan.safetensors"
        if found := read_plan(path):
            return replace(found[0], clients=self.setup.sites), found[1]
        total, least = self.setup.sites, self.setup.least
        self.roster.gather()
        if not self.roster.nodes():
            self.roster.check_hope()
        if not self.roster.hopeless() and len(self.roster.nodes()) < least:
            raise NestfedError(
                f"Only {len(self.roster.nodes())} of {total} sites connected within {self.setup.deadline:g} s; "
                f"{least} are needed."
            )
        self.roster.flush()
        if not self.roster.hopeless():
            self._check_rows()
        # Too few sites may be left: then compare those there are, so that everything to repair is in one message.
        plan = Agreement(total) if isinstance(self.study, Custom) else self._agree(flower)
        self.roster.check_hope()
        token = secrets.token_hex(8)
        write_plan(path, plan, token)
        self.roster.audit.add(
            "study agreed", digest=self.study.digest(), sites=sorted(map(self.roster.called, self.roster.nodes()))
        )
        return plan, token

    def _agree(self, flower: Flower) -> Agreement:
        study, roster = self.study, self.roster
        if not isinstance(study.problem, Labelled):
            return Agreement(self.setup.sites)
        rules = agree.Rules(
            self.setup.sites, study.exchange.weights == "examples", not study.exchange.reduction.plain, self.setup.least,
            target=study.data.target_kind, lost=roster.out(),
        )  # fmt: skip

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


def server_app(source: Any) -> ServerApp:
    """Return the coordinator's app for an experiment file, an `Experiment`, or a `Custom` problem."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        study = study_of(source)
        Coordinator(study, Setup.read(study, context.run_config), grid).run()

    return app
