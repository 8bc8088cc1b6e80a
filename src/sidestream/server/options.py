"""The server's options, checked at birth."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from sidestream.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where and how the server listens, and what it lets one request ask for.

    port               0: any free one
    api_key            clients must send `Authorization: Bearer <api_key>`, except to /health; None: no check
    served_model_name  the name that clients ask for; None: the backend's
    max_body_bytes     a longer request body is refused with 413 while it is read
    body_timeout_s     a body that takes longer to arrive is refused with 408
    max_choices        prompts times n that one request may ask for
    drain_s            at shutdown, running requests may take this long to finish; then they are aborted
    retry_after_s      what a refused client is told to wait when the queue is full
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = field(default=None, repr=False)
    served_model_name: str | None = None
    max_body_bytes: int = 8 << 20
    body_timeout_s: float = 60.0
    max_choices: int = 128
    drain_s: float = 30.0
    retry_after_s: int = 1

    def __post_init__(self) -> None:
        for name, low, high in (
            ("port", 0, 65535),
            ("max_body_bytes", 1, 1 << 40),
            ("max_choices", 1, 1 << 20),
            ("retry_after_s", 0, 3600),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ConfigError(f"{name} is {value!r}: it must be a whole number in [{low}, {high}]")
        for name in ("body_timeout_s", "drain_s"):
            seconds = getattr(self, name)
            if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not (math.isfinite(seconds) and seconds >= 0):
                raise ConfigError(f"{name} is {seconds!r}: give a number of seconds, 0 or more")
        if self.api_key is not None and not (
            self.api_key and self.api_key.isascii() and self.api_key.isprintable() and " " not in self.api_key
        ):
            raise ConfigError("api_key must be one or more printable ASCII characters without spaces; leave it out for no check")
        if not self.host:
            raise ConfigError("host is empty: give an address such as 127.0.0.1, or 0.0.0.0 for all interfaces")
        if self.served_model_name == "":
            raise ConfigError("served_model_name is empty: give the name that clients shall ask for, or leave it out")
