"""Logistic and linear regression over sites that keep their rows, equal to the fit of the pooled rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

import numpy as np
import pandas as pd
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d

from nestfed.data.design import Design
from nestfed.data.encoding import TableEncoding
from nestfed.queries.base import PARTS, TRAINING, VALIDATION, Ask, Rows, at_hand
from nestfed.queries.newton import INTERCEPT, Path, common_intercept, named_classes, regression, regression_path
from nestfed.queries.solve import Errors, Fit, disagreement
from nestfed.study.advice import warn
from nestfed.study.inputs import TableInputs
from nestfed.study.sites import DataError, Site, common_encoding, gather


def _design(sites: Sequence[Site]) -> Design:
    encoding = common_encoding(sites)
    if not isinstance(encoding, TableEncoding):
        raise DataError("Exact regression needs tables, not images or other arrays of more than two axes.")
    return Design.of(encoding)


# ------------------------------------------------------------------------------------------------- the base


class Exact(TableInputs, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """The base class of the exact estimators; not part of the public interface."""

    ridge: float | Literal["auto"]
    validation: float
    min_cell: int
    random_state: int | None
    scale_: Design

    def _gathered(self, X: Any, y: Any, groups: Any, persons: Any) -> list[Site]:
        """Return the sites in the user's data, with their persons, without the column that names the sites."""
        if y is None:
            if persons is not None:
                raise DataError("persons is the person of each row, so it needs one X and y: fit(X, y, persons=…).")
            self._remember(None)
            return gather(X, None, groups, getattr(self, "target", None))
        if self.site_column is not None and groups is None:
            X, groups = self._without_sites(X)
            if groups is None:
                raise DataError(f"site_column is {self.site_column!r}, but X has no such column.")
        values = self._target(y)
        # The number of each row takes the place of its target, so that persons and targets of two columns follow it.
        sites = gather(X, np.arange(len(values)), groups)
        self._remember(X)
        of = None if persons is None else np.asarray(persons)
        if of is not None and of.shape != (len(values),):
            raise DataError(f"persons has shape {of.shape}, expected one value for each of {len(values)} rows.")
        return [replace(site, y=values[site.y], group=None if of is None else of[site.y]) for site in sites]

    def _target(self, y: Any) -> np.ndarray:
        """Return the target of one table as an array."""
        return np.asarray(column_or_1d(np.asarray(y), warn=True))

    def _learn(self, sites: Sequence[Site], targets: Sequence[np.ndarray]) -> None:
        """Agree on the columns, fit, and report."""
        self.scale_ = _design(sites)
        self.n_features_in_ = len(self.scale_.schema)
        self.columns_ = np.array(self.scale_.columns, dtype=object)
        rows = [
            Rows(self.scale_(site.x, site.schema, site.where).numpy(), y, site.group) for site, y in zip(sites, targets)
        ]
        enough = [n for n, one in enumerate(rows) if len(one) >= self.min_cell]
        if not enough:
            raise DataError(f"No site has min_cell = {self.min_cell} rows.")
        self.sites_ = tuple(sites[n].name for n in enough)
        few = len(rows) - len(enough)
        self._notes = [f"{few} sites have fewer than {self.min_cell} rows."] if few else []
        ask = at_hand([{TRAINING: rows[n]} for n in enough], self.min_cell)
        ridge = self._penalty([rows[n] for n in enough])
        self._solve(ask, ridge)
        self.left_out_ = tuple(self.sites_[n] for n in self.fit_.left_out)
        self.notes_ = (*self._notes, *dict.fromkeys(self.fit_.notes), *self._flattened())
        for note in self.notes_:
            warn(note, "exact-regression")

    def _flattened(self) -> tuple[str, ...]:
        """Return a sentence on columns that a disclosure rule has made constant at many rows, or nothing."""
        shares = {name: rows / max(self.fit_.rows, 1) for name, rows in self.fit_.constant.items()}
        many = ", ".join(f"{name} ({share:.0%} of rows)" for name, share in shares.items() if share > 0.01)
        if self.min_cell < 2 or not many:
            return ()
        return (
            f"Under min_cell these columns are constant at some sites, where a rare value counts as the common one: {many}. "
            "Their coefficients may be too small, and others biased: join rare categories.",
        )

    def _penalty(self, rows: Sequence[Rows]) -> float:
        """Return the penalty, chosen on validation rows if it is "auto"."""
        if self.ridge != "auto":
            return float(self.ridge)
        if not 0 < self.validation < 1:
            raise DataError(f"validation must be between 0 and 1, not {self.validation}.")
        parts = [_divided(one, self.validation, self.random_state or 0, n) for n, one in enumerate(rows)]
        usable = [part for part in parts if min(map(len, part.values())) >= max(self.min_cell, 1)]
        if not usable:
            raise DataError("No site has enough validation rows to choose the penalty: set ridge to a number.")
        self.path_ = self._path(at_hand(usable, self.min_cell))
        return self.path_.best * self._amount(rows)

    def _amount(self, rows: Sequence[Rows]) -> int:
        """Return how many terms the objective has, by which the penalty per term is multiplied."""
        return sum(map(len, rows))

    def _path(self, ask: Ask) -> Path:
        raise NotImplementedError

    def _solve(self, ask: Ask, ridge: float) -> None:
        raise NotImplementedError

    def _scores(self, X: Any) -> np.ndarray:
        """Return the linear predictors, (n,) or (n, outputs)."""
        check_is_fitted(self)
        x = self._input(X).numpy()
        return np.asarray(x @ self._slopes.T + self._offset)

    def summary_(self, errors: Errors | None = None, level: float = 0.95) -> pd.DataFrame:
        """Return the table of coefficients in the columns' own units.

        - `errors`: "model" trusts the model; "robust" allows for a wrong model and for persons with several rows; "site"
          also for rows that resemble each other inside a site, and needs about 20 sites or more. The default is "robust",
          or "model" for Cox regression with site intercepts, which has no other.
        """
        check_is_fitted(self)
        errors = errors or ("robust" if "robust" in self.fit_.covariance else "model")
        return self.fit_.summary(errors, level, ratio=self._ratio)

    _ratio: ClassVar[bool] = True

    def __sklearn_is_fitted__(self) -> bool:
        """Return whether `fit` was called, for scikit-learn."""
        return hasattr(self, "fit_")

    def __sklearn_tags__(self) -> Any:
        """Return the capabilities of the estimator, for scikit-learn."""
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.target_tags.required = True
        return tags


