"""Run a federation as processes on this machine."""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nestfed.core import NestfedError
from nestfed.deploy.app import check_experiment, write_app
from nestfed.deploy.certificates import write_certificates, write_key
from nestfed.deploy.enrolled import FILE, Enrolled, fingerprint, write_sites
from nestfed.deploy.processes import Processes

if TYPE_CHECKING:
    from nestfed.experiment.spec import Experiment

LOG = logging.getLogger(__name__)
LOOPBACK = "127.0.0.1"
SUPERNODE = (sys.executable, "-m", "nestfed", "deploy", "supernode")
"""The command that starts a site."""
ENVIRONMENT = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
"""Turn off Flower's telemetry and update check."""


@dataclass
class Local:
    """SuperLink and SuperNodes on the loopback interface."""

    folder: Path
    processes: Processes
    insecure: bool = False
    port: int = 0
    node_ports: dict[int, int] = field(default_factory=dict)
    sites: dict[int, dict[str, Any]] = field(default_factory=dict)
    commands: dict[int, Sequence[str]] = field(default_factory=dict)
    """The beginning of the command of each site that is not started by `SUPERNODE`."""

    def __post_init__(self) -> None:
        self.port = self.port or free_port()
        self.secrets = self.folder / "secrets"
        self.bin = Path(sys.executable).parent

    def environment(self, home: str) -> dict[str, str]:
        """Return the environment of a process with its own Flower home."""
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
        if " " in sys.prefix:  # its database does not find its migrations, and every request fails
            raise NestfedError(
                f"Flower's SuperLink does not work from a Python environment whose path has a space ({sys.prefix}): "
                "create one elsewhere."
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
        """Create the sites' keys and register them with the SuperLink."""
        commands = []
        for n in sites:
            key, done = self.secrets / f"site-{n}.key", self.secrets / f"site-{n}.registered"
            if not key.exists():
                write_key(key)
            if not done.exists():
                commands.append(["supernode", "register", f"{key}.pub", "local", "--name", f"site-{n}"])
        if not commands:
            return
        # One process for all sites: importing Flower's command line takes most of the time.
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
            output = (done_.stdout + done_.stderr).strip().splitlines()
            raise NestfedError(f"The SuperLink rejected the sites' keys: {' '.join(output[-3:])}")
        for n in sites:
            (self.secrets / f"site-{n}.registered").touch()

    def enrolled(self, n: int, name: str = "") -> Enrolled:
        """Return a registered site as sites.toml lists it."""
        public = (self.secrets / f"site-{n}.key.pub").read_bytes()
        return Enrolled(n, name or f"site-{n}", fingerprint(public))

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
                *self.commands.get(n, SUPERNODE), *tls, "--superlink", f"{LOOPBACK}:{self.port}", "--host", LOOPBACK, "--port", str(port), "--node-config", words,
            ],
            self.environment(f"site-{n}"),
        )  # fmt: skip

    def revive(self) -> None:
        """Restart sites that have ended. The SuperLink rejects a killed site for up to a minute."""
        for n, config in self.sites.items():
            process = self.processes.running.get(f"site-{n}")
            if process is None or process.poll() is not None:
                if process is not None:
                    self.processes.stop(f"site-{n}")  # its remaining processes
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
                raise NestfedError(f"The {name} failed to start:\n{self.processes.tail(name)}")
            with suppress(OSError), closing(socket.create_connection((LOOPBACK, port), 1)):
                return
            time.sleep(0.1)
        raise NestfedError(f"The {name} is not listening after {seconds:g} s:\n{self.processes.tail(name)}")


