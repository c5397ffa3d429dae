"""The networks have the papers' shapes and sizes, and can be vectorised over clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from nestfed_papers.networks import CifarNet, FashionNet, MnistNet, OmniglotNet, SineNet, WordLSTM
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state

from nestfed.core import NestfedError
from nestfed.models import CHUNK, NETWORKS, Mlp, ResNet18, build, held_out, score

SHAPES: dict[str, tuple[int, ...]] = {
    "mlp": (7,),
    "mnist": (1, 28, 28),
    "fashion": (1, 28, 28),
    "cifar": (3, 32, 32),
    "resnet18": (3, 64, 64),
    "omniglot": (1, 28, 28),
    "sine": (1,),
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    # On a busy machine several threads wait for each other: seconds become a minute.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def small(name: str, seed: int = 0) -> nn.Module:
    """A network of the table; the language model in miniature."""
    if name == "lstm":
        return build("lstm", outputs=11, seed=seed, size=6, dropout=0.0)
    return build(name, SHAPES[name], seed=seed)


def examples(name: str, n: int) -> Tensor:
    generator = torch.Generator().manual_seed(n)
    if name == "lstm":
        return torch.randint(0, 11, (5, n), generator=generator)
    return torch.randn(n, *SHAPES[name], generator=generator)


def logits(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


# ---------------------------------------------------------------------------------------- shapes and sizes


def test_every_network_is_tested() -> None:
    assert set(SHAPES) | {"lstm"} == set(NETWORKS)


@pytest.mark.parametrize("name", SHAPES)
def test_outputs(name: str) -> None:
    x = examples(name, 3)
    assert small(name)(x).shape == (3,)  # one score per example
    if name != "sine":
        assert build(name, SHAPES[name], outputs=10)(x).shape == (3, 10)


@pytest.mark.parametrize("name", ["mlp", "sine", "mnist", "fashion", "cifar"])
def test_one_example_alone_scores_as_in_a_batch(name: str) -> None:
    model, x = small(name), examples(name, 3)
    torch.testing.assert_close(torch.stack([model(one) for one in x]), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        # weights and biases, layer by layer
        (MnistNet(10), (25 + 1) * 20 + (20 * 25 + 1) * 50 + (800 + 1) * 500 + (500 + 1) * 10),
        (FashionNet(1), (9 + 1) * 5 + (5 * 9 + 1) * 10 + (250 + 1) * 100 + (100 + 1)),
        (CifarNet(1), (27 + 1) * 16 + (144 + 1) * 32 + (288 + 1) * 64 + (1024 + 1) * 512 + (512 + 1) * 64 + 65),
        (OmniglotNet(5), (9 + 1) * 64 + 3 * (576 + 1) * 64 + 4 * 2 * 64 + (256 + 1) * 5),
        (SineNet(), 2 * 40 + 41 * 40 + 41),
        (Mlp(7, (64,), 1), 8 * 64 + 65),
        (Mlp(7, (), 3), 8 * 3),
        (WordLSTM(100, size=10), 100 * 10 + 2 * (2 * 40 * 10 + 2 * 40) + 11 * 100),
        # torchvision's resnet18 has 11,689,512 parameters, of which 513,000 are its head for 1000 classes;
        # GroupNorm has as many as BatchNorm.
        (ResNet18(20), 11_689_512 - 513_000 + 513 * 20),
    ],
)
def test_number_of_parameters(model: nn.Module, parameters: int) -> None:
    assert size(model) == parameters


def test_published_sizes() -> None:
    assert size(MnistNet(10)) == 431_080  # LeNet of Caffe
    assert size(OmniglotNet(5)) == 111_936 + 257 * 5


@pytest.mark.parametrize("name", NETWORKS)
def test_nothing_but_parameters(name: str) -> None:
    model = small(name)
    assert list(model.buffers()) == []
    x = examples(name, 4)
    torch.testing.assert_close(logits(model.train()(x)), logits(model.eval()(x)))  # no mode but dropout


@pytest.mark.parametrize("name", ["mnist", "fashion", "cifar", "resnet18", "omniglot", "mlp", "lstm"])
def test_scores_are_unbounded(name: str) -> None:
    # No activation at the end: a large bias of the head comes out unchanged.
    model = small(name)
    head = model.decoder if isinstance(model, WordLSTM) else model.head
    assert isinstance(head, nn.Linear)
    x = examples(name, 2)
    before = logits(model(x))
    with torch.no_grad():
        head.bias.add_(-1000.0)
    torch.testing.assert_close(logits(model(x)), before - 1000.0, rtol=0, atol=1e-3)


def test_activations_are_the_papers() -> None:
    # The last hidden layer tells them apart: tanh is bounded and takes both signs, ReLU neither.
    for model, bounded in ((FashionNet(1), True), (MnistNet(1), False)):
        seen: list[Tensor] = []
        model.head.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))
        model(100 * torch.randn(8, 1, 28, 28, generator=torch.Generator().manual_seed(0)))
        assert (seen[0].abs().max() <= 1) == bounded
        assert (seen[0].min() < 0) == bounded


# ----------------------------------------------------------------------------- functional and vectorised


@pytest.mark.parametrize("name", NETWORKS)
def test_vectorised_over_clients_equals_one_after_another(name: str) -> None:
    # In double precision: in single, a ReLU near 0 is on for one way and off for the other, as the processor rounds.
    clients = [small(name, seed).double() for seed in range(2)]
    stacked, _ = stack_module_state(clients)
    n = 2 if name == "resnet18" else 4
    batch = examples(name, n)
    if batch.is_floating_point():
        batch = batch.double()
    x = torch.stack([batch, batch.flip(-1)])
    skeleton = small(name).double()

    def loss(parameters: dict[str, Tensor], data: Tensor) -> Tensor:
        return logits(functional_call(skeleton, parameters, (data,))).square().mean()

    values = torch.vmap(loss)(stacked, x)
    gradients = torch.vmap(torch.func.grad(loss))(stacked, x)
    for i, client in enumerate(clients):
        alone = logits(client(x[i])).square().mean()
        torch.testing.assert_close(values[i], alone, rtol=1e-10, atol=1e-12)
        for (key, p), g in zip(client.named_parameters(), torch.autograd.grad(alone, list(client.parameters()))):
            torch.testing.assert_close(gradients[key][i], g, rtol=1e-8, atol=1e-10 * float(g.abs().max()) + 1e-14)
            assert p.shape == g.shape


def test_second_order_through_the_omniglot_net() -> None:
    # MAML differentiates a gradient step; the derivative along a direction against finite differences.
    torch.manual_seed(0)
    model = OmniglotNet(5).double()
    x, y = torch.randn(10, 1, 28, 28, dtype=torch.double), torch.arange(10) % 5
    p = {k: v.detach() for k, v in model.named_parameters()}
    length = size(model) ** 0.5  # a step of length 1e-6 in all, too short to cross a kink of a ReLU
    direction = {k: torch.randn_like(v) / length for k, v in p.items()}

    def loss(q: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(functional_call(model, q, (x,)), y)

    def adapted(q: dict[str, Tensor]) -> Tensor:
        g = torch.func.grad(loss)(q)
        return loss({k: q[k] - 0.1 * g[k] for k in q})

    gradient = torch.func.grad(adapted)(p)
    slope = sum((gradient[k] * direction[k]).sum() for k in p)
    step = 1e-6
    up, down = (adapted({k: p[k] + s * direction[k] for k in p}) for s in (step, -step))
    assert float(slope) == pytest.approx(float((up - down) / (2 * step)), rel=1e-5)


def test_resnet_trains_on_64_by_64() -> None:
    model = build("resnet18", (3, 64, 64), seed=1)
    x, y = examples("resnet18", 4), torch.tensor([0.0, 1.0, 0.0, 1.0])
    losses = []
    for _ in range(4):
        loss = nn.functional.binary_cross_entropy_with_logits(model(x), y)
        model.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                p -= 0.01 * p.grad
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


# -------------------------------------------------------------------------------------- language model


def test_lstm_equals_torch() -> None:
    model = WordLSTM(11, size=6, layers=2, dropout=0.0)
    reference = nn.LSTM(6, 6, num_layers=2)
    for i, layer in enumerate(model.layers):
        for name, value in layer.state_dict().items():
            getattr(reference, name.replace("l0", f"l{i}")).data.copy_(value)
    tokens = examples("lstm", 3)
    h, c = torch.randn(2, 2, 3, 6)
    expected, (h1, c1) = reference(model.embedding(tokens), (h, c))
    output, hidden = model(tokens, (h, c))
    assert output.shape == (5, 3, 11)
    torch.testing.assert_close(output, model.decoder(expected))
    torch.testing.assert_close(hidden, (h1, c1))


def test_lstm_state_carries_over() -> None:
    model = small("lstm")
    tokens = examples("lstm", 3)
    whole, _ = model(tokens)
    torch.testing.assert_close(model(tokens, (torch.zeros(2, 3, 6), torch.zeros(2, 3, 6)))[0], whole)  # from rest
    first, hidden = model(tokens[:2])
    second, _ = model(tokens[2:], hidden)
    torch.testing.assert_close(torch.cat([first, second]), whole)
    assert not torch.allclose(model(tokens[2:])[0], second)


def test_lstm_dropout_is_before_between_and_after() -> None:
    model = WordLSTM(11, size=6, layers=3, dropout=0.5)
    calls: list[int] = []
    model.dropout.register_forward_hook(lambda *_: calls.append(1))
    model(examples("lstm", 2))
    assert len(calls) == 4
    assert not any(isinstance(m, nn.LSTM) for m in model.modules())  # whose own dropout nobody could steer
    with pytest.raises(AssertionError):
        torch.testing.assert_close(model(examples("lstm", 2))[0], model(examples("lstm", 2))[0])


# ------------------------------------------------------------------------------------------------ building


def test_seed_decides_the_weights_and_nothing_else() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, again, other = (build("mlp", (3,), seed=s) for s in (1, 1, 2))
    torch.testing.assert_close(torch.rand(3), expected)
    assert torch.equal(first.head.weight, again.head.weight)  # type: ignore[arg-type, union-attr]
    assert not torch.equal(first.head.weight, other.head.weight)  # type: ignore[arg-type, union-attr]


def test_build_passes_options_on() -> None:
    assert size(build("mlp", (7,), hidden=[5, 4])) == 8 * 5 + 6 * 4 + 5
    assert build("mlp", (1, 28, 28), outputs=10)(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
    assert isinstance(build("resnet18", (3, 64, 64), groups=8), ResNet18)
    assert build("resnet18", groups=8).norm.num_groups == 8  # type: ignore[union-attr]


def test_held_out_examples_are_judged_as_scikit_learn_does() -> None:
    from sklearn.metrics import average_precision_score, roc_auc_score

    x, y = torch.randn(600, 3), torch.arange(600) % 3 == 0
    found = held_out(x, y.long())(lambda part: part[:, 0])
    expected = {"auroc": roc_auc_score(y, x[:, 0]), "ap": average_precision_score(y, x[:, 0])}
    assert found == pytest.approx(expected)


def test_scores_in_chunks_are_those_of_all_at_once() -> None:
    x = torch.randn(3 * CHUNK + 7, 5, generator=torch.Generator().manual_seed(0))
    model, seen = build("mlp", (5,), 3), []

    def ready(part: torch.Tensor) -> torch.Tensor:
        seen.append(len(part))
        return 2 * part

    found = score(model, x, ready)
    assert seen == [CHUNK, CHUNK, CHUNK, 7]
    assert not found.requires_grad
    torch.testing.assert_close(found, model(2 * x).detach())
    assert score(model, x[:0]).shape == (0, 3)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: build("resnet"), "did you mean resnet18"),
        (lambda: build("MNIST"), "did you mean mnist"),
        (lambda: build("transformer-xxl"), "choose one of .*mlp, .*resnet18"),
        (lambda: build("mlp", (7,), width=3), "does not take 'width'; its options are hidden"),
        (lambda: build("mlp"), r"shape=\(14,\)"),
        (lambda: build("mlp", (7,), hidden=64), r"such as \[64\], not 64"),
        (lambda: build("mlp", (7,), hidden="64"), "hidden width must be a whole number of at least 1, not '6'"),
        (lambda: build("sine", (1,), depth=3), "no options"),
        (lambda: build("sine", (1,), 2), "one output, not 2"),
        (lambda: build("mnist", (3, 32, 32)), "1×28×28, not 3×32×32"),
        (lambda: build("resnet18", (1, 64, 64)), "3×any×any, not 1×64×64"),
        (lambda: build("resnet18", groups=3), "divide 64"),
        (lambda: build("mnist", outputs=0), "at least 1, not 0"),
        (lambda: build("lstm", outputs=10, dropout=1.0), "below 1, not 1.0"),
        (lambda: build("lstm", outputs=10, dropout="half"), "not 'half'"),
    ],
)
def test_refusals(call: Callable[[], object], words: str) -> None:
    with pytest.raises(NestfedError, match=words) as refusal:
        call()
    assert "\n" not in str(refusal.value)