def _divided(rows: Rows, share: float, seed: int, n: int) -> dict[str, Rows]:
    """Return training and validation rows of a site; a person's rows stay together."""
    group = np.arange(len(rows)) if rows.group is None else rows.group
    persons, place = np.unique(group, return_inverse=True)
    held = np.random.default_rng([seed, n]).permutation(len(persons)) < round(share * len(persons))
    mark = held[place]
    return {
        part: replace(rows, x=rows.x[at], y=rows.y[at], group=group[at])
        for part, at in ((PARTS[0], ~mark), (VALIDATION, mark))
    }


# ------------------------------------------------------------------------------------- logistic and linear


class _Regression(Exact):
    family: ClassVar[Literal["logistic", "linear"]]
    classes_: np.ndarray
    intercepts: str
    check_sites: bool

    def __init__(
        self,
        *,
        ridge: float | Literal["auto"] = 0.0,
        intercepts: Literal["common", "site"] = "common",
        check_sites: bool = True,
        validation: float = 0.2,
        min_cell: int = 0,
        site_column: str | int | None = None,
        target: str | None = None,
        random_state: int | None = 0,
    ) -> None:
        self.ridge = ridge
        self.intercepts = intercepts
        self.check_sites = check_sites
        self.validation = validation
        self.min_cell = min_cell
        self.site_column = site_column
        self.target = target
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None, *, groups: Any = None, persons: Any = None) -> Self:
        """Fit on sites: a list of (X, y) or datasets, a dict of them by name, or one (X, y).

        One (X, y) is one site, or one site for each value of `groups` (or of the column `site_column` of X).

        - `persons`: with one (X, y), the person of each row; robust errors then allow for several rows per person.
        """
        if self.intercepts not in ("common", "site"):
            raise DataError(f"intercepts must be 'common' or 'site', not {self.intercepts!r}.")
        sites = self._gathered(X, y, groups, persons)
        self._learn(sites, self._targets(sites))
        return self

    def _targets(self, sites: Sequence[Site]) -> list[np.ndarray]:
        raise NotImplementedError

    @property
    def _classes(self) -> int:
        return len(self.classes_) if self.family == "logistic" else 2

    def _path(self, ask: Ask) -> Path:
        return regression_path(ask, self.family, self.scale_.columns, classes=self._classes)

    def _solve(self, ask: Ask, ridge: float) -> None:
        names, classes, own = self.scale_.columns, self._classes, self.intercepts == "site"
        fit = regression(ask, self.family, names, classes=classes, ridge=ridge, own_intercepts=own)
        outputs = classes - 1 if self.family == "logistic" else 1
        coef = fit.coef.reshape(outputs, -1)
        if own:
            self._slopes, self._offset = coef, common_intercept(ask, self.family, coef[0])
        else:
            self._slopes, self._offset = coef[:, 1:], coef[:, 0]
        if self.check_sites and len(self.sites_) > 1 and classes == 2:
            self.other_ = regression(ask, self.family, names, ridge=ridge, own_intercepts=not own)
            pair = (self.other_, fit) if own else (fit, self.other_)
            fit = replace(fit, notes=fit.notes + disagreement(*pair))
            self.other_ = self._in_units(self.other_, 1)
        self.fit_ = self._in_units(fit, outputs)
        self.n_iter_ = fit.iterations

    def _in_units(self, fit: Fit, outputs: int) -> Fit:
        """Return a fit with the coefficients of the columns in their own units."""
        matrix = np.kron(np.eye(outputs), self.scale_.units(intercept=any(INTERCEPT in name for name in fit.names)))
        return fit.transformed(matrix, fit.names)

    @property
    def coef_(self) -> np.ndarray:
        """The coefficients of `columns_` in their own units, (1, columns) or one row per class after the first."""
        check_is_fitted(self)
        return self._slopes @ self.scale_.units(intercept=False)

    @property
    def intercept_(self) -> np.ndarray:
        """The intercepts, in the columns' own units; with site intercepts, that of all sites together."""
        check_is_fitted(self)
        moved = self.scale_.units(intercept=True)[0, 1:]
        return np.asarray(self._offset + self._slopes @ moved)


