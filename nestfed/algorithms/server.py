"""Server updates: steps on the pseudo-gradient that compose with any method, normalized, control-variate and dynamic steps."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nestfed.core import Fields, NestfedError, Server, at_least, positive, weight


class Fieldwise(Server):
    """A rule for one vector, applied to every field that the server gets, each with its own state."""

    @abstractmethod
    def start(self, x: Tensor) -> dict[str, Tensor]:
        """Return the state of one field before the first round."""

    @abstractmethod
    def step(self, s: Fields, x: Tensor, delta: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Return the new state and the new x; Δ = mean − x is the pseudo-gradient."""

    def init(self, shared: Fields) -> Fields:
        """Start every field."""
        return {f"{name}.{k}": v for k, x in shared.items() for name, v in self.start(x).items()}

    def update(self, state: Fields, old: Fields, mean: Fields, fraction: float) -> tuple[Fields, Fields]:
        """Take one step in every field."""
        after: dict[str, Tensor] = {}
        shared: dict[str, Tensor] = {}
        for k, x in old.items():
            own = {name.removesuffix(f".{k}"): v for name, v in state.items() if name.endswith(f".{k}")}
            new, shared[k] = self.step(own, x, mean[k] - x)
            after |= {f"{name}.{k}": v for name, v in new.items()}
        return after, shared


@dataclass(frozen=True)
class Momentum(Fieldwise):
    """Server momentum, FedAvgM (Hsu, Qi & Brown 2019): M ← β·M + Δ, x ← x + η_g·M."""

    eta_g: float = 1.0
    beta: float = 0.9

    name = "momentum"

    def __post_init__(self) -> None:
        positive(self, "eta_g")
        below_one(self, "beta")

    def start(self, x: Tensor) -> dict[str, Tensor]:
        """M = 0."""
        return {"M": torch.zeros_like(x)}

    def step(self, s: Fields, x: Tensor, delta: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Roll on."""
        M = self.beta * s["M"] + delta
        return {"M": M}, x + self.eta_g * M


@dataclass(frozen=True)
class Adaptive(Fieldwise):
    """A server step with moments M and V of Δ (Reddi et al. 2021); no bias correction.

    M ← β1·M + (1−β1)Δ, then V by the subclass's rule, then x ← x + η_g·M/(√V + τ). V starts at τ².
    """

    eta_g: float
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self) -> None:
        check_moments(self)

    def start(self, x: Tensor) -> dict[str, Tensor]:
        """M = 0, V = τ²."""
        return {"M": torch.zeros_like(x), "V": torch.full_like(x, self.tau**2)}

    @abstractmethod
    def second(self, V: Tensor, square: Tensor) -> Tensor:
        """Return the new V from the old one and Δ²."""

    def moments(self, s: Fields, delta: Tensor) -> tuple[Tensor, Tensor]:
        """Return the new M and V."""
        M = self.beta1 * s["M"] + (1 - self.beta1) * delta
        return M, self.second(s["V"], delta**2)

    def step(self, s: Fields, x: Tensor, delta: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Take one adaptive step."""
        M, V = self.moments(s, delta)
        return {"M": M, "V": V}, x + self.eta_g * M / (V.sqrt() + self.tau)


def check_moments(owner: Any) -> None:
    """Reject hyper-parameters outside the range of an adaptive server."""
    positive(owner, "eta_g", "tau")
    weight(owner, "beta2")
    below_one(owner, "beta1")


def below_one(owner: Any, name: str) -> None:
    """Reject a momentum that is not in [0, 1)."""
    at_least(owner, 0, name)
    if not getattr(owner, name) < 1:
        raise NestfedError(f"{owner.name}: {name} must be in [0, 1), not {getattr(owner, name):g}.")


class Adam(Adaptive):
    """V ← β2·V + (1−β2)Δ²."""

    name = "adam"

    def second(self, V: Tensor, square: Tensor) -> Tensor:
        """Return the moving average of Δ²."""
        return self.beta2 * V + (1 - self.beta2) * square


class Yogi(Adaptive):
    """V ← V − (1−β2)Δ²·sign(V − Δ²)."""

    name = "yogi"

    def second(self, V: Tensor, square: Tensor) -> Tensor:
        """Return V moved towards Δ² by an amount that does not depend on V."""
        return V - (1 - self.beta2) * square * torch.sign(V - square)


class Adagrad(Adaptive):
    """V ← V + Δ²."""

    name = "adagrad"

    def second(self, V: Tensor, square: Tensor) -> Tensor:
        """Return the sum of all Δ²."""
        return V + square


@dataclass(frozen=True)
class AMS(Adam):
    """FedAMS (Wang, Lin & Chen 2022): V̂ ← max(V̂, V, ε) with Adam's V, x ← x + η_g·M/√V̂."""

    epsilon: float = 1e-6

    name = "ams"

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "epsilon")

    def start(self, x: Tensor) -> dict[str, Tensor]:
        """M = 0, V = τ², V̂ = 0 (its first use takes the maximum with ε)."""
        return {**super().start(x), "Vhat": torch.zeros_like(x)}

    def step(self, s: Fields, x: Tensor, delta: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Take one adaptive step."""
        M, V = self.moments(s, delta)
        top = torch.maximum(s["Vhat"], V).clamp_min(self.epsilon)
        return {"M": M, "V": V, "Vhat": top}, x + self.eta_g * M / top.sqrt()


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
