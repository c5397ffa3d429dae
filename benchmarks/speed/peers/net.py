"""The Fashion-MNIST net of the works (a) and (f) and its data, for environments without nestfed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import max_pool2d


class FashionNet(nn.Module):
    """As nestfed_papers.networks.FashionNet."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 5, 3), nn.Conv2d(5, 10, 3)
        self.fc, self.head = nn.Linear(250, 100), nn.Linear(100, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = max_pool2d(torch.tanh(self.conv1(x)), 2)
        x = max_pool2d(torch.tanh(self.conv2(x)), 2)
        return self.head(torch.tanh(self.fc(x.flatten(-3))))


def given() -> tuple[Path, int, int, int]:
    """Return the data folder, the number of clients, how many take part, and the rounds."""
    folder, clients, taking_part, rounds = sys.argv[1:5]
    return Path(folder), int(clients), int(taking_part), int(rounds)


def data(folder: Path) -> tuple[Any, Any]:
    return np.load(folder / "x.npy", mmap_mode="r"), np.load(folder / "y.npy")


def parts(folder: Path, clients: int) -> list[Any]:
    return np.array_split(np.load(folder / "order.npy"), clients)
