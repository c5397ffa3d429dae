"""What every method promises. A new one is held to it by a row in CASES."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import cases
import pytest
import torch
from cases import SEED, trace
from nestfed_papers.toys import CompositionalToy, ConditionalToy, MinimaxToy, Quadratic
from support import answering, simulate

from nestfed.algorithms import TABLE, build
from nestfed.core import Algorithm, Batch, NestfedError, Tape
from nestfed.engine.encode import Encoding
from nestfed.engine.options import Exchange
from nestfed.engine.program import Program, span_from
from nestfed.problems.base import Compositional, Conditional, Minimax, Minimize


class Case(NamedTuple):
    """Hyper-parameters under which a method works on every problem here, and which of them are of what sort."""

    hyper: dict[str, Any]
    setting: str = "plain"
    steps: tuple[str, ...] = ("eta",)
    """Must be above 0."""
    weights: tuple[str, ...] = ()
    """Must lie in (0, 1]."""
    homogeneous: bool = False
    """Promises to go down only when all clients are alike."""


SERVER = {"eta": 0.05, "eta_g": 0.05, "tau": 0.01}
STAGES = {"eta": 0.1, "gamma": 10.0, "T0": 30}

CASES: dict[str, Case] = {
    "fedavg": Case({"eta": 0.05}),
    "fedprox": Case({"eta": 0.05, "mu": 0.1}),
    "scaffold": Case({"eta": 0.05}, steps=("eta", "eta_g")),
    "stem": Case({"eta": 0.05, "a": 0.3}, weights=("a",)),
    "naive-adaptive": Case({"eta": 0.02, "beta": 0.9}, weights=("beta",), homogeneous=True),
    "fafed": Case({"eta": 0.05, "alpha": 0.3, "rho": 1.0}, steps=("eta", "rho"), weights=("alpha", "beta")),
    "fedadam": Case(SERVER, steps=("eta", "eta_g", "tau"), weights=("beta2",)),
    "fedyogi": Case(SERVER, steps=("eta", "eta_g", "tau"), weights=("beta2",)),
    "fedadagrad": Case({**SERVER, "eta_g": 0.3}, steps=("eta", "eta_g", "tau"), weights=("beta2",)),
    "fedams": Case(SERVER, steps=("eta", "eta_g", "tau", "epsilon"), weights=("beta2",)),
    "fcsg": Case({"alpha": 0.05}, "conditional", ("alpha",)),
    "fcsg-m": Case({"alpha": 0.05, "beta": 0.3}, "conditional", ("alpha",), ("beta",)),
    "acc-fcsg-m": Case({"alpha": 0.05, "beta": 0.5}, "conditional", ("alpha",), ("beta",)),
    "bsgd": Case({"alpha": 0.05}, "conditional", ("alpha",)),
    "bspiderboost": Case({"alpha": 0.03, "period": 4}, "conditional", ("alpha", "period")),
    "local-bsgd": Case({"eta": 0.05}, "compositional"),
    "local-scgd": Case({"eta": 0.05, "gamma": 0.7}, "compositional", weights=("gamma",)),
    "local-scgdm": Case(
        {"eta": 0.8, "alpha": 0.9, "beta": 0.06, "gamma": 0.9}, "compositional", ("eta", "alpha", "beta", "gamma")
    ),
    "local-scgdm-tasks": Case(
        {"eta": 0.8, "alpha": 0.9, "beta": 0.06, "gamma": 0.9}, "tasked", ("eta", "alpha", "beta", "gamma")
    ),
    "local-moml": Case({"eta": 0.05, "beta": 0.7}, "tasked", weights=("beta",)),
    "scgd": Case({"eta": 0.05, "gamma": 0.7}, "compositional", weights=("gamma",)),
    "local-sgda": Case({"eta_theta": 0.05, "eta_w": 0.1}, "minimax", ("eta_theta", "eta_w")),
    "momentum-local-sgda": Case(
        {"eta_theta": 0.05, "eta_w": 0.1, "beta": 0.5}, "minimax", ("eta_theta", "eta_w", "a"), ("beta",)
    ),
    "coda": Case(STAGES, "minimax", ("eta", "gamma", "T0")),
    "coda-plus": Case(STAGES, "minimax", ("eta", "gamma", "T0")),
    "codasca": Case(STAGES, "minimax", ("eta", "gamma", "T0", "eta_g")),
    "fmgda": Case({"c_hat": 0.05, "c": 0.1, "alpha": 0.3}, "minimax", ("eta", "c_hat", "c"), ("alpha", "beta")),
}
Q = 3
every = pytest.mark.parametrize("name", TABLE)
federated = pytest.mark.parametrize("name", [name for name in TABLE if not TABLE[name].single])


def method(name: str, **changes: Any) -> Algorithm[Any, Any]:
    return TABLE[name](**{**CASES[name].hyper, **changes})


def setting(name: str, N: int = 5, dtype: torch.dtype = torch.float64) -> cases.Setting:
    return cases.SETTINGS[CASES[name].setting](1 if TABLE[name].single else N, dtype)


def run(name: str, rounds: int, *, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    s = setting(name, dtype=dtype)
    options = {"seed": SEED, "q": Q, "progress": False, "mode": "vmap", **options}
    return simulate(s.problem, options.pop("algorithm", method(name)), s.clients, rounds=rounds, **options)


def one_sentence(error: Any) -> str:
    text = str(error.value)
    assert text.endswith(".")
    assert not re.search(r"[.!?]\s+[A-Z]", text)
    assert "\n" not in text
    return text


def test_every_method_is_listed() -> None:
    assert set(CASES) == set(TABLE)


@every
def test_frozen_dataclass_with_its_papers_names(name: str) -> None:
    algorithm = method(name)
    assert dataclasses.is_dataclass(algorithm)
    assert algorithm.name == name
    assert algorithm.__doc__
    assert len(algorithm.__doc__.splitlines()[0]) > 20
    for field in dataclasses.fields(algorithm):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(algorithm, field.name, 1.0)
    assert algorithm == method(name)
    assert hash(algorithm) == hash(method(name))


@every
def test_shared_and_private_are_fields(name: str) -> None:
    algorithm, s = method(name), setting(name)
    fields = algorithm.init(s.problem, s.problem.x0)._fields
    assert set(algorithm.shared) <= set(fields)
    assert set(algorithm.private) <= set(fields)
    assert not set(algorithm.shared) & set(algorithm.private)
    assert algorithm.point in algorithm.shared


def copied(tree: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, tree)


def identical(left: Any, right: Any) -> None:
    """Compare to the last bit; the order of names does not matter."""
    if isinstance(left, dict):
        assert set(left) == set(right)
        right = {k: right[k] for k in left}
    for a, b in zip(torch.utils._pytree.tree_leaves(left), torch.utils._pytree.tree_leaves(right), strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@every
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "functional"])
def test_pure(name: str, eager: bool) -> None:
    """No input is changed, the same inputs give the same outputs, and nobody touches the global generator."""
    algorithm, s = method(name), setting(name)
    generator = torch.get_rng_state()
    x0 = s.problem.x0.clone()
    state = algorithm.init(s.problem, x0)
    identical(state, algorithm.init(s.problem, x0))
    assert torch.equal(x0, s.problem.x0)

    def checked(call: Any, state: Any, *rest: Any) -> Any:
        before = copied((state, rest))
        result = copied(call(state, *rest))
        identical(before, (state, rest))
        identical(result, call(state, *rest))
        identical(before, (state, rest))
        return result

    with torch.no_grad():
        for round_ in range(2):
            t = round_ * Q
            state = checked(algorithm.rejoin, state, t)
            state = checked(algorithm.receive, state, t)
            for i in range(t, t + Q):
                data = s.clients.sample(0, i)
                step = lambda state, data, i: algorithm.step(s.problem, state, Batch(data, None, Tape(), eager), i)  # noqa: E731
                state = checked(step, state, data, i)
            state = checked(algorithm.send, state, t + Q)
    old = {k: getattr(state, k) for k in algorithm.shared}
    mean = {k: v + 0.1 for k, v in old.items()}
    checked(lambda own, old: algorithm.server.update(own, old, mean, 0.5), algorithm.server.init(old), old)
    assert torch.equal(generator, torch.get_rng_state())


@every
def test_scratch_is_scratch(name: str) -> None:
    """All fields but the shared and private ones may hold anything when a round starts."""
    algorithm, s = method(name), setting(name)
    after = run(name, 2)
    span = span_from(algorithm, after.history[-1]["iteration"], Q)
    template = algorithm.init(s.problem, s.problem.x0)
    scratch = set(template._fields) - set(algorithm.shared) - set(algorithm.private)
    spoilt = template._replace(**{k: torch.full_like(getattr(template, k), math.nan) for k in scratch})
    batches = [s.clients.seeded(SEED).sample(0, t) for t in range(*span)]
    private = {k: v[0] for k, v in after.private.items()}
    outcomes = []
    for start in (template, spoilt):
        program = Program(s.problem, algorithm, start, span, eager=False)
        outcomes.append(program(after.shared, private, None, batches, [None] * len(batches)))
    identical(outcomes[1], outcomes[0])
    assert all(torch.isfinite(v).all() for v in outcomes[1][0].values())


@every
@pytest.mark.parametrize(("dtype", "mode"), [(torch.float32, "vmap"), (torch.float32, "loop"), (torch.float64, "vmap")])
def test_dtype_is_kept(name: str, dtype: torch.dtype, mode: str) -> None:
    result = run(name, 2, dtype=dtype, mode=mode)
    for v in (result.x, *result.shared.values(), *result.private.values()):
        assert v.dtype == dtype


@every
def test_vectorised_is_one_after_another(name: str) -> None:
    s, paths = setting(name), []
    for mode in ("vmap", "loop"):
        result, rounds = trace(s.problem, method(name), s.clients, rounds=3, q=Q, mode=mode)
        paths.append(([shared for _, shared in rounds], dict(result.private), result.history))
    (shared, private, history), (shared2, private2, history2) = paths
    torch.testing.assert_close(shared, shared2, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(private, private2, rtol=1e-10, atol=1e-10)
    assert not torch.equal(shared[0][TABLE[name].point], shared[-1][TABLE[name].point])
    for one, two in zip(history, history2):
        for column in ("examples", "bytes_up", "bytes_down", "participants", "iteration"):
            assert one[column] == two[column]
        assert (one["loss"] is None) == (two["loss"] is None)
        assert one["loss"] is None or one["loss"] == pytest.approx(two["loss"], rel=1e-10)


@every
def test_resumes_exactly(name: str, tmp_path: Path) -> None:
    """Also when clients sat out the round before the break, where there is more than one."""
    participation = None if TABLE[name].single else 3
    whole = run(name, 6, participation=participation)
    run(name, 3, participation=participation, directory=tmp_path)
    again = run(name, 6, participation=participation, directory=tmp_path)
    identical(again.shared, whole.shared)
    identical(again.private, whole.private)
    assert [r["round"] for r in again.history] == [r["round"] for r in whole.history]
    for column in ("examples", "bytes_up", "bytes_down", "iteration", "loss"):
        assert [r[column] for r in again.history] == [r[column] for r in whole.history]


@every
def test_goes_down_on_a_convex_problem(name: str) -> None:
    """The gap to the optimum falls to a fifth and less on a problem of the method's kind with known truth."""
    case = CASES[name]
    N = 1 if TABLE[name].single else 4
    toy: Any = {
        "plain": lambda: Quadratic(N, 3, zeta=0.0 if case.homogeneous else 1.0, condition=4.0, sigma=0.1, batch=2),
        "conditional": lambda: ConditionalToy(N, 3, zeta=0.3, sigma=0.3, inner=8, outer=4),
        "compositional": lambda: CompositionalToy(N, 3, 5, zeta=0.1, sigma=0.1, batch=4),
        "tasked": lambda: CompositionalToy(N, 3, 5, zeta=0.1, sigma=0.1, batch=4),
        "minimax": lambda: MinimaxToy(N, 3, 2, zeta=0.3, sigma=0.1, batch=2),
    }[case.setting]()
    result = simulate(toy.problem, method(name), toy.clients, rounds=40, q=Q, seed=SEED, progress=False, mode="vmap")
    best = toy.value(toy.minimiser)
    gap = toy.value(toy.problem.x0) - best
    assert gap > 0.3
    assert toy.value(result.x) - best < gap / 5


