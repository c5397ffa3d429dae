"""The commands of `nestfed deploy`. Slow imports are inside the functions, so that `nestfed --help` is fast."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nestfed.deploy.app import init
from nestfed.deploy.certificates import write_certificates, write_key
from nestfed.deploy.local import LOOPBACK, local
from nestfed.deploy.supernode import supernode

if TYPE_CHECKING:
    from nestfed.experiment.spec import Experiment

deploy_app = typer.Typer(help="Train across institutions with Flower.", no_args_is_help=True)

Overrides = Annotated[
    list[str] | None, typer.Argument(help="Settings to override, such as algorithm.alpha=0.1 run.rounds=50.")
]
File = Annotated[str, typer.Argument(help="An experiment file, or a name from `nestfed list`.")]
Sites = Annotated[int, typer.Option("--sites", help="Number of sites.")]
Method = Annotated[
    str,
    typer.Option("--method", help="A method of the file or of `nestfed list`.", show_default="the file's algorithm"),
]


def _chosen(file: str, overrides: list[str] | None, method: str, sites: int) -> Experiment:
    from nestfed.cli.main import _experiment

    experiment = _experiment(file, None)
    if method:
        experiment = experiment.for_method(method)
    changes = list(overrides or ())
    kind = experiment.partition.kind
    if kind not in ("column", "pooled") and not any(c.startswith("partition.clients=") for c in changes):
        changes.append(f"partition.clients={sites}")  # one part of the dataset per site
    from nestfed.experiment.spec import parse_overrides

    return experiment.with_overrides(parse_overrides(changes))


@deploy_app.command("init")
def init_(
    directory: Annotated[Path, typer.Argument(help="The app's new directory.")],
    overrides: Overrides = None,
    experiment: Annotated[
        str,
        typer.Option(
            help="An experiment file, or a name from `nestfed list`.",
            show_default="average-precision, 10 rounds of fcsg-m",
        ),
    ] = "average-precision",
    method: Method = "",
    sites: Sites = 3,
) -> None:
    """Write a Flower app for an experiment, with a README for the coordinator and the sites."""
    from nestfed.cli.main import echo

    if experiment == "average-precision" and not method:
        method, overrides = "fcsg-m", ["algorithm.alpha=1.0", "run.rounds=10", *(overrides or ())]
    init(directory, _chosen(experiment, overrides, method, sites), sites)
    echo(f"{directory} contains a Flower app for {sites} sites; follow its README.md.")


@deploy_app.command("local")
def local_(
    file: File,
    overrides: Overrides = None,
    sites: Sites = 4,
    method: Method = "",
    out: Annotated[
        Path | None, typer.Option("--out", help="Output directory.", show_default="runs/deployed-NAME-DIGEST")
    ] = None,
    min_sites: Annotated[int, typer.Option(help="Valid answers that a round needs.", show_default="all sites")] = 0,
    deadline: Annotated[
        float, typer.Option(help="Seconds after which a round continues without the missing answers.")
    ] = 600.0,
    insecure: Annotated[bool, typer.Option("--insecure", help="Use neither TLS nor keys.")] = False,
    min_cell: Annotated[int, typer.Option(help="No count between 1 and this leaves a site.")] = 10,
) -> None:
    """Run an experiment with real Flower processes on this machine. Run it again to resume.

    Starts a SuperLink and SuperNodes on 127.0.0.1, with TLS and keys. Writes the same files as `nestfed run`.
    """
    from rich.console import Console

    from nestfed.cli.main import echo
    from nestfed.engine.record import metrics_of

    experiment = _chosen(file, overrides, method, sites)
    place = out or Path("runs") / f"deployed-{Path(file).stem}-{experiment.digest()}"
    console = Console(stderr=True, highlight=False)
    history = local(
        experiment,
        place,
        sites,
        least=min_sites,
        deadline=deadline,
        insecure=insecure,
        min_cell=min_cell,
        notify=lambda s: console.print(s),
    )
    end = history[-1]
    for key, value in metrics_of(end).items():
        echo(f"{key:12} {value:.4f}")
    echo(f"{'rounds':12} {end['round']}   ({end['examples']:,} examples, {end['seconds']:.1f} s)")
    echo(f"record       {place / 'record.jsonl'}")


@deploy_app.command(
    "supernode", context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False
)
def supernode_(context: typer.Context) -> None:
    """Run a site's SuperNode and its worker, with the options of `flower-supernode`.

    The worker stays and answers every message. It runs no code that the coordinator delivers, only its experiment file.
    With `--isolation subprocess`, Flower starts a process for every message instead, which runs the delivered code.

    It exits when the SuperNode loses the SuperLink permanently, or when the worker ends, so that a supervisor can restart
    both. Flower's own command keeps running without a connection.
    """
    supernode(context.args)


@deploy_app.command("certificates")
def certificates_(
    directory: Annotated[Path, typer.Argument(help="Where to write the certificates.")],
    host: Annotated[
        list[str] | None,
        typer.Option(help="Name or address of the coordinator; repeat for several.", show_default=LOOPBACK),
    ] = None,
    days: Annotated[int, typer.Option(help="Days until the certificates expire.")] = 365,
) -> None:
    """Write TLS certificates: server.pem and server.key for the SuperLink, ca.crt for all sites."""
    from nestfed.cli.main import echo

    write_certificates(directory, host or [LOOPBACK], days)
    echo(f"Keep {directory / 'server.key'} secret; send {directory / 'ca.crt'} to every site.")


@deploy_app.command("key")
def key_(path: Annotated[Path, typer.Argument(help="The file of the private key.")]) -> None:
    """Write a site's key pair: keep PATH secret, send PATH.pub to the coordinator."""
    from nestfed.cli.main import echo

    write_key(path)
    echo(f"Keep {path} secret; send {path}.pub to the coordinator.")


@deploy_app.command("discloses")
def discloses_(file: File, overrides: Overrides = None, sites: Sites = 4, method: Method = "") -> None:
    """List everything that leaves a site in a study, for the people who must agree to it."""
    from nestfed.cli.main import echo
    from nestfed.deploy.discloses import page

    echo(page(_chosen(file, overrides, method, sites)).rstrip())


@deploy_app.command("withdraw")
def withdraw_(
    state: Annotated[Path, typer.Argument(help="The site's state folder, as in its node configuration.")],
) -> None:
    """Withdraw this site from its study. What it has contributed to the model so far stays in the model."""
    from nestfed.cli.main import echo
    from nestfed.deploy.site import withdraw

    echo(withdraw(state))


@deploy_app.command("digest")
def digest_(file: File) -> None:
    """Print the digest of an experiment. A site with this digest in its configuration rejects any other."""
    from nestfed.cli.main import echo
    from nestfed.experiment.spec import read

    echo(read(file).digest())
