"""The complete list of what leaves a site, made from the declarations that the gate checks answers against."""

from __future__ import annotations

from typing import Any

from nestfed.experiment.spec import Experiment
from nestfed.problems.objective import Labelled
from nestfed.queries import CLASSES, SCORES, SQUARES, TABLE


def questions_in(study: Any) -> tuple[str, ...]:
    """Return the names of the queries that a study asks sites."""
    if not isinstance(study, Experiment) or not isinstance(study.problem, Labelled):
        return ()
    return (CLASSES.name, TABLE.name, SQUARES.name, SCORES.name)
