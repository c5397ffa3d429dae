"""Networks, and how to build one by name.

All networks return logits: no final activation, and shape (n,) instead of (n, 1) for one output.
None keeps running statistics, which are not parameters.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import max_pool2d, relu

from nestfed.core import NETWORKS, Metric, NestfedError, whole
from nestfed.metrics import judge


class Mlp(nn.Module):
    """Fully connected network with ReLU between layers; ``hidden=()`` gives linear (logistic) regression."""

    def __init__(self, inputs: int, hidden: Sequence[int] = (64,), outputs: int = 1) -> None:
        super().__init__()
        try:
            hidden = tuple(hidden)
        except TypeError:
            raise NestfedError(
                f"Mlp: hidden must list the widths of its layers, such as [64], not {hidden!r}."
            ) from None
        widths = [whole("Mlp: inputs", inputs), *(whole("Mlp: a hidden width", w) for w in hidden)]
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.head = nn.Linear(widths[-1], whole("Mlp: outputs", outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, inputs) to logits."""
        for layer in self.hidden:
            x = relu(layer(x))
        return scores(self.head(x))


class ResNet18(nn.Module):
    """ResNet-18 in torchvision's layout with GroupNorm instead of BatchNorm, for images of 3×64×64 and larger."""

    def __init__(self, outputs: int = 1, groups: int = 32) -> None:
        super().__init__()
        if 64 % whole("ResNet18: groups", groups):
            raise NestfedError(f"ResNet18: groups must divide 64, the narrowest layer, and {groups} does not.")
        self.conv = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.norm = nn.GroupNorm(groups, 64)
        widths = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1)]
        widths += [(128, 256, 2), (256, 256, 1), (256, 512, 2), (512, 512, 1)]
        self.blocks = nn.Sequential(*(_Residual(a, b, stride, groups) for a, b, stride in widths))
        self.head = nn.Linear(512, whole("ResNet18: outputs", outputs))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, 3, 64, 64) to logits."""
        x = max_pool2d(relu(self.norm(self.conv(x))), 3, stride=2, padding=1)
        return scores(self.head(self.blocks(x).mean((-2, -1))))


class _Residual(nn.Module):
    """Two 3×3 convolutions and a shortcut (a 1×1 convolution if the shape changes)."""

    def __init__(self, a: int, b: int, stride: int, groups: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(a, b, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(groups, b)
        self.conv2 = nn.Conv2d(b, b, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(groups, b)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or a != b:
            self.shortcut = nn.Sequential(nn.Conv2d(a, b, 1, stride=stride, bias=False), nn.GroupNorm(groups, b))

    def forward(self, x: Tensor) -> Tensor:
        y = relu(self.norm1(self.conv1(x)))
        return relu(self.norm2(self.conv2(y)) + self.shortcut(x))


# ----------------------------------------------------------------------------------------------- by name


@dataclass(frozen=True)
class Network:
    """How to build a network, and what its constructor needs to know about the data."""

    make: Callable[..., nn.Module]
    shape: tuple[int | None, ...] | None = None
    """The shape of one example; None inside matches any length, None alone any shape."""
    outputs: str | None = "outputs"
    """The constructor's parameter for the number of outputs; None if it is always one."""
    inputs: str | None = None
    """The constructor's parameter for the number of inputs, if it takes flat examples of any length."""


NETWORKS.add("mlp", Network(Mlp, inputs="inputs"))
NETWORKS.add("resnet18", Network(ResNet18, (3, None, None)))


def build(
    name: str, shape: Sequence[int] | None = None, outputs: int = 1, *, seed: int = 0, **options: Any
) -> nn.Module:
    """Build a network by name, with weights drawn from ``seed``; torch's global generator is unchanged.

    shape: the shape of one example.
    outputs: the number of logits: 1 for binary problems, otherwise the number of classes.
    options: further arguments of the network's constructor, such as ``hidden=(64, 64)`` for "mlp".
    """
    network: Network = NETWORKS[name]
    given: dict[str, Any] = {}
    if network.outputs is not None:
        given[network.outputs] = outputs
    elif outputs != 1:
        raise NestfedError(f"The network {name!r} has one output, not {outputs}.")
    if network.inputs is not None:
        if shape is None:
            raise NestfedError(f"The network {name!r} needs the shape of one example, for instance shape=(14,).")
        given[network.inputs] = math.prod(shape)
    elif shape is not None and network.shape is not None:
        _fits(name, tuple(shape), network.shape)
    allowed = [p for p in inspect.signature(network.make).parameters if p not in given]
    for option in options:
        if option not in allowed:
            knows = f"its options are {', '.join(allowed)}" if allowed else "it has no options"
            raise NestfedError(f"The network {name!r} does not take {option!r}; {knows}.")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = network.make(**given, **options)
    if network.inputs is not None and shape is not None and len(shape) > 1:
        return nn.Sequential(nn.Flatten(-len(shape)), model)
    return model


CHUNK = 250
"""Examples scored at once: more would not fit into a processor's cache."""


def score(
    model: Callable[[Tensor], Tensor], x: Tensor, ready: Callable[[Tensor], Tensor] = lambda part: part
) -> Tensor:
    """Return a model's scores for any number of examples, in chunks; `ready` prepares a chunk for the model."""
    with torch.no_grad():
        return torch.cat([model(ready(part)) for part in x.split(CHUNK)]).cpu()


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Computes a model's metrics on held-out examples; see `held_out`."""

    x: Tensor
    y: Tensor
    log_odds: bool = False
    metric: str | Metric = ""

    @property
    def binary(self) -> bool:
        """Whether the labels have two classes."""
        return self.y.dim() == 1 and len(self.y) > 0 and int(self.y.max()) <= 1

    def scored(self, model: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return a model's scores of the examples, and their labels."""
        return score(model, self.x).double().numpy(), self.y.numpy()

    def __call__(self, model: Any) -> dict[str, float]:
        """Return the metrics of a model."""
        return judge(*self.scored(model), log_odds=self.log_odds, metric=self.metric)


def held_out(x: Tensor, y: Tensor, *, log_odds: bool = False, metric: str | Metric = "") -> HeldOut:
    """Return a function for `simulate(evaluate=…)` that computes a model's metrics on held-out examples.

    x, y: the examples and their labels; y of shape (n, L) has several labels per example, NaN if unknown.
    log_odds: whether single scores are logits, so that accuracy and log-loss apply too.
    metric: pauroc@ρ adds the partial AUROC up to the false positive rate ρ, such as pauroc@0.3.
    """
    return HeldOut(x, y, log_odds, metric)


def _fits(name: str, shape: tuple[int, ...], wanted: tuple[int | None, ...]) -> None:
    if len(shape) != len(wanted) or any(w not in (None, s) for s, w in zip(shape, wanted)):
        right = "×".join("any" if w is None else str(w) for w in wanted)
        raise NestfedError(f"The network {name!r} takes examples of {right}, not {'×'.join(map(str, shape))}.")


def scores(logits: Tensor) -> Tensor:
    """Return logits (n, 1) as (n,), and others unchanged."""
    return logits.squeeze(-1) if logits.shape[-1] == 1 else logits
