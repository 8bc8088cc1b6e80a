"""The options of `python -m bench serve`, and the numbers of clients, tokens and repetitions that follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from bench.options import check_at_least, label
from bench.serving.workload import Arrivals, Loads, loads_of
from proof.report import was_given
from sidestream.cli.declare import Option
from sidestream.errors import ConfigError
from sidestream_kv.device.kinds import CPU, CUDA

_MAX_CLIENTS = 4096
_MAX_PERCENT = 1000
_DEFAULT_CLIENTS = {CPU: "1,8", CUDA: "1,32,128,256"}
_DEFAULT_PROMPT_TOKENS = {CPU: 64, CUDA: 512}
_DEFAULT_OUTPUT_TOKENS = {CPU: 64, CUDA: 128}
_DEFAULT_REPETITIONS = {CPU: 5, CUDA: 1}
# Parameters that have no effect in each mode.
_UNUSED = {
    "--against": {
        "model",
        "device",
        "shape",
        "tokenizer",
        "checkpoint",
        "engine_option",
        "serve_option",
        "slow_readers",
        "connections",
        "repetitions",
    },
    "--slow-readers": {"label", "beside", "repetitions", "arrivals"},
    "neither --against nor --slow-readers": {"connections", "label", "beside"},
}

RandomShape = Annotated[
    str | None,
    Option(
        "Serve random weights of this shape instead of MODEL: qwen3-8b, llama-3.2-1b, qwen3-0.6b or tiny.",
        "SHAPE",
        False,
    ),
]
TokenizerDir = Annotated[
    Path | None, Option("Directory of the tokenizer for the random weights.", "DIR", "the demo model")
]
CheckpointDir = Annotated[
    Path | None, Option("Directory for the random weights; later runs can use it.", "DIR", "a temporary directory")
]
ClientCounts = Annotated[str | None, Option("Numbers of concurrent clients.", "N,N", "1,8; on a GPU 1,32,128,256")]
PromptTokens = Annotated[int | None, Option("Tokens of each prompt.", absent="64; on a GPU 512")]
OutputTokens = Annotated[int | None, Option("Tokens of each answer.", absent="64; on a GPU 128")]
Rounds = Annotated[int, Option("Consecutive requests of each client; few clients send more.")]
ArrivalShares = Annotated[
    str,
    Option(
        "Also send requests as Poisson arrivals at N % of capacity (that of the most clients); 0 for none. With "
        "--beside, of the capacity of the earlier run.",
        "N,N",
    ),
]
Repetitions = Annotated[
    int | None,
    Option("Repetitions, in which engine and server alternate; the figures are medians.", absent="5; on a GPU 1"),
]
EngineOptions = Annotated[
    list[str] | None,
    Option(
        "Engine option of `sidestream serve`, such as max-running=64; may be given several times.", "NAME=VALUE", False
    ),
]
ServeOptions = Annotated[
    list[str] | None, Option("Other option of `sidestream serve`; may be given several times.", "NAME=VALUE", False)
]
SlowReaders = Annotated[
    int, Option("Instead, measure how much N clients that read one byte per second slow down the other clients.")
]
Connections = Annotated[
    int, Option("With --slow-readers, total number of open connections; those without requests are idle.")
]
Against = Annotated[str | None, Option("Measure a running OpenAI-compatible server.", "URL", False)]
Label = Annotated[str, Option("With --against, prefix of the figures' names.", "NAME")]
Beside = Annotated[
    list[Path] | None,
    Option(
        "With --against, earlier result of this command to compare with; may be given several times.", "FILE", False
    ),
]


@dataclass(frozen=True, slots=True)
class LoadSizes:
    """The sizes of the workload.

    clients       numbers of concurrent clients; each number is measured separately
    rounds        number of consecutive requests of each client
    arrivals      Poisson arrivals at these percentages of the capacity
    repetitions   number of repetitions of the whole measurement
    """

    clients: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int
    rounds: int
    repetitions: int
    arrivals: tuple[int, ...] = ()

    @classmethod
    def of_options(
        cls,
        device: str,
        *,
        clients: str | None,
        prompt_tokens: int | None,
        output_tokens: int | None,
        rounds: int,
        repetitions: int | None,
        arrivals: str,
    ) -> LoadSizes:
        """The options' values; for an option that is None, the device's default. Raises ConfigError."""
        sizes = cls(
            _counts("--clients", clients or _DEFAULT_CLIENTS[device], 1, _MAX_CLIENTS),
            _DEFAULT_PROMPT_TOKENS[device] if prompt_tokens is None else prompt_tokens,
            _DEFAULT_OUTPUT_TOKENS[device] if output_tokens is None else output_tokens,
            rounds,
            _DEFAULT_REPETITIONS[device] if repetitions is None else repetitions,
            () if arrivals == "0" else _counts("--arrivals", arrivals, 1, _MAX_PERCENT),
        )
        check_at_least(
            {
                "prompt_tokens": (sizes.prompt_tokens, 1),
                "output_tokens": (sizes.output_tokens, 2),
                "rounds": (sizes.rounds, 2),
                "repetitions": (sizes.repetitions, 1),
            }
        )
        return sizes

    def loads(self, ids: int, repetition: int = 0) -> list[Loads]:
        """The workloads for each number of clients. Prompts are drawn from token ids below `ids`."""
        return [
            loads_of(
                clients=clients,
                rounds=self.rounds,
                ids=ids,
                repetition=repetition,
                prompt_tokens=self.prompt_tokens,
                output_tokens=self.output_tokens,
            )
            for clients in self.clients
        ]

    def arrivals_of(self, ids: int, repetition: int = 0) -> list[Arrivals]:
        """The Poisson arrivals: as many requests as the largest closed loop has."""
        requests = max(load.loop.clients * load.loop.rounds for load in self.loads(ids))
        return [
            Arrivals(percent, requests, self.prompt_tokens, self.output_tokens, ids, repetition)
            for percent in self.arrivals
        ]


def refuse_unused(context: typer.Context, mode: str) -> None:
    """Raise ConfigError for an option on the command line that has no effect in `mode`."""
    for name in sorted(_UNUSED[mode]):
        if was_given(context, name):
            raise ConfigError(f"{label(name)} is {context.params[name]!r}, which is not used with {mode}: leave it out")


def serve_arguments(options: list[str] | None) -> list[str]:
    """Turn `NAME=VALUE`, or `NAME` for an option without a value, into arguments of `sidestream serve`."""
    return [f"--{name.removeprefix('--')}" for name in options or ()]


def _counts(name: str, given: str, least: int, most: int) -> tuple[int, ...]:
    try:
        counts = tuple(int(part) for part in given.split(","))
    except ValueError:
        raise ConfigError(
            f"{name} is {given!r}: give whole numbers with commas between them, such as 1,32,128"
        ) from None
    for found in counts:
        if not least <= found <= most:
            raise ConfigError(f"{name} has {found}: each must be in [{least}, {most}]")
    if len(set(counts)) < len(counts):
        raise ConfigError(f"{name} is {given!r}: give each number once")
    return counts
