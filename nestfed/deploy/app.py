"""The Flower app that carries an experiment out, with a README for everybody."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from nestfed.core import NestfedError

if TYPE_CHECKING:
    from nestfed.experiment.spec import Experiment

FLWR = "1.41.0"

PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "1.0.0"
description = "A federated experiment with nestfed"
license = {{ file = "LICENSE" }}
dependencies = ["nestfed[flower]", "flwr>={flwr},<1.42"]

[tool.flwr.app]
publisher = "nestfed"
fab-format-version = 1
flwr-version-target = "{flwr}"

[tool.flwr.app.components]
serverapp = "federated.server:app"
clientapp = "federated.client:app"

[tool.flwr.app.config]
sites = {sites}            # all that take part, numbered from 0
min-sites = {least}        # fewer good answers make no round: it is asked again, three times at most
deadline = {deadline}     # seconds after which a round goes on without those who have not answered
norm-limit = 0.0     # the largest change by one site in one round that is believed; 0.0 means any
lost-state = "refuse" # or "restart": what to do with a site that lost its private fields
out = "{out}"        # on the coordinator, relative to where the SuperLink was started
"""

APP = '''\
"""The {side}."""

from pathlib import Path

from nestfed.deploy.flower import {maker}

app = {maker}(Path(__file__).parents[1] / "experiment.toml")
'''

IGNORED = "secrets/\nruns/\nstate/\nflower/\n*.db\n*.db-*\n*.key\n*.log\n"

LICENSE = "All rights reserved. Replace this file by the licence of your experiment; Flower wants one to be there.\n"


def write_app(
    folder: Path,
    experiment: Experiment,
    sites: int,
    *,
    least: int = 0,
    deadline: float = 600.0,
    out: str = "runs/federated",
) -> None:
    """Write a Flower app that carries an experiment out."""
    try:
        import tomli_w
    except ImportError as error:
        raise NestfedError("Deployment needs Flower: pip install 'nestfed[flower]'.") from error
    (folder / "federated").mkdir(parents=True, exist_ok=True)
    files = {
        "pyproject.toml": PYPROJECT.format(
            name=_project_name(folder), flwr=FLWR, sites=sites, least=least or sites, deadline=float(deadline), out=out
        ),
        "experiment.toml": tomli_w.dumps({k: v for k, v in experiment.source.items() if k != "methods"}),
        "federated/__init__.py": '"""A federated experiment."""\n',
        "federated/client.py": APP.format(side="site", maker="client_app"),
        "federated/server.py": APP.format(side="coordinator", maker="server_app"),
        "LICENSE": LICENSE,
        ".gitignore": IGNORED,
    }
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


def _project_name(folder: Path) -> str:
    kept = "".join(c if c.isalnum() else "-" for c in folder.resolve().name.lower()).strip("-")
    return kept[:30].strip("-") or "federated"


def init(folder: Path, experiment: Experiment, sites: int) -> None:
    """Write an app with a README for the coordinator and the sites."""
    if folder.exists() and any(folder.iterdir()):
        raise NestfedError(f"{folder} is not empty; choose another directory.")
    check_experiment(experiment, sites)
    write_app(folder, experiment, sites)
    text = (Path(__file__).parent / "readme.md").read_text(encoding="utf-8")
    values = {
        "SITES": str(sites), "LAST": str(sites - 1), "DIGEST": experiment.digest(), "METHOD": experiment.algorithm.name,
    }  # fmt: skip
    for key, value in values.items():
        text = text.replace(f"@{key}@", value)
    (folder / "README.md").write_text(text, encoding="utf-8")


def check_experiment(experiment: Experiment, sites: int) -> None:
    """Refuse an experiment that cannot be deployed, before anything is written."""
    from nestfed.algorithms import METHODS, build
    from nestfed.experiment.spec import hyper_parameters

    if sites < 1:
        raise NestfedError(f"There must be at least 1 site, not {sites}.")
    if not experiment.algorithm.name:
        methods = ", ".join(experiment.methods)
        hint = f"this file's methods are {methods}" if methods else "see `nestfed list`"
        raise NestfedError(f"The experiment names no algorithm: choose one with --method ({hint}).")
    build(experiment.algorithm.name, **hyper_parameters(experiment.algorithm))
    if experiment.execution.device != "cpu":
        raise NestfedError(f"execution.device must be cpu: sites compute on it, not on {experiment.execution.device}.")
    if METHODS[experiment.algorithm.name].single and sites > 1:
        raise NestfedError(f"{experiment.algorithm.name} is a single-machine method, but there are {sites} sites.")
    if experiment.exchange.failures:
        raise NestfedError(
            "exchange.failures invents failures for a simulation; set it to 0, a deployment has its own."
        )
    if experiment.run.sites != "federated":
        raise NestfedError("run.sites = 'alone' needs no deployment; set it to 'federated'.")
    kind = experiment.partition.kind
    if experiment.data.name and kind not in ("column", "pooled") and experiment.partition.clients != sites:
        raise NestfedError(
            f"The experiment divides {experiment.data.name} over {experiment.partition.clients} clients, but there are "
            f"{sites} sites: add partition.clients={sites}."
        )
