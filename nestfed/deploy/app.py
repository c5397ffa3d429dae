"""Write the Flower app of an experiment, with a README for coordinator and sites."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from nestfed.core import NestfedError
from nestfed.deploy.enrolled import FILE, write_sites
from nestfed.deploy.kit import filled, values_of, write_kit

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
fab-include = ["/experiment.toml", "/federated/*.py", "/LICENSE"]  # what the SuperLink gets and sends to the sites

[tool.flwr.app.components]
serverapp = "federated.server:app"
clientapp = "federated.client:app"

[tool.flwr.app.config]
sites = {sites}            # number of sites, numbered from 0
min-sites = {least}        # valid answers that a round needs; with fewer, it is repeated, up to three attempts
deadline = {deadline}     # seconds after which a round continues without the missing answers
norm-limit = 0.0     # largest change accepted from one site in one round; 0.0 = no limit
lost-state = "refuse" # a site that lost its private fields is left out; "restart" lets it start over
# On the coordinator, relative to where the SuperLink was started:
out = "{out}"        # the run directory
enrolled = "{enrolled}" # the list of sites and their keys; "" takes every site at its word
certificates = "{certificates}" # the folder with its certificates, to warn before they expire; "" = nowhere
"""

APP = '''\
"""The {side}."""

from pathlib import Path

from nestfed.deploy.flower import {maker}

app = {maker}(Path(__file__).parents[1] / "experiment.toml")
'''

IGNORED = "secrets/\nruns/\nstate/\nflower/\n*.db\n*.db-*\n*.key\n*.log\n"

LICENSE = "All rights reserved. Replace this file with the licence of your experiment; Flower requires one.\n"


def write_app(
    folder: Path,
    experiment: Experiment,
    sites: int,
    *,
    least: int = 0,
    deadline: float = 600.0,
    out: str = "runs/federated",
    enrolled: str = "",
    certificates: str = "",
) -> None:
    """Write a Flower app that runs an experiment."""
    try:
        import tomli_w
    except ImportError as error:
        raise NestfedError("Deployment needs Flower: pip install 'nestfed[flower]'.") from error
    (folder / "federated").mkdir(parents=True, exist_ok=True)
    files = {
        "pyproject.toml": PYPROJECT.format(
            name=_project_name(folder),
            flwr=FLWR,
            sites=sites,
            least=least or sites,
            deadline=float(deadline),
            out=out,
            enrolled=enrolled,
            certificates=certificates,
        ),
        "experiment.toml": tomli_w.dumps(_delivered(experiment)),
        "federated/__init__.py": '"""A federated experiment."""\n',
        "federated/client.py": APP.format(side="site", maker="client_app"),
        "federated/server.py": APP.format(side="coordinator", maker="server_app"),
        "LICENSE": LICENSE,
        ".gitignore": IGNORED,
    }
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


def _delivered(experiment: Experiment) -> dict[str, Any]:
    """Return the tables that sites get: without other methods, unless it is a study, and without the places of tables."""
    left_out = ("sites",) if experiment.is_study else ("sites", "methods")
    return {k: v for k, v in experiment.source.items() if k not in left_out}


def _project_name(folder: Path) -> str:
    kept = "".join(c if c.isalnum() else "-" for c in folder.resolve().name.lower()).strip("-")
    return kept[:30].strip("-") or "federated"


def init(folder: Path, experiment: Experiment, sites: int, host: str = "coordinator.example.org") -> None:
    """Write an app with a README for the coordinator and the sites, and the kit for their IT departments."""
    from nestfed.deploy.discloses import page

    if folder.exists() and any(folder.iterdir()):
        raise NestfedError(f"{folder} is not empty; choose another directory.")
    check_experiment(experiment, sites)
    disclosed = page(experiment)
    values = values_of(host, experiment.digest())
    write_app(folder, experiment, sites, enrolled=FILE, certificates="secrets")
    write_sites(folder / FILE, ())
    write_kit(folder, values)
    values |= {
        "SITES": str(sites),
        "LAST": str(sites - 1),
        "METHOD": ", ".join(experiment.methods) or experiment.algorithm.name or experiment.problem.name,
    }
    (folder / "README.md").write_text(filled("study.md", values), encoding="utf-8")
    (folder / "DISCLOSURE.md").write_text(disclosed, encoding="utf-8")


def reject_warm_up(experiment: Experiment) -> None:
    """Reject an experiment with a warm-up, which only simulations have."""
    if experiment.warm_up.rounds:
        raise NestfedError(
            f"A deployment cannot have a warm-up, but the experiment has one of {experiment.warm_up.rounds} rounds: set "
            "warm_up.rounds = 0."
        )


def _check_study(study: Experiment, sites: int) -> None:
    """Reject a study one of whose methods cannot be deployed, or that names a dataset instead of a table at each site."""
    from nestfed.data.tables import SURVIVAL
    from nestfed.experiment.study import Training, reject_unfit
    from nestfed.study.hazards import options_of

    if study.data.target_kind == SURVIVAL:
        options_of(study)
    else:
        reject_unfit(study)
    if study.data.name or study.data.file:
        raise NestfedError("In a study every site has its own table: leave data.name and data.file out.")
    for name in study.methods:
        first = {key: values[0] for key, values in study.grid(name).items()}
        _check_training(Training(name, first).experiment(study), sites)


def check_experiment(experiment: Experiment, sites: int) -> None:
    """Reject an experiment that cannot be deployed, before anything is written."""
    if sites < 1:
        raise NestfedError(f"sites must be at least 1, not {sites}.")
    if experiment.is_study:
        _check_study(experiment, sites)
        return
    if not experiment.algorithm.name:
        methods = ", ".join(experiment.methods)
        hint = f"this file's methods are {methods}" if methods else "see `nestfed list`"
        raise NestfedError(f"The experiment has no algorithm: choose one with --method ({hint}).")
    _check_training(experiment, sites)


def _check_training(experiment: Experiment, sites: int) -> None:
    from nestfed.experiment.build import method
    from nestfed.problems.objective import Labelled

    reject_warm_up(experiment)
    single = method(experiment).single
    if experiment.execution.device != "cpu":
        raise NestfedError(f"execution.device must be cpu for a deployment, not {experiment.execution.device}.")
    if single and sites > 1:
        raise NestfedError(f"{experiment.algorithm.name} is a single-machine method, but there are {sites} sites.")
    if experiment.exchange.privacy is not None and isinstance(experiment.problem, Labelled):
        raise NestfedError(
            "With exchange.privacy sites answer no questions, so tables cannot be put on a common scale: leave privacy out, or "
            "deploy a problem written in Python, whose inputs are agreed beforehand."
        )
    if experiment.exchange.failures:
        raise NestfedError("exchange.failures simulates failures; set it to 0 for a deployment.")
    if experiment.run.sites != "federated":
        raise NestfedError("run.sites = 'alone' needs no deployment; set it to 'federated'.")
    kind = experiment.partition.kind
    if experiment.data.name and kind not in ("column", "pooled") and experiment.partition.clients != sites:
        raise NestfedError(
            f"The experiment divides {experiment.data.name} over {experiment.partition.clients} clients, but there are "
            f"{sites} sites: add partition.clients={sites}."
        )
