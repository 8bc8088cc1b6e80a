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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from sidestream.cli.declare import flag, number, option, whole
from sidestream.config import (
    KV_CACHE_DTYPES,
    MOST_DRAFTS,
    SAMPLING_OPTIONS,
    EngineConfig,
    SamplingOption,
    SamplingParams,
    SpeculativeConfig,
)
from sidestream.errors import ConfigError
from sidestream_kv.config import KV_DTYPES, WRITE_POLICIES, OffloadConfig

DEMO_MODEL = "smollm2-135m-instruct"
"""The default model of all commands: a name that `sidestream models` lists."""

_ENGINE, _OFFLOAD, _SAMPLING, _SPECULATIVE = EngineConfig(), OffloadConfig(), SamplingParams(), SpeculativeConfig()

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


Logging = Annotated[LogLevel, option("--log-level", metavar="|".join(LogLevel), help="Log level on standard error.")]


def _option(
    panel: str,
    name: str,
    help_text: str,
    metavar: str,
    default: str | bool = True,
    parse: Callable[[Any], Any] | None = None,
) -> Any:
    """Declare an option. `panel`: group of options in `--help`. `default`: text in `--help` for a default of None."""
    return option(name, panel=panel, help=help_text, metavar=metavar, show_default=default, parse=parse)


_engine = functools.partial(_option, "Engine")
_offload = functools.partial(_option, "Offload")
_sampling = functools.partial(_option, "Sampling")
_watching = functools.partial(_option, "Watching")


