"""The messages between the supervisor (the process that the user starts) and its API processes (which serve HTTP)."""

from __future__ import annotations

import msgspec

from sidestream.server.options import ServerOptions

READY, DRAINED, ABORTED = b"r", b"d", b"a"
"""From an API process. READY: the process accepts requests. DRAINED: the process ends, and all requests have finished.
ABORTED: the process ends, and has aborted requests.
"""

STOP = b"s"
"""To an API process that is ready. After the first STOP, the process lets running requests finish and ends. The second
STOP ends it at once.
"""

GRACE_S = 2.0
"""After the engine has failed, API processes report the failure to clients for this time, and then exit."""

CONFIG_BYTES = 1 << 16
"""Upper bound of a packed ApiProcessConfig."""


class ApiProcessConfig(msgspec.Struct, frozen=True):
    """Sent to an API process once the engine serves. The message carries the connection to the engine, the listener,
    and the file of `RateLimits`.
    """

    options: ServerOptions
    log_level: int
    log_format: str
    log_dates: str
    responses: str  # directory of the ResponseStore
