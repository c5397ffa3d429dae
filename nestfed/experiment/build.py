"""Build the problem, method and clients of an experiment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from nestfed import algorithms, models
from nestfed.core import OBJECTIVES, Algorithm, Metric, NestfedError
from nestfed.data.clients import Totals
from nestfed.data.partition import Summary
from nestfed.data.tables import NUMBER
from nestfed.engine.simulate import named_numbers
from nestfed.engine.warm_up import WarmUp
from nestfed.experiment.own import OwnExperiment
from nestfed.experiment.prepare import Held, Prepared, prepare
from nestfed.experiment.spec import AlgorithmSpec, Experiment, ServerSpec, hyper_parameters
from nestfed.metrics import ErrorTotals, judge, judge_pooled
from nestfed.problems.flat import channels_last
from nestfed.problems.objective import Generated, Labelled, Objective, Setting
from nestfed.problems.regress import in_units

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
    """The default for evaluation.metric; your own metric is a `Metric`."""
    validation: Callable[[Any], Metrics] | None = None
    """The same on the validation data, if any. Tuning uses only these."""
    summary: Summary | None = None
    """Examples by client and class."""
    ranks: Callable[[Any], tuple[np.ndarray, np.ndarray]] | None = None
    """A model's scores of the test examples, and their labels; None unless each example has a single score."""
    validated: Callable[[Any], tuple[np.ndarray, np.ndarray]] | None = None
    """A model's scores of the validation examples, and their labels, if tuning may use them to judge noise."""
    by_client: Callable[[Any], dict[str, Metrics]] | None = None
    """A model's metrics on each client's test data, by the client's name, if clients hold them."""
    warm_up: WarmUp | None = None

    def evaluate(self, model: Any) -> Metrics:
        """Return all metrics; validation metrics have the prefix val_."""
        held = self.validation(model) if self.validation else {}
        return self.test(model) | {f"val_{k}": v for k, v in held.items()}


def assemble(experiment: Experiment, seed: int | None = None) -> Assembly:
    """Build the problem, the method and the clients of an experiment for one seed."""
    objective, seed = experiment.problem, experiment.run.seed if seed is None else seed
    if isinstance(experiment, OwnExperiment):
        return _own(experiment, seed)
    if isinstance(objective, Labelled):
        prepared = prepare(experiment.data, experiment.partition, seed, experiment.schema)
        return labelled(experiment, prepared, prepared.positive_rate, seed)
    if not isinstance(objective, Generated):
        raise NestfedError(
            f"The experiment names no problem: set problem.name to one of {', '.join(sorted(OBJECTIVES))}."
        )
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
            experiment.execution.device,
        )
    )
    before, spec = warm_up_method(experiment), experiment.warm_up
    if before is not None and spec.problem.name:
        raise NestfedError(f"{objective.name} brings its own examples, so warm_up.problem must be left out.")
    warm_up = None if before is None else WarmUp(spec.rounds, before)
    return Assembly(made.problem, algorithm, made.clients, made.test, made.metric, made.validation, warm_up=warm_up)


def method(experiment: Experiment) -> Algorithm[Any, Any]:
    """Build the method of an experiment, with its server."""
    if isinstance(experiment, OwnExperiment):
        return experiment.method()
    if not experiment.algorithm.name:
        raise NestfedError("The experiment has no algorithm: set algorithm.name, or use `compare --algorithms`.")
    return _served(experiment.algorithm, experiment.server)


def warm_up_method(experiment: Experiment) -> Algorithm[Any, Any] | None:
    """Build the method of the warm-up, if there is one."""
    spec = experiment.warm_up
    return _served(spec.algorithm, spec.server) if spec.rounds else None


def _served(spec: AlgorithmSpec, server: ServerSpec) -> Algorithm[Any, Any]:
    made = algorithms.build(spec.name, **hyper_parameters(spec))
    return made.served_by(algorithms.build_server(server.name, **server.hyper)) if server.name else made


def _own(experiment: OwnExperiment, seed: int) -> Assembly:
    """Return the user's own objects."""
    given, name = experiment.given, experiment.algorithm.name
    test, validation = given.evaluate, given.validate
    return Assembly(
        given.problem_of(name, seed),
        experiment.method(),
        given.clients_of(name, seed),
        partial(_measured, "evaluate", test),
        given.metric,
        None if validation is None else partial(_measured, "validate", validation),
        None,
        test.scored if isinstance(test, models.HeldOut) and test.binary else None,
        validation.scored if isinstance(validation, models.HeldOut) and validation.y.dim() == 1 else None,
    )


def _measured(name: str, function: Callable[[Any], Any], model: Any) -> Metrics:
    return named_numbers(name, function(model))


