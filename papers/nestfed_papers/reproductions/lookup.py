"""Find a reproduction by name, and check whether records belong to its current settings."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from nestfed.core import unknown
from nestfed.experiment.spec import Experiment, identity
from nestfed_papers.reproductions import papers
from nestfed_papers.reproductions.base import Budget, Case, Evidence, Reproduction


def find(name: str) -> Reproduction:
    """Return a reproduction by its name."""
    if name not in papers.REPRODUCTIONS:
        raise unknown("reproduction", name, papers.REPRODUCTIONS)
    return papers.REPRODUCTIONS[name]


def folder(case: Case, budget: Budget, experiment: Experiment) -> Path:
    """Return the directory of a case's runs, relative to that of all reproductions."""
    return Path("runs") / f"{case.experiment}-{_digest(experiment, budget, case)}"


def _digest(experiment: Experiment, budget: Budget, case: Case) -> str:
    """Return a hash of everything that determines the runs of a case, except the number of seeds."""
    grids = {name: experiment.grid(name) for name in experiment.methods}
    variants = {name: identity(experiment.for_method(name).resolved()) for name in experiment.methods}
    parts = [variants, grids, budget.trials, case.splits]
    parts += [budget.trial_rounds] if 0 < budget.trial_rounds < experiment.run.rounds else []
    parts += [budget.trial_seeds, budget.stopping] if (budget.trial_seeds, budget.stopping) != (1, True) else []
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:10]


def outdated(evidence: Evidence) -> list[str]:
    """Return the cases whose settings have changed since they were run."""
    found = find(evidence.name)
    budget = found.at(evidence.budget)
    runs = {case.data: folder(case, budget, case.build(budget)) for case in found.chosen(budget)}
    recorded = evidence.meta.get("folders", {})
    return [data for data in evidence.data() if data not in runs or recorded.get(data) != str(runs[data])]


def departs(evidence: Evidence) -> tuple[str, str]:
    """Return a label and what differs from the paper: the current text, or the recorded one if settings have changed."""
    found = find(evidence.name)
    text = evidence.meta["departs"] if outdated(evidence) else found.at(evidence.budget).departs
    return "Not from a paper" if found.ours else "Differs from the paper", text
