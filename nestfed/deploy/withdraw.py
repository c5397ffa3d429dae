"""A site withdraws from its study."""

from __future__ import annotations

import getpass
from pathlib import Path

from nestfed.core import NestfedError
from nestfed.deploy.audit import FOLDER, Audit
from nestfed.files import write_atomically

WITHDRAWN = "withdrawn"
"""The file in a site's state folder that says that it has withdrawn."""


def withdraw(state: Path) -> str:
    """Mark a site as withdrawn; return what that means."""
    if not state.is_dir():
        raise NestfedError(f"{state} is not the state folder of a site: give the one in its node configuration.")
    write_atomically(
        state / WITHDRAWN, b"This site has withdrawn from its study. Delete this file to take part again.\n"
    )
    Audit(state / FOLDER, getpass.getuser()).add("site withdrew")
    return (
        f"The site answers nothing from now on, except that it has withdrawn. Its earlier contributions stay in the model. "
        f"Delete {state / WITHDRAWN} to take part again."
    )
