"""The first question about models: counts of their scores at every site, by class and subgroup."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Any

import numpy as np

from nestfed.core import NestfedError, unknown
from nestfed.queries.base import TEST, Arrays, Ask
from nestfed.queries.judging import COUNTED, LEVELS, MOST_LEVELS, levels_of
from nestfed.queries.scored import ALONE
from nestfed.queries.scores import LOG_ODDS
from nestfed.queries.tally import Tally, tallies_of
from nestfed.study.decide import Calibration
from nestfed.study.metric_table import ALL, SITE


@dataclass(frozen=True)
class Candidate:
    """A model to judge: its parameters and its calibration."""

    parameters: np.ndarray | None
    """None for the model that every site has trained alone, each on its own rows."""
    calibration: Calibration = field(default_factory=Calibration)
    permuted: tuple[int, ...] = ()
    """Numbers of the model inputs whose rows are shuffled together inside every site, to see what they contribute."""
    seed: int = 0
    """The key of this permutation."""


Models = Mapping[str, np.ndarray | Candidate]


@dataclass(frozen=True, eq=False)
class Counts:
    """What sites sent about the scores of models, by model and group, and what they were asked."""

    models: tuple[str, ...]
    kind: str
    part: str
    groups: tuple[tuple[str, str], ...]
    """The subgroups: column and value."""
    sites: Mapping[int, str]
    """The names of the sites that answered."""
    silent: tuple[str, ...]
    """The names of the sites that did not: they have too few rows."""
    pooled: Mapping[tuple[int, int], Tally]
    """By group (0 for all rows, then the subgroups) and model."""
    by_site: Mapping[tuple[int, int], Tally]
    """By the site's number and model."""
    arguments: Mapping[str, Any]

    def tally(self, model: str, group: str = ALL) -> Tally:
        """Return the counts of a model in a group: "all", "site = NAME" or "COLUMN = VALUE"."""
        m = place_of("model", model, self.models)
        found = {ALL: self.pooled[0, m]}
        found |= {f"{SITE} = {name}": self.by_site[n, m] for n, name in self.sites.items()}
        found |= {f"{c} = {v}": self.pooled[g, m] for g, (c, v) in enumerate(self.groups, 1)}
        if group not in found:
            raise unknown("group", group, found)
        return found[group]


def place_of(what: str, name: str, names: Sequence[str]) -> int:
    """Return the number of a name; reject an unknown one."""
    if name not in names:
        raise unknown(what, name, names)
    return list(names).index(name)


def count(
    ask: Ask,
    models: Models,
    kind: str = LOG_ODDS,
    *,
    subgroups: Mapping[str, Sequence[str]] | Sequence[str] = (),
    sites: Sequence[str] = (),
    part: str = TEST,
) -> Counts:
    """Ask every site to count the scores of models on one part of its rows.

    - `kind`: what scores are: "log-odds", "ranking" (they only order rows), "logits" (one per class) or "numbers".
    - `subgroups`: columns, or columns with the values that matter. Values are text.
    - `sites`: the names of the sites, by number.
    """
    if not models:
        raise NestfedError("There is no model to judge.")
    if SITE in subgroups:
        raise NestfedError(f"Every site is judged by itself: leave {SITE!r} out of the subgroups.")
    groups = _groups(ask, subgroups, part)
    candidates = [one if isinstance(one, Candidate) else Candidate(np.asarray(one)) for one in models.values()]
    arguments = _arguments(candidates, kind) | {"groups": [list(group) for group in groups]}
    replies = ask(COUNTED, part=part, **arguments)
    if not replies:
        raise NestfedError(f"No site has enough {part} rows to judge a model by.")
    _reject_forgotten_maps(candidates, list(models), replies)
    tallies = {n: tallies_of(reply, **arguments) for n, reply in replies.items()}
    names = dict(enumerate(sites)) if sites else {n: str(n) for n in replies}
    keys = [(g, m) for g in range(len(groups) + 1) for m in range(len(models))]
    return Counts(
        tuple(models),
        kind,
        part,
        tuple(groups),
        {n: names[n] for n in replies},
        tuple(name for n, name in names.items() if n not in replies),
        {key: reduce(add, (own[key] for own in tallies.values())) for key in keys},
        {(n, m): own[0, m] for n, own in tallies.items() for m in range(len(models))},
        arguments,
    )


def _groups(ask: Ask, subgroups: Mapping[str, Sequence[str]] | Sequence[str], part: str) -> list[tuple[str, str]]:
    """Return columns and values; ask for the values where none are given."""
    if isinstance(subgroups, Mapping):
        return [(name, str(value)) for name, values in subgroups.items() for value in values]
    columns = list(subgroups)
    if not columns:
        return []
    found: dict[str, set[str]] = {name: set() for name in columns}
    for reply in ask(LEVELS, part=part, columns=columns).values():
        for name, counts in levels_of(reply, columns).items():
            found[name] |= set(counts)
    for name, values in found.items():
        if len(values) > MOST_LEVELS:
            raise NestfedError(
                f"The column {name!r} has {len(values)} values, too many for subgroups: name those that matter, or group them."
            )
    return [(name, value) for name in columns for value in sorted(found[name])]


def _arguments(candidates: Sequence[Candidate], kind: str) -> dict[str, Any]:
    """Return the models as arguments of the queries; parameters that several candidates share are sent once."""
    distinct: dict[bytes, np.ndarray] = {}
    cases = []
    for one in candidates:
        number = ALONE
        if one.parameters is not None:
            parameters = np.asarray(one.parameters, np.float64)
            key = parameters.tobytes()
            distinct.setdefault(key, parameters)
            number = list(distinct).index(key)
        case = {"model": number, "permuted": list(map(int, one.permuted)), "seed": int(one.seed)}
        cases.append(case | one.calibration.to_json())
    vectors = list(distinct.values())
    return {
        "x": np.concatenate([*vectors, np.zeros(0)]),
        "lengths": [len(v) for v in vectors],
        "cases": cases,
        "kind": kind,
    }


def _reject_forgotten_maps(
    candidates: Sequence[Candidate], names: Sequence[str], replies: Mapping[int, Arrays]
) -> None:
    """Reject a calibration by site of which no site found its own part."""
    used = np.sum([reply["own"] for reply in replies.values()], axis=0)
    for name, one, sites in zip(names, candidates, used):
        if one.calibration.sites and not sites:
            raise NestfedError(
                f"The model {name!r} has calibrations of the sites {', '.join(one.calibration.sites)}, but no site that "
                "answered has one of these names."
            )
