"""Other libraries' objects go in as they are: a Lightning module, Hugging Face data sets, flwr-datasets' partitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_breast_cancer
from torch import nn

from nestfed import FederatedAUC

QUICK: dict[str, Any] = {"rounds": 8, "q": 5}


def cancer() -> tuple[np.ndarray, np.ndarray]:
    x, y = load_breast_cancer(return_X_y=True)
    rows = np.random.default_rng(0).permutation(len(x))
    return x[rows], 1 - y[rows]


def test_lightning_module() -> None:
    lightning = pytest.importorskip("lightning")

    class Net(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(30, 8), nn.ReLU(), nn.Linear(8, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)

        def training_step(self, batch: Any, n: int) -> torch.Tensor:
            return nn.functional.binary_cross_entropy_with_logits(self(batch[0])[:, 0], batch[1])

    x, y = cancer()
    found = FederatedAUC(Net(), **QUICK).fit([(x[i:400:4], y[i:400:4]) for i in range(4)])
    assert isinstance(found.module_, Net)
    assert found.score(x[400:], y[400:]) > 0.95


def test_hugging_face_and_flower_datasets() -> None:
    datasets = pytest.importorskip("datasets")
    partitioner = pytest.importorskip("flwr_datasets.partitioner")
    x, y = cancer()
    whole = datasets.Dataset.from_dict({"features": x[:400].tolist(), "label": y[:400].tolist()})
    found = FederatedAUC(**QUICK).fit([whole.shard(3, i) for i in range(3)])
    assert found.score(x[400:], y[400:]) > 0.95
    parts = partitioner.IidPartitioner(num_partitions=3)
    parts.dataset = whole

    class Federated:  # FederatedDataset itself downloads; these two members are what is used of it
        partitioners = {"train": parts}  # noqa: RUF012

        def load_partition(self, n: int, split: str) -> Any:
            return self.partitioners[split].load_partition(n)

    assert len(FederatedAUC(**QUICK).fit(Federated()).sites_.names) == 3
