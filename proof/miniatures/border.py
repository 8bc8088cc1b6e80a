"""Bugs between front ends and an engine in separate processes: lost, duplicated and late messages, and processes that
die. Each function runs one bug on a simulated device, with or without its protection (fix). Streams of the device
represent threads and processes. Frames are packed and parsed by the product's own code.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from proof.miniatures.stage import Miniature, Outcome, finish
from sidestream.client.messages import Outputs, decoder_of_outputs
from sidestream.errors import EngineStopped
from sidestream.processes.frames import FrameDecoder, FrameEncoder
from sidestream_order.sim import SimDevice

_TOKENS = (3, 1, 4, 1)
_OVER = 0
"""The content of the frame that follows the last token."""


class _Channel:
    """The receiving end of one connection in a front end. If `numbered`, it checks frame numbers like the product; else
    it accepts every frame.
    """

    def __init__(self, *, numbered: bool) -> None:
        self._encoder = FrameEncoder()
        self._decoder = decoder_of_outputs()
        self._numbered = numbered
        self.broken = False

    def pack(self, stream: int, token: int) -> bytes:
        """A frame with one token of one stream."""
        return self._encoder.encode(Outputs([stream], [token], {}))

    def read(self, frame: bytes) -> Iterator[tuple[int, int]]:
        """Stream and token of a received frame; nothing after the connection has ended."""
        if self.broken:
            return
        decoder: FrameDecoder = (
            self._decoder if self._numbered else FrameDecoder(self._decoder.decoder, number=_number_of(frame) - 1)
        )
        try:
            for news in decoder.feed(frame):
                yield news.streams[0], news.tokens[0]
        except EngineStopped:
            self.broken = True


def _number_of(frame: bytes) -> int:
    return int.from_bytes(frame[4:8], "little")


def frames_that_two_threads_hand_over(device: SimDevice, protected: bool) -> Outcome:
    """One thread sends new frames, and another thread sends the rest of partly sent frames: a frame may overtake the
    previous frame.

    With frame numbers, the connection ends, and the tokens received so far are a prefix of the answer. Without them,
    the order of the tokens is wrong.
    """
    channel, heard = _Channel(numbered=protected), list[int]()
    threads = [device.stream("engine"), device.stream("reading thread")]

    def arrive(frame: bytes) -> None:
        heard.extend(token for _, token in channel.read(frame))

    sent = [
        threads[at % 2].submit(partial(arrive, channel.pack(0, token)), label=f"frame {at + 1}")
        for at, token in enumerate(_TOKENS)
    ]
    finish(device, *sent)
    return Outcome(tuple(heard), _TOKENS[: len(heard)] if channel.broken else _TOKENS)


def frame_sent_again_after_a_timeout(device: SimDevice, protected: bool) -> Outcome:
    """A sender gets no acknowledgement, and sends its frame again after a timeout. But the first frame was only late,
    so a token arrives twice.
    """
    channel, heard = _Channel(numbered=protected), list[int]()
    connection, timer = device.stream("connection"), device.stream("timer")

    def arrive(frame: bytes) -> None:
        heard.extend(token for _, token in channel.read(frame))

    for token in _TOKENS:
        frame, before = channel.pack(0, token), len(heard)
        arrived = connection.submit(partial(arrive, frame), label="frame")
        patience = timer.submit(lambda: None, label="timeout")
        finish(device, patience)
        if len(heard) == before and not channel.broken:
            arrived = connection.submit(partial(arrive, frame), label="frame again")
        finish(device, arrived)
    return Outcome(tuple(heard), _TOKENS[: len(heard)] if channel.broken else _TOKENS)


def frame_overwritten_before_it_was_read(device: SimDevice, protected: bool) -> Outcome:
    """A buffer for one frame is overwritten before it was read: a token is missing in the answer, without an error."""
    channel, heard, place = _Channel(numbered=protected), list[int](), dict[str, bytes]()
    engine, front_end = device.stream("engine"), device.stream("front end")

    def write(frame: bytes) -> None:
        place["frame"] = frame

    def read() -> None:
        if "frame" in place:
            heard.extend(token for _, token in channel.read(place.pop("frame")))

    for token in _TOKENS:
        written = engine.submit(partial(write, channel.pack(0, token)), label="write")
        looked = front_end.submit(read, label="look")
    finish(device, written, looked)
    for label in ("last look", "check for missing frames"):
        finish(device, front_end.submit(read, label=label))
        write(channel.pack(0, _OVER))
    tokens = tuple(token for token in heard if token != _OVER)
    return Outcome(tokens, _TOKENS[: len(tokens)] if channel.broken else _TOKENS)


def stream_number_used_again(device: SimDevice, protected: bool) -> Outcome:
    """A client aborts its request while a token is in flight. The next request gets the same stream number, and
    receives this token.
    """
    channel, answers = _Channel(numbered=True), dict[int, list[int]]()
    engine = device.stream("engine")

    def arrive(frame: bytes) -> None:
        for stream, token in channel.read(frame):
            if stream in answers:
                answers[stream].append(token)

    answers[0] = []
    late = engine.submit(partial(arrive, channel.pack(0, 7)), label="token of the first request")
    del answers[0]  # the client has left, but the engine does not know yet
    second = 1 if protected else 0
    answers[second] = []
    own = engine.submit(partial(arrive, channel.pack(second, 9)), label="token of the second request")
    finish(device, late, own)
    return Outcome(tuple(answers[second]), (9,))


def abort_that_crosses_the_finish(device: SimDevice, protected: bool) -> Outcome:
    """An abort waits in a separate queue while its request finishes, and a new request gets the name of the old
    request: the abort ends the new request.
    """
    aborts, engine = device.stream("aborts"), device.stream("engine")
    running, told = set[int](), list[int]()

    def abort(name: int) -> None:
        running.discard(name)  # no effect if the request has ended

    def token(name: int, value: int, *, last: bool) -> None:
        if name in running:
            told.append(value)
            if last:
                running.discard(name)

    running.add(0)
    engine.submit(partial(token, 0, 7, last=True), label="finish of the first request")
    aborted = aborts.submit(partial(abort, 0), label="abort of the first request")
    second = 1 if protected else 0
    begun = engine.submit(lambda: running.add(second), label="the second request begins")
    for value in (8, 9):
        step = engine.submit(partial(token, second, value, last=value == 9), label="token of the second request")
    finish(device, aborted, begun, step)
    return Outcome(tuple(value for value in told if value != 7), (8, 9))


class _Place:
    """The slot of a front end. Its receiver changes when the front end dies."""

    def __init__(self) -> None:
        self.listener: list[int] = []


def place_of_a_front_end_that_has_died(device: SimDevice, protected: bool) -> Outcome:
    """A front end dies, and another takes its slot. Messages are addressed to the slot, so the new front end receives
    answers for the old one.
    """
    engine, place = device.stream("engine"), _Place()
    first = place.listener

    def tell(sink: Any, token: int) -> None:
        (sink.listener if isinstance(sink, _Place) else sink).append(token)

    sink = first if protected else place
    news = engine.submit(partial(tell, sink, 7), label="token for the first front end")
    second = place.listener = []
    own = engine.submit(partial(tell, second if protected else place, 9), label="token for the second front end")
    finish(device, news, own)
    return Outcome(tuple(second), (9,))


def requests_of_a_process_that_has_gone(device: SimDevice, protected: bool) -> Outcome:
    """A front end dies between its request and the reply with the request's name. The clean-up does not know the name,
    so the request is never removed.
    """
    reading, engine = device.stream("reading thread"), device.stream("engine")
    names, running = list[int](), set[int]()
    taking = reading if protected else engine
    taken = taking.submit(lambda: running.add(42), label="the engine takes the request")
    named = taking.submit(lambda: names.append(42), label="its name comes back")
    gone = reading.submit(lambda: running.difference_update(names), label="the front end has died")
    finish(device, taken, named, gone)
    return Outcome(leaked=len(running))


def news_for_a_reader_that_does_not_read(device: SimDevice, protected: bool) -> Outcome:
    """Messages for a reader are queued without a limit, so a reader that never reads exhausts the memory."""
    engine, reader = device.stream("engine"), device.stream("reader")
    bound, unread, most = 2, list[int](), [0]
    cut_off = [False]

    def tell(token: int) -> None:
        if protected and len(unread) >= bound:
            cut_off[0] = True
        if not cut_off[0]:
            unread.append(token)
        most[0] = max(most[0], len(unread))

    for token in range(16):
        told = engine.submit(partial(tell, token), label="token")
        read = reader.submit(unread.clear, label="read")
    finish(device, told, read)
    return Outcome(late=(f"{most[0]} messages wait for one reader, the bound is {bound}",) if most[0] > bound else ())


_NUMBERED = "Frames are numbered: an unexpected number ends the connection."

BORDER = (
    Miniature("frames that two threads hand over", "H32", _NUMBERED, frames_that_two_threads_hand_over),
    Miniature("frame sent again after a timeout", "H32", _NUMBERED, frame_sent_again_after_a_timeout),
    Miniature("frame overwritten before it was read", "H32", _NUMBERED, frame_overwritten_before_it_was_read),
    Miniature("stream number used again", "H32", "No number is used twice on a connection.", stream_number_used_again),
    Miniature(
        "abort that crosses the finish",
        "H32",
        "Request names are never reused.",
        abort_that_crosses_the_finish,
    ),
    Miniature(
        "place of a front end that has died",
        "H34",
        "Replies go to the connection that sent the request.",
        place_of_a_front_end_that_has_died,
    ),
    Miniature(
        "requests of a process that has gone",
        "H34",
        "One thread submits and cleans up.",
        requests_of_a_process_that_has_gone,
    ),
    Miniature(
        "outputs for a reader that does not read",
        "H35",
        "Above a bound, the reader's request is aborted.",
        news_for_a_reader_that_does_not_read,
    ),
)
