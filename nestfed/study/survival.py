"""Cox regression over sites that keep their rows, equal to the fit of the pooled rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Self

import numpy as np
from sklearn.utils.validation import check_is_fitted

from nestfed.core import NestfedError
from nestfed.metrics import Estimate
from nestfed.queries.base import TRAINING, Ask, Rows, at_hand
from nestfed.queries.cox import Ties, cox, cox_path
from nestfed.queries.newton import Path
from nestfed.queries.solve import disagreement
from nestfed.queries.survival import (
    Baseline,
    LifeTable,
    baselines,
    brier,
    concordance,
    concordance_within,
    life_tables,
)
from nestfed.queries.times import Grid, agree
from nestfed.study.exact import Exact
from nestfed.study.sites import ALL, DataError, Site, gather


class FederatedCox(Exact):
    """Cox regression over sites that keep their rows; equal to the fit of the pooled rows.

    y has two columns, time and event (0/1 or booleans), also as a structured array or a data frame.

    - `ties`: "efron" or "breslow".
    - `baseline`: "common" for one baseline hazard; "stratified" for one per site, which leaves risk sets at the sites;
      "intercepts" for one baseline times a factor per site.
    - `ridge`: the penalty ν in −log PL + ½ν Σ coef² (standardised columns); "auto" chooses it on validation rows.
    - `check_sites`: fit the stratified model as well (or the common one), and warn if they differ.
    - `cells`: join times to this many cells; None = exact times, unless a disclosure rule forbids it.
    - `min_cell`: the disclosure rule of every site; 0 = no rule. The common baseline then uses coarser times and says so;
      the stratified model stays exact.
    - `time`, `event`: the names of the columns of a data frame that hold the target, in place of y.
    - `site_column`, `validation`, `random_state`: as in `FederatedLogistic`.

    After `fit`: `summary_()` with hazard ratios, `coef_`, `columns_`, `fit_`, `other_`, `notes_`, `sites_`, `left_out_`,
    `kaplan_meier_` (all sites together under "all", and by site), `baseline_` and `baselines_`.
    """

    def __init__(
        self,
        *,
        ties: Ties = "efron",
        baseline: Literal["common", "stratified", "intercepts"] = "common",
        ridge: float | Literal["auto"] = 0.0,
        check_sites: bool = True,
        cells: int | None = None,
        validation: float = 0.2,
        min_cell: int = 0,
        time: str | None = None,
        event: str | None = None,
        site_column: str | int | None = None,
        random_state: int | None = 0,
    ) -> None:
        self.ties = ties
        self.baseline = baseline
        self.ridge = ridge
        self.check_sites = check_sites
        self.cells = cells
        self.validation = validation
        self.min_cell = min_cell
        self.time = time
        self.event = event
        self.site_column = site_column
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None, *, groups: Any = None, persons: Any = None) -> Self:
        """Fit on sites: a list of (X, y), a dict of them by name, or one (X, y) with `groups` or `site_column`.

        With the names `time` and `event`, give data frames in place of pairs.

        - `persons`: with one (X, y), the person of each row; robust errors then allow for several rows per person.
        """
        sites = self._survival_sites(X, y, groups, persons)
        targets = [np.asarray(site.y) for site in sites]
        if not any(target[:, 1].any() for target in targets):
            raise DataError("No row has an event: there is nothing to learn from.")
        self._learn(sites, targets)
        return self

    def _survival_sites(self, X: Any, y: Any = None, groups: Any = None, persons: Any = None) -> list[Site]:
        """Return sites whose targets have two columns, time and event."""
        if y is None and hasattr(X, "columns"):
            X, y = self._apart(X)
        if y is not None:
            return self._gathered(X, y, groups, persons)
        if groups is not None or persons is not None:
            raise DataError("groups and persons are those of each row, so they need one X and y: fit(X, y, groups=…).")
        self._remember(None)
        found = []
        for name, entry in sites_of(X):
            table, target = self._apart(entry) if hasattr(entry, "columns") else entry
            values = survival_target(target)
            found += [replace(site, y=values) for site in gather({name: (table, np.arange(len(values)))})]
        return found

    def _apart(self, frame: Any) -> tuple[Any, Any]:
        """Return a data frame without the columns of the target, and these columns."""
        names = [self.time, self.event]
        if missing := [name for name in names if name not in frame.columns]:
            raise DataError(f"The data frame has no column {missing[0]!r}: pass y, or set time=… and event=….")
        return frame.drop(columns=names), frame[names]

    def _target(self, y: Any) -> np.ndarray:
        return survival_target(y)

    def _amount(self, rows: Sequence[Rows]) -> int:
        return int(sum(one.y[:, 1].sum() for one in rows))

    def _path(self, ask: Ask) -> Path:
        baseline: Literal["common", "stratified"] = "stratified" if self.baseline == "stratified" else "common"
        return cox_path(ask, self.scale_.columns, ties=self.ties, baseline=baseline)

    def _solve(self, ask: Ask, ridge: float) -> None:
        names, grid = self.scale_.columns, self._grid(ask)
        options: dict[str, Any] = {"ties": self.ties, "ridge": ridge, "grid": grid}
        fit = cox(ask, names, baseline=self.baseline, **options)
        other: Literal["common", "stratified"] = "stratified" if self.baseline == "common" else "common"
        if self.check_sites and len(self.sites_) > 1 and grid is not None:
            found = cox(ask, names, baseline=other, **options)
            pair = (fit, found) if self.baseline == "common" else (found, fit)
            fit = replace(fit, notes=fit.notes + disagreement(*pair))
            self.other_ = found.transformed(self.scale_.units(intercept=False), names)
        self._slopes, self._offset = fit.coef[None], np.zeros(1)
        self.fit_ = fit.transformed(self.scale_.units(intercept=False), names)
        self.n_iter_ = fit.iterations
        self._describe(ask, grid)

    def _grid(self, ask: Ask) -> Grid | None:
        """Return the common cells of time; None if sites forbid them and the model does without."""
        try:
            return agree(ask, cells=self.cells)
        except NestfedError:
            if self.baseline != "stratified":
                raise
            self._notes.append(
                "The sites' min_cell forbids common cells of time: there are no survival curves and no baseline hazards."
            )
            return None

    def _describe(self, ask: Ask, grid: Grid | None) -> None:
        """Store survival curves, the baseline hazards and the censoring distribution."""
        self.kaplan_meier_: dict[str, LifeTable] = {}
        self.baselines_: dict[str, Baseline] = {}
        self.baseline_: Baseline | None = None
        self.censoring_: LifeTable | None = None
        if grid is None:
            return
        total, by_site = life_tables(ask, grid)
        self.kaplan_meier_ = {ALL: total, **{self.sites_[n]: table for n, table in by_site.items()}}
        common, own = baselines(ask, self._slopes[0], grid)
        self.baseline_ = common if self.baseline == "common" else None
        self.baselines_ = {self.sites_[n]: one for n, one in own.items()}
        self.censoring_, _ = life_tables(ask, grid if grid.protected else agree(ask, every=True))

    @property
    def coef_(self) -> np.ndarray:
        """The log hazard ratios of `columns_`, in their own units."""
        check_is_fitted(self)
        return self.fit_.coef

    def predict(self, X: Any) -> np.ndarray:
        """Return the log of the hazard against a row with all inputs at 0: means, and reference categories."""
        return np.asarray(self._scores(X)[:, 0])

    def predict_survival(self, X: Any, times: Sequence[float], *, site: str | None = None) -> np.ndarray:
        """Return the probabilities of no event until the given times, (n, times).

        - `site`: use this site's own baseline hazard; needed unless the baseline is common.
        """
        predictor = self.predict(X)
        base = self.baseline_ if site is None else self.baselines_.get(site)
        if base is None:
            known = ", ".join(self.baselines_) or "none"
            raise NestfedError(f"There is no baseline hazard for site={site!r}; sites with one: {known}.")
        return base.survival(predictor, times)

    def score(self, X: Any, y: Any = None) -> float:
        """Return Harrell's C-index over all pairs of (X, y), or of sites."""
        rows = self._judged(X, y)
        one = Rows(np.concatenate([r.x for r in rows]), np.concatenate([r.y for r in rows]))
        return concordance_within(at_hand([{TRAINING: one}]), self._slopes[0])

    def evaluate(self, X: Any, y: Any = None, *, groups: Any = None, times: Sequence[float] = ()) -> dict[str, float]:
        """Return the C-index over all pairs with its largest error, over pairs inside sites, and Brier scores at `times`.

        Sites send counts by time and score and sums of weighted errors; censoring is that of the training rows.
        """
        ask, coef = at_hand([{TRAINING: r} for r in self._judged(X, y, groups)], self.min_cell), self._slopes[0]
        found = {"c_index_within": concordance_within(ask, coef)}
        if self.min_cell < 2:  # counts by score would describe single rows
            pooled: Estimate = concordance(ask, coef, agree(ask))
            found |= {"c_index": pooled.value, "c_index_error": pooled.error}
        if len(times):
            if self.baseline_ is None or self.censoring_ is None:
                raise NestfedError("Brier scores need a common baseline hazard: fit with baseline='common'.")
            scores = brier(ask, coef, self.baseline_, self.censoring_, times)
            found |= {f"brier@{t:g}": float(score) for t, score in zip(times, scores)}
        return found

    def _judged(self, X: Any, y: Any = None, groups: Any = None) -> list[Rows]:
        """Return rows to judge, by site, as model inputs."""
        check_is_fitted(self)
        known = vars(self).get("feature_names_in_")
        if y is not None and self.site_column is not None and groups is None:
            X, groups = self._without_sites(X)
        if y is not None:
            values = survival_target(y)
            sites = [replace(site, y=values[site.y]) for site in gather(X, np.arange(len(values)), groups)]
        else:
            sites = self._survival_sites(X, None, groups)
        if known is not None:
            self.feature_names_in_ = known  # those of the training table
        return [Rows(self._scaled(s.x, s.schema, s.where).numpy(), np.asarray(s.y)) for s in sites]


