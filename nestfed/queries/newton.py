"""Exact federated logistic and linear regression: Newton's method on sums of losses, gradients and Hessians.

The result is that of the pooled rows. A site sends a number, a vector and a matrix per Newton step, and no rows.

Loss of a row: ½(y − η)² (linear), or −log of the probability of its class, classes 1, 2, … against class 0 (logistic),
with η = intercept + x·coef. A ridge penalty (ν/2) Σ coef² never concerns intercepts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from nestfed.core import NestfedError
from nestfed.queries.base import ROWS, TRAINING, VALIDATION, Arrays, Ask, Field, Query, Rows, pooled
from nestfed.queries.guard import arrays, complete, guarded, persons, steady
from nestfed.queries.slots import AtMost
from nestfed.queries.solve import Fit, Minimum, Sums, constant_columns, covariances, newton, not_identified

Family = Literal["logistic", "linear"]
INTERCEPT = "(intercept)"
RIDGES = tuple(10.0**k for k in np.arange(-6, 1.01, 0.5))
"""The penalties per row that `choose_ridge` tries, beside 0."""

COARSE = RIDGES[::2]
"""The penalties per row of a study, which asks institutions for the sums of every Newton step; then two around the best."""
NOISE = 0.01
"""A study takes the largest penalty whose validation loss is within 1 % of the smallest: few rows tell no more."""

# --------------------------------------------------------------------------------------------- at a site


def _extended(rows: Rows) -> np.ndarray:
    """Return the inputs with a column of ones in front."""
    x = complete(rows)
    return np.concatenate([np.ones((len(x), 1)), x], 1)


def _residuals(family: Family, x: np.ndarray, y: np.ndarray, coef: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return per row the loss, its derivative by every linear predictor, (n, k), and the second ones, (n, k, k)."""
    eta = x @ coef.T
    if family == "linear":
        gap = eta[:, 0] - np.asarray(y, np.float64)
        return gap**2 / 2, gap[:, None], np.ones((len(x), 1, 1))
    every = np.concatenate([np.zeros((len(x), 1)), eta], 1)
    total = np.logaddexp.reduce(every, axis=1)
    place = np.asarray(y, np.int64)
    p = np.exp(eta - total[:, None])
    mine = np.eye(every.shape[1])[place][:, 1:]
    curved = p[:, :, None] * (np.eye(p.shape[1]) - p[:, None, :])
    return total - every[np.arange(len(x)), place], p - mine, curved


def _gradients(x: np.ndarray, slope: np.ndarray) -> np.ndarray:
    """Return the gradient of every row, (n, k · inputs)."""
    return (slope[:, :, None] * x[:, None, :]).reshape(len(x), slope.shape[1] * x.shape[1])


def _sums(rows: Rows, family: Family, coef: Any) -> Arrays:
    x, coef = _extended(rows), np.asarray(coef, np.float64)
    loss, slope, curved = _residuals(family, x, rows.y, coef)
    k, p = coef.shape
    hessian = np.zeros((k, p, k, p))
    for a in range(k):
        for b in range(k):
            hessian[a, :, b] = x.T @ (curved[:, a, b, None] * x)
    return {
        "used": len(x),
        "loss": loss.sum(),
        "gradient": (slope.T @ x).ravel(),
        "hessian": hessian.reshape(k * p, k * p),
    }


def _outer(rows: Rows, family: Family, coef: Any) -> Arrays:
    x, coef = _extended(rows), np.asarray(coef, np.float64)
    _, slope, _ = _residuals(family, x, rows.y, coef)
    each = persons(_gradients(x, slope), rows.group)
    return {"used": len(x), "outer": each.T @ each}


