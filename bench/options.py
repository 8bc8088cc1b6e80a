"""Options that several bench commands share."""

from __future__ import annotations

from typing import Annotated

from sidestream.cli.declare import option, whole
from sidestream.errors import ConfigError

GpuDevice = Annotated[str, option("--device", metavar="DEVICE", help="`cuda`, or `cpu` to test the benchmark itself.")]
EitherDevice = Annotated[str, option("--device", metavar="DEVICE", help="`cpu` or `cuda`.")]
SHAPE_HELP = "Model shape, with random weights: qwen3-8b, qwen3-32b, llama-3.2-1b, qwen3-0.6b or tiny."
Shape = Annotated[str, option("--shape", metavar="SHAPE", help=SHAPE_HELP)]
Requests = Annotated[int, option("--requests", metavar="N", help="Concurrent requests.", parse=whole)]
PromptTokens = Annotated[int, option("--prompt-tokens", metavar="N", help="Tokens of each prompt.", parse=whole)]
OutputTokens = Annotated[
    int, option("--output-tokens", metavar="N", help="Tokens generated for each request.", parse=whole)
]


def label(name: str) -> str:
    """The name of the parameter `name` in error messages, such as `--max-drafts`."""
    return "the model" if name == "model" else f"--{name.replace('_', '-')}"


def check_at_least(bounds: dict[str, tuple[int, int]]) -> None:
    """Raise ConfigError for an option below its lower bound. `bounds` maps a parameter to its value and its bound."""
    for name, (value, least) in bounds.items():
        if value < least:
            raise ConfigError(f"{label(name)} is {value}: it must be {least} or more")
