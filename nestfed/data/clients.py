"""Clients: which examples each holds, and the batch that each draws at each iteration."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from nestfed.core import Clients, Data, NestfedError, as_clients, one_of, whole
from nestfed.data.random import Purpose, Streams

Size = int | Callable[[int], int]
"""A batch size: a number, or a function of the iteration (such as a large first batch)."""


def size_at(size: Size, t: int) -> int:
    """Return a batch size at iteration t."""
    return whole("A batch size", size(t) if callable(size) else size)


def every(period: int, large: int, small: int) -> Callable[[int], int]:
    """Return a large batch size every `period` iterations, as BSpiderBoost requires."""
    return lambda t: large if t % period == 0 else small


def without_replacement(generator: np.random.Generator, n: int, size: int) -> np.ndarray:
    """Draw `size` of n positions, without repetition if size ≤ n."""
    if size > n:
        return generator.integers(n, size=size)
    return generator.choice(n, size, replace=False, shuffle=False)


def drawn_rows(streams: Streams, n: int, t: int, held: int, size: int) -> np.ndarray:
    """Draw client n's batch at iteration t: `size` positions among the `held` examples of the client."""
    return without_replacement(streams.at(Purpose.BATCH, n, t), held, size)


def mean_rate(y: Tensor, parts: Sequence[np.ndarray]) -> float:
    """Return the mean over clients of their share of positives.

    Every client has weight 1/N, whatever its size, so this is Pr(y=1) in the clients' mean objective; the share in
    all rows together is not. A client sends two counts for it.
    """
    return fmean(float((y[part] == 1).double().mean()) for part in parts)


def as_tensor(array: Any) -> Tensor:
    """Return an array of numbers, or a table or column of pandas, as a tensor."""
    try:
        return torch.as_tensor(array.to_numpy(copy=True) if hasattr(array, "to_numpy") else array)
    except (TypeError, ValueError, RuntimeError) as error:
        raise NestfedError(
            f"Clients hold arrays of numbers, but got {type(array).__name__}: {str(error).splitlines()[0]}"
        ) from error


@dataclass(frozen=True)
class _Held(Clients):
    """Clients that hold parts of common arrays: draw indices, gather the rows, assemble a batch."""

    arrays: tuple[Tensor, ...]
    parts: Sequence[np.ndarray]
    seed: int | None = field(default=None, kw_only=True)
    transform: Callable[[Tensor], Tensor] | None = field(default=None, kw_only=True)
    names: Sequence[str] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "arrays", tuple(as_tensor(a) for a in self.arrays))
        sizes = {len(a) for a in self.arrays}
        if len(sizes) != 1:
            raise NestfedError(f"All arrays must hold the same examples, but their lengths are {sorted(sizes)}.")
        (total,) = sizes
        if len(self.parts) == 0:
            raise NestfedError("There are no clients: the partition is empty.")
        object.__setattr__(self, "parts", [np.asarray(part) for part in self.parts])
        for n, part in enumerate(self.parts):
            if part.size == 0:
                raise NestfedError(f"Client {self.label(n)} has no examples.")
            if part.ndim != 1 or part.dtype.kind not in "iu":
                raise NestfedError(
                    f"The part of client {self.label(n)} must be a list of row numbers, not {part!r:.60}."
                )
            if part.min() < 0 or part.max() >= total:
                raise NestfedError(f"Client {self.label(n)} has an index outside 0…{total - 1}.")
        object.__setattr__(self, "_streams", Streams(self.seed or 0))

    @classmethod
    def of(cls, sites: Mapping[str, Sequence[Any]], **options: Any) -> Self:
        """Make clients from each site's arrays, by name: `Examples.of({"a": (x1, y1), "b": (x2, y2)}, batch=8)`."""
        columns = [tuple(as_tensor(array) for array in arrays) for arrays in sites.values()]
        for name, held in zip(sites, columns):
            if len(held) != len(columns[0]):
                raise NestfedError(f"Site {name} has {len(held)} arrays, but others have {len(columns[0])}.")
            if len({len(a) for a in held}) != 1:
                raise NestfedError(f"The arrays of site {name} have different lengths: {[len(a) for a in held]}.")
        ends = np.cumsum([0, *(len(held[0]) for held in columns)])
        parts = [np.arange(start, end) for start, end in pairwise(ends)]
        return cls(tuple(torch.cat(same) for same in zip(*columns)), parts, names=list(sites), **options)

    def label(self, n: int) -> str:
        """Return the client's name, or its number."""
        return self.names[n] if self.names else str(n)

    def __len__(self) -> int:
        return len(self.parts)

    def examples(self, n: int) -> int:
        """Return the number of client n's examples."""
        return len(self.parts[n])

    def seeded(self, seed: int) -> Self:
        """Return these clients with this seed, unless they already have one."""
        return self if self.seed is not None else replace(self, seed=seed)

    def to(self, device: torch.device) -> Self:
        """Return these clients with their examples on a device."""
        return replace(self, arrays=tuple(a.to(device) for a in self.arrays))

    @abstractmethod
    def indices(self, n: int, t: int) -> np.ndarray:
        """Return the examples that client n uses at iteration t."""

    @abstractmethod
    def assemble(self, gathered: tuple[Tensor, ...], ns: Sequence[int], t: int, rows: np.ndarray) -> Data:
        """Turn gathered examples, leading axes (clients, examples), into a batch whose first axis is `clients`.

        rows: the positions of these examples in the arrays, (clients, examples).
        """

    def sample(self, n: int, t: int) -> Data:
        """Return client n's batch at iteration t."""
        return tree_map(lambda leaf: leaf[0], self.draw([n], range(t, t + 1))[0])

    def draw(self, ns: Sequence[int], ts: range) -> list[Data]:
        """Draw and gather the batches of several clients and iterations at once."""
        chosen = [np.stack([self.indices(n, t) for n in ns]) for t in ts]
        flat = torch.from_numpy(np.concatenate([c.ravel() for c in chosen]))
        gathered = tuple(a.index_select(0, flat.to(a.device)) for a in self.arrays)
        if self.transform is not None:
            gathered = (self.transform(gathered[0]), *gathered[1:])
        sizes = [c.size for c in chosen]
        pieces = zip(*(torch.split(g, sizes) for g in gathered))
        return [
            self.assemble(tuple(p.view(*c.shape, *p.shape[1:]) for p in piece), ns, t, c)
            for piece, c, t in zip(pieces, chosen, ts)
        ]


