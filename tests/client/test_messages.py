"""Frames and messages between front ends and the engine's process: what is sent arrives once and whole, or the
connection ends.
"""

from __future__ import annotations

import inspect
from typing import Any

import msgspec
import pytest

from sidestream import errors
from sidestream.client import messages
from sidestream.config import CacheOptions, ReasoningMarks, SamplingDefaults, SamplingParams, StructuredOutputs
from sidestream.errors import EngineStopped, InvariantError, RequestError, SidestreamError
from sidestream.processes import frames
from sidestream.processes.frames import FrameDecoder, FrameEncoder
from sidestream.types import CachedTokens, Delta, TokenLogprob
from sidestream_kv.metrics import MetricsSnapshot
from sidestream_kv.metrics.counters import HistogramValue

# Every field differs from its default.
PARAMS = SamplingParams(
    temperature=0.5,
    top_k=3,
    top_p=0.9,
    min_p=0.1,
    typical_p=0.7,
    repetition_penalty=1.1,
    presence_penalty=0.2,
    frequency_penalty=-0.3,
    logit_bias={5: 1.5, 1 << 30: -100.0},
    seed=-(1 << 63),
    stop=("end", "\u00e9\U0001f40b"),
    stop_token_ids=(7, 9),
    include_stop=True,
    skip_special_tokens=False,
    truncate_prompt_tokens=9,
    prompt_logprobs=2,
    thinking_token_budget=5,
    reasoning=ReasoningMarks((3,), (4, 5), True),
    max_tokens=11,
    min_tokens=2,
    ignore_eos=True,
    logprobs=4,
    n=3,
    max_drafts=1,
    cache=CacheOptions(9, 8, ("disk",), "session", 2.5, 60.0),
    structured_outputs=StructuredOutputs(json={"type": "object"}, whitespace_pattern=" "),
    allowed_token_ids=(1, 2),
    bad_words=("no",),
    bad_word_ids=((3, 4),),
    adapter="sql",
)
DEFAULTS = SamplingDefaults({"temperature": 0.5, "top_k": 20})
SIZES = (2048, 4096, 16, 32000, 64)
FACTS = messages.EngineInfo("1.2.3", "/models/whale", "whale", *SIZES, b"\0" * 16, 1, DEFAULTS, 120.0, 4321)
SNAPSHOT = MetricsSnapshot(
    {"requests_total": {("stop",): 2.0}}, {"ttft_seconds": {(): HistogramValue([0, 1], 0.25, 1)}}
)
DETAIL = Delta(
    1,
    "",
    (3, 4),
    (TokenLogprob(3, -0.5, ((3, -0.5), (8, -1.5))), TokenLogprob(4, 0.0, ())),
    "length",
    12,
    CachedTokens(device=4, host=8),
    None,
    (TokenLogprob(5, -2.0, ((6, -1.0),), 2),),
    0.25,
)
CONFIG = {"kv_memory": "8MiB", "offload": {"host": 1 << 40}, "speculative": None}
TO_ENGINE: list[Any] = [
    messages.Start("whale", CONFIG, "/tmp/timeline", True, 20, ("%(message)s", "")),
    messages.Submit(3, b"\x01\0\0\0", b"k" * 16, 2, PARAMS, (1 << 63) - 1, 100, -(1 << 63), b"salt", "job"),
    messages.Abort(3, 6, "stop"),
    messages.Call(1, "flush", 2.5),
    messages.Count("http_requests_total", 1.0, ("/health", "200")),
    messages.Ping(),
    messages.Attach(),
    messages.Close(30.0),
]
TO_CLIENT: list[Any] = [
    messages.Progress("reading the weights", 1, 2, False),
    messages.Started(FACTS),
    messages.Welcome(FACTS),
    messages.Outputs([1, 2, 1], [17, -1, 18], {1: DETAIL}),
    messages.Rejected(3, 5, messages.Failure("QueueFull", "try again later")),
    messages.Status("failed", "DeviceLost: gone"),
    messages.Ping(),
    messages.Reply(1, None, SNAPSHOT, {"device": 3}),
]


def fed(decoder: FrameDecoder, data: bytes) -> list[Any]:
    return list(decoder.feed(data))


def frames_of(sent: list[Any]) -> list[bytes]:
    encoder = FrameEncoder()
    return [encoder.encode(message) for message in sent]


# ------------------------------------------------------------------ messages


@pytest.mark.parametrize(
    ("sent", "decoder", "kinds"),
    [
        (TO_ENGINE, messages.decoder_of_requests, messages.ToEngine),
        (TO_CLIENT, messages.decoder_of_outputs, messages.ToClient),
    ],
)
def test_every_message_survives_encoding_and_decoding(sent: list[Any], decoder: Any, kinds: Any) -> None:
    assert {type(message) for message in sent} == set(kinds.__args__)
    assert fed(decoder(), b"".join(frames_of(sent))) == sent


def test_all_sampling_params_cross_the_border() -> None:
    default = SamplingParams()
    for name in inspect.signature(SamplingParams).parameters:
        assert getattr(PARAMS, name) != getattr(default, name), f"{name} is not tried"
    (message,) = fed(
        messages.decoder_of_requests(), FrameEncoder().encode(messages.Submit(0, b"", b"", 0, PARAMS, 0, 1, 0, b""))
    )
    assert message.params == PARAMS
    assert type(message.params.stop) is tuple
    assert message.params.spec(seed=1, eos_ids=(2,)) == PARAMS.spec(seed=1, eos_ids=(2,))


