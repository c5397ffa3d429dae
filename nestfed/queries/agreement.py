"""What all sites agree on before the first round, made from queries: columns, scales, classes and the share of positives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import numpy as np

from nestfed.core import NestfedError
from nestfed.data import encoding
from nestfed.data.clients import Totals
from nestfed.data.design import Design
from nestfed.data.encoding import NO_TABLE, Sums, TableEncoding, kinds_of, schema_from_json, schema_to_json
from nestfed.data.schema import TableSchema
from nestfed.data.tables import CLASS, NUMBER, SURVIVAL
from nestfed.queries import CLASSES, ROWS, SQUARES, TABLE, Answers, Question
from nestfed.queries.errors import SCALE, scale_of
from nestfed.queries.tables import classes_of, sums_of

AskAll = Callable[[Sequence[Question]], Mapping[int, Answers]]
"""Asks all sites several questions at once."""


@dataclass(frozen=True)
class Agreement:
    """What all sites agree on besides the experiment."""

    clients: int
    shape: tuple[int, ...] = ()
    """The shape of a model's input."""
    classes: tuple[str, ...] = ()
    p: float = 0.0
    """The share of positives in the mixture of all sites."""
    encoding: TableEncoding = NO_TABLE
    totals: Totals = Totals(0, 0, 0)
    """The rows of all sites that made the agreement."""
    known: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """For every feature, the rows of all sites in which it is known."""
    center: float = 0.0
    """The mean of a target that is a number."""
    unit: float = 1.0
    """Its standard deviation."""

    def packed(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Return the agreement as the words and arrays of a message."""
        words = {"clients": self.clients, "shape": self.shape, "classes": self.classes, "p": self.p}
        words |= {"center": self.center, "unit": self.unit, "design": isinstance(self.encoding, Design)}
        words |= {"totals": astuple(self.totals), "columns": schema_to_json(self.encoding.schema)}
        scaling, known = self.encoding, np.asarray(self.known, np.int64)
        numbers = {"mean": scaling.mean, "deviation": scaling.deviation, "gaps": scaling.gaps.astype(np.uint8)}
        return words, numbers | {"known": known}

    @classmethod
    def unpacked(cls, words: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Agreement:
        """Return the agreement that `packed` wrote; raise a ValueError, KeyError or TypeError if it is invalid."""
        schema = schema_from_json(words["columns"])
        numbers = np.array(arrays["mean"]), np.array(arrays["deviation"]), arrays["gaps"].astype(bool)
        if any(a.shape != (sum(map(len, schema)),) for a in numbers):
            raise ValueError("the numbers of columns and scales differ")
        totals = Totals(*map(int, words["totals"]))
        shape, classes = tuple(map(int, words["shape"])), tuple(map(str, words["classes"]))
        center, unit = float(words["center"]), float(words["unit"])
        if not unit > 0:
            raise ValueError("the deviation of the target is not positive")
        made, known = (Design if words["design"] else TableEncoding)(schema, *numbers), np.array(arrays["known"])
        return cls(int(words["clients"]), shape, classes, float(words["p"]), made, totals, known, center, unit)

    def read_by(self, table: TableSchema) -> Agreement:
        """Return the agreement whose encoding can also read tables as they are in files."""
        return replace(self, encoding=replace(self.encoding, table=table))


@dataclass(frozen=True)
class Told:
    """What a site told of its training rows."""

    classes: tuple[str, ...]
    counts: np.ndarray
    shape: tuple[int, ...]
    rows: int
    sums: Sums | None
    """None if its examples are not a table."""

    @classmethod
    def of(cls, answers: Answers) -> Told:
        """Read a site's answers; raise a ValueError if they contradict themselves."""
        if "classes.training" not in answers:
            raise ValueError("it did not describe its classes.")
        classes, counts, shape = classes_of(answers["classes.training"])
        found = answers.get("table.training")
        sums = None if found is None else sums_of(found)
        return cls(classes, counts, shape, int(answers["classes.training"][ROWS]), sums)

    @property
    def kind(self) -> tuple[Any, ...]:
        """What must be the same at all sites."""
        return (self.sums is not None and len(self.shape) == 1) or self.shape, self.classes

    @property
    def positives(self) -> int:
        """The rows of class 1, the positive class of two."""
        return int(self.counts[1]) if len(self.counts) > 1 else 0

    def __str__(self) -> str:
        table = self.sums is not None and len(self.shape) == 1
        return f"{'a table' if table else f'examples of shape {self.shape}'} with classes {', '.join(self.classes) or 'none'}"


@dataclass(frozen=True)
class Rules:
    """How to agree."""

    clients: int
    by_examples: bool = False
    """Weight the sites by their rows."""
    robust: bool = False
    """Combine statistics by medians over the sites, so that one bad site cannot move them far."""
    least: int = 1
    """The sites that are needed."""
    target: str = CLASS
    """The kind of the target: the scale of a number matters; survival needs the columns of a regression."""
    lost: Mapping[str, str] = field(default_factory=dict)
    """The names of sites that cannot take part already, with the reasons."""


def agree(ask: AskAll, rules: Rules, name: Callable[[int], str], reject: Callable[[int, str], None]) -> Agreement:
    """Ask the sites, reject those that differ from the others, and return what the rest agree on."""
    out: dict[int, str] = {}

    def drop(n: int, sentence: str) -> None:
        out[n] = sentence
        reject(n, sentence)

    answers = ask([Question(CLASSES), Question(TABLE)])
    told: dict[int, Told] = {}
    for n in sorted(answers):
        try:
            told[n] = Told.of(answers[n])
        except ValueError as error:
            drop(n, str(error))
    for n, sentences in _outvoted(told, name).items():
        drop(n, " ".join(sentences))
    while True:
        there = {n: told[n] for n in sorted(told) if n not in out}
        if len(there) < rules.least:
            reasons = {**rules.lost, **{name(n): why for n, why in out.items()}}
            raise too_few(len(there), rules.clients, rules.least, reasons)
        found = _merged(there, rules, name)
        if rules.target == NUMBER:
            scales = {n: answer for n, answer in ask([Question(SCALE)]).items() if n in there}
            center, unit = scale_of(
                (answer[Question(SCALE).key] for answer in scales.values()), "median" if rules.robust else "mean"
            )
            found = replace(found, center=center, unit=unit)
        if not found.encoding.schema:
            return found
        asked = Question(
            SQUARES,
            arguments={"schema": schema_to_json(found.encoding.schema), "mean": np.array(found.encoding.mean)},
        )
        squares = {n: answer[asked.key]["squares"] for n, answer in ask([asked]).items() if asked.key in answer}
        if lost := [n for n in there if n not in squares]:
            for n in lost:
                drop(n, "it sent its sums, but no valid sums of squares.")
            continue
        sums = _sums(there, name)
        made = encoding.finish(found.encoding, [squares[n] for n in there], sums, robust=rules.robust)
        if rules.target == SURVIVAL:
            made = Design.of(made)
        return replace(found, encoding=made, shape=(len(made.inputs),) if len(found.shape) == 1 else found.shape)


def too_few(there: int, sites: int, least: int, reasons: Mapping[str, str]) -> NestfedError:
    """Return the error that lists why each of the missing sites cannot take part."""
    each = "".join(f" Site {name}: {sentence}" for name, sentence in sorted(reasons.items()))
    return NestfedError(
        f"Only {there} of {sites} sites can take part, {least} are needed. Repair them, restart them and run again.{each}"
    )


def _outvoted(told: Mapping[int, Told], name: Callable[[int], str]) -> dict[int, list[str]]:
    """Return the sites that differ from more than half of the sites, with the reasons."""
    found: dict[int, list[str]] = {}
    kinds = Counter(one.kind for one in told.values())
    if len(kinds) > 1:
        usual, most = kinds.most_common(1)[0]
        example = next(one for one in told.values() if one.kind == usual)
        if 2 * most <= len(told):
            sites = "; ".join(f"{name(n)} has {one}" for n, one in told.items())
            raise NestfedError(
                f"The sites hold examples of different kinds: {sites}. All must use tables with the same columns, or parts of "
                "one dataset, and the same classes; list the classes in data.classes of the experiment."
            )
        hint = "list the classes in data.classes of the experiment."
        different = {n: one for n, one in told.items() if one.kind != usual}
        found = {n: [f"it has {one}, but most sites have {example}; {hint}"] for n, one in different.items()}
    tables = {n: kinds_of(one.sums) for n, one in told.items() if n not in found and one.sums}
    for column in sorted(set().union(*tables.values())):
        holders = {n for n, kinds in tables.items() if column in kinds}
        if 2 * len(holders) > len(tables):
            for n in tables.keys() - holders:
                found.setdefault(n, []).append(f"It has no column {column!r}, which most sites have.")
        elif 2 * len(holders) < len(tables):
            for n in holders:
                found.setdefault(n, []).append(f"It has a column {column!r}, which most sites lack.")
        for n, kind, common in _of_other_kind({n: tables[n][column] for n in sorted(holders)}):
            found.setdefault(n, []).append(f"Its column {column!r} holds {kind}, but {common} at most sites.")
    return found


def _of_other_kind(kinds: Mapping[int, str]) -> list[tuple[int, str, str]]:
    """Return the sites whose column holds another kind of values than more than half of the sites', with both kinds."""
    filled = {n: kind for n, kind in kinds.items() if kind}
    common, most = Counter(filled.values()).most_common(1)[0] if filled else ("", 0)
    return [(n, kind, common) for n, kind in filled.items() if kind != common and 2 * most > len(filled)]


def _sums(told: Mapping[int, Told], name: Callable[[int], str]) -> dict[str, Sums]:
    return {f"Site {name(n)}": one.sums for n, one in told.items() if one.sums is not None}


def _merged(told: Mapping[int, Told], rules: Rules, name: Callable[[int], str]) -> Agreement:
    """Return the agreement except for the deviations."""
    first, *_ = told.values()
    shares = [one.positives / max(one.rows, 1) for one in told.values()]
    rows = sum(one.rows for one in told.values())
    # The share of positives in the mixture that the objective averages over, as in `Prepared.positive_rate`.
    weights = [one.rows if rules.by_examples else 1 for one in told.values()]
    p = sum(weight * share for weight, share in zip(weights, shares)) / max(sum(weights), 1)
    positives = sum(one.positives for one in told.values())
    if rules.robust:
        p = float(np.median(shares))
        positives = round(p * rows)
    found = Agreement(rules.clients, first.shape, first.classes, p, totals=Totals(len(told), positives, rows))
    if first.sums is None:
        return found
    table = len(first.shape) == 1
    sums = _sums(told, name)
    made = encoding.merge(sums, mark_gaps=table, robust=rules.robust)
    known = np.sum([one.aligned(made.schema, site)[0] for site, one in sums.items()], axis=0).astype(np.int64)
    return replace(found, encoding=made, shape=(len(made.inputs),) if table else first.shape, known=known)
