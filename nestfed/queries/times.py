"""The cells of time that all sites share, agreed by queries, and the pooled numbers of events in them.

Times move down: a row whose time lies in a cell counts as if its time were the cell's start. With the distinct event times
as starts, every method for risk sets gives exactly the result of the pooled rows. A site that sets `min_cell` keeps its
times. Then the cells are coarser, and equal for all sites; `agree` says what that costs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nestfed.core import NestfedError
from nestfed.queries.base import ROWS, TRAINING, Arrays, Ask, Field, Query, Rows, pooled
from nestfed.queries.guard import arrays, complete, guarded, least, nothing
from nestfed.queries.slots import AtMost

MOST_TIMES = 20_000
"""With more distinct times than this, cells are quantiles."""
MANY, LEVELS = 200, 6
"""The cells where there are too many distinct times; the finest cells under a disclosure rule are 2**LEVELS."""
PUBLIC = 2.0 ** np.arange(-10, 32.01, 0.25)
"""Cells that need no agreement, from which quantiles are computed under a disclosure rule."""
FEWEST = 2
"""Under a disclosure rule there are at least 2**FEWEST cells: with fewer, a common baseline says little."""
KEPT, HALF = 0.9, 0.5
"""Cells are made finer while sites keep this share of their events; the coarsest cells must keep half of all events."""


def split(rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Return times and events of the rows; reject targets that are not pairs of them."""
    y = np.asarray(rows.y, np.float64)
    if y.ndim != 2 or y.shape[1] != 2:
        raise NestfedError(f"A survival target has two columns, time and event; this one has shape {y.shape}.")
    time, event = y.T
    if not (np.isfinite(time).all() and (time >= 0).all() and np.isin(event, (0, 1)).all()):
        raise NestfedError("Times must be finite and from 0; events must be 0 (censored) or 1.")
    return time, event.astype(bool)


