"""The complete list of what leaves a site, made from the declarations that answers are checked against."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nestfed.core import __version__
from nestfed.deploy.preflight import KINDS
from nestfed.engine.program import TAP, AnyAlgorithm
from nestfed.experiment.build import method
from nestfed.experiment.spec import Experiment
from nestfed.experiment.study import Training
from nestfed.experiment.target import Target
from nestfed.problems.objective import Labelled
from nestfed.queries import CLASSES, QUERIES, SCORES, SQUARES, TABLE, Query
from nestfed.queries.errors import ERRORS, SCALE
from nestfed.study.hazards import QUERIES as HAZARDS
from nestfed.study.outcome import QUERIES as STUDY

WORDS = {
    "protocol": "the version of the messages",
    "version": "the version of nestfed",
    "digest": "the digest of the study",
    "client": "the site's number",
    "group": "the message that is answered",
}
"""What every answer says."""
NUMBERS = "as many numbers as the model and the method need"


@dataclass(frozen=True)
class Item:
    """One thing that leaves a site."""

    when: str
    name: str
    """Its name in the message."""
    meaning: str
    size: str = "one value"


def questions_in(study: Any) -> tuple[str, ...]:
    """Return the names of the queries that a study asks sites."""
    if not isinstance(study, Experiment) or not isinstance(study.problem, Labelled):
        return ()
    if study.exchange.privacy is not None:
        return ()  # their answers would have no noise
    target = Target.of(study.data)
    if target.is_survival:
        return tuple(query.name for query in (CLASSES, TABLE, SQUARES, *HAZARDS))
    judging = (SCALE, ERRORS) if target.is_number else (SCORES,)
    known = (CLASSES, TABLE, SQUARES, *judging, *(STUDY if study.is_study else ()))
    return tuple(query.name for query in known)


def discloses(study: Experiment) -> list[Item]:
    """Return everything that a site of this study sends."""
    return [*_always(), *_asked(study), *_uploads(study)]


def _always() -> Iterator[Item]:
    for name, meaning in WORDS.items():
        yield Item("in every answer", name, meaning)
    yield Item(
        "in every answer", "trouble", "if the site cannot answer: the kind of its error, with its name and nothing else"
    )
    yield Item("at registration", "site", "the site's name")
    yield Item("at registration", "rows", "its numbers of training, validation and test rows; 0 below its min-cell")
    yield Item("at registration", "torch", "the version of torch")
    yield Item("at registration", "clock", "the time of its clock")
    kinds = "; ".join(f"`{name}`: {kind.sentence}" for name, kind in KINDS.items())
    yield Item("at registration", "problems", f"which of these it found: {kinds}", "one word each")


def _asked(study: Experiment) -> Iterator[Item]:
    if names := questions_in(study):
        yield Item("in every answer to questions", "answered", "which of the questions it answers", "one word each")
    for name in names:
        query = QUERIES[name]
        pace = _pace(study, query)
        for field, one in query.declared.items():
            yield Item(
                f"question {name}: {query.purpose} ({pace})", f"{name}.{field}", one.meaning, _size(query, field)
            )


def _pace(study: Experiment, query: Query) -> str:
    """Return when a query is asked, and about which rows."""
    if query in (CLASSES, TABLE, SQUARES, SCALE):
        return "before round 1, about training rows"
    if study.is_study and query not in (SCORES, ERRORS):
        return "before the trainings, or after them to judge and calibrate, about training, validation and test rows"
    every = study.evaluation.every
    often = "every round" if every == 1 else f"every {every} rounds"
    return f"{often} and at the end, about {'' if study.is_study else 'test and '}validation rows"


def _size(query: Query, field: str) -> str:
    one = query.declared[field]
    unit = {"count": "count", "index": "whole number", "sum": "sum", "text": "text"}[one.kind]
    return f"one {unit}" + (f" for each of its {', '.join(one.shape)}" if one.shape and one.kind != "text" else "")


def _uploads(study: Experiment) -> Iterator[Item]:
    if Target.of(study.data).is_survival:
        return  # there are no rounds
    if not study.is_study:
        yield from _uploaded(study, method(study))
        return
    seen: set[str] = set()  # by name: methods share most of their fields
    for name in study.methods:
        training = Training(name, {key: values[0] for key, values in study.grid(name).items()}).experiment(study)
        for item in _uploaded(training, method(training)):
            if item.name not in seen:
                seen.add(item.name)
                yield item


def _uploaded(study: Experiment, made: AnyAlgorithm) -> Iterator[Item]:
    """Yield what a site sends in the rounds of one method."""
    when = "in every round in which the site trains"
    privacy = study.exchange.privacy
    clipped = "; the coordinator clips its change and adds noise to the sum of all sites" if privacy else ""
    for name in made.shared:
        what = "the model's parameters" if name == made.point else f"the field {name} of {made.name}"
        yield Item(when, f"fields.{name}", f"{what} after the local steps{clipped}", NUMBERS)
    if study.evaluation.keep == "uniform":
        yield Item(
            "in one round",
            f"fields.{TAP}",
            "the model's parameters after one local step, for keep = 'uniform'",
            NUMBERS,
        )
    for name, table in made.gathered.items():
        yield Item(
            when, f"gathered.{name}",
            f"the site's own contribution to the table {table}, which is handed to all sites: they see whose it is",
            NUMBERS,
        )  # fmt: skip
    yield Item(when, "report.loss", "the mean training loss over its local steps")
    yield Item(when, "report.moved", "how far its parameters moved")
    yield Item(when, "report.examples", "the number of training examples it drew")


def page(study: Experiment) -> str:
    """Return the list as a page for the people of a site."""
    lines = [
        "# What leaves a site",
        "",
        f"This is everything that a site sends in the study with the digest `{study.digest()}`, with nestfed {__version__}. "
        "The coordinator drops an answer with anything else in it. Rows, names and row numbers never leave a site.",
        "",
        "Every site sets `min-cell` in its node configuration (default 10). A count between 1 and min-cell − 1 does not leave "
        "it: such categories, bins and classes are merged or left out first. A site with fewer training rows cannot take part.",
    ]
    before = ""
    for item in discloses(study):
        if item.when != before:
            lines += [
                "",
                f"## {item.when[0].upper()}{item.when[1:]}",
                "",
                "| name | what it is | size |",
                "| --- | --- | --- |",
            ]
            before = item.when
        lines.append(f"| `{item.name}` | {item.meaning} | {item.size} |")
    lines += ["", "What it can reveal, and what a site can do about it: docs/deploy.md and SECURITY.md of nestfed.", ""]
    return "\n".join(lines)
