"""The options of `sidestream serve` for the HTTP server and for KV events."""

from __future__ import annotations

import os
from typing import Any

from sidestream.cli.tables import Row, Table, declared
from sidestream.config import KVEventsConfig
from sidestream.errors import ConfigError
from sidestream.server.options import ServerOptions
from sidestream_kv.config import parse_bytes

_SERVER = Table(
    ServerOptions,
    Row("host", "ADDRESS", "Address to listen on; 0.0.0.0 for all addresses.", "127.0.0.1"),
    Row("port", "N", "Port to listen on; 0 for any free port.", "8000"),
    Row("uds", "PATH", "Listen on a Unix socket at this path instead of an address.", False),
    Row("root_path", "PATH", "Path prefix of the API behind a proxy, such as /llm.", False),
    Row("ssl_certfile", "FILE", "Use TLS with this certificate (PEM, with its chain).", False),
    Row(
        "ssl_keyfile",
        "FILE",
        "The certificate's key (PEM); $SIDESTREAM_SSL_KEYFILE_PASSWORD is the password of an encrypted key.",
        "the certificate's file",
    ),
    Row(
        "ssl_ca_certs",
        "FILE",
        "Require client certificates that one of these CA certificates (PEM) has signed.",
        False,
    ),
    Row(
        "api_key",
        "KEY",
        "Key that clients must send; safer in the environment variable.",
        False,
        envvar="SIDESTREAM_API_KEY",
    ),
    Row("api_keys", "FILE", "TOML file of API keys with names, limits and rights; reread when it changes.", False),
    Row("audit_log", "FILE", "Append a line of JSON for each request, without its texts.", "off"),
    Row("batch_directory", "DIR", "Offer /v1/files and /v1/batches, and keep their files here.", "off"),
    Row(
        "max_batch_directory_bytes",
        "SIZE",
        "Maximum size of --batch-directory.",
        "10 GiB",
        name="max_batch_directory",
    ),
    Row("otlp_traces_endpoint", "URL", "Send a span of each request to this OpenTelemetry collector.", "off"),
    Row(
        "admin_key",
        "KEY",
        "Key for operations such as /pause, without which they are refused; safer in the environment variable.",
        False,
        envvar="SIDESTREAM_ADMIN_KEY",
    ),
    Row("served_model_name", "NAME", "Model name in the API.", "the model's own"),
    Row("replica", "NAME", "Name of this server among several: a label of all metrics, and a reply header.", False),
    Row(
        "max_body_bytes",
        "SIZE",
        "Longer request bodies are rejected.",
        "1 MiB, and 64 bytes for each token of the context",
        name="max_body",
    ),
    Row(
        "max_buffered_bytes",
        "SIZE",
        "Bytes of request bodies that an API process holds at once.",
        "64 MiB, or four times --max-body",
        name="max_buffered",
    ),
    Row("head_timeout_s", "SECONDS", "Slower request heads are rejected.", name="head_timeout"),
    Row("body_timeout_s", "SECONDS", "Slower request bodies are rejected.", name="body_timeout"),
    Row(
        "stall_timeout_s",
        "SECONDS",
        "A client that reads nothing of its reply for this long is disconnected.",
        name="stall_timeout",
    ),
    Row("max_connections", "N", "Maximum connections at once.", "2048, or as many as the limit of open files allows"),
    Row("max_connections_per_address", "N", "Maximum connections at once from one client address.", "no limit"),
    Row(
        "allowed_origins",
        "ORIGIN",
        "Allow browser pages of this origin (CORS); * for all; may be given several times.",
        False,
    ),
    Row("page", "", "Serve a page with chat and live figures at /, and the figures for sidestream top.", False),
    Row("chat_template", "FILE", "Jinja template to use in place of the model's own.", "the model's own"),
    Row(
        "tool_call_parser",
        "NAME",
        "Format of the model's tool calls, by vLLM's name; none: off.",
        "by the template",
    ),
    Row("reasoning_parser", "NAME", "Format of the model's reasoning, by vLLM's name; none: off.", "by the template"),
    Row("explain_cache", "LEVEL", "What explain_cache tells of others with the same salt: off, blocks or text."),
    Row(
        "max_hint_ttl_s",
        "SECONDS",
        "Longest time for which a request's cache_control pins its prefix; 0: it pins nothing.",
        name="max_hint_ttl",
    ),
    Row("max_choices", "N", "Maximum choices of one request: prompts times n."),
    Row("max_stored_responses", "N", "Responses kept for requests that continue them; 0: none."),
    Row(
        "max_stored_bytes",
        "SIZE",
        "Bytes of kept responses, with their conversations.",
        "64 MiB",
        name="max_stored",
    ),
    Row("drain_s", "SECONDS", "Time for running requests to finish at shutdown.", name="drain_seconds"),
)


@declared(_SERVER)
def server_options(**given: Any) -> ServerOptions:
    """Make ServerOptions from the options' values. Raises ConfigError."""
    values = _SERVER.fields_of(given)
    for row in _SERVER.rows:
        if row.metavar == "SIZE" and row.field in values:
            values[row.field] = parse_bytes(values[row.field], option=row.name)
    return ServerOptions(**values, ssl_keyfile_password=os.environ.get("SIDESTREAM_SSL_KEYFILE_PASSWORD"))


_EVENTS = Table(
    KVEventsConfig,
    Row(
        "endpoint",
        "ENDPOINT",
        "Publish KV events for routers in vLLM's format on this ZeroMQ address, such as tcp://*:5557.",
        "off",
        name="kv_events",
    ),
    Row(
        "replay_endpoint",
        "ENDPOINT",
        "Address on which subscribers ask for missed KV events.",
        "off",
        name="kv_events_replay",
    ),
    Row("topic", "TOPIC", "Topic of the messages with KV events.", "empty", name="kv_events_topic"),
    Row(
        "encoding",
        "map|array",
        "Encoding of KV events: array is for older routers.",
        "map",
        name="kv_events_encoding",
    ),
    is_part=True,
)


@declared(_EVENTS)
def kv_events_config(**given: Any) -> KVEventsConfig | None:
    """The engine's KV events; None if `kv_events` is not given. Raises ConfigError."""
    if given.get("kv_events") is not None:
        return KVEventsConfig(**_EVENTS.fields_of(given))
    for name, value in given.items():
        if value is not None:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} is {value}, but no KV events are published: give --kv-events ENDPOINT too")
    return None