@dataclass(frozen=True)
class Paced(Clients):
    """Clients of different speed: client n takes `pace(n, t, q)` of the q local steps of the round that begins at t.

    `Paced(clients, lambda n, t, q: max(1, q // (n + 1)))`. Plain averaging then favours the fast clients; FedNova does
    not.
    """

    clients: Clients
    pace: Callable[[int, int, int], int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "clients", as_clients(self.clients))

    @property
    def alike(self) -> bool:  # type: ignore[override]  # that of the clients
        """Whether the clients' batches have the same shape."""
        return self.clients.alike

    def __len__(self) -> int:
        return len(self.clients)

    def sample(self, n: int, t: int) -> Data:
        """Return client n's batch at iteration t."""
        return self.clients.sample(n, t)

    def steps(self, n: int, t: int, q: int) -> int:
        """Return client n's number of steps in the round that begins at t."""
        return self.pace(n, t, q)

    def seeded(self, seed: int) -> Self:
        """Return these clients with the seed of a run."""
        return replace(self, clients=self.clients.seeded(seed))

    def to(self, device: torch.device) -> Self:
        """Return these clients with their data on a device."""
        return replace(self, clients=self.clients.to(device))

    def label(self, n: int) -> str:
        """Return client n's name."""
        return self.clients.label(n)

    def examples(self, n: int) -> int:
        """Return the number of client n's training rows."""
        return self.clients.examples(n)

    def draw(self, ns: Sequence[int], ts: range) -> list[Data]:
        """Return the batches of several clients and iterations."""
        return self.clients.draw(ns, ts)

    def prepare(self, tasks: Sequence[tuple[int, int]]) -> None:
        """Let the clients get ready."""
        self.clients.prepare(tasks)

    def close(self) -> None:
        """Release what the clients hold."""
        self.clients.close()


def _reject_other_labels(clients: _Held) -> None:
    """Reject labels other than 0 and 1."""
    found = [v for v in clients.arrays[1].unique().tolist() if v not in (0, 1)]
    if found:
        raise NestfedError(f"{type(clients).__name__} needs labels 0 and 1, not {found[0]:g}.")


@dataclass(frozen=True)
class Examples(_Held):
    """Clients that draw plain batches: a tuple of the arrays' rows, without replacement within a batch.

    A client with fewer examples than the batch draws with replacement.
    """

    batch: Size = field(default=32, kw_only=True)

    def indices(self, n: int, t: int) -> np.ndarray:
        """Draw a batch."""
        part = self.parts[n]
        return part[drawn_rows(self._streams, n, t, len(part), size_at(self.batch, t))]  # type: ignore[attr-defined]

    def assemble(self, gathered: tuple[Tensor, ...], ns: Sequence[int], t: int, rows: np.ndarray) -> Data:
        """Return the arrays unchanged."""
        return gathered


