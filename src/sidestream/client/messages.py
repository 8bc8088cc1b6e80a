"""The messages between front ends and the engine's process, in the frames of `sidestream.processes.frames`.

A front end converts between text and token ids. A stream is the number of one sample within a front end's connection. A
delta is new tokens of one sample. The owner is the process that started the engine's process.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sidestream import errors
from sidestream.config import SamplingDefaults, SamplingParams
from sidestream.errors import RequestError, SidestreamError
from sidestream.processes.frames import FrameDecoder
from sidestream.types import CachedPrefix, CacheExplanation, Delta, PrefixQuery
from sidestream_kv.metrics import MetricsSnapshot, Recent


class EngineInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """An engine's constants, for its front ends.

    version            the engine's version of Sidestream
    model              directory or hub id of the tokenizer
    model_name         the model's name in requests
    max_unfinished     maximum number of samples that run or wait at the same time
    key_root           the value in place of a previous key for the first block of a sequence: a block's key is a hash
                       of its tokens and the previous block's key. Empty without a prefix cache
    keys_version       version of the weights to which these keys belong
    sampling_defaults  the model's sampling defaults
    watchdog_timeout_s  seconds after which a process that does not answer counts as stalled
    pid                process id of the engine's process
    padding_token      see `Bounds.padding_token`
    max_loras          number of LoRA adapters for which there is room
    """

    version: str
    model: str
    model_name: str
    max_model_len: int
    pool_tokens: int
    block_tokens: int
    vocab_size: int
    max_unfinished: int
    key_root: bytes
    keys_version: int
    sampling_defaults: SamplingDefaults
    watchdog_timeout_s: float
    pid: int
    padding_token: int | None = None
    max_loras: int = 0


class Failure(msgspec.Struct, frozen=True):
    """An error as part of a message: its class in `sidestream.errors`, its text, and the request field at fault."""

    kind: str
    message: str
    param: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """`error` as a Failure. An error of another library becomes a SidestreamError that names its type."""
        if isinstance(error, SidestreamError):
            return cls(type(error).__name__, str(error), getattr(error, "param", None))
        return cls("SidestreamError", f"{type(error).__name__}: {error}")

    def error(self) -> SidestreamError:
        """The error to raise."""
        kind: type[SidestreamError] = getattr(errors, self.kind, SidestreamError)
        return kind(self.message, param=self.param) if issubclass(kind, RequestError) else kind(self.message)


class Submit(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A request that the front end has checked. Its samples are the streams `stream` to `stream + params.n - 1` of this
    connection.

    prompt        token ids, 32-bit little-endian
    keys          keys (hashes for the prefix cache) of the prompt's complete blocks, concatenated
    keys_version  version of the weights to which the keys belong
    params        the parameters without stop strings, which the front end handles
    cache_salt    UTF-8, which may contain lone surrogates
    name          the request's name, for the operation `cancel`
    """

    stream: int
    prompt: bytes
    keys: bytes
    keys_version: int
    params: SamplingParams
    seed: int
    max_outputs: int
    priority: int
    cache_salt: bytes
    name: str = ""


class Abort(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """End the unfinished streams in `[stream, stop)`. The reason is `"abort"`, `"stop"` (a stop string was found) or
    `"error"` (the tokenizer failed).
    """

    stream: int
    stop: int
    reason: str


class Call(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Ask for the metrics, for the timeline's spans after position `since`, for an explanation, or for an operation
    (see `Operations.run`; with `prefix`, see `Prefixes.run`). The `Reply` has the same number.
    """

    number: int
    method: str
    timeout_s: float = 0.0
    name: str | None = None
    since: int = 0
    prefix: PrefixQuery | None = None


class Count(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Add to one of the engine's counters."""

    name: str
    value: float
    labels: tuple[str, ...]


class Ping(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The process answers with the same message."""


class Attach(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Serve one more front end. The descriptor of its socket comes with this message. From the owner only."""


class Close(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Let requests run for at most `drain_s`, store all complete blocks, end the process. From the owner only."""

    drain_s: float


class Start(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The first message to an engine's process. `config` is an EngineConfig as plain values."""

    model: str
    config: dict[str, Any]
    timeline: str | None
    check_order: bool
    log_level: int
    log_format: tuple[str, str] | None


class Progress(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Progress of a stage of the engine's start. A `total` of 0: the progress is unknown. `fetching`: the stage is a
    download.
    """

    stage: str
    done: int
    total: int
    fetching: bool


class Started(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """To the owner: the engine serves."""

    info: EngineInfo


class Welcome(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The first frame to a front end."""

    info: EngineInfo


class Outputs(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """All deltas that one engine step has for one front end, in order. Entry i is token `tokens[i]` of stream
    `streams[i]`.

    details   whole deltas, by entry; their `tokens[i]` is -1. The first and the last delta of a stream are whole, and
              each delta with log-probabilities or with more or less than one token
    """

    streams: list[int]
    tokens: list[int]
    details: dict[int, Delta]


class Rejected(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The engine rejected the request of streams `[stream, stop)`; no output follows."""

    stream: int
    stop: int
    failure: Failure


class Status(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The engine's health. Sent when the health changes."""

    status: str
    detail: str
    paused: bool = False


class Reply(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer to a `Call`, or to `Close` (number 0).

    counts       of a reset: dropped blocks by tier; of a flush: unfinished work by kind
    explanation  of `explain_cache`
    """

    number: int
    failure: Failure | None = None
    snapshot: MetricsSnapshot | None = None
    counts: dict[str, int] = msgspec.field(default_factory=dict)
    explanation: CacheExplanation | None = None
    timeline: Recent | None = None
    prefixes: tuple[CachedPrefix, ...] = ()


ToEngine = Start | Submit | Abort | Call | Count | Ping | Attach | Close
ToClient = Progress | Started | Welcome | Outputs | Rejected | Status | Ping | Reply


def decoder_of_requests() -> FrameDecoder:
    """A decoder for the engine's side."""
    return FrameDecoder(msgspec.msgpack.Decoder(ToEngine))


def decoder_of_outputs() -> FrameDecoder:
    """A decoder for a front end's side."""
    return FrameDecoder(msgspec.msgpack.Decoder(ToClient))
