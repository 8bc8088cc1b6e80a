"""`sidestream serve`: an OpenAI-compatible server. Owns the process: its log, its signals, its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import resource
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Annotated

from sidestream.cli.config_file import ConfigFile
from sidestream.cli.declare import flag, number, option, whole
from sidestream.cli.loading import LOG_FORMAT, start, start_logging
from sidestream.cli.options import DEMO_MODEL, Logging, LogLevel, Model, Watching, engine_config, options_of, watching
from sidestream.cli.progress import Steps
from sidestream.config import EngineConfig, parse_bytes
from sidestream.errors import ConfigError

if TYPE_CHECKING:
    from sidestream.server import Running, ServerOptions

log = logging.getLogger("sidestream.cli")

_OPEN_FILES = 1 << 16
_MOST_API_PROCESSES = 64


# The defaults of ServerOptions stand here again, and a test compares them: importing them would need the extra
# `server`.
@options_of(engine=engine_config, watch=watching)
def serve(
    model: Model = DEMO_MODEL,
    config: ConfigFile = None,
    host: Annotated[
        str | None,
        option("--host", metavar="ADDRESS", help="Address to listen on; 0.0.0.0 for all.", show_default="127.0.0.1"),
    ] = None,
    port: Annotated[
        int | None,
        option("--port", metavar="N", help="Port to listen on; 0 for any free one.", show_default="8000", parse=whole),
    ] = None,
    uds: Annotated[
        str | None,
        option(
            "--uds",
            metavar="PATH",
            show_default=False,
            help="Listen on a Unix socket at this path, in place of an address.",
        ),
    ] = None,
    root_path: Annotated[
        str,
        option(
            "--root-path",
            metavar="PATH",
            show_default=False,
            help="Prefix below which a proxy serves the API, such as /llm.",
        ),
    ] = "",
    ssl_certfile: Annotated[
        str | None,
        option(
            "--ssl-certfile",
            metavar="FILE",
            show_default=False,
            help="Speak TLS with this certificate (PEM, with its chain).",
        ),
    ] = None,
    ssl_keyfile: Annotated[
        str | None,
        option(
            "--ssl-keyfile",
            metavar="FILE",
            show_default="the certificate's file",
            help="The certificate's key (PEM); $SIDESTREAM_SSL_KEYFILE_PASSWORD opens an encrypted one.",
        ),
    ] = None,
    ssl_ca_certs: Annotated[
        str | None,
        option(
            "--ssl-ca-certs",
            metavar="FILE",
            show_default=False,
            help="Ask clients for a certificate that one of these (PEM) signed.",
        ),
    ] = None,
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
        str | None,
        option("--served-model-name", metavar="NAME", help="What clients call the model.", show_default="its own"),
    ] = None,
    max_body: Annotated[str, option("--max-body", metavar="SIZE", help="A longer request body is refused.")] = "8MiB",
    head_timeout: Annotated[
        float, option("--head-timeout", metavar="SECONDS", help="A slower request head is refused.", parse=number)
    ] = 10.0,
    body_timeout: Annotated[
        float, option("--body-timeout", metavar="SECONDS", help="A slower request body is refused.", parse=number)
    ] = 60.0,
    stall_timeout: Annotated[
        float,
        option(
            "--stall-timeout",
            metavar="SECONDS",
            help="A client that takes none of its reply for so long is cut off.",
            parse=number,
        ),
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
    max_choices: Annotated[
        int, option("--max-choices", metavar="N", help="Prompts times n of one request, at most.", parse=whole)
    ] = 128,
    drain_seconds: Annotated[
        float,
        option(
            "--drain-seconds", metavar="SECONDS", help="How long running requests may go on at the end.", parse=number
        ),
    ] = 30.0,
    api_processes: Annotated[
        int | None,
        option(
            "--api-processes",
            metavar="N",
            help="Processes that speak HTTP; the engine has one of its own besides.",
            show_default="one for four cores, 8 at most",
            parse=whole,
        ),
    ] = None,
    single_process: Annotated[
        bool,
        flag("--single-process", help="Engine and HTTP in one process: less memory, and answers that come in lumps."),
    ] = False,
    log_level: Logging = LogLevel.INFO,
    *,
    engine: EngineConfig,
    watch: Watching,
) -> None:
    """Serve MODEL over HTTP, with OpenAI's API.

    Options may stand in a file, too (--config): a line "name: value" for each, without the dashes, and "model: MODEL".
    Lists are for options that may be given several times, true and false for those without a value.

    The first interrupt (or SIGTERM) takes no more requests, lets running ones finish, stores the KV and exits; each
    further one skips what is being waited for.
    """
    _check_processes(api_processes, single_process=single_process)
    server = _server_options(
        host=host,
        port=port,
        uds=uds,
        root_path=root_path,
        ssl_certfile=ssl_certfile,
        ssl_keyfile=ssl_keyfile,
        ssl_keyfile_password=os.environ.get("SIDESTREAM_SSL_KEYFILE_PASSWORD"),
        ssl_ca_certs=ssl_ca_certs,
        api_key=api_key,
        served_model_name=served_model_name,
        max_body_bytes=parse_bytes(max_body, option="max_body"),
        head_timeout_s=head_timeout,
        body_timeout_s=body_timeout,
        stall_timeout_s=stall_timeout,
        max_connections=max_connections,
        max_connections_per_address=max_connections_per_address,
        cors_origins=tuple(cors_origin or ()),
        max_choices=max_choices,
        drain_s=drain_seconds,
    )
    start_logging(log_level)
    if single_process:
        _serve_in_one_process(model, server, engine, watch)
    else:
        _serve(model, server, engine, watch, _default_api_processes() if api_processes is None else api_processes)


def _check_processes(api_processes: int | None, *, single_process: bool) -> None:
    if api_processes is not None and not 1 <= api_processes <= _MOST_API_PROCESSES:
        raise ConfigError(f"api_processes is {api_processes}: give a whole number in [1, {_MOST_API_PROCESSES}]")
    if api_processes is not None and single_process:
        raise ConfigError(f"api_processes is {api_processes} and single_process is on: give one of the two")


def _server_options(**options: object) -> ServerOptions:
    try:
        from sidestream.server import ServerOptions
    except ModuleNotFoundError as missing:
        if (missing.name or "").startswith("sidestream"):
            raise
        package = (missing.name or "").partition(".")[0]
        raise ConfigError(f"serving needs the package {package}: pip install 'sidestream[server]'") from missing
    return ServerOptions(**options)  # type: ignore[arg-type]


def _serve(model: str, options: ServerOptions, config: EngineConfig, watch: Watching, api_processes: int) -> None:
    """Run supervisor, engine and API processes to their end; the supervisor is this process."""
    from sidestream.client.process import EngineProcess
    from sidestream.server import Supervisor, bind, bind_alike

    _allow_open_files()
    listeners = bind_alike(
        bind(options), api_processes
    )  # first: an address that cannot be had is reported before the model is loaded
    level = log.getEffectiveLevel()
    with _sigterm_exits(), Supervisor(listeners, options, log_level=level, log_format=LOG_FORMAT) as supervisor:
        engine = start(EngineProcess, model, config=config, watch=watch)
        try:
            name = options.served_model_name or engine.facts.model_name
            drained = supervisor.run(
                engine, on_ready=lambda running: _say_ready(running, name, keyed=options.api_key is not None)
            )
            log.info("all requests have finished" if drained else "unfinished requests were aborted")
        finally:
            if engine.ended() is None:
                with _signals_quit_at_once(engine.kill):
                    _close(engine.close, config)
    log.info("stopped")


def _serve_in_one_process(model: str, options: ServerOptions, config: EngineConfig, watch: Watching) -> None:
    from sidestream.async_llm import AsyncLLM
    from sidestream.server import bind, serve

    _allow_open_files()
    with bind(options) as listener:
        llm = start(AsyncLLM, model, config=config, watch=watch, engine_process=False)
        name = options.served_model_name or llm.model_name

        def ready(running: Running) -> None:
            _say_ready(running, name, keyed=options.api_key is not None)

        with _signals_quit_at_once(lambda: None):
            try:
                drained = serve(llm, options, listener=listener, on_ready=ready)
                log.info("all requests have finished" if drained else "unfinished requests were aborted")
            finally:
                _close(lambda: asyncio.run(llm.close()), config)
    log.info("stopped")


def _close(close: Callable[[], None], config: EngineConfig) -> None:
    disk = config.offload.disk if config.offload is not None else None
    log.info("stopping%s; interrupt again to quit at once", f", and storing KV in {disk}" if disk is not None else "")
    with Steps(say=log.info) as steps:
        steps.tell("closing")
        close()


def _default_api_processes() -> int:
    """One for four cores, eight at most: the engine and the client side of the machine need the others."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(8, cores // 4))


