"""Every method against the literal transcription of its box, after every round, at 1e-10."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from nestfed import algorithms as a
from nestfed.engine.program import span_from
from tests.algorithms import boxes
from tests.toys import SETTINGS, TASKS, Setting, rows, trace

Q = 3
ROUNDS = 5
Box = Callable[[Setting, int, int], dict[str, np.ndarray]]


class Match(NamedTuple):
    """A method, the setting it runs in, and its box as a function of (setting, N, T)."""

    algorithm: Any
    setting: str
    box: Box
    lag: dict[str, int] = {}  # noqa: RUF012
    """How many iterations a field's place in the box lies before the iterations that are done."""
    private: dict[str, str] = {}  # noqa: RUF012
    """What stays on the clients, and its name in the box."""
    rounds: int = ROUNDS
    label: str = ""


def falling(scale: float) -> Callable[[int], float]:
    return lambda t: scale / (1 + t) ** 0.5


def growing(scale: float) -> Callable[[int], float]:
    return lambda t: 1 - scale / (2 + t)


def only(box: Callable[..., np.ndarray], *args: Any) -> Box:
    """A box that returns x alone."""
    return lambda s, N, T: {"x": box(s.maps["grad"], s.x0, N, Q, T, *args)}


def several(box: Callable[..., dict[str, np.ndarray]], *args: Any, **options: Any) -> Box:
    return lambda s, N, T: box(s.maps["grad"], s.x0, N, Q, T, *args, **options)


def composed(box: Callable[..., dict[str, np.ndarray]], *args: Any) -> Box:
    names = ("g", "jac", "outer")
    return lambda s, N, T: box(*(s.maps[k] for k in names), s.x0, N, Q, T, *args)


def by_task(box: Callable[..., dict[str, np.ndarray]], *args: Any) -> Box:
    names = ("tasks", "g", "jac", "outer")
    return lambda s, N, T: box(*(s.maps[k] for k in names), s.x0, N, Q, T, *args)


def saddle(box: Callable[..., dict[str, np.ndarray]], *args: Any) -> Box:
    return lambda s, N, T: box(s.maps["grad"], s.x0, s.maps["w0"](), N, Q, T, *args)


def crossed(box: Callable[..., dict[str, np.ndarray]], *args: Any, **options: Any) -> Box:
    return lambda s, N, T: box(s.maps, s.x0, N, Q, T, *args, **options)


def shrunk(box: Callable[..., dict[str, np.ndarray]], *args: Any, k: float, alone: int = 0) -> Box:
    return lambda s, N, T: box(s.maps, s.x0, N, Q, T, *args, rows=rows(N), k=k, alone=alone)


def coda(s: Setting, N: int, T: int) -> dict[str, np.ndarray]:
    return boxes.coda(s.maps["grad"], s.maps["dual"], s.x0, s.maps["w0"](), N, Q, T, 0.2, 2.0, 3)


def codasca(eta_g: float) -> Box:
    def run(s: Setting, N: int, T: int) -> dict[str, np.ndarray]:
        out = boxes.codasca(s.maps["grad"], s.x0, s.maps["w0"](), N, Q, T, 0.2, 2.0, 3, eta_g)
        common = {k: np.stack([boxes.averaged(v) for v in out[k]]) for k in ("c_theta", "c_w")}
        return {**out, **common, "own_theta": out["c_theta"], "own_w": out["c_w"]}

    return run


ESTIMATE_LAST = {"x": 1, "m": 1, "v": 1}
ONE_LATER = dict.fromkeys(("x", "theta", "w", "u", "v", "square_theta", "square_w", "last_theta"), 1)
REACHED = {"reached": "reached"}
C_STEM, C_FAFED = 30.0, 40.0

