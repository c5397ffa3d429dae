"""`nestfed deploy`: a Flower app for an experiment, its certificates and keys, and a whole federation on one machine."""

# Heavy imports stand inside the functions, so that `nestfed --help` is quick.
from __future__ import annotations

import ctypes
import datetime
import ipaddress
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from nestfed.core import NestfedError

if TYPE_CHECKING:
    from nestfed.experiment import Experiment

deploy_app = typer.Typer(help="Train across institutions with Flower.", no_args_is_help=True)

FLWR = "1.41.0"
LOOPBACK = "127.0.0.1"
ENVIRONMENT = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
"""Nothing is told to anybody outside the federation."""


# ---------------------------------------------------------------------------------------------------------
# Certificates and keys


def _cryptography() -> Any:
    try:
        import cryptography.x509 as x509
    except ImportError as error:
        raise NestfedError("Certificates and keys need an extra: pip install 'nestfed[flower]'.") from error
    return x509


def write_certificates(folder: Path, hosts: Sequence[str], days: int = 365) -> None:
    """Write ca.crt for everybody, and server.pem and server.key for the SuperLink at these hosts."""
    x509 = _cryptography()
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    if (folder / "server.key").exists():
        raise NestfedError(f"{folder} already holds certificates; delete them first if you want new ones.")

    def named(name: str) -> Any:
        return x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, name)])

    now = datetime.datetime.now(datetime.UTC)
    keys = [ec.generate_private_key(ec.SECP384R1()) for _ in range(2)]
    places = [_general_name(x509, host) for host in dict.fromkeys((*hosts, "localhost", LOOPBACK))]

    def certificate(subject: str, key: Any, extensions: Sequence[tuple[Any, bool]]) -> bytes:
        builder = (
            x509.CertificateBuilder()
            .subject_name(named(subject))
            .issuer_name(named("nestfed federation"))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=days))
        )
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical)
        signed: bytes = builder.sign(keys[0], hashes.SHA384()).public_bytes(_pem())
        return signed

    authority = x509.SubjectKeyIdentifier.from_public_key(keys[0].public_key())
    issuer = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(authority)
    usage = dict.fromkeys(
        (
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "encipher_only",
            "decipher_only",
        ),
        False,
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ca.crt").write_bytes(
        certificate(
            "nestfed federation",
            keys[0],
            [
                (x509.BasicConstraints(ca=True, path_length=0), True),
                (x509.KeyUsage(digital_signature=False, key_cert_sign=True, crl_sign=True, **usage), True),
                (authority, False),
            ],
        )
    )
    (folder / "server.pem").write_bytes(
        certificate(
            hosts[0] if hosts else "localhost",
            keys[1],
            [
                (x509.BasicConstraints(ca=False, path_length=None), True),
                (x509.SubjectAlternativeName(places), False),
                (x509.KeyUsage(digital_signature=True, key_cert_sign=False, crl_sign=False, **usage), True),
                (x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]), False),
                (issuer, False),
            ],
        )
    )
    # The authority's own key is not kept: nobody can sign another server in its name.
    _write_secret(folder / "server.key", keys[1])


def write_key(path: Path) -> None:
    """Write a site's private key, and its public one beside it as PATH.pub."""
    _cryptography()
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    if path.exists():
        raise NestfedError(f"{path} already exists; a site keeps its key.")
    key = ec.generate_private_key(ec.SECP384R1())
    path.parent.mkdir(parents=True, exist_ok=True)
    _write_secret(path, key, ssh=True)
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    path.with_name(f"{path.name}.pub").write_bytes(public + b"\n")


def _write_secret(path: Path, key: Any, ssh: bool = False) -> None:
    from cryptography.hazmat.primitives.serialization import NoEncryption, PrivateFormat

    form = PrivateFormat.OpenSSH if ssh else PrivateFormat.PKCS8
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(key.private_bytes(_pem(), form, NoEncryption()))


def _pem() -> Any:
    from cryptography.hazmat.primitives.serialization import Encoding

    return Encoding.PEM


def _general_name(x509: Any, host: str) -> Any:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


