"""Split the rows of a dataset over clients.

A partition is a list with one array of row numbers per client: int64, in increasing order. Every function is pure:
the same arguments and ``seed`` give the same partition on every machine, and numpy's global generator is not used.
Labels may be numbers or text; a class is a distinct label.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nestfed.core import NestfedError, whole

Indices = npt.NDArray[np.int64]

# ------------------------------------------------------------------------------- over a number of clients


def even(n: int, clients: int, seed: int) -> list[Indices]:
    """Deal ``n`` rows to the clients at random; sizes differ by at most one."""
    n, clients = _clients(n, clients)
    owner = _generator(seed, "even").permutation(np.arange(n, dtype=np.int64) % clients)
    return _parts(owner, clients)


def similar(labels: npt.ArrayLike, clients: int, similarity: float, seed: int) -> list[Indices]:
    """Give each client a fraction ``similarity`` of its rows i.i.d., the rest from the rows sorted by label.

    This is the rule of SCAFFOLD (Karimireddy et al. 2020); FAFED uses 0.95. ⌊similarity·n + ½⌋ random rows are
    dealt evenly. The others are sorted by label and cut into consecutive pieces, the first for client 0. Sizes
    differ by at most one, and so do the i.i.d. shares. 1 is ``even``, 0 is fully sorted.
    """
    _, codes = _classes(labels)
    n, clients = _clients(len(codes), clients)
    if not 0 <= similarity <= 1:
        raise NestfedError(f"similar: similarity must be between 0 and 1, not {similarity}.")
    order = _generator(seed, "similar").permutation(n)
    drawn = _rounded(similarity * n)
    rest = order[drawn:]
    rest = rest[np.argsort(codes[rest], kind="stable")]
    owner = np.empty(n, dtype=np.int64)
    owner[order[:drawn]] = np.arange(drawn) % clients
    # Each client's final size minus its i.i.d. rows; never negative, because drawn ≤ n.
    room = _even_sizes(n, clients) - _even_sizes(drawn, clients)
    owner[rest] = np.repeat(np.arange(clients), room)
    return _parts(owner, clients)


def all_classes(labels: npt.ArrayLike, clients: int, seed: int) -> list[Indices]:
    """Give every client some of every class, in random unequal proportions (moderate heterogeneity).

    Each class is shuffled and cut at ``clients − 1`` distinct uniform positions. All splits that give everyone at
    least one example are equally likely; for large classes the shares are Dirichlet(1).
    """
    classes, codes = _classes(labels)
    n, clients = _clients(len(codes), clients)
    rng = _generator(seed, "all_classes")
    owner = np.empty(n, dtype=np.int64)
    for c, name in enumerate(classes):
        rows = rng.permutation(np.flatnonzero(codes == c))
        if len(rows) < clients:
            raise NestfedError(
                f"all_classes: class {name} has {len(rows)} examples, too few for {clients} clients to hold "
                f"one each; use at most {len(rows)} clients."
            )
        cuts = 1 + np.sort(rng.choice(len(rows) - 1, clients - 1, replace=False))
        owner[rows] = np.repeat(np.arange(clients), np.diff(cuts, prepend=0, append=len(rows)))
    return _parts(owner, clients)


def k_classes(labels: npt.ArrayLike, clients: int, k: int, seed: int) -> list[Indices]:
    """Give every client examples of exactly ``k`` classes; every class and every example is used.

    The ``clients·k`` places are assigned to classes in proportion to their sizes (d'Hondt, at least one each).
    Clients draw their classes at random. Each class is split evenly over its holders; leftover examples go to the
    smallest holders. If all classes have one size and ``clients·k`` is a multiple of their number, client sizes
    differ only by leftovers.
    """
    classes, codes = _classes(labels)
    n, clients = _clients(len(codes), clients)
    k = whole("k_classes: k", k, 1)
    sizes = np.bincount(codes)
    if k > len(classes):
        raise NestfedError(f"k_classes: k={k} classes per client, but the labels have only {len(classes)}.")
    if clients * k < len(classes):
        raise NestfedError(
            f"k_classes: {clients} clients with k={k} classes each cannot hold all {len(classes)} classes; "
            f"use k of at least {-(-len(classes) // clients)}."
        )
    if np.minimum(sizes, clients).sum() < clients * k:
        raise NestfedError(
            f"k_classes: the classes have too few examples (the smallest {sizes.min()}) for {clients} clients "
            f"to hold one of each of k={k} classes; use fewer clients or a smaller k."
        )
    rng = _generator(seed, "k_classes")
    holds = _draw_holders(_holders(sizes, clients, k), clients, k, rng)
    owner = np.empty(n, dtype=np.int64)
    load = np.zeros(clients, dtype=np.int64)
    for c in range(len(classes)):
        rows = rng.permutation(np.flatnonzero(codes == c))
        holders = rng.permutation(np.flatnonzero(holds[:, c]))
        holders = holders[np.argsort(load[holders], kind="stable")]  # the smallest client first
        share = _even_sizes(len(rows), len(holders))
        owner[rows] = np.repeat(holders, share)
        load[holders] += share
    return _parts(owner, clients)


def _holders(sizes: Indices, clients: int, k: int) -> Indices:
    """Return the number of clients that hold each class: d'Hondt's division of ``clients·k`` places."""
    most = np.minimum(sizes, clients)
    places = np.ones_like(sizes)
    for _ in range(clients * k - len(sizes)):
        places[np.argmax(np.where(places < most, sizes / places, -1.0))] += 1
    return places


def _draw_holders(places: Indices, clients: int, k: int, rng: np.random.Generator) -> npt.NDArray[np.bool_]:
    """Draw a clients × classes table with ``k`` entries in each row and ``places[c]`` in column c.

    A client must take a class whose remaining places equal the remaining clients; it draws the rest at random.
    No class has more places than remaining clients, and k places remain per remaining client, so the draw never
    reaches a dead end.
    """
    left = places.copy()
    holds = np.zeros((clients, len(places)), dtype=np.bool_)
    for i in range(clients):
        forced = np.flatnonzero(left == clients - i)
        free = np.flatnonzero((left > 0) & (left < clients - i))
        wanted = k - len(forced)
        chosen = rng.choice(free, wanted, replace=False, p=left[free] / left[free].sum()) if wanted else free[:0]
        holds[i, forced] = holds[i, chosen] = True
        left -= holds[i]
    return holds


def dirichlet(labels: npt.ArrayLike, clients: int, alpha: float, seed: int, minimum: int = 1) -> list[Indices]:
    """Split each class over the clients in proportions drawn from Dirichlet(``alpha``, …, ``alpha``).

    Small ``alpha`` means few clients per class, large ``alpha`` an even split. A client with fewer than
    ``minimum`` rows takes single random rows from the currently largest client. Unlike redrawing, this terminates
    for every ``alpha`` and moves the fewest rows.
    """
    classes, codes = _classes(labels)
    n, clients = _clients(len(codes), clients)
    minimum = whole("dirichlet: minimum", minimum, 1)
    if not 1e-6 <= alpha <= 1e6:
        raise NestfedError(f"dirichlet: alpha must be between 1e-6 and 1e6, not {alpha}.")
    if n < clients * minimum:
        raise NestfedError(
            f"dirichlet: {n} rows are too few for {clients} clients with at least {minimum} each; "
            f"lower minimum or clients."
        )
    rng = _generator(seed, "dirichlet")
    owner = np.empty(n, dtype=np.int64)
    for c in range(len(classes)):
        rows = rng.permutation(np.flatnonzero(codes == c))
        counts = rng.multinomial(len(rows), rng.dirichlet(np.full(clients, float(alpha))))
        owner[rows] = np.repeat(np.arange(clients), counts)
    sizes = np.bincount(owner, minlength=clients)
    while sizes.min() < minimum:
        taker, giver = sizes.argmin(), sizes.argmax()
        owner[rng.choice(np.flatnonzero(owner == giver))] = taker
        sizes[taker] += 1
        sizes[giver] -= 1
    return _parts(owner, clients)


# ------------------------------------------------------------------------------- by something in the data


def by_column(
    values: Iterable[Any], smallest: int = 1, fallback: Iterable[Any] | None = None
) -> tuple[list[Indices], list[str]]:
    """Make one client per value of a column (hospital, region, alphabet); also return the clients' names.

    Clients are sorted by value: as numbers if all are numbers, otherwise as text. Rows without a value (None, NaN,
    empty) come last as "missing". Groups of fewer than ``smallest`` rows are merged: first by ``fallback``, a
    coarser column such as the region, into "small: <its value>"; then all that are still too small into
    "small: rest". If that group has fewer than ``smallest`` rows, the smallest merged group joins it; if there is
    none, the call fails.
    """
    names, codes = _values(values)
    smallest = whole("by_column: smallest", smallest, 1)
    small = np.bincount(codes)[codes] < smallest
    clients = [(name, codes == c) for c, name in enumerate(names) if (codes == c).sum() >= smallest]
    if fallback is not None:
        coarse, regions = _values(fallback)
        if len(regions) != len(codes):
            raise NestfedError(
                f"by_column: values has {len(codes)} rows and fallback {len(regions)}; they must be equal."
            )
        for c, name in enumerate(coarse):
            rows = small & (regions == c)
            if rows.sum() >= smallest:
                clients.append((f"small: {name}", rows))
                small = small & ~rows
    merged = [i for i, (name, _) in enumerate(clients) if name.startswith("small: ")]
    if 0 < small.sum() < smallest and merged:
        small = small | clients.pop(min(merged, key=lambda i: int(clients[i][1].sum())))[1]
    if 0 < small.sum() < smallest:
        raise NestfedError(
            f"by_column: the groups below smallest={smallest} have only {small.sum()} rows together; "
            f"use smallest={small.sum()} or less, or leave these rows out."
        )
    if small.any():
        clients.append(("small: rest", small))
    return [np.flatnonzero(rows).astype(np.int64) for _, rows in clients], [name for name, _ in clients]


def _values(values: Iterable[Any]) -> tuple[list[str], Indices]:
    """Return the distinct values of a column in order, as text, and each row's index among them."""
    text = [_text(v) for v in values]
    if not text:
        raise NestfedError("The column has no rows; give one value per example.")
    present = sorted({t for t in text if t != "missing"})
    with suppress(ValueError):  # not all are numbers: keep the order of text
        present = sorted(present, key=float)
    names = present + ["missing"] * ("missing" in text)
    place = {name: i for i, name in enumerate(names)}
    return names, np.array([place[t] for t in text], dtype=np.int64)


def _text(value: Any) -> str:
    # A column of whole numbers with a gap arrives from pandas as floats: 73.0 is hospital 73.
    text = str(int(value)) if isinstance(value, float) and value.is_integer() else str(value).strip()
    return "missing" if text in {"", "nan", "NaN", "None", "<NA>", "NaT"} else text


# --------------------------------------------------------------------------- imbalance and held-out rows


def binary(labels: npt.ArrayLike, positive: Iterable[Any] | None = None) -> Indices:
    """Turn classes into 0/1 labels: 1 for the classes in ``positive``, by default the second half.

    The default splits the sorted classes in half; the middle one of an odd number is positive.
    """
    classes, codes = _classes(labels)
    chosen = classes[len(classes) // 2 :] if positive is None else np.unique(np.asarray(list(positive)))
    unknown = [c for c in chosen.tolist() if c not in classes.tolist()]
    if unknown:
        raise NestfedError(f"binary: positive class {unknown[0]} is not among the labels {_some(classes)}.")
    if not 0 < len(chosen) < len(classes):
        raise NestfedError(
            f"binary: {len(chosen)} of {len(classes)} classes are positive; both labels need at least one."
        )
    return np.isin(classes, chosen)[codes].astype(np.int64)


def remove(labels01: npt.ArrayLike, side: int, fraction: float, seed: int) -> Indices:
    """Return the rows kept when a random ``fraction`` of the examples labelled ``side`` (0 or 1) is removed.

    Exactly ⌊fraction·count + ½⌋ of them are removed. The papers remove 0.8 of one label, from the training set only.
    """
    classes, codes = _classes(labels01)
    if not np.isin(classes, [0, 1]).all():
        raise NestfedError(f"remove: labels must be 0 and 1, not {_some(classes)}; see binary().")
    if side not in (0, 1):
        raise NestfedError(f"remove: side must be 0 or 1, the label to thin out, not {side!r}.")
    if not 0 <= fraction < 1:
        raise NestfedError(f"remove: fraction must be at least 0 and below 1, not {fraction}.")
    rows = np.flatnonzero(classes[codes] == side)
    gone = _rounded(fraction * len(rows))
    if gone == len(rows):
        raise NestfedError(
            f"remove: fraction {fraction} of {len(rows)} examples labelled {side} leaves none; use a smaller one."
        )
    keep = np.ones(len(codes), dtype=np.bool_)
    keep[_generator(seed, "remove").choice(rows, gone, replace=False)] = False
    return np.flatnonzero(keep).astype(np.int64)


def hold_out(
    n: int,
    fraction: float,
    seed: int,
    *,
    groups: Iterable[Any] | None = None,
    labels: npt.ArrayLike | None = None,
) -> tuple[Indices, Indices]:
    """Split rows 0 … n−1 at random into (train, held), both in increasing order.

    By default ⌊fraction·n + ½⌋ rows are held out. Neither side is ever empty.

    labels: stratify: the same number of rows, and ``fraction`` of each class rounded up or down (largest remainder).
    groups: hold out whole groups, such as patients, in random order, up to the row count nearest to ``fraction·n``.
    """
    n = whole("hold_out: n", n, 2)
    if not 0 < fraction < 1:
        raise NestfedError(f"hold_out: fraction must be strictly between 0 and 1, not {fraction}.")
    if groups is not None and labels is not None:
        raise NestfedError("hold_out: give groups or labels, not both; whole groups cannot also be stratified.")
    rng = _generator(seed, "hold_out")
    if groups is not None:
        held = _whole_groups(n, fraction, _values(groups)[1], rng)
    else:
        codes = np.zeros(n, dtype=np.int64) if labels is None else _classes(labels)[1]
        held = _stratified(n, fraction, codes, rng)
    return np.flatnonzero(~held).astype(np.int64), np.flatnonzero(held).astype(np.int64)


def _stratified(n: int, fraction: float, codes: Indices, rng: np.random.Generator) -> npt.NDArray[np.bool_]:
    _same_length("hold_out: labels", len(codes), n)
    total = _rounded(fraction * n)
    if not 0 < total < n:
        raise NestfedError(f"hold_out: fraction {fraction} of {n} rows leaves one side empty; use one closer to 0.5.")
    wanted = np.bincount(codes) * fraction
    counts = np.floor(wanted + 1e-9).astype(np.int64)  # 0.3 * 10 is just below 3 in floating point
    behind = rng.permutation(len(counts))  # break ties between remainders at random
    behind = behind[np.argsort((counts - wanted)[behind], kind="stable")]
    counts[behind[: total - counts.sum()]] += 1
    held = np.zeros(n, dtype=np.bool_)
    for c, count in enumerate(counts):
        held[rng.choice(np.flatnonzero(codes == c), count, replace=False)] = True
    return held


def _whole_groups(n: int, fraction: float, codes: Indices, rng: np.random.Generator) -> npt.NDArray[np.bool_]:
    _same_length("hold_out: groups", len(codes), n)
    order = rng.permutation(codes.max() + 1)
    if len(order) < 2:
        raise NestfedError("hold_out: all rows belong to one group; holding one out needs at least two.")
    rows = np.cumsum(np.bincount(codes)[order])[:-1]  # held rows after 1, 2, … groups; never all of them
    return np.isin(codes, order[: 1 + int(np.abs(rows - fraction * n).argmin())])


# ----------------------------------------------------------------------------------------------- summary


@dataclass(frozen=True, eq=False)
class Summary:
    """The classes at each client: ``counts[i, c]`` examples of class ``classes[c]`` at client ``names[i]``."""

    counts: Indices
    classes: tuple[str, ...]
    names: tuple[str, ...]

    @property
    def sizes(self) -> Indices:
        """The number of examples of each client."""
        sizes: Indices = self.counts.sum(axis=1)
        return sizes

    def __str__(self) -> str:
        rows = [("client", *self.classes, "all")]
        rows += [(name, *map(str, r), str(sum(r))) for name, r in zip(self.names, self.counts.tolist())]
        total = self.counts.sum(axis=0).tolist()
        rows.append(("all", *map(str, total), str(sum(total))))
        widths = [max(map(len, column)) for column in zip(*rows)]
        return "\n".join(
            "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:]))])
            for row in rows
        )


def summary(parts: Sequence[npt.ArrayLike], labels: npt.ArrayLike, names: Sequence[str] | None = None) -> Summary:
    """Count the examples of each class at each client; ``str()`` of the result is a table."""
    classes, codes = _classes(labels)
    rows = [np.asarray(part, dtype=np.int64) for part in parts]
    if not rows:
        raise NestfedError("summary: there are no clients; give one array of rows per client.")
    for i, r in enumerate(rows):
        if len(r) and not 0 <= r.min() <= r.max() < len(codes):
            raise NestfedError(f"summary: client {i} holds rows beyond the {len(codes)} that have a label.")
    if names is None:
        names = [str(i) for i in range(len(rows))]
    _same_length("summary: names", len(names), len(rows))
    counts = np.stack([np.bincount(codes[r], minlength=len(classes)) for r in rows])
    return Summary(counts, tuple(map(str, classes.tolist())), tuple(names))


# ------------------------------------------------------------------------------------------ small helpers


def _generator(seed: int, purpose: str) -> np.random.Generator:
    # The purpose is part of the key, so that one seed gives different permutations for hold-out and partition.
    key = np.random.SeedSequence([whole("seed", seed, 0), zlib.crc32(purpose.encode())])
    return np.random.Generator(np.random.Philox(key))


def _parts(owner: Indices, clients: int) -> list[Indices]:
    """Turn "row → client" into one increasing array of rows per client."""
    order = np.argsort(owner, kind="stable").astype(np.int64)
    return np.split(order, np.cumsum(np.bincount(owner, minlength=clients))[:-1])


def _even_sizes(n: int, clients: int) -> Indices:
    return n // clients + (np.arange(clients, dtype=np.int64) < n % clients)


def _rounded(x: float) -> int:
    """Round half up; Python's ``round`` rounds half to even."""
    return int(np.floor(x + 0.5))


def _classes(labels: npt.ArrayLike) -> tuple[npt.NDArray[Any], Indices]:
    array = np.asarray(labels)
    if array.ndim != 1 or not len(array):
        raise NestfedError(f"Labels must be one value per row, not an array of shape {array.shape}.")
    if array.dtype.kind not in "biufU":
        array = np.array([str(v) for v in array])  # text from pandas arrives as objects
    if array.dtype.kind == "f" and np.isnan(array).any():
        raise NestfedError(f"{int(np.isnan(array).sum())} labels are missing (NaN); leave these rows out first.")
    classes, codes = np.unique(array, return_inverse=True)
    return classes, codes.astype(np.int64)


def _clients(n: int, clients: int) -> tuple[int, int]:
    n, clients = whole("The number of rows", n, 1), whole("The number of clients", clients, 1)
    if n < clients:
        raise NestfedError(f"{n} rows cannot be split over {clients} clients; every client needs at least one.")
    return n, clients


def _same_length(what: str, found: int, expected: int) -> None:
    if found != expected:
        raise NestfedError(f"{what} has {found} entries where {expected} are needed.")


def _some(classes: npt.NDArray[Any]) -> str:
    shown = ", ".join(map(str, classes[:10].tolist()))
    return shown + (", …" if len(classes) > 10 else "")
