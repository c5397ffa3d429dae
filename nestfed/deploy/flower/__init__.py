"""Flower: the same rounds between machines that share nothing but named fields (`pip install 'nestfed[flower]'`).

    app = client_app("experiment.toml")     # at every site; its node configuration says which client it is
    app = server_app("experiment.toml")     # at the coordinator; the app's configuration holds the rules

Messages: `query.hello` and `query.spread` before the first round (counts, sums, names), then `train` with the shared
fields, and `evaluate` to sites that are not asked in a round. No other kind of message is answered. Whatever goes
wrong at a site is told there, in its own log; the coordinator only hears of which kind it is.
"""

from importlib.util import find_spec

from nestfed.core import NestfedError

if find_spec("flwr") is None:
    raise NestfedError("Deployment needs Flower: pip install 'nestfed[flower]'.")

from nestfed.deploy.flower.client import client_app
from nestfed.deploy.flower.messages import Custom
from nestfed.deploy.flower.server import server_app

__all__ = ["Custom", "client_app", "server_app"]