def _within(rows: Rows, family: Family, coef: Any) -> Arrays:
    """Return the sums at the site's own best intercept, by which the Hessian is reduced.

    A site with one class has no finite intercept; its rows say nothing about the coefficients.
    """
    x, coef = complete(rows), np.asarray(coef, np.float64)
    offset, y = x @ coef, np.asarray(rows.y, np.float64)
    p = len(coef)
    if not len(y) or (family == "logistic" and y.min() == y.max()):
        return arrays(used=0, loss=0.0, gradient=np.zeros(p), hessian=np.zeros((p, p)), outer=np.zeros((p, p)))
    intercept = _own_intercept(family, offset, y)
    one = np.array([[1.0]])
    loss, slope, curved = _residuals(family, (offset + intercept)[:, None], y, one)
    weight = curved[:, 0, 0]
    centred = x - (weight @ x) / weight.sum()  # the Hessian reduced by the intercept is that of centred inputs
    each = persons(slope * centred, rows.group)
    return {
        "used": len(y),
        "loss": loss.sum(),
        "gradient": x.T @ slope[:, 0],
        "hessian": centred.T @ (weight[:, None] * centred),
        "outer": each.T @ each,
    }


def _own_intercept(family: Family, offset: np.ndarray, y: np.ndarray) -> float:
    """Return the intercept that minimises a site's loss at the given predictor without intercept."""
    if family == "linear":
        return float((y - offset).mean())
    share = np.log(y.mean() / (1 - y.mean()))
    low, high = share - offset.max(), share - offset.min()  # the predicted share is too small, and too large
    at = (low + high) / 2
    for _ in range(200):
        p = 1 / (1 + np.exp(-np.clip(offset + at, -700, 700)))
        gap = p.sum() - y.sum()
        low, high = (at, high) if gap < 0 else (low, at)
        slope = (p * (1 - p)).sum()
        new = at - gap / slope if slope > 0 else at
        new = new if low < new < high else (low + high) / 2
        if abs(new - at) <= 1e-15 * (1 + abs(at)):
            return float(new)
        at = new
    return float(at)


def _facts(rows: Rows, classes: int) -> Arrays:
    x = complete(rows)
    counts = np.bincount(np.asarray(rows.y, np.int64), minlength=classes) if classes else np.zeros(0)
    return arrays(used=len(x), classes=counts, varies=np.ptp(x, axis=0) > 0 if len(x) else np.zeros(x.shape[1]))


# ------------------------------------------------------------------------------------- the declarations


def _by_class(rows: Rows, min_cell: int, family: Family = "logistic", **_: Any) -> Rows:
    """Return the rows to use: sums by class and by pairs of columns describe at least `min_cell` rows."""
    atoms = np.asarray(rows.y, np.int64) if family == "logistic" else np.zeros(len(rows), np.int64)
    return guarded(rows, min_cell, atoms)


def _facts_by_class(rows: Rows, min_cell: int, classes: int, **_: Any) -> Rows:
    return _by_class(rows, min_cell, "logistic" if classes else "linear")


def _sizes(coef: Any, **_: Any) -> Mapping[str, int]:
    return {"parameters": int(np.size(coef))}


_USED = Field("the number of rows in the sums; 0 if the site's disclosure rule leaves no sums", "count")
_LOSS = Field("the sum of the rows' losses at given coefficients", over="used")
_GRADIENT = Field("the sum of the gradients of these losses", shape=("parameters",), over="used")
_HESSIAN = Field("the sum of the second derivatives of these losses", shape=("parameters", "parameters"), over="used")
_OUTER = Field(
    "the sum over persons (or rows) of the products of their gradients' entries",
    shape=("parameters", "parameters"),
    over="used",
)

