"""Options that several bench commands share."""

from __future__ import annotations

from typing import Annotated

from sidestream.cli.declare import Option
from sidestream.errors import ConfigError

GpuDevice = Annotated[str, Option("`cuda`, or `cpu` to test the benchmark itself.", "DEVICE")]
EitherDevice = Annotated[str, Option("`cpu` or `cuda`.", "DEVICE")]
SHAPE_HELP = "Model shape, with random weights: qwen3-8b, qwen3-32b, llama-3.2-1b, qwen3-0.6b or tiny."
Shape = Annotated[str, Option(SHAPE_HELP, "SHAPE")]
Requests = Annotated[int, Option("Concurrent requests.")]
PromptTokens = Annotated[int, Option("Tokens of each prompt.")]
OutputTokens = Annotated[int, Option("Tokens generated for each request.")]


def label(name: str) -> str:
    """The name of the parameter `name` in error messages, such as `--max-drafts`."""
    return "the model" if name == "model" else f"--{name.replace('_', '-')}"


def check_at_least(bounds: dict[str, tuple[int, int]]) -> None:
    """Raise ConfigError for an option below its lower bound. `bounds` maps a parameter to its value and its bound."""
    for name, (value, least) in bounds.items():
        if value < least:
            raise ConfigError(f"{label(name)} is {value}: it must be {least} or more")