def test_every_error_is_raised_again_as_itself() -> None:
    for _, kind in inspect.getmembers(errors, inspect.isclass):
        named = {"param": "n"} if issubclass(kind, RequestError) else {}
        failure = messages.Failure.of(kind("n is 9: ask for fewer", **named))
        (reply,) = fed(messages.decoder_of_outputs(), FrameEncoder().encode(messages.Reply(1, failure)))
        again = reply.failure.error()
        assert (type(again), str(again)) == (kind, "n is 9: ask for fewer")
        assert getattr(again, "param", None) == named.get("param")


def test_a_foreign_error_names_its_type_in_the_message() -> None:
    again = messages.Failure.of(KeyError("blocks")).error()
    assert (type(again), str(again)) == (SidestreamError, "KeyError: 'blocks'")


def test_an_error_of_an_unknown_kind_keeps_its_message() -> None:
    again = messages.Failure("NewError", "something new").error()
    assert (type(again), str(again)) == (SidestreamError, "something new")


# ------------------------------------------------------------------ frames


def test_a_frame_may_be_cut_at_any_byte() -> None:
    data = b"".join(frames_of(TO_ENGINE))
    for cut in range(len(data) + 1):
        decoder = messages.decoder_of_requests()
        assert fed(decoder, data[:cut]) + fed(decoder, data[cut:]) == TO_ENGINE, cut
        assert not decoder.buffer


def test_frames_may_arrive_byte_by_byte() -> None:
    decoder, got = messages.decoder_of_outputs(), []
    for byte in b"".join(frames_of(TO_CLIENT)):
        got += fed(decoder, bytes([byte]))
    assert got == TO_CLIENT


def test_messages_before_a_broken_frame_are_received() -> None:
    first, second = frames_of([messages.Abort(1, 2, "abort"), messages.Abort(2, 3, "abort")])
    messages_of = messages.decoder_of_requests().feed(first + first + second)
    assert next(messages_of) == messages.Abort(1, 2, "abort")
    with pytest.raises(EngineStopped, match="frame 1 came in place of frame 2"):
        next(messages_of)


@pytest.mark.parametrize(
    ("order", "number", "place"),
    [([0, 0], 1, 2), ([0, 2], 3, 2), ([1, 0], 2, 1), ([0, 1, 1], 2, 3), ([0, 2, 1], 3, 2)],
    ids=["doubled", "missing", "first missing", "last doubled", "swapped"],
)
def test_a_frame_out_of_its_place_ends_the_connection(order: list[int], number: int, place: int) -> None:
    frames = frames_of([messages.Abort(0, 1, "abort"), messages.Abort(1, 2, "abort"), messages.Abort(2, 3, "abort")])
    decoder = messages.decoder_of_requests()
    with pytest.raises(
        EngineStopped, match=f"^frame {number} came in place of frame {place}: the connection is broken$"
    ):
        for place_of in order:
            fed(decoder, frames[place_of])


def test_numbers_of_frames_go_round() -> None:
    encoder, decoder = FrameEncoder(), messages.decoder_of_requests()
    encoder._number = decoder.number = 0xFFFFFFFE
    for _ in range(4):
        assert fed(decoder, encoder.encode(messages.Abort(1, 2, "abort"))) == [messages.Abort(1, 2, "abort")]


def test_a_too_long_frame_is_refused_before_it_is_received(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = FrameEncoder().encode(messages.Abort(1, 2, "abort"))
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", len(frame) - 9)
    with pytest.raises(EngineStopped, match=f"a frame has {len(frame) - 8} bytes, but the limit is {len(frame) - 9}"):
        fed(messages.decoder_of_requests(), frame[:8])


def test_a_message_that_is_too_long_is_not_sent_and_takes_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = FrameEncoder()
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 100)
    with pytest.raises(InvariantError, match=r"^a Status of \d+ bytes: a message has at most 100$"):
        encoder.encode(messages.Status("failed", "x" * 101))
    assert fed(messages.decoder_of_outputs(), encoder.encode(messages.Status("ok", ""))) == [messages.Status("ok", "")]


def broken_params() -> SamplingParams:
    params = SamplingParams()
    object.__setattr__(params, "temperature", -5.0)
    return params


def frame_of(body: bytes) -> bytes:
    return frames._HEAD.pack(len(body), 1) + body


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (frame_of(b"\xc1"), "malformed"),
        (frame_of(b""), "truncated"),
        (frame_of(msgspec.msgpack.encode(["Sink", 1])), "Invalid value 'Sink'"),
        (frame_of(msgspec.msgpack.encode(["Abort", 1, "two", "abort"])), "Expected `int`, got `str`"),
        (frame_of(msgspec.msgpack.encode(["Abort", 1])), "at least"),
        (frame_of(b"\x94\xa5Abort\x01\x02\xa2\xff\xff"), "utf-8|UTF-8"),
        (frame_of(b"\x91" * 100_000), "recursion|array|Expected"),
        (FrameEncoder().encode(messages.Status("ok", "")), "Invalid value 'Status'"),
        (FrameEncoder().encode(messages.Submit(0, b"", b"", 0, broken_params(), 0, 1, 0, b"")), "temperature is -5"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_message_that_cannot_be_read_ends_the_connection(frame: bytes, words: str) -> None:
    with pytest.raises(
        EngineStopped, match=rf"(?s)^a message cannot be read \(.*({words}).*\): both sides must run the same version$"
    ):
        fed(messages.decoder_of_requests(), frame)
