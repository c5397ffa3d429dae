"""The commands of `nestfed deploy`. Slow imports are inside the functions, so that `nestfed --help` is fast."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nestfed.core import NestfedError
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
    from nestfed.experiment.spec import parse_overrides

    experiment = _experiment(file, None)
    if experiment.is_study:
        if method:
            raise NestfedError("The file is a study, which trains all of its methods: leave --method out.")
        return experiment.with_overrides(parse_overrides(list(overrides or ())))
    if method:
        experiment = experiment.for_method(method)
    changes = list(overrides or ())
    kind = experiment.partition.kind
    if kind not in ("column", "pooled") and not any(c.startswith("partition.clients=") for c in changes):
        changes.append(f"partition.clients={sites}")  # one part of the dataset per site
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
    host: Annotated[str, typer.Option(help="Name or address of the coordinator.")] = "coordinator.example.org",
) -> None:
    """Write a Flower app for an experiment, with a README for the coordinator and the sites, and a kit for their IT."""
    from nestfed.cli.main import echo

    if experiment == "average-precision" and not method:
        method, overrides = "fcsg-m", ["algorithm.alpha=1.0", "run.rounds=10", *(overrides or ())]
    init(directory, _chosen(experiment, overrides, method, sites), sites, host)
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
    if experiment.is_study:
        echo((place / "progress.log").read_text(encoding="utf-8").splitlines()[-1].split(" ", 2)[-1])
        for name, path in {"report": "report.html", "model": "model", "study": "study.toml"}.items():
            echo(f"{name:<11} {place / path}")
        return
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


@deploy_app.command("check")
def check_(
    file: File,
    node_config: Annotated[str, typer.Option(help="As for `nestfed deploy supernode`: pairs, or a .toml file.")],
    superlink: Annotated[str, typer.Option(help="HOST:PORT of the coordinator.")] = "",
    root_certificates: Annotated[Path | None, typer.Option(help="The ca.crt from the coordinator.")] = None,
    auth_supernode_private_key: Annotated[Path | None, typer.Option(help="The site's private key.")] = None,
) -> None:
    """Check a site before it connects: its table, its machine, its key and its way to the coordinator.

    Lists everything that has to be repaired. The exit code is 1 if the site cannot take part.
    """
    from nestfed.cli.main import echo
    from nestfed.deploy.check import Way, check
    from nestfed.deploy.node import Node
    from nestfed.experiment.spec import read

    found = check(read(file), Node.parse(node_config), Way(superlink, root_certificates, auth_supernode_private_key))
    for fact in found.facts:
        echo(fact)
    for problem in found.problems:
        echo(f"{'problem' if problem.stops else 'warning'}: {problem.sentence}")
    echo("The site is ready." if found.ready else "The site cannot take part yet.")
    if not found.ready:
        raise typer.Exit(1)


Passphrase = Annotated[
    Path | None,
    typer.Option(
        "--passphrase-file",
        help="A file with the passphrase of the authority's key.",
        show_default="NESTFED_PASSPHRASE, or a prompt",
    ),
]


@deploy_app.command("certificates")
def certificates_(
    directory: Annotated[Path, typer.Argument(help="Where the certificates are.")],
    host: Annotated[
        list[str] | None,
        typer.Option(help="Name or address of the coordinator; repeat for several.", show_default=LOOPBACK),
    ] = None,
    days: Annotated[int, typer.Option(help="Days until server.pem expires.")] = 365,
    renew: Annotated[bool, typer.Option("--renew", help="Renew the certificates of the directory.")] = False,
    discard: Annotated[
        bool, typer.Option("--discard", help="Do not keep the authority's key; the certificates cannot be renewed.")
    ] = False,
    passphrase_file: Passphrase = None,
) -> None:
    """Write TLS certificates: server.pem and server.key for the SuperLink, ca.crt for all sites.

    The authority's key is kept in ca.key, encrypted with a passphrase, to renew them with --renew.
    """
    from nestfed.cli.main import echo
    from nestfed.deploy.certificates import renew as renew_certificates

    if renew:
        done = renew_certificates(directory, _passphrase(passphrase_file, again=False), days)
        echo(f"Renewed {' and '.join(done)} in {directory}; restart the SuperLink and the proxy.")
        if "ca.crt" in done:
            echo(f"Send {directory / 'ca.crt'} to every site; their old one works until it expires.")
        return
    write_certificates(
        directory, host or [LOOPBACK], days, b"" if discard else _passphrase(passphrase_file, again=True)
    )
    echo(f"Keep {directory / 'server.key'} secret; send {directory / 'ca.crt'} to every site.")
    if not discard:
        echo(f"Keep {directory / 'ca.key'} and its passphrase, best on another machine, to renew the certificates.")


def _passphrase(file: Path | None, *, again: bool) -> bytes:
    """Return the passphrase of the authority's key; `again`: ask twice for a new one."""
    import os
    import sys

    from nestfed.core import NestfedError

    if file is not None:
        try:
            found = file.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise NestfedError(f"Cannot read the passphrase in {file}: {error.strerror}.") from error
    elif not (found := os.environ.get("NESTFED_PASSPHRASE", "")):
        if not sys.stdin.isatty():
            raise NestfedError(
                "The authority's key needs a passphrase: give --passphrase-file or NESTFED_PASSPHRASE, or do not keep the key "
                "with --discard."
            )
        found = typer.prompt("Passphrase of the authority's key", hide_input=True, confirmation_prompt=again)
    if not found:
        raise NestfedError("The passphrase of the authority's key must not be empty.")
    return found.encode()


