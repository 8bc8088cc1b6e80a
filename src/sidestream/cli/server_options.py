"""The options of `sidestream serve` for the HTTP server and for KV events.

The table `_ROWS` has a row for each field of ServerOptions; types and defaults come from the field.
"""

from __future__ import annotations

import inspect
import os
from dataclasses import dataclass, fields
from typing import Annotated, Any, get_type_hints

from sidestream.cli.declare import number, option, whole
from sidestream.config import KVEventsConfig
from sidestream.errors import ConfigError
from sidestream.server.options import ServerOptions
from sidestream_kv.config import parse_bytes


@dataclass(frozen=True, slots=True)
class _Row:
    """One option.

    absent   text in `--help` about the default; False: no text; True: the default itself
    name     name of the option, if it differs from the field's name (which may contain a unit or be a plural)
    """

    field: str
    metavar: str
    help: str
    absent: str | bool = True
    name: str = ""
    envvar: str | None = None


_ROWS = (
    _Row("host", "ADDRESS", "Address to listen on; 0.0.0.0 for all addresses.", "127.0.0.1"),
    _Row("port", "N", "Port to listen on; 0 for any free port.", "8000"),
    _Row("uds", "PATH", "Listen on a Unix socket at this path instead of an address.", False),
    _Row("root_path", "PATH", "Path prefix of the API behind a proxy, such as /llm.", False),
    _Row("ssl_certfile", "FILE", "Use TLS with this certificate (PEM, with its chain).", False),
    _Row(
        "ssl_keyfile",
        "FILE",
        "The certificate's key (PEM); $SIDESTREAM_SSL_KEYFILE_PASSWORD is the password of an encrypted key.",
        "the certificate's file",
    ),
    _Row(
        "ssl_ca_certs", "FILE", "Require client certificates that one of these CA certificates (PEM) has signed.", False
    ),
    _Row(
        "api_key",
        "KEY",
        "Key that clients must send; safer in the environment variable.",
        False,
        envvar="SIDESTREAM_API_KEY",
    ),
    _Row("api_keys", "FILE", "TOML file of API keys with names, limits and rights; reread when it changes.", False),
    _Row("audit_log", "FILE", "Append a line of JSON for each request, without its texts.", "off"),
    _Row("batch_directory", "DIR", "Offer /v1/files and /v1/batches, and keep their files here.", "off"),
    _Row(
        "max_batch_directory_bytes", "SIZE", "Maximum size of --batch-directory.", "10 GiB", name="max_batch_directory"
    ),
    _Row("otlp_traces_endpoint", "URL", "Send a span of each request to this OpenTelemetry collector.", "off"),
    _Row(
        "admin_key",
        "KEY",
        "Key for operations such as /pause, without which they are refused; safer in the environment variable.",
        False,
        envvar="SIDESTREAM_ADMIN_KEY",
    ),
    _Row("served_model_name", "NAME", "Model name in the API.", "the model's own"),
    _Row("replica", "NAME", "Name of this server among several: a label of all metrics, and a reply header.", False),
    _Row(
        "max_body_bytes",
        "SIZE",
        "Longer request bodies are rejected.",
        "1 MiB, and 64 bytes for each token of the context",
        name="max_body",
    ),
    _Row(
        "max_buffered_bytes",
        "SIZE",
        "Bytes of request bodies that an API process holds at once.",
        "64 MiB, or four times --max-body",
        name="max_buffered",
    ),
    _Row("head_timeout_s", "SECONDS", "Slower request heads are rejected.", name="head_timeout"),
    _Row("body_timeout_s", "SECONDS", "Slower request bodies are rejected.", name="body_timeout"),
    _Row(
        "stall_timeout_s",
        "SECONDS",
        "A client that reads nothing of its reply for this long is disconnected.",
        name="stall_timeout",
    ),
    _Row("max_connections", "N", "Maximum connections at once.", "2048, or as many as the limit of open files allows"),
    _Row("max_connections_per_address", "N", "Maximum connections at once from one client address.", "no limit"),
    _Row(
        "allowed_origins",
        "ORIGIN",
        "Allow browser pages of this origin (CORS); * for all; may be given several times.",
        False,
    ),
    _Row("page", "", "Serve a page with chat and live figures at /, and the figures for sidestream top.", False),
    _Row("chat_template", "FILE", "Jinja template to use in place of the model's own.", "the model's own"),
    _Row("tool_call_parser", "NAME", "Format of the model's tool calls, by vLLM's name; none: off.", "by the template"),
    _Row("reasoning_parser", "NAME", "Format of the model's reasoning, by vLLM's name; none: off.", "by the template"),
    _Row("explain_cache", "LEVEL", "What explain_cache tells of others with the same salt: off, blocks or text."),
    _Row(
        "max_hint_ttl_s",
        "SECONDS",
        "Longest time for which a request's cache_control pins its prefix; 0: it pins nothing.",
        name="max_hint_ttl",
    ),
    _Row("max_choices", "N", "Maximum choices of one request: prompts times n."),
    _Row("max_stored_responses", "N", "Responses kept for requests that continue them; 0: none."),
    _Row("max_stored_bytes", "SIZE", "Bytes of kept responses, with their conversations.", "64 MiB", name="max_stored"),
    _Row("drain_s", "SECONDS", "Time for running requests to finish at shutdown.", name="drain_seconds"),
)


