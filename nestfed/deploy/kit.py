"""The kit for IT departments: services, proxy, containers, log rotation, and the page that explains them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from nestfed.core import NestfedError, __version__

TEMPLATES = Path(__file__).parent / "templates"
KIT = (
    "nestfed-superlink.service", "nestfed-site.service", "site.toml", "nginx.conf", "Caddyfile", "logrotate.conf", "Dockerfile",
    "compose.yaml",
)  # fmt: skip
PORT, CONTROL = 9090, 9091
"""Where sites connect, and where the SuperLink listens on the coordinator itself."""


def filled(name: str, values: Mapping[str, str]) -> str:
    """Return a template with its @NAMES@ replaced."""
    text = (TEMPLATES / name).read_text(encoding="utf-8")
    for key, value in values.items():
        text = text.replace(f"@{key}@", value)
    return text


def values_of(host: str, digest: str) -> dict[str, str]:
    """Return what the kit's files are filled with."""
    if not host or any(c.isspace() or c in "\"';{}" for c in host):
        raise NestfedError(f"The coordinator's host must be a name or an address, not {host!r}.")
    return {"HOST": host, "DIGEST": digest, "PORT": str(PORT), "CONTROL": str(CONTROL), "VERSION": __version__}


def write_kit(folder: Path, values: Mapping[str, str]) -> None:
    """Write the kit into a study's folder."""
    (folder / "kit").mkdir()
    for name in KIT:
        (folder / "kit" / name).write_text(filled(name, values), encoding="utf-8")
    (folder / "kit" / "README.md").write_text(filled("kit.md", values), encoding="utf-8")