@federated
@pytest.mark.parametrize("failures", [0.0, 0.3])
def test_partial_participation(name: str, failures: float) -> None:
    """3 of 5 clients a round: it runs, twice alike, and costs what is really sent."""
    result = run(name, 5, participation=3, failures=failures)
    again = run(name, 5, participation=3, failures=failures)
    identical(result.shared, again.shared)
    identical(result.private, again.private)
    other = run(name, 5, participation=3, failures=failures, mode="loop")
    torch.testing.assert_close(other.shared, result.shared, rtol=1e-9, atol=1e-9)
    assert all(torch.isfinite(v).all() for v in (*result.shared.values(), *result.private.values()))
    took_part = [record["participants"] for record in result.history]
    assert max(took_part) == 3
    assert (min(took_part) < 3) == bool(failures)
    once, _ = Encoding().sizes(result.shared)
    assert once == sum(v.numel() * 8 for v in result.shared.values())
    assert set(result.shared) == set(TABLE[name].shared)
    for record, total in zip(result.history, itertools.accumulate(took_part)):
        assert record["bytes_up"] == total * once
        assert record["bytes_down"] == 3 * record["round"] * once


@federated
def test_participation_in_plain_words(name: str) -> None:
    """The rounds written out: who was away rejoins, receives, steps and sends; the server gets the mean and |S|/N."""
    algorithm, s, rounds = method(name), setting(name), 5
    clients, exchange = s.clients.seeded(SEED), Exchange(count=3, failures=0.3)
    template = algorithm.init(s.problem, s.problem.x0)
    shared = {k: getattr(template, k) for k in algorithm.shared}
    states, server = [template] * 5, algorithm.server.init(shared)
    last, t = dict.fromkeys(range(5), -1), 0
    for r in range(rounds):
        span = span_from(algorithm, t, Q)
        who = answering(exchange, SEED, 5, r)
        for n in who:
            state = states[n]._replace(**shared)
            if r > 0 and last[n] != r - 1:
                state = algorithm.rejoin(state, t)
            state = algorithm.receive(state, t)
            for i in range(*span):
                state = algorithm.step(s.problem, state, clients.sample(n, i), i)
            states[n], last[n] = algorithm.send(state, span.stop), r
        if who:
            mean = {k: torch.stack([getattr(states[n], k) for n in who]).mean(0) for k in shared}
            server, shared = algorithm.server.update(server, shared, mean, len(who) / 5)
        t = span.stop
    result = run(name, rounds, participation=3, failures=0.3)
    torch.testing.assert_close(dict(result.shared), dict(shared), rtol=1e-10, atol=1e-10)
    for k, v in result.private.items():
        torch.testing.assert_close(v, torch.stack([getattr(state, k) for state in states]), rtol=1e-10, atol=1e-10)


