"""Fewer bits on the wire: right in the mean, nothing lost for good, counted as it is sent."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nestfed.algorithms import METHODS
from nestfed.core import NestfedError
from nestfed.engine.encode import BLOCK, KINDS, SCALE, Encoding, expand, squeeze, wire_form
from tests.methods import method, run, setting
from tests.support import simulate


def values(seed: int, d: int, spread: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(d, generator=generator) * 10 ** (spread * torch.rand(d, generator=generator))


@given(seed=st.integers(0, 1000), d=st.integers(1, 700), kind=st.sampled_from(KINDS))
@settings(max_examples=60, deadline=None)
def test_near_and_in_form(seed: int, d: int, kind: str) -> None:
    change = values(seed, d)
    sent = squeeze(kind, change, torch.rand(d, generator=torch.Generator().manual_seed(seed)))
    assert {k: (v.dtype, tuple(v.shape)) for k, v in sent.items()} == wire_form(kind, {"": change})
    back = expand(kind, sent, change)
    assert back.dtype == change.dtype
    if kind == "int8":
        step = sent[SCALE].repeat_interleave(BLOCK)[:d]
        assert bool(((back - change).abs() <= step * 1.0001).all())
    else:
        assert bool(((back - change).abs() <= change.abs() * (2**-10 if kind == "float16" else 2**-7) + 1e-7).all())


def test_stochastic_rounding_is_right_in_the_mean() -> None:
    change = values(0, 300)
    noise = torch.rand(4000, 300, generator=torch.Generator().manual_seed(1))
    many = change.expand(4000, -1)
    mean = expand("int8", squeeze("int8", many, noise), many).mean(0)
    step = (change.abs().max()) / 127
    assert bool(((mean - change).abs() < 5 * step / 2 / 4000**0.5).all())
    nearest = expand("int8", squeeze("int8", change), change)
    assert float((nearest - change).abs().max()) > float((mean - change).abs().max())


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_lost_for_good(kind: str) -> None:
    """What was sent in all, and what is still kept, is what there was to send."""
    encoding, zero = Encoding(kind), {"x": torch.zeros(400, dtype=torch.float64)}
    residual, total, sent = zero, zero["x"].clone(), zero["x"].clone()
    for round_ in range(20):
        upload = {"x": values(round_, 400).double()}
        noise = {k: v[0] for k, v in encoding.noise(0, [3], round_, upload).items()}
        packed, residual = encoding.pack(upload, zero, residual, noise)
        sent += encoding.unpack(packed, zero, ["x"])["x"]
        total += upload["x"]
    torch.testing.assert_close(sent + residual["x"], total)
    assert float(residual["x"].abs().max()) < 100
    assert float((sent - total).norm()) > 0


def test_noise_is_a_function_of_client_and_round() -> None:
    encoding, fields = Encoding("int8"), {"b": torch.zeros(3), "a": torch.zeros(2)}
    both = encoding.noise(5, [1, 4], 7, fields)
    one = encoding.noise(5, [4], 7, fields)
    assert all(torch.equal(both[k][1], one[k][0]) for k in fields)
    assert not torch.equal(both["a"][0], both["a"][1])
    assert not torch.equal(encoding.noise(5, [4], 8, fields)["a"], one["a"])
    assert Encoding("float16").noise(5, [1], 7, fields) == {}


def test_too_large_numbers_do_not_become_infinite() -> None:
    change = torch.tensor([1e6, -1e6, 1.0])
    packed, residual = Encoding("float16").pack({"x": change}, {"x": 0 * change}, {"x": 0 * change}, {})
    assert bool(torch.isfinite(packed["x"]).all())
    torch.testing.assert_close(packed["x"].float() + residual["x"], change)


def test_bytes() -> None:
    shared = {"x": torch.zeros(1000), "u": torch.zeros(1000)}
    assert Encoding().sizes(shared) == (8000, 8000)
    assert Encoding("float16").sizes(shared) == (4000, 8000)
    assert Encoding("int8", "bfloat16").sizes(shared) == (2000 + 2 * 4 * 4, 4000)


@pytest.mark.parametrize("text", ["int4", "float32", "int8/int8", "/float16", "float16/"])
def test_refuses(text: str) -> None:
    if text == "float16/":
        assert Encoding.parse(text) == Encoding("float16")
        return
    with pytest.raises(NestfedError, match=r"encode (must be|= '/float16' rounds downloads only)"):
        Encoding.parse(text)


@pytest.mark.parametrize(
    ("name", "encode"),
    [
        *itertools.product(["scaffold", "fmgda"], [*KINDS, "int8/float16", "float16/bfloat16"]),
        *((name, "int8/float16") for name in ("fedavg", "fcsg-m", "acc-fcsg-m", "local-scgdm-tasks", "codasca")),
    ],
)
def test_in_simulation(name: str, encode: str) -> None:
    """Near the run without it, but not the same; the same vectorised or not; fewer bytes."""
    whole, rounded = (run(name, 5, participation=3, encode=e) for e in ("", encode))
    loop = run(name, 5, participation=3, encode=encode, mode="loop")
    x = METHODS[name].point
    assert not torch.equal(whole.shared[x], rounded.shared[x])
    torch.testing.assert_close(whole.shared[x], rounded.shared[x], rtol=0, atol=0.05)
    torch.testing.assert_close(loop.shared, rounded.shared, rtol=1e-9, atol=1e-9)
    up, down = Encoding.parse(encode).sizes(whole.shared)
    assert rounded.history[-1]["bytes_up"] == 15 * up
    assert rounded.history[-1]["bytes_down"] == 15 * down
    assert up + down < sum(v.numel() * 8 for v in whole.shared.values()) * 2


def test_resumes_with_its_residuals(tmp_path: object) -> None:
    whole = run("fmgda", 6, participation=3, encode="int8")
    run("fmgda", 3, participation=3, encode="int8", directory=tmp_path)
    again = run("fmgda", 6, participation=3, encode="int8", directory=tmp_path)
    assert all(torch.equal(again.shared[k], whole.shared[k]) for k in whole.shared)


def test_error_feedback_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, changes below half a step of the rounding never get through."""
    s, algorithm = setting("fedavg"), method("fedavg", eta=1e-3)

    def end(encode: str) -> torch.Tensor:
        return simulate(s.problem, algorithm, s.clients, rounds=30, q=3, seed=5, encode=encode, progress=False).x

    with_it = float((end("bfloat16") - end("")).norm())
    pack = Encoding.pack

    def forgetful(self: Encoding, upload: object, received: object, residual: dict, noise: object) -> object:
        packed, lost = pack(self, upload, received, {k: 0 * v for k, v in residual.items()}, noise)  # type: ignore[arg-type]
        return packed, lost

    monkeypatch.setattr(Encoding, "pack", forgetful)
    assert float((end("bfloat16") - end("")).norm()) > 3 * with_it
