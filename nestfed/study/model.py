"""The released model: a network, its encoding, calibration and thresholds in one directory, without the estimators."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from nestfed import models
from nestfed.core import NestfedError, __version__, unknown
from nestfed.data.design import Design
from nestfed.data.encoding import TableEncoding
from nestfed.metrics import Estimate
from nestfed.queries.survival import Baseline
from nestfed.study import sealed
from nestfed.study.decide import Calibration, Threshold
from nestfed.study.reference import Reference
from nestfed.study.rows import Oddities, features

FORMAT = 3
MODEL, PARAMETERS, PROGRAM, GRAPH, CARD = "model.json", "model.safetensors", "model.pt2", "model.onnx", "MODEL_CARD.md"
WHAT = "NestFed model"
ENCODINGS: Mapping[str, type[TableEncoding]] = {"table": TableEncoding, "design": Design}


@dataclass(frozen=True)
class Architecture:
    """How to build a network: its name in `nestfed list`, its options, the shape of one row and the number of scores."""

    name: str
    shape: tuple[int, ...]
    outputs: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)

    def build(self) -> nn.Module:
        """Build the network, in float64."""
        return models.build(self.name, self.shape, self.outputs, **self.options).double()

    @property
    def linear(self) -> bool:
        """Whether a score is a weighted sum of the inputs."""
        return self.name == "mlp" and not self.options.get("hidden", (64,))

    def __str__(self) -> str:
        hidden = self.options.get("hidden", (64,))
        if self.name != "mlp":
            return f"the network {self.name} with {dict(self.options)}"
        return "a linear score" if self.linear else f"a fully connected network with layers of {list(hidden)}"


@dataclass(frozen=True)
class Provenance:
    """Where a model comes from."""

    method: str = ""
    """How it was trained, for people."""
    objective: str = ""
    study: str = ""
    """The digest of the study file."""
    date: str = ""
    parent: str = ""
    """The digest of the model that it was adapted from."""
    settings: Mapping[str, str] = field(default_factory=dict)
    sites: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Training rows by site: of each class, or of all rows for a numeric target."""
    metrics: Mapping[str, Estimate] = field(default_factory=dict)
    """Metrics on test rows, with their intervals."""
    notes: tuple[str, ...] = ()
    nestfed: str = __version__
    torch: str = torch.__version__


@dataclass(frozen=True)
class SurvivalCurve:
    """The survival of a row whose score is 0, so that scores, which are log hazard ratios, become probabilities."""

    time: str
    """The column of times."""
    times: tuple[float, ...]
    """The times at which the model predicts, unless others are asked for."""
    starts: tuple[float, ...]
    """When the cumulative hazard grows."""
    cumulative: tuple[float, ...]
    """The cumulative hazard from then on."""

    def __call__(self, scores: np.ndarray, times: Sequence[float] = ()) -> np.ndarray:
        """Return the probabilities of no event until the given times, (n, times)."""
        return Baseline(np.array(self.starts), np.array(self.cumulative)).survival(
            scores, np.array(times or self.times)
        )

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> SurvivalCurve:
        """Return the curve that was saved."""
        return cls(str(found["time"]), *(tuple(map(float, found[k])) for k in ("times", "starts", "cumulative")))