class FederatedLogistic(ClassifierMixin, _Regression):  # type: ignore[misc]
    """Logistic regression over sites that keep their rows; equal to the fit of the pooled rows.

    Sites send sums of losses, gradients and Hessians at a few points. Numbers are standardised, missing ones become the mean
    and are marked, categories are compared with the most common one; coefficients are reported in the columns' own units.

    - `ridge`: the penalty ν in Σ loss + ½ν Σ coef² (standardised columns), 1/C of scikit-learn; "auto" chooses it on
      validation rows.
    - `intercepts`: "common", or "site" for one per site, which stays there.
    - `check_sites`: fit the other version as well (`other_`), and warn if a coefficient differs by more than its standard error.
    - `validation`: the share of every site's persons that chooses the penalty; the final fit uses all rows.
    - `min_cell`: the disclosure rule of every site. Sites where a class has fewer rows contribute nothing; 0 = no rule.
    - `site_column`, `target`: as in `FederatedAUC`.

    After `fit`: `summary_()`, `coef_`, `intercept_`, `columns_`, `classes_`, `fit_`, `other_`, `notes_`, `sites_`, `left_out_`.
    With several classes coefficients compare with the first class.
    """

    family = "logistic"

    def _targets(self, sites: Sequence[Site]) -> list[np.ndarray]:
        for site in sites:
            check_classification_targets(site.y)
        self.classes_ = np.unique(np.concatenate([np.unique(site.y) for site in sites]))
        if len(self.classes_) < 2:
            raise DataError(
                f"{type(self).__name__} needs two classes, but these examples are all of one class, {self.classes_[0]!r}."
            )
        return [np.searchsorted(self.classes_, site.y) for site in sites]

    def _in_units(self, fit: Fit, outputs: int) -> Fit:
        return named_classes(super()._in_units(fit, outputs), list(self.classes_))

    def decision_function(self, X: Any) -> np.ndarray:
        """Return log-odds, (n,), or log-odds against the first class, (n, classes)."""
        scores = self._scores(X)
        if len(self.classes_) == 2:
            return scores[:, 0]
        return np.concatenate([np.zeros((len(scores), 1)), scores], 1)

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probability of every class, (n, classes)."""
        scores = self._scores(X)
        every = np.concatenate([np.zeros((len(scores), 1)), scores], 1)
        return np.exp(every - np.logaddexp.reduce(every, axis=1)[:, None])

    def predict(self, X: Any) -> np.ndarray:
        """Return the most likely class."""
        chances = self.predict_proba(X)
        return self.classes_[chances.argmax(1)]


class FederatedLinear(RegressorMixin, _Regression):  # type: ignore[misc]
    """Linear regression over sites that keep their rows; equal to the fit of the pooled rows.

    `score` is R². The arguments are those of `FederatedLogistic`.
    """

    family = "linear"
    _ratio = False

    def _targets(self, sites: Sequence[Site]) -> list[np.ndarray]:
        made = []
        for site in sites:
            try:
                y = np.asarray(site.y, np.float64)
            except (TypeError, ValueError):
                raise DataError(f"{site.where} has a target that is not a number.") from None
            if not np.isfinite(y).all():
                raise DataError(
                    f"{site.where} has a target that is missing or infinite: Input y contains NaN or infinity."
                )
            made.append(y)
        return made

    def predict(self, X: Any) -> np.ndarray:
        """Return the predicted numbers."""
        return self._scores(X)[:, 0]