def labelled(
    experiment: Experiment,
    prepared: Prepared,
    p: float,
    seed: int,
    totals: Totals | None = None,
    scale: tuple[float, float] = (0.0, 1.0),
) -> Assembly:
    """Build the objects from prepared examples.

    - `p`: the mean share of positives over all clients.
    - `totals`: the rows of all clients; None = those of the prepared parts.
    - `scale`: the mean and the deviation of a target that is a number, in which its networks learn.
    """
    objective, algorithm = experiment.problem, method(experiment)
    assert isinstance(objective, Labelled)
    several, numeric = prepared.y.dim() == 2, experiment.data.target_kind == NUMBER
    binary = prepared.classes == 2 and not several
    shape = tuple(prepared.x.shape[1:])
    model = models.build(
        experiment.model.name, shape, 1 if binary else prepared.classes, seed=seed, **experiment.model.options
    )

    model = in_units(model, *scale)

    def build(objective: Objective, algorithm: Algorithm[Any, Any]) -> tuple[Any, Any]:
        if not isinstance(objective, Labelled):
            raise NestfedError(f"warm_up.problem must work on labelled examples, which {objective.name} does not.")
        if objective.several != several:
            has = "several labels" if several else "one label"
            wants = "multi-label-auroc or multi-label-ap" if several else "a problem for one label, such as auroc"
            raise NestfedError(f"{objective.name} cannot learn from {has} per example: set problem.name to {wants}.")
        if objective.numeric != numeric:
            needs = f"{objective.name} needs a {'number' if objective.numeric else 'class'} as its target"
            raise NestfedError(f"{needs}: set data.target_kind = '{'number' if objective.numeric else 'class'}'.")
        if objective.binary and not binary:
            raise NestfedError(f"{objective.name} needs two classes, not {prepared.classes}: set data.binary = true.")
        return objective.build(
            model,
            (prepared.x, prepared.y),
            prepared.parts,
            p=p,
            restarts=partial(algorithm.restarts, q=experiment.run.q),
            names=prepared.names,
            transform=prepared.transform,
            seed=seed,
            **({"totals": totals} if objective.counted else {}),
        )

    problem, clients = build(objective, algorithm)
    warm_up = None
    if (before := warm_up_method(experiment)) is not None:
        spec = experiment.warm_up
        first, own_clients = build(spec.problem if spec.problem.name else objective, before)
        # With the run's objective, the whole point is handed over, not the model alone.
        warm_up = WarmUp(spec.rounds, before, first if spec.problem.name else None, own_clients)
    device = experiment.execution.device
    metric = objective.metric(prepared.classes)
    wanted = experiment.evaluation.metric or metric
    on = partial(evaluate, prepared=prepared, device=device, log_odds=objective.log_odds, metric=wanted)
    if numeric:
        on = partial(_judged_number, prepared=prepared, device=device)
    validation = None if prepared.validation is None else partial(on, held=prepared.validation)
    ranks = partial(scored, prepared=prepared, held=prepared.test, device=device) if binary else None
    held = prepared.validation
    # Rows are resampled by class, which several labels and numbers do not have.
    validated = (
        None if held is None or several or numeric else partial(scored, prepared=prepared, held=held, device=device)
    )
    test = partial(on, held=prepared.test)

    def by_client(model: Any) -> dict[str, Metrics]:
        scores, labels = scored(model, prepared, prepared.test, device)
        parts = zip(prepared.names, prepared.test.parts)
        return {
            name: judge(scores[p], labels[p], log_odds=objective.log_odds, metric=wanted) for name, p in parts if len(p)
        }

    return Assembly(
        problem,
        algorithm,
        clients,
        test,
        metric,
        validation,
        prepared.summary,
        ranks,
        validated,
        by_client if prepared.test.parts else None,
        warm_up,
    )


def evaluate(
    model: Callable[[Tensor], Tensor],
    prepared: Prepared,
    held: Held,
    device: str = "cpu",
    *,
    log_odds: bool = False,
    metric: str | Metric = "",
) -> Metrics:
    """Return a model's metrics on held-out examples; if clients hold them, from counts that clients may share."""
    scores, labels = scored(model, prepared, held, device)
    if held.parts:
        return judge_pooled(scores, labels, held.parts, log_odds=log_odds, metric=metric)
    return judge(scores, labels, log_odds=log_odds, metric=metric)


def _judged_number(model: Callable[[Tensor], Tensor], prepared: Prepared, held: Held, device: str = "cpu") -> Metrics:
    """Return RMSE, MAE and R² on held-out examples."""
    scores, targets = scored(model, prepared, held, device)
    return ErrorTotals.of(scores, targets, float(targets.mean()) if len(targets) else 0.0).metrics()


def scored(
    model: Callable[[Tensor], Tensor], prepared: Prepared, held: Held, device: str = "cpu"
) -> tuple[np.ndarray, np.ndarray]:
    """Return a model's scores of held-out examples, and their labels."""
    scores = models.score(model, held.x, lambda part: channels_last(prepared.ready(part.to(device))))
    return scores.double().numpy(), held.y.numpy()
