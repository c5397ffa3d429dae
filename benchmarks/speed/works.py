"""The timed works: as objects for our engine, as bare gradients, and as a hand-written loop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from nestfed_papers import language, omniglot, sine
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from nestfed import AUROC, Classify, Examples, algorithm, models
from nestfed.data.sources import load
from nestfed.problems.invariant import InvariantClients, InvariantLogistic
from nestfed.problems.maml import MAML

Pass = Callable[[Any], Any]
"""One forward and backward pass on one batch."""


@dataclass
class Work:
    """One timed work."""

    name: str
    problem: Any
    algorithm: Any
    clients: Any
    q: int
    gradient: Callable[[], Pass] | None
    """Makes the fastest bare pass; called in every process."""
    plain: Callable[[int], Any]
    """One hand-written round, starting at iteration t."""
    evaluations: int = 1
    """Passes per step."""
    participation: int = 0
    """Clients in a round; 0 = all."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of `Execution`."""
    bar: tuple[float | None, float | None] = (None, None)
    """At most × limit, at least × faster than the plain loop."""


def images(name: str, positives: bool = False) -> tuple[Tensor, Tensor]:
    split = load(name)
    x = torch.from_numpy(np.array(split.train.x)).reshape(-1, 1, 28, 28).float() / 255
    y = torch.from_numpy(np.array(split.train.y)).long()
    return x, (y >= 5).long() if positives else y


def held(x: Tensor, y: Tensor, clients: int) -> Examples:
    parts = np.array_split(np.random.default_rng(0).permutation(len(x)), clients)
    return Examples((x, y), parts, batch=50, seed=0)


def bare(module: nn.Module, loss: Callable[[nn.Module, Any], Tensor]) -> Callable[[], Pass]:
    """The fastest pass found: the module itself, `channels_last`, gradients dropped at once."""

    def make() -> Pass:
        own = copy.deepcopy(module).to(memory_format=torch.channels_last)
        parameters = list(own.parameters())

        def one(batch: Any) -> None:
            x, y = batch
            if x.dim() == 4:
                x = x.to(memory_format=torch.channels_last)
            torch.autograd.grad(loss(own, (x, y)), parameters, allow_unused=True)

        return one

    return make


def averaged(
    module: nn.Module, clients: Any, q: int, step: Callable[..., None], who: Callable[[int], list[int]]
) -> Any:
    """FedAvg as usually written: copy the model, run an optimizer, average the state dictionaries."""

    def round_(t: int) -> None:
        chosen = who(t)
        total: dict[str, Tensor] = {}
        for n in chosen:
            own = copy.deepcopy(module)
            step(own, n, t)
            for k, v in own.state_dict().items():
                total[k] = total[k] + v if k in total else v.clone()
        module.load_state_dict({k: v / len(chosen) for k, v in total.items()})

    return round_


def labelled(net: str, data: str, clients: int = 16, participation: int = 0) -> Work:
    x, y = images(data)
    module = models.build(net, (1, 28, 28), 10)
    shared = held(x, y, clients)
    generator = torch.Generator().manual_seed(0)

    def step(own: nn.Module, n: int, t: int) -> None:
        optimizer = torch.optim.SGD(own.parameters(), 0.05)
        part = torch.from_numpy(shared.parts[n])
        for _ in range(10):
            rows = part[torch.randint(len(part), (50,), generator=generator)]
            optimizer.zero_grad()
            F.cross_entropy(own(x[rows]), y[rows]).backward()
            optimizer.step()

    def who(t: int) -> list[int]:
        if not participation:
            return list(range(clients))
        return torch.randperm(clients, generator=generator)[:participation].tolist()

    loss = lambda m, b: F.cross_entropy(m(b[0]), b[1])  # noqa: E731
    plain = averaged(copy.deepcopy(module), shared, 10, step, who)
    return Work(
        "", Classify(module), algorithm("fedavg", eta=0.05), shared, 10, bare(module, loss), plain,
        participation=participation,
    )  # fmt: skip


