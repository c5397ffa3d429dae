"""`Loaders`: the rows of `Examples`, read from datasets; the same batches with any number of processes."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from nestfed import Examples, Exchange, Execution, FedAvg, Loaders, Minimize, Paced, simulate
from nestfed.core import NestfedError
from nestfed.testing import check_clients

SIZES = (30, 20, 5)
ARRAYS = {
    name: (torch.randn(size, 3, generator=torch.Generator().manual_seed(size)), torch.arange(size))
    for name, size in zip("abc", SIZES)
}
PROBLEM = Minimize(lambda x, batch: ((batch[0] @ x - batch[1] / 30) ** 2).mean(), torch.zeros(3))


def equal(a: Any, b: Any) -> bool:
    leaves, others = (torch.utils._pytree.tree_leaves(some) for some in (a, b))
    return len(leaves) == len(others) and all(torch.equal(x, y) for x, y in zip(leaves, others))


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """An item with random numbers from every global generator, and the process that made it."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        noise = torch.stack([torch.rand(()), torch.tensor(np.random.rand()).float(), torch.tensor(random.random())])
        return noise + i, torch.tensor(i)


class Who(Noisy):
    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(3), torch.tensor(os.getpid())


class Fails(Noisy):
    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        if i == 7:
            raise OSError("scan 7 is\nbroken")
        return torch.zeros(3), torch.tensor(i)


class Dies(Noisy):
    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        if multiprocessing.parent_process() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(3), torch.tensor(i)


def test_loaders_over_tensors_are_examples_bit_for_bit() -> None:
    examples = Examples.of(ARRAYS, batch=lambda t: 8 if t else 12)
    loaders = Loaders({k: TensorDataset(*v) for k, v in ARRAYS.items()}, lambda t: 8 if t else 12)
    assert [loaders.label(n) for n in range(3)] == list("abc")
    assert [loaders.examples(n) for n in range(3)] == list(SIZES)
    for n in range(3):
        for t in range(4):
            assert equal(examples.seeded(7).sample(n, t), loaders.seeded(7).sample(n, t))
    for exchange in (Exchange(), Exchange(count=2)):
        for execution in (Execution(mode="loop", workers=1), Execution(mode="vmap"), Execution(mode="loop", workers=2)):
            runs = [
                simulate(PROBLEM, FedAvg(eta=0.1), clients, rounds=3, q=2, exchange=exchange, execution=execution)
                for clients in (examples, loaders)
            ]
            assert torch.equal(runs[0].x, runs[1].x)


@pytest.mark.parametrize("mode", ["loop", "vmap"])
def test_batches_are_the_same_with_any_number_of_processes(mode: Any) -> None:
    torch.manual_seed(0)
    runs = []
    for decoding, training in ((0, 1), (1, 1), (3, 1), (0, 2), (2, 2)):
        torch.rand(decoding)  # global states do not matter
        random.random()
        clients = Loaders([Noisy(n) for n in SIZES], 4, num_workers=decoding)
        runs.append(
            simulate(PROBLEM, FedAvg(eta=0.01), clients, rounds=3, q=3, seed=5, exchange=Exchange(count=2),
                     execution=Execution(mode=mode, workers=training)).x
        )  # fmt: skip
    assert all(torch.equal(runs[0], x) for x in runs)
    assert not torch.equal(runs[0], torch.zeros(3))
    assert multiprocessing.active_children() == []


def test_random_transforms_depend_on_seed_client_and_iteration_only() -> None:
    check_clients(Loaders([Noisy(n) for n in SIZES], 4))
    clients = Loaders([Noisy(30), Noisy(30)], 4, seed=1)
    noises = [clients.sample(n, t)[0] - clients.sample(n, t)[1][:, None] for n, t in ((0, 0), (0, 1), (1, 0))]
    noises.append(Loaders([Noisy(30)], 4, seed=2).sample(0, 0)[0])
    for i in range(3):  # torch, numpy, random
        assert len({round(float(noise[0, i]), 4) for noise in noises}) == 4
        assert len({round(float(v), 4) for v in noises[0][:, i]}) == 4  # items differ
    check_clients(Loaders({k: TensorDataset(*v) for k, v in ARRAYS.items()}, 4, num_workers=2))


def test_processes_decode_ahead_and_end_with_the_run() -> None:
    clients = Loaders([Who(n) for n in SIZES], 4, num_workers=2, seed=0)
    clients.prepare([(n, t) for n in (0, 2) for t in range(3)])
    makers = {int(pid) for n in (0, 2) for t in range(3) for pid in clients.sample(n, t)[1]}
    assert makers == {p.pid for p in multiprocessing.active_children()}
    assert os.getpid() not in makers
    assert int(clients.sample(1, 0)[1][0]) == os.getpid()  # not asked for
    clients.prepare([(n, t) for n in (1, 2) for t in range(3, 9)])
    clients.sample(1, 4)
    clients.prepare([(1, 9)])  # the rest of the last round is forgotten, the processes stay
    assert int(clients.sample(1, 9)[1][0]) in makers
    assert int(clients.sample(2, 5)[1][0]) == os.getpid()
    clients.close()
    assert multiprocessing.active_children() == []
    clients.close()
    clients.prepare([(0, 0)])
    assert int(clients.sample(0, 0)[1][0]) not in makers | {os.getpid()}
    clients.close()


