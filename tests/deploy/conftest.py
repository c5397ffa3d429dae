"""Settings for the tests of a deployment in memory."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec("flwr"):
        from tests.flower import alone

        alone(monkeypatch)