FACTS = Query(
    "regression-facts",
    "to find sites and columns that a regression cannot use",
    _facts,
    {
        "used": _USED,
        "classes": Field("the number of rows of every class", "count", ("classes",)),
        "varies": Field("for every model input, whether it has more than one value", "index", ("inputs",)),
    },
    sizes=lambda classes: {"classes": classes, "inputs": AtMost(1_000_000)},
    prepare=_facts_by_class,
)
SUMS = Query(
    "regression-sums",
    "to take a Newton step of a regression over all sites",
    _sums,
    {"used": _USED, "loss": _LOSS, "gradient": _GRADIENT, "hessian": _HESSIAN},
    sizes=_sizes,
    prepare=_by_class,
)
OUTER = Query(
    "regression-outer",
    "to compute robust standard errors of a regression",
    _outer,
    {"used": _USED, "outer": _OUTER},
    sizes=_sizes,
    prepare=_by_class,
)
WITHIN = Query(
    "regression-within",
    "to take a Newton step of a regression in which every site has its own intercept, which stays there",
    _within,
    {"used": _USED, "loss": _LOSS, "gradient": _GRADIENT, "hessian": _HESSIAN, "outer": _OUTER},
    sizes=_sizes,
    prepare=_by_class,
)

# ---------------------------------------------------------------------------------------- over all sites


@dataclass
class _Asked:
    """Asks for sums at a point, and remembers the last replies by site."""

    ask: Ask
    query: Query
    family: Family
    shape: tuple[int, ...]
    part: str = TRAINING

    def __post_init__(self) -> None:
        self.replies: Mapping[int, Arrays] = {}

    def __call__(self, x: np.ndarray) -> Sums:
        self.replies = self.ask(self.query, part=self.part, family=self.family, coef=x.reshape(self.shape))
        total = pooled(self.replies.values())
        return Sums(float(total["loss"]), total["gradient"], total["hessian"])


def regression(
    ask: Ask,
    family: Family,
    names: Sequence[str],
    *,
    classes: int = 2,
    ridge: float = 0.0,
    own_intercepts: bool = False,
    robust: bool = True,
    start: np.ndarray | None = None,
    part: str = TRAINING,
) -> Fit:
    """Return the regression over the rows of all sites, equal to that of the pooled rows.

    - `names`: the names of the model inputs.
    - `classes`: for "logistic", the number of classes; `Rows.y` holds their indices.
    - `ridge`: the penalty ν in ½ν Σ coef².
    - `own_intercepts`: every site has its own intercept, which it computes for itself and keeps (two classes, or linear).
    - `start`: coefficients to start from.
    """
    _check(family, classes, ridge, own_intercepts)
    ask = steady(ask)
    facts = ask(FACTS, part=part, classes=classes if family == "logistic" else 0)
    notes = _preflight(facts, family, names, classes)
    outputs = classes - 1 if family == "logistic" else 1
    plain = tuple(names) if own_intercepts else (INTERCEPT, *names)
    every = plain if outputs == 1 else tuple(f"{k}: {name}" for k in range(1, classes) for name in plain)
    penalty = np.array([0.0 if name.endswith(INTERCEPT) else ridge for name in every])
    shape = (len(names),) if own_intercepts else (outputs, len(names) + 1)
    sums = _Asked(ask, WITHIN if own_intercepts else SUMS, family, shape, part)
    found = newton(sums, penalty, start, every)
    used = tuple(n for n, reply in sums.replies.items() if int(reply["used"]))
    rows = sum(int(sums.replies[n]["used"]) for n in used)
    free = rows - int(found.identified.sum()) - (len(used) if own_intercepts else 0)
    scale = 2 * found.at.value / max(free, 1) if family == "linear" else 1.0
    by_row = _by_row(ask, sums, found, part) if robust else None
    by_site = _by_site(sums.replies) if robust else None
    return Fit(
        f"{family} regression with {'site intercepts' if own_intercepts else 'a common intercept'}",
        every,
        found.x,
        covariances(found, by_row, by_site, scale),
        _log_likelihood(family, found.at.value, rows),
        found.iterations,
        rows,
        used,
        ridge,
        float(max(free, 1)) if family == "linear" else np.inf,
        tuple(n for n in sums.replies if n not in used),
        constant_columns(facts, names),
        notes + not_identified(found, every),
    )


