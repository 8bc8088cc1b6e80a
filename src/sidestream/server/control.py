"""The messages between the supervisor and its API processes."""

from __future__ import annotations

import msgspec

from sidestream.server.options import ServerOptions

READY, DRAINED, ABORTED = b"r", b"d", b"a"
"""From an API process: it accepts requests; it ends after all requests finished; it ends and aborted some."""

STOP = b"s"
"""To an API process that is ready: drain. The second one: quit."""

GRACE_S = 2.0
"""After the engine has failed, API processes report that to clients for this long, then exit."""

CONFIG_BYTES = 1 << 16
"""Upper bound of a packed ApiProcessConfig."""


class ApiProcessConfig(msgspec.Struct, frozen=True):
    """To an API process, once the engine serves. The sockets of the engine and of the listener come with it."""

    options: ServerOptions
    log_level: int
    log_format: str
    log_dates: str
