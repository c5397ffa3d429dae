"""From an experiment to the objects that an engine runs. A new application is one function and one row here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nestfed import algorithms, models
from nestfed.algorithms.conditional import BSpiderBoost
from nestfed.core import OBJECTIVES, Metric, NestfedError
from nestfed.data.clients import Examples, Pairs, Size, every, start_large
from nestfed.data.partition import Summary
from nestfed.experiment.prepare import Held, Prepared, prepare
from nestfed.experiment.spec import Experiment, hyper_parameters
from nestfed.metrics import judge, judge_pooled
from nestfed.problems.auprc import AUPRC
from nestfed.problems.auroc import AUROC
from nestfed.problems.classify import Classify
from nestfed.problems.flat import channels_last
from nestfed.problems.invariant import InvariantClients, InvariantLogistic, accuracy

Metrics = dict[str, float]


@dataclass(frozen=True)
class Assembly:
    """An experiment as objects, ready for an engine."""

    problem: Any
    algorithm: Any
    clients: Any
    test: Callable[[Any], Metrics]
    """A model's metrics on the test data."""
    metric: str | Metric
    """The metric that decides, unless the experiment names another; one of your own is a `Metric`."""
    validation: Callable[[Any], Metrics] | None = None
    """The same on the validation data, if there are any: all that tuning sees."""
    summary: Summary | None = None
    """Who holds what."""
    ranks: Callable[[Any], tuple[np.ndarray, np.ndarray]] | None = None
    """A model's scores of the test examples, and their labels, where one score ranks an example."""

    def evaluate(self, model: Any) -> Metrics:
        """Return all metrics; those on validation data have the prefix val_."""
        held = self.validation(model) if self.validation else {}
        return self.test(model) | {f"val_{k}": v for k, v in held.items()}


def assemble(experiment: Experiment, seed: int | None = None) -> Assembly:
    """Make the problem, the method and the clients of an experiment, for one seed."""
    name = experiment.problem.name
    objective = OBJECTIVES[name]
    if not experiment.algorithm.name:
        raise NestfedError("The experiment names no algorithm: set algorithm.name, or `compare --algorithms`.")
    algorithm = algorithms.build(experiment.algorithm.name, **hyper_parameters(experiment.algorithm))
    if experiment.problem.initial_batch and objective is not _labelled:
        raise NestfedError(f"problem.initial_batch is for classify, auroc and auprc; {name} has none.")
    made = objective(experiment, experiment.run.seed if seed is None else seed)
    return replace(made, algorithm=algorithm)


def _labelled(experiment: Experiment, seed: int) -> Assembly:
    """Classification, AUROC and AUPRC on labelled examples."""
    prepared = prepare(experiment.data, experiment.partition, seed)
    return labelled(experiment, prepared, prepared.positive_rate, seed)


def labelled(experiment: Experiment, prepared: Prepared, p: float, seed: int) -> Assembly:
    """Make the objects for examples that are ready; p is the share of positives over all clients."""
    spec = experiment.problem
    binary = prepared.classes == 2
    if spec.name != "classify" and not binary:
        raise NestfedError(f"{spec.name} needs two classes, not {prepared.classes}: set data.binary = true.")
    for name, least in (("batch", 1), ("outer", 1), ("inner", 2), ("initial_batch", 0)):
        if getattr(spec, name) < least:
            raise NestfedError(f"problem.{name} must be at least {least}, not {getattr(spec, name)}.")
    shape = tuple(prepared.x.shape[1:])
    model = models.build(
        experiment.model.name, shape, 1 if binary else prepared.classes, seed=seed, **experiment.model.options
    )
    held: dict[str, Any] = {"names": prepared.names, "transform": prepared.transform, "seed": seed}
    arrays = (prepared.x, prepared.y)
    clip = spec.clip or None
    problem: Any
    clients: Any
    if spec.name == "auprc":
        problem = AUPRC(model, margin=spec.margin, clip=clip)
        outer = _size(experiment, spec.outer)
        clients = Pairs(
            arrays, prepared.parts, outer=outer, inner=spec.inner, inner_positives=spec.inner_positives or None, **held
        )
    else:
        clients = Examples(arrays, prepared.parts, batch=_size(experiment, spec.batch), **held)
        problem = Classify(model, clip=clip)
        if spec.name == "auroc":
            problem = AUROC(model, p=p, sigmoid=spec.sigmoid, clip=clip)
    metric = "ap" if spec.name == "auprc" else "auroc" if binary else "accuracy"
    device = experiment.execution.device
    on = partial(evaluate, prepared=prepared, device=device, log_odds=spec.name == "classify")
    validation = None if prepared.validation is None else partial(on, held=prepared.validation)
    ranks = partial(scored, prepared=prepared, held=prepared.test, device=device) if binary else None
    return Assembly(
        problem, None, clients, partial(on, held=prepared.test), metric, validation, prepared.summary, ranks
    )


def _size(experiment: Experiment, usual: int) -> Size:
    """Return the batch size: the large one at t = 0, and again whenever the method starts its estimate anew."""
    large, method = experiment.problem.initial_batch, experiment.algorithm
    if not large:
        return usual
    if method.name == "bspiderboost":
        return every(method.hyper.get("period", BSpiderBoost.period), large, usual)
    return start_large(large, usual)


def evaluate(
    model: Callable[[Tensor], Tensor], prepared: Prepared, held: Held, device: str = "cpu", *, log_odds: bool = False
) -> Metrics:
    """Return the metrics of a model on examples that were held out; of clients' own ones, from what clients may share."""
    scores, labels = scored(model, prepared, held, device)
    if held.parts:
        return judge_pooled(scores, labels, held.parts, log_odds=log_odds)
    return judge(scores, labels, log_odds=log_odds)


def scored(
    model: Callable[[Tensor], Tensor], prepared: Prepared, held: Held, device: str = "cpu"
) -> tuple[np.ndarray, np.ndarray]:
    """Return a model's scores of examples that were held out, and their labels."""
    scores = models.score(model, held.x, lambda part: channels_last(prepared.ready(part.to(device))))
    return scores.double().numpy(), held.y.numpy()


def _invariant(experiment: Experiment, seed: int) -> Assembly:
    """Invariant logistic regression."""
    spec = experiment.problem
    clients = InvariantClients(experiment.partition.clients, spec.dim, spec.ratio, spec.inner, spec.outer, seed=seed)
    test, validation = clients.held_out(0), clients.held_out(1)
    return Assembly(
        InvariantLogistic(torch.zeros(spec.dim), clip=spec.clip or None),
        None,
        clients,
        lambda x: {"accuracy": accuracy(x, test)},
        "accuracy",
        lambda x: {"accuracy": accuracy(x, validation)},
    )


for _name in ("classify", "auroc", "auprc"):
    OBJECTIVES.add(_name, _labelled)
OBJECTIVES.add("invariant", _invariant)
