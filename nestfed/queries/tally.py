"""What sites sent about a model and a group of rows: counts of scores by class, numbers of persons, sums of losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from nestfed.queries.base import Arrays
from nestfed.queries.scored import Case, Group
from nestfed.queries.scores import BINS, CLASSES, Blurred


@dataclass(frozen=True, eq=False)
class Tally:
    """What sites sent about one model and one group of rows. Can be added."""

    scores: Blurred
    rows: np.ndarray
    """The rows of the positive class and of the other."""
    persons: np.ndarray
    """The persons with rows of the positive class, of the other, and of any."""
    repeats: np.ndarray
    """The sums of their squared numbers of rows."""
    sums: np.ndarray
    known: bool
    """Whether all scores are numbers."""
    sites: int
    """How many sites have such rows that they may describe."""

    def __add__(self, other: Tally) -> Tally:
        total = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(Tally)}
        return Tally(**total | {"known": self.known and other.known})

    @property
    def histogram(self) -> np.ndarray:
        """The rows by class and bin, (2, BINS), those of merged cells spread evenly."""
        return np.stack([self.scores.even.positives, self.scores.even.negatives])

    @property
    def independent(self) -> np.ndarray:
        """How many rows of either class, and of all, would tell as much if a person's rows told the same (Kish 1965)."""
        rows = np.append(self.rows, self.rows.sum()).astype(np.float64)
        return rows**2 / np.maximum(self.repeats, 1.0)


def tallies_of(
    reply: Arrays, x: np.ndarray, lengths: Sequence[int], cases: Sequence[Case], kind: str, groups: Sequence[Group]
) -> dict[tuple[int, int], Tally]:
    """Read a reply to `COUNTED`, by group and case; raise a ValueError if it contradicts itself."""
    cells = reply["cells"]
    if (cells < 0).any() or cells.sum() != len(reply["counts"]):
        raise ValueError("its numbers of cells do not fit its cells.")
    if (reply["persons"][:, :2] > reply["sizes"]).any() or (reply["repeats"] < reply["persons"]).any():
        raise ValueError("it counts more persons than rows.")
    ends = np.cumsum(cells.ravel())
    found = {}
    for g, m in np.ndindex(*cells.shape[:2]):
        known = bool(reply["known"][m])
        one: dict[str, Any] = {"unscored": 0 if known else 1}
        for label, name in enumerate(CLASSES):
            end = ends[(g * cells.shape[1] + m) * 2 + label]
            first, last, counts = (reply[k][end - cells[g, m, label] : end] for k in ("first", "last", "counts"))
            if len(first) and not (
                first[0] >= 0 and last[-1] < BINS and (first <= last).all() and (first[1:] > last[:-1]).all()
            ):
                raise ValueError("its bins are invalid.")
            if sum(counts.tolist()) != (reply["sizes"][g, label] if known else 0):
                raise ValueError("it counts another number of scores than rows.")
            one |= {f"{name}_first": first, f"{name}_last": last, f"{name}s": counts}
        size = reply["sizes"][g]
        found[g, m] = Tally(
            Blurred.of(one), size, reply["persons"][g], reply["repeats"][g], reply["sums"][g, m], known, int(size.any())
        )
    return found
