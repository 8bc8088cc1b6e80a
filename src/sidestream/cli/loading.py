"""Starts the engine of a model for a command, with progress on standard error."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Console

from sidestream.cli.errors import show_error
from sidestream.cli.options import LogLevel, Watching
from sidestream.cli.progress import Steps
from sidestream.config import EngineConfig
from sidestream.errors import ProcessFailed
from sidestream.processes import log_stream

if TYPE_CHECKING:
    from sidestream.llm import LLM

log = logging.getLogger("sidestream.cli")


LOG_FORMAT = ("%(asctime)s %(levelname)-7s %(message)s", "%Y-%m-%d %H:%M:%S")
"""Format of log lines and of their dates."""


def start_logging(level: LogLevel, log_format: tuple[str, str] = LOG_FORMAT) -> None:
    """Send the log to standard error, with one line for each event. Raises ConfigError if that is closed."""
    log_stream.start_logging(level.value.upper(), *log_format)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # httpx logs each request to the hub


def prepare_model(model: str) -> None:
    """Download and convert `model`, if it is a name of the catalogue and not prepared yet. Raises ModelError, also for
    a name, directory or hub id without a servable model: at once, because torch is not imported.
    """
    from sidestream.models.catalog import CATALOG, prepare, prepared, resolve

    if model not in CATALOG or prepared(model) is not None:
        resolve(model)
        return
    console = Console(stderr=True)
    console.print(
        f"preparing {model}: {CATALOG[model].download_bytes / 1e6:.0f} MB to fetch, once", style="dim", highlight=False
    )
    with Steps(console, keep=True) as steps:
        prepare(model, progress=steps)


def start(kind: str, model: str, *, config: EngineConfig, watch: Watching, **options: Any) -> Any:
    """Load `model`, which `prepare_model` has checked, and start its engine; the caller closes the result. Raises
    ConfigError.

    kind      `llm.LLM`, `async_llm.AsyncLLM` or `client.process.EngineProcess`; it is imported here, because imports
              take seconds and are shown as a step
    options   further arguments of `kind`
    """
    log.info("loading %s", model)
    logged = log.isEnabledFor(logging.INFO)  # then the progress goes to the log instead of a bar
    with Steps(say=log.info) if logged else Steps(title=f"loading {model}: ", starting=True) as steps:
        steps.update("importing")
        module, _, name = kind.rpartition(".")
        return getattr(importlib.import_module(f"sidestream.{module}"), name)(
            model,
            config=config,
            timeline=watch.timeline,
            check_order=watch.check_order,
            progress=steps,
            on_stage=steps.update,
            **options,
        )


@contextlib.contextmanager
def running(model: str, *, config: EngineConfig, watch: Watching) -> Iterator[LLM]:
    """Context manager: an LLM for one command. At its end, complete KV blocks are stored. Raises ConfigError."""
    prepare_model(model)
    llm: LLM = start("llm.LLM", model, config=config, watch=watch)
    try:
        yield llm
    finally:
        with exit_if_hung(), Steps() as steps:
            steps.update("storing KV, and closing the engine")
            llm.close()


@contextlib.contextmanager
def exit_if_hung() -> Iterator[None]:
    """Context manager that closes an engine of this process. If the engine hangs, it ends the process at once, because
    the interpreter's exit may wait for the same driver.
    """
    try:
        yield
    except ProcessFailed as error:
        show_error(error)
        logging.shutdown()  # waits at most a second for the reader of the log
        os._exit(1)
