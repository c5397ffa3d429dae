"""From scores to decisions: probabilities, and the threshold at which a row counts as positive."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from nestfed.metrics import Estimate


@dataclass(frozen=True)
class Calibration:
    """The map from scores to probabilities: P(y = 1 | score) = 1/(1 + exp(−(a·score + b))) (Platt 1999)."""

    a: float = 1.0
    b: float = 0.0
    sites: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """A site's own a and b, by the site's name."""

    def at(self, site: str = "") -> tuple[float, float]:
        """Return a and b for a site; the common ones if it has none of its own."""
        return self.sites.get(site, (self.a, self.b))

    def log_odds(self, scores: npt.ArrayLike, site: str = "") -> np.ndarray:
        """Return a·score + b."""
        a, b = self.at(site)
        return a * np.asarray(scores, np.float64) + b

    def __call__(self, scores: npt.ArrayLike, site: str = "") -> np.ndarray:
        """Return probabilities."""
        return np.asarray(0.5 * (1 + np.tanh(self.log_odds(scores, site) / 2)))  # the sigmoid without overflow

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {"a": self.a, "b": self.b, "sites": {name: list(pair) for name, pair in self.sites.items()}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Calibration:
        """Read what `to_json` returned."""
        sites = {str(name): (float(a), float(b)) for name, (a, b) in data.get("sites", {}).items()}
        return cls(float(data["a"]), float(data["b"]), sites)


@dataclass(frozen=True)
class Threshold:
    """A row is positive if its probability is at least `probability`; with 95 % intervals of what that means on test rows."""

    rule: str
    """How it was chosen: "sensitivity 0.9", "specificity 0.95", "alerts 0.1" or "balanced"."""
    probability: float
    sensitivity: Estimate
    specificity: Estimate
    ppv: Estimate
    alerts: Estimate
    """The share of rows that are called positive."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data; unknown values are None."""
        found = asdict(self)
        for name in ESTIMATES:
            found[name] = {k: v if math.isfinite(v) else None for k, v in found[name].items()}
        return found

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Threshold:
        """Read what `to_json` returned."""
        each = {
            name: Estimate(**{k: math.nan if v is None else float(v) for k, v in data[name].items()})
            for name in ESTIMATES
        }
        return cls(str(data["rule"]), float(data["probability"]), **each)


ESTIMATES = ("sensitivity", "specificity", "ppv", "alerts")