@federated
def test_absent_clients_keep_their_fields(name: str) -> None:
    """What a client keeps to itself changes only in rounds that it takes part in."""
    before, after = run(name, 3, participation=2), run(name, 4, participation=2)
    for field, value in after.private.items():
        changed = (value != before.private[field]).reshape(len(value), -1).any(1)
        assert int(changed.sum()) <= 2


def test_a_drawn_outcome_when_nobody_answers_or_the_draw_is_past(tmp_path: Path) -> None:
    """A round without answers leaves the point where it was; a run that was not asked for a draw cannot give one."""
    for seed in range(6):
        result = run("fedavg", 3, failures=0.9, keep="uniform", seed=seed)
        assert torch.isfinite(result.x).all()
    run("fedavg", 5, directory=tmp_path)
    with pytest.raises(NestfedError, match="uniform"):
        run("fedavg", 5, directory=tmp_path, keep="uniform")


@pytest.mark.parametrize(
    ("name", "hyper"),
    [
        ("local-scgdm", {"eta": 1.0, "alpha": 0.5, "beta": 0.1, "gamma": lambda t: 0.3 * t}),
        ("fcsg-m", {"alpha": 0.05, "beta": lambda t: 0.3 * t}),
    ],
)
def test_a_weight_that_grows_above_one_is_refused_when_it_does(name: str, hyper: dict[str, Any]) -> None:
    s = setting(name)
    algorithm = build(name, **hyper)
    simulate(s.problem, algorithm, s.clients, rounds=1, q=4, progress=False)
    with pytest.raises(NestfedError, match=r"weight must lie in \[0, 1\].* at iteration 4"):
        simulate(s.problem, algorithm, s.clients, rounds=2, q=4, progress=False)