_Dtype = Annotated[
    str,
    _engine(
        "--dtype",
        "auto (the checkpoint's dtype, or float32 if the CPU is much faster with it), float32, float16 or bfloat16.",
        "TYPE",
    ),
]
_KvCacheDtype = Annotated[
    str,
    _engine(
        "--kv-cache-dtype",
        "fp8: KV in 8 bits on the device and in all tiers, half the bytes of bfloat16, with an error that the log "
        "gives. auto: in the model's dtype.",
        "|".join(KV_CACHE_DTYPES),
    ),
]
_Device = Annotated[str, _engine("--device", "cpu, cuda, or auto: cuda if a GPU is usable.", "DEVICE")]
_KvMemory = Annotated[
    str | None,
    _engine(
        "--kv-memory",
        "Memory of the device's KV pool.",
        "SIZE",
        "1GiB on a CPU, 90% of the memory left by the weights on a GPU",
    ),
]
_StateMemory = Annotated[
    str | None,
    _engine("--state-memory", "Part of the KV pool for recurrent states of hybrid models.", "SIZE", "half of the pool"),
]
_StateInterval = Annotated[
    int,
    _engine(
        "--state-interval",
        "Tokens between checkpoints of recurrent state in a prompt, a multiple of --block-tokens; 0: only at its end "
        "and at branches.",
        "N",
        parse=whole,
    ),
]
_TensorParallel = Annotated[
    int,
    _engine("--tensor-parallel", "Number of ranks that share the model: processes, each with a GPU.", "N", parse=whole),
]
_BlockTokens = Annotated[
    int | None,
    _engine(
        "--block-tokens", "Tokens per KV block.", "N", "16; 64 on a GPU for models with recurrent state", parse=whole
    ),
]
_ChunkTokens = Annotated[
    int | None,
    _engine("--chunk-tokens", "Chunked prefill: tokens per chunk.", "N", "256 on a CPU, 8192 on a GPU", parse=whole),
]
_TokenBudget = Annotated[
    int | None,
    _engine(
        "--token-budget",
        "Maximum tokens that one step computes.",
        "N",
        "two chunks on a CPU or one on a GPU, plus one token per request",
        parse=whole,
    ),
]
_MaxRunning = Annotated[
    int | None,
    _engine("--max-running", "Maximum requests that run at once.", "N", "16 on a CPU, 256 on a GPU", parse=whole),
]
_MaxWaiting = Annotated[
    int, _engine("--max-waiting", "Maximum requests in the queue; further requests are rejected.", "N", parse=whole)
]
_MaxModelLen = Annotated[
    int | None, _engine("--max-model-len", "Maximum tokens of prompt plus output.", "N", "the model's", parse=whole)
]
_Threads = Annotated[int | None, _engine("--threads", "Threads of the forward pass.", "N", "all cores", parse=whole)]
_Repack = Annotated[
    bool | None,
    _engine(
        "--repack/--no-repack",
        "Keep copies of a GGUF file's weights in the order of this processor's kernels: decode is faster.",
        "",
        "on a CPU with the memory for them",
    ),
]
_SeparateTailChunk = Annotated[
    bool | None,
    _engine(
        "--separate-tail-chunk/--no-separate-tail-chunk",
        "Compute the tokens after a prompt's last full block separately: then outputs with KV from any tier are equal.",
        "",
        "on a CPU, not on a GPU",
    ),
]
_TargetGap = Annotated[
    float | None,
    _engine(
        "--target-gap-ms",
        "While requests decode, a step takes only as many prompt tokens as take N ms (not with --separate-tail-chunk).",
        "N",
        "250 on a GPU, no bound on a CPU",
        parse=number,
    ),
]
_Eager = Annotated[
    bool,
    _engine("--eager/--no-eager", "On a GPU, do not compile or capture graphs: faster start, slower steps.", "", False),
]
_BatchInvariant = Annotated[
    bool,
    _engine(
        "--batch-invariant/--no-batch-invariant",
        "Equal bits for a request whatever else runs, however its prompt is cut, and from any tier; slower.",
        "",
        False,
    ),
]
_Speculative = Annotated[
    str | None,
    _engine(
        "--speculative",
        "Speculative decoding; drafts come from earlier text (ngram), an MTP head (mtp), a smaller model (draft), or "
        "only from grammars that leave one continuation (grammar).",
        "PROPOSER",
        "off",
    ),
]
_DraftHead = Annotated[
    Path | None,
    _engine(
        "--draft-head",
        "With mtp: file of the head, or a checkpoint that contains it.",
        "PATH",
        "the model's own; for the demo model, the head that Sidestream ships",
    ),
]
_DraftModel = Annotated[
    str | None,
    _engine(
        "--draft-model",
        "With draft: a smaller model with the same tokenizer.",
        "MODEL",
        "none; needed with --speculative draft",
    ),
]
_MaxDrafts = Annotated[
    int | None,
    _engine(
        "--max-drafts",
        "Maximum draft tokens per request and step.",
        "N",
        f"{_SPECULATIVE.max_drafts} with --speculative",
        parse=whole,
    ),
]
_MaxDraftSlowdown = Annotated[
    float | None,
    _engine(
        "--max-draft-slowdown",
        "Largest share by which drafts may slow a request down; 0.01 is 1 %.",
        "SHARE",
        f"{_SPECULATIVE.max_draft_slowdown} with --speculative",
        parse=number,
    ),
]
_GenerationConfig = Annotated[
    str,
    _engine(
        "--generation-config",
        "Defaults of sampling options: auto uses the model's generation_config.json, none uses neutral values.",
        "auto|none",
    ),
]
_SelfCheck = Annotated[
    float,
    _engine(
        "--self-check",
        "Share of steps to run twice and compare, and of blocks in host memory to checksum; 0.01 is 1 %.",
        "SHARE",
        "off",
        parse=number,
    ),
]
_WatchdogTimeout = Annotated[
    float,
    _engine(
        "--watchdog-timeout",
        "Seconds that a step may take; then /health says stalled (503) until it ends.",
        "SECONDS",
        parse=number,
    ),
]
_Salt = Annotated[str, _engine("--salt", "Engines with different salts never share KV.", "TEXT", False)]
_LoraModules = Annotated[
    list[str] | None,
    _engine("--lora-modules", "LoRA adapter, which clients name as the model. Several times.", "NAME=DIR", "none"),
]
_MaxLoras = Annotated[
    int,
    _engine("--max-loras", "LoRA adapters that may be loaded at a time; more can come over HTTP.", "N", parse=whole),
]
_MaxLoraRank = Annotated[int, _engine("--max-lora-rank", "Largest rank of a LoRA adapter.", "N", parse=whole)]
_OffloadHost = Annotated[
    str | None,
    _offload(
        "--offload-host",
        "Host memory for offloaded KV.",
        "SIZE",
        f"{_OFFLOAD.host} with --offload-disk or --offload-shared-memory, else off",
    ),
]
_OffloadDisk = Annotated[
    list[Path] | None,
    _offload(
        "--offload-disk",
        "Directory for offloaded KV; later processes reuse this KV. Several times: one on each disk.",
        "DIR",
        "off",
    ),
]
_OffloadDiskCapacity = Annotated[
    str | None,
    _offload("--offload-disk-capacity", "Maximum size of each directory.", "SIZE", str(_OFFLOAD.disk_capacity)),
]
_OffloadWritePolicy = Annotated[
    str | None,
    _offload(
        "--offload-write-policy",
        "Which blocks the disk writes while the engine serves; reused: those that were reused, the rest at the end.",
        "|".join(WRITE_POLICIES),
        "reused",
    ),
]
_OffloadTiers = Annotated[
    str | None,
    _offload(
        "--offload-tiers",
        'Further tiers, such as {"redis": {"url": "redis://host"}}: JSON, or a file with it.',
        "JSON|FILE",
        "none",
    ),
]
_OffloadSharedMemory = Annotated[
    Path | None,
    _offload(
        "--offload-shared-memory",
        "Socket of a cache process (sidestream cache serve), whose memory --offload-host is; engines share it.",
        "SOCKET",
        "off",
    ),
]
_OffloadKvDtype = Annotated[
    str | None,
    _offload(
        "--offload-kv-dtype",
        "int8: host memory and the tiers below hold KV in 8 bits, about half the bytes, with a small error.",
        "|".join(KV_DTYPES),
        "auto",
    ),
]
_LoadDeadline = Annotated[
    float | None,
    _offload(
        "--load-deadline",
        "Maximum seconds that a request waits for KV from a tier; then it recomputes the KV.",
        "SECONDS",
        f"{_OFFLOAD.load_deadline_s:g}",
        parse=number,
    ),
]