def auroc(net: str, data: str) -> Work:
    """FMGDA: two passes per step, momentum for both players."""
    x, y = images(data, positives=True)
    module = models.build(net, (1, 28, 28), 1)
    shared = held(x, y, 16)
    problem = AUROC(module, p=0.5)
    generator = torch.Generator().manual_seed(0)
    state: dict[str, Any] = {"w": torch.zeros(1), "u": None, "v": torch.zeros(1)}

    def loss(net: nn.Module, w: Tensor, a: Tensor, b: Tensor, batch: Any) -> Tensor:
        inputs, labels = batch
        h, p, w = net(inputs), 0.5, w[0]
        positive = (1 - p) * ((h - a) ** 2 - 2 * (1 + w) * h)
        negative = p * ((h - b) ** 2 + 2 * (1 + w) * h)
        return torch.where(labels == 1, positive, negative).mean() - p * (1 - p) * w**2

    def make() -> Pass:
        own = copy.deepcopy(module).to(memory_format=torch.channels_last)
        w, a, b = (torch.zeros(n, requires_grad=True) for n in ((1,), (), ()))
        parameters = [*own.parameters(), a, b, w]

        def one(batch: Any) -> None:
            inputs = batch[0].to(memory_format=torch.channels_last)
            torch.autograd.grad(loss(own, w, a, b, (inputs, batch[1])), parameters)

        return one

    start = copy.deepcopy(module)

    def plain(t: int) -> None:
        """Recursive momentum by hand: the model, its copy at the previous point, lists of estimators."""
        total: dict[str, Tensor] = {}
        for n in range(16):
            own, last = copy.deepcopy(start), copy.deepcopy(start)
            a, b = torch.ones((), requires_grad=True), torch.zeros((), requires_grad=True)
            w = state["w"].clone().requires_grad_()
            old = [p.detach().clone().requires_grad_() for p in (a, b, w)]
            part = torch.from_numpy(shared.parts[n])
            estimates: list[Tensor] | None = None
            for _ in range(10):
                rows = part[torch.randint(len(part), (50,), generator=generator)]
                batch = x[rows], y[rows]
                now = [*own.parameters(), a, b, w]
                before = [*last.parameters(), *old]
                g = torch.autograd.grad(loss(own, w, a, b, batch), now)
                h = torch.autograd.grad(loss(last, old[2], old[0], old[1], batch), before)
                estimates = [gi + 0.1 * (e - hi) for gi, hi, e in zip(g, h, estimates)] if estimates else list(g)
                with torch.no_grad():
                    for p, q, e in zip(now, before, estimates):
                        q.copy_(p)
                        p.sub_(0.01 * e) if p is not w else p.add_(0.01 * e)
            for k, v in own.state_dict().items():
                total[k] = total[k] + v if k in total else v.clone()
        start.load_state_dict({k: v / 16 for k, v in total.items()})

    return Work("", problem, algorithm("fmgda", c_hat=0.01, c=0.01, alpha=0.9, beta=0.9), shared, 10, make, plain, 2)


def invariant() -> Work:
    clients = InvariantClients(16, 10, 1.0, 100, 1, seed=0)
    module = nn.Linear(10, 1, bias=False)
    nn.init.zeros_(module.weight)
    truth = clients.truth  # type: ignore[attr-defined]

    def step(own: nn.Module, n: int, t: int) -> None:
        optimizer = torch.optim.SGD(own.parameters(), 0.01, momentum=0.5, dampening=0.5)
        for _ in range(50):
            a = torch.randn(1, 10)
            b = torch.sign(a @ truth)
            eta = a[:, None] + torch.randn(1, 100, 10)
            u = own(eta).mean(1).squeeze(-1)
            x2 = 10 * own.weight**2
            loss = F.softplus(-b * u).mean() + 0.001 * (x2 / (1 + x2)).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    plain = averaged(module, clients, 50, step, lambda t: list(range(16)))
    return Work(
        "", InvariantLogistic(torch.zeros(10)), algorithm("fcsg-m", alpha=0.01, beta=0.5), clients, 50, None, plain
    )