# ---------------------------------------------------------------------------------------------------------
# The app

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
weights = "equal"    # or "examples"
lost-state = "refuse" # or "restart": what to do with a site that lost its private fields
out = "{out}"        # on the coordinator, relative to where the SuperLink was started
"""

APP = '''\
"""The {side}."""

from pathlib import Path

from nestfed.engine.flower import {maker}

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
    _check(experiment, sites)
    write_app(folder, experiment, sites)
    text = (Path(__file__).parent / "deploy_readme.md").read_text(encoding="utf-8")
    values = {
        "SITES": str(sites), "LAST": str(sites - 1), "DIGEST": experiment.digest(), "METHOD": experiment.algorithm.name,
    }  # fmt: skip
    for key, value in values.items():
        text = text.replace(f"@{key}@", value)
    (folder / "README.md").write_text(text, encoding="utf-8")


def _check(experiment: Experiment, sites: int) -> None:
    """Refuse an experiment that cannot be deployed, before anything is written."""
    from nestfed.algorithms import build, find
    from nestfed.engine.encode import Encoding
    from nestfed.experiment import hyper_parameters

    if sites < 1:
        raise NestfedError(f"There must be at least 1 site, not {sites}.")
    if not experiment.algorithm.name:
        methods = ", ".join(experiment.methods)
        hint = f"this file's methods are {methods}" if methods else "see `nestfed list`"
        raise NestfedError(f"The experiment names no algorithm: choose one with --method ({hint}).")
    build(experiment.algorithm.name, **hyper_parameters(experiment.algorithm))
    Encoding.parse(experiment.run.encode)
    if find(experiment.algorithm.name).single and sites > 1:
        raise NestfedError(f"{experiment.algorithm.name} is a single-machine method, but there are {sites} sites.")
    if experiment.run.failures:
        raise NestfedError("run.failures invents failures for a simulation; set it to 0, a deployment has its own.")
    if experiment.run.sites != "federated":
        raise NestfedError("run.sites = 'alone' needs no deployment; set it to 'federated'.")
    kind = experiment.partition.kind
    if experiment.data.name and kind not in ("column", "pooled") and experiment.partition.clients != sites:
        raise NestfedError(
            f"The experiment divides {experiment.data.name} over {experiment.partition.clients} clients, but there are "
            f"{sites} sites: add partition.clients={sites}."
        )


# ---------------------------------------------------------------------------------------------------------
# Processes that never outlive us


MARK = "NESTFED_FEDERATION"
"""In the surroundings of every process of a federation, so that those that Flower detaches are found again."""


class Processes:
    """Processes that are gone when the block is left, however it is left, with all that they started."""

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.mark = secrets.token_hex(8)
        self._before: Any = None

    def __enter__(self) -> Self:
        def stop(number: int, frame: FrameType | None) -> None:
            raise KeyboardInterrupt

        with suppress(ValueError):  # not in the main thread
            self._before = signal.signal(signal.SIGTERM, stop)
        self.logs.mkdir(parents=True, exist_ok=True)
        return self

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start a process; what it says goes to NAME.log."""
        with (self.logs / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command,
                env={**os.environ, **environment, MARK: f"{self.mark}-{name}"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        self.running[name] = process
        return process

    def tail(self, name: str, lines: int = 12) -> str:
        """Return the last lines of a process's log."""
        text = (self.logs / f"{name}.log").read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def stop(self, name: str, number: int = signal.SIGTERM) -> None:
        """Stop one process and all that it started."""
        process = self.running.pop(name)
        self._end([process], f"{self.mark}-{name}", number)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        interrupt = None
        with suppress(ValueError):  # a second request must not stop the cleaning
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self._end(list(self.running.values()), self.mark, signal.SIGTERM)
        finally:
            with suppress(ValueError):
                signal.signal(signal.SIGINT, interrupt or signal.default_int_handler)
                signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)

    def _end(self, leaders: Sequence[subprocess.Popen[bytes]], mark: str, number: int) -> None:
        """Send a signal to processes and all with their mark, wait, and kill those that are left."""
        for attempt, patience in ((number, 5.0), (signal.SIGKILL, 5.0)):
            for pid in _marked(mark):
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, attempt)
            for leader in leaders:
                if leader.poll() is None:  # where there is no /proc
                    with suppress(ProcessLookupError, PermissionError):
                        os.killpg(leader.pid, attempt)
            end = time.monotonic() + patience
            while any(leader.poll() is None for leader in leaders) or _marked(mark):
                if time.monotonic() > end:
                    break
                time.sleep(0.05)


