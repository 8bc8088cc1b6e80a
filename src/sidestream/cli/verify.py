"""`sidestream verify`: checks that a server's prefix cache changes no answer."""

from __future__ import annotations

import json
import secrets
from typing import Annotated

import typer

from sidestream.cli.declare import Option
from sidestream.cli.options import AsJson
from sidestream.cli.progress import Steps

Url = Annotated[str, typer.Argument(metavar="URL", help="OpenAI-compatible server, such as http://127.0.0.1:8000.")]

ApiKey = Annotated[str | None, Option("Bearer token of the server.", "KEY", envvar="OPENAI_API_KEY")]

BlockTokens = Annotated[
    int | None, Option("Tokens of the server's KV blocks.", absent="found from what the server says it reused, else 16")
]
Longest = Annotated[int | None, Option("Tokens of the longest prompt.", absent="512, or eight blocks and an answer")]


def verify(
    url: Url,
    model: Annotated[str | None, Option("Model to ask for.", "NAME", "the first one of /v1/models")] = None,
    api_key: ApiKey = None,
    questions: Annotated[int, Option("Number of different requests.")] = 20,
    output_tokens: Annotated[int, Option("Tokens of each answer.")] = 8,
    block_tokens: BlockTokens = None,
    longest: Longest = None,
    repeats: Annotated[int, Option("Times that all is asked again at once; finds rarer faults.")] = 6,
    pressure_tokens: Annotated[int, Option("Tokens of unrelated prompts that shall evict what was asked.")] = 65_536,
    pressure_seconds: Annotated[float, Option("No more of these prompts after this time.", "SECONDS")] = 20.0,
    restart_command: Annotated[str, Option("Shell command that restarts the server.", "COMMAND", "none")] = "",
    beside: Annotated[
        str | None, Option("Server of the same model that must answer alike, such as one without drafts.", "URL")
    ] = None,
    seed: Annotated[int | None, Option("Seed of the prompts.", "S", "another in each run")] = None,
    as_json: AsJson = False,
) -> None:
    """Repeat requests after a server has cached, evicted or restored their KV, and report answers that changed.

    Exit status 0: no wrong answer; 1: wrong answers; 2: the server could not be checked.
    """
    from sidestream.verify.endpoint import Endpoint
    from sidestream.verify.report import as_json as plain
    from sidestream.verify.report import as_text
    from sidestream.verify.rounds import LONGEST, Plan
    from sidestream.verify.rounds import verify as run

    if seed is None:  # prompts of an earlier run would be cached already
        seed = secrets.randbelow(1 << 31)
    with Steps() as steps:
        steps.update("asking what the server takes")
        endpoint = Endpoint(url, model=model, key=api_key)
        block = block_tokens or endpoint.block_tokens(longest or LONGEST, seed)
        plan = Plan(
            questions,
            output_tokens,
            block,
            longest or max(LONGEST, Plan.shortest(block, output_tokens)),
            repeats,
            pressure_tokens,
            pressure_seconds,
            restart_command,
            seed=seed,
        )
        other = Endpoint(beside, model=model, key=api_key) if beside else None
        report = run(endpoint, plan, beside=other, on_progress=steps.update)
    if as_json:
        print(json.dumps(plain(report), indent=2))
    else:
        for line in as_text(report):
            typer.echo(line)
    raise typer.Exit(1 if report.wrong else 0)