@deploy_app.command("key")
def key_(path: Annotated[Path, typer.Argument(help="The file of the private key.")]) -> None:
    """Write a site's key pair: keep PATH secret, send PATH.pub to the coordinator."""
    from nestfed.cli.main import echo
    from nestfed.deploy.enrolled import fingerprint

    write_key(path)
    echo(f"Keep {path} secret; send {path}.pub to the coordinator.")
    echo(f"Tell the coordinator its fingerprint by telephone: {fingerprint(Path(f'{path}.pub').read_bytes())}")


@deploy_app.command("enrol")
def enrol_(
    name: Annotated[str, typer.Argument(help="The site's name.")],
    key: Annotated[Path, typer.Argument(help="The site's public key, KEY.pub.")],
    number: Annotated[int, typer.Option(help="The site's number, from 0.", show_default="the next free one")] = -1,
    study: Annotated[Path, typer.Option(help="The study's folder.")] = Path(),
    replace: Annotated[bool, typer.Option("--replace", help="Give a listed site a new key.")] = False,
) -> None:
    """Add a site to sites.toml: only a SuperNode with its key can take part as this site."""
    from nestfed.cli.main import echo
    from nestfed.deploy.enrolled import FILE, enrol, sites_of

    made = enrol(study / FILE, name, key, sites_of(study), number=number, replace=replace)
    echo(f'{made.name} is site {made.number}, with the key {made.key}: client={made.number} site="{made.name}"')


@deploy_app.command("status")
def status_(
    directory: Annotated[Path, typer.Argument(help="A run's directory, or a site's state folder.")],
    certificates: Annotated[
        Path | None,
        typer.Option(help="The coordinator's secrets folder, or a site's ca.crt.", show_default="not checked"),
    ] = None,
    silence: Annotated[
        float, typer.Option(help="Hours without an event after which a run that is not over is reported.")
    ] = 6.0,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON, for monitoring.")] = False,
) -> None:
    """Show the state of a deployment: sites, last round, certificates, disk. The exit code is 1 if there is trouble."""
    from nestfed.cli.main import echo
    from nestfed.deploy.status import status

    found = status(directory, certificates, silence)
    echo(found.as_json() if json_ else found.as_text())
    if found.trouble:
        raise typer.Exit(1)


@deploy_app.command("audit")
def audit_(
    directory: Annotated[Path, typer.Argument(help="A run's directory, or a site's state folder.")],
) -> None:
    """Verify the audit log and print it. The exit code is 1 if a line was changed, added or removed."""
    from nestfed.cli.main import echo
    from nestfed.deploy.audit import FOLDER, events, shown

    found = events(directory / FOLDER)
    for event in found:
        echo(shown(event))
    echo(f"{len(found)} lines, none changed. Head: {(directory / FOLDER / 'head').read_text(encoding='utf-8').strip()}")


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
    from nestfed.deploy.withdraw import withdraw

    echo(withdraw(state))


@deploy_app.command("digest")
def digest_(file: File) -> None:
    """Print the digest of an experiment. A site with this digest in its configuration rejects any other."""
    from nestfed.cli.main import echo
    from nestfed.experiment.spec import read

    echo(read(file).digest())
