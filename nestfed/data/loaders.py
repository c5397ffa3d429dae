"""Clients that read their examples one by one from a torch `Dataset`, with processes that decode ahead."""

from __future__ import annotations

import os
import random
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing import current_process
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, IterableDataset, default_collate

from nestfed.core import Clients, Data, NestfedError, whole
from nestfed.data.clients import Size, drawn_rows, size_at
from nestfed.data.random import Purpose, Streams

Task = tuple[int, int]
"""A client and an iteration."""


@runtime_checkable
class Items(Protocol):
    """A map-style dataset: a torch `Dataset` with a length, or any sequence."""

    def __len__(self) -> int:
        """Return the number of items."""

    def __getitem__(self, index: int) -> Any:
        """Return an item."""


@dataclass(frozen=True)
class Loaders(Clients):
    """Clients that hold one map-style torch `Dataset` each, for examples that do not fit in memory or are slow to decode.

    A batch has the rows that `Examples` would draw, read in this order and collated. Random numbers that a dataset takes
    from the generators of torch, numpy or `random`, such as augmentations, depend only on (seed, client, iteration), so
    batches are the same with any number of processes.

    datasets: one dataset per client, or `{name: dataset}`.
    collate_fn: turns a list of items into a batch of tensors; None = torch's `default_collate`.
    num_workers: processes that decode the batches of a round ahead of training. Only the process that trains starts them:
        with `execution.workers` above 1, each of those workers decodes the batches of its own clients.
    """

    datasets: Sequence[Any] | Mapping[str, Any]
    batch_size: Size = 32
    collate_fn: Callable[[list[Any]], Data] | None = None
    num_workers: int = field(default=0, kw_only=True)
    seed: int | None = field(default=None, kw_only=True)
    device: torch.device | None = field(default=None, kw_only=True)
    """Move batches there; None = leave them where the dataset put them."""

    def __post_init__(self) -> None:
        if isinstance(self.datasets, IterableDataset | DataLoader) or not isinstance(self.datasets, Mapping | Sequence):
            kind = type(self.datasets).__name__
            raise NestfedError(f"Loaders needs a list of datasets or a dict {{name: dataset}}, not one {kind}.")
        if not self.datasets:
            raise NestfedError("There are no clients: the list of datasets is empty.")
        if not callable(self.batch_size):
            whole("batch_size", self.batch_size)
        whole("num_workers", self.num_workers, 0)
        named = isinstance(self.datasets, Mapping)
        names = [str(name) for name in self.datasets] if named else [str(n) for n in range(len(self.datasets))]
        held = list(self.datasets.values()) if isinstance(self.datasets, Mapping) else list(self.datasets)
        for name, dataset in zip(names, held):
            _check(name, dataset)
        reader = _Reader(names, held, self.batch_size, self.collate_fn or default_collate, Streams(self.seed or 0))
        object.__setattr__(self, "_reader", reader)
        object.__setattr__(self, "_ahead", _Ahead(reader, self.num_workers))

    def __len__(self) -> int:
        return len(self.datasets)

    def label(self, n: int) -> str:
        """Return the client's name, or its number."""
        return self._reader.names[n]  # type: ignore[attr-defined]

    def examples(self, n: int) -> int:
        """Return the length of client n's dataset."""
        return len(self._reader.datasets[n])  # type: ignore[attr-defined]

    def seeded(self, seed: int) -> Self:
        """Return these clients with this seed, unless they already have one."""
        return self if self.seed is not None else replace(self, seed=seed)

    def to(self, device: torch.device) -> Self:
        """Return these clients with their batches on a device."""
        return replace(self, device=device)

    def sample(self, n: int, t: int) -> Data:
        """Return client n's batch at iteration t: the one decoded ahead, or read it now."""
        data = self._ahead.take((n, t))  # type: ignore[attr-defined]
        if data is None:
            data = self._reader.read(n, t)  # type: ignore[attr-defined]
        if self.device is None:
            return data
        return tree_map(lambda leaf: leaf.to(self.device), data)

    def prepare(self, tasks: Sequence[Task]) -> None:
        """Start to decode these batches."""
        self._ahead.start(list(tasks))  # type: ignore[attr-defined]

    def close(self) -> None:
        """End the decoding processes."""
        self._ahead.close()  # type: ignore[attr-defined]


def _check(name: str, dataset: Any) -> None:
    kind = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        raise NestfedError(f"Client {name} has a DataLoader: pass its dataset, because Loaders draws the batches.")
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Items):
        raise NestfedError(
            f"The dataset of client {name} ({kind}) has no length and random access, so its batches cannot be drawn by "
            "iteration: use a map-style Dataset with __len__ and __getitem__."
        )
    if len(dataset) == 0:
        raise NestfedError(f"Client {name} has no examples: its dataset ({kind}) is empty.")