@dataclass(frozen=True)
class Balanced(_Held):
    """Clients for AUROC: batches (x, y, weight), half positives and half negatives, from arrays (x, y), y in {0, 1}.

    Let p_n be the client's share of positives, p the mean over clients, and k of b examples positive. A positive has
    weight (p_n/2p)·b/k and a negative ((1−p_n)/2(1−p))·b/(b−k). In the mean over clients, positives and negatives then
    count as in plain batches. A client of one class draws from that class.

    p: the mean share; None = computed from the rows of all clients.
    """

    batch: Size = field(default=32, kw_only=True)
    p: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        p = mean_rate(self.arrays[1], self.parts) if self.p is None else self.p
        _reject_other_labels(self)
        if not 0 < p < 1:
            raise NestfedError("Balanced needs positives and negatives: all examples are of one class.")
        labels = self.arrays[1].cpu().numpy()
        split = [(part[labels[part] == 1], part[labels[part] != 1]) for part in self.parts]
        rates = np.array([len(positives) / (len(positives) + len(rest)) for positives, rest in split])
        for name, value in (("_split", split), ("_rates", rates), ("_p", p)):
            object.__setattr__(self, name, value)

    def positives(self, n: int, t: int) -> int:
        """Return the number of positives in client n's batch at iteration t."""
        positives, negatives = self._split[n]  # type: ignore[attr-defined]
        size = size_at(self.batch, t)
        return 0 if not len(positives) else size // 2 if len(negatives) else size

    def indices(self, n: int, t: int) -> np.ndarray:
        """Draw positives, then negatives."""
        positives, negatives = self._split[n]  # type: ignore[attr-defined]
        k = self.positives(n, t)
        generator = self._streams.at(Purpose.BATCH, n, t)  # type: ignore[attr-defined]
        some = [
            rows[without_replacement(generator, len(rows), size)]
            for rows, size in ((positives, k), (negatives, size_at(self.batch, t) - k))
            if size
        ]
        return np.concatenate(some)

    def assemble(self, gathered: tuple[Tensor, ...], ns: Sequence[int], t: int, rows: np.ndarray) -> Data:
        """Add the weights."""
        x, y = gathered
        b, p = size_at(self.batch, t), self._p  # type: ignore[attr-defined]
        k, rate = np.array([self.positives(n, t) for n in ns]), self._rates[list(ns)]  # type: ignore[attr-defined]
        positive = rate / (2 * p) * b / np.maximum(k, 1)
        negative = (1 - rate) / (2 * (1 - p)) * b / np.maximum(b - k, 1)
        weight = np.where(np.arange(b) < k[:, None], positive[:, None], negative[:, None])
        return x, y, torch.from_numpy(weight).to(x.device, x.dtype if x.is_floating_point() else torch.float32)


