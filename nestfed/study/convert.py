"""Turn fitted estimators, and models of earlier versions, into released models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from nestfed.core import NestfedError, __version__
from nestfed.data.encoding import TableEncoding
from nestfed.models import Mlp
from nestfed.problems.regress import InUnits
from nestfed.study.decide import Calibration
from nestfed.study.model import Architecture, Provenance, StudyModel

if TYPE_CHECKING:
    from nestfed.study.conduct import Conducted, Way
    from nestfed.study.labelled import _Labelled


def model_of(estimator: Any, target: str = "y", classes: Sequence[Any] | None = None) -> StudyModel:
    """Return a fitted estimator as a released model.

    Estimators of tables with a network of the library qualify: `FederatedAUC`, `FederatedAUPRC`, `FederatedClassifier`,
    `FederatedLogistic`, `FederatedLinear`.

    - `classes`: the names of the classes, if the estimator was fitted to their numbers.
    """
    if not isinstance(getattr(estimator, "scale_", None), TableEncoding):
        raise NestfedError(
            f"{type(estimator).__name__} cannot become a released model: expected an estimator that was fitted to tables."
        )
    if hasattr(estimator, "_scores") and hasattr(estimator, "module_"):
        return _trained(estimator, target, classes)
    if hasattr(estimator, "_slopes") and hasattr(estimator, "family"):
        return _exact(estimator, target, classes)
    raise NestfedError(
        f"{type(estimator).__name__} cannot become a released model: expected FederatedAUC, FederatedAUPRC, "
        "FederatedClassifier, FederatedLogistic or FederatedLinear."
    )


def _trained(est: _Labelled, target: str, classes: Sequence[Any] | None) -> StudyModel:
    if not isinstance(est.module_, Mlp):
        raise NestfedError(
            "A released model holds no code, so it needs a network of the library: leave `module` out, or use `save` of "
            "the estimator."
        )
    names = tuple(map(str, est.classes_ if classes is None else classes))
    hidden = [layer.out_features for layer in est.module_.hidden]
    outputs = 1 if len(names) == 2 else len(names)
    return StudyModel(
        Architecture("mlp", est.shape_, outputs, {"hidden": hidden}),
        {name: tensor.detach().cpu() for name, tensor in est.module_.state_dict().items()},
        est.scale_,  # type: ignore[arg-type]  # not of images, see `model_of`
        target,
        names,
        Calibration(float(est.calibration_[0]), float(est.calibration_[1])),
        provenance=Provenance(
            method=repr(est.method_) if hasattr(est, "method_") else est.choice_.name,
            objective=est.kind,
            settings=_settings(est),
            sites={name: tuple(map(int, c)) for name, c in zip(est.sites_.names, est.sites_.counts)},
        ),
    )


def _exact(est: Any, target: str, classes: Sequence[Any] | None) -> StudyModel:
    """Return an exact regression as a linear network; with several classes, the first has the score 0."""
    weight, bias = np.asarray(est._slopes, np.float64), np.asarray(est._offset, np.float64)
    names: tuple[str, ...] = ()
    if est.family == "logistic":
        names = tuple(map(str, est.classes_ if classes is None else classes))
    if len(names) > 2:
        weight = np.concatenate([np.zeros((1, weight.shape[1])), weight])
        bias = np.concatenate([np.zeros(1), bias])
    return StudyModel(
        Architecture("mlp", (weight.shape[1],), len(weight), {"hidden": []}),
        linear_parameters(weight, bias),
        est.scale_,
        target,
        names,
        provenance=Provenance(
            method=f"exact {est.family} regression",
            objective=est.family,
            settings=_settings(est),
            notes=tuple(est.notes_),
        ),
    )


def _settings(estimator: Any) -> dict[str, str]:
    return {name: str(value) for name, value in estimator.get_params().items() if value is not None}


def linear_parameters(weight: np.ndarray, bias: np.ndarray) -> dict[str, Tensor]:
    """Return the parameters of a linear network: weights (outputs, inputs) and one intercept per output."""
    shape = np.atleast_2d(np.asarray(weight, np.float64))
    return {
        "head.weight": torch.from_numpy(shape.copy()),
        "head.bias": torch.from_numpy(np.atleast_1d(bias).astype(float)),
    }


def model_of_way(done: Conducted, way: Way) -> StudyModel:
    """Return one of the trained models of a study; calibration, thresholds, metrics and reference are added with `replace`."""
    study, agreement = done.study, done.agreement
    module = done.network.at(way.x)
    if isinstance(module, InUnits):
        module = module.plain()
    linear = isinstance(module, Mlp) and not len(module.hidden)
    options = {"hidden": []} if linear else dict(study.model.options)
    settings = {**{k: f"{v:g}" for k, v in way.settings.items()}, "rounds": str(way.rounds)}
    return StudyModel(
        Architecture("mlp" if linear else study.model.name, agreement.shape, done.target.outputs, options),
        {name: tensor.detach().cpu() for name, tensor in module.state_dict().items()},
        agreement.encoding,
        study.data.target,
        agreement.classes,
        provenance=Provenance(
            method=way.name,
            study=study.digest(),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            settings=settings,
            notes=tuple(done.notes),
        ),
    )


def load_older(place: Path) -> StudyModel:
    """Load a model of `nestfed train` of an earlier 0.2; reject those of 0.1.0."""
    from nestfed import study

    try:
        saved = json.loads((place / "estimator.json").read_text(encoding="utf-8"))
        version, form, kind = saved["nestfed"], saved["format"], saved["class"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise NestfedError(f"The model in {place} cannot be read: {error}.") from error
    if form != 2:
        raise NestfedError(
            f"{place} was written by nestfed {version}, whose models nestfed {__version__} cannot read: train again, or "
            f"install nestfed=={version} to use it."
        )
    if not (place / "table.json").is_file():
        raise NestfedError(
            f"{place} holds a saved {kind}, not a released model: use {kind}.load, and `to_model` to release it."
        )
    try:
        table = json.loads((place / "table.json").read_text(encoding="utf-8"))
        return model_of(getattr(study, kind).load(place), table["target"], table["classes"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise NestfedError(f"{place / 'table.json'} cannot be read: {error}.") from error
