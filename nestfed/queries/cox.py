"""Exact federated Cox regression: Newton's method on sums over the risk sets of all sites.

A Newton step takes two queries. First every site sends, for each cell of time, the sum of e^h over its rows at risk and over
its events (h = x·coef). From the totals follow, by cell, the weights that turn the second query's sums into gradient and
information of the pooled partial likelihood. So the products of covariates leave a site as one matrix, not one per cell.

The stratified model compares rows within their site only. There a site sends three sums, and no risk set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from nestfed.core import NestfedError
from nestfed.queries.base import ROWS, TRAINING, VALIDATION, Arrays, Ask, Field, Query, Rows, pooled
from nestfed.queries.guard import arrays, complete, persons, steady
from nestfed.queries.newton import Path, choose_ridge
from nestfed.queries.slots import AtMost
from nestfed.queries.solve import Fit, Minimum, Sums, constant_columns, covariances, newton, not_identified
from nestfed.queries.times import Grid, agree, by_cell, by_event, cells_of, counts, split

Ties = Literal["efron", "breslow"]
FAR = 300.0
"""Linear predictors are clipped here, so that a step that is too long has a finite, large objective."""

# -------------------------------------------------------------------------------- the partial likelihood


@dataclass(frozen=True)
class Tied:
    """The terms of the partial likelihood: one per event, in Efron's or Breslow's way.

    Term l of a cell with d events has the denominator S0 − f·(S0 of the events), f = l/d (Efron) or 0 (Breslow).
    """

    cell: np.ndarray
    """The cell of each term."""
    share: np.ndarray
    """f of each term."""
    denominator: np.ndarray
    size: int
    """The number of cells."""

    @classmethod
    def of(cls, events: np.ndarray, risk: np.ndarray, risk_events: np.ndarray, ties: Ties) -> Tied:
        """Return the terms, given the number of events by cell, and S0 of the rows at risk and of the events."""
        cell = np.repeat(np.arange(len(events)), events)
        place = np.arange(len(cell)) - np.repeat(np.cumsum(events) - events, events)
        share = place / events[cell] if ties == "efron" else np.zeros(len(cell))
        return cls(cell, share, risk[cell] - share * risk_events[cell], len(events))

    @property
    def value(self) -> float:
        """Minus the log partial likelihood, without the events' own linear predictors."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return float(np.log(self.denominator).sum())

    def weights(self) -> tuple[np.ndarray, np.ndarray]:
        """Return by cell the weights of sums over the rows at risk, and over the events."""
        inverse = 1 / self.denominator
        return self.by_cell(inverse), self.by_cell(inverse * self.share)

    def by_cell(self, terms: np.ndarray) -> np.ndarray:
        """Return the sums of terms, (n,) or (n, p), by cell."""
        found = np.zeros((self.size, *terms.shape[1:]))
        np.add.at(found, self.cell, terms)
        return found

    def means(self, first: np.ndarray, first_events: np.ndarray) -> np.ndarray:
        """Return every term's weighted mean of the covariates, given their sums S1 by cell."""
        found = first[self.cell] - self.share[:, None] * first_events[self.cell]
        return np.asarray(found / self.denominator[:, None])

    def residuals(self, first: np.ndarray, first_events: np.ndarray) -> dict[str, np.ndarray]:
        """Return by cell what the rows' score residuals need, given the sums S1 by cell."""
        means = self.means(first, first_events)
        inverse = means / self.denominator[:, None]
        risk, events = self.weights()
        return {
            "mean": self.by_cell(means) / np.maximum(np.bincount(self.cell, minlength=self.size), 1)[:, None],
            "risk": risk,
            "events": events,
            "risk_means": self.by_cell(inverse),
            "event_means": self.by_cell(inverse * self.share[:, None]),
        }


# --------------------------------------------------------------------------------------------- at a site


@dataclass(frozen=True)
class _AtRisk:
    """A site's rows by cell of time; rows before the first cell are dropped."""

    x: np.ndarray
    event: np.ndarray
    cell: np.ndarray
    group: np.ndarray | None
    size: int

    @classmethod
    def of(cls, rows: Rows, starts: np.ndarray) -> _AtRisk:
        x, (time, event) = complete(rows), split(rows)
        cell = cells_of(time, starts)
        kept = cell >= 0
        group = None if rows.group is None else rows.group[kept]
        return cls(x[kept], event[kept], cell[kept], group, len(starts))

    def weights(self, coef: np.ndarray) -> np.ndarray:
        return np.exp(np.clip(self.x @ coef, -FAR, FAR))

    def sums(self, values: np.ndarray, *, events: bool = False) -> np.ndarray:
        """Return the sums of values, (n,) or (n, p), over the events of every cell, or over all rows at risk in it."""
        found = np.zeros((self.size, *values.shape[1:]))
        if events:
            np.add.at(found, self.cell[self.event], values[self.event])
            return found
        np.add.at(found, self.cell, values)
        return found[::-1].cumsum(axis=0)[::-1]

    def exposure(self, w: np.ndarray, risk: np.ndarray, events: np.ndarray) -> np.ndarray:
        """Return each row's weight in gradient and information, given the weights by cell."""
        return w * (np.cumsum(risk)[self.cell] - self.event * events[self.cell])


