"""The messages between the supervisor and its API processes."""

from __future__ import annotations

import msgspec

from sidestream.server.options import ServerOptions

READY, DRAINED, ABORTED = b"r", b"d", b"a"
"""From an API process. READY: it accepts requests. DRAINED: it ends, and all requests have finished. ABORTED: it ends,
and has aborted requests.
"""

STOP = b"s"
"""To an API process that is ready: the first STOP makes it drain, the second makes it quit."""

GRACE_S = 2.0
"""Time for which API processes tell clients that the engine has failed; then they exit."""

CONFIG_BYTES = 1 << 16
"""Upper bound of a packed ApiProcessConfig."""


class ApiProcessConfig(msgspec.Struct, frozen=True):
    """To an API process, once the engine serves. The sockets of the engine and of the listener are sent with it."""

    options: ServerOptions
    log_level: int
    log_format: str
    log_dates: str
