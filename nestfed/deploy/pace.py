"""How long to wait between two looks for something new: briefly while there is work, longer the longer there is none."""

from __future__ import annotations

import time

SHARE = 0.02
"""A wait is this share of the time without work, so polling delays nothing by more than this share."""
BUSY = 2.0
"""A wait is also this many times as long as the poll before it, so that many sites do not occupy a slow SuperLink."""
FASTEST = 0.05
"""The shortest wait for a message, in seconds."""
SLOWEST = 2.0
"""The longest wait for a message, reached after 100 seconds without one."""


class Pace:
    """Waits between polls, from `fastest` seconds after work to `slowest` after a long time without it."""

    def __init__(self, fastest: float = FASTEST, slowest: float = SLOWEST) -> None:
        self.fastest, self.slowest = fastest, slowest
        self.restart()

    def restart(self) -> None:
        """Poll fast again, because there was work."""
        self.since = time.monotonic()
        self.woke: float | None = None

    def sleep(self) -> None:
        """Wait until the next poll."""
        now = time.monotonic()
        poll = 0.0 if self.woke is None else now - self.woke
        time.sleep(min(max(self.fastest, SHARE * (now - self.since), BUSY * poll), self.slowest))
        self.woke = time.monotonic()
