"""The two questions that judge several models at once: counts of scores, then sums of influences.

`COUNTED` asks for the counts of every model's scores by class, for all rows and for subgroups. The coordinator adds them and
asks `SPREAD`: with the pooled counts a site can compute its rows' influences on every metric (`nestfed.queries.influence`)
and send sums of their products. From these follow the variances of metrics and of differences between models.

Rows of the same person (`Rows.group`) are added up before they are multiplied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nestfed.queries.base import Arrays, Field, Query, Rows, as_text, from_text
from nestfed.queries.cells import merged_cells, without_small_groups
from nestfed.queries.influence import SUMMED
from nestfed.queries.scored import Case, Group, Scored, column_of
from nestfed.queries.scores import BINS
from nestfed.queries.slots import AtMost
from nestfed.queries.tally import tallies_of

MOST_LEVELS, LETTERS = 50, 100_000
"""The most values of a column that form subgroups, and the most bytes of a reply that lists them."""
WITHHELD = 2

# --------------------------------------------------------------------------------------------- at a site


def _counted(
    rows: Rows, x: np.ndarray, lengths: Sequence[int], cases: Sequence[Case], kind: str, groups: Sequence[Group]
) -> Arrays:
    scored = Scored.of(rows, x, lengths, cases, kind, groups)
    cells, bins, counts = [], [], []
    tallies = [scored.tallied(g) for g in range(len(groups) + 1)]
    for g in range(len(groups) + 1):
        for counted in scored.histograms(g).reshape(-1, BINS):
            used = np.flatnonzero(counted)
            cells.append(len(used))
            bins.append(used)
            counts.append(counted[used])
    columns = [name for name, _ in groups]
    return {
        "column": np.array([-1, *(columns.index(name) for name in columns)]),
        "sizes": scored.sizes,
        "persons": np.array([(tally > 0).sum(1) for tally in tallies]),
        "repeats": np.array([(tally**2).sum(1) for tally in tallies]),
        "known": scored.known,
        "own": np.array([rows.site in case["sites"] for case in cases]),
        "sums": np.einsum("gr,mvr->gmv", scored.members.astype(np.float64), scored.each),
        "cells": np.array(cells).reshape(len(groups) + 1, len(cases), 2),
        "first": np.concatenate(bins),
        "last": np.concatenate(bins),
        "counts": np.concatenate(counts),
    }


def _spread(
    rows: Rows, x: np.ndarray, lengths: Sequence[int], cases: Sequence[Case], kind: str, groups: Sequence[Group],
    metrics: Sequence[str], counts: np.ndarray, sums: np.ndarray, persons: np.ndarray,
) -> Arrays:  # fmt: skip
    scored = Scored.of(rows, x, lengths, cases, kind, groups)
    # A site's influences on its own metrics, and then those of the pooled rows of all groups.
    own = [scored.histograms(0), scored.each.sum(2), (scored.tallied(0) > 0).sum(1), 0]
    against: list[Any] = [own] + [[counts[g], sums[g], persons[g], g] for g in range(len(groups) + 1)]
    models = len(cases)
    values = np.zeros((len(metrics), models))
    shifts = np.zeros((len(against), len(metrics), models))
    products = np.zeros((len(against), len(metrics), models, models))
    for c, (histograms, total, people, g) in enumerate(against):
        for i, metric in enumerate(metrics):
            found = [scored.influences(metric, kind, histograms[m], total[m], m) for m in range(models)]
            each = np.stack([influences for _, influences in found]) * scored.members[g]
            if c == 0:
                values[i] = np.nan_to_num([value for value, _ in found])
            shifts[c, i] = each.sum(1)
            products[c, i] = scored.products(each * _factor(metric, people, scored.labels))
    counting = np.array([metric == "accuracy" for metric in metrics], bool)
    keep = ~counting
    return {
        "used": scored.sizes.sum(1),
        "counting": counting,
        "values": values * keep[:, None],
        "shifts": shifts[1:] * keep[:, None],
        "own_products": products[0],
        "products": products[1:],
    }


def _factor(metric: str, persons: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return √(c/(c − 1)) for every row, c the number of persons: of the row's class for metrics that rank, else of all.

    With one row per person this makes the variance of the AUROC that of DeLong et al. (1988).
    """
    of = (
        np.where(labels, persons[0], persons[1])
        if metric.startswith(("auroc", "pauroc"))
        else np.full(len(labels), persons[2])
    )
    return np.sqrt(of / np.maximum(of - 1.0, 1.0))


