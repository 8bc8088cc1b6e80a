"""Arrival times of answers at a client, and the values computed from them: time windows, rates, gaps, bursts. Does no
I/O.

All times are `time.perf_counter_ns`, which on one machine is the same clock in every process.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from bench.serving.reply import Reply
from sidestream.errors import SidestreamError

BURST_MS = 0.2
"""Maximum time between two pieces of a burst, in ms. No engine samples two tokens of one request in this time, so the
server has held the first piece back.
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one request.

    client      number of the client
    round       number of the request among the client's requests
    pieces_ns   arrival times of the pieces that have text; without a server, arrival times of the tokens
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

    @property
    def tpot_ms(self) -> float:
        """Time per output token: from the first piece to the last one, over the tokens behind the first."""
        return (self.pieces_ns[-1] - self.pieces_ns[0]) / 1e6 / max(1, self.tokens - 1)

    @property
    def e2e_ms(self) -> float:
        """Time from the request to the last piece."""
        return (self.pieces_ns[-1] - self.sent_ns) / 1e6


@dataclass(frozen=True, slots=True)
class Window:
    """A time span, `(begin_ns, end_ns]`."""

    begin_ns: int
    end_ns: int

    @property
    def seconds(self) -> float:
        """Length of the window in seconds."""
        return (self.end_ns - self.begin_ns) / 1e9


@dataclass(frozen=True, slots=True)
class StepsSoFar:
    """State of the engine's histogram `step_seconds` at `at_ns`: number of steps and their total seconds."""

    at_ns: int
    count: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Measured:
    """Results for one number of clients, from a server or from an engine without a server.

    loop     answers of the closed loop, in which each client sends its next request when its previous one has ended
    calm     answers of the calm phase: one more request per client, all sent at once
    begun    in the calm phase, the engine's steps until every client had received its first piece; None: unknown
    nearly   in the calm phase, the engine's steps until the first answer had nearly ended; None: unknown
    """

    loop: tuple[Answer, ...]
    calm: tuple[Answer, ...]
    begun: StepsSoFar | None = None
    nearly: StepsSoFar | None = None

    @property
    def calm_window(self) -> Window | None:
        """The time in which all clients' requests decode and no prompt is computed; None: there was no such time."""
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
    """Parse a complete reply with status 200 to a streamed completion of `tokens` tokens.

    Raises SidestreamError with the server's message unless the stream has exactly `tokens` tokens and ends regularly.
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


def whole_run(answers: Iterable[Answer]) -> Window:
    """From the first request sent to the last token received."""
    answers = list(answers)
    return Window(min(answer.sent_ns for answer in answers), max(answer.pieces_ns[-1] for answer in answers))


def steady_window(answers: Sequence[Answer]) -> Window | None:
    """The part of a closed loop in which all clients are busy: from the moment when all clients' first answers have
    begun, to the moment when the first client has received its last answer. It leaves out the burst of first requests
    and the tail. None: there is no such time.
    """
    last = max(answer.round for answer in answers)
    begin_ns = max(answer.pieces_ns[0] for answer in answers if answer.round == 0)
    end_ns = min(answer.ended_ns for answer in answers if answer.round == last)
    return Window(begin_ns, end_ns) if end_ns > begin_ns else None


def tokens_per_second(answers: Iterable[Answer], window: Window) -> float:
    """Tokens per second that arrived in the window. Each piece of an answer counts as an equal share of its tokens."""
    tokens = 0.0
    for answer in answers:
        pieces = bisect_right(answer.pieces_ns, window.end_ns) - bisect_right(answer.pieces_ns, window.begin_ns)
        tokens += answer.tokens * pieces / len(answer.pieces_ns)
    return tokens / window.seconds


def gaps_ms(answers: Iterable[Answer], window: Window) -> list[float]:
    """Times in ms between consecutive pieces of one stream, if both pieces arrived in the window."""
    return list(_gaps(answers, window))


def _gaps(answers: Iterable[Answer], window: Window) -> Iterator[float]:
    for answer in answers:
        times = answer.pieces_ns[
            bisect_left(answer.pieces_ns, window.begin_ns) : bisect_right(answer.pieces_ns, window.end_ns)
        ]
        for before, after in pairwise(times):
            yield (after - before) / 1e6


def burst_share(gaps: Sequence[float]) -> float:
    """Share of `gaps` of at most `BURST_MS`: pieces that arrived in a burst with the previous piece."""
    return sum(gap <= BURST_MS for gap in gaps) / len(gaps)
