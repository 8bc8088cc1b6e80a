"""What front ends and the engine's process say to each other: typed values, packed with msgpack, numbered frames.

A connection is a Unix stream socket, so the kernel neither loses nor reorders bytes. Each frame carries its number all
the same: a frame that is missing, doubled or out of order is a bug of ours, and ends the connection instead of mixing
up answers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from sidestream import errors
from sidestream.config import SamplingDefaults, SamplingParams
from sidestream.errors import EngineStopped, InvariantError, RequestError, SidestreamError

_HEAD = struct.Struct("<II")
MOST_FRAME_BYTES = 256 << 20
"""No message comes near: a longer frame is a broken stream."""


class Facts(msgspec.Struct, frozen=True):
    """What a front end must know of an engine, the same for its whole life.

    version       of the package that the engine runs
    model         directory or hub id that its tokenizer is loaded from
    model_name    what clients call the model
    max_unfinished  samples that run or wait at a time
    key_root      parent of the first block's key; empty: there is no prefix cache
    sampling_defaults  of requests that leave options out
    pid           of the engine's process
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
    pid: int


class Failure(msgspec.Struct, frozen=True):
    """An error that crosses the border: the name of its class in `sidestream.errors`, its message, and the field at
    fault.
    """

    kind: str
    message: str
    param: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """An error as the other side may raise it; one that is not Sidestream's own names its type in the message."""
        if isinstance(error, SidestreamError):
            return cls(type(error).__name__, str(error), getattr(error, "param", None))
        return cls("SidestreamError", f"{type(error).__name__}: {error}")

    def error(self) -> SidestreamError:
        """The error again."""
        kind: type[SidestreamError] = getattr(errors, self.kind, SidestreamError)
        return kind(self.message, param=self.param) if issubclass(kind, RequestError) else kind(self.message)


class Submit(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A checked request. Its samples are streams `stream` to `stream + params.n - 1` of this connection.

    prompt      token ids, 32-bit little-endian
    keys        of the prompt's complete blocks, one after another, made under `keys_version`
    params      without stop strings, which are the front end's
    cache_salt  UTF-8, lone surrogates included
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


class End(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """End streams `[stream, stop)` that have not ended, for `reason`: `"abort"`, `"stop"` when a stop string was found,
    `"error"` when the text cannot be made.
    """

    stream: int
    stop: int
    reason: str


class Call(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Ask for `what`: `"metrics"`, `"flush"` or `"reset_cache"`; a `Reply` with this number answers."""

    number: int
    what: str
    timeout_s: float = 0.0


class Count(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Add to one of the engine's counters what a front end has seen."""

    name: str
    value: float
    labels: tuple[str, ...]


class Attach(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Serve one more front end, on the socket whose descriptor comes with this message. From the owner alone."""


class Close(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Let requests go on for `drain_s`, store what is complete, end the process. From the owner alone."""

    drain_s: float


class Start(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The first message to an engine's process: what to load. `config` is `EngineConfig` as plain values."""

    model: str
    config: dict[str, Any]
    timeline: str | None
    check_order: bool
    log_level: int
    log_format: tuple[str, str] | None


class Progress(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """How far the start is: `done` of `total`, 0 of 0 when unknown. `fetching`: it is a download."""

    what: str
    done: int
    total: int
    fetching: bool


class Started(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The engine serves."""

    facts: Facts


class Welcome(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The first frame to a front end."""

    facts: Facts


class Detail(msgspec.Struct, frozen=True, array_like=True):
    """News of a stream that are more than one token. `cached`: prompt tokens found on the device, in host memory, on
    disk.

    logprobs   token id, log-probability, and the likeliest alternatives, for each token
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[tuple[int, float, tuple[tuple[int, float], ...]], ...]
    finish_reason: str | None
    prompt_tokens: int
    cached: tuple[int, int, int]
    error: str | None


class News(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """All news of one commit for one front end, in the order in which they came: entry i is token `tokens[i]` of stream
    `streams[i]`.

    details   by entry: what there is to say beyond one token; then `tokens[i]` is -1
    """

    streams: list[int]
    tokens: list[int]
    details: dict[int, Detail]


class Refused(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The engine did not take the request of streams `[stream, stop)`; nothing more comes of it."""

    stream: int
    stop: int
    failure: Failure


class Status(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The engine's health, told when it changes."""

    status: str
    detail: str


class Snapshot(msgspec.Struct, frozen=True, array_like=True):
    """All metrics: by name, each series' labels and value; of histograms its counts, sum and number of observations."""

    values: dict[str, list[tuple[tuple[str, ...], float]]]
    histograms: dict[str, list[tuple[tuple[str, ...], tuple[list[int], float, int]]]]


class Reply(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer to a `Call`, or to `Close` (number 0)."""

    number: int
    failure: Failure | None = None
    done: bool = True
    snapshot: Snapshot | None = None


ToEngine = Start | Submit | End | Call | Count | Attach | Close
ToClient = Progress | Started | Welcome | News | Refused | Status | Reply

T = TypeVar("T")


class Packer:
    """Numbers messages and packs each into a frame. One thread at a time."""

    def __init__(self) -> None:
        self._encode = msgspec.msgpack.Encoder().encode
        self._number = 0

    def pack(self, message: ToEngine | ToClient) -> bytes:
        """The next frame. Raises InvariantError for a message that is too long to send."""
        body = self._encode(message)
        if len(body) > MOST_FRAME_BYTES:
            raise InvariantError(
                f"a {type(message).__name__} of {len(body)} bytes: a message has at most {MOST_FRAME_BYTES}"
            )
        self._number += 1
        return _HEAD.pack(len(body), self._number & 0xFFFFFFFF) + body


class Unpacker(msgspec.Struct):
    """Messages of one type out of the bytes of one connection."""

    decoder: msgspec.msgpack.Decoder[Any]
    buffer: bytearray = msgspec.field(default_factory=bytearray)
    number: int = 0

    def feed(self, data: bytes) -> Iterator[Any]:
        """The messages that `data` completes. Raises EngineStopped when the frames are not those that were sent, in
        their order.
        """
        buffer, start = self.buffer, 0
        buffer += data
        try:
            while len(buffer) - start >= _HEAD.size:
                length, number = _HEAD.unpack_from(buffer, start)
                if length > MOST_FRAME_BYTES:
                    raise EngineStopped(
                        f"a frame of {length} bytes came, at most {MOST_FRAME_BYTES} are sent: the connection is broken"
                    )
                if len(buffer) - start - _HEAD.size < length:
                    return
                self.number = (self.number + 1) & 0xFFFFFFFF
                if number != self.number:
                    raise EngineStopped(
                        f"frame {number} came in place of frame {self.number}: the connection is broken"
                    )
                body = bytes(memoryview(buffer)[start + _HEAD.size : start + _HEAD.size + length])
                start += _HEAD.size + length
                try:
                    message = self.decoder.decode(body)
                except (
                    Exception
                ) as error:  # msgspec's own, and those of values that check themselves, such as SamplingParams
                    raise EngineStopped(
                        f"a message cannot be read ({error}): both sides must run the same version"
                    ) from error
                yield message
        finally:
            del buffer[:start]


def from_front_end() -> Unpacker:
    """For the engine's side."""
    return Unpacker(msgspec.msgpack.Decoder(ToEngine))


def from_engine() -> Unpacker:
    """For a front end's side."""
    return Unpacker(msgspec.msgpack.Decoder(ToClient))
