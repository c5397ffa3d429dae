"""From an experiment to the objects that an engine runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nestfed import algorithms, metrics, models
from nestfed.core import OBJECTIVES, Algorithm, NestfedError
from nestfed.data.partition import Summary
from nestfed.experiment.prepare import Held, Prepared, prepare
from nestfed.experiment.spec import Experiment, hyper_parameters
from nestfed.problems.flat import channels_last
from nestfed.problems.objective import Generated, Labelled, Setting

Metrics = dict[str, float]
CHUNK = 250
"""Examples that are scored at once: more no longer fit into a processor's cache."""


@dataclass(frozen=True)
class Assembly:
    """An experiment as objects, ready for an engine."""

    problem: Any
    algorithm: Any
    clients: Any
    test: Callable[[Any], Metrics]
    """A model's metrics on the test data."""
    metric: str
    """The metric that decides, unless the experiment names another."""
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
    objective, seed = experiment.problem, experiment.run.seed if seed is None else seed
    if isinstance(objective, Labelled):
        if experiment.run.evaluate not in ("central", "clients"):
            raise NestfedError(f"run.evaluate must be central or clients, not {experiment.run.evaluate!r}.")
        prepared = prepare(experiment.data, experiment.partition, seed, own_test=experiment.run.evaluate == "clients")
        return labelled(experiment, prepared, prepared.positive_rate, seed)
    if not isinstance(objective, Generated):
        raise NestfedError(f"The experiment names no problem: set problem.name to one of {', '.join(OBJECTIVES)}.")
    algorithm, data = method(experiment), experiment.data
    network = partial(models.build, experiment.model.name, seed=seed, **experiment.model.options)
    made = objective.build(
        Setting(
            experiment.partition.clients,
            seed,
            network,
            data.name,
            data.folder or None,
            data.limit,
            experiment.run.device,
        )
    )
    return Assembly(made.problem, algorithm, made.clients, made.test, made.metric, made.validation)


def method(experiment: Experiment) -> Algorithm[Any, Any]:
    """Make the method of an experiment."""
    if not experiment.algorithm.name:
        raise NestfedError("The experiment names no algorithm: set algorithm.name, or `compare --algorithms`.")
    return algorithms.build(experiment.algorithm.name, **hyper_parameters(experiment.algorithm))


def labelled(experiment: Experiment, prepared: Prepared, p: float, seed: int) -> Assembly:
    """Make the objects for examples that are ready; p is the mean over all clients of their share of positives."""
    objective, algorithm = experiment.problem, method(experiment)
    assert isinstance(objective, Labelled)
    binary = prepared.classes == 2
    if objective.binary and not binary:
        raise NestfedError(f"{objective.name} needs two classes, not {prepared.classes}: set data.binary = true.")
    shape = tuple(prepared.x.shape[1:])
    model = models.build(
        experiment.model.name, shape, 1 if binary else prepared.classes, seed=seed, **experiment.model.options
    )
    problem, clients = objective.build(
        model,
        (prepared.x, prepared.y),
        prepared.parts,
        p=p,
        restarts=algorithm.restarts,
        names=prepared.names,
        transform=prepared.transform,
        seed=seed,
    )
    judge = partial(score, prepared=prepared, device=experiment.run.device, odds=objective.log_odds)
    validation = None if prepared.validation is None else partial(judge, held=prepared.validation)
    ranks = partial(scored, prepared=prepared, held=prepared.test, device=experiment.run.device) if binary else None
    test, metric = partial(judge, held=prepared.test), objective.metric(prepared.classes)
    return Assembly(problem, algorithm, clients, test, metric, validation, prepared.summary, ranks)


def score(
    model: Callable[[Tensor], Tensor], prepared: Prepared, held: Held, device: str = "cpu", *, odds: bool = False
) -> Metrics:
    """Return the metrics of a model on examples that were held out."""
    logits, labels = scored(model, prepared, held, device)
    return pooled(logits, labels, held.parts, odds) if held.parts else judged(logits, labels, odds)


def scored(
    model: Callable[[Tensor], Tensor], prepared: Prepared, held: Held, device: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return a model's scores of examples that were held out, and their labels."""
    scores = torch.cat([model(channels_last(prepared.ready(part.to(device)))) for part in held.x.split(CHUNK)])
    return scores.double().cpu().numpy(), held.y.numpy()


def judged(logits: np.ndarray, labels: np.ndarray, odds: bool = False) -> Metrics:
    """Return AUROC and average precision for one score per example, accuracy and log-loss for one per class.

    If single scores are log-odds, as cross-entropy makes them, accuracy and log-loss mean something for them too.
    """
    found = {}
    if logits.ndim == 1:
        found = {"auroc": metrics.auroc(logits, labels), "ap": metrics.average_precision(logits, labels)}
    if logits.ndim == 2 or odds:
        found |= {"accuracy": metrics.accuracy(logits, labels), "log_loss": metrics.log_loss(logits, labels)}
    return found


def pooled(logits: np.ndarray, labels: np.ndarray, parts: Sequence[np.ndarray], odds: bool = False) -> Metrics:
    """Return the same from what clients may tell: sums, and histograms of their scores.

    AUROC and average precision come with the largest error that the histogram's bins allow, such as auroc_error.
    """
    parts = [part for part in parts if len(part)]
    if not parts:
        raise NestfedError("No client has examples to evaluate on.")
    each = [(len(part) / len(logits), judged(logits[part], labels[part], odds)) for part in parts]
    told = [k for k in ("accuracy", "log_loss") if k in each[0][1]]
    found: Metrics = {k: sum(share * values[k] for share, values in each) for k in told}
    if logits.ndim == 1:
        histograms = [metrics.ScoreHistogram.of(logits[part], labels[part]) for part in parts]
        whole = sum(histograms[1:], histograms[0])
        for name, estimate in (("auroc", whole.auroc()), ("ap", whole.average_precision())):
            found |= {name: estimate.value, f"{name}_error": estimate.error}
    return found