def _marked(mark: str) -> list[int]:
    """Return the processes that carry a mark; those that have ended carry none."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if any(item.startswith(wanted) for item in path.read_bytes().split(b"\0")):
                found.append(int(path.parent.name))
    return [pid for pid in found if pid != os.getpid()]


def _die_with_parent() -> None:
    """Ask the system to end this process when we end, even if we are killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


# ---------------------------------------------------------------------------------------------------------
# A federation on this machine


@dataclass
class Local:
    """SuperLink and SuperNodes on the loopback interface."""

    folder: Path
    processes: Processes
    insecure: bool = False
    port: int = 0
    node_ports: dict[int, int] = field(default_factory=dict)
    sites: dict[int, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.port = self.port or free_port()
        self.secrets = self.folder / "secrets"
        self.bin = Path(sys.executable).parent

    def environment(self, home: str) -> dict[str, str]:
        """Return the surroundings of a process with a home of its own."""
        place = self.folder / "home" / home
        place.mkdir(parents=True, exist_ok=True)
        return {
            **ENVIRONMENT,
            "FLWR_HOME": str(place),
            # Flower looks for its other commands there.
            "PATH": f"{self.bin}{os.pathsep}{os.environ.get('PATH', '')}",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
            "OMP_NUM_THREADS": "1",
        }

    def command(self, name: str) -> str:
        """Return the path of one of Flower's commands."""
        found = shutil.which(name, path=self.environment("cli")["PATH"])
        if found is None:
            raise NestfedError("Deployment needs Flower: pip install 'nestfed[flower]'.")
        return found

    def superlink(self) -> None:
        """Start the SuperLink and wait until it listens."""
        if " " in sys.prefix:  # its database finds no migrations there and answers every request with an error
            raise NestfedError(
                f"Flower's SuperLink does not work from a Python environment whose path has a space ({sys.prefix}): "
                "make one elsewhere."
            )
        if not self.insecure and not (self.secrets / "server.key").exists():
            write_certificates(self.secrets, [LOOPBACK])
        tls = ["--insecure"] if self.insecure else [
            "--ssl-ca-certfile", str(self.secrets / "ca.crt"), "--ssl-certfile", str(self.secrets / "server.pem"),
            "--ssl-keyfile", str(self.secrets / "server.key"), "--enable-supernode-auth",
        ]  # fmt: skip
        self.processes.start(
            "superlink",
            [
                self.command("flower-superlink"), *tls, "--host", LOOPBACK, "--port", str(self.port),
                "--database", str(self.folder / "superlink.db"), "--disable-runtime-dependency-installation",
            ],
            self.environment("superlink"),
        )  # fmt: skip
        self._wait_for("superlink", self.port)
        self._write_connection()

    def _write_connection(self) -> None:
        home = Path(self.environment("cli")["FLWR_HOME"])
        lines = ["[superlink]", 'default = "local"', "[superlink.local]", f'address = "{LOOPBACK}:{self.port}"']
        lines.append("insecure = true" if self.insecure else f'root-certificates = "{self.secrets / "ca.crt"}"')
        (home / "config.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def register(self, *sites: int) -> None:
        """Make the keys of sites, and tell the SuperLink of them."""
        commands = []
        for n in sites:
            key, done = self.secrets / f"site-{n}.key", self.secrets / f"site-{n}.registered"
            if not key.exists():
                write_key(key)
            if not done.exists():
                commands.append(["supernode", "register", f"{key}.pub", "local", "--name", f"site-{n}"])
        if not commands:
            return
        # One process for all: importing Flower's command line takes longer than what it does.
        code = (
            "import json, sys; from flwr.cli.app import app\n"
            "for command in json.loads(sys.argv[1]): app(command, standalone_mode=False)"
        )
        done_ = subprocess.run(
            [sys.executable, "-c", code, json.dumps(commands)],
            env={**os.environ, **self.environment("cli")},
            capture_output=True,
            text=True,
            check=False,
        )
        if done_.returncode:
            said = (done_.stdout + done_.stderr).strip().splitlines()
            raise NestfedError(f"The SuperLink does not take the sites' keys: {' '.join(said[-3:])}")
        for n in sites:
            (self.secrets / f"site-{n}.registered").touch()

    def supernode(self, n: int, **config: Any) -> None:
        """Start a site."""
        values = {"client": n, "site": f"site-{n}", "state": str(self.folder / "state" / f"site-{n}"), "threads": 1}
        words = " ".join(f'{k}="{v}"' if isinstance(v, str) else f"{k}={v}" for k, v in (values | config).items())
        key = str(self.secrets / f"site-{n}.key")
        tls = ["--insecure"] if self.insecure else [
            "--root-certificates", str(self.secrets / "ca.crt"), "--auth-supernode-private-key", key,
        ]  # fmt: skip
        self.sites[n] = config
        port = self.node_ports.setdefault(n, free_port())
        self.processes.start(
            f"site-{n}",
            [
                self.command("flower-supernode"), *tls, "--superlink", f"{LOOPBACK}:{self.port}",
                "--host", LOOPBACK, "--port", str(port), "--node-config", words,
            ],
            self.environment(f"site-{n}"),
        )  # fmt: skip

    def revive(self) -> None:
        """Start sites again that have ended. The SuperLink turns one that was killed away for up to a minute."""
        for n, config in self.sites.items():
            process = self.processes.running.get(f"site-{n}")
            if process is None or process.poll() is not None:
                if process is not None:
                    self.processes.stop(f"site-{n}")  # what is left of it
                self.supernode(n, **config)

    def run(self, app: Path) -> subprocess.Popen[bytes]:
        """Start the app; the process ends when the run does."""
        return self.processes.start(
            "run", [self.command("flwr"), "run", str(app), "local", "--stream"], self.environment("cli")
        )

    def _wait_for(self, name: str, port: int, seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.processes.running[name].poll() is not None:
                raise NestfedError(f"The {name} stopped at once:\n{self.processes.tail(name)}")
            with suppress(OSError), closing(socket.create_connection((LOOPBACK, port), 1)):
                return
            time.sleep(0.1)
        raise NestfedError(f"The {name} does not listen after {seconds:g} s:\n{self.processes.tail(name)}")


def free_port() -> int:
    """Return a port that nobody listens on."""
    with closing(socket.socket()) as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def local(
    experiment: Experiment,
    out: Path,
    sites: int,
    *,
    least: int = 0,
    deadline: float = 600.0,
    insecure: bool = False,
    show: bool | None = None,
    tell: Callable[[str], None] = lambda sentence: None,
) -> list[dict[str, Any]]:
    """Carry an experiment out over real processes on this machine; the same call goes on with an unfinished run."""
    from nestfed.engine.progress import Progress
    from nestfed.engine.record import read as read_record
    from nestfed.engine.simulate import Interrupted
    from nestfed.running import claim

    _check(experiment, sites)
    out = out.resolve()
    claim(out, experiment)
    record, finished, warnings = out / "record.jsonl", out / "finished.json", out / "sites.log"
    if finished.exists():
        return read_record(record)
    folder = out / "flower"
    write_app(folder / "app", experiment, sites, least=least, deadline=deadline, out=str(out))
    said = len(warnings.read_text(encoding="utf-8").splitlines()) if warnings.exists() else 0
    try:
        with Processes(folder / "logs") as processes:
            federation = Local(folder, processes, insecure)
            tell(f"starting a SuperLink and {sites} SuperNodes on {LOOPBACK}")
            federation.superlink()
            if not insecure:
                federation.register(*range(sites))
            for n in range(sites):
                federation.supernode(n)
            history = read_record(record)
            done = history[-1]["round"] if history else 0
            run = federation.run(folder / "app")
            revived = time.monotonic()
            with Progress(experiment.algorithm.name, experiment.run.rounds, done, show) as bar:
                while not finished.exists():
                    over = run.poll() is not None
                    if time.monotonic() - revived > 10:
                        federation.revive()
                        revived = time.monotonic()
                    history = read_record(record)
                    if history:
                        costs = (*_COSTS, "loss")
                        bar.update(
                            history[-1], {k: v for k, v in history[-1].items() if k not in costs and v is not None}
                        )
                    lines = warnings.read_text(encoding="utf-8").splitlines() if warnings.exists() else []
                    for line in lines[said:]:
                        tell(line.split(" ", 2)[-1])
                    said = max(said, len(lines))
                    if over and not finished.exists():
                        stopped = [line.partition(" stopped: ")[2] for line in lines if " stopped: " in line]
                        said_last = f"Flower said:\n{processes.tail('run')}\nThe logs are in {folder / 'logs'}."
                        raise NestfedError(stopped[-1] if stopped else f"The run ended before its time. {said_last}")
                    time.sleep(0.3)
                bar.update(read_record(record)[-1], {})
    except KeyboardInterrupt:
        raise Interrupted(f"Stopped; the same command goes on from {out}.") from None
    return read_record(record)


_COSTS = ("round", "iteration", "participants", "drift", "examples", "bytes_up", "bytes_down", "seconds")


# ---------------------------------------------------------------------------------------------------------
# Commands

Overrides = Annotated[
    list[str] | None, typer.Argument(help="Settings to change, such as algorithm.alpha=0.1 run.rounds=50.")
]
Sites = Annotated[int, typer.Option("--sites", help="How many sites there are.")]
Method = Annotated[str, typer.Option("--method", help="One of the file's methods, or of the library's.")]


def _chosen(file: str, overrides: list[str] | None, method: str, sites: int) -> Experiment:
    from nestfed.cli import _experiment

    experiment = _experiment(file, None)
    if method:
        experiment = experiment.for_method(method)
    changes = list(overrides or ())
    kind = experiment.partition.kind
    if kind not in ("column", "pooled") and not any(c.startswith("partition.clients=") for c in changes):
        changes.append(f"partition.clients={sites}")  # a part of the data set for every site
    from nestfed.experiment import parse_overrides

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
    from nestfed.cli import say

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
    min_sites: Annotated[int, typer.Option(help="Fewer answers make no round [default: all].")] = 0,
    deadline: Annotated[float, typer.Option(help="Seconds for a round.")] = 600.0,
    insecure: Annotated[bool, typer.Option("--insecure", help="Without TLS and keys; loopback only.")] = False,
) -> None:
    """Carry an experiment out over a SuperLink and SuperNodes on this machine, with TLS and authentication.

    It leaves the same run directory as a simulation; the same command goes on with an unfinished run.
    """
    from rich.console import Console

    from nestfed.cli import say

    experiment = _chosen(file, overrides, method, sites)
    place = out or Path("runs") / f"deployed-{Path(file).stem}-{experiment.digest()}"
    console = Console(stderr=True, highlight=False)
    history = local(
        experiment, place, sites, least=min_sites, deadline=deadline, insecure=insecure, tell=lambda s: console.print(s)
    )
    end = history[-1]
    for key, value in end.items():
        if key not in (*_COSTS, "loss") and value is not None:
            say(f"{key:12} {value:.4f}")
    say(f"{'rounds':12} {end['round']}   ({end['examples']:,} examples, {end['seconds']:.1f} s)")
    say(f"record       {place / 'record.jsonl'}")


@deploy_app.command("certificates")
def certificates_(
    directory: Path,
    host: Annotated[list[str] | None, typer.Option(help="Name or address of the coordinator; may be repeated.")] = None,
    days: Annotated[int, typer.Option(help="How long they are valid.")] = 365,
) -> None:
    """Write the TLS certificates of a SuperLink: server.pem and server.key for it, ca.crt for everybody."""
    from nestfed.cli import say

    write_certificates(directory, host or [LOOPBACK], days)
    say(f"{directory / 'server.key'} stays secret; send {directory / 'ca.crt'} to every site.")


@deploy_app.command("key")
def key_(path: Path) -> None:
    """Write a site's key pair: PATH stays secret at the site, PATH.pub goes to the coordinator."""
    from nestfed.cli import say

    write_key(path)
    say(f"{path} stays secret; send {path}.pub to the coordinator.")


@deploy_app.command("digest")
def digest_(file: str) -> None:
    """Print the digest of an experiment, to which a site can bind itself."""
    from nestfed.cli import say
    from nestfed.experiment import read

    say(read(file).digest())
