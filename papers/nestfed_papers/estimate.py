"""Estimate what a reproduction needs: minutes at each budget, data, memory."""

from __future__ import annotations

import math

from nestfed.algorithms import METHODS
from nestfed.experiment.spec import Experiment
from nestfed.experiment.tune import number, pauses, search_space, trial_rounds
from nestfed_papers.reproductions import papers
from nestfed_papers.reproductions.base import BUDGETS, Budget, Reproduction

CORES = 2
"""The cores of the machine that times are given for."""
START = 1.5
"""Processor seconds until a job has loaded its data and evaluated its start, in a worker that has already loaded torch."""
VALIDATION = 0.3
"""The cost of a trial's evaluation relative to a run's, which also evaluates the test data."""


def minutes(found: Reproduction, budget: str) -> float:
    """Estimate a budget's minutes on two cores, tuning included, from measured seconds per round and evaluation."""
    amount = found.at(budget)
    total = amount.minutes * 60 * CORES
    for case in found.chosen(amount):
        experiment = case.build(amount)
        price = papers.COSTS[amount.swap.get(case.experiment, case.experiment)]
        for name in experiment.methods:
            variant = experiment.for_method(name)
            rounds, every = variant.run.rounds, variant.evaluation.every
            times = METHODS[variant.algorithm.name].evaluations
            trained, processes = _trial_rounds(experiment, name, amount)
            if case.splits:
                trained, processes = trained * amount.seeds, processes * amount.seeds
            judged = VALIDATION * (trained / every + processes) + amount.seeds * (rounds / every + 1)
            trained += amount.seeds * rounds
            share = getattr(experiment.problem, "test_tasks", 600) / 600
            total += (
                trained * price.round * times * amount.factors.get(case.data, amount.factor)
                + judged * price.evaluation * share
            )
            total += (processes + amount.seeds) * START
    return total / 60 / CORES


def _trial_rounds(experiment: Experiment, method: str, budget: Budget) -> tuple[float, int]:
    """Return how many rounds all trials of a method take together, and how many processes."""
    space = search_space(experiment, method)
    if all(d.single() for d in space.values()):
        return 0.0, 0
    start = number(space, budget.trials)
    variant = experiment.for_method(method)
    rounds = trial_rounds(variant, budget.trial_rounds)
    stops = [*(pauses(rounds, variant.evaluation.every) if budget.stopping else []), rounds]
    done, total, processes = 0, 0.0, 0
    for i, stop in enumerate(stops):
        alive = math.ceil(start / 2**i) * budget.trial_seeds
        total += alive * (stop - done)
        processes += alive if stop > done else 0
        done = stop
    return total, processes


def listing() -> list[list[str]]:
    """Return a row for every reproduction: name, what it is, data, time at each budget, memory."""
    table = []
    for found in papers.REPRODUCTIONS.values():
        memory = " / ".join(f"{found.budgets[budget].memory:g}" for budget in BUDGETS)
        table.append(
            [
                found.name,
                found.title,
                ", ".join(found.needs) or "none",
                *(_time(minutes(found, budget)) for budget in BUDGETS),
                f"{memory} GB",
            ]
        )
    return table


def _time(value: float) -> str:
    if value < 90:
        return f"{max(1, round(value))} min"
    return f"{value / 60:.0f} h" if value < 60 * 72 else f"{value / 60 / 24:.0f} days"
