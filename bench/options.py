"""Options that several bench commands share."""

from __future__ import annotations

from typing import Annotated, Any

from sidestream.cli.declare import option, whole
from sidestream.errors import ConfigError


def count(name: str, help: str, show_default: bool | str = True) -> Any:  # noqa: A002 - typer's own name
    """Declare an option whose value is a whole number. See `option`."""
    return option(name, "N", help, show_default, whole)


GpuDevice = Annotated[str, option("--device", "DEVICE", "`cuda`, or `cpu` to test the benchmark itself.")]
EitherDevice = Annotated[str, option("--device", "DEVICE", "`cpu` or `cuda`.")]
SHAPE_HELP = "Model shape, with random weights: qwen3-8b, qwen3-32b, llama-3.2-1b, qwen3-0.6b or tiny."
Shape = Annotated[str, option("--shape", "SHAPE", SHAPE_HELP)]
Requests = Annotated[int, count("--requests", "Concurrent requests.")]
PromptTokens = Annotated[int, count("--prompt-tokens", "Tokens of each prompt.")]
OutputTokens = Annotated[int, count("--output-tokens", "Tokens generated for each request.")]


def label(name: str) -> str:
    """The name of the parameter `name` in error messages, such as `--max-drafts`."""
    return "the model" if name == "model" else f"--{name.replace('_', '-')}"


def check_at_least(bounds: dict[str, tuple[int, int]]) -> None:
    """Raise ConfigError for an option below its lower bound. `bounds` maps a parameter to its value and its bound."""
    for name, (value, least) in bounds.items():
        if value < least:
            raise ConfigError(f"{label(name)} is {value}: it must be {least} or more")
