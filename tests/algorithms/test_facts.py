"""What a method says of itself is true: whom to cite, what it sends, how it calls its step sizes."""

from __future__ import annotations

import dataclasses
import re
from itertools import chain

import pytest

from nestfed import theory
from nestfed.algorithms import METHODS, references
from nestfed.algorithms.references import bibtex
from nestfed.core import NestfedError
from nestfed.problems import OBJECTIVES
from tests.methods import CASES, method, setting

every = pytest.mark.parametrize("name", METHODS)
NAMED = {**METHODS, **OBJECTIVES}
ENTRIES = {text for name, text in vars(references).items() if name.isupper() and isinstance(text, str)}


@every
def test_every_method_can_be_cited(name: str) -> None:
    text = bibtex(name)
    assert text == "\n\n".join(METHODS[name].cites)
    assert text.count("@") == len(METHODS[name].cites) >= 1


def test_entries_are_whole_and_each_is_cited() -> None:
    cited = set(chain.from_iterable(thing.cites for thing in NAMED.values()))
    assert cited >= ENTRIES
    keys = [re.match(r"@\w+\{(\w+),\n", entry)[1] for entry in cited]  # type: ignore[index]
    assert len(set(keys)) == len(keys)
    for entry in cited:
        assert entry.count("{") == entry.count("}")
        assert "author" in entry
        assert "doi" not in entry
    assert set(theory.METHODS) <= set(METHODS)


def test_other_names_and_mistakes() -> None:
    aliases = [alias for thing in NAMED.values() for alias in thing.aliases]
    assert sorted(aliases) == ["coda+", "fmsgda", "local-maml", "soap", "solam"]
    assert not set(aliases) & set(NAMED)
    assert bibtex("CODA+") == bibtex("codasca")
    assert bibtex("coda") != bibtex("coda-plus")
    assert bibtex("SOLAM") == bibtex("auroc")
    assert "Anonymous" in bibtex("fmgda")
    with pytest.raises(NestfedError, match="did you mean fedavg"):
        bibtex("fedavgg")
    with pytest.raises(NestfedError, match="choose one of"):
        bibtex("qqqq")
    with pytest.raises(NestfedError, match="nothing to cite for classify"):
        bibtex("classify")


@every
def test_what_is_sent_has_the_size_it_says(name: str) -> None:
    algorithm, s = method(name), setting(name)
    state = algorithm.init(s.problem, s.problem.x0)
    size = {"dual": lambda: s.problem.w0.numel(), "inner value": lambda: s.problem.inner_dim, "one number": lambda: 1}
    assert set(algorithm.sizes) <= set(algorithm.shared)
    for field in algorithm.shared:
        known = size[algorithm.sizes[field]]() if field in algorithm.sizes else s.problem.x0.numel()
        assert getattr(state, field).numel() == known


@every
def test_step_sizes_are_hyper_parameters(name: str) -> None:
    fields = {f.name for f in dataclasses.fields(METHODS[name])}  # type: ignore[arg-type]
    assert set(METHODS[name].steps) <= fields & set(CASES[name].steps)
    varying = METHODS[name].usual(lambda t: 0.1, rounds=8, q=2)
    assert METHODS[name](**{**CASES[name].hyper, **varying})


def test_one_step_size_makes_a_method() -> None:
    assert METHODS["coda-plus"].usual(0.1, rounds=9, q=5) == {"T0": 15, "eta": 0.1}
    assert METHODS["fmgda"].usual(0.1, rounds=9, q=5) == {"c_hat": 0.1, "c": 0.1}
    assert METHODS["fcsg-m"].usual(None, rounds=9, q=5) == {}
