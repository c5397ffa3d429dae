"""`simulate` with flat options: a test names the few that it is about, and each goes where its name is declared."""

from __future__ import annotations

import dataclasses
from typing import Any

import nestfed.engine.simulate as engine
from nestfed.data.random import Purpose, Streams
from nestfed.engine.options import Evaluation, Exchange, Execution, Gaussian

HOMES = {"evaluation": Evaluation, "exchange": Exchange, "execution": Execution}


def grouped(options: dict[str, Any]) -> dict[str, Any]:
    """Return options with those of `Evaluation`, `Exchange` and `Execution` put together.

    `participation` is a count or a share, as the tests' cases have it; `clip` and `noise` are those of `Gaussian`.
    """
    rest = dict(options)
    part = rest.pop("participation", None)
    if part is not None:
        rest["count" if isinstance(part, int) else "share"] = part
    if "noise" in rest:
        rest["privacy"] = Gaussian(rest.pop("clip"), rest.pop("noise"))
    for name, kind in HOMES.items():
        own = {f.name: rest.pop(f.name) for f in dataclasses.fields(kind) if f.name in rest}
        if own:
            rest[name] = dataclasses.replace(rest.get(name, kind()), **own)
    return rest


def simulate(problem: Any, method: Any, clients: Any, **options: Any) -> engine.Result:
    """Run `nestfed.simulate`."""
    return engine.simulate(problem, method, clients, **grouped(options))


def answering(exchange: Exchange, seed: int, clients: int, round: int) -> list[int]:
    """Return the clients that are asked in a round and answer, by the rule itself."""
    luck = Streams(seed).at(Purpose.FAILURE, 0, round).random(clients)
    return [n for n in exchange.draw(Streams(seed), clients, round) if luck[n] >= exchange.failures]
