"""The sites of a study at institutions: questions and trainings over Flower."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from nestfed.deploy.flower.federation import Flower
from nestfed.deploy.flower.training import train
from nestfed.experiment.site import Network
from nestfed.experiment.spec import Experiment
from nestfed.experiment.study import Training
from nestfed.queries import Answers, Question
from nestfed.queries.agreement import Agreement
from nestfed.study.conduct import Trained


class Deployed:
    """The tables of a study at the sites of a federation, which have agreed on the inputs."""

    def __init__(self, flower: Flower, study: Experiment, directory: Path) -> None:
        self.flower, self.study, self.directory = flower, study, directory
        roster = flower.roster
        self.names: Sequence[str] = [roster.called(n) for n in range(roster.setup.sites)]

    @property
    def agreement(self) -> Agreement:
        """What the sites have agreed on."""
        return self.flower.plan.read_by(self.study.schema)

    @cached_property
    def network(self) -> Network:
        """The network that the study trains."""
        return Network.of(self.study, self.agreement)

    def ask_all(
        self, questions: Sequence[Question], *, final: bool = True, x: np.ndarray | None = None
    ) -> Mapping[int, Answers]:
        """Return the answers of the connected sites."""
        return self.flower.ask_all(questions, final=final, x=x)

    def train(self, training: Training, start: np.ndarray | None) -> Trained:
        """Train over the sites, from the given parameters of the network."""
        experiment = training.experiment(self.study)
        model = None if start is None else self.network.at(start)
        done = train(self.flower, experiment, self.directory / training.name, training=training, start=model)
        return Trained(self.network.vector(done.made.problem.module(done.x)), done.history)
