"""`nestfed deploy` on the command line. Heavy imports stand inside the functions, so that `nestfed --help` is quick."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nestfed.deploy.app import init
from nestfed.deploy.certificates import write_certificates, write_key
from nestfed.deploy.local import LOOPBACK, local, supernode

if TYPE_CHECKING:
    from nestfed.experiment.spec import Experiment

deploy_app = typer.Typer(help="Train across institutions with Flower.", no_args_is_help=True)

Overrides = Annotated[
    list[str] | None, typer.Argument(help="Settings to change, such as algorithm.alpha=0.1 run.rounds=50.")
]
Sites = Annotated[int, typer.Option("--sites", help="How many sites there are.")]
Method = Annotated[str, typer.Option("--method", help="One of the file's methods, or of the library's.")]


def _chosen(file: str, overrides: list[str] | None, method: str, sites: int) -> Experiment:
    from nestfed.cli.main import _experiment

    experiment = _experiment(file, None)
    if method:
        experiment = experiment.for_method(method)
    changes = list(overrides or ())
    kind = experiment.partition.kind
    if kind not in ("column", "pooled") and not any(c.startswith("partition.clients=") for c in changes):
        changes.append(f"partition.clients={sites}")  # a part of the data set for every site
    from nestfed.experiment.spec import parse_overrides

    return experiment.with_overrides(parse_overrides(changes))


@deploy_app.command("init")
def init_(
    directory: Path,
    overrides: Overrides = None,
    experiment: Annotated[str, typer.Option(help="An experiment file, or one of `nestfed list`.")] = "demo",
    method: Method = "",
    sites: Sites = 3,
) -> None:
    """Write a Flower app for an experiment, with a README for the coordinator and for the sites."""
    from nestfed.cli.main import say

    if experiment == "demo" and not method:
        method, overrides = "fcsg-m", ["algorithm.alpha=1.0", "run.rounds=10", *(overrides or ())]
    init(directory, _chosen(experiment, overrides, method, sites), sites)
    say(f"{directory} holds a Flower app for {sites} sites; its README.md says what to do, step by step.")


@deploy_app.command("local")
def local_(
    file: str,
    overrides: Overrides = None,
    sites: Sites = 4,
    method: Method = "",
    out: Annotated[Path | None, typer.Option("--out", help="Directory of the run.")] = None,
    min_sites: Annotated[int, typer.Option(help="Fewer answers make no round.", show_default="all")] = 0,
    deadline: Annotated[float, typer.Option(help="Seconds for a round.")] = 600.0,
    insecure: Annotated[bool, typer.Option("--insecure", help="Without TLS and keys; loopback only.")] = False,
) -> None:
    """Carry an experiment out over a SuperLink and SuperNodes on this machine, with TLS and authentication.

    It leaves the same run directory as a simulation; the same command goes on with an unfinished run.
    """
    from rich.console import Console

    from nestfed.cli.main import say
    from nestfed.engine.record import metrics_of

    experiment = _chosen(file, overrides, method, sites)
    place = out or Path("runs") / f"deployed-{Path(file).stem}-{experiment.digest()}"
    console = Console(stderr=True, highlight=False)
    history = local(
        experiment, place, sites, least=min_sites, deadline=deadline, insecure=insecure, tell=lambda s: console.print(s)
    )
    end = history[-1]
    for key, value in metrics_of(end).items():
        say(f"{key:12} {value:.4f}")
    say(f"{'rounds':12} {end['round']}   ({end['examples']:,} examples, {end['seconds']:.1f} s)")
    say(f"record       {place / 'record.jsonl'}")


@deploy_app.command(
    "supernode", context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False
)
def supernode_(context: typer.Context) -> None:
    """Run a site's SuperNode, with the options of `flower-supernode`; it ends when it has lost the SuperLink for good.

    Flower's own command then stays, connected to nothing, and no supervisor can know that it should start it again.
    """
    supernode(context.args)


@deploy_app.command("certificates")
def certificates_(
    directory: Path,
    host: Annotated[list[str] | None, typer.Option(help="Name or address of the coordinator; may be repeated.")] = None,
    days: Annotated[int, typer.Option(help="How long they are valid.")] = 365,
) -> None:
    """Write the TLS certificates of a SuperLink: server.pem and server.key for it, ca.crt for everybody."""
    from nestfed.cli.main import say

    write_certificates(directory, host or [LOOPBACK], days)
    say(f"{directory / 'server.key'} stays secret; send {directory / 'ca.crt'} to every site.")


@deploy_app.command("key")
def key_(path: Path) -> None:
    """Write a site's key pair: PATH stays secret at the site, PATH.pub goes to the coordinator."""
    from nestfed.cli.main import say

    write_key(path)
    say(f"{path} stays secret; send {path}.pub to the coordinator.")


@deploy_app.command("digest")
def digest_(file: str) -> None:
    """Print the digest of an experiment, to which a site can bind itself."""
    from nestfed.cli.main import say
    from nestfed.experiment.spec import read

    say(read(file).digest())