def sines() -> Work:
    clients = sine.SineClients(5, 3, 10, seed=0)
    module = models.build("sine", (1,))
    problem = MAML(module, sine.squared_error, inner_lr=0.001, tasks=clients.held)
    lam = 0.001

    def plain(t: int) -> None:
        """Local-SCGDM by hand: task after task, lists of tensors for u and the momentum."""
        names = [k for k, _ in module.named_parameters()]
        ends = []
        for n in range(5):
            x = [p.detach().clone().requires_grad_() for p in module.parameters()]
            u = [p.detach().clone() for p in x]
            m = [torch.zeros_like(p) for p in x]
            for i in range(5):
                query, support, _ = clients.sample(n, t + i)
                direction = [torch.zeros_like(p) for p in x]
                new = [torch.zeros_like(p) for p in x]
                for k in range(3):
                    inner = F.mse_loss(functional_call(module, dict(zip(names, x)), support[0][k]), support[1][k])
                    g = torch.autograd.grad(inner, x, create_graph=True)
                    fast = [p - lam * gi for p, gi in zip(x, g)]
                    at = [(0.1 * a + 0.9 * b).detach().requires_grad_() for a, b in zip(u, fast)]
                    outer = F.mse_loss(functional_call(module, dict(zip(names, at)), query[0][k]), query[1][k])
                    v = torch.autograd.grad(outer, at)
                    z = torch.autograd.grad(fast, x, v)
                    direction = [d + zi / 3 for d, zi in zip(direction, z)]
                    new = [a + b.detach() / 3 for a, b in zip(new, at)]
                u = new
                m = [0.2 * a + 0.8 * d for a, d in zip(m, direction)]
                x = [(p - 0.01 * a).detach().requires_grad_() for p, a in zip(x, m)]
            ends.append(x)
        with torch.no_grad():
            for p, each in zip(module.parameters(), zip(*ends)):
                p.copy_(torch.stack(each).mean(0))

    return Work(
        "", problem, algorithm("local-scgdm", eta=1.0, alpha=0.8, beta=0.01, gamma=0.9), clients, 5, None, plain
    )


def episodes(method: str, evaluations: int) -> Work:
    characters = omniglot.read()
    split = omniglot.by_characters(len(characters.images), 16, 0)
    clients = omniglot.OmniglotClients(omniglot.Episodes(characters, split.training, 5, 1, 15), 2, seed=0)
    module = models.build("omniglot", (1, 28, 28), 5)
    problem = MAML(module, omniglot.cross_entropy, inner_lr=0.4)
    names = [k for k, _ in module.named_parameters()]

    def meta(own: nn.Module, x: list[Tensor], batch: Any, last: bool) -> list[Tensor]:
        """MAML's gradient as usually written, one task after another."""
        (qx, qy), (sx, sy) = batch
        total = [torch.zeros_like(p) for p in x]
        for k in range(len(qx)):
            a, b = (v[k].to(memory_format=torch.channels_last) if last else v[k] for v in (sx, qx))
            inner = F.cross_entropy(functional_call(own, dict(zip(names, x)), a), sy[k])
            g = torch.autograd.grad(inner, x, create_graph=True)
            fast = [p - 0.4 * gi for p, gi in zip(x, g)]
            outer = F.cross_entropy(functional_call(own, dict(zip(names, fast)), b), qy[k])
            total = [t + z / len(qx) for t, z in zip(total, torch.autograd.grad(outer, x))]
        return total

    def make() -> Pass:
        own = copy.deepcopy(module)
        x = [p.detach().clone().requires_grad_() for p in own.parameters()]
        return lambda batch: meta(own, x, batch, True)

    # The method's state between rounds: the averaged estimator, and every client's point before its last step.
    mean: list[Tensor] = []
    last: list[list[Tensor]] = [[] for _ in range(16)]

    def plain(t: int) -> None:
        ends, estimators = [], []
        for n in range(16):
            x = [p.detach().clone().requires_grad_() for p in module.parameters()]
            u = mean
            for i in range(2):
                batch = clients.sample(n, t + i)
                g = meta(module, x, batch, False)
                if not u:
                    u = g
                elif evaluations == 2:
                    h = meta(module, last[n], batch, False)
                    u = [a + 0.5 * (e - b) for a, b, e in zip(g, h, u)]
                else:
                    u = [0.5 * a + 0.5 * e for a, e in zip(g, u)]
                last[n] = x
                x = [(p - 0.05 * e).detach().requires_grad_() for p, e in zip(x, u)]
            ends.append(x)
            estimators.append(u)
        mean[:] = [torch.stack(each).mean(0) for each in zip(*estimators)]
        with torch.no_grad():
            for p, each in zip(module.parameters(), zip(*ends)):
                p.copy_(torch.stack(each).mean(0))

    return Work("", problem, algorithm(method, alpha=0.05, beta=0.5), clients, 2, make, plain, evaluations)


