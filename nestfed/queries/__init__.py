"""What a site may be asked for besides training: queries, each with the declaration of its reply.

`QUERIES` lists them. A site answers only queries that its own installation knows, and sends nothing else.
"""

from nestfed.core import Registry
from nestfed.queries.base import (
    PARTS,
    ROWS,
    TEST,
    TRAINING,
    VALIDATION,
    Arrays,
    Ask,
    AtMost,
    Field,
    Query,
    Rows,
    TooFewError,
    at_hand,
    pooled,
)

QUERIES: Registry[Query] = Registry("query")

__all__ = [
    "PARTS", "QUERIES", "ROWS", "TEST", "TRAINING", "VALIDATION", "Arrays", "Ask", "AtMost", "Field", "Query", "Rows",
    "TooFewError", "at_hand", "pooled",
]  # fmt: skip
