"""The kit for IT departments, checked by the tools that will read it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="deployment is an extra: pip install 'nestfed[flower]'")

from nestfed.core import NestfedError, __version__
from nestfed.deploy.app import init
from nestfed.deploy.certificates import write_certificates
from nestfed.deploy.kit import CONTROL, KIT, PORT
from nestfed.deploy.node import Node
from nestfed.experiment.spec import from_tables

HOST = "coordinator.example.org"


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kit") / "study"
    experiment = from_tables(
        {
            "data": {"target": "died"}, "model": {"name": "mlp", "hidden": []}, "problem": {"name": "auroc", "batch": 10},
            "algorithm": {"name": "fmgda"}, "run": {"rounds": 2, "q": 2},
        }
    )  # fmt: skip
    init(folder, experiment, 3, HOST)
    write_certificates(folder / "secrets", [HOST])
    return folder


def tool(name: str) -> str:
    """The path of a command; without it, the test is skipped."""
    path = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin", str(Path(sys.executable).parent)])
    if (found := shutil.which(name, path=path)) is None:
        pytest.skip(f"{name} is not installed: this file of the kit is not checked")
    return found


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def here(study: Path, name: str, folder: Path) -> Path:
    """A file of the kit, for this machine instead of the places that it names."""
    folder.mkdir(exist_ok=True)
    text = (study / "kit" / name).read_text()
    text = text.replace("/srv/nestfed/study", str(study)).replace("/opt/nestfed/bin", str(Path(sys.executable).parent))
    text = text.replace("/var/log/nestfed", str(folder))
    path = folder / name
    path.write_text(text)
    return path


def test_nothing_is_left_to_fill_in(study: Path) -> None:
    for name in (*(f"kit/{file}" for file in (*KIT, "README.md")), "README.md"):
        text = (study / name).read_text()
        assert not re.search(r"@[A-Z]+@", text), name
    readme = (study / "kit" / "README.md").read_text()
    for name in KIT:
        assert name in readme or name in ("Dockerfile", "site.toml"), name
    with pytest.raises(NestfedError, match="must be a name or an address"):
        init(study.parent / "other", from_tables({"data": {"target": "x"}, "problem": {"name": "auroc"}, "model": {"name": "mlp"}, "algorithm": {"name": "fmgda"}}), 3, "a; rm")  # fmt: skip


def test_the_sites_configuration_is_valid(study: Path) -> None:
    node = Node.parse(str(study / "kit" / "site.toml"))
    assert (node.place.n, node.name, node.min_cell) == (0, "hospital-a", 10)


@pytest.mark.parametrize("name", ["nestfed-superlink.service", "nestfed-site.service"])
def test_the_services(name: str, study: Path, tmp_path: Path) -> None:
    """The units are valid, their commands exist and know every option."""
    path = here(study, name, tmp_path)
    assert run(tool("systemd-analyze"), "verify", "--man=no", str(path)) == ""
    command = " ".join(path.read_text().replace("\\\n", " ").partition("ExecStart=")[2].splitlines()[0].split())
    flower = "flower-superlink" if "superlink" in name else "flower-supernode"
    known = run(tool(flower), "--help")
    for option in re.findall(r" (--[a-z-]+)", command):
        assert f"{option} " in known or f"{option}\n" in known or f"{option}]" in known, option


def test_nginx(study: Path, tmp_path: Path) -> None:
    nginx = tool("nginx")
    site = here(study, "nginx.conf", tmp_path)
    main = tmp_path / "main.conf"
    main.write_text(
        f"pid {tmp_path}/pid;\nerror_log stderr;\nevents {{}}\nhttp {{ access_log off; include {site}; }}\n"
    )
    assert "test is successful" in run(nginx, "-t", "-p", str(tmp_path), "-c", str(main))


def test_caddy(study: Path, tmp_path: Path) -> None:
    path = here(study, "Caddyfile", tmp_path)
    assert "Valid configuration" in run(tool("caddy"), "validate", "--adapter", "caddyfile", "--config", str(path))


def test_log_rotation(study: Path, tmp_path: Path) -> None:
    path = here(study, "logrotate.conf", tmp_path)
    path.chmod(0o644)
    log = tmp_path / "site.log"
    log.write_text("line\n" * 100)
    rotate = tool("logrotate")
    run(rotate, "--force", "--state", str(tmp_path / "state"), str(path))
    assert log.read_text() == ""
    assert (tmp_path / "site.log.1").read_text() == "line\n" * 100


def test_the_image(study: Path) -> None:
    assert run(tool("hadolint"), "--failure-threshold", "style", str(study / "kit" / "Dockerfile")) == ""
    assert f"nestfed[flower]=={__version__}" in (study / "kit" / "Dockerfile").read_text()


def test_the_containers(study: Path) -> None:
    """The control interface's port is not published, and the commands are those of the services."""
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: compose.yaml is not checked")
    services = yaml.safe_load((study / "kit" / "compose.yaml").read_text())["services"]
    assert set(services) == {"superlink", "proxy", "site"}
    published = [port for one in services.values() for port in one.get("ports", ())]
    assert published == [f"{PORT}:{PORT}"]
    assert services["proxy"]["network_mode"] == "service:superlink"
    assert f"--host 127.0.0.1 --port {CONTROL} " in services["superlink"]["command"]
    for name, unit in (("superlink", "nestfed-superlink.service"), ("site", "nestfed-site.service")):
        text = (study / "kit" / unit).read_text().replace("\\\n", " ")
        started = text.partition("ExecStart=/opt/nestfed/bin/")[2].splitlines()[0].split()
        assert services[name]["command"].split() == started


@pytest.mark.long
def test_what_the_sites_get(study: Path, tmp_path: Path) -> None:
    """Flower's bundle has the app and nothing else: not the list of sites, secrets or runs."""
    (study / "runs" / "federated").mkdir(parents=True)
    (study / "runs" / "federated" / "record.jsonl").write_text("{}\n")
    folder = tmp_path / "bundle"
    folder.mkdir()
    done = subprocess.run(
        [tool("flwr"), "build", "--app", str(study)], cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "FLWR_HOME": str(tmp_path / "home")},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    with zipfile.ZipFile(next(folder.glob("*.fab"))) as bundle:
        names = set(bundle.namelist())
    app = {"experiment.toml", "federated/__init__.py", "federated/client.py", "federated/server.py", "LICENSE"}
    assert {name for name in names if not name.startswith(".info")} == app | {"pyproject.toml"}


def test_the_apps_configuration_names_the_list(study: Path) -> None:
    config = tomllib.loads((study / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert (config["enrolled"], config["certificates"]) == ("sites.toml", "secrets")