def _check(family: Family, classes: int, ridge: float, own_intercepts: bool) -> None:
    if family not in ("logistic", "linear"):
        raise NestfedError(f"family must be 'logistic' or 'linear', not {family!r}.")
    if not 0 <= ridge < np.inf:
        raise NestfedError(f"ridge must be a number from 0, not {ridge!r}.")
    if family == "logistic" and classes < 2:
        raise NestfedError(f"Logistic regression needs at least two classes, not {classes}.")
    if own_intercepts and family == "logistic" and classes > 2:
        raise NestfedError("Site intercepts need two classes: fit one class against the others.")


def _preflight(facts: Mapping[int, Arrays], family: Family, names: Sequence[str], classes: int) -> tuple[str, ...]:
    """Return sentences on what the sites' disclosure rules cost; raise an error if nothing is left."""
    total = pooled(facts.values())
    if len(total["varies"]) != len(names):
        raise NestfedError(f"The sites have {len(total['varies'])} model inputs, but {len(names)} names were given.")
    if not int(total["used"]):
        raise NestfedError(
            "No site may send sums under its min_cell: at every site a class has fewer rows than that, or there are no rows."
        )
    if family == "logistic" and (total["classes"] == 0).any():
        absent = ", ".join(map(str, np.flatnonzero(total["classes"] == 0)))
        raise NestfedError(
            f"No site has rows of class {absent} that it may describe: expected rows of all {classes} classes."
        )
    lost = [n for n, reply in facts.items() if int(reply[ROWS]) and not int(reply["used"])]
    if not lost:
        return ()
    rows = sum(int(facts[n][ROWS]) for n in lost)
    return (
        f"{len(lost)} of {len(facts)} sites, with {rows:,} of {int(total[ROWS]):,} rows, contribute nothing: one of their "
        "classes has fewer rows than their min_cell.",
    )


def _by_row(ask: Ask, sums: _Asked, found: Minimum, part: str) -> np.ndarray:
    """Return the sum of outer products of persons' gradients at the optimum."""
    if sums.query is WITHIN:
        return pooled(sums.replies.values())["outer"]
    replies = ask(OUTER, part=part, family=sums.family, coef=found.x.reshape(sums.shape))
    return pooled(replies.values())["outer"]


def _by_site(replies: Mapping[int, Arrays]) -> np.ndarray:
    """Return the sum of outer products of sites' gradients."""
    each = np.stack([reply["gradient"] for reply in replies.values()])
    return each.T @ each


def _log_likelihood(family: Family, loss: float, rows: int) -> float:
    if family == "logistic":
        return -loss
    return -rows / 2 * (np.log(2 * np.pi * 2 * loss / rows) + 1) if loss > 0 else np.inf


def common_intercept(ask: Ask, family: Family, coef: np.ndarray, part: str = TRAINING) -> np.ndarray:
    """Return the intercept that fits all sites best at given coefficients, (1,), for predictions without a site."""

    def sums(x: np.ndarray) -> Sums:
        replies = ask(SUMS, part=part, family=family, coef=np.concatenate([x, coef])[None])
        total = pooled(replies.values())
        return Sums(float(total["loss"]), total["gradient"][:1], total["hessian"][:1, :1])

    return newton(sums, np.zeros(1), names=(INTERCEPT,)).x


# ---------------------------------------------------------------------------------------- ridge by validation


@dataclass(frozen=True)
class Path:
    """The mean loss on validation rows under each penalty per row, and the best penalty."""

    ridges: tuple[float, ...]
    losses: tuple[float, ...]
    noise: float = 0.0
    """The share of the smallest loss by which another one may be larger without being worse."""

    @property
    def best(self) -> float:
        """The penalty per row with the smallest loss; of equals the larger."""
        most = min(self.losses) + self.noise * abs(min(self.losses))
        return max(r for r, loss in zip(self.ridges, self.losses) if loss <= most)

    def joined(self, other: Path) -> Path:
        """Return all penalties of two paths, the largest first."""
        both = dict(zip((*self.ridges, *other.ridges), (*self.losses, *other.losses)))
        ridges = tuple(sorted(both, reverse=True))
        return Path(ridges, tuple(both[r] for r in ridges), self.noise)