MATCHES: dict[str, list[Match]] = {
    "fedavg": [
        Match(a.FedAvg(0.1), "plain", only(boxes.fedavg, 0.1)),
        Match(a.FedAvg(falling(0.3)), "plain", only(boxes.fedavg, falling(0.3)), label="schedule"),
        Match(a.FedAvg(0.1), "conditional", only(boxes.fedavg, 0.1)),
    ],
    "fedprox": [
        Match(a.FedProx(0.1, 0.7), "plain", only(boxes.fedprox, 0.1, 0.7)),
        Match(a.FedProx(falling(0.1), 0.7), "plain", only(boxes.fedprox, falling(0.1), 0.7), label="schedule"),
    ],
    "fednova": [
        Match(a.FedNova(0.1), "plain", several(boxes.fednova, 0.1, [Q] * 9)),
        Match(a.FedNova(falling(0.1)), "plain", several(boxes.fednova, falling(0.1), [Q] * 9), label="schedule"),
    ],
    "scaffold": [
        Match(a.Scaffold(0.1), "plain", several(boxes.scaffold, 0.1), private={"own": "c_n"}),
        Match(
            a.Scaffold(falling(0.2)),
            "plain",
            several(boxes.scaffold, falling(0.2)),
            private={"own": "c_n"},
            label="schedule",
        ),
        Match(a.Scaffold(0.1, 0.6), "plain", several(boxes.scaffold, 0.1, 0.6), private={"own": "c_n"}, label="eta_g"),
    ],
    "feddyn": [
        Match(a.FedDyn(0.1, 0.7), "plain", several(boxes.feddyn, 0.1, 0.7), private={"own": "lambda"}),
        Match(
            a.FedDyn(falling(0.2), 0.7),
            "plain",
            several(boxes.feddyn, falling(0.2), 0.7),
            private={"own": "lambda"},
            label="schedule",
        ),
    ],
    "ditto": [
        Match(a.Ditto(0.1, 0.7), "plain", several(boxes.ditto, 0.1, 0.7), private={"v": "v"}),
        Match(
            a.Ditto(falling(0.2), 0.7),
            "plain",
            several(boxes.ditto, falling(0.2), 0.7),
            private={"v": "v"},
            label="schedule",
        ),
    ],
    "fedrep": [
        Match(a.FedRep(0.1, "head"), "parted", several(boxes.fedrep, 0.1, 1, 2), private={"head": "head"}),
        Match(
            a.FedRep(falling(0.2), "head", q_h=2),
            "parted",
            several(boxes.fedrep, falling(0.2), 2, 2),
            private={"head": "head"},
            label="schedule",
        ),
    ],
    "stem": [
        Match(a.STEM(0.1, 0.4), "plain", several(boxes.stem, 0.1, 0.4), {"d": 1}),
        Match(
            a.STEM(falling(0.1), growing(0.8)),
            "plain",
            several(boxes.stem, falling(0.1), growing(0.8)),
            {"d": 1},
            label="schedule",
        ),
        Match(
            a.STEM(falling(0.1), c=C_STEM),
            "plain",
            several(boxes.stem, falling(0.1), lambda t: C_STEM * falling(0.1)(t - 1) ** 2),
            {"d": 1},
            label="c",
        ),
    ],
    "naive-adaptive": [
        Match(a.NaiveAdaptive(0.1, 0.7), "plain", several(boxes.naive_adaptive, 0.1, 0.7), private={"v": "v"}),
    ],
    "fafed": [
        Match(a.FAFED(0.1, 0.4, 0.8, 0.2), "plain", several(boxes.fafed, 0.1, 0.4, 0.8, 0.2), ESTIMATE_LAST),
        Match(
            a.FAFED(falling(0.1), growing(0.8), 0.8, 0.2),
            "plain",
            several(boxes.fafed, falling(0.1), growing(0.8), 0.8, 0.2),
            ESTIMATE_LAST,
            label="schedule",
        ),
        Match(
            a.FAFED(falling(0.1), beta=0.8, rho=0.2, c=C_FAFED),
            "plain",
            several(boxes.fafed, falling(0.1), lambda t: C_FAFED * falling(0.1)(t - 1) ** 2, 0.8, 0.2),
            ESTIMATE_LAST,
            label="c",
        ),
        Match(
            a.FAFED(0.1, 0.4, 0.8, 0.2, norm=True),
            "plain",
            several(boxes.fafed, 0.1, 0.4, 0.8, 0.2, norm=True),
            ESTIMATE_LAST,
            label="norm",
        ),
    ],
    "fedadam": [Match(a.FedAdam(0.1, 0.3, 0.8, 0.9, 0.05), "plain", only(boxes.fedadam, 0.1, 0.3, 0.8, 0.9, 0.05))],
    "fedyogi": [Match(a.FedYogi(0.1, 0.3, 0.8, 0.9, 0.05), "plain", only(boxes.fedyogi, 0.1, 0.3, 0.8, 0.9, 0.05))],
    "fedadagrad": [Match(a.FedAdagrad(0.1, 0.3, 0.8, tau=0.05), "plain", only(boxes.fedadagrad, 0.1, 0.3, 0.8, 0.05))],
    "fedams": [
        # V starts at τ² as in FedAdam; a large ε and a large τ, so that every part of the maximum is met.
        Match(a.FedAMS(0.1, 0.3, 0.8, 0.5, 0.2, 1e-2), "plain", only(boxes.fedams, 0.1, 0.3, 0.8, 0.5, 1e-2, 0.2)),
        Match(
            a.FedAMS(0.1, 0.3, 0.8, 0.5, 1e-9, 1e-3),
            "plain",
            only(boxes.fedams, 0.1, 0.3, 0.8, 0.5, 1e-3),
            label="from zero",
        ),
    ],
    "fcsg": [Match(a.FCSG(0.1), "conditional", only(boxes.fcsg, 0.1))],
    "fcsg-m": [
        Match(a.FCSGM(0.1, 0.3), "conditional", several(boxes.fcsg_m, 0.1, 0.3)),
        Match(
            a.FCSGM(falling(0.2), growing(0.9)),
            "conditional",
            several(boxes.fcsg_m, falling(0.2), growing(0.9)),
            label="schedule",
        ),
    ],
    "acc-fcsg-m": [
        Match(a.AccFCSGM(0.1, 0.3), "conditional", several(boxes.acc_fcsg_m, 0.1, 0.3)),
        Match(
            a.AccFCSGM(falling(0.2), growing(0.9)),
            "conditional",
            several(boxes.acc_fcsg_m, falling(0.2), growing(0.9)),
            label="schedule",
        ),
    ],
    "bsgd": [Match(a.BSGD(0.1), "conditional", lambda s, N, T: {"x": boxes.bsgd(s.maps["grad"], s.x0, T, 0.1)})],
    "bspiderboost": [
        Match(
            a.BSpiderBoost(0.1, period=4),
            "conditional",
            lambda s, N, T: boxes.bspiderboost(s.maps["grad"], s.x0, 4, T, 0.1),
        )
    ],
    "local-bsgd": [Match(a.LocalBSGD(0.1), "compositional", composed(boxes.local_bsgd, 0.1))],
    "local-scgd": [
        Match(a.LocalSCGD(0.1, 0.6), "compositional", composed(boxes.local_scgd, 0.1, 0.6)),
        Match(
            a.LocalSCGD(falling(0.1), growing(0.9)),
            "compositional",
            composed(boxes.local_scgd, falling(0.1), growing(0.9)),
            label="schedule",
        ),
    ],
    "local-scgdm": [
        Match(a.LocalSCGDM(0.5, 0.9, 0.3, 1.2), "compositional", composed(boxes.local_scgdm, 0.5, 0.9, 0.3, 1.2)),
        Match(
            a.LocalSCGDM(falling(0.7), 0.9, 0.3, 1.2),
            "compositional",
            composed(boxes.local_scgdm, falling(0.7), 0.9, 0.3, 1.2),
            label="schedule",
        ),
        # several tasks in a batch, one inner state for all of them
        Match(
            a.LocalSCGDM(0.5, 0.9, 0.3, 1.2),
            "tasked",
            by_task(boxes.local_scgdm_tasks, 0.5, 0.9, 0.3, 1.2),
            label="tasks",
        ),
    ],
    "local-scgdm-tasks": [
        Match(
            a.LocalSCGDMTasks(0.5, 0.9, 0.3, 1.2),
            "tasked",
            by_task(boxes.local_scgdm_own_tasks, 0.5, 0.9, 0.3, 1.2, TASKS),
            private={"u": "u"},
        )
    ],
    "local-moml": [
        Match(a.LocalMOML(0.2, 0.6), "tasked", by_task(boxes.local_moml, 0.2, 0.6, TASKS), private={"u": "u"}),
        Match(
            a.LocalMOML(falling(0.2), growing(0.9)),
            "tasked",
            by_task(boxes.local_moml, falling(0.2), growing(0.9), TASKS),
            private={"u": "u"},
            label="schedule",
        ),
    ],
    "scgd": [
        Match(
            a.SCGD(0.1, 0.6),
            "compositional",
            lambda s, N, T: boxes.scgd(*(s.maps[k] for k in ("g", "jac", "outer")), s.x0, T, 0.1, 0.6),
        )
    ],
    "local-sgda": [
        Match(a.LocalSGDA(0.1, 0.2), "minimax", saddle(boxes.local_sgda, 0.1, 0.2)),
        Match(
            a.LocalSGDA(falling(0.1), falling(0.2)),
            "minimax",
            saddle(boxes.local_sgda, falling(0.1), falling(0.2)),
            label="schedule",
        ),
    ],
    "momentum-local-sgda": [
        Match(
            a.MomentumLocalSGDA(0.1, 0.2, beta=1.3, a=0.6),
            "minimax",
            saddle(boxes.momentum_local_sgda, 0.1, 0.2, 0.6, 1.3),
        ),
        Match(
            a.MomentumLocalSGDA(falling(0.1), falling(0.2), beta=1.3, a=falling(0.6)),
            "minimax",
            saddle(boxes.momentum_local_sgda, falling(0.1), falling(0.2), falling(0.6), 1.3),
            label="schedule",
        ),
    ],
    # T0 = 3: stages of 3, 9 and 27 iterations, so that three of them are entered
    "coda": [Match(a.CODA(0.2, 2.0, 3), "minimax", coda, rounds=8)],
    "coda-plus": [Match(a.CODAPlus(0.2, 2.0, 3), "minimax", saddle(boxes.coda_plus, 0.2, 2.0, 3), rounds=6)],
    "codasca": [
        Match(
            a.CODASCA(0.2, 2.0, 3),
            "minimax",
            codasca(1.0),
            private={"own_theta": "own_theta", "own_w": "own_w"},
            rounds=6,
        ),
        Match(a.CODASCA(0.2, 2.0, 3, 0.5), "minimax", codasca(0.5), rounds=6, label="eta_g"),
    ],
    "fmgda": [
        Match(a.FMGDA(0.5, 0.2, 0.4, 0.3, 0.6), "minimax", saddle(boxes.fmgda, 0.5, 0.2, 0.4, 0.3, 0.6)),
        Match(
            a.FMGDA(falling(0.5), 0.2, 0.4, growing(0.9), growing(0.5)),
            "minimax",
            saddle(boxes.fmgda, falling(0.5), 0.2, 0.4, growing(0.9), growing(0.5)),
            label="schedule",
        ),
    ],
    "sox": [
        Match(a.SOX(0.1, 0.3, 0.6), "sampled", by_task(boxes.sox, 0.1, 0.3, 0.6, TASKS), private={"u": "u"}),
        Match(
            a.SOX(falling(0.2), growing(0.9), growing(0.5)),
            "sampled",
            by_task(boxes.sox, falling(0.2), growing(0.9), growing(0.5), TASKS),
            private={"u": "u"},
            label="schedule",
        ),
    ],
    "ada-fcsg-m": [
        Match(a.AdaFCSGM(0.1, 0.3, 0.8, 0.2), "conditional", several(boxes.ada_fcsg_m, 0.1, 0.3, 0.8, 0.2), ONE_LATER),
        Match(
            a.AdaFCSGM(falling(0.2), growing(0.9), growing(0.7), 0.2),
            "conditional",
            several(boxes.ada_fcsg_m, falling(0.2), growing(0.9), growing(0.7), 0.2),
            ONE_LATER,
            label="schedule",
        ),
    ],
    "ada-fmgda": [
        Match(
            a.AdaFMGDA(0.5, 0.2, 0.4, 0.3, 0.6, 0.8, 0.2),
            "minimax",
            saddle(boxes.ada_fmgda, 0.5, 0.2, 0.4, 0.3, 0.6, 0.8, 0.2),
            ONE_LATER,
            private={"last_theta": "last"},
        ),
        Match(
            a.AdaFMGDA(falling(0.5), 0.2, 0.4, growing(0.9), growing(0.5), growing(0.7), 0.2),
            "minimax",
            saddle(boxes.ada_fmgda, falling(0.5), 0.2, 0.4, growing(0.9), growing(0.5), growing(0.7), 0.2),
            ONE_LATER,
            label="schedule",
        ),
    ],
    "fedxl1": [
        Match(a.FeDXL1(0.1), "paired", crossed(boxes.fedxl1, 0.1, 1)),
        Match(a.FeDXL1(falling(0.3), 3), "paired", crossed(boxes.fedxl1, falling(0.3), 3), label="schedule"),
    ],
    "fedxl2": [
        Match(
            a.FeDXL2(0.1, 0.6, 0.3),
            "precise",
            crossed(boxes.fedxl2, 0.1, 0.6, 0.3, 1),
            private={"u": "u", "met": "met"},
        ),
        Match(
            a.FeDXL2(falling(0.3), growing(0.8), growing(0.9), 3),
            "precise",
            crossed(boxes.fedxl2, falling(0.3), growing(0.8), growing(0.9), 3),
            private={"u": "u"},
            label="schedule",
        ),
        Match(a.FeDXL2(0.1, 0.6, 0.3, 2), "tilted", crossed(boxes.fedxl2, 0.1, 0.6, 0.3, 2), private={"u": "u"}),
        Match(a.FeDXL2(0.02, 0.6, 0.3, 2), "steep", crossed(boxes.fedxl2, 0.02, 0.6, 0.3, 2), label="logarithms"),
    ],
    "afl": [
        Match(a.AFL(0.1, 0.2), "plain", crossed(boxes.afl, 0.1, 0.2, "projected"), private=REACHED),
        Match(
            a.AFL(falling(0.3), 2.0, alone=2),
            "plain",
            crossed(boxes.afl, falling(0.3), 2.0, "projected", alone=2),
            private=REACHED,
            label="regret",
        ),
        Match(
            a.AFL(0.1, 0.7, "exponentiated"),
            "plain",
            crossed(boxes.afl, 0.1, 0.7, "exponentiated"),
            private=REACHED,
            label="exponentiated",
        ),
        Match(
            a.AFL(0.1, 0.4, "exponentiated", k=3.0),
            "counted",
            shrunk(boxes.afl, 0.1, 0.4, "exponentiated", k=3.0),
            private=REACHED,
            label="shrunk",
        ),
    ],
    "kl-dro": [
        Match(a.KLDRO(0.1, 0.3), "plain", crossed(boxes.kl_dro, 0.1, 0.3, 1.0), private=REACHED),
        Match(
            a.KLDRO(falling(0.3), 0.3, 0.6, alone=4),
            "plain",
            crossed(boxes.kl_dro, falling(0.3), 0.3, 0.6, alone=4),
            private=REACHED,
            label="regret",
        ),
        Match(
            a.KLDRO(0.1, 0.3, 0.6, k=4.0, alone=2),
            "counted",
            shrunk(boxes.kl_dro, 0.1, 0.3, 0.6, k=4.0, alone=2),
            private=REACHED,
            label="shrunk",
        ),
    ],
    "cvar-dro": [
        Match(a.CVaRDRO(0.1, 0.6, 0.3), "plain", crossed(boxes.cvar_dro, 0.1, 0.6, 0.3), private=REACHED),
        Match(
            a.CVaRDRO(falling(0.3), 0.4, 0.2, alone=1),
            "plain",
            crossed(boxes.cvar_dro, falling(0.3), 0.4, 0.2, alone=1),
            private=REACHED,
            label="regret",
        ),
        Match(
            a.CVaRDRO(0.1, 0.6, 0.3, k=2.0),
            "counted",
            shrunk(boxes.cvar_dro, 0.1, 0.6, 0.3, k=2.0),
            private=REACHED,
            label="shrunk",
        ),
    ],
    "q-ffl": [
        Match(a.QFFL(0.1, 1.5), "plain", crossed(boxes.q_ffl, 0.1, 1.5), private=REACHED),
        Match(
            a.QFFL(falling(0.3), 2.0, alone=3),
            "plain",
            crossed(boxes.q_ffl, falling(0.3), 2.0, alone=3),
            private=REACHED,
            label="regret",
        ),
        Match(
            a.QFFL(0.1, 1.5, k=5.0), "counted", shrunk(boxes.q_ffl, 0.1, 1.5, k=5.0), private=REACHED, label="shrunk"
        ),
    ],
}