def engine_config(
    *,
    dtype: _Dtype = _ENGINE.dtype,
    device: _Device = _ENGINE.device,
    kv_cache_dtype: _KvCacheDtype = _ENGINE.kv_cache_dtype,
    kv_memory: _KvMemory = None,
    state_memory: _StateMemory = None,
    state_interval: _StateInterval = _ENGINE.state_interval,
    tensor_parallel: _TensorParallel = _ENGINE.tensor_parallel,
    block_tokens: _BlockTokens = _ENGINE.block_tokens,
    chunk_tokens: _ChunkTokens = _ENGINE.chunk_tokens,
    token_budget: _TokenBudget = _ENGINE.token_budget,
    max_running: _MaxRunning = _ENGINE.max_running,
    max_waiting: _MaxWaiting = _ENGINE.max_waiting,
    max_model_len: _MaxModelLen = _ENGINE.max_model_len,
    threads: _Threads = _ENGINE.compute_threads,
    repack: _Repack = _ENGINE.repack,
    separate_tail_chunk: _SeparateTailChunk = _ENGINE.separate_tail_chunk,
    target_gap_ms: _TargetGap = _ENGINE.target_gap_ms,
    eager: _Eager = _ENGINE.eager,
    batch_invariant: _BatchInvariant = _ENGINE.batch_invariant,
    speculative: _Speculative = None,
    draft_head: _DraftHead = None,
    draft_model: _DraftModel = None,
    max_drafts: _MaxDrafts = None,
    max_draft_slowdown: _MaxDraftSlowdown = None,
    generation_config: _GenerationConfig = _ENGINE.generation_config,
    salt: _Salt = _ENGINE.salt,
    self_check: _SelfCheck = _ENGINE.self_check,
    lora_modules: _LoraModules = None,
    max_loras: _MaxLoras = _ENGINE.max_loras,
    max_lora_rank: _MaxLoraRank = _ENGINE.max_lora_rank,
    offload_host: _OffloadHost = None,
    offload_disk: _OffloadDisk = None,
    offload_disk_capacity: _OffloadDiskCapacity = None,
    offload_write_policy: _OffloadWritePolicy = None,
    offload_tiers: _OffloadTiers = None,
    offload_shared_memory: _OffloadSharedMemory = None,
    offload_kv_dtype: _OffloadKvDtype = None,
    load_deadline: _LoadDeadline = None,
    watchdog_timeout: _WatchdogTimeout = _ENGINE.watchdog_timeout_s,
) -> EngineConfig:
    """The engine's config. Offload is on when any tier is given. Raises ConfigError."""
    return EngineConfig(
        dtype=dtype,
        device=device,
        kv_cache_dtype=kv_cache_dtype,
        kv_memory=kv_memory,
        state_memory=state_memory,
        state_interval=state_interval,
        tensor_parallel=tensor_parallel,
        block_tokens=block_tokens,
        chunk_tokens=chunk_tokens,
        token_budget=token_budget,
        max_running=max_running,
        max_waiting=max_waiting,
        max_model_len=max_model_len,
        compute_threads=threads,
        repack=repack,
        separate_tail_chunk=separate_tail_chunk,
        target_gap_ms=target_gap_ms,
        eager=eager,
        batch_invariant=batch_invariant,
        salt=salt,
        self_check=self_check,
        lora_modules=tuple(lora_modules or ()),
        max_loras=max_loras,
        max_lora_rank=max_lora_rank,
        watchdog_timeout_s=watchdog_timeout,
        speculative=_speculative_config(speculative, max_drafts, max_draft_slowdown, draft_head, draft_model),
        generation_config=generation_config,
        offload=_offload_config(
            offload_host, offload_disk, offload_disk_capacity, offload_tiers, load_deadline, offload_write_policy,
            offload_shared_memory, offload_kv_dtype,
        ),
    )  # fmt: skip


