"""Settings for all tests."""

from __future__ import annotations

import os

import pytest
import torch

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