def sites_of(X: Any) -> list[tuple[str, Any]]:
    """Return sites by name, given a dict or a list of pairs (X, y) or of data frames."""
    if isinstance(X, Mapping):
        found = [(str(name), entry) for name, entry in X.items()]
    elif isinstance(X, list | tuple):
        found = [(str(n), entry) for n, entry in enumerate(X)]
    else:
        raise DataError("A survival estimator requires y to be passed, but the target y is None: use fit(X, y).")
    if bad := [name for name, entry in found if not hasattr(entry, "columns") and len(entry) != 2]:
        raise DataError(f"Site {bad[0]} is neither a pair (X, y) nor a data frame with the columns time and event.")
    return found


def survival_target(y: Any) -> np.ndarray:
    """Return time and event as two columns of numbers; a structured array has its event in a field of booleans."""
    if names := getattr(getattr(y, "dtype", None), "names", None):
        events = [name for name in names if y.dtype[name].kind == "b"]
        if len(names) != 2 or len(events) != 1:
            raise DataError("A structured survival target has two fields, the event (booleans) and the time.")
        (time,) = (name for name in names if name not in events)
        values = np.column_stack([y[time].astype(np.float64), y[events[0]]])
    else:
        try:
            values = np.asarray(y, np.float64)
        except (TypeError, ValueError):
            raise DataError("A survival target holds numbers: the time, and the event as 0/1 or booleans.") from None
    if values.ndim != 2 or values.shape[1] != 2:
        raise DataError(f"A survival target has two columns, time and event, but y has shape {values.shape}.")
    if not np.isfinite(values).all() or (values[:, 0] < 0).any() or not np.isin(values[:, 1], (0, 1)).all():
        raise DataError("Times must be known, finite and not negative; events must be 0 (censored) or 1.")
    return values