def _speculative_config(
    proposer: str | None, max_drafts: int | None, max_draft_slowdown: float | None, head: Path | None, model: str | None
) -> SpeculativeConfig | None:
    if proposer is None:
        if max_draft_slowdown is not None:
            raise ConfigError(
                f"--max-draft-slowdown is {max_draft_slowdown}, but nothing is drafted: give --speculative too"
            )
        if head is not None:
            raise ConfigError(f"--draft-head is {head}, but nothing is drafted: give --speculative mtp too")
        if model is not None:
            raise ConfigError(f"--draft-model is {model}, but nothing is drafted: give --speculative draft too")
        if max_drafts is not None:
            raise ConfigError(f"--max-drafts is {max_drafts}, but nothing is drafted: give --speculative too")
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
    if max_drafts == 0:
        raise ConfigError(f"--max-drafts is 0: give 1 to {MOST_DRAFTS}, or leave out --speculative to draft nothing")
    most = _SPECULATIVE.max_drafts if max_drafts is None else max_drafts
    slowdown = _SPECULATIVE.max_draft_slowdown if max_draft_slowdown is None else max_draft_slowdown
    return SpeculativeConfig(proposer=proposer, max_drafts=most, max_draft_slowdown=slowdown, head=head, model=model)


def _offload_config(
    host: str | None,
    disks: Sequence[Path] | None,
    disk_capacity: str | None,
    tiers: str | None,
    load_deadline_s: float | None,
    write_policy: str | None,
    shared_memory: Path | None,
    kv_dtype: str | None,
) -> OffloadConfig | None:
    for name, value in (("disk-capacity", disk_capacity), ("write-policy", write_policy)):
        if value is not None and not disks:
            raise ConfigError(f"--offload-{name} is {value}, but nothing is kept on disk: give --offload-disk DIR too")
    if host is None and not disks and tiers is None and shared_memory is None:
        deadline = None if load_deadline_s is None else f"{load_deadline_s:g}"
        for option, given in (("--load-deadline", deadline), ("--offload-kv-dtype", kv_dtype)):
            if given is not None:
                raise ConfigError(
                    f"{option} is {given}, but offload is off: give --offload-host SIZE or --offload-disk DIR too"
                )
        return None
    return OffloadConfig(
        tiers={} if tiers is None else _tiers(tiers),
        host=_OFFLOAD.host if host is None else host,
        disk=tuple(disks) if disks else None,
        disk_capacity=_OFFLOAD.disk_capacity if disk_capacity is None else disk_capacity,
        load_deadline_s=_OFFLOAD.load_deadline_s if load_deadline_s is None else load_deadline_s,
        write_policy=write_policy,
        shared_memory=shared_memory,
        kv_dtype=_OFFLOAD.kv_dtype if kv_dtype is None else kv_dtype,
    )


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


