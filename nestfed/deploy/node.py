"""A site's node configuration: who it is, where its data and its state are, and its own rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nestfed.core import NestfedError, unknown
from nestfed.deploy.enrolled import check_name

if TYPE_CHECKING:
    from nestfed.experiment.site import Place

KEYS = ("client", "site", "data", "state", "experiment", "threads", "min-cell")
MIN_CELL = 10
"""The default of a site's min-cell."""


@dataclass(frozen=True)
class Node:
    """A site's node configuration."""

    place: Place
    name: str
    state: Path
    pinned: str
    threads: int
    min_cell: int
    """No count between 1 and this leaves the site."""

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Node:
        """Check the node configuration of Flower's SuperNode."""
        from nestfed.experiment.site import Place

        if wrong := [k for k in config if k not in KEYS]:
            raise unknown("key", wrong[0], KEYS, owner="The node configuration")
        n = config.get("client")
        if not isinstance(n, int) or isinstance(n, bool) or n < 0:
            raise NestfedError("The node configuration must give the client's number: client=0 for the first.")
        name = check_name(str(config.get("site", f"site-{n}")))
        state = config.get("state")
        if not state:
            from platformdirs import user_data_path

            state = user_data_path("nestfed") / "sites" / name
        data = str(config.get("data", ""))
        min_cell = config.get("min-cell", MIN_CELL)
        if not isinstance(min_cell, int) or isinstance(min_cell, bool) or min_cell < 0:
            raise NestfedError(f"min-cell must be a whole number of at least 0, not {min_cell!r}.")
        pinned, threads = str(config.get("experiment", "")), int(config.get("threads", 0))
        return cls(Place(n, data, name), name, Path(str(state)), pinned, threads, min_cell)

    @classmethod
    def parse(cls, text: str) -> Node:
        """Read `--node-config`: pairs such as client=0, or the path of a .toml file."""
        from click import ClickException
        from flwr.common.config import parse_config_args

        try:
            return cls.read(parse_config_args([text]))
        except (OSError, ValueError, ClickException) as error:
            reason = error.message if isinstance(error, ClickException) else str(error)
            raise NestfedError(f"The node configuration {text!r} cannot be read: {reason}") from error
