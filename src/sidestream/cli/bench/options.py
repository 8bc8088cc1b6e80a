"""The options that several bench commands share, each declared once."""

from __future__ import annotations

from typing import Annotated

import typer

from sidestream.cli.declare import option, whole
from sidestream.errors import ConfigError

GpuDevice = Annotated[str, option("--device", metavar="DEVICE", help="`cuda`, or `cpu` to try the benchmark itself.")]
EitherDevice = Annotated[str, option("--device", metavar="DEVICE", help="`cpu` or `cuda`.")]
Shape = Annotated[
    str,
    option(
        "--shape",
        metavar="SHAPE",
        help="qwen3-8b, llama-3.2-1b, qwen3-0.6b or tiny: the model's shape; its weights are random.",
    ),
]
Requests = Annotated[int, option("--requests", metavar="N", help="Requests that run at once.", parse=whole)]
PromptTokens = Annotated[int, option("--prompt-tokens", metavar="N", help="Tokens of each prompt.", parse=whole)]
OutputTokens = Annotated[
    int, option("--output-tokens", metavar="N", help="Tokens generated for each request.", parse=whole)
]


def was_given(context: typer.Context, name: str) -> bool:
    """Whether the command line holds the parameter `name`, even with its default as the value."""
    return getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"


def label(name: str) -> str:
    """The parameter `name` as an error message calls it."""
    return "the model" if name == "model" else f"--{name.replace('_', '-')}"


def check_at_least(bounds: dict[str, tuple[int, int]]) -> None:
    """Raise ConfigError for an option below its bound; `bounds` maps a parameter to its value and the least one."""
    for name, (value, least) in bounds.items():
        if value < least:
            raise ConfigError(f"{label(name)} is {value}: it must be {least} or more")