def cells_of(time: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return the cell of every time; −1 before the first."""
    return np.searchsorted(starts, time, side="right") - 1


def counts(rows: Rows, starts: Any) -> dict[str, np.ndarray]:
    """Return the numbers of events and of other rows in every cell; rows before the first cell are not counted."""
    time, event = split(rows)
    cell, size = cells_of(time, np.asarray(starts, np.float64)), len(starts)
    return {
        "events": np.bincount(cell[event & (cell >= 0)], minlength=size),
        "others": np.bincount(cell[~event & (cell >= 0)], minlength=size),
    }


# --------------------------------------------------------------------------------------------- at a site


def by_event(rows: Rows, min_cell: int, **_: Any) -> Rows:
    """Return the rows to use where sums describe events and other rows."""
    return guarded(rows, min_cell, split(rows)[1].astype(np.int64))


def by_cell(rows: Rows, min_cell: int, starts: Any, **_: Any) -> Rows:
    """Return the rows to use where sums describe the events and the other rows of every cell of time; all or none.

    A column is made constant if one of its values is too rare among the events of 2**FEWEST joined cells. Censored rows
    that are too few in a cell count in a later one. Events never move: if they are too few in a cell, no row is used.
    """
    starts = np.asarray(starts, np.float64)
    rows = _by_joined_cells(rows, min_cell, starts)
    if not len(rows) or least(_atoms(rows, starts), complete(rows)) < min_cell:
        return nothing(rows)
    return _later(rows, min_cell, starts)


def _by_joined_cells(rows: Rows, min_cell: int, starts: Any, **_: Any) -> Rows:
    joined = np.asarray(starts, np.float64)[:: max(1, len(starts) // 2**FEWEST)]
    return guarded(rows, min_cell, _atoms(rows, joined))


def _atoms(rows: Rows, starts: np.ndarray) -> np.ndarray:
    """Return the number of each event's cell, from 1; 0 for all other rows."""
    time, event = split(rows)
    return np.where(event, cells_of(time, starts) + 2, 0)


def _later(rows: Rows, min_cell: int, starts: np.ndarray) -> Rows:
    """Return rows whose censoring times are moved to later cells, until those of a cell are enough to be described."""
    time, event = split(rows)
    x, cell = complete(rows), cells_of(time, starts)
    blocks: list[np.ndarray] = []
    waiting = np.zeros(0, np.int64)
    for k in np.unique(cell[~event]):
        waiting = np.concatenate([waiting, np.flatnonzero(~event & (cell == k))])
        if least(np.zeros(len(waiting), np.int64), x[waiting]) >= min_cell:
            blocks.append(waiting)
            waiting = waiting[:0]
    while len(waiting) and blocks and least(np.zeros(len(waiting), np.int64), x[waiting]) < min_cell:
        waiting = np.concatenate([blocks.pop(), waiting])  # all of them together are enough: `guarded` has seen to it
    y = np.array(rows.y, np.float64)
    for block in [*blocks, waiting]:
        if len(block):
            y[block, 0] = starts[max(int(cell[block].max()), 0)]
    return replace(rows, x=x, y=y)


def _times(rows: Rows, every: bool, most: int) -> Arrays:
    time, event = split(rows)
    distinct = np.unique(time if every else time[event])
    withheld = len(distinct) > most
    return {"times": distinct[:0] if withheld else distinct, "withheld": np.array(int(withheld))}


def _keep_times(reply: Arrays, min_cell: int) -> Arrays:
    """Send no times under a disclosure rule: each belongs to single rows."""
    return {**reply, "times": reply["times"][:0], "withheld": np.array(2, "<i8")}


def _rounded(reply: Arrays, min_cell: int) -> Arrays:
    """Round counts down to multiples of `min_cell`, so that differences of replies describe no small cell."""
    return {**reply, "events": reply["events"] // min_cell * min_cell}


def _histogram(rows: Rows, starts: Any) -> Arrays:
    return {"events": counts(rows, starts)["events"]}


def _levels(rows: Rows, starts: Any, levels: int) -> Arrays:
    """Return the smallest cell at every level; level k joins the finest cells by 2**(levels − k)."""
    time, event = split(rows)
    x, starts = complete(rows), np.asarray(starts, np.float64)
    smallest = [least(_atoms(rows, starts[:: 2 ** (levels - k)]), x) for k in range(levels + 1)]
    varies = np.ptp(x, axis=0) > 0 if len(x) else np.zeros(x.shape[1])
    return arrays(used=len(time), events=event.sum(), smallest=smallest, varies=varies)


TIMES = Query(
    "event-times",
    "to agree on the times at which risk sets are compared",
    _times,
    {
        "times": Field(
            "the distinct times of its events, or of all rows; none under a disclosure rule", "sum", ("times",)
        ),
        "withheld": Field("0: all times sent, 1: too many, 2: its disclosure rule forbids it", "index"),
    },
    sizes=lambda every, most: {"times": AtMost(most)},
    protect=_keep_times,
    of_columns=False,
)
HISTOGRAM = Query(
    "event-histogram",
    "to find cells of time that hold about equally many events",
    _histogram,
    {
        "events": Field(
            "the number of events in every cell of time, rounded down to multiples of min_cell", "count", ("cells",)
        )
    },
    sizes=lambda starts: {"cells": len(starts)},
    protect=_rounded,
    of_columns=False,
)
CELLS = Query(
    "survival-cells",
    "to find how fine the common cells of time may be",
    _levels,
    {
        "used": Field("the number of rows that it may describe at all", "count"),
        "events": Field("the number of their events", "count"),
        "smallest": Field("for coarser and finer cells of time, the rows in the smallest one", "count", ("levels",)),
        "varies": Field("for every model input, whether it has more than one value", "index", ("inputs",)),
    },
    sizes=lambda starts, levels: {"levels": levels + 1, "inputs": AtMost(1_000_000)},
    prepare=_by_joined_cells,
)

# ---------------------------------------------------------------------------------------- over all sites


@dataclass(frozen=True)
class Grid:
    """The starts of the common cells of time, and which sites can use them."""

    starts: np.ndarray
    exact: bool
    """Whether the cells are the distinct times themselves."""
    protected: bool = False
    """Whether the disclosure rule of a site made the cells coarser."""
    left_out: tuple[int, ...] = ()
    """The numbers of the sites that may not describe these cells."""
    notes: tuple[str, ...] = ()
    """What the disclosure rules of sites cost, in sentences."""


def agree(ask: Ask, *, cells: int | None = None, every: bool = False, part: str = TRAINING) -> Grid:
    """Return the common cells of time: the distinct event times of all sites if they may be sent, else coarser ones.

    - `cells`: this many quantiles of the event times in place of the distinct times.
    - `every`: use the times of censored rows as well, as the censoring distribution needs.
    """
    if cells is not None and cells < 1:
        raise NestfedError(f"cells must be at least 1, not {cells}.")
    replies = ask(TIMES, part=part, every=every, most=MOST_TIMES)
    withheld = max((int(reply["withheld"]) for reply in replies.values()), default=0)
    times = np.unique(np.concatenate([np.zeros(0), *(reply["times"] for reply in replies.values())]))
    if withheld < 2:
        return _open(ask, times, MANY if withheld or len(times) > MOST_TIMES else None, cells, part)
    return _coarse(ask, part)


def _open(ask: Ask, times: np.ndarray, forced: int | None, cells: int | None, part: str) -> Grid:
    """Return cells where every site may send its times."""
    if forced is None and not len(times):
        raise NestfedError("No site has an event: there is nothing to learn from.")
    wanted = cells or forced
    if wanted is None or (forced is None and len(times) <= wanted):
        return Grid(times, exact=True)
    events = pooled(ask(HISTOGRAM, part=part, starts=PUBLIC if forced else times).values())["events"]
    starts = _quantiles(PUBLIC if forced else times, events, wanted)
    return Grid(
        starts, exact=False, notes=(f"Times were joined to {len(starts)} cells: coefficients are approximate.",)
    )


def _quantiles(edges: np.ndarray, events: np.ndarray, wanted: int) -> np.ndarray:
    """Return starts of cells with about equally many events; the first cell starts at 0 or at the first edge."""
    total = events.sum()
    if not total:
        return np.array([0.0])
    before = np.cumsum(events) - events
    first = np.searchsorted(before, total * np.arange(1, wanted) / wanted)
    return np.unique(np.concatenate([[min(0.0, edges[0])], edges[np.minimum(first, len(edges) - 1)]]))


def _coarse(ask: Ask, part: str) -> Grid:
    """Return cells that sites with a disclosure rule may describe, and what they cost."""
    events = pooled(ask(HISTOGRAM, part=part, starts=PUBLIC).values())["events"]
    finest = _quantiles(PUBLIC, events, 2**LEVELS)
    # Nested cells need a power of two; repeated quantiles were removed.
    levels = int(np.log2(len(finest)))
    finest = finest[np.linspace(0, len(finest) - 1, 2**levels).round().astype(int)]
    replies = ask(CELLS, part=part, starts=finest, levels=levels)
    able = {
        n: max([k for k in range(levels + 1) if reply["smallest"][k] > 0], default=-1) for n, reply in replies.items()
    }
    events_of = {n: int(reply["events"]) for n, reply in ask(CELLS, part=part, starts=finest[:1], levels=0).items()}
    kept = [sum(events_of[n] for n, most in able.items() if most >= k) for k in range(levels + 1)]
    if levels < FEWEST or not kept[FEWEST] > HALF * sum(events_of.values()):
        raise NestfedError(
            f"Under the sites' min_cell a common baseline needs {2**FEWEST} cells of time, each with that many events and other "
            "rows at every site. Sites with more than half of the events cannot offer them: use the stratified model, whose "
            "risk sets stay at the sites."
        )
    level = max(k for k in range(FEWEST, levels + 1) if kept[k] >= KEPT * kept[FEWEST])
    left = tuple(n for n, most in able.items() if most < level)
    rows = sum(int(replies[n][ROWS]) for n in left)
    total = sum(int(reply[ROWS]) for reply in replies.values())
    starts = finest[:: 2 ** (levels - level)]
    return Grid(starts, False, True, left, (_cost(len(starts), len(left), len(replies), rows, total),))


def _cost(cells: int, left: int, sites: int, rows: int, total: int) -> str:
    return (
        f"The sites' min_cell allows {cells} cells of time; {left} of {sites} sites, with {rows:,} of {total:,} rows, contribute "
        "nothing. Coefficients are approximate: the stratified model loses less, because its risk sets stay at the sites."
    )
