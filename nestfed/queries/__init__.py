"""What a site may be asked for besides training: queries, each with the declaration of its reply.

`QUERIES` lists them. A site answers only queries that its own installation knows, and sends nothing else.
"""

from nestfed.core import Registry
from nestfed.queries.base import Arguments, Arrays, AtMost, Field, Query, Rows, TooFewError, pooled

QUERIES: Registry[Query] = Registry("query")

__all__ = ["QUERIES", "Arguments", "Arrays", "AtMost", "Field", "Query", "Rows", "TooFewError", "pooled"]