def words() -> Work:
    text = language.read("wikitext-2", None, 1000, 200_000)
    module = models.build("lstm", None, len(text.words), size=32, layers=2, dropout=0.0)
    clients = language.TextClients(text.train, 16, 10, 20)

    def make() -> Pass:
        own = copy.deepcopy(module)
        parameters = list(own.parameters())
        return lambda batch: torch.autograd.grad(language.next_word(own, batch), parameters)

    def step(own: nn.Module, n: int, t: int) -> None:
        optimizer = torch.optim.SGD(own.parameters(), 5.0)
        for i in range(10):
            optimizer.zero_grad()
            language.next_word(own, clients.sample(n, t + i)).backward()
            nn.utils.clip_grad_norm_(own.parameters(), 0.25)
            optimizer.step()

    plain = averaged(copy.deepcopy(module), clients, 10, step, lambda t: list(range(16)))
    return Work("", language.Language(module, clip=0.25), algorithm("fedavg", eta=5.0), clients, 10, make, plain)


WORKS: dict[str, tuple[str, Callable[[], Work], tuple[float | None, float | None], dict[str, Any]]] = {
    "a-fedavg": ("FedAvg, Fashion-MNIST net, N=16, b=50, q=10", lambda: labelled("fashion", "fashion-mnist"), (1.15, 1.4), {}),
    "a-fmgda": ("FMGDA, Fashion-MNIST net, N=16, b=50, q=10", lambda: auroc("fashion", "fashion-mnist"), (1.15, 1.4), {}),
    "b-fedavg": ("FedAvg, MNIST net, N=16, b=50, q=10", lambda: labelled("mnist", "mnist"), (1.15, 1.3), {}),
    "b-fmgda": ("FMGDA, MNIST net, N=16, b=50, q=10", lambda: auroc("mnist", "mnist"), (1.15, 1.3), {}),
    "c": ("FCSG-M, invariant regression, m=100, q=50", invariant, (None, None), {}),
    "c-compiled": ("the same with compile=True", invariant, (None, 15), {"compile": True}),
    "d": ("Local-SCGDM, sine MAML", sines, (None, 5), {}),
    "d-compiled": ("the same with compile=True", sines, (None, 5), {"compile": True}),
    "e-fcsg-m": ("FCSG-M, Omniglot 5-way 1-shot MAML, N=16, 2 tasks, q=2", lambda: episodes("fcsg-m", 1), (1.15, 1.5), {}),
    "e-acc-fcsg-m": ("Acc-FCSG-M, the same", lambda: episodes("acc-fcsg-m", 2), (1.15, 1.5), {}),
    "f": ("FedAvg, Fashion-MNIST net, N=1,000 of whom 50 take part", lambda: labelled("fashion", "fashion-mnist", 1000, 50), (1.25, 1.5), {}),
    "g": ("FedAvg, small LSTM (WikiText-2), N=16", words, (None, None), {}),
}  # fmt: skip


def build(name: str) -> Work:
    _, make, bar, options = WORKS[name]
    work = make()
    work.name, work.bar, work.options = name, bar, options
    return work
