"""What a site may be asked for besides training: queries, each with the declaration of its reply.

`QUERIES` lists them. A site answers only queries that its own installation knows and its study needs.
"""

from nestfed.core import Registry
from nestfed.queries.base import (
    PARTS,
    ROWS,
    TEST,
    TRAINING,
    VALIDATION,
    Answers,
    Arrays,
    Ask,
    Field,
    Query,
    Question,
    Rows,
    TooFewError,
    answered,
    at_hand,
    pooled,
)
from nestfed.queries.scores import SCORES
from nestfed.queries.slots import AtMost
from nestfed.queries.tables import CLASSES, SQUARES, TABLE

QUERIES: Registry[Query] = Registry("query")
for _query in (TABLE, CLASSES, SQUARES, SCORES):
    QUERIES.add(_query.name, _query)
for _name, _place in {
    "errors": "errors:ERRORS",
    "target-scale": "errors:SCALE",
    "regression-facts": "newton:FACTS",
    "regression-sums": "newton:SUMS",
    "regression-outer": "newton:OUTER",
    "regression-within": "newton:WITHIN",
    "survival-facts": "cox:FACTS",
    "cox-risk": "cox:RISK",
    "cox-moments": "cox:MOMENTS",
    "cox-outer": "cox:OUTER",
    "cox-stratified": "cox:OWN",
    "event-times": "times:TIMES",
    "event-histogram": "times:HISTOGRAM",
    "survival-cells": "times:CELLS",
    "life-table": "survival:LIFE",
    "concordance-within": "survival:PAIRS",
    "concordance-histogram": "survival:SCORED",
    "brier": "survival:BRIER",
    "judge-counts": "judging:COUNTED",
    "judge-spread": "judging:SPREAD",
    "levels": "judging:LEVELS",
    "calibration-facts": "calibration:FACTS",
    "calibration-sums": "calibration:SUMS",
    "calibration-own": "calibration:OWN",
    "calibration-line": "calibration:LINE",
}.items():
    QUERIES.add(_name, f"nestfed.queries.{_place}")

__all__ = [
    "CLASSES", "PARTS", "QUERIES", "ROWS", "SCORES", "SQUARES", "TABLE", "TEST", "TRAINING", "VALIDATION", "Answers",
    "Arrays", "Ask", "AtMost", "Field", "Query", "Question", "Rows", "TooFewError", "answered", "at_hand", "pooled",
]  # fmt: skip
