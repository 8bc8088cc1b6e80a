"""Frames and messages between front ends and the engine's process: what is sent arrives once and whole, or the
connection ends.
"""

from __future__ import annotations

import inspect
from typing import Any

import msgspec
import pytest

from sidestream import errors
from sidestream.client.messages import (
    Abort,
    Attach,
    Call,
    Close,
    Count,
    EngineInfo,
    Failure,
    OutputDetail,
    Outputs,
    Ping,
    Progress,
    Rejected,
    Reply,
    Snapshot,
    Start,
    Started,
    Status,
    Submit,
    ToClient,
    ToEngine,
    Welcome,
    decoder_of_outputs,
    decoder_of_requests,
)
from sidestream.config import SamplingDefaults, SamplingParams
from sidestream.errors import EngineStopped, InvariantError, RequestError, SidestreamError
from sidestream.processes import frames
from sidestream.processes.frames import FrameDecoder, FrameEncoder

# Every field differs from its default.
PARAMS = SamplingParams(
    temperature=0.5,
    top_k=3,
    top_p=0.9,
    min_p=0.1,
    repetition_penalty=1.1,
    presence_penalty=0.2,
    frequency_penalty=-0.3,
    logit_bias={5: 1.5, 1 << 30: -100.0},
    seed=-(1 << 63),
    stop=("end", "\u00e9\U0001f40b"),
    stop_token_ids=(7, 9),
    include_stop=True,
    max_tokens=11,
    min_tokens=2,
    ignore_eos=True,
    logprobs=4,
    n=3,
    max_drafts=1,
)
FACTS = EngineInfo(
    "1.2.3",
    "/models/whale",
    "whale",
    2048,
    4096,
    16,
    32000,
    64,
    b"\0" * 16,
    1,
    SamplingDefaults({"temperature": 0.5, "top_k": 20}),
    120.0,
    4321,
)
SNAPSHOT = Snapshot({"requests_total": [(("stop",), 2.0)]}, {"ttft_seconds": [((), ([0, 1], 0.25, 1))]})
DETAIL = OutputDetail(
    (3, 4), ((3, -0.5, ((3, -0.5), (8, -1.5))), (4, 0.0, ())), "length", 12, {"device": 4, "host": 8}, None
)
TO_ENGINE: list[Any] = [
    Start(
        "whale",
        {"kv_memory": "8MiB", "offload": {"host": 1 << 40}, "speculative": None},
        "/tmp/timeline",
        True,
        20,
        ("%(message)s", ""),
    ),
    Submit(3, b"\x01\0\0\0", b"k" * 16, 2, PARAMS, (1 << 63) - 1, 100, -(1 << 63), b"salt"),
    Abort(3, 6, "stop"),
    Call(1, "flush", 2.5),
    Count("http_requests_total", 1.0, ("/health", "200")),
    Ping(),
    Attach(),
    Close(30.0),
]
TO_CLIENT: list[Any] = [
    Progress("reading the weights", 1, 2, False),
    Started(FACTS),
    Welcome(FACTS),
    Outputs([1, 2, 1], [17, -1, 18], {1: DETAIL}),
    Rejected(3, 5, Failure("QueueFull", "try again later")),
    Status("failed", "DeviceLost: gone"),
    Ping(),
    Reply(1, None, False, SNAPSHOT),
]


def fed(decoder: FrameDecoder, data: bytes) -> list[Any]:
    return list(decoder.feed(data))


def frames_of(sent: list[Any]) -> list[bytes]:
    encoder = FrameEncoder()
    return [encoder.encode(message) for message in sent]


# ------------------------------------------------------------------ messages


@pytest.mark.parametrize(
    ("sent", "decoder", "kinds"),
    [(TO_ENGINE, decoder_of_requests, ToEngine), (TO_CLIENT, decoder_of_outputs, ToClient)],
)
def test_every_message_arrives_as_it_was_sent(sent: list[Any], decoder: Any, kinds: Any) -> None:
    assert {type(message) for message in sent} == set(kinds.__args__)
    assert fed(decoder(), b"".join(frames_of(sent))) == sent


def test_all_sampling_params_cross_the_border() -> None:
    default = SamplingParams()
    for name in inspect.signature(SamplingParams).parameters:
        assert getattr(PARAMS, name) != getattr(default, name), f"{name} is not tried"
    (message,) = fed(decoder_of_requests(), FrameEncoder().encode(Submit(0, b"", b"", 0, PARAMS, 0, 1, 0, b"")))
    assert message.params == PARAMS
    assert type(message.params.stop) is tuple
    assert message.params.spec(seed=1, eos_ids=(2,)) == PARAMS.spec(seed=1, eos_ids=(2,))