def _without_counts(reply: Arrays, min_cell: int) -> Arrays:
    """Leave out products from which a number of wrong predictions could be computed."""
    counting = reply["counting"]
    found = {k: reply[k] * (counting == 0)[:, None, None] for k in ("own_products", "products")}
    return found | {"counting": counting * WITHHELD}


# ------------------------------------------------------------------------------------- the declarations


def _sizes(
    x: np.ndarray, lengths: Sequence[int], cases: Sequence[Case], kind: str, groups: Sequence[Group], metrics: Sequence[str] = (),
    **_: Any,
) -> Mapping[str, int | AtMost]:  # fmt: skip
    models, sets = len(cases), len(groups) + 1
    return {
        "models": models, "groups": sets, "classes": 2, "class and all": 3, "values": len(SUMMED[kind]),
        "cells": AtMost(models * sets * 2 * BINS), "metrics": len(metrics),
    }  # fmt: skip


_GROUPS, _MODELS = ("groups",), ("models",)
_PRODUCTS = "products of their influences, for every pair of models"

COUNTED = Query(
    "judge-counts",
    "to judge several models on all rows and on subgroups",
    _counted,
    {
        "column": Field("the number of the column that a subgroup belongs to", "index", _GROUPS),
        "sizes": Field("the number of rows of both classes in every group", "count", ("groups", "classes")),
        "persons": Field("the number of persons with rows of either class, and of all", "count", ("groups", "class and all")),
        "repeats": Field("the sum over persons of their squared numbers of rows", shape=("groups", "class and all"), signed=False),
        "known": Field("for every model, whether all scores are numbers", "index", _MODELS),
        "own": Field("for every model, whether the site has its own calibration", "index", _MODELS),
        "sums": Field("the sums of the rows' losses", shape=("groups", "models", "values")),
        "cells": Field("the number of cells of every histogram of scores by class", "index", ("groups", "models", "classes")),
        "first": Field("the first bin of every cell", "index", ("cells",)),
        "last": Field("the last bin of every cell", "index", ("cells",)),
        "counts": Field("the number of rows in every cell", "count", ("cells",)),
    },
    _sizes,
    protect=merged_cells,
    prepare=without_small_groups,
    check=tallies_of,
    of_columns=False,
)  # fmt: skip

SPREAD = Query(
    "judge-spread",
    "to compute confidence intervals of metrics and of differences between models",
    _spread,
    {
        "used": Field("the number of rows in every group", "count", _GROUPS),
        "counting": Field(f"for every metric, 0, or 1 if it counts rows, or {WITHHELD} if its products are left out for that", "index", ("metrics",)),
        "values": Field("the metrics of the site's own rows", shape=("metrics", "models")),
        "shifts": Field("the sum of the rows' influences on the metrics of all sites", shape=("groups", "metrics", "models")),
        "own_products": Field(
            f"the sum over persons of the {_PRODUCTS}, on the site's own metrics", shape=("metrics", "models", "models")
        ),
        "products": Field(
            f"the sum over persons of the {_PRODUCTS}, on the metrics of all sites", shape=("groups", "metrics", "models", "models")
        ),
    },
    _sizes,
    protect=_without_counts,
    prepare=without_small_groups,
    of_columns=False,
)  # fmt: skip


# ------------------------------------------------------------------------------------------ subgroups


def _levels(rows: Rows, columns: Sequence[str]) -> Arrays:
    return {"levels": as_text({name: Counter(column_of(rows, name).tolist()) for name in columns})}


def _common_levels(reply: Arrays, min_cell: int) -> Arrays:
    found = {
        name: {v: n for v, n in counts.items() if n >= min_cell} for name, counts in from_text(reply["levels"]).items()
    }
    return {"levels": as_text(found)}


def levels_of(reply: Arrays, columns: Sequence[str]) -> dict[str, dict[str, int]]:
    """Read a reply to `LEVELS`; raise a ValueError if it is not what it should be."""
    found = from_text(reply["levels"])
    if not isinstance(found, dict) or set(found) != set(columns):
        raise ValueError("it lists other columns.")
    for counts in found.values():
        if not isinstance(counts, dict) or not all(type(n) is int and n >= 0 for n in counts.values()):
            raise ValueError("its counts of values are invalid.")
    return found


LEVELS = Query(
    "levels",
    "to name the subgroups by which models are judged",
    _levels,
    {"levels": Field("for every such column, its values and the number of rows of each", "text", ("letters",))},
    lambda columns: {"letters": AtMost(LETTERS)},
    protect=_common_levels,
    check=levels_of,
    of_columns=False,
)
