"""Omniglot: N-way K-shot tasks of handwritten characters, and federated MAML on them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from nestfed.core import Clients, Data, NestfedError, at_least, one_of, positive
from nestfed.data.random import Purpose, Streams
from nestfed.data.sources import load
from nestfed.problems.base import Model
from nestfed.problems.flat import channels_last
from nestfed.problems.maml import MAML, Adaptable
from nestfed.problems.objective import Generated, Made, Setting

TURNS = 4
"""A character turned by 0, 90, 180 and 270 degrees counts as four classes."""
DRAWERS = 20
"""Every character was drawn once by each of 20 people."""
CHARACTERS = (1028, 172, 423)
ALPHABETS = (33, 5, 12)
SPLIT_SEED = 0
"""One split for every run, so that no run's test character is another's training character."""


@dataclass(frozen=True)
class Characters:
    """All 1,623 characters: images (characters, 20, 28, 28) in bytes, ink on 0, and the alphabet of each."""

    images: Tensor
    alphabets: Sequence[str]


@dataclass(frozen=True)
class CharacterSplit:
    """Characters for training, validation and test; `training` has one part per client."""

    training: Sequence[np.ndarray]
    validation: Sequence[np.ndarray]
    test: Sequence[np.ndarray]
    """Tasks are made inside one of the parts: inside an alphabet, or of all characters if there is one part."""
    names: Sequence[str] = ()


def read(folder: str | Path | None = None) -> Characters:
    """Read both of Omniglot's files as one set of characters."""
    images, alphabets = [], []
    for part in (split := load("omniglot", folder)).train, split.test:
        # Examples come sorted by character.
        images.append(torch.from_numpy(np.array(part.x)).view(-1, DRAWERS, 28, 28))
        alphabets += [str(a) for a in part.columns["alphabet"][::DRAWERS]]
    return Characters(torch.cat(images), alphabets)


def by_characters(count: int, clients: int, seed: int, shares: Sequence[int] = CHARACTERS) -> CharacterSplit:
    """Split as in the FCSG paper: 1,028/172/423 characters, those for training over the clients at random."""
    if sum(shares) != count:
        raise NestfedError(f"omniglot: the split needs {sum(shares)} characters, but the data have {count}.")
    order = np.random.default_rng(SPLIT_SEED).permutation(count)
    training, validation, test = np.split(order, np.cumsum(shares)[:2])
    if not 1 <= clients <= len(training):
        raise NestfedError(f"omniglot: clients must be 1 to {len(training)}, the training characters, not {clients}.")
    shuffled = np.random.default_rng(seed).permutation(training)
    return CharacterSplit([np.sort(p) for p in np.array_split(shuffled, clients)], [validation], [test])


def by_alphabets(alphabets: Sequence[str], shares: Sequence[int] = ALPHABETS) -> CharacterSplit:
    """Split as in the Local-SCGDM paper: 33/5/12 alphabets, each alphabet for training one client."""
    names = sorted(set(alphabets))
    if sum(shares) != len(names):
        raise NestfedError(f"omniglot: the split needs {sum(shares)} alphabets, but the data have {len(names)}.")
    order = np.random.default_rng(SPLIT_SEED).permutation(len(names))
    held = [np.flatnonzero(np.array(alphabets) == names[i]) for i in order]
    a, b = np.cumsum(shares)[:2]
    return CharacterSplit(held[:a], held[a:b], held[b:], [names[i] for i in order[:a]])


def _turns() -> Tensor:
    """Return the source pixel of every position for each of the four rotations, (4, 784)."""
    places = torch.arange(28 * 28).view(28, 28)
    return torch.stack([torch.rot90(places, r).reshape(-1) for r in range(TURNS)])


