"""Run the rounds between institutions with Flower (`pip install 'nestfed[flower]'`).

    app = client_app("experiment.toml")     # at every site; its node configuration gives the client's number
    app = server_app("experiment.toml")     # at the coordinator; the app's configuration holds the options

Messages: `query.hello` (who are you?), `query.ask` (questions about a site's rows), and `train` (an order, which may also ask).
Other messages are not answered. An error at a site is logged there; the coordinator receives only its kind.

A site runs `client_app` in a process for every message, or its resident worker (`worker.py`) answers by the same code.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from nestfed.core import NestfedError

if find_spec("flwr") is None:
    raise NestfedError("Deployment needs Flower: pip install 'nestfed[flower]'.")

if TYPE_CHECKING:
    from nestfed.deploy.flower.client import client_app
    from nestfed.deploy.flower.messages import Custom
    from nestfed.deploy.flower.server import server_app

__all__ = ["Custom", "client_app", "server_app"]


def __getattr__(name: str) -> Any:
    """Import when first used: a SuperNode needs no torch."""
    if name == "Custom":
        from nestfed.deploy.flower.messages import Custom

        return Custom
    if name == "client_app":
        from nestfed.deploy.flower.client import client_app

        return client_app
    if name == "server_app":
        from nestfed.deploy.flower.server import server_app

        return server_app
    raise AttributeError(f"module 'nestfed.deploy.flower' has no attribute {name!r}")
