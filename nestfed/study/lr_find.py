"""The learning-rate range test: short trainings with several step sizes, evaluated on validation rows of each site."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from sklearn.base import clone
from torch import Tensor

from nestfed import models
from nestfed.core import DivergedError, NestfedError, unknown, whole
from nestfed.data.split import TEST, VALIDATION, aside
from nestfed.experiment import choice
from nestfed.metrics import find
from nestfed.study.advice import NestfedWarning
from nestfed.study.labelled import FederatedAUC, FederatedAUPRC, FederatedClassifier
from nestfed.study.sites import Encoded, Site, gather

if TYPE_CHECKING:
    from nestfed.study.labelled import _Labelled

KINDS: Mapping[str, type[FederatedAUC | FederatedAUPRC | FederatedClassifier]] = {
    "auroc": FederatedAUC,
    "auprc": FederatedAUPRC,
    "accuracy": FederatedClassifier,
}
SMALLEST = 8
"""A site with fewer rows uses all of them for training."""


def find_kind(objective: str) -> type[FederatedAUC | FederatedAUPRC | FederatedClassifier]:
    """Return the estimator for an objective."""
    if objective not in KINDS:
        raise unknown("objective", objective, KINDS)
    return KINDS[objective]


@dataclass(frozen=True)
class StepSearch:
    """The metric of each step size; NaN if training diverged."""

    metric: str
    lrs: tuple[float, ...]
    values: tuple[float, ...]
    resamples: tuple[Sequence[float], ...] = ()
    """For each step size: the metric on resampled validation rows, which gives the noise of the choice."""

    @property
    def best(self) -> float:
        """The smallest step size whose metric is within noise of the best one (`nestfed.experiment.choice`)."""
        if not np.isfinite(self.values).any():
            raise NestfedError("Training diverged with every step size: check the data, or try much smaller ones.")
        rows = self.resamples or ((),) * len(self.lrs)
        options = [choice.Option(value, (lr,), each) for lr, value, each in zip(self.lrs, self.values, rows)]
        return self.lrs[choice.choose(find(self.metric), options)]

    @property
    def end(self) -> choice.End | None:
        """Whether the best step size is the smallest or the largest of those tried."""
        return choice.end(self.best, self.lrs)

    def draw(self, path: str | Path) -> Path:
        """Plot the metric against the step size."""
        from nestfed.report.drawing import pyplot, save

        figure, panel = pyplot().subplots(figsize=(6, 3.6), layout="constrained")
        panel.semilogx(self.lrs, self.values, "o-", color="#0b6e99")
        panel.axvline(
            self.best,
            color="#d9480f",
            linestyle=":",
            label=f"best: {self.best:.3g}{f' ({self.end})' if self.end else ''}",
        )
        panel.set_xlabel("lr")
        panel.set_ylabel(f"{self.metric} on validation rows")
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(frameon=False)
        return save(figure, Path(path))


def lr_find(
    estimator: _Labelled, X: Any, y: Any = None, *, groups: Any = None, lrs: Sequence[float] = (), share: float = 0.25
) -> StepSearch:
    """Try step sizes around the default, or `lrs`; each site holds out a share of its rows for validation.

    Half of the estimator's rounds are enough to rank step sizes. The estimator itself does not change.
    """
    whole("rounds", estimator.rounds)
    known = isinstance(X, list) and all(isinstance(entry, Site) for entry in X)
    sites = X if known else gather(X, y, groups, estimator.target)
    train, validation = apart(sites, share, seed=estimator._seed())
    data = estimator._encode(with_rows(train))
    rounds = max(1, estimator.rounds // 2)
    short = clone(estimator).set_params(rounds=rounds, warm_up=min(estimator.warm_up // 2, rounds - 1))
    multiples = [10**k for k in np.arange(-2, 2.1, 0.5)]
    return sweep(short, data, data.held_out(with_rows(validation)), estimator.metric, lrs, multiples)


def sweep(
    estimator: _Labelled,
    data: Encoded,
    validation: tuple[Tensor, np.ndarray],
    metric: str,
    lrs: Sequence[float],
    multiples: Sequence[float] = (),
) -> StepSearch:
    """Train once with each step size, or with multiples of the default one; return the metric of each.

    The metric is NaN for a trial that diverges.
    """
    x, y = validation

    def trial(lr: float | None) -> tuple[float, tuple[float, Sequence[float]]]:
        """Train with a step size (None = the default); return it, the metric, and the metric on resampled rows."""
        one = clone(estimator).set_params(lr=lr)
        try:
            one._fit(data)
        except DivergedError:
            return float(one.lr_), (float("nan"), ())
        scores = models.score(one._scores, x)
        return float(one.lr_), (one._judged(scores, y)[metric], choice.resampled(find(metric), scores.double(), y))

    found: dict[float, tuple[float, Sequence[float]]] = {}
    with warnings.catch_warnings():  # some trials are expected to diverge
        warnings.simplefilter("ignore", NestfedWarning)
        if not lrs:
            default, value = trial(None)
            found[default] = value
            lrs = [default * m for m in multiples if m != 1]
        found |= dict(trial(float(lr)) for lr in lrs)
    order = sorted(found)
    return StepSearch(metric, tuple(order), tuple(found[lr][0] for lr in order), tuple(found[lr][1] for lr in order))


def with_rows(sites: Sequence[Site]) -> list[Site]:
    """Return the sites that have rows."""
    return [site for site in sites if len(site)]


def apart(
    sites: Sequence[Site], share: float, seed: int, purpose: str = VALIDATION, *, leave_out: str = ""
) -> tuple[list[Site], list[Site]]:
    """Hold out a share of each site's rows: whole groups if sites have groups, otherwise by class.

    Test rows may also be those of a temporal split (`Site.late`), or all rows of the site `leave_out`. A group is on one side
    at all sites.
    """
    if leave_out and leave_out not in [site.name for site in sites]:
        raise unknown("site", leave_out, [site.name for site in sites])
    rest, held = [], []
    for site in sites:
        kept, out = np.arange(len(site)), np.arange(0)
        chosen = site.late if purpose == TEST else None
        if leave_out and purpose == TEST:
            chosen = np.full(len(site), site.name == leave_out)
        if chosen is not None or site.group is not None:
            kept, out = aside(len(site), share, seed, purpose, group=site.group, chosen=chosen)
        elif len(site) >= SMALLEST:
            strata = site.y if site.y.dtype.kind != "f" else None
            kept, out = aside(len(site), share, seed, purpose, strata=strata)
        rest.append(site.take(kept))
        held.append(site.take(out))
    if not any(map(len, held)) or not any(map(len, rest)):
        side = purpose if not any(map(len, held)) else "training"
        raise NestfedError(
            f"No {side} rows are left at any site: each site needs {SMALLEST} rows, or more groups, or another seed."
        )
    return rest, held
