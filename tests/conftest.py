"""Settings for all tests."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from copy import deepcopy

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


@pytest.fixture(scope="session", autouse=True)
def _digits_once() -> Iterator[None]:
    """Parse the digits, which most experiments here run on, once instead of some thousand times."""
    from sklearn import datasets

    digits = datasets.load_digits()
    load = datasets.load_digits
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets, "load_digits", lambda **how: load(**how) if how else deepcopy(digits))
        yield


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
