"""`sidestream explain`: why a server computed a prompt, or parts of it, again."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from sidestream.cli.declare import Option
from sidestream.cli.options import AsJson
from sidestream.cli.verify import ApiKey, Url
from sidestream.errors import ConfigError

# Paths by the field that only their requests have.
_PATHS = {"messages": "/v1/chat/completions", "prompt": "/v1/completions", "input": "/v1/responses"}

Request = Annotated[
    str, typer.Argument(metavar="FILE", help="Body of a request as JSON, or a text as prompt; - for standard input.")
]


def explain(
    url: Url,
    file: Request,
    path: Annotated[
        str | None,
        Option("Path of the request, such as /v1/messages.", "PATH", "by the body's fields"),
    ] = None,
    twice: Annotated[bool, Option("Send the request twice, and explain the second one.")] = False,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Send a request for one token, and print which tokens of its prompt the server reused, and why not the others."""
    from sidestream.server.cache_explanation import as_text
    from sidestream.verify.endpoint import Connection

    server = Connection(url, key=api_key)
    body = _body(file)
    if "model" not in body:
        body["model"] = server.first_model()
    path = path or next((known for field, known in _PATHS.items() if field in body), None)
    if path is None:
        raise ConfigError(f"{file} has none of the fields {', '.join(_PATHS)}: name the request's path by --path")
    limit = "max_output_tokens" if path.endswith("/responses") else "max_tokens"
    for name in ("stream", "stream_options", "max_completion_tokens"):
        body.pop(name, None)
    for _ in range(1 + twice):
        reply = json.loads(server.call("POST", path, json.dumps({**body, limit: 1, "explain_cache": True}).encode()))
    found = reply.get("cache_explanation")
    if as_json:
        print(json.dumps(found, indent=2))
        return
    if found is None:
        raise ConfigError(f"the reply of {url} has no cache_explanation: is it a server of Sidestream?")
    for number, one in enumerate(found if isinstance(found, list) else [found]):
        if isinstance(found, list):
            typer.echo(f"prompt {number}")
        for line in as_text(one):
            typer.echo(line)


def _body(file: str) -> dict[str, Any]:
    """The request's fields; a text that is no JSON object is a prompt."""
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}; give a file, or - for standard input") from error
    try:
        body = json.loads(text)
    except ValueError:
        body = None
    return body if isinstance(body, dict) else {"prompt": text}
