"""From scores to probabilities, and from probabilities to decisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.special import expit

from nestfed.metrics import Estimate


@dataclass(frozen=True)
class Calibration:
    """Maps scores to probabilities: P(y = 1 | score) = 1/(1 + exp(−(a·score + b)))."""

    a: float = 1.0
    b: float = 0.0
    sites: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """A site's own a and b, by its name."""

    def at(self, site: str = "") -> tuple[float, float]:
        """Return a and b of a site; those of all sites if it has no own."""
        return self.sites.get(site, (self.a, self.b))

    def __call__(self, scores: np.ndarray, site: str = "") -> np.ndarray:
        """Return the probabilities of the positive class, with a site's own map if it has one."""
        a, b = self.at(site)
        return np.asarray(expit(a * np.asarray(scores, np.float64) + b))

    def to_json(self) -> dict[str, Any]:
        """Return the calibration as JSON."""
        return {"a": self.a, "b": self.b, "sites": {name: list(pair) for name, pair in self.sites.items()}}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Calibration:
        """Return the calibration that `to_json` wrote."""
        sites = {str(name): (float(a), float(b)) for name, (a, b) in found["sites"].items()}
        return cls(float(found["a"]), float(found["b"]), sites)


@dataclass(frozen=True)
class Threshold:
    """A rule of decision: positive if the probability is at least `probability`."""

    rule: str
    """"sensitivity 0.9", "specificity 0.95", "alerts 0.1" or "balanced"."""
    probability: float
    sensitivity: Estimate
    specificity: Estimate
    ppv: Estimate
    alerts: Estimate
    """The share of rows called positive."""
