"""Options that several commands share. The defaults come from the classes in config.py.

A command declares a whole config as a parameter. The decorator `options_of` replaces it by the options of that config:

    @options_of(config=engine_config, params=sampling_params)
    def generate(model: Model = DEMO_MODEL, *, config: EngineConfig, params: SamplingParams) -> None: ...
"""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from sidestream.cli.declare import Option, flag, named
from sidestream.cli.tables import Row, Table, declared
from sidestream.config import (
    KV_CACHE_DTYPES,
    MOST_DRAFTS,
    SAMPLING_OPTIONS,
    EngineConfig,
    SamplingParams,
    SpeculativeConfig,
)
from sidestream.errors import ConfigError
from sidestream_kv.config import KV_DTYPES, WRITE_POLICIES, OffloadConfig

DEMO_MODEL = "smollm2-135m-instruct"
"""The default model of all commands: a name that `sidestream models` lists."""

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A directory in transformers' format, a hub id, or a name that `sidestream models` lists."
    ),
]
Debug = Annotated[bool, flag("--debug", envvar="SIDESTREAM_DEBUG", help="Show the traceback of an error.")]
AsJson = Annotated[bool, flag("--json", help="Print one JSON object.")]


class LogLevel(StrEnum):
    """Level of the log on standard error."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    """Format of the lines of the log."""

    TEXT = "text"
    JSON = "json"


Logging = Annotated[LogLevel, Option("Log level on standard error.", "|".join(LogLevel))]


_ENGINE = Table(
    EngineConfig,
    Row(
        "dtype",
        "TYPE",
        "auto (the checkpoint's dtype, or float32 if the CPU is much faster with it), float32, float16 or bfloat16.",
    ),
    Row("device", "DEVICE", "cpu, cuda, or auto: cuda if a GPU is usable."),
    Row(
        "kv_cache_dtype",
        "|".join(KV_CACHE_DTYPES),
        "fp8: KV in 8 bits on the device and in all tiers, half the bytes of bfloat16, with an error that the log "
        "gives. auto: in the model's dtype.",
    ),
    Row(
        "kv_memory",
        "SIZE",
        "Memory of the device's KV pool.",
        "1GiB on a CPU, 90% of the memory left by the weights on a GPU",
    ),
    Row("state_memory", "SIZE", "Part of the KV pool for recurrent states of hybrid models.", "half of the pool"),
    Row(
        "state_interval",
        "N",
        "Tokens between checkpoints of recurrent state in a prompt, a multiple of --block-tokens; 0: only at its "
        "end and at branches.",
    ),
    Row("tensor_parallel", "N", "Number of ranks that share the model: processes, each with a GPU."),
    Row("block_tokens", "N", "Tokens per KV block.", "16; 64 on a GPU for models with recurrent state"),
    Row("chunk_tokens", "N", "Chunked prefill: tokens per chunk.", "256 on a CPU, 8192 on a GPU"),
    Row(
        "token_budget",
        "N",
        "Maximum tokens that one step computes.",
        "two chunks on a CPU or one on a GPU, plus one token per request",
    ),
    Row("max_running", "N", "Maximum requests that run at once.", "16 on a CPU, 256 on a GPU"),
    Row("max_waiting", "N", "Maximum requests in the queue; further requests are rejected."),
    Row("max_model_len", "N", "Maximum tokens of prompt plus output.", "the model's"),
    Row("compute_threads", "N", "Threads of the forward pass.", "all cores", name="threads"),
    Row(
        "repack",
        "",
        "Keep copies of a GGUF file's weights in the order of this processor's kernels: decode is faster.",
        "on a CPU with the memory for them",
    ),
    Row(
        "separate_tail_chunk",
        "",
        "Compute the tokens after a prompt's last full block separately: then outputs with KV from any tier are equal.",
        "on a CPU, not on a GPU",
    ),
    Row(
        "target_gap_ms",
        "N",
        "While requests decode, a step takes only as many prompt tokens as take N ms (not with --separate-tail-chunk).",
        "250 on a GPU, no bound on a CPU",
    ),
    Row("eager", "", "On a GPU, do not compile or capture graphs: faster start, slower steps.", False),
    Row(
        "batch_invariant",
        "",
        "Equal bits for a request whatever else runs, however its prompt is cut, and from any tier; slower.",
        False,
    ),
    Row(
        "generation_config",
        "auto|none",
        "Defaults of sampling options: auto uses the model's generation_config.json, none uses neutral values.",
    ),
    Row("salt", "TEXT", "Engines with different salts never share KV.", False),
    Row(
        "self_check",
        "SHARE",
        "Share of steps to run twice and compare, and of blocks in host memory to checksum; 0.01 is 1 %.",
        "off",
    ),
    Row("lora_modules", "NAME=DIR", "LoRA adapter, which clients name as the model. Several times.", "none"),
    Row("max_loras", "N", "LoRA adapters that may be loaded at a time; more can come over HTTP."),
    Row("max_lora_rank", "N", "Largest rank of a LoRA adapter."),
    Row(
        "watchdog_timeout_s",
        "SECONDS",
        "Seconds that a step may take; then /health says stalled (503) until it ends.",
        name="watchdog_timeout",
    ),
    panel="Engine",
)
_DRAFTS = Table(
    SpeculativeConfig,
    Row(
        "proposer",
        "PROPOSER",
        "Speculative decoding; drafts come from earlier text (ngram), an MTP head (mtp), a smaller model (draft), or "
        "only from grammars that leave one continuation (grammar).",
        "off",
        name="speculative",
    ),
    Row(
        "head",
        "PATH",
        "With mtp: file of the head, or a checkpoint that contains it.",
        "the model's own; for the demo model, the head that Sidestream ships",
        name="draft_head",
        kind=Path,
    ),
    Row(
        "model",
        "MODEL",
        "With draft: a smaller model with the same tokenizer.",
        "none; needed with --speculative draft",
        name="draft_model",
        kind=str,
    ),
    Row(
        "max_drafts",
        "N",
        "Maximum draft tokens per request and step.",
        f"{SpeculativeConfig().max_drafts} with --speculative",
    ),
    Row(
        "max_draft_slowdown",
        "SHARE",
        "Largest share by which drafts may slow a request down; 0.01 is 1 %.",
        f"{SpeculativeConfig().max_draft_slowdown} with --speculative",
    ),
    panel="Engine",
    is_part=True,
)
_OFFLOAD = Table(
    OffloadConfig,
    Row(
        "host",
        "SIZE",
        "Host memory for offloaded KV.",
        f"{OffloadConfig().host} with --offload-disk or --offload-shared-memory, else off",
    ),
    Row(
        "disk",
        "DIR",
        "Directory for offloaded KV; later processes reuse this KV. Several times: one on each disk.",
        "off",
        kind=list[Path],
    ),
    Row("disk_capacity", "SIZE", "Maximum size of each directory.", str(OffloadConfig().disk_capacity)),
    Row(
        "write_policy",
        "|".join(WRITE_POLICIES),
        "Which blocks the disk writes while the engine serves; reused: those that were reused, the rest at the end.",
        "reused",
        kind=str,
    ),
    Row(
        "tiers",
        "JSON|FILE",
        'Further tiers, such as {"redis": {"url": "redis://host"}}: JSON, or a file with it.',
        "none",
        kind=str,
    ),
    Row(
        "shared_memory",
        "SOCKET",
        "Socket of a cache process (sidestream cache serve), whose memory --offload-host is; engines share it.",
        "off",
        kind=Path,
    ),
    Row(
        "kv_dtype",
        "|".join(KV_DTYPES),
        "int8: host memory and the tiers below hold KV in 8 bits, about half the bytes, with a small error.",
        "auto",
    ),
    Row(
        "load_deadline_s",
        "SECONDS",
        "Maximum seconds that a request waits for KV from a tier; then it recomputes the KV.",
        f"{OffloadConfig().load_deadline_s:g}",
        name="load_deadline",
    ),
    panel="Offload",
    prefix="offload_",
    is_part=True,
)


@declared(_ENGINE, _DRAFTS, _OFFLOAD)
def engine_config(**given: Any) -> EngineConfig:
    """The engine's config. Offload is on when any tier is given. Raises ConfigError."""
    speculative = _speculative_config(**_DRAFTS.fields_of(given))
    offload = _offload_config(**_OFFLOAD.fields_of(given))
    return EngineConfig(**_ENGINE.fields_of(given), speculative=speculative, offload=offload)


