"""Settings for all tests."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

import pytest

# One thread per process: two workers are two processes, and more threads only wait for each other. This must be set
# before torch and numpy are imported. Processes that tests start inherit it.
os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
pytest.register_assert_rewrite("tests.support")
DATA = os.environ.get("NESTFED_DATA")


def pytest_collection_finish() -> None:
    """Take what was imported out of garbage collection, and collect less often: it looks at everything each time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


@pytest.fixture(scope="session", autouse=True)
def _digits_once() -> Iterator[None]:
    """Parse the digits, which most experiments here run on, once instead of some thousand times."""
    from sklearn import datasets

    digits = datasets.load_digits()
    load = datasets.load_digits
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets, "load_digits", lambda **how: load(**how) if how else deepcopy(digits))
        yield


@pytest.fixture(scope="session", autouse=True)
def decoded(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The cache of all tests of a run, in which every dataset is decoded once; not the user's own."""
    base = tmp_path_factory.getbasetemp()
    run = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    return os.environ.setdefault("NESTFED_CACHE", str(run / "decoded"))


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch, decoded: str) -> Path:
    """The folder of datasets that was set when the tests began, or a skip that says how to get them."""
    if not DATA:
        pytest.skip("set NESTFED_DATA to a folder with the datasets, see README")
    monkeypatch.setenv("NESTFED_DATA", DATA)
    monkeypatch.setenv("NESTFED_CACHE", decoded)
    monkeypatch.setenv("NESTFED_MIRROR", "http://127.0.0.1:9")  # a missing file must not become a download
    return Path(DATA)


@pytest.fixture(autouse=True)
def _same_start() -> None:
    """Start networks that a test makes without a seed alike every time."""
    import torch  # here, because the process that hands out the tests needs none

    torch.default_generator.manual_seed(0)  # torch.manual_seed notes the stack for every kind of accelerator