@dataclass(frozen=True)
class _Ranked(_Held):
    """Clients that draw b of their positives as outer samples, each with a number, from arrays (x, y), y in {0, 1}."""

    outer: Size = field(default=8, kw_only=True)
    inner: int = field(default=24, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        labels = self.arrays[1].cpu().numpy()
        _reject_other_labels(self)
        split = [(part[labels[part] == 1], part[labels[part] == 0]) for part in self.parts]
        if not any(len(p) for p, _ in split):
            raise NestfedError("No client has a positive example: there is nothing to rank.")
        object.__setattr__(self, "_split", split)
        object.__setattr__(self, "_numbered", [np.unique(p if len(p) else q) for p, q in split])

    @property
    def outer_examples(self) -> int:
        """The largest number of positives on a client."""
        return max(len(p) for p, _ in self._split)  # type: ignore[attr-defined]

    def drawn(self, n: int, t: int, *strata: int) -> np.ndarray:
        """Draw outer positives, then these numbers of inner positives and inner negatives; fill an empty class by the other."""
        positives, negatives = self._split[n]  # type: ignore[attr-defined]
        streams: Streams = self._streams  # type: ignore[attr-defined]
        some, rest = (positives if len(positives) else negatives), (negatives if len(negatives) else positives)
        outer = some[without_replacement(streams.at(Purpose.BATCH, n, t), len(some), size_at(self.outer, t))]
        generator = streams.at(Purpose.INNER, n, t)
        inner = [own[without_replacement(generator, len(own), k)] for own, k in zip((some, rest), strata)]
        return np.concatenate([outer, *inner])

    def which(self, ns: Sequence[int], t: int, rows: np.ndarray) -> Tensor:
        """Return the numbers of the outer samples among each client's positives."""
        b = size_at(self.outer, t)
        # Without positives the outer examples are negatives, maybe more than a client has positives.
        numbers = [np.searchsorted(self._numbered[n], own[:b]) % self.outer_examples for n, own in zip(ns, rows)]  # type: ignore[attr-defined]
        return torch.from_numpy(np.stack(numbers)).to(self.arrays[0].device)


@dataclass(frozen=True)
class Pairs(_Ranked):
    """Clients for pairwise objectives such as AUPRC: b positives as outer samples, m examples as inner ones.

    The arrays are (x, y) with y in {0, 1}. A batch is (outer, inner, which) with outer = (x⁺, weight) and
    inner = (x, y, weight), leading axes (1, m): all outer samples share the same inner ones. The inner batch is
    stratified: `inner_positives` of m are positives, and the weights make its mean an unbiased estimate of the mean
    over the client's data. A client without positives has outer weights 0 and contributes no gradient. A client
    without negatives fills its inner batch with positives.

    The third part of a batch, `which`, numbers the b positives among the client's own, for methods with one state per
    positive (SOX): `AUPRC(model, outer_examples=clients.outer_examples)`.
    """

    inner_positives: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inner < 2:
            raise NestfedError(f"The inner batch needs at least 2 examples, not {self.inner}.")
        positives = self.inner // 2 if self.inner_positives is None else self.inner_positives
        if not 0 < positives < self.inner:
            raise NestfedError(f"inner_positives must be in 1…{self.inner - 1}, not {positives}.")
        rates = torch.tensor([len(p) / (len(p) + len(q)) for p, q in self._split], dtype=torch.float64)  # type: ignore[attr-defined]
        object.__setattr__(self, "_rates", rates)
        object.__setattr__(self, "_positives", positives)

    def indices(self, n: int, t: int) -> np.ndarray:
        """Draw outer positives, inner positives, inner negatives, in this order."""
        k = self._positives  # type: ignore[attr-defined]
        return self.drawn(n, t, k, self.inner - k)

    def assemble(self, gathered: tuple[Tensor, ...], ns: Sequence[int], t: int, rows: np.ndarray) -> Data:
        """Split the rows into outer and inner samples; weight the strata by each client's positive rate."""
        x, y = gathered
        b, k, m = size_at(self.outer, t), self._positives, self.inner  # type: ignore[attr-defined]
        kind = x.dtype if x.is_floating_point() else torch.get_default_dtype()
        rate = self._rates[list(ns)].to(x.device)  # type: ignore[attr-defined]
        present = (rate > 0).to(kind)
        inner = torch.cat(
            [(rate * m / k)[:, None].expand(-1, k), ((1 - rate) * m / (m - k))[:, None].expand(-1, m - k)], 1
        )
        outer = (x[:, :b], present[:, None].expand(-1, b))
        return outer, tuple(a[:, None] for a in (x[:, b:], y[:, b:].to(kind), inner.to(kind))), self.which(ns, t, rows)


@dataclass(frozen=True)
class Opposites(_Ranked):
    """Clients for `PartialAUROC`: b positives as outer samples, m negatives as inner ones.

    The arrays are (x, y) with y in {0, 1}. A batch is (outer, inner, which) with outer = (x⁺, weight) and inner = (x⁻,),
    leading axes (1, m): all outer samples share the same inner ones. A client of one class has outer weights 0 and
    contributes no gradient; all others have weights 1. `which` is that of `Pairs`.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("The number of inner negatives", self.inner)

    def indices(self, n: int, t: int) -> np.ndarray:
        """Draw outer positives, then negatives."""
        return self.drawn(n, t, 0, self.inner)

    def assemble(self, gathered: tuple[Tensor, ...], ns: Sequence[int], t: int, rows: np.ndarray) -> Data:
        """Split the rows into outer and inner samples."""
        x, b = gathered[0], size_at(self.outer, t)
        kind = x.dtype if x.is_floating_point() else torch.get_default_dtype()
        both = torch.tensor([all(map(len, self._split[n])) for n in ns], device=x.device).to(kind)  # type: ignore[attr-defined]
        return (x[:, :b], both[:, None].expand(-1, b)), (x[:, None, b:],), self.which(ns, t, rows)


@dataclass(frozen=True)
class Totals:
    """The rows of all clients together, from counts that clients may share."""

    clients: int
    positives: int
    rows: int


@dataclass(frozen=True)
class CrossPairs(_Held):
    """Clients for pairs across clients (`PairedAUROC`, `PairedAP`): `first` positives and `second` others a batch.

    The arrays are (x, y) with y in {0, 1}. S1 are the positives, S2 the negatives, or all rows with `everything`. A batch is
    ((x, number, weight), (x', y', weight')), no row twice. A client with fewer rows than a batch draws them all; rows
    with weight 0 fill the batch. `number` counts the client's own S1 rows.

    over: "rows" gives every row of all clients the same weight: a client's mean over Sⁿ counts p_n = N|Sⁿ|/|S|, and a
        client without rows in S has no such term. "clients" gives every client the same weight.
    totals: the rows of all clients, where only some are here; None = those of `parts`.
    """

    first: Size = field(default=8, kw_only=True)
    second: Size = field(default=8, kw_only=True)
    everything: bool = field(default=False, kw_only=True)
    over: str = field(default="rows", kw_only=True)
    totals: Totals | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("over", self.over, ("rows", "clients"))
        labels = self.arrays[1].cpu().numpy()
        if not np.isin(labels, (0, 1)).all():
            raise NestfedError("CrossPairs needs labels 0 and 1.")
        held = [(part[labels[part] == 1], part if self.everything else part[labels[part] == 0]) for part in self.parts]
        totals = self.totals or Totals(len(held), sum(len(s) for s, _ in held), sum(map(len, self.parts)))
        sizes = totals.positives, totals.rows if self.everything else totals.rows - totals.positives
        if not min(sizes):
            raise NestfedError("CrossPairs needs positives and negatives: all examples are of one class.")
        if self.over == "clients":
            for n, sides in enumerate(held):
                if not all(map(len, sides)):
                    what = "negative" if len(sides[0]) else "positive"
                    raise NestfedError(
                        f"Client {self.label(n)} has no {what} examples and would contribute nothing to the pool, so over = "
                        "'clients' would give the two halves of a pairwise direction different objectives: use over = 'rows'."
                    )
        shares = [
            [totals.clients * len(s) / size if self.over == "rows" else 1.0 for s, size in zip(sides, sizes)]
            for sides in held
        ]
        for name, value in (("_held", held), ("_shares", shares), ("_totals", (totals, sizes[1]))):
            object.__setattr__(self, name, value)

    @property
    def rows(self) -> int:
        """One more than the largest number of S1 rows of a client: what a problem with one state per S1 row needs."""
        return 1 + max(len(first) for first, _ in self._held)  # type: ignore[attr-defined]

    @property
    def others(self) -> int:
        """The most that one S2 row can count in a mean: what a problem that bounds ℓ/u by it needs."""
        totals, S2 = self._totals  # type: ignore[attr-defined]
        return S2 if self.over == "rows" else S2 * totals.clients

    def _positions(self, n: int, t: int) -> list[np.ndarray]:
        """Draw client n's rows of S1 and S2, as positions among its own."""
        streams: Streams = self._streams  # type: ignore[attr-defined]
        return [
            without_replacement(streams.at(purpose, n, t), len(own), min(size_at(size, t), len(own)))
            for purpose, own, size in zip((Purpose.BATCH, Purpose.INNER), self._held[n], (self.first, self.second))  # type: ignore[attr-defined]
        ]

    def indices(self, n: int, t: int) -> np.ndarray:
        """Draw S1 rows, then S2 rows; repeat any row to fill the batch."""
        filled = []
        for own, chosen, size in zip(self._held[n], self._positions(n, t), (self.first, self.second)):  # type: ignore[attr-defined]
            filled += [own[chosen], np.repeat(self.parts[n][:1], size_at(size, t) - len(chosen))]
        return np.concatenate(filled)

    def assemble(self, gathered: tuple[Tensor, ...], ns: Sequence[int], t: int, rows: np.ndarray) -> Data:
        """Add the numbers of the S1 rows, and the weights."""
        x, y = gathered
        kind = x.dtype if x.is_floating_point() else torch.get_default_dtype()
        sizes = size_at(self.first, t), size_at(self.second, t)
        numbers = np.full((len(ns), sizes[0]), self.rows - 1)
        weights = [np.zeros((len(ns), size)) for size in sizes]
        for i, n in enumerate(ns):
            chosen = self._positions(n, t)
            numbers[i, : len(chosen[0])] = chosen[0]
            for side in (0, 1):
                k = len(chosen[side])
                weights[side][i, :k] = self._shares[n][side] * sizes[side] / max(k, 1)  # type: ignore[attr-defined]
        first, second = (torch.from_numpy(w).to(x.device, kind) for w in weights)
        b = sizes[0]
        return (x[:, :b], torch.from_numpy(numbers).to(x.device), first), (x[:, b:], y[:, b:].to(kind), second)
