"""Survival over all sites, from counts and sums: Kaplan-Meier curves, baseline hazards, C-index and Brier score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import norm

from nestfed.core import NestfedError
from nestfed.metrics import Estimate
from nestfed.queries.base import TRAINING, Arrays, Ask, Field, Query, Rows, pooled
from nestfed.queries.cox import FAR, RISK
from nestfed.queries.guard import complete
from nestfed.queries.times import Grid, by_cell, by_event, cells_of, counts, split

BINS = 1024
"""The bins of risk scores from which the C-index of pairs across sites is computed."""
CHUNK = 1 << 17
"""The most counts of a reply for the C-index."""

# --------------------------------------------------------------------------------------------- at a site


def _predictor(rows: Rows, coef: Any) -> np.ndarray:
    return np.asarray(complete(rows) @ np.asarray(coef, np.float64))


def _pairs(rows: Rows, coef: Any) -> Arrays:
    """Return the site's own pairs, each an event and a row that outlived it."""
    h, (time, event) = _predictor(rows, coef), split(rows)
    found = np.zeros(3)
    for i in np.flatnonzero(event):
        longer = (time > time[i]) | ((time == time[i]) & ~event)
        found += [longer.sum(), (h[longer] < h[i]).sum(), (h[longer] == h[i]).sum()]
    return {"events": int(event.sum()), "pairs": found[0], "concordant": found[1], "tied": found[2]}


def _scored(rows: Rows, coef: Any, starts: Any, bins: int) -> Arrays:
    """Return the numbers of events and of other rows by cell of time and bin of the score."""
    h, (time, event) = _predictor(rows, coef), split(rows)
    starts = np.asarray(starts, np.float64)
    cell, size = cells_of(time, starts), len(starts)
    edges = np.linspace(-1, 1, bins + 1)[1:-1]
    place = np.searchsorted(edges, h / (1 + np.abs(h)), side="right")
    flat = cell * bins + place
    inside = (cell >= 0) & (cell < size - 1)  # the last start only ends the cell before it
    return {
        name: np.bincount(flat[inside & mark], minlength=(size - 1) * bins)[: (size - 1) * bins].reshape(size - 1, bins)
        for name, mark in (("events", event), ("others", ~event))
    }


def _brier(rows: Rows, coef: Any, times: Any, hazard: Any, starts: Any, before: Any, at: Any) -> Arrays:
    """Return the sums of squared errors of the predicted survival, weighted by 1 / P(not censored)."""
    h, (time, event) = _predictor(rows, coef), split(rows)
    survival = np.exp(-np.asarray(hazard)[None] * np.exp(np.clip(h, -FAR, FAR))[:, None])
    cell = np.maximum(cells_of(time, np.asarray(starts, np.float64)), 0)
    own = np.asarray(before)[cell] if len(time) else np.zeros(0)
    dead = (time[:, None] <= np.asarray(times)[None]) & event[:, None]
    alive = time[:, None] > np.asarray(times)[None]
    with np.errstate(divide="ignore", invalid="ignore"):
        gone = np.where(dead, survival**2 / own[:, None], 0.0)
        there = np.where(alive, (1 - survival) ** 2 / np.asarray(at)[None], 0.0)
    return {"used": len(time), "errors": (gone + there).sum(0)}


# ------------------------------------------------------------------------------------- the declarations

