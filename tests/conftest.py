"""Settings for all tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

# Tests of one room use the cases of another.
sys.path += [str(p) for p in sorted(Path(__file__).parent.iterdir()) if p.is_dir()]

torch.set_num_threads(1)
DATA, CACHE = os.environ.get("NESTFED_DATA"), os.environ.get("NESTFED_CACHE")


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> None:
    """The data sets as they were found when the tests began, or a skip that says how to get them."""
    if not DATA:
        pytest.skip("set NESTFED_DATA to a folder with the data sets, see README")
    monkeypatch.setenv("NESTFED_DATA", DATA)
    if CACHE:
        monkeypatch.setenv("NESTFED_CACHE", CACHE)


@pytest.fixture(autouse=True)
def _same_start() -> None:
    """Networks that a test makes without a seed start alike every time."""
    torch.manual_seed(0)