def sampling_params(
    *,
    max_tokens: Annotated[
        int | None, _sampling("--max-tokens", "Maximum tokens to generate.", "N", "as many as fit", parse=whole)
    ] = _SAMPLING.max_tokens,
    min_tokens: Annotated[
        int, _sampling("--min-tokens", "Minimum tokens before the end of the text.", "N", parse=whole)
    ] = _SAMPLING.min_tokens,
    seed: Annotated[
        int | None, _sampling("--seed", "The same seed gives the same tokens.", "N", "random", parse=whole)
    ] = _SAMPLING.seed,
    stop: Annotated[
        list[str] | None, _sampling("--stop", "Stop before this text; may be given several times.", "TEXT", False)
    ] = None,
    ignore_eos: Annotated[
        bool, flag("--ignore-eos", panel="Sampling", help="Continue after end-of-sequence tokens.")
    ] = _SAMPLING.ignore_eos,
    **options: Any,
) -> SamplingParams:
    """The sampling parameters. `options`: the options of `SAMPLING_OPTIONS`, the table in config.py.

    Raises RequestRejected.
    """
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        seed=seed,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
        **options,
    )


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function, eval_str=True).parameters)


def _table_parameter(name: str, row: SamplingOption) -> inspect.Parameter:
    """The command parameter for one row of the table of sampling options."""
    unset = getattr(_SAMPLING, name)
    declared = _sampling(
        f"--{name.replace('_', '-')}",
        row.help,
        row.metavar,
        f"the model's, else {row.neutral:g}" if unset is None else True,
        parse=whole if row.kind is int else number,
    )
    kind: Any = row.kind | None if unset is None else row.kind
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=unset, annotation=Annotated[kind, declared])


def _with_table(function: Callable[..., SamplingParams]) -> inspect.Signature:
    """The signature of `function`, with the options of the table in place of `**options`. The table follows the first
    two options, the limits on the length.
    """
    own = [parameter for name, parameter in _parameters(function).items() if name != "options"]
    table = [_table_parameter(name, row) for name, row in SAMPLING_OPTIONS.items()]
    return inspect.Signature([*own[:2], *table, *own[2:]])


sampling_params.__signature__ = _with_table(sampling_params)  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Watching:
    """Debugging options of an engine: its timeline and its order checker; see `LLM`."""

    timeline: Path | None
    check_order: bool


def watching(
    *,
    timeline: Annotated[
        Path | None,
        _watching("--timeline", "Write a timeline of all streams to this file, for ui.perfetto.dev.", "FILE", False),
    ] = None,
    check_order: Annotated[
        bool,
        flag(
            "--check-order",
            panel="Watching",
            help="Check with vector clocks that copies and forward passes do not race. Slower; a race is an error at "
            "the end.",
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
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in everything}
        return run

    return decorate
