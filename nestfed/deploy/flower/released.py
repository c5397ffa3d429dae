"""The released model of a study on its way to the sites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from nestfed.core import NestfedError
from nestfed.deploy.flower.federation import Flower
from nestfed.deploy.flower.mailbox import ASK
from nestfed.deploy.flower.messages import stamp_of
from nestfed.deploy.flower.roster import TroubleError
from nestfed.deploy.wire import Packed, pack
from nestfed.queries import Arrays
from nestfed.report.page import Table
from nestfed.study import sealed
from nestfed.study.card import card
from nestfed.study.model import CARD, MODEL, PARAMETERS, StudyModel

FILE = "file."
"""How the names of the files begin among a message's arrays."""
FILES = (MODEL, PARAMETERS, CARD)
"""What sites get: numbers and text. A program that can run code (`model.pt2`) is not sent."""


@dataclass
class Releasing:
    """A model for all connected sites."""

    flower: Flower
    files: Mapping[str, bytes]
    required: Sequence[int]
    got: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    welcome: Sequence[int] = ()
    label = group = "release"

    def done(self, n: int) -> bool:
        """Return whether client n needs no further message."""
        return n in self.got or n in self.failed

    def count(self) -> int:
        """Return the number of sites that have the model."""
        return len(self.got)

    def send(self, n: int, node: int) -> None:
        """Send client n the model."""
        arrays = {f"{FILE}{name}": np.frombuffer(content, np.uint8) for name, content in self.files.items()}
        digest = sealed.digest_of(self.files)
        words = stamp_of(self.flower.roster.study, group=self.group, token=self.flower.token, release=digest)
        self.flower.roster.ask(node, ASK, pack(words, arrays), self.group, 0)

    def take(self, n: int, packed: Packed) -> None:
        """Note that client n has the model."""
        packed.arrays({})
        self.got.add(n)

    def trouble(self, n: int, error: TroubleError) -> bool:
        """Do not send the model again to a site that failed."""
        self.failed.add(n)
        return False


def release(flower: Flower, model: StudyModel, tables: Sequence[Table]) -> list[str]:
    """Send a model to all connected sites; return the names of those that have it."""
    files = {**model.files(), CARD: card(model, tables).encode()}
    job = Releasing(flower, files, sorted(flower.roster.nodes()))
    flower.fetch(job, len(job.required))
    return [flower.roster.called(n) for n in sorted(job.got)]


def receive(place: Path, digest: str, arrays: Arrays) -> str:
    """Write the model that the coordinator has sent, whole or not at all; return its digest."""
    files = {k.removeprefix(FILE): np.asarray(v, np.uint8).tobytes() for k, v in arrays.items() if k.startswith(FILE)}
    if set(files) != set(FILES) or sealed.digest_of(files) != digest:
        raise NestfedError("The released model is damaged, or has other files than a model.")
    return sealed.write(place, files)
