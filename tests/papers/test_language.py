"""Language modelling: streams, the carried hidden state, perplexity, and six methods on a small text."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nestfed_papers import language
from nestfed_papers.language import Language, TextClients, word_loss
from nestfed_papers.networks import WordLSTM
from torch import Tensor
from torch.nn import functional as F

from nestfed.algorithms import build
from nestfed.core import Batch, NestfedError, Power, Tape
from nestfed.experiment.build import assemble
from nestfed.experiment.spec import read as read_experiment
from tests.support import simulate

WORDS = 12


def chain(length: int, seed: int) -> Tensor:
    """A text in which the next word is nearly certain: the sum of the last two, with some noise."""
    generator = np.random.default_rng(seed)
    text = [1, 2]
    for _ in range(length - 2):
        noise = int(generator.integers(WORDS)) if generator.random() < 0.1 else 0
        text.append((2 * text[-1] + 1 + noise) % WORDS)
    return torch.tensor(text)


def small(dropout: float = 0.0) -> WordLSTM:
    torch.manual_seed(0)
    return WordLSTM(WORDS, size=16, layers=2, dropout=dropout)


# ---------------------------------------------------------------- batches


def test_streams_are_contiguous() -> None:
    text = torch.arange(103)
    rows = language.streams(text, 10)
    assert rows.shape == (10, 10)
    assert rows[:, 3].tolist() == list(range(30, 40))


def test_windows_follow_one_another_and_bring_their_context() -> None:
    text = torch.arange(2 * 3 * 24 + 1)
    clients = TextClients(text, clients=2, batch=3, bptt=5)
    assert len(clients) == 2
    assert clients.windows == 4
    before = None
    for t in range(4):
        context, inputs, targets = clients.sample(1, t)
        assert inputs.shape == targets.shape == (5, 3)
        assert torch.equal(targets, inputs + 1)
        assert inputs[0].tolist() == [72 + 5 * t + 24 * b for b in range(3)]
        if before is None:
            assert context.shape == (0, 3)
        else:
            assert torch.equal(context, before)
        before = inputs
    assert torch.equal(clients.sample(1, 4)[1], clients.sample(1, 0)[1])  # a new pass over the text
    assert not set(clients.sample(0, 2)[1].flatten().tolist()) & set(clients.sample(1, 2)[1].flatten().tolist())
    stacked = clients.draw([0, 1], range(2, 4))[1]
    assert all(torch.equal(a[1], b) for a, b in zip(stacked, clients.sample(1, 3)))


def test_too_short_a_text_is_refused() -> None:
    with pytest.raises(NestfedError, match="100 words are too few"):
        TextClients(torch.arange(100), clients=4, batch=5, bptt=10)
    with pytest.raises(NestfedError, match="bptt"):
        TextClients(torch.arange(100), clients=1, batch=1, bptt=0)


def test_vocabulary_is_cut_to_the_most_frequent_words() -> None:
    words = ("a", "b", "<unk>", "c", "d")
    parts, kept = language.cut([np.array([0, 1, 1, 3, 3, 3, 2, 4]), np.array([4, 3])], words, 3)
    assert kept == ("<unk>", "c", "b")
    assert parts[0].tolist() == [0, 2, 2, 1, 1, 1, 0, 0]
    assert parts[1].tolist() == [0, 1]
    with pytest.raises(NestfedError, match="2 to 5"):
        language.cut([np.array([0])], words, 6)
    with pytest.raises(NestfedError, match="<unk>"):
        language.cut([np.array([0])], ("a", "b"), 2)


# ---------------------------------------------------------------- the hidden state


def test_hidden_state_is_passed_on_and_gradients_stop_at_the_window() -> None:
    model, clients = small(), TextClients(chain(400, 0), clients=1, batch=4, bptt=7)
    first, second = clients.sample(0, 0), clients.sample(0, 1)
    _, hidden = model(first[1])
    logits, _ = model(second[1], tuple(h.detach() for h in hidden))
    expected = F.cross_entropy(logits.flatten(0, 1), second[2].flatten())
    problem = Language(model, clip=None)
    torch.testing.assert_close(problem.loss(problem.x0, second), expected)
    parameters = list(model.parameters())
    manual = torch.cat([g.flatten() for g in torch.autograd.grad(expected, parameters)])
    for eager in (True, False):
        torch.testing.assert_close(problem.grad(problem.x0, Batch(second, None, Tape(), eager)), manual)
    without = (second[0][:0], *second[1:])
    assert abs(float((problem.loss(problem.x0, without) - expected).detach())) > 1e-5
    through = F.cross_entropy(model(torch.cat([first[1], second[1]]))[0][7:].flatten(0, 1), second[2].flatten())
    torch.testing.assert_close(through, expected)  # the same loss; only its gradient reaches further back
    far = torch.cat([g.flatten() for g in torch.autograd.grad(through, parameters)])
    assert (far - manual).norm() > 1e-3 * manual.norm()


def test_gradient_is_clipped_and_words_are_counted() -> None:
    clients = TextClients(chain(400, 0), clients=1, batch=4, bptt=7)
    problem, tape = Language(small(), clip=0.01), Tape()
    gradient = problem.grad(problem.x0, Batch(clients.sample(0, 1), tape=tape, eager=True))
    assert float(gradient.norm()) == pytest.approx(0.01, rel=1e-4)
    assert tape.examples == 28


def test_word_loss() -> None:
    text = chain(500, 1)
    uniform = small()
    torch.nn.init.zeros_(uniform.decoder.weight)
    assert word_loss(uniform.eval(), text) == pytest.approx(math.log(WORDS), rel=1e-5)
    model = small().eval()
    whole, _ = model(language.streams(text, 10)[:-1])
    at_once = F.cross_entropy(whole.flatten(0, 1), language.streams(text, 10)[1:].flatten())
    for bptt in (7, 35):  # the state is carried, so windows do not matter
        assert word_loss(model, text, bptt) == pytest.approx(float(at_once.detach()), rel=1e-5)
    with pytest.raises(NestfedError, match="at least 20"):
        word_loss(model, text[:15])


# ---------------------------------------------------------------- methods

SIX: dict[str, dict[str, Any]] = {
    "fedavg": {"eta": 5.0},
    "scaffold": {"eta": 5.0},
    "fedadam": {"eta": 5.0, "eta_g": 0.03, "tau": 0.01},
    "fedams": {"eta": 5.0, "eta_g": 0.03, "tau": 0.01},
    "stem": {"eta": Power(8.0), "a": 0.9},
    "fafed": {"eta": Power(0.1), "alpha": 0.9, "rho": 0.01},
}


@pytest.mark.parametrize("name", SIX)
@pytest.mark.long
def test_word_loss_falls(name: str) -> None:
    clients, held = TextClients(chain(3000, 0), clients=3, batch=5, bptt=8), chain(300, 1)
    problem = Language(small(dropout=0.1))
    result = simulate(
        problem,
        build(name, **SIX[name]),
        clients,
        rounds=6,
        q=5,
        every=3,
        evaluate=lambda model: {"perplexity": math.exp(word_loss(model, held))},
        progress=False,
    )
    found = [r["perplexity"] for r in result.history if "perplexity" in r]
    assert found[0] == pytest.approx(WORDS, rel=0.05)
    assert found[-1] < 0.8 * found[0]
    assert all(b < 1.1 * a for a, b in pairwise(found))


@pytest.mark.parametrize("name", ["fedavg", "fafed"])
def test_vectorised_clients_and_clients_in_turn_agree(name: str) -> None:
    clients = TextClients(chain(600, 0), clients=3, batch=2, bptt=5)
    problem = Language(small(dropout=0.3))
    one, other = (
        simulate(problem, build(name, **SIX[name]), clients, rounds=2, q=3, mode=mode, progress=False)  # type: ignore[arg-type]
        for mode in ("vmap", "loop")
    )
    torch.testing.assert_close(one.x, other.x, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- WikiText-2


@pytest.mark.data
def test_wikitext_protocol(real: Path) -> None:
    text = language.read()
    assert len(text.words) == 33278
    clients = TextClients(text.train)
    assert clients.sample(15, 3)[1].shape == (35, 20)
    assert clients.windows == (2_088_628 // 16 // 20 - 1) // 35
    cut = language.read(vocabulary=1000, limit=200_000)
    assert [len(cut.train), len(cut.validation), len(cut.words)] == [200_000, 20_000, 1000]
    assert int(cut.train.max()) == 999
    assert cut.words[0] == "<unk>"
    with pytest.raises(NestfedError, match="digits is not a text"):
        language.read("digits")


@pytest.mark.data
def test_packaged_experiments_assemble(real: Path) -> None:
    experiment = read_experiment("wikitext-small")
    assert list(experiment.methods) == list(SIX)
    for name in experiment.methods:
        first = {k: v[0] for k, v in experiment.grid(name).items()}
        made = assemble(experiment.for_method(name).with_overrides(first))
    assert made.problem.clip == 0.25
    found = made.evaluate(made.problem.bind(made.problem.x0))
    assert found["perplexity"] == pytest.approx(1000, rel=0.05)
    assert found[made.metric] == pytest.approx(-math.log(found["perplexity"]))
    assert "val_perplexity" in found


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "fafed"])
def test_the_full_size_steps(real: Path, name: str) -> None:
    """A dry run of wikitext-full: two clients, two steps; 3 GB for fedavg, 6 GB for fafed."""
    experiment = read_experiment("wikitext-full")
    variant = experiment.for_method(name).with_overrides(
        {"partition.clients": 2, **{k: v[0] for k, v in experiment.grid(name).items()}}
    )
    made = assemble(variant)
    assert made.problem.x0.numel() == 2 * 33278 * 650 + 33278 + 2 * (8 * 650**2 + 8 * 650)  # 50 million
    result = simulate(made.problem, made.algorithm, made.clients, rounds=2, q=1, mode="loop", progress=False)
    assert result.history[-1]["loss"] < math.log(33278) + 0.1
    assert torch.isfinite(result.x).all()


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.parametrize("name", SIX)
def test_the_small_size_learns(real: Path, name: str) -> None:
    experiment = read_experiment("wikitext-small")
    grid = experiment.grid(name).items()
    middle = {k: v[(len(v) - 1) // 2] if k.startswith("algorithm.eta") else v[-1] for k, v in grid}
    made = assemble(experiment.for_method(name).with_overrides(middle))
    result = simulate(
        made.problem, made.algorithm, made.clients, rounds=8, q=10, every=2, evaluate=made.evaluate, progress=False
    )
    found = [r["val_perplexity"] for r in result.history if "val_perplexity" in r]
    assert all(b < 1.1 * a for a, b in pairwise(found))
    assert found[-1] < 0.3 * found[0]


# ---------------------------------------------------------------- images that are too large to vectorise


@pytest.mark.data
@pytest.mark.slow
def test_tiny_imagenet_experiment_steps_with_every_method(real: Path) -> None:
    experiment = read_experiment("tiny-imagenet-auroc")
    for name in experiment.methods:
        first = {k: v[0] for k, v in experiment.grid(name).items()}
        changes = {"partition.clients": 2, "problem.batch": 8, **first}
        made = assemble(experiment.for_method(name).with_overrides(changes))
        assert made.problem.p == pytest.approx(5 / 6, abs=0.01)
        result = simulate(made.problem, made.algorithm, made.clients, rounds=1, q=2, mode="loop", progress=False)
        assert torch.isfinite(result.x).all()
