"""The README's Python works when pasted, and its table of methods is complete."""

from __future__ import annotations

import re
from pathlib import Path

from nestfed.algorithms import METHODS

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def test_the_example_works_when_pasted() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(code.strip().splitlines()) <= 16
    scope: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), scope)
    history = scope["result"].history  # type: ignore[attr-defined]
    assert history[-1]["round"] == 20
    assert history[-1]["ap"] > 0.97 > history[0]["ap"] + 0.01


def test_every_method_is_named() -> None:
    named = re.findall(r"`([a-z0-9-]+)`", README[README.index("## Methods") :])
    assert sorted(n for n in named if n in METHODS) == sorted(METHODS)
