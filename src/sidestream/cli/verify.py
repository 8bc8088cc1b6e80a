"""`sidestream verify`: checks that a server's prefix cache changes no answer."""

from __future__ import annotations

import json
import secrets
from typing import Annotated

import typer

from sidestream.cli.declare import number, option, whole
from sidestream.cli.options import AsJson
from sidestream.cli.progress import Steps

Url = Annotated[str, typer.Argument(metavar="URL", help="OpenAI-compatible server, such as http://127.0.0.1:8000.")]

ApiKey = Annotated[str | None, option("--api-key", "KEY", "Bearer token of the server.", envvar="OPENAI_API_KEY")]

BlockTokens = Annotated[
    int | None,
    option(
        "--block-tokens",
        "N",
        "Tokens of the server's KV blocks.",
        show_default="found from what the server says it reused, else 16",
        parse=whole,
    ),
]
Longest = Annotated[
    int | None,
    option(
        "--longest",
        "N",
        "Tokens of the longest prompt.",
        show_default="512, or eight blocks and an answer",
        parse=whole,
    ),
]


def verify(
    url: Url,
    model: Annotated[
        str | None, option("--model", "NAME", "Model to ask for.", show_default="the first one of /v1/models")
    ] = None,
    api_key: ApiKey = None,
    questions: Annotated[int, option("--questions", "N", "Number of different requests.", parse=whole)] = 20,
    output_tokens: Annotated[int, option("--output-tokens", "N", "Tokens of each answer.", parse=whole)] = 8,
    block_tokens: BlockTokens = None,
    longest: Longest = None,
    repeats: Annotated[
        int, option("--repeats", "N", "Times that all is asked again at once; finds rarer faults.", parse=whole)
    ] = 6,
    pressure_tokens: Annotated[
        int,
        option("--pressure-tokens", "N", "Tokens of unrelated prompts that shall evict what was asked.", parse=whole),
    ] = 65_536,
    pressure_seconds: Annotated[
        float, option("--pressure-seconds", "SECONDS", "No more of these prompts after this time.", parse=number)
    ] = 20.0,
    restart_command: Annotated[
        str, option("--restart-command", "COMMAND", "Shell command that restarts the server.", show_default="none")
    ] = "",
    beside: Annotated[
        str | None,
        option("--beside", "URL", "Server of the same model that must answer alike, such as one without drafts."),
    ] = None,
    seed: Annotated[
        int | None, option("--seed", "S", "Seed of the prompts.", show_default="another in each run", parse=whole)
    ] = None,
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
