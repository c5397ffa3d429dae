"""Run the rounds between institutions with Flower (`pip install 'nestfed[flower]'`).

    app = client_app("experiment.toml")     # at every site; its node configuration gives the client's number
    app = server_app("experiment.toml")     # at the coordinator; the app's configuration holds the options

Messages: `query.hello` and `query.spread` before the first round (counts, sums, names), then `train` with the shared
fields, and `evaluate` for sites that do not train in a round. Other messages are not answered. An error at a site is
logged there; the coordinator receives only its kind.
"""

from importlib.util import find_spec

from nestfed.core import NestfedError

if find_spec("flwr") is None:
    raise NestfedError("Deployment needs Flower: pip install 'nestfed[flower]'.")

from nestfed.deploy.flower.client import client_app
from nestfed.deploy.flower.messages import Custom
from nestfed.deploy.flower.server import server_app

__all__ = ["Custom", "client_app", "server_app"]
