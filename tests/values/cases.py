"""The runs of every method, on every engine, with everything that can be set of an exchange; all but a few in float64."""

from __future__ import annotations

import tempfile
from functools import partial
from typing import Any

from tests.values import adapter
from tests.values.adapter import Settings, Values
from tests.values.registry import SINGLE, case

SERVER = {"eta": 0.05, "eta_g": 0.05, "tau": 0.01}
STAGES = {"eta": 0.1, "gamma": 10.0, "T0": 6}
SCGDM = {"eta": 0.8, "alpha": 0.9, "beta": 0.06, "gamma": 0.9}

METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "fedavg": ("plain", {"eta": 0.05}),
    "fedprox": ("plain", {"eta": 0.05, "mu": 0.1}),
    "scaffold": ("plain", {"eta": 0.05}),
    "stem": ("plain", {"eta": 0.05, "a": 0.3}),
    "naive-adaptive": ("plain", {"eta": 0.02, "beta": 0.9}),
    "fafed": ("plain", {"eta": 0.05, "alpha": 0.3, "rho": 1.0}),
    "fedadam": ("plain", SERVER),
    "fedyogi": ("plain", SERVER),
    "fedadagrad": ("plain", {**SERVER, "eta_g": 0.3}),
    "fedams": ("plain", SERVER),
    "fcsg": ("conditional", {"alpha": 0.05}),
    "fcsg-m": ("conditional", {"alpha": 0.05, "beta": 0.3}),
    "acc-fcsg-m": ("conditional", {"alpha": 0.05, "beta": 0.5}),
    "bsgd": ("conditional", {"alpha": 0.05}),
    "bspiderboost": ("conditional", {"alpha": 0.03, "period": 4}),
    "local-bsgd": ("compositional", {"eta": 0.05}),
    "local-scgd": ("compositional", {"eta": 0.05, "gamma": 0.7}),
    "local-scgdm": ("compositional", SCGDM),
    "local-scgdm-tasks": ("tasked", SCGDM),
    "local-moml": ("tasked", {"eta": 0.05, "beta": 0.7}),
    "scgd": ("compositional", {"eta": 0.05, "gamma": 0.7}),
    "local-sgda": ("minimax", {"eta_theta": 0.05, "eta_w": 0.1}),
    "momentum-local-sgda": ("minimax", {"eta_theta": 0.05, "eta_w": 0.1, "beta": 0.5}),
    "coda": ("minimax", STAGES),
    "coda-plus": ("minimax", STAGES),
    "codasca": ("minimax", STAGES),
    "fmgda": ("minimax", {"c_hat": 0.05, "c": 0.1, "alpha": 0.3}),
    "ada-fcsg-m": ("conditional", {"alpha": 0.05, "beta": 0.3, "rho": 1.0}),
    "ada-fmgda": ("minimax", {"c_hat": 0.1, "c": 0.2, "alpha": 0.3, "rho": 1.0}),
    "afl": ("plain", {"eta": 0.05, "gamma": 0.1}),
    "kl-dro": ("plain", {"eta": 0.05, "tau": 0.5, "gamma": 0.7}),
    "cvar-dro": ("plain", {"eta": 0.05, "rho": 0.6}),
    "q-ffl": ("plain", {"eta": 0.05, "p": 1.5, "alone": 2}),
}
ONE_CLIENT = ("bsgd", "bspiderboost", "scgd")
FEW = ("fedavg", "scaffold", "fedadam", "fcsg-m", "local-scgdm-tasks", "codasca", "fmgda")
"""One or two of each family: with fields that stay on clients, a server with a state, stages, tasks."""


def of(method: str, **others: Any) -> Settings:
    """Return the settings of a run of a method."""
    toy, hyper = METHODS[method]
    return {
        "toy": toy,
        "method": method,
        "hyper": hyper,
        "clients": 1 if method in ONE_CLIENT else 5,
        "participation": None if method in ONE_CLIENT else 4,  # so that some sit out
        **others,
    }


# --- methods and engines ---

for method in METHODS:
    case(f"methods/{method}")(partial(adapter.simulated, of(method)))

for method in FEW:
    for how in ("vmap", "workers", "vmap-workers"):
        case(f"engines/{how}/{method}")(partial(adapter.simulated, of(method, how=how)))
    case(f"engines/flower/{method}", needs="flwr")(partial(adapter.over_flower, of(method)))


@case("engines/ranks")
def ranks() -> Values:
    runs = {method: of(method) for method in FEW}
    runs["int8"] = of("fcsg-m", encoding="int8")
    runs["median"] = of("fmgda", reduction="median")
    runs["clip"] = of("scaffold", reduction="clip:0.05")
    return adapter.on_two_ranks(runs)


