"""From an experiment to the objects that an engine runs. A new application is one function and one row here."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nestfed import algorithms, models
from nestfed.core import NestfedError
from nestfed.data.clients import Examples, Pairs, start_large
from nestfed.data.prepare import Prepared, prepare
from nestfed.experiment import Experiment, hyper_parameters
from nestfed.problems.auprc import AUPRC
from nestfed.problems.auroc import AUROC
from nestfed.problems.classify import Classify
from nestfed.problems.invariant import InvariantClients, InvariantLogistic, accuracy
from nestfed.report import metrics

Metrics = dict[str, float]


@dataclass(frozen=True)
class Assembly:
    """An experiment as objects, ready for an engine."""

    problem: Any
    algorithm: Any
    clients: Any
    evaluate: Callable[[Any], Metrics]
    metric: str
    """The metric that decides, unless the experiment names another."""
    summary: str = ""
    """Who holds what, as a table."""


def assemble(experiment: Experiment, seed: int | None = None) -> Assembly:
    """Make the problem, the method and the clients of an experiment, for one seed."""
    name = experiment.problem.name
    if name not in APPLICATIONS:
        near = difflib.get_close_matches(name, APPLICATIONS, 1, 0.4)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(APPLICATIONS)}."
        raise NestfedError(f"There is no problem {name!r}; {hint}")
    if not experiment.algorithm.name:
        raise NestfedError("The experiment names no algorithm: set algorithm.name, or `compare --algorithms`.")
    algorithm = algorithms.build(experiment.algorithm.name, **hyper_parameters(experiment.algorithm))
    made = APPLICATIONS[name](experiment, experiment.run.seed if seed is None else seed)
    return Assembly(made.problem, algorithm, made.clients, made.evaluate, made.metric, made.summary)


def _labelled(experiment: Experiment, seed: int) -> Assembly:
    """Classification, AUROC and AUPRC on labelled examples."""
    spec = experiment.problem
    prepared = prepare(experiment.data, experiment.partition, seed)
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
        outer = start_large(spec.initial_batch, spec.outer) if spec.initial_batch else spec.outer
        clients = Pairs(
            arrays, prepared.parts, outer=outer, inner=spec.inner, inner_positives=spec.inner_positives or None, **held
        )
    else:
        batch = start_large(spec.initial_batch, spec.batch) if spec.initial_batch else spec.batch
        clients = Examples(arrays, prepared.parts, batch=batch, **held)
        problem = Classify(model, clip=clip)
        if spec.name == "auroc":
            problem = AUROC(model, p=prepared.positive_rate, sigmoid=spec.sigmoid, clip=clip)
    metric = "ap" if spec.name == "auprc" else "auroc" if binary else "accuracy"
    return Assembly(problem, None, clients, lambda m: score(m, prepared), metric, prepared.summary)


def score(model: Callable[[Tensor], Tensor], prepared: Prepared) -> Metrics:
    """Return the metrics of a model on the test set, and on the validation set with the prefix val_."""
    found = {}
    for prefix, held in (("", prepared.test), ("val_", prepared.validation)):
        if held is not None and len(held[0]):
            logits = torch.cat([model(prepared.ready(part)) for part in held[0].split(1000)])
            found |= {prefix + k: v for k, v in judged(logits, held[1], prepared.classes).items()}
    return found


def judged(logits: Tensor, labels: Tensor, classes: int) -> Metrics:
    """Return AUROC and average precision for two classes, accuracy and log-loss for more."""
    y = labels.cpu().numpy()
    scores = logits.double().cpu().numpy()
    if classes == 2:
        return {"auroc": metrics.auroc(scores, y), "ap": metrics.average_precision(scores, y)}
    return {
        "accuracy": float((logits.argmax(1).cpu() == labels.cpu()).double().mean()),
        "log_loss": float(torch.nn.functional.cross_entropy(logits, labels)),
    }


def _invariant(experiment: Experiment, seed: int) -> Assembly:
    """Invariant logistic regression."""
    spec = experiment.problem
    clients = InvariantClients(
        experiment.partition.clients, spec.dim, spec.ratio, spec.inner, spec.outer, seed=seed
    )
    test = clients.test_set()
    return Assembly(
        InvariantLogistic(torch.zeros(spec.dim)), None, clients, lambda x: {"accuracy": accuracy(x, test)}, "accuracy"
    )


APPLICATIONS: Mapping[str, Callable[[Experiment, int], Assembly]] = {
    "classify": _labelled,
    "auroc": _labelled,
    "auprc": _labelled,
    "invariant": _invariant,
}
