"""`sidestream serve`: an OpenAI-compatible server. This module sets up the log and the signal handlers, and ends the
process.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import resource
import shlex
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated

from sidestream.cli.config_file import ConfigFile
from sidestream.cli.declare import Option
from sidestream.cli.loading import LOG_FORMAT, exit_if_hung, prepare_model, start, start_logging
from sidestream.cli.options import (
    DEMO_MODEL,
    LogFormat,
    Logging,
    LogLevel,
    Model,
    Watching,
    engine_config,
    options_of,
    watching,
)
from sidestream.cli.progress import Steps
from sidestream.cli.server_options import kv_events_config, server_options
from sidestream.config import EngineConfig, KVEventsConfig
from sidestream.errors import ConfigError
from sidestream.models.directory import name_of
from sidestream.processes.log_stream import JSON_LAYOUT
from sidestream.processes.signals import on_stop_signal, print_stacks
from sidestream.server.options import ServerOptions
from sidestream_kv.device.machine import process_age_s

if TYPE_CHECKING:
    from sidestream.async_llm import AsyncLLM
    from sidestream.client.process import EngineProcess
    from sidestream.server.run import RunningServer

log = logging.getLogger("sidestream.cli")

_OPEN_FILES = 1 << 16
_MOST_API_PROCESSES = 64


@options_of(server=server_options, events=kv_events_config, engine=engine_config, watch=watching)
def serve(
    model: Model = DEMO_MODEL,
    config: ConfigFile = None,
    api_processes: Annotated[
        int | None,
        Option("HTTP processes, in addition to the engine's process.", absent="one per four cores, at most 8"),
    ] = None,
    single_process: Annotated[
        bool, Option("Run engine and HTTP in one process: uses less memory, but streams get tokens in bursts.")
    ] = False,
    log_level: Logging = LogLevel.INFO,
    log_format: Annotated[LogFormat, Option("Format of the log's lines.", "|".join(LogFormat))] = LogFormat.TEXT,
    *,
    server: ServerOptions,
    events: KVEventsConfig | None,
    engine: EngineConfig,
    watch: Watching,
) -> None:
    """Serve MODEL over HTTP, with OpenAI's API.

    --config reads options from a file with a line "name: value" for each option, without the dashes; the line
    "model: MODEL" sets the model. In the file, an option that may be given several times takes a list, and an option
    without a value takes true or false.

    After the first interrupt (or SIGTERM, or SIGHUP), the server accepts no more requests, lets running requests
    finish, stores the KV and exits. Each further interrupt skips the current wait.
    """
    _check_processes(api_processes, single_process=single_process)
    print_stacks()
    lines = LOG_FORMAT if log_format is LogFormat.TEXT else (JSON_LAYOUT, "")
    start_logging(log_level, lines)
    prepare_model(model)
    check_packages()
    engine = dataclasses.replace(engine, kv_events=events)
    _check_adapters(engine, server.served_model_name or name_of(model))
    if single_process:
        _serve_in_one_process(model, server, engine, watch)
    else:
        number = _default_api_processes() if api_processes is None else api_processes
        _serve(model, server, engine, watch, number, lines)


def _check_processes(api_processes: int | None, *, single_process: bool) -> None:
    if api_processes is not None and not 1 <= api_processes <= _MOST_API_PROCESSES:
        raise ConfigError(f"api_processes is {api_processes}: give a whole number in [1, {_MOST_API_PROCESSES}]")
    if api_processes is not None and single_process:
        raise ConfigError(f"api_processes is {api_processes} and single_process is on: give only one of the two")


def _check_adapters(config: EngineConfig, name: str) -> None:
    """Raise ConfigError if an adapter has the model's own name."""
    if same := [one for one in config.lora_modules if one.partition("=")[0] == name]:
        raise ConfigError(
            f"lora_modules has {same[0]!r}, but {name!r} is the model itself: give the adapter another name"
        )


def check_packages() -> None:
    """Raise ConfigError if a package of the extra `server` is missing."""
    try:
        import sidestream.server.supervisor  # noqa: F401 - imports all the other modules
    except ModuleNotFoundError as missing:
        if (missing.name or "").startswith("sidestream"):
            raise
        package = (missing.name or "").partition(".")[0]
        raise ConfigError(f"the server needs the package {package}: pip install 'sidestream[server]'") from missing


def _serve(
    model: str,
    options: ServerOptions,
    config: EngineConfig,
    watch: Watching,
    api_processes: int,
    log_format: tuple[str, str],
) -> None:
    """Run the engine's process and the API processes until they end. This process is their supervisor."""
    from sidestream.server import Supervisor, bind, bind_shared

    _allow_open_files()
    listeners = bind_shared(bind(options), api_processes)  # first, so that an error comes before the model is loaded
    level = log.getEffectiveLevel()
    with Supervisor(listeners, options, log_level=level, log_format=log_format) as supervisor:
        engine: EngineProcess = start("client.process.EngineProcess", model, config=config, watch=watch)
        name = options.served_model_name or engine.info.model_name
        with on_stop_signal(partial(_quit_at_once, engine.kill)):  # before and after `run`, which drains
            try:
                drained = supervisor.run(
                    engine, on_ready=lambda running: _print_ready(running, name, keyed=options.is_keyed)
                )
                log.info("all requests have finished" if drained else "unfinished requests were aborted")
            finally:
                if engine.ended() is None:
                    _close(engine.close, config)
    log.info("stopped")


def _serve_in_one_process(model: str, options: ServerOptions, config: EngineConfig, watch: Watching) -> None:
    import asyncio

    from sidestream.server import bind, serve

    _allow_open_files()
    with bind(options) as listener:
        llm: AsyncLLM = start("async_llm.AsyncLLM", model, config=config, watch=watch, engine_process=False)
        name = options.served_model_name or llm.model_name

        def ready(running: RunningServer) -> None:
            _print_ready(running, name, keyed=options.is_keyed)

        with on_stop_signal(partial(_quit_at_once, lambda: None)):  # before and after `serve`, which drains
            try:
                drained = serve(llm, options, listener=listener, on_ready=ready)
                log.info("all requests have finished" if drained else "unfinished requests were aborted")
            finally:
                with exit_if_hung():
                    _close(lambda: asyncio.run(llm.close()), config)
    log.info("stopped")


def _close(close: Callable[[], None], config: EngineConfig) -> None:
    disks = ", ".join(map(str, () if config.offload is None else config.offload.disks))
    log.info("stopping%s; interrupt again to quit at once", f", and storing KV in {disks}" if disks else "")
    with Steps(say=log.info) as steps:
        steps.update("closing")
        close()


def _default_api_processes() -> int:
    """One API process per four cores, at most eight, because the engine and other processes need the other cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(8, cores // 4))


def _allow_open_files() -> None:
    """Raise the limit of open files: each connection needs an open file, and shells often allow only 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _print_ready(running: RunningServer, name: str, *, keyed: bool) -> None:
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
    log.info("ready %.1f s after the start of this process", process_age_s())


def _quit_at_once(clean_up: Callable[[], None], number: int) -> None:
    """End the process at once. The disk tier is consistent at any moment, so only blocks that are not stored yet are
    lost.
    """
    clean_up()
    log.critical("quit at once")
    logging.shutdown()  # waits at most a second for the reader of the log
    os._exit(128 + number)
