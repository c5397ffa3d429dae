"""The coordinator's memory: one answer at a time is in it, and uploads that wait for others are on disk."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="deployment is an extra: pip install 'nestfed[flower]'")

from flwr.app import Message

from nestfed.deploy.flower.federation import InOrder
from nestfed.deploy.flower.mailbox import TRAIN, Mailbox, content_of
from nestfed.deploy.wire import pack
from nestfed.engine.options import Exchange
from nestfed.engine.program import Span
from nestfed.engine.round import Fold, Order, Reply, Upload, empty_reply
from tests.flower import LocalGrid

SITES = 4


def uploads() -> list[Upload]:
    """Four sites whose sum depends on the order of addition; one records no loss."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for n in range(SITES):
        x = torch.randn(1, 50, generator=generator) * 10 ** (3 * n)
        loss = torch.tensor([float("nan") if n == 2 else float(n)], dtype=torch.float64)
        upload = Upload([n], [n], {"x": x, "w": x.double() + 1}, loss, torch.tensor([2.0 * n], dtype=torch.float64), n)
        upload.gathered = {"scores": x[:, :3]}
        found.append(upload)
    return found


def folded(order: Any, folder: Path, asked: int = SITES) -> tuple[Reply, InOrder]:
    shared = {"x": torch.zeros(50), "w": torch.zeros(50, dtype=torch.float64)}
    work = Order(0, Span(0, 1), list(range(asked)), [-1] * asked)
    reply = empty_reply(shared, "x", work, Exchange())
    uploads_ = InOrder(Fold(Exchange(), shared, reply), work.asked, folder)
    for n in order:
        uploads_.add(n, uploads()[n])
    return reply, uploads_


@pytest.mark.parametrize("order", list(itertools.permutations(range(SITES)))[1::4], ids=str)
def test_any_order_of_arrival_gives_the_same_bits(order: tuple[int, ...], tmp_path: Path) -> None:
    (one, _), (two, waiting) = folded(range(SITES), tmp_path), folded(order, tmp_path)
    assert not waiting.waiting
    assert all(torch.equal(one.sums[k], two.sums[k]) for k in one.sums)
    assert (one.answered, one.places, one.examples, one.moved) == (two.answered, two.places, two.examples, two.moved)
    assert math.isnan(one.loss)  # not every site records a loss
    assert math.isnan(two.loss)
    for n in range(SITES):
        assert torch.equal(one.gathered[n]["scores"], two.gathered[n]["scores"])


def test_the_sum_depends_on_the_order(tmp_path: Path) -> None:
    """So that the test above can fail."""
    plain = sum((u.fields["x"][0] for u in reversed(uploads())), torch.zeros(50))
    assert not torch.equal(plain, folded(range(SITES), tmp_path)[0].sums["x"])


def test_waiting_uploads_are_not_in_memory(tmp_path: Path) -> None:
    """Sites 1 to 3 wait for site 0, which never answers."""
    reply, found = folded((3, 1, 2), tmp_path)
    assert reply.answered == []
    assert not any(isinstance(v, torch.Tensor | Upload) for v in found.waiting.values())
    assert not list(tmp_path.iterdir())  # the files have no names, so nothing is left if the coordinator is killed
    found.finish()
    assert reply.answered == [1, 2, 3]
    assert torch.equal(reply.sums["x"], sum((u.fields["x"][0] for u in uploads()[1:]), torch.zeros(50)))


def test_an_answer_is_pulled_when_the_one_before_it_was_used() -> None:
    pulled: list[str] = []

    class Counting(LocalGrid):
        def pull_messages(self, message_ids: Any) -> Any:
            names = list(message_ids)
            pulled.extend(names)
            return super().pull_messages(names)

    def echo(message: Message, context: Any) -> Message:
        return Message(content_of(pack({}, {})), reply_to=message)

    grid = Counting(dict.fromkeys(range(2, 5), echo), {n: {"client": n} for n in range(2, 5)})
    mailbox = Mailbox(grid, 60.0)
    for node in grid.apps:
        mailbox.send(node, TRAIN, pack({}, {}), "1", most=1000)
    for count, answer in enumerate(mailbox.receive(), 1):
        assert answer.packed is not None
        assert len(pulled) == count
    assert len(pulled) == 3
