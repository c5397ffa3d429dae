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
from nestfed.experiment.build import evaluate, labelled
from nestfed.experiment.prepare import Held, Prepared
from nestfed.experiment.site import Network, divided, judged_rows, parts_of
from nestfed.experiment.spec import Experiment
from nestfed.experiment.study import FINAL, Training
from nestfed.problems.objective import Labelled
from nestfed.queries import Answers, Question, Rows, answered
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
        self._views: dict[bool, _View] = {}

    @cached_property
    def agreement(self) -> Agreement:
        """What the sites agree on."""
        experiment = self.study.for_method(next(iter(self.study.methods))).with_overrides(FINAL)
        raw = [divided(experiment, table).rows() for table in self.tables.values()]

        def ask_all(questions: Sequence[Question]) -> dict[int, Answers]:
            return {n: answered(questions, parts, self.min_cell) for n, parts in enumerate(raw)}

        def reject(n: int, sentence: str) -> None:
            raise NestfedError(f"Site {self.names[n]} cannot take part: {sentence}")

        exchange = self.study.exchange
        rules = Rules(len(self.names), exchange.weights == "examples", not exchange.reduction.plain, len(self.names))
        return agree(ask_all, rules, self.names.__getitem__, reject)

    @cached_property
    def network(self) -> Network:
        """The network that the study trains."""
        return Network.of(self.study, self.agreement)

    def ask_all(
        self, questions: Sequence[Question], *, final: bool = True, x: np.ndarray | None = None
    ) -> dict[int, Answers]:
        """Return the sites' answers, by the final division of their rows or that of the trials."""
        sites = self._view(final).sites
        return {n: answered(questions, parts, self.min_cell, x) for n, parts in enumerate(sites)}

    def train(self, training: Training, start: np.ndarray | None) -> Trained:
        """Train over all sites, from the given parameters of the network."""
        experiment = training.experiment(self.study)
        prepared = self._view(training.final).joined
        seed, agreed = experiment.run.seed, self.agreement
        made = labelled(experiment, prepared, agreed.p, seed, agreed.totals)
        metric = choosing(self.study)

        def judge(model: Callable[[Tensor], Tensor]) -> dict[str, float]:
            assert prepared.validation is not None
            assert isinstance(experiment.problem, Labelled)
            log_odds = experiment.problem.log_odds
            found = evaluate(model, prepared, prepared.validation, log_odds=log_odds, metric=metric.name)
            return {f"val_{k}": v for k, v in found.items()}

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

    def _view(self, final: bool) -> _View:
        if final not in self._views:
            self._views[final] = _View.of(self, final)
        return self._views[final]


class _View:
    """The rows of all sites as model inputs, by one division into parts."""

    def __init__(self, joined: Prepared, sites: Sequence[Mapping[str, Rows]]) -> None:
        self.joined, self.sites = joined, sites

    @classmethod
    def of(cls, hand: AtHand, final: bool) -> _View:
        experiment = hand.study.with_overrides(FINAL) if final else hand.study
        each = [
            divided(experiment, table).encoded(hand.agreement, f"site {name}") for name, table in hand.tables.items()
        ]
        return cls(_joined(each, hand.names), [judged_rows(hand.network, own, hand.agreement) for own in each])


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