@every
def test_refuses_other_kinds(name: str) -> None:
    x, s = torch.zeros(3, dtype=torch.float64), setting(name)
    others = (
        Minimize(lambda x, b: x.sum(), x),
        Conditional(lambda u, o: u, lambda x, o, i: x, x),
        Compositional(lambda u, o: u.sum(), lambda x, i: x, x, 3),
        Minimax(lambda x, w, b: x.sum(), x, x),
    )
    refused = [p for p in others if not isinstance(p, TABLE[name].accepts)]
    assert refused
    for problem in refused:
        with pytest.raises(NestfedError) as error:
            simulate(problem, method(name), s.clients, rounds=1)
        text = one_sentence(error)
        assert name in text
        assert TABLE[name].accepts.kinds in text
        assert type(problem).__name__ in text


@pytest.mark.parametrize("name", [name for name in TABLE if TABLE[name].single])
def test_single_machine_methods_refuse_company(name: str) -> None:
    s = cases.SETTINGS[CASES[name].setting](2)
    with pytest.raises(NestfedError, match="single-machine") as error:
        simulate(s.problem, method(name), s.clients, rounds=1)
    one_sentence(error)


@every
def test_refuses_wrong_hyper_parameters(name: str) -> None:
    """Every number: text, NaN, infinity and less than nothing; a step size: 0; a weight: outside (0, 1]."""
    case, refused = CASES[name], []
    for field in dataclasses.fields(method(name)):  # type: ignore[arg-type]
        if field.name == "norm":
            continue
        values: list[Any] = ["0.1", math.nan, -1.0, None, True, lambda t: "x"]
        values += [math.inf] if field.name != "gamma" else []
        values += [0.0, lambda t: 0.0] if field.name in (*case.steps, *case.weights) else []
        values += [1.5, lambda t: 1.5] if field.name in case.weights else []
        refused += [(field.name, v) for v in values if not (field.name == "c" and v is None and name != "fmgda")]
    assert {*case.steps, *case.weights} <= {field for field, _ in refused}
    for field_name, value in refused:
        with pytest.raises(NestfedError) as error:
            method(name, **{field_name: value})
        text = one_sentence(error)
        assert text.startswith(name)


