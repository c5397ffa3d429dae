"""Collect what is wrong with tables, so that one message lists all of it, in the words of the entrance that was used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from nestfed.core import NestfedError

MOST = 40
"""The most problems that a message lists."""


@dataclass(frozen=True)
class Entrance:
    """How a setting of a table is written where the user gave it: on the command line, in Python or in a file."""

    name: str
    settings: Mapping[str, str]

    def __call__(self, setting: str, column: str = "NAME", value: str = "VALUE") -> str:
        """Return the setting as the user would write it."""
        return self.settings[setting].format(column=_shown(column), value=_shown(value))


COMMAND_LINE = Entrance(
    "the command line",
    {
        "category": "--categorical {column}",
        "missing": "--missing {value}",
        "drop": "--drop {column}",
        "date": "--date {column}=%d.%m.%Y",
        "sep": "--sep ';'",
        "encoding": "--encoding cp1250",
        "target": "--target {column}",
        "positive": "--positive {value}",
        "schema": "`nestfed schema`",
    },
)
PYTHON = Entrance(
    "Python",
    {
        "category": "schema=TableSchema.of(categorical=['{column}'])",
        "missing": "schema=TableSchema.of(missing=['{value}'])",
        "drop": "drop=['{column}']",
        "date": "schema=TableSchema.of(dates={{'{column}': '%d.%m.%Y'}})",
        "sep": "schema=TableSchema.of(sep=';')",
        "encoding": "schema=TableSchema.of(encoding='cp1250')",
        "target": "target='{column}'",
        "positive": "positive='{value}'",
        "schema": "a TableSchema",
    },
)
FILE = Entrance(
    "an experiment file",
    {
        "category": "{column} = {{ kind = \"category\" }} in [schema.columns]",
        "missing": "missing = [\"{value}\"] in [schema]",
        "drop": "drop = [\"{column}\"] in [data]",
        "date": "{column} = {{ kind = \"date\", format = \"%d.%m.%Y\" }} in [schema.columns]",
        "sep": "sep = \";\" in [schema]",
        "encoding": "encoding = \"cp1250\" in [schema]",
        "target": "target = \"{column}\" in [data]",
        "positive": "positive = \"{value}\"",
        "schema": "[schema]",
    },
)  # fmt: skip


def _shown(text: str) -> str:
    return "".join(c if c.isprintable() else "�" for c in text)


class TableError(NestfedError):
    """Everything that is wrong with some tables."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        self.problems = problems
        if len(problems) == 1:
            super().__init__(problems[0])
            return
        shown = [f"- {problem}" for problem in problems[:MOST]]
        more = [f"- … and {len(problems) - MOST} more."] if len(problems) > MOST else []
        super().__init__("\n".join([f"The tables have {len(problems)} problems:", *shown, *more]))


@dataclass
class Faults:
    """The problems found so far."""

    entrance: Entrance = PYTHON
    found: dict[str, None] = field(default_factory=dict)

    def add(self, sentence: str) -> None:
        """Note a problem; the same sentence counts once."""
        self.found[sentence] = None

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note an error that the block raises, and continue after it."""
        try:
            yield
        except TableError as error:
            for problem in error.problems:
                self.add(problem)
        except NestfedError as error:
            self.add(str(error))

    def check(self) -> None:
        """Raise all problems in one error, if there are any."""
        if self.found:
            raise TableError(tuple(self.found))
