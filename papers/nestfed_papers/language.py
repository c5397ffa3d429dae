"""Word-level language modelling: contiguous streams of text, truncated back-propagation, perplexity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nestfed.core import Clients, Data, NestfedError, at_least
from nestfed.data.sources import load
from nestfed.problems.base import Minimize, Model
from nestfed.problems.objective import Generated, Made, Setting

UNKNOWN = "<unk>"


@dataclass(frozen=True)
class Text:
    """Word numbers of the three parts of a text, and the words."""

    train: Tensor
    validation: Tensor
    test: Tensor
    words: tuple[str, ...]


def read(name: str = "wikitext-2", folder: str | Path | None = None, vocabulary: int = 0, limit: int = 0) -> Text:
    """Read a text; keep the `vocabulary` most frequent words (0: all) and the first `limit` training words (0: all).

    Rarer words become <unk>. A limit also cuts validation and test, to a tenth of it.
    """
    split = load(name, folder)
    if split.train.y.size or split.validation is None:
        raise NestfedError(f"language needs a text such as wikitext-2; {name} is not a text.")
    parts = [np.asarray(p.x, dtype=np.int64) for p in (split.train, split.validation, split.test)]
    if limit:
        parts = [part[:n] for part, n in zip(parts, (limit, limit // 10, limit // 10))]
    words = split.train.classes
    if vocabulary:
        parts, words = cut(parts, words, vocabulary)
    train, validation, test = map(torch.from_numpy, parts)
    return Text(train, validation, test, words)


def cut(parts: Sequence[np.ndarray], words: Sequence[str], size: int) -> tuple[list[np.ndarray], tuple[str, ...]]:
    """Keep the words that are most frequent in the first part, <unk> among them, and number them by frequency."""
    if UNKNOWN not in words:
        raise NestfedError(f"The text needs the word {UNKNOWN}, which replaces rare words.")
    if not 2 <= size <= len(words):
        raise NestfedError(f"problem.vocabulary must be 2 to {len(words)}, the words of the text, not {size}.")
    counts = np.bincount(parts[0], minlength=len(words))
    unknown = list(words).index(UNKNOWN)
    counts[unknown] = counts.max() + 1  # always kept
    kept = np.argsort(-counts, kind="stable")[:size]
    number = np.zeros(len(words), dtype=np.int64)  # <unk> is word 0
    number[kept] = np.arange(size)
    return [number[part] for part in parts], tuple(words[i] for i in kept)


def streams(tokens: Tensor, batch: int) -> Tensor:
    """Cut a text into `batch` contiguous streams of equal length: (length, batch)."""
    length = len(tokens) // batch
    return tokens[: length * batch].view(batch, length).t().contiguous()


@dataclass(frozen=True)
class TextClients(Clients):
    """Clients with contiguous parts of a text, each in `batch` streams that are read window by window.

    A batch is (context, inputs, targets), words in the shape (T, batch). Iteration t reads window t of the client's
    streams and starts over after the last one. A method is a pure function of its batch, so the hidden state is not
    stored between steps: it would belong to older parameters, differ between engines and be lost on resume. Instead, the
    batch contains the previous window as `context`, on which the current model warms up without gradient. This costs one
    more forward pass and limits the memory to one window. The first window has no context.
    """

    text: Tensor
    clients: int = 16
    batch: int = 20
    bptt: int = 35
    seed: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("clients", "batch", "bptt"):
            if getattr(self, name) < 1:
                raise NestfedError(f"language: {name} must be at least 1, not {getattr(self, name)}.")
        share = len(self.text) // self.clients
        held = torch.stack([streams(self.text[n * share : (n + 1) * share], self.batch) for n in range(self.clients)])
        if held.shape[1] <= self.bptt:
            raise NestfedError(
                f"language: {len(self.text)} words are too few for {self.clients} clients, batches of {self.batch} "
                f"and windows of {self.bptt}."
            )
        object.__setattr__(self, "_streams", held)

    @property
    def windows(self) -> int:
        """The number of windows in one pass over the text; words that do not fill a window are left out."""
        return (self._streams.shape[1] - 1) // self.bptt  # type: ignore[attr-defined]

    def __len__(self) -> int:
        return self.clients

    def to(self, device: torch.device) -> Self:
        """Return these clients with their text on a device."""
        return replace(self, text=self.text.to(device))

    def sample(self, n: int, t: int) -> Data:
        """Return client n's window at iteration t."""
        return tuple(leaf[0] for leaf in self.draw([n], range(t, t + 1))[0])

    def draw(self, ns: Sequence[int], ts: range) -> list[Data]:
        """Draw for several clients and iterations at once."""
        held: Tensor = self._streams[list(ns)]  # type: ignore[attr-defined]
        found = []
        for t in ts:
            start = t % self.windows * self.bptt
            stop = start + self.bptt
            before = max(start - self.bptt, 0)
            found.append((held[:, before:start], held[:, start:stop], held[:, start + 1 : stop + 1]))
        return found