def _allow_open_files() -> None:
    """Each connection is an open file, and the usual limit of a shell (1,024) is below the requests that may queue."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _say_ready(running: Running, name: str, *, keyed: bool) -> None:
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "Hello!"}]}).replace("'", "'\\''")
    key = ' -H "Authorization: Bearer $SIDESTREAM_API_KEY"' if keyed else ""
    socket = "" if running.uds is None else f" --unix-socket {shlex.quote(running.uds)}"
    lines = (
        f"{name} is ready at {running.url}"
        + (f", on the Unix socket {running.uds}" if running.uds is not None else ""),
        f"  curl{socket} {running.url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\",
        f"    -d '{body}'",
    )
    print(*lines, sep="\n", flush=True)


@contextlib.contextmanager
def _sigterm_exits() -> Iterator[None]:
    """SIGTERM unwinds the stack, as an interrupt does, and ends what was started."""
    previous = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextlib.contextmanager
def _signals_quit_at_once(clean_up: Callable[[], None]) -> Iterator[None]:
    """What rests on disk is complete at any moment, so nothing is lost but what was not stored yet."""

    def leave(number: int, frame: FrameType | None) -> None:
        clean_up()
        sys.stderr.write("quit at once\n")
        sys.stderr.flush()
        os._exit(128 + number)

    previous = {number: signal.signal(number, leave) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
