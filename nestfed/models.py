"""The papers' networks, and a table to build them by name.

All return plain logits: no activation at the end, and shape (n,) instead of (n, 1) when there is one output.
None keeps running statistics: what is not a parameter would be averaged by nobody.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, max_pool2d, relu

from nestfed.core import NestfedError, unknown

Hidden = tuple[Tensor, Tensor]
"""The state (h, c) of a `WordLSTM`, each (layers, batch, size)."""


class Mlp(nn.Module):
    """Fully connected, ReLU between layers; with ``hidden=()`` it is linear (logistic) regression."""

    def __init__(self, inputs: int, hidden: Sequence[int] = (64,), outputs: int = 1) -> None:
        super().__init__()
        try:
            hidden = tuple(hidden)
        except TypeError:
            raise NestfedError(
                f"Mlp: hidden must list the widths of its layers, such as [64], not {hidden!r}."
            ) from None
        widths = [_whole("Mlp: inputs", inputs), *(_whole("Mlp: a hidden width", w) for w in hidden)]
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.head = nn.Linear(widths[-1], _whole("Mlp: outputs", outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, inputs) to logits."""
        for layer in self.hidden:
            x = relu(layer(x))
        return _scores(self.head(x))


class SineNet(Mlp):
    """1-40-40-1 with ReLU: the regression network of MAML's sine waves."""

    def __init__(self) -> None:
        super().__init__(inputs=1, hidden=(40, 40), outputs=1)