case("engines/batches-in-pieces")(partial(adapter.simulated, of("fedavg", pieces=2)))
case("engines/fields-on-disk")(partial(adapter.simulated, of("scaffold", on_disk=True)))
case("engines/flower/int8", needs="flwr")(partial(adapter.over_flower, of("fcsg-m", encoding="int8/float16")))
case("engines/flower/median", needs="flwr")(partial(adapter.over_flower, of("fmgda", reduction="median")))
case("engines/flower/clip", needs="flwr")(partial(adapter.over_flower, of("scaffold", reduction="clip:0.05")))

# --- who takes part ---

TAKING_PART: dict[str, dict[str, Any]] = {
    "all": {"participation": None},
    "count": {"participation": 2},
    "share": {"participation": 0.5},
    "failures": {"participation": None, "failures": 0.4},
    "share-and-failures": {"participation": 0.6, "failures": 0.3},
    "hardly-anybody": {"participation": 0.1},  # rounds in which nobody comes
}
for name, settings in TAKING_PART.items():
    for method in ("scaffold", "fcsg-m", "fmgda"):
        case(f"participation/{name}/{method}")(partial(adapter.simulated, of(method, rounds=6, **settings)))

# --- what is sent, and what becomes of it ---

for encoding in ("float16", "bfloat16", "int8", "int8/float16", "int8/bfloat16", "float16/float16"):
    for method in ("fcsg-m", "scaffold"):
        case(f"encodings/{encoding}/{method}")(partial(adapter.simulated, of(method, encoding=encoding)))

for reduction in ("median", "trimmed:0.3", "clip:0.05"):
    for method in ("fedadam", "fmgda"):
        for how in ("loop", "vmap"):
            case(f"reductions/{reduction}/{how}/{method}")(
                partial(adapter.simulated, of(method, reduction=reduction, how=how))
            )
case("reductions/clip-and-int8")(partial(adapter.simulated, of("scaffold", reduction="clip:0.05", encoding="int8")))

NOISY = {"reduction": "clip:0.5", "noise": 2.0}
case("noise/all", needs="dp_accounting")(partial(adapter.simulated, of("fedavg", participation=None, **NOISY)))
case("noise/share", needs="dp_accounting")(partial(adapter.simulated, of("fcsg-m", participation=0.5, **NOISY)))
case("noise/int8", needs="dp_accounting")(
    partial(adapter.simulated, of("fmgda", participation=None, encoding="int8", **NOISY))
)

for method in ("scaffold", "fmgda"):
    for how in ("loop", "vmap"):
        settings = of(method, how=how, participation=None, bad_numbers="drop", sick=(1, 3))
        case(f"bad-numbers/{how}/{method}")(partial(adapter.simulated, settings))

# --- what comes out, and going on ---

for method in ("fedavg", "acc-fcsg-m", "codasca"):
    case(f"outcomes/uniform/{method}")(partial(adapter.simulated, of(method, outcome="uniform")))
    for judge in ("norm", "-norm"):
        settings = of(method, outcome="best", judge=judge, evaluate_every=2)
        case(f"outcomes/best/{judge}/{method}")(partial(adapter.simulated, settings))


def resumed(settings: Settings) -> Values:
    """Stop after three rounds and go on to the fifth."""
    with tempfile.TemporaryDirectory() as folder:
        adapter.simulated({**settings, "folder": folder, "rounds": 3})
        return adapter.simulated({**settings, "folder": folder, "rounds": 5})


for method in FEW:
    case(f"resumed/{method}")(partial(resumed, of(method)))
case("resumed/int8")(partial(resumed, of("fcsg-m", encoding="int8")))
case("resumed/best")(partial(resumed, of("fedavg", outcome="best", judge="-norm")))

# --- other problems, in float32 ---

SMALL = {"clients": 3, "rounds": 2, "local_steps": 2}
for how in ("loop", "vmap"):
    images: Settings = {**SMALL, "toy": "images", "method": "fedavg", "hyper": {"eta": 0.05}, "how": how}
    case(f"problems/images/{how}", tolerance=SINGLE)(partial(adapter.simulated, images))
for kind, method in (("auroc", "fmgda"), ("ap", "fcsg-m")):
    several: Settings = {**SMALL, "toy": f"labels-{kind}", "method": method, "hyper": METHODS[method][1]}
    case(f"problems/labels-{kind}")(partial(adapter.simulated, several))
words: Settings = {**SMALL, "toy": "words", "method": "fafed", "hyper": {"eta": 0.05, "alpha": 0.3, "rho": 1.0}}
case("problems/words", tolerance=SINGLE)(partial(adapter.simulated, words))
characters: Settings = {**SMALL, "toy": "characters", "method": "fcsg-m", "hyper": {"alpha": 0.05, "beta": 0.3}}
case("problems/characters", tolerance=SINGLE)(partial(adapter.simulated, characters))
