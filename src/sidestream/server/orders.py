"""What the supervisor and its API processes say to each other."""

from __future__ import annotations

import msgspec

from sidestream.server.options import ServerOptions

READY, DRAINED, ABORTED = b"r", b"d", b"a"
"""From an API process: it accepts requests; it ends, and all requests could finish, or some were aborted."""

LAST_WORDS_S = 2.0
"""How long API processes tell clients that the engine is gone, before they end, too."""

STOP = b"s"
"""To an API process that is ready, after its orders: drain; the second time, quit."""

ORDERS_BYTES = 1 << 16
"""More than any orders take."""


class Orders(msgspec.Struct, frozen=True):
    """To an API process, once the engine serves; the sockets of the engine and of the clients come with it."""

    options: ServerOptions
    log_level: int
    log_format: str
    log_dates: str
