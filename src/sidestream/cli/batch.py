"""`sidestream batch`: answers a file of requests in OpenAI's batch format, with an engine or with `--url`, a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sidestream.cli.declare import Option
from sidestream.cli.loading import start_logging
from sidestream.cli.options import (
    DEMO_MODEL,
    Logging,
    LogLevel,
    Model,
    Watching,
    engine_config,
    options_of,
    watching,
)
from sidestream.cli.progress import Steps
from sidestream.cli.serve import check_packages
from sidestream.config import EngineConfig
from sidestream.errors import ConfigError

_MOST_AT_ONCE = 4096
_URL_AT_ONCE = 64


@options_of(config=engine_config, watch=watching)
def batch(
    source: Annotated[Path, typer.Argument(metavar="IN", help="File of requests, a JSON object in each line.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="File for answers; those that it has are kept.")],
    model: Model = DEMO_MODEL,
    url: Annotated[str | None, Option("Ask this running server in place of an engine.", "URL", False)] = None,
    api_key: Annotated[
        str | None, Option("With --url: the server's key.", "KEY", False, envvar="OPENAI_API_KEY")
    ] = None,
    served_model_name: Annotated[str | None, Option("Model name in the requests.", "NAME", "the model's own")] = None,
    concurrency: Annotated[
        int | None, Option("Requests at once.", absent=f"some more than --max-running; {_URL_AT_ONCE} with --url")
    ] = None,
    log_level: Logging = LogLevel.WARNING,
    *,
    config: EngineConfig,
    watch: Watching,
) -> None:
    """Answer the requests in IN, and append the answers to OUT. The format is that of OpenAI's Batch API.

    After an interrupt, a crash or a full disk, the same command answers the requests that OUT does not answer yet.
    Exit status 0: every request has an answer in OUT, which may be an error; 1: the engine or the server has failed.
    """
    if concurrency is not None and not 1 <= concurrency <= _MOST_AT_ONCE:
        raise ConfigError(f"concurrency is {concurrency}: give a whole number in [1, {_MOST_AT_ONCE}]")
    engine_options = [model, served_model_name, config, watch]
    if url is not None and engine_options != [DEMO_MODEL, None, EngineConfig(), Watching(None, check_order=False)]:
        raise ConfigError("--url is given with a model or options of an engine: give them to that server instead")
    check_packages()
    from sidestream.cli.batch_sending import AGAIN, ask_engine, ask_server
    from sidestream.server.batch_files import Answers, Batch, keys_of

    start_logging(log_level)
    with Steps() as steps:
        steps.update("checking the requests")
        keys = keys_of(source)
    total = len(keys)
    with Answers(target) as answers:
        answers.remove_answered(keys)
        found, unanswered = answers.count, Batch(source, keys, answers)
        try:
            if keys and url is not None:
                ask_server(unanswered, url, api_key, concurrency or _URL_AT_ONCE)
            elif keys:
                ask_engine(unanswered, model, served_model_name, config, watch, concurrency)
        except KeyboardInterrupt:
            typer.echo(f"interrupted: {target} has {answers.count} of {total} answers; {AGAIN}", err=True)
            raise
        if keys:
            raise ConfigError(f"{source} was changed while it was read: {AGAIN}")
        answers.sync()
        before = f", {found} of them from an earlier run" if found else ""
        typer.echo(f"{target} has all {total} answers{before}; {answers.faults} are errors")
