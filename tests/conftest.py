"""Settings for all tests."""

from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_start() -> None:
    """Networks that a test makes without a seed start alike every time."""
    torch.manual_seed(0)