LIFE = Query(
    "life-table",
    "to draw survival curves by site, and to find how many rows are censored when",
    counts,
    {
        "events": Field("the number of events in every cell of time", "count", ("cells",)),
        "others": Field("the number of other rows in every cell of time", "count", ("cells",)),
    },
    sizes=lambda starts: {"cells": len(starts)},
    prepare=by_cell,
)
PAIRS = Query(
    "concordance-within",
    "to compute the C-index of pairs inside sites",
    _pairs,
    {
        "events": Field("the number of events", "count"),
        "pairs": Field("the number of pairs of an event and a row that outlived it", over="events", signed=False),
        "concordant": Field("the number of these in which the event has the higher score", over="events"),
        "tied": Field("the number of these with equal scores", over="events"),
    },
    prepare=by_event,
)
SCORED = Query(
    "concordance-histogram",
    "to compute the C-index of all pairs, also those of rows at different sites",
    _scored,
    {
        "events": Field("the number of events by cell of time and bin of the score", "count", ("cells", "bins")),
        "others": Field("the number of other rows by cell of time and bin of the score", "count", ("cells", "bins")),
    },
    sizes=lambda coef, starts, bins: {"cells": len(starts) - 1, "bins": bins},
)
BRIER = Query(
    "brier",
    "to compute the Brier score of predicted survival",
    _brier,
    {
        "used": Field("the number of rows in the sums", "count"),
        "errors": Field(
            "the weighted sum of the squared errors at every time", shape=("times",), over="used", signed=False
        ),
    },
    sizes=lambda times, **_: {"times": len(times)},
    prepare=by_event,
)

# ---------------------------------------------------------------------------------------- over all sites


