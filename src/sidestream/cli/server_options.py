"""The options of `sidestream serve` that are fields of ServerOptions, one row each; types and defaults are theirs."""

from __future__ import annotations

import inspect
import os
from dataclasses import dataclass, fields
from typing import Annotated, Any, get_type_hints

from sidestream.cli.declare import number, option, whole
from sidestream.config import parse_bytes
from sidestream.server.options import ServerOptions


@dataclass(frozen=True, slots=True)
class _Row:
    """One option.

    absent   the meaning of an absent value in `--help`; False: show none, True: show the default
    name     the parameter's name, where the field's has a unit or a plural
    """

    field: str
    metavar: str
    help: str
    absent: str | bool = True
    name: str = ""
    envvar: str | None = None


_ROWS = (
    _Row("host", "ADDRESS", "Address to listen on; 0.0.0.0 for all.", "127.0.0.1"),
    _Row("port", "N", "Port to listen on; 0 for any free one.", "8000"),
    _Row("uds", "PATH", "Listen on a Unix socket at this path, in place of an address.", False),
    _Row("root_path", "PATH", "Prefix below which a proxy serves the API, such as /llm.", False),
    _Row("ssl_certfile", "FILE", "Speak TLS with this certificate (PEM, with its chain).", False),
    _Row(
        "ssl_keyfile",
        "FILE",
        "The certificate's key (PEM); $SIDESTREAM_SSL_KEYFILE_PASSWORD opens an encrypted one.",
        "the certificate's file",
    ),
    _Row("ssl_ca_certs", "FILE", "Ask clients for a certificate that one of these (PEM) signed.", False),
    _Row("api_key", "KEY", "Clients must send it; better given by the variable.", False, envvar="SIDESTREAM_API_KEY"),
    _Row("served_model_name", "NAME", "What clients call the model.", "its own"),
    _Row("max_body_bytes", "SIZE", "A longer request body is refused.", name="max_body"),
    _Row("head_timeout_s", "SECONDS", "A slower request head is refused.", name="head_timeout"),
    _Row("body_timeout_s", "SECONDS", "A slower request body is refused.", name="body_timeout"),
    _Row(
        "stall_timeout_s",
        "SECONDS",
        "A client that takes none of its reply for so long is cut off.",
        name="stall_timeout",
    ),
    _Row("max_connections", "N", "Connections at a time.", "2048, or as many as open files allow"),
    _Row("max_connections_per_address", "N", "The same, of one client address.", "no limit"),
    _Row(
        "cors_origins",
        "ORIGIN",
        "Web pages of this origin may use the API from a browser; * for all; may be given several times.",
        False,
        name="cors_origin",
    ),
    _Row("max_choices", "N", "Prompts times n of one request, at most."),
    _Row("drain_s", "SECONDS", "How long running requests may go on at the end.", name="drain_seconds"),
)


def server_options(**values: Any) -> ServerOptions:
    """Make ServerOptions of the options' values. Raises ConfigError."""
    known = {row.field: values[row.name or row.field] for row in _ROWS}
    known["max_body_bytes"] = parse_bytes(known["max_body_bytes"], option="max_body")
    known["cors_origins"] = tuple(known["cors_origins"] or ())
    return ServerOptions(**known, ssl_keyfile_password=os.environ.get("SIDESTREAM_SSL_KEYFILE_PASSWORD"))


def _parameters() -> list[inspect.Parameter]:
    types = get_type_hints(ServerOptions)
    defaults: dict[str, Any] = {field.name: field.default for field in fields(ServerOptions)}
    types["max_body_bytes"], defaults["max_body_bytes"] = str, f"{defaults['max_body_bytes'] >> 20}MiB"
    types["cors_origins"], defaults["cors_origins"] = list[str] | None, None
    parameters = []
    for row in _ROWS:
        name, kind = row.name or row.field, types[row.field]
        parse = whole if kind in (int, int | None) else number if kind is float else None
        declared = option(f"--{name.replace('_', '-')}", row.metavar, row.help, row.absent, parse, envvar=row.envvar)
        parameters.append(
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=defaults[row.field], annotation=Annotated[kind, declared]
            )
        )
    return parameters


server_options.__signature__ = inspect.Signature(_parameters())  # type: ignore[attr-defined]
