"""Estimators for labelled examples at several sites: AUROC, average precision, classification."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from nestfed import models
from nestfed.algorithms import FedAvg
from nestfed.core import whole
from nestfed.data.partition import Summary
from nestfed.engine.options import Exchange
from nestfed.engine.warm_up import WarmUp
from nestfed.metrics import judge
from nestfed.problems.auprc import AUPRCOptions
from nestfed.problems.auroc import AUROCOptions
from nestfed.problems.classify import ClassifyOptions
from nestfed.problems.objective import Labelled
from nestfed.study import advice
from nestfed.study.base import Federated, Scores, precise
from nestfed.study.inputs import TableInputs
from nestfed.study.sites import (
    DataError,
    Encoded,
    Site,
    class_indices,
    encoding_from_json,
    gather,
)


class _Labelled(TableInputs, ClassifierMixin, Federated):  # type: ignore[misc]  # scikit-learn has no types
    """The base class of the three estimators below."""

    metric: ClassVar[str]
    binary: ClassVar[bool] = True

    def __init__(
        self,
        module: Any = None,
        *,
        method: Any = "auto",
        lr: Any = None,
        rounds: int = 50,
        warm_up: int = 0,
        q: int = 10,
        batch_size: int = 32,
        hidden: Sequence[int] | None = None,
        standardize: bool = True,
        exchange: Exchange | None = None,
        site_column: str | int | None = None,
        target: str | None = None,
        device: str = "cpu",
        random_state: int | None = 0,
        verbose: bool | None = False,
    ) -> None:
        self.module = module
        self.method = method
        self.lr = lr
        self.rounds = rounds
        self.warm_up = warm_up
        self.q = q
        self.batch_size = batch_size
        self.hidden = hidden
        self.standardize = standardize
        self.exchange = exchange
        self.site_column = site_column
        self.target = target
        self.device = device
        self.random_state = random_state
        self.verbose = verbose

    # -----------------------------------------------------------------------------------------------------
    # Fitting

    def fit(self, X: Any, y: Any = None, *, groups: Any = None, eval_set: Any = None) -> Self:
        """Train on sites: a list of (X, y) or datasets, a dict of them by name, or one (X, y).

        One (X, y) is one site, or one site for each value of `groups` (or of the column `site_column` of X). `eval_set`,
        one (X, y) or sites, is evaluated about twenty times during training (`history_`); it affects no choice.
        """
        if y is not None and self.site_column is not None and groups is None:
            X, groups = self._without_sites(X)
            if groups is None:
                raise DataError(f"site_column is {self.site_column!r}, but X has no such column.")
        sites = gather(X, y, groups, self.target)
        self._remember(X if y is not None else None)
        for site in sites:
            check_classification_targets(site.y)
        data = self._encode(sites)
        self.scale_ = data.encoding
        held_out = None
        if eval_set is not None:
            held_out = data.held_out(gather(eval_set, target=self.target, table=self._table))
        return self._fit(data, held_out)

    def _encode(self, sites: Sequence[Site]) -> Encoded:
        """Return the sites as inputs of this estimator's model."""
        own = not isinstance(self.module, torch.nn.Module)
        return Encoded.of(sites, scaled=self.standardize, mark_gaps=own)

    def _fit(self, data: Encoded, held_out: tuple[Tensor, np.ndarray] | None = None) -> Self:
        """Train on encoded sites; `held_out`, inputs and class indices, is evaluated during training."""
        self.classes_, self.scale_ = data.classes, data.encoding
        if len(self.classes_) < 2:
            raise DataError(
                f"{type(self).__name__} needs two classes, but these examples are all of one class, "
                f"{self.classes_[0].item() if hasattr(self.classes_[0], 'item') else self.classes_[0]!r}."
            )
        if self.binary and len(self.classes_) > 2:
            raise DataError(
                f"Only binary classification is supported by {type(self).__name__}. The type of the target is "
                f"multiclass, with {len(self.classes_)} classes: use FederatedClassifier."
            )
        if whole("warm_up", self.warm_up, 0) and self.warm_up >= self.rounds:
            raise DataError(f"warm_up={self.warm_up} leaves none of the {self.rounds} rounds for the method itself.")
        if self.batch_size < 4:
            raise DataError(f"batch_size must be at least 4, not {self.batch_size}.")
        seed = self._seed()
        self.sites_ = data.summary()
        if len(self.classes_) == 2 and len(data.names) > 1:
            advice.few_positives(data.names, self.sites_.counts[:, 1].tolist(), self.sites_.counts.sum(1).tolist())
        outputs = 1 if len(self.classes_) == 2 else len(self.classes_)
        self.shape_ = tuple(data.x.shape[1:])
        self.n_features_in_ = len(data.encoding.schema) or self.shape_[0]
        model = Scores(self._model(self.shape_, outputs, seed), outputs)
        self._try(model, data.x[:2], outputs)
        problem, clients = self._objective().build(model, (data.x, data.y), data.parts, names=list(data.names))
        judged = None if held_out is None else self._evaluation(*held_out)
        result = self._run(problem, clients, seed, judged, self.metric, self._warm_up(model, data, seed))
        self._scores = result.model.cpu()
        self.module_ = self._scores.module
        self.calibration_ = (1.0, 0.0)
        if self.kind != "classify":
            raw = models.score(precise(self._scores), data.x).double().numpy()
            self.calibration_ = calibrate([(raw[part], data.y[part].numpy()) for part in data.parts])
        return self

    def _objective(self) -> Labelled:
        """Return the options of the objective."""
        raise NotImplementedError

    def _warm_up(self, model: Scores, data: Encoded, seed: int) -> Callable[[float], WarmUp] | None:
        """Return the warm-up by FedAvg on cross-entropy, as a function of the divisor of its automatic step size."""
        if not self.warm_up:
            return None
        options = ClassifyOptions(batch=self.batch_size)
        problem, clients = options.build(model, (data.x, data.y), data.parts, names=list(data.names))
        step = advice.STEP[options.name] / max(advice.smoothness(problem, clients, seed), 1e-6)
        return lambda shrunk: WarmUp(self.warm_up, FedAvg(step / shrunk), problem, clients)

    def _try(self, model: Scores, some: Tensor, outputs: int) -> None:
        """Reject a module that does not fit the data, before any work."""
        try:
            with torch.no_grad():
                found = model.eval()(some)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise DataError(
                f"The module does not accept a batch of these data, of shape {tuple(some.shape)}: {error}"
            ) from error
        wanted = (len(some),) if outputs == 1 else (len(some), outputs)
        if tuple(found.shape) != wanted:
            raise DataError(
                f"The module returns shape {tuple(found.shape)} for {len(some)} examples, expected {wanted}: "
                f"{'one score per example' if outputs == 1 else 'one score per class'}."
            )

    def _evaluation(self, x: Tensor, y: np.ndarray) -> Callable[[Any], dict[str, float]]:
        return lambda model: self._judged(models.score(model, x, lambda part: part.to(self.device)), y)

    def _pooled(self, some: Any, y: Any = None) -> tuple[Tensor, np.ndarray]:
        """Return labelled examples of one or several sites as model inputs."""
        if y is not None and self.site_column is not None:
            some, _ = self._without_sites(some)
        sites = gather(some, y, None, self.target, self._table)
        x = torch.cat([self._scaled(site.x, site.schema, site.where) for site in sites])
        return x, class_indices(np.concatenate([site.y for site in sites]), self.classes_)

    def _judged(self, scores: Tensor, y: np.ndarray) -> dict[str, float]:
        return judge(scores.double().numpy(), y, log_odds=self.kind == "classify")

    # -----------------------------------------------------------------------------------------------------
    # Prediction

    def _logits(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        a, b = self.calibration_
        raw = models.score(precise(self._scores), self._input(X)).double().numpy()
        return a * raw + b if raw.ndim == 1 else raw

    def decision_function(self, X: Any) -> np.ndarray:
        """Return log-odds, (n,), or one score per class; higher means more likely."""
        return self._logits(X)

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probability of every class, (n, classes).

        A score trained for AUROC or average precision only ranks. Platt scaling turns it into a probability, fitted to
        the training scores from sums that the sites share.
        """
        logits = torch.from_numpy(self._logits(X))
        if logits.dim() == 1:
            p = torch.sigmoid(logits)
            return torch.stack([1 - p, p], 1).numpy()
        return torch.softmax(logits, 1).numpy()

    def predict(self, X: Any) -> np.ndarray:
        """Return the more likely class."""
        logits = self._logits(X)
        return self.classes_[(logits > 0).astype(int) if logits.ndim == 1 else logits.argmax(1)]

    def score(self, X: Any, y: Any = None) -> float:
        """Return the metric of this estimator (AUROC, average precision or accuracy) on (X, y), or on sites."""
        return self.evaluate(X, y)[self.metric]

    def evaluate(self, X: Any, y: Any = None) -> dict[str, float]:
        """Return all metrics on (X, y), or on sites together."""
        check_is_fitted(self)
        x, labels = self._pooled(X, y)
        return self._judged(models.score(precise(self._scores), x), labels)

    def __sklearn_tags__(self) -> Any:
        """Return the capabilities of the estimator, for scikit-learn."""
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = not self.binary
        tags.input_tags.allow_nan = bool(self.standardize)
        tags.target_tags.required = True
        return tags

    # -----------------------------------------------------------------------------------------------------
    # Files

    def _fitted(self) -> dict[str, Any]:
        return {
            "classes": self.classes_.tolist(),
            "dtype": self.classes_.dtype.str if self.classes_.dtype.kind != "O" else "object",
            "scale": self.scale_.to_json(),
            "shape": list(self.shape_),
            "calibration": list(self.calibration_),
            "features": self.n_features_in_,
            "names": self.feature_names_in_.tolist() if hasattr(self, "feature_names_in_") else None,
            "sites": {"names": list(self.sites_.names), "counts": self.sites_.counts.tolist()},
        }

    def _restore(self, fitted: Mapping[str, Any]) -> None:
        self.classes_ = np.array(fitted["classes"], dtype=object if fitted["dtype"] == "object" else fitted["dtype"])
        self.scale_ = encoding_from_json(fitted["scale"])
        self.shape_ = tuple(fitted["shape"])
        self.calibration_ = tuple(fitted["calibration"])
        self.n_features_in_ = fitted["features"]
        if fitted["names"] is not None:
            self.feature_names_in_ = np.array(fitted["names"], dtype=object)
        counts = np.array(fitted["sites"]["counts"])
        self.sites_ = Summary(counts, tuple(map(str, self.classes_)), tuple(fitted["sites"]["names"]))
        outputs = 1 if len(self.classes_) == 2 else len(self.classes_)
        self._scores = Scores(self._model(self.shape_, outputs, 0), outputs).eval()
        self.module_ = self._scores.module

    def report(self, path: str | Path) -> Path:
        """Write an HTML report of this training."""
        from nestfed.study.page import write_report

        check_is_fitted(self)
        return write_report(self, Path(path))


def calibrate(sites: Sequence[tuple[np.ndarray, np.ndarray]], steps: int = 50) -> tuple[float, float]:
    """Fit P(y=1) = 1/(1 + exp(−(a·s + b))) to scores by Newton steps (Platt 1999); a step needs five sums per site.

    Scores are first centred and scaled by their common mean and deviation. The targets are Platt's: slightly inside
    (0, 1), so that separable scores have a finite solution. a stays above 0, so that the order is kept.
    """
    n = sum(len(s) for s, _ in sites)
    mean = sum(s.sum() for s, _ in sites) / n
    deviation = float(np.sqrt(sum(((s - mean) ** 2).sum() for s, _ in sites) / n)) or 1.0
    positives = sum(int(y.sum()) for _, y in sites)
    high, low = (positives + 1) / (positives + 2), 1 / (n - positives + 2)
    slope, shift = 1.0, float(np.log((positives + 1) / (n - positives + 1)))
    for _ in range(steps):
        gradient, hessian = np.zeros(2), np.eye(2) * 1e-9
        for s, y in sites:
            z = (s - mean) / deviation
            p = 1 / (1 + np.exp(-np.clip(slope * z + shift, -50, 50)))
            off, weight = p - np.where(y == 1, high, low), p * (1 - p)
            gradient += [off @ z, off.sum()]
            hessian += [[weight @ z**2, weight @ z], [weight @ z, weight.sum()]]
        move = np.linalg.solve(hessian, gradient)
        move /= max(1.0, float(np.abs(move).max()) / 2)  # a long Newton step may overshoot
        slope, shift = slope - move[0], shift - move[1]
        if np.abs(move).max() < 1e-10:
            break
    slope = max(float(slope), 1e-3)
    return slope / deviation, float(shift) - slope * float(mean) / deviation


class FederatedAUC(_Labelled):
    """Train a score for the area under the ROC curve, over sites that keep their rows.

    It solves AUROC as a minimax problem (`nestfed.problems.auroc`) with balanced batches, whose weights keep the
    objective unchanged. `score` is the AUROC.

    - `module`: an `nn.Module` (one score per example, or two logits), a function that returns one for the input's shape,
      or None for a default network.
    - `hidden`: the layers of the default network. By default, tables get a linear score and images one layer of 64.
    - `method`: "auto" (`choice_` has the method and the reason), a name from `nestfed list`, a class such as `FMGDA`, or
      an object such as `FMGDA(c_hat=0.1, c=0.05)`. For some hyper-parameters only, `functools.partial(FMGDA, beta=0.1)`.
    - `lr`: None for a multiple of 1/L estimated from the data (stored in `lr_`), a number, a function of the iteration,
      or "theory" for the theorem's step sizes.
    - `rounds`: communication rounds.
    - `warm_up`: so many of these rounds come first and train cross-entropy by FedAvg, with an automatic step size.
    - `q`: local steps per round.
    - `batch_size`: examples per step.
    - `exchange`: who takes part in a round and what crosses the network, such as `Exchange(share=0.5)`; None = all.
    - `standardize`: impute and scale features with statistics of all sites, from counts and sums.
    - `site_column`: the column of X with the site, for scikit-learn tools that accept only one X.
    - `target`: the column to predict, if a site is a data frame or a dataset with named columns.
    - `verbose`: show a progress bar; None = only on a terminal.

    After `fit`: `classes_` (the second is positive), `module_`, `history_` (one record per round), `sites_` (examples by
    site and class), `choice_`, `lr_`, `hints_`.
    """

    kind = "auroc"
    metric = "auroc"

    def _objective(self) -> Labelled:
        return AUROCOptions(batch=self.batch_size)


class FederatedAUPRC(_Labelled):
    """Train a score for average precision (the area under the precision-recall curve), over sites that keep their rows.

    It solves AUPRC as a conditional problem (`nestfed.problems.auprc`): each outer positive is compared with an inner
    batch of positives and negatives in a known proportion. `score` is the average precision. The arguments are those of
    `FederatedAUC`.
    """

    kind = "auprc"
    metric = "ap"

    def _objective(self) -> Labelled:
        outer = max(1, self.batch_size // 4)
        return AUPRCOptions(outer=outer, inner=self.batch_size - outer)


class FederatedClassifier(_Labelled):
    """Train a classifier with cross-entropy over sites that keep their rows.

    `score` is the accuracy. If positives are rare, FederatedAUC or FederatedAUPRC usually rank better. It supports more
    than two classes. The arguments are those of `FederatedAUC`.
    """

    kind = "classify"
    metric = "accuracy"
    binary = False

    def _objective(self) -> Labelled:
        return ClassifyOptions(batch=self.batch_size)
