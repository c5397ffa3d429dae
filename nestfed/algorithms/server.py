"""Server updates: normalized, control-variate and dynamic steps, and adaptive steps on the pseudo-gradient."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from nestfed.core import Fields, Server


@dataclass(frozen=True)
class ControlVariates(Server):
    """SCAFFOLD's server: move the model by η_g along the mean, and each c by |S|/N of the mean change."""

    moved: tuple[str, ...]
    variates: tuple[str, ...]
    eta_g: float = 1.0

    def update(self, state: Fields, old: Fields, mean: Fields, fraction: float) -> tuple[Fields, Fields]:
        """x ← x + η_g·mean(y − x); c ← c + (|S|/N)·mean(c_n⁺ − c_n)."""
        rate = dict.fromkeys(self.moved, self.eta_g) | dict.fromkeys(self.variates, fraction)
        return state, {k: mean[k] if rate[k] == 1 else old[k] + rate[k] * (mean[k] - old[k]) for k in mean}


@dataclass(frozen=True)
class Normalized(Server):
    """FedNova's server: clients upload x minus a direction per unit of length, and the length of their path."""

    def update(self, state: Fields, old: Fields, mean: Fields, fraction: float) -> tuple[Fields, Fields]:
        """x ← x − mean(length)·mean(d)."""
        return state, {**mean, "x": old["x"] + mean["length"] * (mean["x"] - old["x"])}


@dataclass(frozen=True)
class Dynamic(Server):
    """FedDyn's server: correct the mean by the sum h of all clients' moves, absent clients included as 0."""

    alpha: float

    def init(self, shared: Fields) -> Fields:
        """h = 0."""
        return {"h": torch.zeros_like(shared["x"])}

    def update(self, state: Fields, old: Fields, mean: Fields, fraction: float) -> tuple[Fields, Fields]:
        """h ← h − α(|S|/N)·mean(y − x); x ← mean(y) − h/α."""
        h = state["h"] - self.alpha * fraction * (mean["x"] - old["x"])
        return {"h": h}, {"x": mean["x"] - h / self.alpha}


@dataclass(frozen=True)
class Adaptive(Server):
    """A server step on Δ = mean − old with moments M and V (Reddi et al. 2021); no bias correction.

    M ← β1·M + (1−β1)Δ, then V by the subclass's rule, then x ← x + η_g·M/(√V + τ). V starts at τ².
    """

    eta_g: float
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def init(self, shared: Fields) -> Fields:
        """M = 0, V = τ²."""
        x = shared["x"]
        return {"M": torch.zeros_like(x), "V": torch.full_like(x, self.tau**2)}

    @abstractmethod
    def second(self, V: Tensor, square: Tensor) -> Tensor:
        """Return the new V from the old one and Δ²."""

    def moments(self, state: Fields, delta: Tensor) -> tuple[Tensor, Tensor]:
        """Return the new M and V."""
        M = self.beta1 * state["M"] + (1 - self.beta1) * delta
        return M, self.second(state["V"], delta**2)

    def update(self, state: Fields, old: Fields, mean: Fields, fraction: float) -> tuple[Fields, Fields]:
        """Take one server step."""
        M, V = self.moments(state, mean["x"] - old["x"])
        return {"M": M, "V": V}, {"x": old["x"] + self.eta_g * M / (V.sqrt() + self.tau)}


class Adam(Adaptive):
    """V ← β2·V + (1−β2)Δ²."""

    def second(self, V: Tensor, square: Tensor) -> Tensor:
        """Return the moving average of Δ²."""
        return self.beta2 * V + (1 - self.beta2) * square


class Yogi(Adaptive):
    """V ← V − (1−β2)Δ²·sign(V − Δ²)."""

    def second(self, V: Tensor, square: Tensor) -> Tensor:
        """Return V moved towards Δ² by an amount that does not depend on V."""
        return V - (1 - self.beta2) * square * torch.sign(V - square)


class Adagrad(Adaptive):
    """V ← V + Δ²."""

    def second(self, V: Tensor, square: Tensor) -> Tensor:
        """Return the sum of all Δ²."""
        return V + square


@dataclass(frozen=True)
class AMS(Adam):
    """FedAMS (Wang, Lin & Chen 2022): V̂ ← max(V̂, V, ε) with Adam's V, x ← x + η_g·M/√V̂."""

    epsilon: float = 1e-6

    def init(self, shared: Fields) -> Fields:
        """M = 0, V = τ², V̂ = 0 (its first use takes the maximum with ε)."""
        return {**super().init(shared), "Vhat": torch.zeros_like(shared["x"])}

    def update(self, state: Fields, old: Fields, mean: Fields, fraction: float) -> tuple[Fields, Fields]:
        """Take one server step."""
        M, V = self.moments(state, mean["x"] - old["x"])
        top = torch.maximum(state["Vhat"], V).clamp_min(self.epsilon)
        return {"M": M, "V": V, "Vhat": top}, {"x": old["x"] + self.eta_g * M / top.sqrt()}