@pytest.mark.parametrize(
    "kind", [kind for _, kind in inspect.getmembers(errors, inspect.isclass)], ids=lambda kind: kind.__name__
)
def test_every_error_is_raised_again_as_itself(kind: type[SidestreamError]) -> None:
    error = (
        kind("n is 9: ask for fewer", param="n") if issubclass(kind, RequestError) else kind("n is 9: ask for fewer")
    )
    failure = Failure.of(error)
    (reply,) = fed(decoder_of_outputs(), FrameEncoder().encode(Reply(1, failure)))
    again = reply.failure.error()
    assert (type(again), str(again)) == (kind, "n is 9: ask for fewer")
    assert getattr(again, "param", None) == ("n" if issubclass(kind, RequestError) else None)


def test_a_foreign_error_names_its_type_in_the_message() -> None:
    again = Failure.of(KeyError("blocks")).error()
    assert (type(again), str(again)) == (SidestreamError, "KeyError: 'blocks'")


def test_an_error_of_an_unknown_kind_keeps_its_message() -> None:
    again = Failure("NewError", "something new").error()
    assert (type(again), str(again)) == (SidestreamError, "something new")


# ------------------------------------------------------------------ frames


def test_a_frame_may_be_cut_at_any_byte() -> None:
    data = b"".join(frames_of(TO_ENGINE))
    for cut in range(len(data) + 1):
        decoder = decoder_of_requests()
        assert fed(decoder, data[:cut]) + fed(decoder, data[cut:]) == TO_ENGINE, cut
        assert not decoder.buffer


def test_frames_may_come_byte_by_byte() -> None:
    decoder, got = decoder_of_outputs(), []
    for byte in b"".join(frames_of(TO_CLIENT)):
        got += fed(decoder, bytes([byte]))
    assert got == TO_CLIENT


def test_messages_before_a_broken_frame_are_taken() -> None:
    first, second = frames_of([Abort(1, 2, "abort"), Abort(2, 3, "abort")])
    messages_of = decoder_of_requests().feed(first + first + second)
    assert next(messages_of) == Abort(1, 2, "abort")
    with pytest.raises(EngineStopped, match="frame 1 came in place of frame 2"):
        next(messages_of)


@pytest.mark.parametrize(
    ("order", "number", "place"),
    [([0, 0], 1, 2), ([0, 2], 3, 2), ([1, 0], 2, 1), ([0, 1, 1], 2, 3), ([0, 2, 1], 3, 2)],
    ids=["doubled", "missing", "first missing", "last doubled", "swapped"],
)
def test_a_frame_out_of_its_place_ends_the_connection(order: list[int], number: int, place: int) -> None:
    frames = frames_of([Abort(0, 1, "abort"), Abort(1, 2, "abort"), Abort(2, 3, "abort")])
    decoder = decoder_of_requests()
    with pytest.raises(
        EngineStopped, match=f"^frame {number} came in place of frame {place}: the connection is broken$"
    ):
        for place_of in order:
            fed(decoder, frames[place_of])


def test_numbers_of_frames_go_round() -> None:
    encoder, decoder = FrameEncoder(), decoder_of_requests()
    encoder._number = decoder.number = 0xFFFFFFFE
    for _ in range(4):
        assert fed(decoder, encoder.encode(Abort(1, 2, "abort"))) == [Abort(1, 2, "abort")]


def test_a_frame_that_is_too_long_is_refused_before_it_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = FrameEncoder().encode(Abort(1, 2, "abort"))
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", len(frame) - 9)
    with pytest.raises(EngineStopped, match=f"a frame has {len(frame) - 8} bytes, but the limit is {len(frame) - 9}"):
        fed(decoder_of_requests(), frame[:8])


def test_a_message_that_is_too_long_is_not_sent_and_takes_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = FrameEncoder()
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 100)
    with pytest.raises(InvariantError, match=r"^a Status of \d+ bytes: a message has at most 100$"):
        encoder.encode(Status("failed", "x" * 101))
    assert fed(decoder_of_outputs(), encoder.encode(Status("ok", ""))) == [Status("ok", "")]


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
        (FrameEncoder().encode(Status("ok", "")), "Invalid value 'Status'"),
        (FrameEncoder().encode(Submit(0, b"", b"", 0, broken_params(), 0, 1, 0, b"")), "temperature is -5"),
    ],
    ids=[
        "no msgpack",
        "empty",
        "unknown tag",
        "wrong type",
        "too few fields",
        "no UTF-8",
        "deep",
        "other direction",
        "refused params",
    ],
)
def test_a_message_that_cannot_be_read_ends_the_connection(frame: bytes, words: str) -> None:
    with pytest.raises(
        EngineStopped, match=rf"(?s)^a message cannot be read \(.*({words}).*\): both sides must run the same version$"
    ):
        fed(decoder_of_requests(), frame)
