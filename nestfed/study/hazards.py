"""Conduct a survival study: exact Cox regression over sites and all that belongs to it, made of questions only.

The result is that of the pooled rows, whether the tables are at hand or at institutions. Nothing is trained in rounds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from nestfed.core import NestfedError
from nestfed.data.design import Design
from nestfed.experiment.spec import Experiment
from nestfed.metrics import Estimate
from nestfed.problems.cox import TIES, CoxOptions
from nestfed.queries import TEST, Ask, pooled
from nestfed.queries.cox import FACTS, MOMENTS, OUTER, OWN, RISK, cox, cox_path
from nestfed.queries.newton import Path
from nestfed.queries.solve import Fit, disagreement
from nestfed.queries.survival import (
    BRIER,
    LIFE,
    PAIRS,
    SCORED,
    Baseline,
    LifeTable,
    baselines,
    brier,
    concordance,
    concordance_within,
    life_tables,
)
from nestfed.queries.times import CELLS, HISTOGRAM, TIMES, Grid, agree
from nestfed.study.conduct import Sites, asking
from nestfed.study.reference import Reference

LOG = logging.getLogger(__name__)
QUERIES = (FACTS, RISK, MOMENTS, OUTER, OWN, TIMES, HISTOGRAM, CELLS, LIFE, PAIRS, SCORED, BRIER)
"""What a survival study asks besides what every run over tables asks."""
BESIDE = ("common", "stratified", "intercepts")
"""The baselines that are compared: one for all sites, one for each, and one times a factor for each."""
QUARTERS = (0.25, 0.5, 0.75)
Kind = Literal["common", "stratified", "intercepts"]


@dataclass(frozen=True)
class Judged:
    """How well a model predicts the test rows."""

    within: float
    """Harrell's C-index of pairs inside sites."""
    pooled: Estimate | None
    """The C-index of all pairs, with the bounds of joined scores; None where a site's min_cell forbids it."""
    brier: tuple[float, ...]
    """The Brier score at each time; empty without a common baseline."""
    plain: tuple[float, ...]
    """That of a model without columns."""


@dataclass(frozen=True)
class Survived:
    """The result of a survival study: all that the report and the released model need."""

    study: Experiment
    encoding: Design
    reference: Reference
    """Statistics of the training rows, to compare new rows with."""
    names: Sequence[str]
    """The sites."""
    scaled: Fit
    """The released model, for model inputs."""
    fit: Fit
    """The same, in the columns' own units."""
    beside: Mapping[str, Fit]
    """Further models by what they are, in the columns' own units: other baselines, and the other way with ties."""
    path: Path
    """The penalties that were tried."""
    rows: Mapping[str, tuple[int, int]]
    """The training and validation rows of each site: with an event, and others."""
    times: tuple[float, ...]
    """When survival is judged and predicted."""
    life: LifeTable | None
    """Of all sites; None where the sites' min_cell forbids common cells of time."""
    by_site: Mapping[str, LifeTable]
    baseline: Baseline | None
    """The common baseline hazard; None for a stratified model, which has none."""
    judged: Judged
    notes: tuple[str, ...]
    """What a reader must know, in sentences."""
    exact: bool = True
    """Whether the fit is that of the pooled rows; not so where a site's min_cell joins times or rare values."""
    seconds: float = 0.0


def survive(study: Experiment, sites: Sites, tell: Callable[[str], None] = LOG.info) -> Survived:
    """Fit Cox regression over all sites, compare it with other baselines, and judge it on test rows."""
    began = time.perf_counter()
    problem = options_of(study)
    encoding = sites.agreement.encoding
    assert isinstance(encoding, Design)
    trial, final, names = asking(sites, final=False), asking(sites), encoding.inputs
    facts = final(FACTS)
    events = int(pooled(facts.values())["events"])
    tell(f"Cox regression: exact, over {len(sites.names)} sites with {events:,} events")
    ties: Any = problem.ties
    released: Any = problem.baseline
    path = cox_path(trial, names, ties=ties, baseline=released)
    options = {"ties": ties, "ridge": path.best * events}
    grid, notes = _grid(final, released)
    scaled = cox(final, names, baseline=released, grid=grid, **options)
    tell("comparing baselines, and judging on test rows")
    units = encoding.units(intercept=False)

    def in_units(one: Fit) -> Fit:
        return one.transformed(units, encoding.columns)

    exact = grid is not None and grid.exact and not grid.protected
    others, hidden = _beside(final, names, scaled, grid, released, options)
    fit, beside = in_units(scaled), {what: in_units(one) for what, one in others.items()}
    doubts = [
        sentence
        for kind in BESIDE
        # Joined times change all models but the stratified one, whatever the sites are like.
        if kind in beside and (exact or "stratified" not in (kind, released))
        for sentence in disagreement(*((beside[kind], fit) if kind == "common" else (fit, beside[kind])))
    ]
    life = by_site = baseline = None
    times = problem.times
    if grid is not None:
        life, by_site = life_tables(final, grid)
        times = times or _quarters(life)
        if released == "common":
            baseline, _ = baselines(final, scaled.coef, grid)
    judged, unasked = _judge(final, scaled.coef, grid, baseline, times)
    return Survived(
        study,
        encoding,
        Reference(sites.agreement.totals.rows, sites.agreement.known),
        sites.names,
        scaled,
        fit,
        beside,
        path,
        {sites.names[n]: (int(r["events"]), int(r["used"]) - int(r["events"])) for n, r in facts.items()},
        times,
        life,
        {sites.names[n]: table for n, table in (by_site or {}).items()},
        baseline,
        judged,
        tuple(dict.fromkeys((*notes, *scaled.notes, *doubts, *hidden, *unasked, *_shrunk(path)))),
        exact,
        time.perf_counter() - began,
    )


