"""Front ends and an engine in processes of their own: messages that are lost, doubled or late, and processes that go.

Streams of the device stand for threads and processes. Frames are packed and unpacked by the code that does it in
earnest.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from sidestream.client.messages import FrameDecoder, FrameEncoder, Outputs, decoder_of_outputs
from sidestream.device.sim import SimDevice
from sidestream.errors import EngineStopped
from sidestream.testing.miniatures.stage import Miniature, Outcome, finish

_TOKENS = (3, 1, 4, 1)
_OVER = 0
"""The frame behind the last token."""


class _Channel:
    """What a front end hears on one connection. `numbered`: as in earnest; else each frame is read as it comes."""

    def __init__(self, *, numbered: bool) -> None:
        self._encoder = FrameEncoder()
        self._decoder = decoder_of_outputs()
        self._numbered = numbered
        self.broken = False

    def pack(self, stream: int, token: int) -> bytes:
        """A frame that says one token of one stream."""
        return self._encoder.encode(Outputs([stream], [token], {}))

    def read(self, frame: bytes) -> Iterator[tuple[int, int]]:
        """Stream and token of a frame that has come; nothing more once the connection has ended."""
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
    """One thread sends new frames, another one the rest of earlier ones: a frame may overtake the one before it.

    With numbers the connection ends, and what came by then is a beginning of the answer; without them the tokens change
    places.
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
    """A sender that has heard of no arrival in time sends its frame again, though the first one was only late: a token
    comes twice.
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
    """A place for one frame is written again before the reader came: the answer lacks a token, and nothing says so."""
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
    for label in ("last look", "look behind the last frame"):
        finish(device, front_end.submit(read, label=label))
        write(channel.pack(0, _OVER))
    tokens = tuple(token for token in heard if token != _OVER)
    return Outcome(tokens, _TOKENS[: len(tokens)] if channel.broken else _TOKENS)


def stream_number_used_again(device: SimDevice, protected: bool) -> Outcome:
    """A client ends its request while a token of it is on its way. The next request gets the number of the ended one,
    and its token.
    """
    channel, answers = _Channel(numbered=True), dict[int, list[int]]()
    engine = device.stream("engine")

    def arrive(frame: bytes) -> None:
        for stream, token in channel.read(frame):
            if stream in answers:
                answers[stream].append(token)

    answers[0] = []
    late = engine.submit(partial(arrive, channel.pack(0, 7)), label="token of the first request")
    del answers[0]  # its client has gone; the engine hears of it later
    second = 1 if protected else 0
    answers[second] = []
    own = engine.submit(partial(arrive, channel.pack(second, 9)), label="token of the second request")
    finish(device, late, own)
    return Outcome(tuple(answers[second]), (9,))


def abort_that_crosses_the_finish(device: SimDevice, protected: bool) -> Outcome:
    """An abort waits in a queue of its own while its request finishes and the row's name goes to the next request: it
    ends that one.
    """
    aborts, engine = device.stream("aborts"), device.stream("engine")
    running, told = set[int](), list[int]()

    def abort(name: int) -> None:
        running.discard(name)  # harmless for those that have ended

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
    """Where a front end sits: who listens there changes when one dies."""

    def __init__(self) -> None:
        self.listener: list[int] = []


def place_of_a_front_end_that_has_died(device: SimDevice, protected: bool) -> Outcome:
    """A front end dies, and another one sits down in its place. News are sent to the place: the new one hears answers
    of the old one.
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
    """A front end dies between its request and the answer that names it: whoever tidies up finds no name, and the
    request stays.
    """
    reading, engine = device.stream("reading thread"), device.stream("engine")
    names, running = list[int](), set[int]()
    taking = reading if protected else engine
    taken = taking.submit(lambda: running.add(42), label="the engine takes the request")
    named = taking.submit(lambda: names.append(42), label="its name comes back")
    gone = reading.submit(lambda: running.difference_update(names), label="the front end has gone")
    finish(device, taken, named, gone)
    return Outcome(leaked=len(running))


def news_for_a_reader_that_does_not_read(device: SimDevice, protected: bool) -> Outcome:
    """News are kept for a reader until it reads, without a bound: one that does not takes the memory of all."""
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
    return Outcome(late=(f"{most[0]} news wait for one reader, the bound is {bound}",) if most[0] > bound else ())


_NUMBERED = "Frames are numbered: one that is not the next ends the connection."

BORDER = (
    Miniature("frames that two threads hand over", "H32", _NUMBERED, frames_that_two_threads_hand_over),
    Miniature("frame sent again after a timeout", "H32", _NUMBERED, frame_sent_again_after_a_timeout),
    Miniature("frame overwritten before it was read", "H32", _NUMBERED, frame_overwritten_before_it_was_read),
    Miniature("stream number used again", "H32", "No number is used twice on a connection.", stream_number_used_again),
    Miniature(
        "abort that crosses the finish",
        "H32",
        "A request's name is never given to another one.",
        abort_that_crosses_the_finish,
    ),
    Miniature(
        "place of a front end that has died",
        "H34",
        "News go to the connection that asked.",
        place_of_a_front_end_that_has_died,
    ),
    Miniature(
        "requests of a process that has gone",
        "H34",
        "The thread that submits is the one that tidies up.",
        requests_of_a_process_that_has_gone,
    ),
    Miniature(
        "news for a reader that does not read",
        "H35",
        "Past a bound, its request is aborted.",
        news_for_a_reader_that_does_not_read,
    ),
)