def _speculative_config(**given: Any) -> SpeculativeConfig | None:
    """None if no proposer is given. Raises ConfigError for options that do not fit it."""
    proposer, head, model = (given.get(name) for name in ("proposer", "head", "model"))
    if proposer is None:
        for name, option, wanted in (
            ("max_draft_slowdown", "--max-draft-slowdown", "--speculative"),
            ("head", "--draft-head", "--speculative mtp"),
            ("model", "--draft-model", "--speculative draft"),
            ("max_drafts", "--max-drafts", "--speculative"),
        ):
            if name in given:
                raise ConfigError(f"{option} is {given[name]}, but nothing is drafted: give {wanted} too")
        return None
    if proposer == "draft" and model is None:
        raise ConfigError(
            "--speculative draft needs a draft model: give --draft-model, a smaller model with the same tokenizer"
        )
    for name, value, own in (("--draft-head", head, "mtp"), ("--draft-model", model, "draft")):
        if value is not None and proposer != own:
            raise ConfigError(
                f"{name} is {value}, but --speculative is {proposer}: leave it out, or choose --speculative {own}"
            )
    if given.get("max_drafts") == 0:
        raise ConfigError(f"--max-drafts is 0: give 1 to {MOST_DRAFTS}, or leave out --speculative to draft nothing")
    return SpeculativeConfig(**given)


