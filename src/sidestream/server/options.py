"""The server's options, checked when they are made."""

from __future__ import annotations

import math
import os
import re
import sys
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from sidestream.errors import ConfigError
from sidestream.formats import REASONING_FORMATS, TOOL_FORMATS
from sidestream.server.cache_explanation import LEVELS
from sidestream_kv.config import unknown_name

# Size of the field `sun_path` of the kernel's address, without the zero byte at its end.
_MOST_UDS_BYTES = 103 if sys.platform == "darwin" else 107
_ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)+")
_REPLICA = re.compile(r"[A-Za-z0-9._:/-]{1,128}")


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Address, TLS, limits and timeouts of the server.

    host               address to listen on; None: 127.0.0.1
    port               port to listen on; 0: any free port; None: 8000
    uds                path of a Unix socket to listen on, in place of a port; None: listen on a port
    root_path          prefix below which a proxy serves the API, such as `/llm`. Request paths may have the prefix or
                       not
    ssl_certfile       PEM file with the server's TLS certificate; None: plain HTTP
    ssl_keyfile        PEM file with the certificate's key; None: the key is in `ssl_certfile`
    ssl_keyfile_password  password of an encrypted key
    ssl_ca_certs       PEM file with CA certificates. Clients must have a certificate that one of them signed; None: no
                       client certificates
    api_key            clients must send `Authorization: Bearer <api_key>`, except for health checks and
                       /docs; None: no check
    api_keys           TOML file of further API keys with names, limits and rights (`api_keys.ApiKey`); it is read again
                       when it changes. None: none
    audit_log          file to which a line of JSON is appended for each request, without its texts; None: none
    batch_directory    directory of `/v1/files` and `/v1/batches`; None: the server has none of these
    max_batch_directory_bytes  bytes of this directory, beyond which nothing is uploaded, and batches fail; None: 10 GiB
    otlp_traces_endpoint  URL of an OpenTelemetry collector, such as http://127.0.0.1:4318/v1/traces, for a span of
                       each request; None: no spans. Needs the extra `otel`
    admin_key          key for operations (such as /reset_prefix_cache), which `api_key` does not open; it opens all
                       other paths, too. None: operations are refused
    served_model_name  the model's name in requests; None: the backend's name for it
    replica            name of this server among several: a label of all metrics, and the header
                       `X-Sidestream-Replica` of all replies; empty: neither
    max_body_bytes     a longer request body is refused with 413 while it is read; None: 1 MiB and 64 bytes for each
                       token of the context
    max_buffered_bytes  bytes of request bodies that a process holds at the same time, until they are parsed; further
                        bodies are refused with 503. None: 64 MiB, or four times `max_body_bytes` if that is more
    head_timeout_s     a request head that takes longer to arrive is refused with 408. The time counts from the accept
                       or, on a connection that was used before, from the first byte of the head
    body_timeout_s     a body that takes longer to arrive is refused with 408
    stall_timeout_s    a client that reads no byte of its reply for this long is disconnected, and its request aborted
    max_connections    maximum number of connections at the same time; further ones are refused with 503. None: 2048, or
                       as many as open files allow
    max_connections_per_address  maximum number of connections from one client address at the same time; None: no limit.
                                 All clients behind a reverse proxy have the proxy's address
    allowed_origins    origins whose web pages may use the API from a browser, such as `https://chat.example.com`; `*`:
                       all origins
    page               serve the page at `/`, and the live figures that it and `sidestream top` show
    chat_template      path of a Jinja template to use in place of the model's own; None: the model's
    tool_call_parser   name of the format of the model's tool calls (`TOOL_FORMATS`); none: tools are refused; None: the
                       format of its chat template
    reasoning_parser   name of the format of its reasoning (`REASONING_FORMATS`), which is then split from every chat
                       answer; none: reasoning stays in the text; None: the format of its chat template, for requests
                       with tools or options of reasoning
    explain_cache      what replies to requests with `explain_cache` contain about earlier requests with the same
                       cache salt: `off`, `blocks` (nothing but whole blocks, as the usage does) or `text` (tokens
                       and their text; and whether other salts have the same prompts), for callers that trust each
                       other. Requests with the admin key get `text`
    max_hint_ttl_s     longest time for which a request's `cache_control` pins a prefix of its prompt; 0: it pins
                       nothing
    max_choices        maximum number of prompts times n in one request
    max_stored_responses  responses that are kept for requests that continue them (`previous_response_id`), by all API
                          processes together; the least recently used are removed first; 0: none
    max_stored_bytes   bytes of these responses, with their conversations; None: 64 MiB
    drain_s            time for running requests to finish at shutdown; then they are aborted
    retry_after_s      seconds in the header `Retry-After` of a reply that refuses a request because the queue is full
    """

    host: str | None = None
    port: int | None = None
    uds: str | None = None
    root_path: str = ""
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_keyfile_password: str | None = field(default=None, repr=False)
    ssl_ca_certs: str | None = None
    api_key: str | None = field(default=None, repr=False)
    api_keys: str | None = None
    audit_log: str | None = None
    batch_directory: str | None = None
    max_batch_directory_bytes: int | None = None
    otlp_traces_endpoint: str | None = None
    admin_key: str | None = field(default=None, repr=False)
    served_model_name: str | None = None
    replica: str = ""
    max_body_bytes: int | None = None
    max_buffered_bytes: int | None = None
    head_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    stall_timeout_s: float = 60.0
    max_connections: int | None = None
    max_connections_per_address: int | None = None
    allowed_origins: tuple[str, ...] = ()
    page: bool = True
    chat_template: str | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    explain_cache: str = "blocks"
    max_hint_ttl_s: float = 3600.0
    max_choices: int = 128
    max_stored_responses: int = 1000
    max_stored_bytes: int | None = None
    drain_s: float = 30.0
    retry_after_s: int = 1

    def __post_init__(self) -> None:
        for name, low, high in (
            ("port", 0, 65535),
            ("max_body_bytes", 1, 1 << 40),
            ("max_buffered_bytes", 1, 1 << 40),
            ("max_connections", 1, 1 << 20),
            ("max_connections_per_address", 1, 1 << 20),
            ("max_choices", 1, 1 << 20),
            ("max_stored_responses", 0, 1 << 20),
            ("max_stored_bytes", 1, 1 << 40),
            ("max_batch_directory_bytes", 1, 1 << 50),
            ("retry_after_s", 0, 3600),
        ):
            value = getattr(self, name)
            if value is None and name not in ("max_choices", "max_stored_responses", "retry_after_s"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ConfigError(f"{name} is {value!r}: it must be a whole number in [{low}, {high}]")
        if self.max_buffered_bytes is not None and self.max_buffered_bytes * 3 // 4 < (self.max_body_bytes or 0):
            raise ConfigError(
                f"max_buffered_bytes is {self.max_buffered_bytes}, and max_body_bytes {self.max_body_bytes}: "
                f"one body may fill three quarters of it; give {-(-(self.max_body_bytes or 0) * 4 // 3)} or more"
            )
        for name in ("head_timeout_s", "body_timeout_s", "stall_timeout_s", "max_hint_ttl_s", "drain_s"):
            seconds = getattr(self, name)
            if (
                not isinstance(seconds, int | float)
                or isinstance(seconds, bool)
                or not (math.isfinite(seconds) and seconds >= 0)
            ):
                raise ConfigError(f"{name} is {seconds!r}: give a number of seconds, 0 or more")
        if self.head_timeout_s == 0:
            raise ConfigError("head_timeout_s is 0: no request could arrive; give a number of seconds above 0")
        if self.stall_timeout_s == 0:
            raise ConfigError("stall_timeout_s is 0: no reply could be sent; give a number of seconds above 0")
        for name, formats in (("tool_call_parser", TOOL_FORMATS), ("reasoning_parser", REASONING_FORMATS)):
            value = getattr(self, name)
            if value is not None and value not in (*formats, "none"):
                raise ConfigError(unknown_name(name, str(value), (*formats, "none")))
        if self.explain_cache not in LEVELS:
            raise ConfigError(unknown_name("explain_cache", str(self.explain_cache), LEVELS))
        for origin in self.allowed_origins:
            _check_origin(origin)
        if self.chat_template is not None and not os.access(self.chat_template, os.R_OK):
            raise ConfigError(f"chat_template is {self.chat_template}: no such file, or it may not be read")
        for name, without in (("api_key", "to check no key"), ("admin_key", "to refuse operations")):
            key = getattr(self, name)
            if key is not None and not (key and key.isascii() and key.isprintable() and " " not in key):
                raise ConfigError(
                    f"{name} must be one or more printable ASCII characters without spaces; leave it out {without}"
                )
        if self.admin_key is not None and self.admin_key == self.api_key:
            raise ConfigError("admin_key is equal to api_key: give another one, so that users cannot send operations")
        for name in ("api_keys", "audit_log", "batch_directory"):
            if getattr(self, name) == "":
                raise ConfigError(f"{name} is empty: give a path, or leave it out")
        if self.host == "":
            raise ConfigError("host is empty: give an address such as 127.0.0.1, or 0.0.0.0 for all interfaces")
        if self.replica and not _REPLICA.fullmatch(self.replica):
            raise ConfigError(
                f"replica is {self.replica!r}: give up to 128 letters, digits and ._:/-, such as host1-gpu0"
            )
        self._check_uds()
        _check_root_path(self.root_path)
        self._check_tls()
        if self.served_model_name == "":
            raise ConfigError("served_model_name is empty: give the name that clients shall ask for, or leave it out")

    @property
    def address(self) -> tuple[str, int]:
        """Host and port to listen on, unless `uds` is given."""
        return "127.0.0.1" if self.host is None else self.host, 8000 if self.port is None else self.port

    @property
    def is_keyed(self) -> bool:
        """Whether clients need a key."""
        return self.api_key is not None or self.api_keys is not None

    def _check_uds(self) -> None:
        if self.uds is None:
            return
        for name in ("host", "port"):
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"uds is {self.uds!r} and {name} is {getattr(self, name)!r}: "
                    "give a Unix socket or an address, not both"
                )
        if not self.uds or "\0" in self.uds:
            raise ConfigError(f"uds is {self.uds!r}: give the path of a Unix socket, such as /tmp/sidestream.sock")
        size = len(os.fsencode(self.uds))
        if size > _MOST_UDS_BYTES:
            raise ConfigError(
                f"uds is {self.uds!r}, {size} bytes: the path of a Unix socket has at most {_MOST_UDS_BYTES}; "
                "give a shorter one, such as /tmp/sidestream.sock"
            )

    def _check_tls(self) -> None:
        for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
            path = getattr(self, name)
            if path == "":
                raise ConfigError(f"{name} is empty: give a file in PEM form, or leave it out")
            if path is not None and self.ssl_certfile is None:
                raise ConfigError(
                    f"{name} is {path} without ssl_certfile: give the server's certificate too, "
                    "or leave it out for plain HTTP"
                )


def _check_root_path(path: str) -> None:
    """Raise ConfigError for a malformed prefix, and for a prefix that would make paths ambiguous."""
    if path and not _ROOT_PATH.fullmatch(path):
        raise ConfigError(
            f"root_path is {path!r}: it must begin with a slash, end without one, "
            "and have letters, digits and ._~- in between, such as /llm"
        )
    if path == "/v1" or path.startswith("/v1/"):
        raise ConfigError(
            f"root_path is {path!r}: the API's own paths begin with /v1; "
            "give the prefix that the proxy puts in front of /v1, or leave root_path out"
        )


def _check_origin(origin: str) -> None:
    """Raise ConfigError for an origin that is not in the form that browsers send, because it would never match."""
    parts = urlsplit(origin)
    if origin != "*" and (
        parts.scheme not in ("http", "https")
        or not parts.netloc
        or origin != f"{parts.scheme}://{parts.netloc}".lower()
    ):
        raise ConfigError(
            f"allowed_origins has {origin!r}: give an origin as browsers send it, such as https://chat.example.com "
            "or http://localhost:3000, in lower case and without a path or a slash at the end; or * for all origins"
        )