def options_of(study: Experiment) -> CoxOptions:
    """Return the options of a survival study; reject another experiment."""
    if not isinstance(study.problem, CoxOptions) or study.data.target_kind != "survival":
        raise NestfedError(
            "A survival study needs problem.name = 'cox', data.target_kind = 'survival', data.time and data.target."
        )
    if not 0 < study.data.validation < 1:
        raise NestfedError(
            "A survival study chooses its penalty on validation rows: set data.validation, such as 0.25."
        )
    return study.problem


def _grid(ask: Ask, released: Kind) -> tuple[Grid | None, tuple[str, ...]]:
    """Return the common cells of time; None if sites forbid them and the model does without."""
    try:
        return agree(ask), ()
    except NestfedError:
        if released != "stratified":
            raise
        return None, ("The sites' min_cell forbids common cells of time: there are no survival curves.",)


def _beside(
    ask: Ask, names: Sequence[str], fit: Fit, grid: Grid | None, released: Kind, options: Mapping[str, Any]
) -> tuple[dict[str, Fit], tuple[str, ...]]:
    """Return the models with other baselines and other ties, and sentences on those that could not be fitted."""
    wanted: list[tuple[Kind, str]] = [(kind, options["ties"]) for kind in BESIDE if kind != released]  # type: ignore[misc]
    wanted += [(released, ties) for ties in TIES if ties != options["ties"]]
    found, notes = {}, []
    for kind, ties in wanted:
        if kind != "stratified" and grid is None:
            continue
        try:
            one = cox(ask, names, baseline=kind, grid=grid, start=fit.coef if kind == released else None,
                      **{**options, "ties": ties})  # fmt: skip
        except NestfedError as error:
            notes.append(f"The model with the baseline {kind!r} could not be fitted: {error}")
            continue
        found[kind if ties == options["ties"] else f"{kind}, {ties}"] = one
    return found, tuple(notes)


def _quarters(life: LifeTable) -> tuple[float, ...]:
    """Return the times at which quarters of the events have happened."""
    share = life.events.cumsum() / max(life.events.sum(), 1)
    found = [float(life.starts[int(np.searchsorted(share, q))]) for q in QUARTERS]
    return tuple(sorted({t for t in found if t > 0}))


def _judge(
    ask: Ask, coef: np.ndarray, grid: Grid | None, baseline: Baseline | None, times: Sequence[float]
) -> tuple[Judged, tuple[str, ...]]:
    """Return the C-index and Brier scores of the test rows, and sentences on what could not be asked."""
    found, notes = Judged(concordance_within(ask, coef, TEST), None, (), ()), []
    try:
        found = replace(found, pooled=concordance(ask, coef, agree(ask, part=TEST), part=TEST))
    except NestfedError as error:
        notes.append(f"There is no C-index of pairs across sites: {error}")
    if baseline is not None and grid is not None and len(times):
        censoring, _ = life_tables(ask, grid if grid.protected else agree(ask, every=True))
        none = np.zeros(len(coef))
        values = [
            brier(ask, c, b, censoring, times, TEST)
            for c, b in ((coef, baseline), (none, baselines(ask, none, grid)[0]))
        ]
        found = replace(found, brier=tuple(values[0].tolist()), plain=tuple(values[1].tolist()))
    return found, tuple(notes)


def _shrunk(path: Path) -> tuple[str, ...]:
    if not path.best:
        return ()
    return (
        f"A ridge penalty of {path.best:.3g} per event was best on validation rows. It shrinks coefficients: their intervals "
        "do not cover the true values.",
    )