SERVED = [
    Match(
        a.FCSGM(0.1, 0.3).served_by(a.Adam(0.05, 0.8, 0.9, 0.05)),
        "conditional",
        several(boxes.fcsg_m_adam, 0.1, 0.3, 0.05, 0.8, 0.9, 0.05),
    ),
    Match(
        a.FMGDA(falling(0.5), 0.2, 0.4, 0.3, 0.6).served_by(a.Yogi(0.05, 0.8, 0.7, 0.05)),
        "minimax",
        saddle(boxes.fmgda_yogi, falling(0.5), 0.2, 0.4, 0.3, 0.6, 0.05, 0.8, 0.7, 0.05),
    ),
]


def test_every_method_has_its_box() -> None:
    assert set(MATCHES) == set(a.METHODS)
    for name, matches in MATCHES.items():
        assert all(type(match.algorithm) is a.METHODS[name] for match in matches)


@pytest.mark.parametrize(
    "match",
    [
        pytest.param(m, id=f"{m.algorithm.name}-{m.setting}{'-' * bool(m.label)}{m.label}")
        for ms in [*MATCHES.values(), SERVED]
        for m in ms
    ],
)
def test_box(match: Match) -> None:
    N = 1 if match.algorithm.single else 4
    setting = SETTINGS[match.setting](N)
    done, box = 0, {}
    # The first match of every method runs in a loop too; nestfed.testing compares the two for every method.
    for mode in ("vmap",) if match.label else ("vmap", "loop"):
        result, rounds = trace(setting.problem, match.algorithm, setting.clients, rounds=match.rounds, q=Q, mode=mode)
        assert len(rounds) == match.rounds + 1
        done = rounds[-1][0]
        box = box or match.box(setting, N, done + 1)
        for t, shared in rounds[1:]:
            assert set(shared) == set(match.algorithm.shared)
            for name, value in shared.items():
                expected, where = box[name][t - match.lag.get(name, 0), 0], f"{name} after {t}, {mode}"
                np.testing.assert_allclose(value.numpy(), expected, rtol=1e-10, atol=1e-10, err_msg=where)
        for name, there in match.private.items():
            expected, where = box[there][done - match.lag.get(name, 0)], f"{name}, {mode}"
            np.testing.assert_allclose(result.private[name].numpy(), expected, rtol=1e-10, atol=1e-10, err_msg=where)
        if "level" in result.gathered:
            columns = [box["level"][done], np.ones(N), np.full(N, box["mean"][done])]
            level = np.stack(columns if match.algorithm.k else columns[:2], 1)
            np.testing.assert_allclose(result.gathered["level"].numpy(), level, rtol=1e-10, atol=1e-10)
    # and it went somewhere, so that agreement means something
    moved = box[match.algorithm.point][done - match.lag.get(match.algorithm.point, 0), 0] - setting.x0
    assert np.abs(moved).max() > 1e-3


def test_rounds_of_coda_and_of_those_that_average_first() -> None:
    """CODA synchronises once more after a fresh w; STEM and FAFED right after iteration 0."""

    def spans(algorithm: Any, rounds: int) -> list[int]:
        stops, t = [], 0
        for _ in range(rounds):
            t = span_from(algorithm, t, Q).stop
            stops.append(t)
        return stops

    assert spans(a.FedAvg(0.1), 3) == [3, 6, 9]
    assert spans(a.CODA(0.2, 2.0, 3), 7) == [3, 4, 6, 9, 12, 13, 15]
    assert spans(a.STEM(0.1), 3) == spans(a.FAFED(0.1), 3) == [1, 4, 7]