def choose_ridge(
    fit: Callable[..., Fit], judge: Callable[[Fit], float], rows: int, ridges: Sequence[float] = ()
) -> Path:
    """Return the validation loss along a path of penalties, each fit started from the one before.

    - `fit`: fits with the keywords `ridge` and `start`.
    - `judge`: returns the loss of a fit on validation rows.
    - `rows`: the training rows, by which penalties per row are multiplied.
    """
    tried, losses, start = [], [], None
    for ridge in sorted(ridges or (0.0, *RIDGES), reverse=True):
        try:
            found = fit(ridge=ridge * rows, start=start)
        except NestfedError:
            if ridge > 0:
                raise
            continue  # without a penalty the optimum may not exist
        start = found.coef
        tried.append(ridge)
        losses.append(judge(found))
    return Path(tuple(tried), tuple(losses))


def regression_path(ask: Ask, family: Family, names: Sequence[str], *, classes: int = 2, **options: Any) -> Path:
    """Return the penalties per row with their mean losses on the sites' validation rows."""
    outputs = classes - 1 if family == "logistic" else 1
    facts = ask(FACTS, part=TRAINING, classes=classes if family == "logistic" else 0)
    rows = int(pooled(facts.values())["used"])

    def judge(found: Fit) -> float:
        replies = ask(SUMS, part=VALIDATION, family=family, coef=found.coef.reshape(outputs, len(names) + 1))
        total = pooled(replies.values())
        if not int(total["used"]):
            raise NestfedError("No site has validation rows that it may describe: set the penalty yourself.")
        return float(total["loss"] / total["used"])

    fit = partial(regression, ask, family, names, classes=classes, robust=False)
    return choose_ridge(fit, judge, rows, **options)


def ridge_regression(trial: Ask, final: Ask, names: Sequence[str], classes: int) -> tuple[Fit, Fit, Path]:
    """Return the regression with the penalty that is best on validation rows, fitted in two divisions of the rows.

    - `classes`: the number of classes, for logistic regression; 0 = a target that is a number, for linear regression.
    - `trial`: asks with the validation rows held out; it chooses the penalty and gives the first fit.
    - `final`: asks with all rows in the training part; it gives the second fit, with the same penalty per row.
    """
    family: Family = "logistic" if classes else "linear"
    tried = partial(regression_path, trial, family, names, classes=classes)
    path = tried(ridges=COARSE)
    path = path.joined(tried(ridges=(path.best / 10**0.5, path.best * 10**0.5)))
    path = replace(path, noise=NOISE)

    def fit(ask: Ask) -> Fit:
        rows = int(pooled(ask(FACTS, classes=classes).values())["used"])
        return regression(ask, family, names, classes=classes, ridge=path.best * rows)

    return fit(trial), fit(final), path


def network_parameters(coef: np.ndarray, classes: int) -> np.ndarray:
    """Return the coefficients of a regression, intercepts first, as the parameters of a linear network; 0 classes: a number."""
    outputs = coef.reshape(max(classes - 1, 1), -1)
    if classes > 2:  # the regression compares every class with the first one
        outputs = np.concatenate([np.zeros((1, outputs.shape[1])), outputs])
    return np.concatenate([outputs[:, 1:].ravel(), outputs[:, 0]])


def named_classes(found: Fit, classes: Sequence[Any]) -> Fit:
    """Return a fit of several classes with the classes' names in place of their numbers."""
    if len(classes) == 2:
        return found
    parts = [name.split(": ", 1) for name in found.names]
    return replace(found, names=tuple(f"{classes[int(k)]}: {name}" for k, name in parts))