def _risk(rows: Rows, starts: Any, coef: Any) -> Arrays:
    starts, coef = np.asarray(starts, np.float64), np.asarray(coef, np.float64)
    at = _AtRisk.of(rows, starts)
    w = at.weights(coef)
    return {
        **counts(rows, starts),
        "risk": at.sums(w),
        "risk_events": at.sums(w, events=True),
        "of_events": at.x[at.event].sum(0),
    }


def _moments(rows: Rows, starts: Any, coef: Any, risk: Any, events: Any) -> Arrays:
    starts, coef = np.asarray(starts, np.float64), np.asarray(coef, np.float64)
    at = _AtRisk.of(rows, starts)
    w = at.weights(coef)
    exposure = at.exposure(w, np.asarray(risk), np.asarray(events))
    return {
        "first": at.sums(w[:, None] * at.x),
        "first_events": at.sums(w[:, None] * at.x, events=True),
        "second": at.x.T @ (exposure[:, None] * at.x),
    }


def _residuals(
    at: _AtRisk,
    coef: np.ndarray,
    mean: np.ndarray,
    risk: np.ndarray,
    events: np.ndarray,
    risk_means: np.ndarray,
    event_means: np.ndarray,
) -> np.ndarray:
    """Return the score residuals of the rows (Lin and Wei 1989), with Efron's or Breslow's ties."""
    w, mark = at.weights(coef), at.event[:, None]
    own = np.where(mark, at.x - mean[at.cell], 0.0)
    pulled = np.cumsum(risk_means, axis=0)[at.cell] - mark * event_means[at.cell]
    return np.asarray(own - at.exposure(w, risk, events)[:, None] * at.x + w[:, None] * pulled)


def _outer(
    rows: Rows, starts: Any, coef: Any, mean: Any, risk: Any, events: Any, risk_means: Any, event_means: Any
) -> Arrays:
    at = _AtRisk.of(rows, np.asarray(starts, np.float64))
    given = map(np.asarray, (coef, mean, risk, events, risk_means, event_means))
    each = persons(_residuals(at, *given), at.group)
    return {"outer": each.T @ each, "total": each.sum(0)}


def _own(rows: Rows, coef: Any, ties: Ties) -> Arrays:
    """Return the sums of the site's own partial likelihood, at its own event times."""
    coef = np.asarray(coef, np.float64)
    time, event = split(rows)
    starts = np.unique(time[event])
    at = _AtRisk.of(rows, starts)
    w, events = at.weights(coef), np.bincount(at.cell[at.event], minlength=at.size)
    tied = Tied.of(events, at.sums(w), at.sums(w, events=True), ties)
    first, first_events = at.sums(w[:, None] * at.x), at.sums(w[:, None] * at.x, events=True)
    exposure, means = at.exposure(w, *tied.weights()), tied.means(first, first_events)
    each = persons(_residuals(at, coef, **tied.residuals(first, first_events)), at.group)
    of_events = at.x[at.event].sum(0)
    return {
        "events": int(events.sum()),
        "loss": tied.value - float(coef @ of_events),
        "gradient": at.x.T @ exposure - of_events,
        "hessian": at.x.T @ (exposure[:, None] * at.x) - means.T @ means,
        "outer": each.T @ each,
    }


# ------------------------------------------------------------------------------------- the declarations


def _sizes(coef: Any, starts: Any = (), **_: Any) -> Mapping[str, int]:
    return {"inputs": len(coef), "cells": len(starts)}


