"""`sidestream serve`: an OpenAI-compatible server. Owns the process: its log, its signals, its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Annotated

from sidestream.cli.declare import number, option, whole
from sidestream.cli.loading import start, start_logging
from sidestream.cli.options import DEMO_MODEL, Logging, LogLevel, Model, Watching, engine_config, options_of, watching
from sidestream.cli.progress import Steps
from sidestream.config import EngineConfig, parse_bytes
from sidestream.errors import ConfigError

if TYPE_CHECKING:
    from sidestream.server import Running, ServerOptions

log = logging.getLogger("sidestream.cli")

_OPEN_FILES = 1 << 16


# The defaults of ServerOptions stand here again, and a test compares them: importing them would need the extra `server`.
@options_of(config=engine_config, watch=watching)
def serve(
    model: Model = DEMO_MODEL,
    host: Annotated[str, option("--host", metavar="ADDRESS", help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, option("--port", metavar="N", help="Port to listen on; 0 for any free one.", parse=whole)] = 8000,
    api_key: Annotated[
        str | None,
        option(
            "--api-key",
            metavar="KEY",
            envvar="SIDESTREAM_API_KEY",
            show_default=False,
            help="Clients must send it; better given by the variable.",
        ),
    ] = None,
    served_model_name: Annotated[
        str | None, option("--served-model-name", metavar="NAME", help="What clients call the model.", show_default="its own")
    ] = None,
    max_body: Annotated[str, option("--max-body", metavar="SIZE", help="A longer request body is refused.")] = "8MiB",
    head_timeout: Annotated[
        float, option("--head-timeout", metavar="SECONDS", help="A slower request head is refused.", parse=number)
    ] = 10.0,
    body_timeout: Annotated[
        float, option("--body-timeout", metavar="SECONDS", help="A slower request body is refused.", parse=number)
    ] = 60.0,
    max_connections: Annotated[
        int | None,
        option(
            "--max-connections",
            metavar="N",
            help="Connections at a time.",
            show_default="2048, or as many as open files allow",
            parse=whole,
        ),
    ] = None,
    max_connections_per_address: Annotated[
        int | None,
        option(
            "--max-connections-per-address",
            metavar="N",
            help="The same, of one client address.",
            show_default="no limit",
            parse=whole,
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        option(
            "--cors-origin",
            metavar="ORIGIN",
            show_default=False,
            help="Web pages of this origin may use the API from a browser; * for all; may be given several times.",
        ),
    ] = None,
    max_choices: Annotated[int, option("--max-choices", metavar="N", help="Prompts times n of one request, at most.", parse=whole)] = 128,
    drain_seconds: Annotated[
        float, option("--drain-seconds", metavar="SECONDS", help="How long running requests may go on at the end.", parse=number)
    ] = 30.0,
    log_level: Logging = LogLevel.INFO,
    *,
    config: EngineConfig,
    watch: Watching,
) -> None:
    """Serve MODEL over HTTP, with OpenAI's API.

    The first interrupt (or SIGTERM) takes no more requests, lets running ones finish, stores the KV and exits; each further one
    skips what is being waited for.
    """
    server = _server_options(
        host=host,
        port=port,
        api_key=api_key,
        served_model_name=served_model_name,
        max_body_bytes=parse_bytes(max_body, option="max_body"),
        head_timeout_s=head_timeout,
        body_timeout_s=body_timeout,
        max_connections=max_connections,
        max_connections_per_address=max_connections_per_address,
        cors_origins=tuple(cors_origin or ()),
        max_choices=max_choices,
        drain_s=drain_seconds,
    )
    start_logging(log_level)
    _serve(model, server, config, watch)


def _server_options(**options: object) -> ServerOptions:
    try:
        from sidestream.server import ServerOptions
    except ModuleNotFoundError as missing:
        if (missing.name or "").startswith("sidestream"):
            raise
        package = (missing.name or "").partition(".")[0]
        raise ConfigError(f"serving needs the package {package}: pip install 'sidestream[server]'") from missing
    return ServerOptions(**options)  # type: ignore[arg-type]


def _serve(model: str, options: ServerOptions, config: EngineConfig, watch: Watching) -> None:
    from sidestream.llm import AsyncLLM
    from sidestream.server import bind, serve

    _allow_open_files()
    with bind(options) as listener:  # first: an address that cannot be had is reported before the model is loaded
        llm = start(AsyncLLM, model, config=config, watch=watch)
        name = options.served_model_name or llm.model_name

        def ready(running: Running) -> None:
            _say_ready(running, name, keyed=options.api_key is not None)

        with _signals_quit_at_once():  # while `serve` runs they drain
            try:
                drained = serve(llm, options, listener=listener, on_ready=ready)
                log.info("all requests have finished" if drained else "unfinished requests were aborted")
            finally:
                disk = config.offload.disk if config.offload is not None else None
                log.info("stopping%s; interrupt again to quit at once", f", and storing KV in {disk}" if disk is not None else "")
                with Steps(say=log.info) as steps:
                    steps.tell("closing")
                    asyncio.run(llm.close())
    log.info("stopped")


def _allow_open_files() -> None:
    """Each connection is an open file, and the usual limit of a shell (1,024) is below the requests that may queue."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _say_ready(running: Running, name: str, *, keyed: bool) -> None:
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "Hello!"}]}).replace("'", "'\\''")
    key = ' -H "Authorization: Bearer $SIDESTREAM_API_KEY"' if keyed else ""
    lines = (
        f"{name} is ready at {running.url}",
        f"  curl {running.url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\",
        f"    -d '{body}'",
    )
    print(*lines, sep="\n", flush=True)


@contextlib.contextmanager
def _signals_quit_at_once() -> Iterator[None]:
    """What rests on disk is complete at any moment, so nothing is lost but what was not stored yet."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.stderr.write("quit at once\n")
        sys.stderr.flush()
        os._exit(128 + number)

    previous = {number: signal.signal(number, leave) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
