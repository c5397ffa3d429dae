"""The sites of a study whose tables are at hand: questions and trainings on this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nestfed.core import NestfedError
from nestfed.data.partition import Summary
from nestfed.data.sources import Dataset
from nestfed.engine.simulate import simulate
from nestfed.experiment.build import labelled
from nestfed.experiment.prepare import Held, Prepared
from nestfed.experiment.site import Network, OwnRows, divided, parts_of
from nestfed.experiment.spec import Experiment
from nestfed.experiment.study import FINAL, Training
from nestfed.queries import Answers, Question, answered
from nestfed.queries.agreement import Agreement, Rules, agree
from nestfed.study.conduct import Trained, choosing


class AtHand:
    """Tables of all sites, by name, as if each were at its own site."""

    def __init__(
        self, study: Experiment, tables: Mapping[str, Dataset], *, directory: Path, min_cell: int = 0,
        progress: bool | None = None,
    ) -> None:  # fmt: skip
        self.study, self.tables, self.directory, self.min_cell = study, tables, directory, min_cell
        self.progress = progress
        self.names: Sequence[str] = list(tables)
        self._joined: dict[bool, Prepared] = {}

    @cached_property
    def agreement(self) -> Agreement:
        """What the sites agree on."""
        first = next(iter(self.study.methods), "")
        experiment = (self.study.for_method(first) if first else self.study).with_overrides(FINAL)
        raw = [divided(experiment, table, site=name).rows() for name, table in self.tables.items()]

        def ask_all(questions: Sequence[Question]) -> dict[int, Answers]:
            return {n: answered(questions, parts, self.min_cell) for n, parts in enumerate(raw)}

        def reject(n: int, sentence: str) -> None:
            raise NestfedError(f"Site {self.names[n]} cannot take part: {sentence}")

        exchange = self.study.exchange
        rules = Rules(
            len(self.names), exchange.weights == "examples", not exchange.reduction.plain, len(self.names),
            target=self.study.data.target_kind,
        )  # fmt: skip
        found = agree(ask_all, rules, self.names.__getitem__, reject)
        return found.read_by(next(iter(self.tables.values())).table)

    @cached_property
    def network(self) -> Network:
        """The network that the study trains."""
        return Network.of(self.study, self.agreement)

    def ask_all(
        self, questions: Sequence[Question], *, final: bool = True, x: np.ndarray | None = None
    ) -> dict[int, Answers]:
        """Return the sites' answers, by the final division of their rows or that of the trials."""
        return {n: answered(questions, site.by_part(final), self.min_cell, x) for n, site in enumerate(self.sites)}

    def train(self, training: Training, start: np.ndarray | None) -> Trained:
        """Train over all sites, from the given parameters of the network."""
        experiment = training.experiment(self.study)
        prepared = self.joined(training.final)
        seed, agreed = experiment.run.seed, self.agreement
        made = labelled(experiment, prepared, agreed.p, seed, agreed.totals, (agreed.center, agreed.unit))
        metric = choosing(experiment)

        def judge(model: Callable[[Tensor], Tensor]) -> dict[str, float]:
            assert made.validation is not None
            return {f"val_{k}": v for k, v in made.validation(model).items()}

        evaluation = experiment.evaluation
        if not training.final:
            evaluation = replace(evaluation, metric=replace(metric, name=f"val_{metric.name}"))
        result = simulate(
            made.problem,
            made.algorithm,
            made.clients,
            rounds=experiment.run.rounds,
            q=experiment.run.q,
            seed=seed,
            x0=None if start is None else made.problem.start(self.network.at(start)),
            evaluate=None if training.final else judge,
            evaluation=evaluation,
            exchange=experiment.exchange,
            execution=experiment.execution,
            directory=self.directory / training.name,
            progress=self.progress,
        )
        return Trained(self.network.vector(result.model), result.history)

    @cached_property
    def sites(self) -> Sequence[OwnRows]:
        """The rows of each site as model inputs."""
        found = []
        for name, table in self.tables.items():
            trial, last = (
                divided(made, table, site=name).encoded(self.agreement, f"site {name}")
                for made in (self.study, self.study.with_overrides(FINAL))
            )
            found.append(OwnRows(name, self.study.data, self.network, self.agreement, trial, last))
        return found

    def joined(self, final: bool) -> Prepared:
        """Return the rows of all sites together, one part for each."""
        if final not in self._joined:
            each = [site.last if final else site.trial for site in self.sites]
            self._joined[final] = _joined(each, self.names)
        return self._joined[final]


def _joined(each: Sequence[Prepared], names: Sequence[str]) -> Prepared:
    """Return the examples of all sites, one part for each."""
    training = [own.parts[0] for own in each]
    x = torch.cat([own.x[rows] for own, rows in zip(each, training)])
    y = torch.cat([own.y[rows] for own, rows in zip(each, training)])

    def held(part: str) -> Held | None:
        some = [parts_of(own).get(part) for own in each]
        known = [h for h in some if h is not None]
        if not known:
            return None
        sizes = [0 if h is None else len(h.y) for h in some]
        return Held(torch.cat([h.x for h in known]), torch.cat([h.y for h in known]), _runs(sizes))

    test = held("test") or Held(x[:0], y[:0])
    summary = Summary(np.zeros((0, 0), np.int64), (), ())
    return Prepared(
        x,
        y,
        _runs([len(rows) for rows in training]),
        list(names),
        test,
        held("validation"),
        each[0].classes,
        None,
        summary,
    )


def _runs(sizes: Sequence[int]) -> list[np.ndarray]:
    """Return consecutive row numbers, so many for each site."""
    ends = np.cumsum([0, *sizes])
    return [np.arange(start, stop) for start, stop in pairwise(ends)]