@dataclass(frozen=True)
class Episodes:
    """N-way K-shot tasks, drawn from parts of the characters.

    A task is N of the part's classes (a character in one of its four turns), and of each class K images as support
    and others as query, without overlap. Its labels are 0 … N−1 in the order in which the classes were drawn.
    """

    characters: Characters
    parts: Sequence[np.ndarray]
    ways: int = 5
    shots: int = 1
    queries: int = 15

    def __post_init__(self) -> None:
        for name in ("ways", "shots", "queries"):
            if getattr(self, name) < 1:
                raise NestfedError(f"omniglot: {name} must be at least 1, not {getattr(self, name)}.")
        if self.shots + self.queries > DRAWERS:
            raise NestfedError(
                f"omniglot: a character has {DRAWERS} images, too few for {self.shots} shots and {self.queries} queries."
            )
        fewest = min(len(part) for part in self.parts)
        if self.ways > TURNS * fewest:
            raise NestfedError(
                f"omniglot: ways must be at most {TURNS * fewest}, the classes of the smallest client, not {self.ways}."
            )
        object.__setattr__(self, "_turned", _turns())

    def choose(self, generator: np.random.Generator, part: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Draw a task: characters and turns of its classes, (N,) each, and images of each, (N, K + queries)."""
        held = self.parts[part]
        classes = generator.choice(TURNS * len(held), self.ways, replace=False)
        images = generator.random((self.ways, DRAWERS)).argsort(1)[:, : self.shots + self.queries]
        return held[classes // TURNS], classes % TURNS, images

    def gather(self, chosen: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> Data:
        """Turn k drawn tasks into (outer, inner): (x, y) of the queries and of the supports, leading axes (k, n)."""
        characters, turns, images = (torch.from_numpy(np.stack(part)) for part in zip(*chosen))
        pixels = self.characters.images[characters[..., None], images].flatten(-2)
        places = self._turned[turns][:, :, None].expand_as(pixels)  # type: ignore[attr-defined]
        x = (pixels.gather(-1, places).float() / 255).unflatten(-1, (1, 28, 28))
        inner, outer = x[:, :, : self.shots], x[:, :, self.shots :]
        return self._labelled(outer), self._labelled(inner)

    def _labelled(self, x: Tensor) -> tuple[Tensor, Tensor]:
        k, ways, n = x.shape[:3]
        y = torch.arange(ways).repeat_interleave(n).expand(k, -1)
        return x.flatten(1, 2), y


@dataclass(frozen=True)
class OmniglotClients(Clients):
    """Clients that draw new tasks from their own characters at every iteration."""

    episodes: Episodes
    tasks: int = 5
    seed: int | None = field(default=None, kw_only=True)
    names: Sequence[str] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        if self.tasks < 1:
            raise NestfedError(f"omniglot: tasks, the number per iteration, must be at least 1, not {self.tasks}.")
        object.__setattr__(self, "_streams", Streams(self.seed or 0))

    def __len__(self) -> int:
        return len(self.episodes.parts)

    def label(self, n: int) -> str:
        """Return the client's alphabet, or its number."""
        return self.names[n] if self.names else str(n)

    def seeded(self, seed: int) -> Self:
        """Return these clients with this seed, unless they already have one."""
        return self if self.seed is not None else replace(self, seed=seed)

    def sample(self, n: int, t: int) -> Data:
        """Return client n's tasks at iteration t."""
        generator = self._streams.at(Purpose.TASKS, n, t)  # type: ignore[attr-defined]
        return self.episodes.gather([self.episodes.choose(generator, n) for _ in range(self.tasks)])


def cross_entropy(model: Model, examples: Data) -> Tensor:
    """Return a task's loss."""
    x, y = examples
    return F.cross_entropy(model(x), y)


@dataclass(frozen=True)
class FewShotTest:
    """Tasks for evaluation, the same ones for every run: each is adapted to on its support, judged on its query."""

    episodes: Episodes
    count: int = 600
    steps: int = 3
    """Inner steps at evaluation."""
    stream: int = 0
    """Which stream of tasks: validation and test draw from different ones."""

    def __post_init__(self) -> None:
        if self.count < 2:
            raise NestfedError(f"omniglot: an evaluation needs at least 2 tasks, not {self.count}.")

    def tasks(self, numbers: range) -> Data:
        """Return the tasks of these numbers; the parts take turns."""
        streams, parts = Streams(SPLIT_SEED), len(self.episodes.parts)
        return self.episodes.gather(
            [self.episodes.choose(streams.at(Purpose.TASKS, 2**40 + self.stream, i), i % parts) for i in numbers]
        )

    def accuracies(self, model: Adaptable) -> Tensor:
        """Return the share of right answers in every task."""
        found, device = [], model.x.device
        for start in range(0, self.count, 20):
            (x, y), support = self.tasks(range(start, min(start + 20, self.count)))
            x, y, support = tree_map(lambda leaf: channels_last(leaf.to(device)), (x, y, support))
            answers = model.predict(model.adapt(support, self.steps), x).argmax(-1)
            found.append((answers == y).double().mean(1))
        return torch.cat(found)

    def __call__(self, model: Adaptable) -> dict[str, float]:
        """Return the mean accuracy, and half the width of its 95 % confidence interval over tasks."""
        found = self.accuracies(model)
        half = 1.96 * float(found.std()) / math.sqrt(len(found))
        return {"accuracy": float(found.mean()), "accuracy_ci95": half}


@dataclass(frozen=True)
class OmniglotOptions(Generated):
    """Options of omniglot: N-way K-shot tasks from handwritten characters."""

    split: str = "characters"
    """Clients hold "characters" at random, or "alphabets", one each."""
    ways: int = 5
    """Classes in a task."""
    shots: int = 1
    """Support examples of each class."""
    queries: int = 15
    """Query examples of each class."""
    tasks: int = 3
    """Tasks of a client in a step."""
    inner_lr: float = 0.01
    """The step size of the inner step."""
    inner_steps: int = 1
    """Inner steps at evaluation; training takes one."""
    first_order: bool = False
    """Leave out second derivatives."""
    test_tasks: int = 600
    """Tasks in the test set."""
    clip: float = 0.0
    """The largest norm of a gradient; 0 = no clipping."""

    name = "omniglot"

    def __post_init__(self) -> None:
        positive(self, "inner_lr")
        at_least(self, 1, "ways", "shots", "queries", "tasks", "inner_steps")
        at_least(self, 2, "test_tasks")
        at_least(self, 0, "clip")
        one_of("omniglot: split", self.split, ("characters", "alphabets"))

    def build(self, setting: Setting) -> Made:
        """Return the problem; the metric is the accuracy on test tasks."""
        characters = read(setting.folder)
        if self.split == "characters":
            split = by_characters(len(characters.images), setting.clients, setting.seed)
        else:
            split = by_alphabets(characters.alphabets)
        training, validation, test = (
            Episodes(characters, parts, self.ways, self.shots, self.queries)
            for parts in (split.training, split.validation, split.test)
        )
        problem = MAML(
            setting.network((1, 28, 28), self.ways),
            cross_entropy,
            inner_lr=self.inner_lr,
            first_order=self.first_order,
            clip=self.clip or None,
        )
        clients = OmniglotClients(training, self.tasks, seed=setting.seed, names=split.names)
        judge = FewShotTest(test, self.test_tasks, self.inner_steps)
        tune = FewShotTest(validation, max(2, self.test_tasks // 4), self.inner_steps, stream=1)
        return Made(problem, clients, "accuracy", judge, tune)