_SIZES = ("max_body_bytes", "max_buffered_bytes", "max_stored_bytes", "max_batch_directory_bytes")


def server_options(**values: Any) -> ServerOptions:
    """Make ServerOptions from the options' values. Raises ConfigError."""
    known = {row.field: values[row.name or row.field] for row in _ROWS}
    for row in _ROWS:
        if row.field in _SIZES and known[row.field] is not None:
            known[row.field] = parse_bytes(known[row.field], option=row.name or row.field)
    known["allowed_origins"] = tuple(known["allowed_origins"] or ())
    return ServerOptions(**known, ssl_keyfile_password=os.environ.get("SIDESTREAM_SSL_KEYFILE_PASSWORD"))


def _parameters() -> list[inspect.Parameter]:
    types = get_type_hints(ServerOptions)
    defaults: dict[str, Any] = {field.name: field.default for field in fields(ServerOptions)}
    types |= dict.fromkeys(_SIZES, str | None)
    types["allowed_origins"], defaults["allowed_origins"] = list[str] | None, None
    parameters = []
    for row in _ROWS:
        name, kind = row.name or row.field, types[row.field]
        parse = whole if kind in (int, int | None) else number if kind is float else None
        spelled = name.replace("_", "-")
        spelled = f"--{spelled}/--no-{spelled}" if kind is bool else f"--{spelled}"
        declared = option(spelled, row.metavar, row.help, row.absent, parse, envvar=row.envvar)
        parameters.append(
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=defaults[row.field], annotation=Annotated[kind, declared]
            )
        )
    return parameters


server_options.__signature__ = inspect.Signature(_parameters())  # type: ignore[attr-defined]


def kv_events_config(
    *,
    kv_events: Annotated[
        str | None,
        option(
            "--kv-events",
            "ENDPOINT",
            "Publish KV events for routers in vLLM's format on this ZeroMQ address, such as tcp://*:5557.",
            "off",
        ),
    ] = None,
    kv_events_replay: Annotated[
        str | None,
        option("--kv-events-replay", "ENDPOINT", "Address on which subscribers ask for missed KV events.", "off"),
    ] = None,
    kv_events_topic: Annotated[
        str | None, option("--kv-events-topic", "TOPIC", "Topic of the messages with KV events.", "empty")
    ] = None,
    kv_events_encoding: Annotated[
        str | None,
        option("--kv-events-encoding", "map|array", "Encoding of KV events: array is for older routers.", "map"),
    ] = None,
) -> KVEventsConfig | None:
    """The engine's KV events; None if `kv_events` is not given. Raises ConfigError."""
    if kv_events is None:
        for name, value in (
            ("--kv-events-replay", kv_events_replay),
            ("--kv-events-topic", kv_events_topic),
            ("--kv-events-encoding", kv_events_encoding),
        ):
            if value is not None:
                raise ConfigError(f"{name} is {value}, but no KV events are published: give --kv-events ENDPOINT too")
        return None
    return KVEventsConfig(
        kv_events, kv_events_replay, topic=kv_events_topic or "", encoding=kv_events_encoding or "map"
    )