@pytest.mark.parametrize("mode", ["loop", "vmap"])
def test_clients_of_different_speed_decode_ahead_too(mode: Any) -> None:
    runs = []
    for decoding in (0, 2):
        clients = Paced(Loaders([Noisy(n) for n in SIZES], 4, num_workers=decoding), lambda n, t, q: q - n)
        runs.append(
            simulate(PROBLEM, FedAvg(eta=0.01), clients, rounds=2, q=3, execution=Execution(mode=mode, workers=1)).x
        )
    assert torch.equal(*runs)
    assert multiprocessing.active_children() == []


def test_many_batches_do_not_exhaust_open_files() -> None:
    program = """
import resource, torch
from torch.utils.data import TensorDataset
from nestfed import Loaders
resource.setrlimit(resource.RLIMIT_NOFILE, (80, 80))
clients = Loaders([TensorDataset(torch.arange(9.0), torch.arange(9))] * 100, 4, num_workers=1, seed=0)
clients.prepare([(n, 0) for n in range(100)])
print(len(clients.draw(range(100), range(1))[0][0]))
clients.close()
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert found.stdout == "100\n", found.stderr


@pytest.mark.parametrize("decoding", [0, 2])
@pytest.mark.parametrize("training", [1, 2])
def test_a_broken_item_names_client_and_item_and_leaves_no_process(decoding: int, training: int) -> None:
    clients = Loaders({"a": Noisy(9), "b": Fails(9)}, 3, num_workers=decoding)
    with pytest.raises(NestfedError) as error:
        simulate(PROBLEM, FedAvg(eta=0.1), clients, rounds=20, q=2, seed=3, execution=Execution(workers=training))
    assert str(error.value) == "Client b: item 7 of the dataset failed with OSError: scan 7 is broken"
    assert multiprocessing.active_children() == []


def test_a_process_that_dies_is_an_error() -> None:
    clients = Loaders([Dies(9)], 3, num_workers=1)
    with pytest.raises(NestfedError, match=r"decodes batches died before that of client 0 at iteration 0"):
        simulate(PROBLEM, FedAvg(eta=0.1), clients, rounds=1)
    assert multiprocessing.active_children() == []


def test_processes_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    program = f"""
import multiprocessing, time, torch
from pathlib import Path
from torch.utils.data import TensorDataset
from torch.utils.data._utils import worker
from nestfed import Loaders
worker.MP_STATUS_CHECK_INTERVAL = 0.2  # torch's 5 s between looks at the parent
clients = Loaders([TensorDataset(torch.arange(9.0))], 4, num_workers=2, seed=0)
clients.prepare([(0, t) for t in range(5)])
clients.sample(0, 0)
Path({str(tmp_path / "new")!r}).write_text(" ".join(str(p.pid) for p in multiprocessing.active_children()))
Path({str(tmp_path / "new")!r}).rename({str(tmp_path / "pids")!r})
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", program])
    deadline = time.monotonic() + 60
    while not (tmp_path / "pids").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    pids = [int(p) for p in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    parent.kill()
    parent.wait()
    while any(alive(p) for p in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(p) for p in pids)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state not in "ZX"


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        yield torch.zeros(3)


class Endless(Dataset[Tensor]):
    """Without a length."""

    def __getitem__(self, i: int) -> Tensor:
        return torch.zeros(3)


TENSORS = TensorDataset(torch.zeros(4, 3))


@pytest.mark.parametrize(
    ("datasets", "sentence"),
    [
        ({"a": TENSORS, "b": Stream()}, r"The dataset of client b \(Stream\) has no length .* use a map-style Dataset"),
        ([TENSORS, Endless()], r"The dataset of client 1 \(Endless\) has no length .* use a map-style Dataset"),
        ({"a": TensorDataset(torch.zeros(0, 3))}, r"Client a has no examples: its dataset \(TensorDataset\) is empty"),
        ([DataLoader(TENSORS)], "Client 0 has a DataLoader: pass its dataset"),
        (TENSORS, "a list of datasets or a dict .* not one TensorDataset"),
        (DataLoader(TENSORS), "a list of datasets or a dict .* not one DataLoader"),
        ([], "no clients"),
    ],
)
def test_datasets_that_cannot_be_drawn_from_are_rejected(datasets: Any, sentence: str) -> None:
    with pytest.raises(NestfedError, match=sentence):
        Loaders(datasets, 2)


def test_items_that_are_not_tensors_need_a_collate_function() -> None:
    texts = [("one sentence", 1), ("two", 0)]
    with pytest.raises(
        NestfedError, match=r"The batch of client a contains '.*', which is not a tensor: pass a collate"
    ):
        Loaders({"a": texts}, 2).sample(0, 0)
    with pytest.raises(NestfedError, match="Client a: collate_fn failed with TypeError"):
        Loaders({"a": [object(), object()]}, 2).sample(0, 0)

    def lengths(items: list[tuple[str, int]]) -> dict[str, Tensor]:
        return {"length": torch.tensor([len(text) for text, _ in items]), "y": torch.tensor([y for _, y in items])}

    batch = Loaders({"a": texts}, 2, lengths, seed=0).sample(0, 0)
    assert sorted(batch["length"].tolist()) == [3, 12]
    assert batch["length"][batch["y"] == 1] == 12


def test_sizes_and_counts_are_checked() -> None:
    for options in ({"batch_size": 0}, {"num_workers": -1}):
        with pytest.raises(NestfedError, match=next(iter(options))):
            Loaders([TENSORS], **options)  # type: ignore[arg-type]