_BY_CELL = ("cells",)
RISK = Query(
    "cox-risk",
    "to compare the rows at risk at all sites (the partial likelihood)",
    _risk,
    {
        "events": Field("the number of events in every cell of time", "count", _BY_CELL),
        "others": Field("the number of other rows in every cell of time", "count", _BY_CELL),
        "risk": Field(
            "the sum of e^(linear predictor) over the rows at risk in every cell of time", shape=_BY_CELL, signed=False
        ),
        "risk_events": Field(
            "the same sum over the events of every cell of time", shape=_BY_CELL, over="events", signed=False
        ),
        "of_events": Field("the sum of the model inputs over all events", shape=("inputs",)),
    },
    sizes=_sizes,
    prepare=by_cell,
)
MOMENTS = Query(
    "cox-moments",
    "to take a Newton step of a Cox regression over all sites",
    _moments,
    {
        "first": Field(
            "the sum of e^(linear predictor) · inputs over the rows at risk in every cell", shape=("cells", "inputs")
        ),
        "first_events": Field("the same sum over the events of every cell", shape=("cells", "inputs")),
        "second": Field("the weighted sum over all rows of the products of their inputs", shape=("inputs", "inputs")),
    },
    sizes=_sizes,
    prepare=by_cell,
)
OUTER = Query(
    "cox-outer",
    "to compute robust standard errors of a Cox regression",
    _outer,
    {
        "outer": Field(
            "the sum over persons (or rows) of the products of their score residuals", shape=("inputs", "inputs")
        ),
        "total": Field("the sum of the score residuals", shape=("inputs",)),
    },
    sizes=_sizes,
    prepare=by_cell,
)
OWN = Query(
    "cox-stratified",
    "to take a Newton step of a Cox regression that compares rows within their site only",
    _own,
    {
        "events": Field("the number of events", "count"),
        "loss": Field("minus the log partial likelihood of the site's rows", over="events"),
        "gradient": Field("its derivatives by the coefficients", shape=("inputs",), over="events"),
        "hessian": Field("its second derivatives", shape=("inputs", "inputs"), over="events"),
        "outer": Field(
            "the sum over persons (or rows) of the products of their score residuals",
            shape=("inputs", "inputs"),
            over="events",
        ),
    },
    sizes=_sizes,
    prepare=by_event,
)


def _facts(rows: Rows) -> Arrays:
    x, (_, event) = complete(rows), split(rows)
    varies = np.ptp(x, axis=0) > 0 if len(x) else np.zeros(x.shape[1])
    return arrays(used=len(x), events=event.sum(), varies=varies)


FACTS = Query(
    "survival-facts",
    "to find sites and columns that a survival model cannot use",
    _facts,
    {
        "used": Field("the number of rows that it may describe; 0 if its disclosure rule leaves no sums", "count"),
        "events": Field("the number of their events", "count"),
        "varies": Field("for every model input, whether it has more than one value", "index", ("inputs",)),
    },
    sizes=lambda: {"inputs": AtMost(1_000_000)},
    prepare=by_event,
)

# ---------------------------------------------------------------------------------------- over all sites


