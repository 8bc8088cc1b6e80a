"""Arrival times of answers at a client, and the values computed from them: windows, rates, gaps, bursts. Pure.

All times are `time.perf_counter_ns`, which on one machine is the same clock in every process.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from sidestream.cli.bench.serving.reply import Reply
from sidestream.errors import SidestreamError

BURST_MS = 0.2
"""A piece that arrives within this many ms of the previous piece was held back: no engine samples two tokens of one
request in this time.
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one request.

    pieces_ns   arrival time of each piece that has text; for an engine in process, of each token
    text        the whole text; empty if it was not requested
    """

    client: int
    round: int
    sent_ns: int
    pieces_ns: tuple[int, ...]
    ended_ns: int
    tokens: int
    text: str = ""

    @property
    def ttft_ms(self) -> float:
        """Time from the request to the first piece."""
        return (self.pieces_ns[0] - self.sent_ns) / 1e6


@dataclass(frozen=True, slots=True)
class Window:
    """A time span, `(begin_ns, end_ns]`."""

    begin_ns: int
    end_ns: int

    @property
    def seconds(self) -> float:
        """Its length."""
        return (self.end_ns - self.begin_ns) / 1e9


@dataclass(frozen=True, slots=True)
class StepsSoFar:
    """State of an engine's histogram `step_seconds` at some time."""

    at_ns: int
    count: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Measured:
    """Results for one number of clients, from a server or from an engine in process.

    loop     answers of the closed loop
    calm     answers of one more request per client, all sent at once
    begun    state of the `calm` requests when every client had received its first piece; None: unknown
    nearly   state of the `calm` requests when the first answer had nearly ended
    """

    loop: tuple[Answer, ...]
    calm: tuple[Answer, ...]
    begun: StepsSoFar | None = None
    nearly: StepsSoFar | None = None

    @property
    def calm_window(self) -> Window | None:
        """The span in which all clients' requests decode and no prompt is computed; None: there was no such time."""
        if (
            self.begun is None
            or self.nearly is None
            or self.nearly.count <= self.begun.count
            or self.nearly.at_ns <= self.begun.at_ns
        ):
            return None
        return Window(self.begun.at_ns, self.nearly.at_ns)

    @property
    def step_ms(self) -> float | None:
        """Mean time of the engine's steps in `calm_window`."""
        if self.calm_window is None:
            return None
        assert self.begun is not None and self.nearly is not None
        return 1e3 * (self.nearly.seconds - self.begun.seconds) / (self.nearly.count - self.begun.count)


def answer_of(reply: Reply, *, client: int, number: int, sent_ns: int, tokens: int) -> Answer:
    """Read a complete reply of status 200 to a streamed completion of `tokens` tokens.

    Raises SidestreamError with the server's message unless the stream has exactly that many tokens and a regular end.
    """
    events = list(reply.events())
    if not events or events[-1].data != b"[DONE]":
        raise SidestreamError(
            f"a stream ended without [DONE]; its last event: {events[-1].data[:500] if events else b''!r}"
        )
    times, texts, told = list[int](), list[str](), None
    for event in events[:-1]:
        chunk = json.loads(event.data)
        if "error" in chunk:
            raise SidestreamError(f"a stream ended with an error: {event.data[:500]!r}")
        if chunk.get("usage"):
            told = chunk["usage"]["completion_tokens"]
        text = "".join(choice["text"] for choice in chunk["choices"])
        if text:
            times.append(event.time_ns)
            texts.append(text)
    if told != tokens:
        raise SidestreamError(f"the usage of an answer is {told} tokens instead of {tokens}, despite ignore_eos")
    if not times:
        raise SidestreamError(f"an answer of {tokens} tokens has no text: measure a model whose tokens have text")
    return Answer(client, number, sent_ns, tuple(times), events[-1].time_ns, told, "".join(texts))


def full_window(answers: Sequence[Answer]) -> Window:
    """The span in which all clients are busy: from the time when every client's first answer has begun until the first
    client has received its last answer.

    Raises SidestreamError if there is no such span.
    """
    last = max(answer.round for answer in answers)
    begin_ns = max(answer.pieces_ns[0] for answer in answers if answer.round == 0)
    end_ns = min(answer.ended_ns for answer in answers if answer.round == last)
    if end_ns <= begin_ns:
        raise SidestreamError(
            "a client received all its answers before another received its first: use more rounds or fewer clients"
        )
    return Window(begin_ns, end_ns)


def tokens_per_second(answers: Iterable[Answer], window: Window) -> float:
    """Tokens per second that arrived in the window; the tokens of an answer are spread evenly over its pieces."""
    tokens = 0.0
    for answer in answers:
        pieces = bisect_right(answer.pieces_ns, window.end_ns) - bisect_right(answer.pieces_ns, window.begin_ns)
        tokens += answer.tokens * pieces / len(answer.pieces_ns)
    return tokens / window.seconds


def ttfts_ms(answers: Iterable[Answer], window: Window) -> list[float]:
    """TTFT of the requests that were sent in the window."""
    return [answer.ttft_ms for answer in answers if window.begin_ns <= answer.sent_ns < window.end_ns]


def gaps_ms(answers: Iterable[Answer], window: Window) -> list[float]:
    """Times between consecutive pieces of one stream, if both pieces arrived in the window."""
    return list(_gaps(answers, window))


def _gaps(answers: Iterable[Answer], window: Window) -> Iterator[float]:
    for answer in answers:
        times = answer.pieces_ns[
            bisect_left(answer.pieces_ns, window.begin_ns) : bisect_right(answer.pieces_ns, window.end_ns)
        ]
        for before, after in pairwise(times):
            yield (after - before) / 1e6


def burst_share(gaps: Sequence[float]) -> float:
    """Share of pieces that arrived within `BURST_MS` of the previous piece."""
    return sum(gap <= BURST_MS for gap in gaps) / len(gaps)
