"""The papers' own problems as an experiment file names them."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from torch import Tensor

from nestfed import models
from nestfed.core import NestfedError
from nestfed.experiment.build import Assembly, Metrics
from nestfed.experiment.spec import Experiment
from nestfed.problems.maml import MAML, squared_error
from nestfed_papers import language, omniglot, sine


def build_sine(experiment: Experiment, seed: int) -> Assembly:
    """MAML on sine waves; the metric is R² after one inner step, on tasks that are the same for every run."""
    spec = experiment.problem
    clients = sine.SineClients(experiment.partition.clients, spec.tasks, spec.shots, seed=seed)
    problem = MAML(
        models.build(experiment.model.name, (1,), seed=seed, **experiment.model.options),
        squared_error,
        inner_lr=spec.inner_lr,
        tasks=clients.held,
        first_order=spec.first_order,
        clip=spec.clip or None,
    )
    steps = tuple(sorted({1, spec.inner_steps}))
    test = sine.SineTest(spec.test_tasks, spec.shots, steps)
    validation = sine.SineTest(200, spec.shots, steps, stream=1)
    return Assembly(problem, None, clients, test, "r2_1", validation)


def build_omniglot(experiment: Experiment, seed: int) -> Assembly:
    """MAML on Omniglot's characters."""
    spec = experiment.problem
    characters = omniglot.read(experiment.data.folder or None)
    if spec.split == "characters":
        split = omniglot.by_characters(len(characters.images), experiment.partition.clients, seed)
    elif spec.split == "alphabets":
        split = omniglot.by_alphabets(characters.alphabets)
    else:
        raise NestfedError(f"problem.split must be characters or alphabets, not {spec.split!r}.")
    training, validation, test = (
        omniglot.Episodes(characters, parts, spec.ways, spec.shots, spec.queries)
        for parts in (split.training, split.validation, split.test)
    )
    problem = MAML(
        models.build(experiment.model.name, (1, 28, 28), spec.ways, seed=seed, **experiment.model.options),
        omniglot.cross_entropy,
        inner_lr=spec.inner_lr,
        first_order=spec.first_order,
        clip=spec.clip or None,
    )
    clients = omniglot.OmniglotClients(training, spec.tasks, seed=seed, names=split.names)
    judge = omniglot.FewShotTest(test, spec.test_tasks, spec.inner_steps)
    tune = omniglot.FewShotTest(validation, max(2, spec.test_tasks // 4), spec.inner_steps, stream=1)
    return Assembly(problem, None, clients, judge, "accuracy", tune)


def build_language(experiment: Experiment, seed: int) -> Assembly:
    """Language modelling; the metric is the mean log-likelihood of a word."""
    spec = experiment.problem
    text = language.read(experiment.data.name, experiment.data.folder or None, spec.vocabulary, experiment.data.limit)
    model = models.build(experiment.model.name, None, len(text.words), seed=seed, **experiment.model.options)
    clients = language.TextClients(text.train, experiment.partition.clients, spec.batch, spec.bptt)

    def judge(m: Any, part: Tensor) -> Metrics:
        loss = language.word_loss(m, part.to(experiment.execution.device), spec.bptt)
        return {"log_likelihood": -loss, "perplexity": math.exp(loss) if loss < 700 else math.inf}

    test, validation = partial(judge, part=text.test), partial(judge, part=text.validation)
    problem = language.Language(model, clip=spec.clip or None)
    return Assembly(problem, None, clients, test, "log_likelihood", validation)
