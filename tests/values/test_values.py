"""The numbers of small fixed runs are those that are stored; CONTRIBUTING.md says what to do when they are not."""

from __future__ import annotations

import pytest

from tests.values.registry import EXPECTED, Case, differences, every_case, expected, plain

CASES = every_case()


@pytest.mark.parametrize("one", [pytest.param(c, id=c.name, marks=[pytest.mark.slow] * c.slow) for c in CASES.values()])
def test_values(one: Case) -> None:
    if one.needs:
        pytest.importorskip(one.needs)
    stored = expected(one.group)
    assert one.name in stored, f"{one.name} has no stored values: python -m tests.values.run --write {one.name}"
    wrong = list(differences(stored[one.name], plain(one.values()), one.tolerance))
    assert not wrong, "\n".join([f"{len(wrong)} values of {one.name} changed:", *(one.name + w for w in wrong[:20])])


def test_nothing_is_stored_that_nobody_runs() -> None:
    stored = {name for path in EXPECTED.glob("*.json") for name in expected(path.stem)}
    assert stored <= set(CASES)
    assert sum(path.stat().st_size for path in EXPECTED.glob("*.json")) < 1_500_000