@dataclass
class _Common:
    """The pooled partial likelihood with one baseline, as sums at a point; `free` sites have an intercept of their own.

    An intercept multiplies all sums of its site, so the server applies it, and no site knows its own.
    """

    ask: Ask
    grid: Grid
    ties: Ties
    inputs: int
    free: tuple[int, ...] = ()
    part: str = TRAINING

    def __call__(self, x: np.ndarray) -> Sums:
        self.look(x)
        tied, p = self.tied, self.inputs
        if not np.isfinite(self.value):
            return Sums(np.inf, np.zeros(len(x)), np.zeros((len(x), len(x))))
        risk, events = tied.weights()
        replies = self.ask(MOMENTS, part=self.part, starts=self.grid.starts, coef=x[:p], risk=risk, events=events)
        # With nearly empty risk sets at the end, differences of large sums would lose digits: everything is a plain sum.
        self.first, self.first_events, second = self._added(replies, risk, events)
        means = tied.means(self.first, self.first_events)
        gradient = risk @ self.first - events @ self.first_events - self.of_events
        return Sums(self.value, gradient, second - means.T @ means)

    def look(self, x: np.ndarray) -> float:
        """Ask for the risk sets at a point and return the objective."""
        coef = x[: self.inputs]
        self.factor = self._factors(x)
        self.replies = self.ask(RISK, part=self.part, starts=self.grid.starts, coef=coef)
        events = sum((reply["events"] for reply in self.replies.values()), np.zeros(len(self.grid.starts), np.int64))
        self.risk, self.risk_events = (
            sum((self.factor[n] * reply[k] for n, reply in self.replies.items()), np.zeros(len(events)))
            for k in ("risk", "risk_events")
        )
        self.of_events = np.concatenate(
            [pooled(self.replies.values())["of_events"], [float(self.replies[n]["events"].sum()) for n in self.free]]
        )
        self.events = events
        self.tied = Tied.of(events, self.risk, self.risk_events, self.ties)
        self.value = self.tied.value - float(self.of_events @ x)
        return self.value

    def _factors(self, x: np.ndarray) -> dict[int, float]:
        return _Ones(zip(self.free, np.exp(np.clip(x[self.inputs :], -FAR, FAR))))

    def _added(
        self, replies: Mapping[int, Arrays], risk: np.ndarray, events: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the sums over sites, with a column for the intercept of every free site."""
        p, size, cells = self.inputs, self.inputs + len(self.free), len(self.grid.starts)
        first, first_events, second = np.zeros((cells, size)), np.zeros((cells, size)), np.zeros((size, size))
        for n, reply in replies.items():
            f = self.factor[n]
            first[:, :p] += f * reply["first"]
            first_events[:, :p] += f * reply["first_events"]
            second[:p, :p] += f * reply["second"]
        for j, n in enumerate(self.free, start=p):
            own, f = self.replies[n], self.factor[n]
            first[:, j], first_events[:, j] = f * own["risk"], f * own["risk_events"]
            second[j, :p] = second[:p, j] = f * (risk @ replies[n]["first"] - events @ replies[n]["first_events"])
            second[j, j] = f * (risk @ own["risk"] - events @ own["risk_events"])
        return first, first_events, second

    def outer(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the sums of outer products of score residuals, by person and by site, without site intercepts."""
        given = self.tied.residuals(self.first, self.first_events)
        replies = self.ask(OUTER, part=self.part, starts=self.grid.starts, coef=x, **given)
        totals = np.stack([reply["total"] for reply in replies.values()])
        return pooled(replies.values())["outer"], totals.T @ totals


class _Ones(dict[int, float]):
    """The factors of sites; 1 for those without an intercept."""

    def __missing__(self, key: int) -> float:
        return 1.0


@dataclass
class _Stratified:
    """The sum of the sites' own partial likelihoods."""

    ask: Ask
    ties: Ties
    part: str = TRAINING

    def __call__(self, x: np.ndarray) -> Sums:
        self.replies = self.ask(OWN, part=self.part, coef=x, ties=self.ties)
        total = pooled(self.replies.values())
        return Sums(float(total["loss"]), total["gradient"], total["hessian"])


def cox(
    ask: Ask,
    names: Sequence[str],
    *,
    ties: Ties = "efron",
    baseline: Literal["common", "stratified", "intercepts"] = "common",
    ridge: float = 0.0,
    grid: Grid | None = None,
    robust: bool = True,
    start: np.ndarray | None = None,
    part: str = TRAINING,
) -> Fit:
    """Return the Cox regression over the rows of all sites, equal to that of the pooled rows.

    - `names`: the names of the model inputs.
    - `ties`: "efron" or "breslow".
    - `baseline`: "common" for one baseline hazard; "stratified" for one per site, risk sets staying at the sites;
      "intercepts" for one baseline times a factor per site.
    - `ridge`: the penalty ν in ½ν Σ coef².
    - `grid`: the cells of time from `agree`, if there are any already.
    """
    _check(ties, baseline, ridge)
    ask = steady(ask)
    facts = ask(FACTS, part=part)
    _preflight(facts, names)
    if baseline == "stratified":
        return _stratified_fit(ask, names, ties, ridge, robust, start, part, facts)
    grid = agree(ask, part=part) if grid is None else grid
    free = _with_intercepts(facts, grid) if baseline == "intercepts" else ()
    every = (*names, *(f"(site {n})" for n in free))
    sums = _Common(ask, grid, ties, len(names), free, part)
    if baseline == "intercepts":
        ask = sums.ask = _without(ask, {n for n, reply in facts.items() if not int(reply["events"])})
    penalty = np.array([ridge] * len(names) + [0.0] * len(free))
    found = newton(sums, penalty, start, every)
    outer = sums.outer(found.x) if robust and not free else (None, None)
    fit = _fit(names, found, covariances(found, *outer), ridge, baseline, sums.replies)
    notes = grid.notes + not_identified(found, every)
    return replace(fit, notes=notes, constant=constant_columns(facts, names))


_MODELS = {
    "common": "Cox regression with a common baseline",
    "stratified": "Cox regression stratified by site",
    "intercepts": "Cox regression with site intercepts",
}


def _check(ties: str, baseline: str, ridge: float) -> None:
    if ties not in ("efron", "breslow"):
        raise NestfedError(f"ties must be 'efron' or 'breslow', not {ties!r}.")
    if baseline not in _MODELS:
        raise NestfedError(f"baseline must be 'common', 'stratified' or 'intercepts', not {baseline!r}.")
    if not 0 <= ridge < np.inf:
        raise NestfedError(f"ridge must be a number from 0, not {ridge!r}.")


def _preflight(facts: Mapping[int, Arrays], names: Sequence[str]) -> None:
    total = pooled(facts.values())
    if len(total["varies"]) != len(names):
        raise NestfedError(f"The sites have {len(total['varies'])} model inputs, but {len(names)} names were given.")
    if int(total["events"]):
        return
    if any(int(reply[ROWS]) and not int(reply["used"]) for reply in facts.values()):
        raise NestfedError(
            "No site may describe its events under its min_cell: the study needs sites with more events, or a smaller min_cell."
        )
    raise NestfedError("No site has an event: there is nothing to learn from.")


def _with_intercepts(facts: Mapping[int, Arrays], grid: Grid) -> tuple[int, ...]:
    """Return the sites with an intercept of their own: all with events but the largest, which is the reference.

    The intercept of a site without events is −∞; the likelihood is then that of the other sites.
    """
    able = {n: int(reply["events"]) for n, reply in facts.items() if int(reply["events"]) and n not in grid.left_out}
    if not able:
        raise NestfedError("No site with events may describe the cells of time: use the stratified model.")
    largest = max(able, key=lambda n: able[n])
    return tuple(n for n in able if n != largest)


def _without(ask: Ask, left: set[int]) -> Ask:
    def asked(query: Query, part: str = TRAINING, **arguments: Any) -> Mapping[int, Arrays]:
        return {n: reply for n, reply in ask(query, part=part, **arguments).items() if n not in left}

    return asked


def _fit(
    names: Sequence[str],
    found: Minimum,
    covariance: Mapping[Any, np.ndarray],
    ridge: float,
    baseline: str,
    replies: Mapping[int, Arrays],
) -> Fit:
    p = len(names)
    some = {n: int(np.sum(reply["events"])) + int(np.sum(reply.get("others", 0))) for n, reply in replies.items()}
    used = tuple(n for n, rows in some.items() if rows)
    return Fit(
        _MODELS[baseline],
        tuple(names),
        found.x[:p],
        {kind: v[:p, :p] for kind, v in covariance.items()},
        -found.at.value,
        found.iterations,
        sum(int(replies[n][ROWS]) for n in used),
        used,
        ridge,
        left_out=tuple(n for n in replies if n not in used),
    )


def _stratified_fit(
    ask: Ask,
    names: Sequence[str],
    ties: Ties,
    ridge: float,
    robust: bool,
    start: np.ndarray | None,
    part: str,
    facts: Mapping[int, Arrays],
) -> Fit:
    sums = _Stratified(ask, ties, part)
    found = newton(sums, np.full(len(names), ridge), start, names)
    by_row = pooled(sums.replies.values())["outer"] if robust else None
    each = np.stack([reply["gradient"] for reply in sums.replies.values()])
    fit = _fit(
        names, found, covariances(found, by_row, each.T @ each if robust else None), ridge, "stratified", sums.replies
    )
    lost = [n for n, reply in facts.items() if int(reply[ROWS]) and not int(reply["used"])]
    notes = not_identified(found, names)
    if lost:
        rows = sum(int(facts[n][ROWS]) for n in lost)
        notes += (f"{len(lost)} of {len(facts)} sites, with {rows:,} rows, have fewer events than their min_cell.",)
    return replace(fit, notes=notes, constant=constant_columns(facts, names))


def cox_path(
    ask: Ask,
    names: Sequence[str],
    *,
    ties: Ties = "efron",
    baseline: Literal["common", "stratified"] = "common",
    ridges: Sequence[float] = (),
) -> Path:
    """Return penalties per event with the loss (minus the log partial likelihood, per event) of the sites' validation rows."""
    events = int(pooled(ask(FACTS, part=TRAINING).values())["events"])
    grid = agree(ask) if baseline == "common" else None
    validation = agree(ask, part=VALIDATION) if baseline == "common" else None

    def judge(found: Fit) -> float:
        if validation is not None:
            sums = _Common(ask, validation, ties, len(names), part=VALIDATION)
            return sums.look(found.coef) / max(int(sums.events.sum()), 1)
        total = pooled(ask(OWN, part=VALIDATION, coef=found.coef, ties=ties).values())
        return float(total["loss"] / max(int(total["events"]), 1))

    fit = partial(cox, ask, names, ties=ties, baseline=baseline, grid=grid, robust=False)
    return choose_ridge(fit, judge, events, ridges)
