"""Frozen configurations and the table of sampling options. Every object checks its values when it is made. The message
for an unknown option names the most similar known option. All other packages may import this module; it knows nothing
about models.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from sidestream.errors import ConfigError, RequestRejected
from sidestream.types import SamplingSpec
from sidestream_kv.config import OffloadConfig, options_checked, parse_bytes, unknown_name
from sidestream_kv.types import HOST

# Attention kernels on a GPU read a block in tiles of 16 tokens.
_GPU_BLOCK_MULTIPLE = 16
WATCHDOG_OPTION = "--watchdog-timeout, in Python watchdog_timeout_s"
"""The option in the log and in an engine's health, which users of the command line and of Python read."""


def _at_least(option: str, value: int, bound: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < bound:
        raise ConfigError(f"{option} is {value!r}: it must be a whole number of {bound} or more")


RENAMED = {"max_slowdown": "max_draft_slowdown", "tail_apart": "separate_tail_chunk"}
"""Options that got another name: an error for the old name gives the new one."""
GRAMMAR = "grammar"
PROPOSERS = ("ngram", "mtp", "draft", GRAMMAR)
MOST_DRAFTS = 16
"""Maximum number of drafts of one request that a step verifies."""


@options_checked(ConfigError, renamed=RENAMED)
@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Speculative decoding: a proposer drafts tokens, and the model verifies several drafts in one step. Drafts change
    the speed of decoding, but not the tokens, apart from rounding differences.

    proposer     `"ngram"`: finds an earlier occurrence of the request's last tokens and drafts the tokens that followed
                 it; `"mtp"`: a head for multi-token prediction (MTP) that was trained for the model; `"draft"`: a
                 smaller model with the same tokenizer; `"grammar"`: none of its own. With every proposer, an answer
                 whose grammar leaves one continuation has it drafted
    head         for `"mtp"`: the file of the head, or the directory of a checkpoint that contains it. None: the head
                 in the model's own checkpoint or, for the demo model, the head that Sidestream ships
    model        for `"draft"`: a directory, a hub id or a name that `sidestream models` lists
    max_drafts   maximum number of tokens to draft for a request in one step
    adaptive     draft as many tokens as pay off at the measured accept rate and cost, possibly none; False: always
                 `max_drafts`
    max_draft_slowdown  with `adaptive`: largest fraction by which drafts may lengthen a request's run time (0.005: half
                 a percent). The request's own drafts count, and so do other requests' drafts in the same steps.
                 Measuring the cost of drafts may add up to 0.01 to this fraction. `math.inf`: no bound, for the highest
                 total throughput
    """

    proposer: str = "ngram"
    max_drafts: int = 4
    adaptive: bool = True
    head: str | Path | None = None
    model: str | Path | None = None
    max_draft_slowdown: float = 0.005

    def __post_init__(self) -> None:
        if self.head is not None and self.proposer != "mtp":
            raise ConfigError(
                f"head is {self.head}, but the proposer is {self.proposer}: only mtp has a head; "
                "leave head out, or choose the proposer mtp"
            )
        if self.model is not None and self.proposer != "draft":
            raise ConfigError(
                f"the draft model is {self.model}, but the proposer is {self.proposer}: only the proposer draft has a "
                "draft model; leave model out, or choose the proposer draft"
            )
        if self.model is None and self.proposer == "draft":
            raise ConfigError(
                "the proposer is draft, but model is not given: give a smaller model with the same tokenizer"
            )
        if self.proposer not in PROPOSERS:
            raise ConfigError(unknown_name("proposer", str(self.proposer), PROPOSERS))
        _at_least("max_drafts", self.max_drafts, 1)
        if not (isinstance(self.max_draft_slowdown, int | float) and self.max_draft_slowdown >= 0):
            raise ConfigError(
                f"max_draft_slowdown is {self.max_draft_slowdown}: give a share of 0 or more, such as 0.01, or inf for "
                "no bound"
            )
        if self.max_drafts > MOST_DRAFTS:
            raise ConfigError(
                f"max_drafts is {self.max_drafts}: at most {MOST_DRAFTS} tokens are drafted at once; lower it"
            )


IPC = "ipc://"
"""Prefix of an endpoint that is a Unix socket."""
_TCP = re.compile(r"tcp://(\*|\[[0-9a-fA-F:.]+\]|[^\s:/\[\]*]+):(\*|\d{1,5})")


# Longest path of a Unix socket that all systems accept: 104 bytes in the kernel's `sun_path`, minus the zero byte.
_MOST_IPC_BYTES = 103


@options_checked(ConfigError)
@dataclass(frozen=True, slots=True)
class KVEventsConfig:
    """Events that tell routers which KV blocks the engine holds, in vLLM's format (docs/kv-events.md). The engine
    publishes them in batches.

    endpoint         ZeroMQ address on which the engine publishes: `ipc://PATH`, or `tcp://ADDRESS:PORT` with `*` for
                     all addresses or for any free port. None: events go only to callbacks (`LLM.on_kv_events`)
    replay_endpoint  address on which subscribers ask for batches that they have missed; None: no replays
    topic            first frame of every message
    encoding         `"map"`: an event is a map of its fields, as in vLLM since 0.24; `"array"`: an event is an array,
                     as in earlier versions of vLLM, for older routers
    buffer_batches   number of latest batches that are kept for replays; also the maximum number of batches that wait
                     for a slow subscriber
    """

    endpoint: str | None = None
    replay_endpoint: str | None = None
    topic: str = ""
    encoding: str = "map"
    buffer_batches: int = 10_000

    def __post_init__(self) -> None:
        for name in ("endpoint", "replay_endpoint"):
            if getattr(self, name) is not None:
                _check_endpoint(f"kv_events {name}", getattr(self, name))
        if self.replay_endpoint is not None and self.endpoint is None:
            raise ConfigError(
                f"kv_events replay_endpoint is {self.replay_endpoint}, but endpoint is not given: events are replayed "
                "only if they are published; give endpoint too"
            )
        if self.endpoint is not None and self.endpoint == self.replay_endpoint and not self.endpoint.endswith(":*"):
            raise ConfigError(f"kv_events endpoint and replay_endpoint are both {self.endpoint}: give two endpoints")
        if self.encoding not in ("map", "array"):
            raise ConfigError(unknown_name("encoding", str(self.encoding), ("map", "array")))
        _at_least("kv_events buffer_batches", self.buffer_batches, 1)


def _check_endpoint(option: str, endpoint: str) -> None:
    if isinstance(endpoint, str):
        if (found := _TCP.fullmatch(endpoint)) is not None and (found[2] == "*" or 1 <= int(found[2]) <= 65535):
            return
        if endpoint.startswith(IPC) and 0 < len(endpoint.encode()) - len(IPC) <= _MOST_IPC_BYTES:
            return
    raise ConfigError(
        f"{option} is {endpoint!r}: give tcp://ADDRESS:PORT with a port of 1 to 65535, such as tcp://*:5557, or "
        f"ipc://PATH with a path of at most {_MOST_IPC_BYTES} bytes"
    )


def default_block_tokens(kind: str, *, recurrent: bool) -> int:
    """Tokens of a block if the config does not say. Most models with recurrent states have few bytes of KV a token. On
    a GPU they have larger blocks, because the host's work for each block of a load would take longer than its copy.

    kind        kind of the device: "cpu" or "cuda"
    recurrent   whether the model has recurrent states
    """
    return 64 if recurrent and kind == "cuda" else 16


# Defaults on a CPU (False) and on a GPU (True).
# On a GPU: measured in bench/results/served-vllm-h200.json; 2,048 tokens a step computed bursts of prompts slower.
_CHUNK_TOKENS = {False: 256, True: 8192}


_TARGET_GAP_MS = 250.0
_MAX_RUNNING = {False: 16, True: 256}
_CPU_KV_BYTES = 1 << 30
MOST_RUNNING = 1 << 16
"""Maximum of `EngineConfig.max_running`: each request slot has inputs, sampling state and a block table."""


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """The sizes of an EngineConfig on one kind of device; defaults are filled in.

    kv_bytes             bytes of the device's block pool; None (on a GPU only): as many as fit beside the weights
    max_running          maximum number of requests that run at once
    chunk_tokens         tokens of a prefill chunk
    token_budget         maximum number of tokens that one step computes
    separate_tail_chunk  see EngineConfig
    target_gap_s         EngineConfig's target_gap_ms, in seconds; None: no bound
    """

    kv_bytes: int | None
    max_running: int
    chunk_tokens: int
    token_budget: int
    separate_tail_chunk: bool = True
    target_gap_s: float | None = None


KV_CACHE_DTYPES = ("auto", "fp8")
"""See `EngineConfig.kv_cache_dtype`."""


@options_checked(ConfigError, renamed=RENAMED)
@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How an engine runs one model.

    device          `"cpu"`, `"cuda"`, or `"auto"`: cuda where a GPU can be used
    kv_cache_dtype  `"auto"`: keys and values lie in the dtype in which the model computes; `"fp8"`: as float8_e4m3fn
                    without scales, on the device and in all tiers: half the bytes of bfloat16, with an error that the
                    log gives. Not to be confused with `OffloadConfig.kv_dtype`, which is only about the tiers
    kv_memory       bytes of the device's block pool; None: 1 GiB on a CPU; on a GPU nine tenths of the memory that is
                    free beside the weights, minus the memory that attention needs
    state_memory    bytes of `kv_memory` for the recurrent states of hybrid models; None: half of `kv_memory`, or the
                    bytes of one state checkpoint for each block if these are fewer
    state_interval  tokens between checkpoints of recurrent state inside a prompt, a multiple of block_tokens; 0:
                    checkpoints only at the ends of prompts and answers, and where earlier prompts diverged
    block_tokens    number of tokens in a block; KV is stored, loaded and shared in whole blocks. None: 16, but 64 on a
                    GPU for models with recurrent states (`default_block_tokens`)
    chunk_tokens    chunked prefill: the largest number of tokens of one prompt in a step. With `separate_tail_chunk`,
                    every chunk ends at a multiple of this number or at the prompt's end, so that equal prompts are
                    computed in equal shapes. None: about 256 on a CPU, 8,192 on a GPU
    target_gap_ms   largest time in ms between two tokens of a request that prompts computed in the same steps should
                    cause: while requests decode, a step takes as many prompt tokens as the measured prefill rate
                    computes in this time. Cuts chunks, so it excludes `separate_tail_chunk`. None: no bound on a CPU or
                    with `separate_tail_chunk`, else 250 ms
    token_budget    maximum number of tokens that one step computes, prefill and decode together; None: two chunks on a
                    CPU or one chunk on a GPU, plus one token for each running request in either case
    max_running     maximum number of running requests (request slots); None: 16 on a CPU, 256 on a GPU
    max_waiting     maximum number of requests in the queue; further requests are rejected
    max_model_len   maximum number of tokens of prompt and output together; None: the model's own limit
    compute_threads threads of the forward pass on a CPU; None: all cores
    repack          keep copies of a GGUF file's weights in ggml's order for this processor: decode is faster, and the
                    copies take memory of the process, about half of the size of a Q4_K_M file. None: if file and copies
                    take at most two thirds of the available memory
    salt            part of every block hash: engines with different salts never share KV
    asynchronous    launch step N+1 before the host has read the tokens of step N; False: for measuring and debugging
    separate_tail_chunk  compute the tokens after a prompt's last block border in a separate chunk: then the output is
                    bitwise equal, whichever tier the prompt's KV comes from. None: True on a CPU without
                    `target_gap_ms`; False on a GPU, where the separate chunk costs one more pass over all weights
    batch_invariant compute each token of a request with the same bits whatever else runs in its steps, however its
                    prompt is cut, wherever its KV comes from, and with or without drafts; slower (docs/identity.md).
                    Models and options for which this is not known to hold are refused
    speculative     speculative decoding; None: off
    eager           on a GPU, launch kernel by kernel instead of compiling the model's layers and capturing CUDA graphs:
                    starts sooner, runs slower
    generation_config  source of the sampling options that a request leaves out. `"auto"`: the checkpoint's
                    generation_config.json; `"none"`: neutral values. The end-of-sequence ids of that file always apply
    kv_events       events that tell routers which blocks the engine holds; None: no events
    tensor_parallel number of ranks that share the model; each rank has its own process and, on GPUs, its own GPU.
                    kv_memory is the size for one rank; the tiers' sizes are totals of all ranks
    self_check      share of steps whose forward pass runs a second time and is compared with the first, and share of
                    blocks in host memory that get a checksum (docs/self-check.md); 0: off
    lora_modules    LoRA adapters to load at start, each as `NAME=DIRECTORY`
    max_loras       LoRA adapters that may be loaded at a time, at least those of `lora_modules`; 0: none. Their
                    matrices take memory from the start
    max_lora_rank   largest rank of an adapter
    watchdog_timeout_s  seconds that a step, or an answer of the engine's process, may take; then the engine counts as
                    stalled until it goes on
    """

    dtype: str = "auto"
    device: str = "auto"
    kv_memory: int | str | None = None
    block_tokens: int | None = None
    chunk_tokens: int | None = None
    token_budget: int | None = None
    max_running: int | None = None
    max_waiting: int = 1024
    max_model_len: int | None = None
    compute_threads: int | None = None
    salt: str = ""
    prefix_cache: bool = True
    asynchronous: bool = True
    separate_tail_chunk: bool | None = None
    target_gap_ms: float | None = None
    eager: bool = False
    offload: OffloadConfig | None = None
    speculative: SpeculativeConfig | None = None
    generation_config: str = "auto"
    state_memory: int | str | None = None
    state_interval: int = 0
    kv_events: KVEventsConfig | None = None
    tensor_parallel: int = 1
    self_check: float = 0.0
    lora_modules: tuple[str, ...] = ()
    max_loras: int = 0
    max_lora_rank: int = 16
    watchdog_timeout_s: float = 120.0
    repack: bool | None = None
    kv_cache_dtype: str = "auto"
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        for name, known in (
            ("dtype", ("auto", "float32", "float16", "bfloat16")),
            ("kv_cache_dtype", KV_CACHE_DTYPES),
            ("device", ("auto", "cpu", "cuda")),
            ("generation_config", ("auto", "none")),
        ):
            if (value := getattr(self, name)) not in known:
                raise ConfigError(unknown_name(name, str(value), known))
        if self.kv_cache_dtype != "auto" and self.speculative is not None and self.speculative.proposer == "mtp":
            raise ConfigError(
                f"kv_cache_dtype is {self.kv_cache_dtype}, but the proposer is mtp, which keeps hidden states in "
                "blocks of KV: choose another proposer, or leave kv_cache_dtype out"
            )
        for name in ("kv_memory", "state_memory"):
            if (size := getattr(self, name)) is not None:
                parse_bytes(size, option=name)
        for name in ("state_interval", "max_loras"):
            _at_least(name, getattr(self, name), 0)
        for name in ("max_waiting", "tensor_parallel", "max_lora_rank"):
            _at_least(name, getattr(self, name), 1)
        for name in ("block_tokens", "max_running", "chunk_tokens", "token_budget", "max_model_len", "compute_threads"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        if self.max_running is not None and self.max_running > MOST_RUNNING:
            raise ConfigError(
                f"max_running is {self.max_running}: at most {MOST_RUNNING} requests run at once; lower it"
            )
        self.check_multiples(self._block_tokens)
        gap = self.target_gap_ms
        if gap is not None and not (isinstance(gap, int | float) and not isinstance(gap, bool) and 0 < gap < math.inf):
            raise ConfigError(f"target_gap_ms is {gap!r}: give milliseconds above 0, such as 100")
        if gap is not None and self.separate_tail_chunk:
            raise ConfigError(
                f"target_gap_ms is {gap:g} and separate_tail_chunk is on, with which no chunk is cut, so no gap has a "
                "bound: leave one of the two out"
            )
        object.__setattr__(self, "lora_modules", tuple(self.lora_modules))
        if wrong := [one for one in self.lora_modules if not all(one.partition("=")[::2])]:
            raise ConfigError(f"lora_modules has {wrong[0]!r}: give NAME=DIRECTORY")
        share = self.self_check
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise ConfigError(
                f"self_check is {share!r}: give the share of steps to check, from 0 (off) to 1 (all steps)"
            )
        timeout_s = self.watchdog_timeout_s
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < math.inf:
            raise ConfigError(f"watchdog_timeout_s is {timeout_s!r}: give a number of seconds above 0, such as 120")
        if self.kv_events is not None and not self.prefix_cache:
            raise ConfigError("KV events report on the prefix cache: leave prefix_cache on, or leave kv_events out")
        if self.batch_invariant:
            self._check_batch_invariant()
        self.sizes("cuda" if self.device == "cuda" else "cpu")

    @property
    def num_loras(self) -> int:
        """Number of adapters for which there is room."""
        return max(self.max_loras, len(self.lora_modules))

    def _check_batch_invariant(self) -> None:
        speculative, offload = self.speculative, self.offload
        for option, value, allowed in (
            ("tensor_parallel", self.tensor_parallel, (1,)),
            ("the number of LoRA adapters", self.num_loras, (0,)),
            ("kv_cache_dtype", self.kv_cache_dtype, ("auto",)),
            ("offload kv_dtype", "auto" if offload is None else offload.kv_dtype, ("auto",)),
            ("the proposer", "ngram" if speculative is None else speculative.proposer, ("ngram", GRAMMAR)),
        ):
            if value not in allowed:
                raise ConfigError(
                    f"batch_invariant is on, but {option} is {value}: only {' or '.join(map(str, allowed))} is "
                    "supported with it; change that, or leave batch_invariant out"
                )

    def check_multiples(self, block_tokens: int) -> None:
        """Raise ConfigError for a size that must be a multiple of the tokens of a block and is not."""
        for name, value, reason in (
            ("chunk_tokens", self.chunk_tokens or 0, "chunks end"),
            ("state_interval", self.state_interval, "checkpoints are taken"),
        ):
            if value % block_tokens:
                raise ConfigError(
                    f"{name} is {value}: it must be a multiple of block_tokens ({block_tokens}), so that {reason} at "
                    f"block borders; give a multiple, or a block_tokens that divides {value}"
                )

    def sizes(self, kind: str) -> EngineSizes:
        """The sizes on a device of this kind: "cpu" or "cuda". Raises ConfigError when two sizes, or a size and the
        device, do not fit together.
        """
        on_gpu, block_tokens = kind == "cuda", self._block_tokens
        if on_gpu and block_tokens % _GPU_BLOCK_MULTIPLE:
            raise ConfigError(
                f"block_tokens is {block_tokens}: attention on a GPU needs a multiple of {_GPU_BLOCK_MULTIPLE}; "
                "give such a number, or device cpu"
            )
        if on_gpu and self.eager and self.batch_invariant:
            raise ConfigError(
                "batch_invariant and eager are on, but the norms of eager layers on a GPU add in an order that depends "
                "on the number of rows: leave one of the two out"
            )
        running = self.max_running or _MAX_RUNNING[on_gpu]
        chunk = self.chunk_tokens or max(1, _CHUNK_TOKENS[on_gpu] // block_tokens) * block_tokens
        budget = self.token_budget or (1 if on_gpu else 2) * chunk + running
        if budget < chunk + running:
            raise ConfigError(
                f"token_budget is {budget}: it must hold one chunk and a token for each running request "
                f"({chunk} + {running}); raise it or lower chunk_tokens or max_running"
            )
        given = None if self.kv_memory is None else parse_bytes(self.kv_memory, option="kv_memory")
        kv_bytes = _CPU_KV_BYTES if given is None and not on_gpu else given
        separate_tail, gap_ms = self.separate_tail_chunk, self.target_gap_ms
        if separate_tail is None:
            separate_tail = not on_gpu and gap_ms is None
        if gap_ms is None and not separate_tail and on_gpu:
            gap_ms = _TARGET_GAP_MS
        return EngineSizes(kv_bytes, running, chunk, budget, separate_tail, None if gap_ms is None else gap_ms / 1e3)

    @property
    def _block_tokens(self) -> int:
        """`block_tokens`, or while the model is unknown the smallest default, which divides the other one."""
        return self.block_tokens or default_block_tokens("cpu", recurrent=False)


_PROMPT_LOGITS = 256


def most_prompt_logits(block_tokens: int) -> int:
    """Maximum number of positions of prompts, in whole blocks, whose logits one step computes for `prompt_logprobs`:
    they take 4 bytes for each token of the vocabulary.
    """
    return max(1, _PROMPT_LOGITS // block_tokens) * block_tokens


MOST_PROMPT_LOGPROBS = 1 << 18
"""Maximum number of log-probabilities of one prompt: its tokens, times 1 more than the alternatives for each."""
MOST_SALT_CHARS = 1024
MAX_TTL_S = 7 * 86_400.0
"""Upper bound of the time for which a pin lasts."""
"""Maximum number of characters of a request's cache salt."""
MOST_STOP_CHARS = 1024
"""Maximum number of characters of a stop string."""


def _finite(name: str, value: float, low: float, high: float, *, low_excluded: bool = False) -> None:
    ok = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high  # NaN fails, too
    if not ok or (low_excluded and value == low):
        bracket = "(" if low_excluded else "["
        raise RequestRejected(f"{name} is {value!r}: it must be a number in {bracket}{low}, {high}]", param=name)


def _whole(name: str, value: float, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestRejected(f"{name} is {value!r}: it must be a whole number in [{low}, {high}]", param=name)


@dataclass(frozen=True, slots=True)
class SamplingOption:
    """One row of the table of sampling options. The row annotates a field of `SamplingParams`.

    Everything else derives from the row: the check, the default, `SamplingSpec.options`, the column on the device, the
    HTTP field, the command-line option and the table in docs/api.md. A new option needs a row and a sampler that reads
    its column.

    neutral        value that changes no probability; if it is an int, the option takes whole numbers
    low, high      smallest and largest value
    help           help text of the command-line option
    metavar        placeholder for the value in `--help`, such as `N`
    low_excluded   the value `low` is not allowed
    penalty        the option depends on the request's earlier tokens, so the device counts these tokens
    """

    neutral: float
    low: float
    high: float
    help: str
    metavar: str
    low_excluded: bool = False
    penalty: bool = False

    @property
    def kind(self) -> type[int] | type[float]:
        """Type of the option's values."""
        return type(self.neutral)

    def check(self, name: str, value: float) -> None:
        """Raise RequestRejected if `value` is not valid for the option `name`."""
        if isinstance(self.neutral, int):
            _whole(name, value, int(self.low), int(self.high))
        else:
            _finite(name, value, self.low, self.high, low_excluded=self.low_excluded)


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Values of sampling options for requests that leave them out. An option that is not in `values` has its neutral
    value.

    A checkpoint may define defaults (`sidestream.models.generation`). Raises RequestRejected for an invalid value.
    """

    values: Mapping[str, int | float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in self.values.items():
            if name not in SAMPLING_OPTIONS:
                raise RequestRejected(unknown_name("option", name, SAMPLING_OPTIONS), param=name)
            SAMPLING_OPTIONS[name].check(name, value)
        changed = {name: value for name, value in self.values.items() if value != SAMPLING_OPTIONS[name].neutral}
        object.__setattr__(self, "values", changed)

    def __getitem__(self, name: str) -> float:
        """The value of the option `name`."""
        return self.values.get(name, SAMPLING_OPTIONS[name].neutral)

    def __str__(self) -> str:
        """The options that are not neutral: `temperature 0.6, top_p 0.95`."""
        changed = ", ".join(f"{name} {self.values[name]:g}" for name in SAMPLING_OPTIONS if name in self.values)
        return changed or "temperature 1, no filters, no penalties"


NEUTRAL = SamplingDefaults()
"""Defaults without a checkpoint: every option has its neutral value."""


@options_checked(RequestRejected)
@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """The form that an answer must have. Give exactly one of the first six; the names are vLLM's.

    json            a JSON schema, as text or as a dict: the answer is JSON that is valid under it
    json_object     the answer is a JSON object
    regex           the whole answer matches this regular expression
    choice          the answer is one of these texts
    grammar         the answer is derived from this grammar, in Lark's or GBNF's syntax
    structural_tag  parts of the answer that begin with a trigger have the form of a tag: JSON, as text or as a dict
    disable_any_whitespace  JSON has no white space between its parts
    whitespace_pattern      regular expression of the white space between the parts of JSON
    """

    json: str | dict[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] = ()
    grammar: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in STRUCTURED_KINDS if getattr(self, name)]
        if len(given) != 1:
            actual = " and ".join(given) if given else "nothing"
            raise RequestRejected(
                f"structured_outputs has {actual}: give exactly one of {', '.join(STRUCTURED_KINDS)}",
                param="structured_outputs",
            )
        for name in ("json", "structural_tag"):
            if isinstance(value := getattr(self, name), dict):
                object.__setattr__(self, name, json.dumps(value))
        kind = given[0]
        text = getattr(self, kind)
        if kind != "json_object" and not isinstance(text, tuple if kind in _FORMS else str):
            raise RequestRejected(
                f"structured_outputs.{kind} is a {type(text).__name__}: give a {_FORMS.get(kind, 'text')}",
                param=f"structured_outputs.{kind}",
            )
        size = sum(map(len, text)) if isinstance(text, tuple) else len(text) if isinstance(text, str) else 0
        if size > MOST_GRAMMAR_CHARS:
            raise RequestRejected(
                f"structured_outputs.{kind} has {size} characters: at most {MOST_GRAMMAR_CHARS}; shorten it",
                param=f"structured_outputs.{kind}",
            )
        if len(self.choice) > MOST_CHOICES:  # 0.1 s to compile
            raise RequestRejected(
                f"structured_outputs.choice has {len(self.choice)} texts: at most {MOST_CHOICES}; leave some out",
                param="structured_outputs.choice",
            )


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """Token ids of the markers of reasoning. `inside`: the answer begins behind the first one."""

    start: tuple[int, ...]
    end: tuple[int, ...]
    inside: bool = False


STRUCTURED_KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
MOST_GRAMMAR_CHARS = 1 << 20
MOST_CHOICES = 10_000
_MOST_BAD_WORDS = 128
_FORMS = {"choice": "tuple of texts"}


@options_checked(RequestRejected)
@dataclass(frozen=True, slots=True)
class CacheOptions:
    """What the KV cache does for one request. Changes its speed, not its tokens.

    max_load_tokens     maximum number of tokens whose KV is loaded from tiers behind that on the device; 0: none;
                        None: no bound
    max_offload_tokens  maximum number of tokens, from the prompt's first, whose KV is stored in tiers; 0: none; None:
                        no bound. A request without recurrent state stores up to the bound; others store no checkpoint
                        behind it
    load_tiers          persistent tiers that may be read, by name; host memory always is. None: all
    session             name of the conversation to which the request belongs; empty: none. The KV of a session's last
                        request is evicted last until its next one is expected
    session_ttl_s       seconds for which it is; None: learned from the session's own pauses
    max_ttl_s           upper bound of learned seconds
    owner               for whom the request is, such as the name of an API key
    quota_tokens        number of tokens whose KV requests of this owner may keep in the cache beside other owners'.
                        Beyond it, the owner's oldest KV is evicted first; None: no quota
    """

    max_load_tokens: int | None = None
    max_offload_tokens: int | None = None
    load_tiers: tuple[str, ...] | None = None
    session: str = ""
    session_ttl_s: float | None = None
    max_ttl_s: float = 3600.0
    owner: str = ""
    quota_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_load_tokens", "max_offload_tokens", "quota_tokens"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 0, 1 << 31)
        if not isinstance(self.session, str) or len(self.session) > MOST_SALT_CHARS:
            raise RequestRejected(
                f"session is {reprlib.repr(self.session)}: give a text of at most {MOST_SALT_CHARS} characters",
                param="session",
            )
        if self.load_tiers is not None and not all(isinstance(tier, str) for tier in self.load_tiers):
            raise RequestRejected(f"load_tiers is {self.load_tiers!r}: give names of tiers", param="load_tiers")
        for name in ("session_ttl_s", "max_ttl_s"):
            if getattr(self, name) is not None:
                _finite(name, getattr(self, name), 0.0, MAX_TTL_S)

    def may_load(self, tier: str) -> bool:
        """Whether the request may load blocks that are in `tier`."""
        return self.load_tiers is None or tier == HOST or tier in self.load_tiers


@options_checked(RequestRejected)
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters and stop conditions of one request.

    A sampling option that is None has the model's default (see `EngineConfig.generation_config`) or, if the model has
    no default, the neutral value.

    temperature         0: greedy; 1: neutral
    top_k               0: off
    top_p               1: off
    min_p               drops tokens less likely than min_p times the likeliest; 0: off
    typical_p           locally typical sampling: keeps the tokens, of total probability typical_p, whose surprise is
                        nearest to the entropy; 1: off
    repetition_penalty  for tokens in the prompt or the output: divides positive logits and multiplies negative ones;
                        1: off
    presence_penalty    subtracted once from the logits of tokens in the output
    frequency_penalty   subtracted from the logits of tokens in the output, for each occurrence
    seed                the same seed gives the same tokens, whatever else runs; None: a random seed
    stop                a text that ends the answer, or up to 16 of them
    skip_special_tokens  leave special tokens, such as `<|im_start|>`, out of the text
    logprobs            k: log-probabilities of the sampled token and of the k likeliest tokens; None: no logprobs
    max_tokens          None: as many tokens as the model and the block pool allow
    max_drafts          maximum number of tokens to draft in a step; 0: no drafts; None: the engine's `max_drafts`
    cache               what the KV cache does for the request; None: the usual
    adapter             name of a loaded LoRA adapter; empty: none
    structured_outputs  the form that the answer must have; None: any
    prompt_logprobs     as `logprobs`, for the tokens of the prompt. None of its KV is taken from a cache then
    truncate_prompt_tokens  keep only so many tokens at the end of the prompt; -1: as many as leave room for
                        `max_tokens` (None: for one token) in the model's context; None: all
    thinking_token_budget  maximum number of tokens of reasoning; then the marker of its end is forced. None: no bound
    reasoning           the markers; `LLM`, `AsyncLLM` and the server add them
    allowed_token_ids   the only tokens that the answer may have; empty: all
    bad_words           texts that the answer may not contain, as the tokenizer writes them, also behind a space
    bad_word_ids        the same as token ids; `LLM`, `AsyncLLM` and the server add those of `bad_words`
    """

    temperature: Annotated[
        float | None, SamplingOption(1.0, 0.0, 100.0, "0 takes the likeliest token each time.", "T")
    ] = None
    top_k: Annotated[int | None, SamplingOption(0, 0, 1 << 31, "Draw among the K likeliest; 0: all.", "K")] = None
    top_p: Annotated[
        float | None,
        SamplingOption(
            1.0, 0.0, 1.0, "Draw among the likeliest tokens with total probability P.", "P", low_excluded=True
        ),
    ] = None
    min_p: Annotated[
        float | None, SamplingOption(0.0, 0.0, 1.0, "Drop tokens less likely than P times the likeliest.", "P")
    ] = None
    typical_p: Annotated[
        float,
        SamplingOption(
            1.0, 0.0, 1.0, "Draw among the most typical tokens with total probability P.", "P", low_excluded=True
        ),
    ] = 1.0
    repetition_penalty: Annotated[
        float | None,
        SamplingOption(
            1.0,
            0.0,
            10.0,
            "Divides the logits of tokens in prompt or output; 1: off.",
            "X",
            low_excluded=True,
            penalty=True,
        ),
    ] = None
    presence_penalty: Annotated[
        float,
        SamplingOption(0.0, -2.0, 2.0, "Subtracted once from the logits of tokens in the output.", "X", penalty=True),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        SamplingOption(
            0.0, -2.0, 2.0, "Subtracted from a token's logit for each time it is in the output.", "X", penalty=True
        ),
    ] = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: str | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1
    max_drafts: int | None = None
    cache: CacheOptions | None = None
    structured_outputs: StructuredOutputs | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    thinking_token_budget: int | None = None
    reasoning: ReasoningMarks | None = None
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    adapter: str = ""

    def __post_init__(self) -> None:
        for name, option in SAMPLING_OPTIONS.items():
            if (value := getattr(self, name)) is not None:
                option.check(name, value)
        for name, low, high in (("min_tokens", 0, 1 << 31), ("n", 1, 128)):
            _whole(name, getattr(self, name), low, high)
        for name, low, high, unchecked in (
            ("max_tokens", 1, 1 << 31, None),
            ("logprobs", 0, 20, None),
            ("prompt_logprobs", 0, 20, None),
            ("truncate_prompt_tokens", 1, 1 << 31, -1),
            ("thinking_token_budget", 0, 1 << 31, None),
            ("max_drafts", 0, MOST_DRAFTS, None),
            ("seed", -(1 << 63), (1 << 63) - 1, None),
        ):
            if (value := getattr(self, name)) is not None and value != unchecked:
                _whole(name, value, low, high)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            reason = f"min_tokens is {self.min_tokens}: it must not exceed max_tokens ({self.max_tokens})"
            raise RequestRejected(reason, param="min_tokens")
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if not all(isinstance(s, str) for s in self.stop):
            raise RequestRejected(f"stop is {self.stop!r}: give a string or a tuple of strings", param="stop")
        if len(self.stop) > 16:
            raise RequestRejected(f"stop has {len(self.stop)} strings: at most 16", param="stop")
        if any(not s for s in self.stop):
            raise RequestRejected("stop holds an empty string: every text contains it; leave it out", param="stop")
        longest = max(map(len, self.stop), default=0)
        if longest > MOST_STOP_CHARS:
            raise RequestRejected(
                f"stop holds a string of {longest} characters: at most {MOST_STOP_CHARS}; shorten it", param="stop"
            )
        for token_id in self.stop_token_ids:
            _whole("stop_token_ids", token_id, 0, 1 << 31)
        for token_id in self.allowed_token_ids:
            _whole("allowed_token_ids", token_id, 0, 1 << 31)
        if not all(isinstance(word, str) and 0 < len(word) <= MOST_STOP_CHARS for word in self.bad_words):
            raise RequestRejected(
                f"bad_words is {reprlib.repr(self.bad_words)}: give texts of 1 to {MOST_STOP_CHARS} characters",
                param="bad_words",
            )
        if len(self.bad_words) > _MOST_BAD_WORDS:
            raise RequestRejected(
                f"bad_words has {len(self.bad_words)} texts: at most {_MOST_BAD_WORDS}", param="bad_words"
            )
        if len(self.logit_bias) > 1024:
            raise RequestRejected(f"logit_bias has {len(self.logit_bias)} entries: at most 1024", param="logit_bias")
        for token_id, bias in self.logit_bias.items():
            _whole("logit_bias", token_id, 0, 1 << 31)
            _finite("logit_bias", bias, -100.0, 100.0)

    def kept(self, prompt: Sequence[int], max_model_len: int) -> Sequence[int]:
        """The end of the prompt that `truncate_prompt_tokens` keeps."""
        limit = self.truncate_prompt_tokens
        if limit == -1:
            limit = max(1, max_model_len - (self.max_tokens or 1))
        return prompt if limit is None else prompt[-limit:]

    @property
    def masked(self) -> bool:
        """Whether the answer's own tokens decide which tokens may follow."""
        ruled = self.allowed_token_ids or self.bad_word_ids or self.thinking_token_budget is not None
        return self.structured_outputs is not None or bool(ruled)

    def spec(self, *, seed: int, eos_ids: tuple[int, ...], defaults: SamplingDefaults = NEUTRAL) -> SamplingSpec:
        """The part of these parameters that the device needs, for one sample. `defaults` gives the values of options
        that are None.
        """
        ending_ids = self.stop_token_ids if self.ignore_eos else (*self.stop_token_ids, *eos_ids)
        asked = {name: getattr(self, name) for name in SAMPLING_OPTIONS}
        options = {name: defaults[name] if value is None else value for name, value in asked.items()}
        return SamplingSpec(
            options=options,
            penalised=any(row.penalty and options[name] != row.neutral for name, row in SAMPLING_OPTIONS.items()),
            logit_bias=dict(self.logit_bias),
            seed=seed,
            min_tokens=self.min_tokens,
            forbidden_until_min=tuple(sorted(set(ending_ids))),
            top_logprobs=-1 if self.logprobs is None else self.logprobs,
            prompt_logprobs=-1 if self.prompt_logprobs is None else self.prompt_logprobs,
            masked=self.masked,
        )


SAMPLING_OPTIONS: Mapping[str, SamplingOption] = {
    name: row
    for name, kind in get_type_hints(SamplingParams, include_extras=True).items()
    for row in getattr(kind, "__metadata__", ())
    if isinstance(row, SamplingOption)
}
"""The table of sampling options by name: the annotated fields of `SamplingParams`, in their order."""


MODEL_OPTIONS = tuple(name for name in SAMPLING_OPTIONS if getattr(SamplingParams(), name) is None)
"""Options whose default a checkpoint may set."""