@every
def test_a_number_that_cannot_vary_refuses_a_function(name: str) -> None:
    """A field that is not declared as a schedule says so, instead of failing after the start."""
    varying = {}
    for field in dataclasses.fields(method(name)):  # type: ignore[arg-type]
        if "Schedule" in str(field.type):
            constant = getattr(method(name), field.name)
            varying[field.name] = lambda t, constant=constant: constant
        elif field.name != "norm":
            with pytest.raises(NestfedError, match=field.name):
                method(name, **{field.name: lambda t: 0.5})
    identical(run(name, 2, algorithm=method(name, **varying)).shared, run(name, 2).shared)


@every
def test_names_wrong_hyper_parameters(name: str) -> None:
    assert build(name, **CASES[name].hyper) == method(name)
    with pytest.raises(NestfedError, match="learning_rate"):
        build(name, learning_rate=0.1)


def test_draw_is_stacked_samples() -> None:
    """The settings' clients draw at once what they draw one by one."""
    for make in cases.SETTINGS.values():
        clients = make(4).clients.seeded(3)
        for t, batch in zip(range(2, 5), clients.draw([2, 0], range(2, 5))):
            for i, n in enumerate((2, 0)):
                identical(torch.utils._pytree.tree_map(lambda leaf, i=i: leaf[i], batch), clients.sample(n, t))