@dataclass(frozen=True, eq=False)
class StudyModel:
    """A model to use: from the columns of a table to probabilities, to numbers, or to the survival at some times.

    It is independent of how it was trained, and holds no code.
    """

    architecture: Architecture
    parameters: Mapping[str, Tensor]
    encoding: TableEncoding
    target: str
    classes: tuple[str, ...] = ()
    """In order, the positive one last; empty for a numeric target and for survival."""
    calibration: Calibration = Calibration()
    """For two classes."""
    thresholds: tuple[Threshold, ...] = ()
    """For two classes; the first is the one that `nestfed predict` uses."""
    provenance: Provenance = Provenance()
    reference: Reference | None = None
    """Statistics of training rows and scores, to compare new rows with."""
    survival: SurvivalCurve | None = None
    """For the time to an event."""
    digest: str = ""
    """Of the directory that it was loaded from."""

    def __post_init__(self) -> None:
        inputs, outputs = self.architecture.shape, self.architecture.outputs
        if inputs != (len(self.encoding.inputs),):
            raise NestfedError(
                f"The network takes {inputs} inputs, but the encoding makes {len(self.encoding.inputs)}."
            )
        if outputs != (len(self.classes) if len(self.classes) > 2 else 1):
            raise NestfedError(f"The network has {outputs} scores, which does not fit {len(self.classes)} classes.")

    @cached_property
    def network(self) -> nn.Module:
        """The network with its parameters, in float64."""
        made = self.architecture.build().eval().requires_grad_(False)
        try:
            made.load_state_dict(dict(self.parameters))
        except RuntimeError as error:
            raise NestfedError(f"The parameters do not fit {self.architecture}: {error}") from error
        return made

    @property
    def binary(self) -> bool:
        """Whether there are two classes."""
        return len(self.classes) == 2

    def inputs(self, table: pd.DataFrame, where: str = "The table", oddities: Oddities | None = None) -> Tensor:
        """Return the columns of a table as model inputs."""
        return self.encoding(features(table, self.encoding, where, oddities), self.encoding.schema, where).double()

    def scores(self, inputs: Tensor) -> np.ndarray:
        """Return the scores of model inputs, (n,) or (n, classes)."""
        return models.score(self.network, inputs).numpy()

    def predictions(self, scores: np.ndarray, site: str = "") -> np.ndarray:
        """Return the probability of every class, (n, classes), or (n,) numbers; for survival, (n, times) probabilities."""
        if self.survival is not None:
            return self.survival(scores)
        if not self.classes:
            return scores
        if self.binary:
            p = self.calibration(scores, site)
            return np.stack([1 - p, p], 1)
        return np.exp(scores - np.logaddexp.reduce(scores, axis=1)[:, None])

    def predict(self, table: pd.DataFrame, site: str = "") -> np.ndarray:
        """Return the predictions for the rows of a table, with a site's own calibration if it has one."""
        self.require_site(site)
        return self.predictions(self.scores(self.inputs(table)), site)

    def require_site(self, site: str) -> None:
        """Reject a name that is not a site of this model."""
        known = {*self.provenance.sites, *self.calibration.sites}
        if site and site not in known:
            raise unknown("site", site, sorted(known), owner="the model")

    def threshold(self, rule: str = "") -> float:
        """Return the probability from which a row is positive: of a rule, of a number, or of the model's first rule.

        A model without thresholds has 0.5.
        """
        if not rule:
            return self.thresholds[0].probability if self.thresholds else 0.5
        by_rule = {one.rule: one.probability for one in self.thresholds}
        if rule in by_rule:
            return by_rule[rule]
        try:
            probability = float(rule)
        except ValueError:
            raise unknown("threshold", rule, by_rule, owner="the model") from None
        if not 0 <= probability <= 1:
            raise NestfedError(f"The threshold must be a probability from 0 to 1 or a rule of the model, not {rule}.")
        return probability

    # -----------------------------------------------------------------------------------------------------
    # Files

    def to_json(self) -> dict[str, Any]:
        """Return everything but the parameters as JSON."""
        return {
            "format": FORMAT,
            "architecture": asdict(self.architecture),
            "encoding": self.encoding.to_json(),
            "target": self.target,
            "classes": list(self.classes),
            "calibration": self.calibration.to_json(),
            "thresholds": [_strict(asdict(one)) for one in self.thresholds],
            "provenance": _strict(asdict(self.provenance)),
            "reference": self.reference and self.reference.to_json(),
            "survival": self.survival and asdict(self.survival),
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> StudyModel:
        """Return the model of `to_json` with its parameters."""
        shape = {**found["architecture"], "shape": tuple(found["architecture"]["shape"])}
        encoding = ENCODINGS[found["encoding"]["kind"]].from_json(found["encoding"])
        provenance = {
            **found["provenance"],
            "sites": {name: tuple(counts) for name, counts in found["provenance"]["sites"].items()},
            "metrics": {name: _estimate(value) for name, value in found["provenance"]["metrics"].items()},
            "notes": tuple(found["provenance"]["notes"]),
        }
        return cls(
            Architecture(**shape),
            parameters,
            encoding,
            found["target"],
            tuple(found["classes"]),
            Calibration.from_json(found["calibration"]),
            tuple(_threshold(one) for one in found["thresholds"]),
            Provenance(**provenance),
            found["reference"] and Reference.from_json(found["reference"]),
            (curve := found.get("survival")) and SurvivalCurve.from_json(curve),
        )

    def files(self) -> dict[str, bytes]:
        """Return the files that make up the model: its description and its parameters."""
        tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in self.parameters.items()}
        text = json.dumps(self.to_json(), indent=1, ensure_ascii=False, allow_nan=False)
        return {MODEL: (text + "\n").encode(), PARAMETERS: save(tensors)}

    def save(
        self,
        directory: str | Path,
        *,
        force: bool = False,
        more: Mapping[str, bytes] | None = None,
        tables: Sequence[Any] = (),
    ) -> StudyModel:
        """Write the model directory, whole or not at all; return the model with its digest.

        It holds the model, its card, and programs for other software (`nestfed.study.programs`).

        - `force`: replace a model that is there.
        - `more`: further files by name.
        - `tables`: tables of results for the model card.
        """
        from nestfed.study.card import card
        from nestfed.study.programs import programs

        place = Path(directory)
        sealed.reject_used(place, WHAT, (sealed.SUMS, "estimator.json"), force=force)
        made = {**self.files(), **programs(self), CARD: card(self, tables).encode(), **(more or {})}
        return replace(self, digest=sealed.write(place, made))

    @classmethod
    def load(cls, directory: str | Path) -> StudyModel:
        """Load a model from its directory, or from the output directory of `nestfed train`; check every file's digest."""
        place = find(Path(directory))
        if not sealed.exists(place):
            from nestfed.study.convert import load_older

            return load_older(place)
        found = sealed.read(place, WHAT)
        try:
            saved = json.loads(found.files[MODEL])
            if saved["format"] != FORMAT:
                raise NestfedError(
                    f"{place} was written by nestfed {saved['provenance']['nestfed']} in format {saved['format']}, but this is "
                    f"nestfed {__version__}, which reads format {FORMAT}: install that version, or train again."
                )
            made = cls.from_json(saved, load(found.files[PARAMETERS]))
        except (ValueError, LookupError, TypeError, AttributeError, SafetensorError) as error:
            raise NestfedError(f"The model in {place} cannot be read: {type(error).__name__}: {error}.") from error
        _ = made.network  # fail now if the parameters do not fit
        return replace(made, digest=found.digest)


def find(place: Path) -> Path:
    """Return the model directory: the place itself, or `model` inside the output directory of `nestfed train`."""
    found = next((p for p in (place, place / "model") if sealed.exists(p) or (p / "estimator.json").is_file()), None)
    if found is None:
        raise NestfedError(
            f"{place} contains no model: expected a model directory, or the output directory of `nestfed train`."
        )
    return found


def _strict(value: Any) -> Any:
    """Return a value whose numbers JSON can hold: null in place of NaN and infinity."""
    if isinstance(value, Mapping):
        return {name: _strict(one) for name, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _estimate(found: Mapping[str, float | None]) -> Estimate:
    value, low, high = (math.nan if found[k] is None else float(found[k] or 0) for k in ("value", "low", "high"))
    return Estimate(value, low, high)


def _threshold(found: Mapping[str, Any]) -> Threshold:
    rates = {k: _estimate(v) for k, v in found.items() if isinstance(v, Mapping)}
    return Threshold(found["rule"], float(found["probability"]), **rates)