def free_port() -> int:
    """Return a free port."""
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
    min_cell: int = 10,
    notify: Callable[[str], None] = LOG.info,
) -> list[dict[str, Any]]:
    """Run an experiment with real processes on this machine. Call it again to resume."""
    from nestfed.engine.progress import Progress
    from nestfed.engine.record import metrics_of
    from nestfed.engine.record import read as read_record
    from nestfed.engine.run_directory import Interrupted
    from nestfed.experiment.run import claim

    names, tables = _places(experiment, sites)
    sites = len(names)
    check_experiment(experiment, sites)
    out = out.resolve()
    claim(out, experiment)
    record, finished, warnings = out / "record.jsonl", out / "finished.json", out / "sites.log"
    if finished.exists():
        return read_record(record)
    folder = out / "flower"
    enrolled, secrets = ("", "") if insecure else (str(folder / FILE), str(folder / "secrets"))
    write_app(
        folder / "app",
        experiment,
        sites,
        least=least,
        deadline=deadline,
        out=str(out),
        enrolled=enrolled,
        certificates=secrets,
    )
    shown = len(warnings.read_text(encoding="utf-8").splitlines()) if warnings.exists() else 0
    progress = out / "progress.log"
    shown_steps = len(progress.read_text(encoding="utf-8").splitlines()) if progress.exists() else 0
    try:
        with Processes(folder / "logs") as processes:
            federation = Local(folder, processes, insecure)
            notify(f"starting a SuperLink and {sites} SuperNodes on {LOOPBACK}")
            federation.superlink()
            if not insecure:
                federation.register(*range(sites))
                write_sites(folder / FILE, [federation.enrolled(n, name) for n, name in enumerate(names)])
            for n, name in enumerate(names):
                own = {"data": str(Path(tables[name]).resolve())} if tables else {}
                federation.supernode(n, **{"site": name, "min-cell": min_cell, **own})
            history = read_record(record)
            done = history[-1]["round"] if history else 0
            run = federation.run(folder / "app")
            revived = time.monotonic()
            bar = Progress(experiment.algorithm.name, experiment.run.rounds, done, False if tables else None)
            with bar:
                while not finished.exists():
                    over = run.poll() is not None
                    if time.monotonic() - revived > 10:
                        federation.revive()
                        revived = time.monotonic()
                    history = read_record(record)
                    if history:
                        bar.update(history[-1], metrics_of(history[-1]))
                    steps = progress.read_text(encoding="utf-8").splitlines() if progress.exists() else []
                    for line in steps[shown_steps:]:
                        notify(line.split(" ", 2)[-1])
                    shown_steps = max(shown_steps, len(steps))
                    lines = warnings.read_text(encoding="utf-8").splitlines() if warnings.exists() else []
                    for line in lines[shown:]:
                        notify(line.split(" ", 2)[-1])
                    shown = max(shown, len(lines))
                    if over and not finished.exists():
                        stopped = [line.partition(" stopped: ")[2] for line in lines if " stopped: " in line]
                        output = f"Flower's last output:\n{processes.tail('run')}\nThe logs are in {folder / 'logs'}."
                        hint = f" The sites' own logs are in {folder / 'logs'}."
                        raise NestfedError(f"{stopped[-1]}{hint}" if stopped else f"The run ended early. {output}")
                    time.sleep(0.3)
                if history := read_record(record):
                    bar.update(history[-1], {})
    except KeyboardInterrupt:
        raise Interrupted(f"Stopped; run the same command again to resume from {out}.") from None
    return read_record(record)


def _places(experiment: Experiment, sites: int) -> tuple[list[str], Mapping[str, str]]:
    """Return the names of the sites, and the table of each in a study."""
    if not experiment.is_study:
        return [f"site-{n}" for n in range(sites)], {}
    tables = experiment.sites.files
    if not tables:
        raise NestfedError(
            "To deploy a study on this machine, name the table of every site in [sites], such as clinic-a = 'sites/a.csv'."
        )
    if missing := [file for file in tables.values() if not Path(file).is_file()]:
        raise NestfedError(
            f"There is no file {', '.join(missing)}: correct [sites]; paths are relative to the current folder."
        )
    return list(tables), tables
