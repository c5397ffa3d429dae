"""The configuration of the coordinator's app, [tool.flwr.app.config] in the study's pyproject.toml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nestfed.core import NestfedError, one_of, unknown
from nestfed.deploy.enrolled import Sites, read_sites


@dataclass(frozen=True)
class Setup:
    """The app's configuration, [tool.flwr.app.config]."""

    sites: int
    out: Path
    least: int = 1
    """Valid answers that a round needs; otherwise it is repeated."""
    deadline: float = 600.0
    """Seconds after which a round continues without the missing answers."""
    attempts: int = 3
    """Attempts at a round before the run stops."""
    norm_limit: float = 0.0
    """The largest accepted ‖upload − broadcast‖ over all fields; 0 = no limit."""
    restart_lost: bool = False
    """Let a site that lost its private fields start over instead of leaving it out."""
    enrolled: Sites = field(default_factory=dict)
    """The sites that may take part, by the fingerprint of their key; empty = any."""
    certificates: Path | None = None
    """The folder with the coordinator's certificates, to warn before they expire."""

    @classmethod
    def read(cls, study: Any, config: Mapping[str, Any]) -> Setup:
        """Read and check the configuration."""
        defaults = {
            "sites": 0, "min-sites": 0, "deadline": 600.0, "attempts": 3, "norm-limit": 0.0, "lost-state": "refuse",
            "out": "", "enrolled": "", "certificates": "",
        }  # fmt: skip
        if "weights" in config:
            raise NestfedError(
                "weights is now exchange.weights in the experiment file; remove it from the app's configuration."
            )
        if wrong := [k for k in config if k not in defaults]:
            raise unknown("key", wrong[0], defaults, owner="The app's configuration")
        given = {**defaults, **config}
        sites, least = int(given["sites"]), int(given["min-sites"]) or int(given["sites"])
        deadline, attempts = float(given["deadline"]), int(given["attempts"])
        if sites < 1:
            raise NestfedError("The app's configuration must give the number of sites, such as sites = 4.")
        one_of("lost-state", given["lost-state"], ("refuse", "restart"))
        if not 1 <= least <= sites:
            raise NestfedError(f"min-sites must be between 1 and the {sites} sites, not {least}.")
        if not deadline > 0 or attempts < 1 or not float(given["norm-limit"]) >= 0:
            raise NestfedError("deadline and attempts must be above 0 and norm-limit at least 0.")
        out = Path(str(given["out"]) or f"runs/deployed-{study.digest()}")
        restart = given["lost-state"] == "restart"
        enrolled = read_sites(Path(str(given["enrolled"])), sites) if given["enrolled"] else {}
        if given["enrolled"] and not enrolled:
            raise NestfedError(
                f'{given["enrolled"]} lists no site: add each with `nestfed deploy enrol NAME KEY.pub`, or set enrolled = "" to '
                "take every site at its word."
            )
        secrets = Path(str(given["certificates"])) if given["certificates"] else None
        return cls(sites, out, least, deadline, attempts, float(given["norm-limit"]), restart, enrolled, secrets)