class MnistNet(nn.Module):
    """5×5×20, 5×5×50, 500 with ReLU and 2×2 max-pooling after each convolution, for 1×28×28 (LeNet)."""

    def __init__(self, outputs: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 20, 5)  # 28 → 24, pooled 12
        self.conv2 = nn.Conv2d(20, 50, 5)  # 12 → 8, pooled 4
        self.fc = nn.Linear(50 * 4 * 4, 500)
        self.head = nn.Linear(500, _whole("MnistNet: outputs", outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, 1, 28, 28) to logits."""
        x = max_pool2d(relu(self.conv1(x)), 2)
        x = max_pool2d(relu(self.conv2(x)), 2)
        return _scores(self.head(relu(self.fc(x.flatten(-3)))))


class FashionNet(nn.Module):
    """3×3×5, 3×3×10, 100 with tanh and 2×2 max-pooling after each convolution, for 1×28×28."""

    def __init__(self, outputs: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 5, 3)  # 28 → 26, pooled 13
        self.conv2 = nn.Conv2d(5, 10, 3)  # 13 → 11, pooled 5
        self.fc = nn.Linear(10 * 5 * 5, 100)
        self.head = nn.Linear(100, _whole("FashionNet: outputs", outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, 1, 28, 28) to logits."""
        x = max_pool2d(torch.tanh(self.conv1(x)), 2)
        x = max_pool2d(torch.tanh(self.conv2(x)), 2)
        return _scores(self.head(torch.tanh(self.fc(x.flatten(-3)))))


class CifarNet(nn.Module):
    """3×3×16, 32, 64 with padding 1, ReLU and 2×2 max-pooling after each, then 512, 64; for 3×32×32."""

    def __init__(self, outputs: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1)  # 32, pooled 16
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)  # 16, pooled 8
        self.conv3 = nn.Conv2d(32, 64, 3, padding=1)  # 8, pooled 4
        self.fc1 = nn.Linear(64 * 4 * 4, 512)
        self.fc2 = nn.Linear(512, 64)
        self.head = nn.Linear(64, _whole("CifarNet: outputs", outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, 3, 32, 32) to logits."""
        for conv in (self.conv1, self.conv2, self.conv3):
            x = max_pool2d(relu(conv(x)), 2)
        x = relu(self.fc2(relu(self.fc1(x.flatten(-3)))))
        return _scores(self.head(x))


class OmniglotNet(nn.Module):
    """Four times 3×3×64 with stride 2, batch normalisation and ReLU, for 1×28×28 (MAML).

    The normalisation always uses the batch at hand (transductive), in training and in evaluation.
    """

    def __init__(self, ways: int = 5) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(c, 64, 3, stride=2, padding=1) for c in (1, 64, 64, 64))
        self.norms = nn.ModuleList(nn.BatchNorm2d(64, track_running_stats=False) for _ in range(4))
        self.head = nn.Linear(64 * 2 * 2, _whole("OmniglotNet: ways", ways))  # 28 → 14 → 7 → 4 → 2

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, 1, 28, 28) to logits."""
        for conv, norm in zip(self.convs, self.norms):
            x = relu(norm(conv(x)))
        return _scores(self.head(x.flatten(-3)))


class ResNet18(nn.Module):
    """ResNet-18 in torchvision's layout with GroupNorm for BatchNorm, for 3×64×64 and larger."""

    def __init__(self, outputs: int = 1, groups: int = 32) -> None:
        super().__init__()
        if 64 % _whole("ResNet18: groups", groups):
            raise NestfedError(f"ResNet18: groups must divide 64, the narrowest layer, and {groups} does not.")
        self.conv = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.norm = nn.GroupNorm(groups, 64)
        widths = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1)]
        widths += [(128, 256, 2), (256, 256, 1), (256, 512, 2), (512, 512, 1)]
        self.blocks = nn.Sequential(*(_Residual(a, b, stride, groups) for a, b, stride in widths))
        self.head = nn.Linear(512, _whole("ResNet18: outputs", outputs))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, 3, 64, 64) to logits."""
        x = max_pool2d(relu(self.norm(self.conv(x))), 3, stride=2, padding=1)
        return _scores(self.head(self.blocks(x).mean((-2, -1))))


class _Residual(nn.Module):
    """Two 3×3 convolutions and a shortcut, which is a 1×1 convolution where the shape changes."""

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


class WordLSTM(nn.Module):
    """Word-level language model: embedding, LSTM layers and decoder, with dropout before, between and after.

    Initial weights as in PyTorch's word-language-model example, which the usual learning rates of 10 to 20
    belong to: embedding and decoder uniform in ±0.1, the decoder's bias zero.
    """

    def __init__(self, vocabulary: int, size: int = 650, layers: int = 2, dropout: float = 0.5) -> None:
        super().__init__()
        vocabulary, size = _whole("WordLSTM: vocabulary", vocabulary), _whole("WordLSTM: size", size)
        if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1:
            raise NestfedError(f"WordLSTM: dropout must be at least 0 and below 1, not {dropout!r}.")
        self.embedding = nn.Embedding(vocabulary, size)
        self.layers = nn.ModuleList(_LSTMLayer(size) for _ in range(_whole("WordLSTM: layers", layers)))
        self.dropout = nn.Dropout(dropout)
        self.decoder = nn.Linear(size, vocabulary)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, tokens: Tensor, hidden: Hidden | None = None) -> tuple[Tensor, Hidden]:
        """Map word numbers (T, B) and the state before them to logits (T, B, vocabulary) and the state after."""
        x = self.dropout(self.embedding(tokens))
        if hidden is None:
            zeros = torch.zeros_like(x[:1]).expand(len(self.layers), *x.shape[1:])
            hidden = (zeros, zeros)
        after = []
        for layer, h, c in zip(self.layers, *hidden):
            x, state = layer(x, h, c)
            x = self.dropout(x)
            after.append(state)
        return self.decoder(x), (torch.stack([h for h, _ in after]), torch.stack([c for _, c in after]))


class _LSTMLayer(nn.Module):
    """One layer of `nn.LSTM`, with its parameters' names and initial values, step by step in plain operations.

    `nn.LSTM` itself cannot be vectorised over clients (aten::lstm has no vmap rule).
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(size)
        self.weight_ih_l0 = nn.Parameter(torch.empty(4 * size, size).uniform_(-bound, bound))
        self.weight_hh_l0 = nn.Parameter(torch.empty(4 * size, size).uniform_(-bound, bound))
        self.bias_ih_l0 = nn.Parameter(torch.empty(4 * size).uniform_(-bound, bound))
        self.bias_hh_l0 = nn.Parameter(torch.empty(4 * size).uniform_(-bound, bound))

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Hidden]:
        outputs = []
        for fed in linear(x, self.weight_ih_l0, self.bias_ih_l0 + self.bias_hh_l0).unbind(0):
            i, f, g, o = (fed + linear(h, self.weight_hh_l0)).chunk(4, -1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            outputs.append(h)
        return torch.stack(outputs), (h, c)


# ----------------------------------------------------------------------------------------------- by name


@dataclass(frozen=True)
class Network:
    """A row of the table: how to make a network, and what it needs to know of the data."""

    make: Callable[..., nn.Module]
    shape: tuple[int | None, ...] | None = None
    """The shape of one example; a None inside fits any length, None alone any shape."""
    outputs: str | None = "outputs"
    """What the constructor calls the number of outputs; None if that is always one."""


NETWORKS: Mapping[str, Network] = {
    "mlp": Network(Mlp),
    "mnist": Network(MnistNet, (1, 28, 28)),
    "fashion": Network(FashionNet, (1, 28, 28)),
    "cifar": Network(CifarNet, (3, 32, 32)),
    "resnet18": Network(ResNet18, (3, None, None)),
    "omniglot": Network(OmniglotNet, (1, 28, 28), outputs="ways"),
    "sine": Network(SineNet, (1,), outputs=None),
    "lstm": Network(WordLSTM, outputs="vocabulary"),
}


def build(
    name: str, shape: Sequence[int] | None = None, outputs: int = 1, *, seed: int = 0, **options: Any
) -> nn.Module:
    """Build a network of the table for examples of one ``shape``, with weights drawn from ``seed``.

    ``outputs`` is the number of logits: 1 for binary problems, the classes or ways, or the words of a
    language model. Further options go to the network's constructor, for instance ``hidden=(64, 64)`` to
    "mlp". The global generator of torch is left as it was.
    """
    if name not in NETWORKS:
        raise unknown("network", name, NETWORKS)
    network = NETWORKS[name]
    given: dict[str, Any] = {}
    if network.outputs is not None:
        given[network.outputs] = outputs
    elif outputs != 1:
        raise NestfedError(f"The network {name!r} has one output, not {outputs}.")
    if network.make is Mlp:
        if shape is None:
            raise NestfedError("The network 'mlp' needs the shape of one example, for instance shape=(14,).")
        given["inputs"] = math.prod(shape)
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
    if network.make is Mlp and shape is not None and len(shape) > 1:
        return nn.Sequential(nn.Flatten(-len(shape)), model)
    return model


CHUNK = 250
"""Examples that are scored at once: more no longer fit into a processor's cache."""


def score(
    model: Callable[[Tensor], Tensor], x: Tensor, ready: Callable[[Tensor], Tensor] = lambda part: part
) -> Tensor:
    """Return a model's scores of any number of examples, in chunks; `ready` makes a chunk what the model takes."""
    with torch.no_grad():
        return torch.cat([model(ready(part)) for part in x.split(CHUNK)]).cpu()


def _fits(name: str, shape: tuple[int, ...], wanted: tuple[int | None, ...]) -> None:
    if len(shape) != len(wanted) or any(w not in (None, s) for s, w in zip(shape, wanted)):
        right = "×".join("any" if w is None else str(w) for w in wanted)
        raise NestfedError(f"The network {name!r} takes examples of {right}, not {'×'.join(map(str, shape))}.")


def _scores(logits: Tensor) -> Tensor:
    return logits.squeeze(-1) if logits.shape[-1] == 1 else logits


def _whole(what: str, value: Any) -> int:
    try:
        whole = operator.index(value)
    except TypeError:
        raise NestfedError(f"{what} must be a whole number, not {value!r}.") from None
    if whole < 1:
        raise NestfedError(f"{what} must be at least 1, not {whole}.")
    return whole