@dataclass
class _Reader:
    """Reads a client's batch. It is a dataset whose items are batches, so a `DataLoader` can run it in processes."""

    names: list[str]
    datasets: list[Any]
    size: Size
    collate: Callable[[list[Any]], Data]
    streams: Streams

    def __getitem__(self, task: Task) -> Data | NestfedError:
        """Return a batch, or the error, because torch would wrap it in a traceback."""
        try:
            return self.read(*task)
        except NestfedError as error:
            return error

    def read(self, n: int, t: int) -> Data:
        """Draw rows, read them in order with keyed random numbers, and collate them."""
        dataset, name = self.datasets[n], self.names[n]
        rows = drawn_rows(self.streams, n, t, len(dataset), size_at(self.size, t))
        key = int(self.streams.at(Purpose.ITEMS, n, t).integers(2**63))
        where = ""
        with _seeded(key):
            try:
                items = []
                for row in rows.tolist():
                    where = f"item {row} of the dataset"
                    items.append(dataset[row])
                where = "collate_fn"
                data = self.collate(items)
            except Exception as error:
                reason = " ".join(str(error).split())
                raise NestfedError(f"Client {name}: {where} failed with {type(error).__name__}: {reason}") from error
        for leaf in tree_leaves(data):
            if not isinstance(leaf, Tensor):
                raise NestfedError(
                    f"The batch of client {name} contains {leaf!r}, which is not a tensor: pass a collate_fn that turns "
                    "items into tensors."
                )
        return data


@contextmanager
def _seeded(key: int) -> Iterator[None]:
    """Seed the generators of torch, numpy and `random`, and restore them afterwards."""
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        torch.default_generator.manual_seed(key)
        np.random.seed([key & 0xFFFFFFFF, key >> 32])
        random.seed(key)
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])


class _Ahead:
    """Batches that processes decode ahead, in the order of the tasks. It belongs to the process that started it."""

    def __init__(self, reader: _Reader, count: int) -> None:
        self.reader, self.count = reader, count
        self.owner = 0
        self.tasks: list[Task] = []
        self.waiting: set[Task] = set()
        self.ready: dict[Task, Data] = {}
        self.loader: DataLoader[Any] | None = None
        self.results: Iterator[Data | NestfedError] | None = None
        self.order: Iterator[Task] = iter(())

    def start(self, tasks: list[Task]) -> None:
        """Decode these batches; forget those that nobody took."""
        if not self.count or current_process().daemon:  # a worker of the engine cannot have processes of its own
            return
        if self.owner != os.getpid():
            self.loader, self.owner = None, os.getpid()
        self.tasks[:] = tasks
        self.waiting, self.ready, self.order = set(tasks), {}, iter(tasks)
        if self.loader is None:
            self.loader = DataLoader(
                self.reader,  # type: ignore[arg-type]
                batch_size=None,
                sampler=self.tasks,
                collate_fn=_unchanged,
                num_workers=self.count,
                persistent_workers=True,
                worker_init_fn=_ignore_interrupts,
                generator=torch.Generator(),  # else torch takes a seed for the workers from the global generator
                multiprocessing_context="fork" if hasattr(os, "fork") else None,
            )
        with warnings.catch_warnings():
            # Python warns about threads at a fork; these processes take no lock that another thread may hold.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.results = iter(self.loader)

    def take(self, task: Task) -> Data | None:
        """Return a batch and forget it, or None if it was not asked for."""
        if self.owner != os.getpid() or task not in self.waiting or self.results is None:
            return None
        while task not in self.ready:
            try:
                data = next(self.results)
            except RuntimeError as error:  # torch noticed that a process has died
                self.close()
                raise NestfedError(
                    f"A process that decodes batches died before that of client {self.reader.names[task[0]]} at iteration "
                    f"{task[1]} (possibly out of memory: use fewer num_workers)."
                ) from error
            if isinstance(data, NestfedError):
                self.close()
                raise data
            # A batch in shared memory keeps files open, one for each tensor.
            self.ready[next(self.order)] = tree_map(torch.clone, data)
        self.waiting.remove(task)
        return self.ready.pop(task)

    def close(self) -> None:
        """End the processes."""
        if self.owner == os.getpid():
            self.loader = self.results = None
            self.waiting, self.ready = set(), {}


def _unchanged(data: Data) -> Data:
    return data


def _ignore_interrupts(worker: int) -> None:
    """Leave Ctrl-C, which reaches the whole process group, to the process that trains."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