def next_word(model: Model, batch: Data) -> Tensor:
    """Return the mean cross-entropy of the next word, the hidden state warmed up on the context."""
    context, inputs, targets = batch
    hidden = None
    if len(context):
        with torch.no_grad():
            hidden = model(context)[1]
        hidden = (hidden[0].detach(), hidden[1].detach())
    logits, _ = model(inputs, hidden)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Language(Minimize):
    """The next word's cross-entropy, with the gradient's norm clipped (0.25 in the FAFED paper).

    Costs count the words that are predicted; the forward pass on the context is not counted.
    """

    def __init__(self, model: nn.Module, *, clip: float | None = 0.25) -> None:
        super().__init__(next_word, model, clip=clip)

    def examples(self, data: Data) -> int:
        """Count the words that are predicted."""
        return int(data[2].numel())


def word_loss(model: Any, text: Tensor, bptt: int = 35, batch: int = 10) -> float:
    """Return the mean cross-entropy per word, with the hidden state carried through the whole text."""
    rows = streams(text, batch)
    if len(rows) < 2:
        raise NestfedError(f"A text in {batch} streams needs at least {2 * batch} words, not {len(text)}.")
    total, hidden = 0.0, None
    for start in range(0, len(rows) - 1, bptt):
        targets = rows[start + 1 : start + 1 + bptt]
        with torch.no_grad():
            logits, hidden = model(rows[start : start + len(targets)], hidden)
        total += float(F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"))
    return total / (rows.numel() - batch)


@dataclass(frozen=True)
class LanguageOptions(Generated):
    """Options of language: predict the next word of a text."""

    batch: int = 32
    """Streams of a client that are read in parallel."""
    bptt: int = 35
    """Words in a window, through which gradients flow."""
    vocabulary: int = 0
    """Keep this many of the most frequent words; 0 = all."""
    clip: float = 0.0
    """The largest norm of a gradient; 0 = no clipping."""

    name = "language"

    def __post_init__(self) -> None:
        at_least(self, 1, "batch", "bptt")
        at_least(self, 0, "vocabulary", "clip")

    def build(self, setting: Setting) -> Made:
        """Return the problem; the metric is the mean log-likelihood of a word, minus the logarithm of the perplexity."""
        text = read(setting.dataset, setting.folder, self.vocabulary, setting.limit)
        problem = Language(setting.network(None, len(text.words)), clip=self.clip or None)
        clients = TextClients(text.train, setting.clients, self.batch, self.bptt)

        def judge(model: Any, part: Tensor) -> dict[str, float]:
            loss = word_loss(model, part.to(setting.device), self.bptt)
            return {"log_likelihood": -loss, "perplexity": math.exp(loss) if loss < 700 else math.inf}

        return Made(
            problem, clients, "log_likelihood", partial(judge, part=text.test), partial(judge, part=text.validation)
        )
