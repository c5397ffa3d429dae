"""The papers' networks."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, max_pool2d, relu

from nestfed.core import NestfedError, whole
from nestfed.models import Mlp, Network, scores

Hidden = tuple[Tensor, Tensor]
"""The state (h, c) of a `WordLSTM`, each (layers, batch, size)."""


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
        self.head = nn.Linear(500, whole("MnistNet: outputs", outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, 1, 28, 28) to logits."""
        x = max_pool2d(relu(self.conv1(x)), 2)
        x = max_pool2d(relu(self.conv2(x)), 2)
        return scores(self.head(relu(self.fc(x.flatten(-3)))))


class FashionNet(nn.Module):
    """3×3×5, 3×3×10, 100 with tanh and 2×2 max-pooling after each convolution, for 1×28×28."""

    def __init__(self, outputs: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 5, 3)  # 28 → 26, pooled 13
        self.conv2 = nn.Conv2d(5, 10, 3)  # 13 → 11, pooled 5
        self.fc = nn.Linear(10 * 5 * 5, 100)
        self.head = nn.Linear(100, whole("FashionNet: outputs", outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, 1, 28, 28) to logits."""
        x = max_pool2d(torch.tanh(self.conv1(x)), 2)
        x = max_pool2d(torch.tanh(self.conv2(x)), 2)
        return scores(self.head(torch.tanh(self.fc(x.flatten(-3)))))


class CifarNet(nn.Module):
    """3×3×16, 32, 64 with padding 1, ReLU and 2×2 max-pooling after each, then 512, 64; for 3×32×32."""

    def __init__(self, outputs: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1)  # 32, pooled 16
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)  # 16, pooled 8
        self.conv3 = nn.Conv2d(32, 64, 3, padding=1)  # 8, pooled 4
        self.fc1 = nn.Linear(64 * 4 * 4, 512)
        self.fc2 = nn.Linear(512, 64)
        self.head = nn.Linear(64, whole("CifarNet: outputs", outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, 3, 32, 32) to logits."""
        for conv in (self.conv1, self.conv2, self.conv3):
            x = max_pool2d(relu(conv(x)), 2)
        x = relu(self.fc2(relu(self.fc1(x.flatten(-3)))))
        return scores(self.head(x))


class OmniglotNet(nn.Module):
    """Four times 3×3×64 with stride 2, batch normalisation and ReLU, for 1×28×28 (MAML).

    The normalisation always uses the batch at hand (transductive), in training and in evaluation.
    """

    def __init__(self, ways: int = 5) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(c, 64, 3, stride=2, padding=1) for c in (1, 64, 64, 64))
        self.norms = nn.ModuleList(nn.BatchNorm2d(64, track_running_stats=False) for _ in range(4))
        self.head = nn.Linear(64 * 2 * 2, whole("OmniglotNet: ways", ways))  # 28 → 14 → 7 → 4 → 2

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, 1, 28, 28) to logits."""
        for conv, norm in zip(self.convs, self.norms):
            x = relu(norm(conv(x)))
        return scores(self.head(x.flatten(-3)))


class WordLSTM(nn.Module):
    """Word-level language model: embedding, LSTM layers and decoder, with dropout before, between and after.

    Initial weights as in PyTorch's word-language-model example, which the usual learning rates of 10 to 20
    belong to: embedding and decoder uniform in ±0.1, the decoder's bias zero.
    """

    def __init__(self, vocabulary: int, size: int = 650, layers: int = 2, dropout: float = 0.5) -> None:
        super().__init__()
        vocabulary, size = whole("WordLSTM: vocabulary", vocabulary), whole("WordLSTM: size", size)
        if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1:
            raise NestfedError(f"WordLSTM: dropout must be at least 0 and below 1, not {dropout!r}.")
        self.embedding = nn.Embedding(vocabulary, size)
        self.layers = nn.ModuleList(_LSTMLayer(size) for _ in range(whole("WordLSTM: layers", layers)))
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


MNIST = Network(MnistNet, (1, 28, 28))
FASHION = Network(FashionNet, (1, 28, 28))
CIFAR = Network(CifarNet, (3, 32, 32))
OMNIGLOT = Network(OmniglotNet, (1, 28, 28), outputs="ways")
SINE = Network(SineNet, (1,), outputs=None)
LSTM = Network(WordLSTM, outputs="vocabulary")