def _offload_config(**given: Any) -> OffloadConfig | None:
    """None if no tier is given. Raises ConfigError for options of tiers that are not given."""
    for name in ("disk_capacity", "write_policy"):
        if name in given and "disk" not in given:
            option = f"--offload-{name.replace('_', '-')}"
            raise ConfigError(f"{option} is {given[name]}, but nothing is kept on disk: give --offload-disk DIR too")
    if not {"host", "disk", "tiers", "shared_memory"} & given.keys():
        for name, option in (("load_deadline_s", "--load-deadline"), ("kv_dtype", "--offload-kv-dtype")):
            if name in given:
                value = given[name] if name == "kv_dtype" else f"{given[name]:g}"
                raise ConfigError(
                    f"{option} is {value}, but offload is off: give --offload-host SIZE or --offload-disk DIR too"
                )
        return None
    return OffloadConfig(**{**given, "tiers": _tiers(given["tiers"]) if "tiers" in given else {}})


def _tiers(text: str) -> dict[str, dict[str, Any]]:
    """The options of tiers, by name. Messages do not repeat the text: it may hold a password."""
    try:
        tiers = json.loads(text if text.lstrip().startswith("{") else Path(text).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"--offload-tiers names a file that cannot be read ({error.strerror}): give JSON, or a file"
        ) from None
    except ValueError as error:
        raise ConfigError(f"--offload-tiers is no JSON: {error}") from None
    if not isinstance(tiers, dict) or not all(isinstance(options, dict) for options in tiers.values()):
        raise ConfigError('--offload-tiers has no options by name: give {"NAME": {"OPTION": VALUE}}')
    return tiers


_SAMPLING = Table(
    SamplingParams,
    Row("max_tokens", "N", "Maximum tokens to generate.", "as many as fit"),
    Row("min_tokens", "N", "Minimum tokens before the end of the text."),
    *(
        Row(
            name,
            row.metavar,
            row.help,
            f"the model's, else {row.neutral:g}" if getattr(SamplingParams(), name) is None else True,
        )
        for name, row in SAMPLING_OPTIONS.items()
    ),
    Row("seed", "N", "The same seed gives the same tokens.", "random"),
    Row("stop", "TEXT", "Stop before this text; may be given several times.", False, kind=list[str]),
    Row("ignore_eos", "", "Continue after end-of-sequence tokens.", negated=False),
    panel="Sampling",
)


@declared(_SAMPLING)
def sampling_params(**given: Any) -> SamplingParams:
    """The sampling parameters. Raises RequestRejected."""
    return SamplingParams(**_SAMPLING.fields_of(given))


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function, eval_str=True).parameters)


@dataclass(frozen=True, slots=True)
class Watching:
    """Debugging options of an engine: its timeline and its order checker; see `LLM`."""

    timeline: Path | None
    check_order: bool


def watching(
    *,
    timeline: Annotated[
        Path | None,
        Option("Write a timeline of all streams to this file, for ui.perfetto.dev.", "FILE", False, panel="Watching"),
    ] = None,
    check_order: Annotated[
        bool,
        Option(
            "Check with vector clocks that copies and forward passes do not race. Slower; a race is an error at "
            "the end.",
            panel="Watching",
        ),
    ] = False,
) -> Watching:
    """The options as `Watching`. Raises ConfigError for a timeline file that cannot be written, before the command does
    any work.
    """
    if timeline is not None:
        if timeline.is_dir():
            raise ConfigError(
                f"timeline {timeline} is a directory: give the path of a file, such as {timeline / 'timeline.json'}"
            )
        if not os.access(timeline.absolute().parent, os.W_OK | os.X_OK):
            raise ConfigError(
                f"timeline {timeline}: {timeline.absolute().parent} is not a writable directory; give another path"
            )
    return Watching(timeline, check_order)


def options_of(**makers: Callable[..., Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator for a command. `makers` gives a function for some parameters of the command; the command line shows the
    function's own parameters as options, and the function's result becomes the value of the command's parameter.

    Raises TypeError, when the command is defined, if an option is declared twice.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [parameter for name, parameter in _parameters(command).items() if name not in makers]
        shared = {name: _parameters(make) for name, make in makers.items()}

        @functools.wraps(command)
        def run(**given: Any) -> None:
            made = {
                name: make(**{option: given.pop(option) for option in shared[name]}) for name, make in makers.items()
            }
            command(**given, **made)

        everything = [*own, *(parameter for options in shared.values() for parameter in options.values())]
        names = [parameter.name for parameter in everything]
        if len(set(names)) < len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise TypeError(f"{command.__name__} has options twice: {', '.join(twice)}")
        by_name = [parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in everything]
        run.__signature__ = inspect.Signature(by_name)  # type: ignore[attr-defined]
        return named(run)

    return decorate
