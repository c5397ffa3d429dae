"""Settings for all tests."""

from __future__ import annotations

import gc
import os

import pytest

# One thread per process: two workers are two processes, and more threads only wait for each other. This must be set
# before torch and numpy are imported. Processes that tests start inherit it.
os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
pytest.register_assert_rewrite("tests.support")
DATA, CACHE = os.environ.get("NESTFED_DATA"), os.environ.get("NESTFED_CACHE")


def pytest_collection_finish() -> None:
    """Take what was imported out of garbage collection, which otherwise looks at it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> None:
    """The datasets as they were found when the tests began, or a skip that says how to get them."""
    if not DATA:
        pytest.skip("set NESTFED_DATA to a folder with the datasets, see README")
    monkeypatch.setenv("NESTFED_DATA", DATA)
    if CACHE:
        monkeypatch.setenv("NESTFED_CACHE", CACHE)


@pytest.fixture(autouse=True)
def _same_start() -> None:
    """Start networks that a test makes without a seed alike every time."""
    import torch  # here, because the process that hands out the tests needs none

    torch.manual_seed(0)