@dataclass(frozen=True)
class LifeTable:
    """Events, censored rows and rows at risk by cell of time."""

    starts: np.ndarray
    events: np.ndarray
    others: np.ndarray

    @property
    def at_risk(self) -> np.ndarray:
        """The rows at risk in every cell."""
        return np.asarray((self.events + self.others)[::-1].cumsum()[::-1])

    @property
    def survival(self) -> np.ndarray:
        """The Kaplan-Meier estimate just after the start of every cell."""
        return np.asarray(np.cumprod(1 - self.events / np.maximum(self.at_risk, 1)))

    def interval(self, level: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
        """Return the limits of survival: Greenwood's variance on the scale log(−log S)."""
        n, d, s = self.at_risk, self.events, self.survival
        with np.errstate(divide="ignore", invalid="ignore"):
            error = np.sqrt(np.cumsum(d / (n * (n - d)))) / np.abs(np.log(s))
            half = norm.ppf((1 + level) / 2) * error
            low, high = s ** np.exp(half), s ** np.exp(-half)
        certain = (s == 1) | (s == 0)
        return np.where(certain, s, low), np.where(certain, s, high)

    @property
    def uncensored(self) -> np.ndarray:
        """The probability of not being censored, just after the start of every cell; events precede censorings."""
        exposed = self.at_risk - self.events
        return np.asarray(np.cumprod(1 - self.others / np.maximum(exposed, 1)))

    def before(self, values: np.ndarray) -> np.ndarray:
        """Return a curve just before the start of every cell."""
        return np.concatenate([[1.0], values[:-1]])

    def at(self, times: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Return a curve at any times."""
        return np.asarray(np.concatenate([[1.0], values])[cells_of(np.asarray(times, np.float64), self.starts) + 1])


def life_tables(ask: Ask, grid: Grid, part: str = TRAINING) -> tuple[LifeTable, dict[int, LifeTable]]:
    """Return the life table of all sites together and that of every site; a site that may not answer has none."""
    replies = ask(LIFE, part=part, starts=grid.starts)
    total = pooled(replies.values())
    by_site = {
        n: LifeTable(grid.starts, reply["events"], reply["others"])
        for n, reply in replies.items()
        if (reply["events"] + reply["others"]).any()
    }
    return LifeTable(grid.starts, total["events"], total["others"]), by_site


@dataclass(frozen=True)
class Baseline:
    """The cumulative baseline hazard after the start of every cell (Breslow), at a linear predictor of 0."""

    starts: np.ndarray
    cumulative: np.ndarray

    def __call__(self, times: Any) -> np.ndarray:
        """Return the cumulative hazard at any times."""
        place = cells_of(np.asarray(times, np.float64), self.starts) + 1
        return np.asarray(np.concatenate([[0.0], self.cumulative])[place])

    def survival(self, predictor: np.ndarray, times: Any) -> np.ndarray:
        """Return the survival probabilities, (n, times)."""
        return np.exp(-np.exp(np.asarray(predictor))[:, None] * self(times)[None])


def baselines(ask: Ask, coef: np.ndarray, grid: Grid, part: str = TRAINING) -> tuple[Baseline, dict[int, Baseline]]:
    """Return the baseline hazard of all sites together, and that of every site by itself, from one query."""
    replies = ask(RISK, part=part, starts=grid.starts, coef=coef)
    return _baseline(grid, pooled(replies.values())), {
        n: _baseline(grid, reply) for n, reply in replies.items() if reply["risk"].any()
    }


def _baseline(grid: Grid, reply: Arrays) -> Baseline:
    risk = np.where(reply["events"] > 0, reply["risk"], 1.0)
    return Baseline(grid.starts, np.cumsum(reply["events"] / risk))


def concordance_within(ask: Ask, coef: np.ndarray, part: str = TRAINING) -> float:
    """Return Harrell's C-index over pairs inside sites; NaN without pairs."""
    total = pooled(ask(PAIRS, part=part, coef=coef).values())
    return float((total["concordant"] + total["tied"] / 2) / total["pairs"]) if total["pairs"] else float("nan")


def concordance(
    ask: Ask,
    coef: np.ndarray,
    grid: Grid,
    *,
    censoring: LifeTable | None = None,
    until: float = np.inf,
    bins: int = BINS,
    part: str = TRAINING,
) -> Estimate:
    """Return the C-index over all pairs, with bounds: scores in one bin count as tied.

    Without `censoring` it is Harrell's; with the life table of all times, Uno's, which weights an event at t by 1/G(t−)².

    - `until`: use events before this time only.
    """
    if grid.protected:
        raise NestfedError(
            "Pairs across sites need score histograms that a site's min_cell forbids: use concordance_within."
        )
    weight = np.where(grid.starts < until, 1.0, 0.0)
    if censoring is not None:
        place = np.maximum(cells_of(grid.starts, censoring.starts), 0)
        weight = weight / censoring.before(censoring.uncensored)[place] ** 2
    ends = np.append(grid.starts, np.inf)
    step = max(1, CHUNK // (2 * bins))
    later, sums = np.zeros(bins), np.zeros(3)
    for first in reversed(range(0, len(grid.starts), step)):
        starts = ends[first : first + step + 1]
        total = pooled(ask(SCORED, part=part, coef=coef, starts=starts, bins=bins).values())
        for k in reversed(range(len(starts) - 1)):
            events, others = total["events"][k].astype(float), total["others"][k]
            longer = later + others
            below = np.cumsum(longer) - longer
            sums += weight[first + k] * np.array([events.sum() * longer.sum(), events @ below, events @ longer])
            later = longer + events
    pairs, concordant, same = sums
    if not pairs:
        return Estimate(float("nan"), float("nan"), float("nan"))
    return Estimate(*(float((concordant + share * same) / pairs) for share in (0.5, 0.0, 1.0)))


def brier(
    ask: Ask,
    coef: np.ndarray,
    baseline: Baseline,
    censoring: LifeTable,
    times: Sequence[float],
    part: str = TRAINING,
) -> np.ndarray:
    """Return the Brier scores of predicted survival at the given times (Graf et al. 1999).

    Rows are weighted by the inverse probability of not being censored: an event at t by 1/G(t−), a survivor by 1/G(time).

    - `censoring`: the life table of all sites on the grid of all times, `agree(ask, every=True)`.
    """
    wanted = np.asarray(times, np.float64)
    replies = ask(
        BRIER,
        part=part,
        coef=coef,
        times=wanted,
        hazard=baseline(wanted),
        starts=censoring.starts,
        before=censoring.before(censoring.uncensored),
        at=censoring.at(wanted, censoring.uncensored),
    )
    total: Mapping[str, np.ndarray] = pooled(replies.values())
    if not int(total["used"]):
        raise NestfedError("No site may describe its rows: there is no Brier score.")
    return np.asarray(total["errors"] / total["used"])
