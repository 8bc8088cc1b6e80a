"""Sends the deltas (new tokens) of each unfinished sample to its client, and ends samples. Engine thread only.

Knows nothing about blocks, steps or text.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sidestream.engine.inbox import ServingState
from sidestream.engine.parts import Parts
from sidestream.schedule.request import Request
from sidestream.schedule.scheduler import RowOutput
from sidestream.types import CANCELLED, BatchPlan, CachedTokens, Delta, RowResult, TokenLogprob
from sidestream_kv.types import RequestId

logger = logging.getLogger(__name__)

Sink = Callable[[Delta], None]
"""Function that the engine thread calls with each delta of a request. It must not block. If it raises, its sample is
aborted and it gets no more deltas.
"""


class TokenColumns(NamedTuple):
    """Where a client with many samples gets their single tokens, instead of a delta for each: `tokens[i]` is of stream
    `streams[i]`. Its sinks get only the first delta of each sample, the last one, and deltas with log-probabilities or
    with several tokens. The engine thread appends to both lists, and the client clears them after each step.

    first   stream of a request's first sample; those of its other samples follow
    """

    streams: list[int]
    tokens: list[int]
    first: int = 0


_NOT_CACHED = CachedTokens()


@dataclass(frozen=True, slots=True)
class Handle:
    """The samples of one submitted request. `Engine.abort` takes it."""

    request_ids: tuple[RequestId, ...]

    def sample(self, index: int) -> Handle:
        """The sample with this `Delta.index`."""
        return Handle((self.request_ids[index],))


class OutputStream:
    """The deltas of one sample.

    began_s  time when the first step with tokens of the sample was launched; None: it was not
    queue_s  time until then, until a delta has it
    is_new   whether no token was sent yet
    last_s   time when the last tokens were sent; before the first token, the time of arrival
    """

    def __init__(
        self, request: Request, *, index: int, sink: Sink, arrival_s: float, columns: TokenColumns | None = None
    ) -> None:
        """`columns`: where single tokens go; None: to `sink`."""
        self.request = request
        self.arrival_s = arrival_s
        self.began_s: float | None = None
        self.queue_s: float | None = None
        self.is_new = True
        self.last_s = arrival_s
        self._index = index
        self._prompt_tokens = len(request.prompt)
        self._prompt_logprobs: tuple[TokenLogprob, ...] = ()  # until the first delta
        self._sink = sink
        self._columns = columns

    def delta_of(self, result: RowResult, count: int, finish_reason: str | None) -> Delta:
        """The delta with the first `count` tokens of a step's result."""
        token_ids, logprobs, of_prompt = result.token_ids, result.logprobs, self._prompt_logprobs
        if count < len(token_ids):
            token_ids, logprobs = token_ids[:count], logprobs[:count]
        if of_prompt:
            self._prompt_logprobs = ()
        cached = self.request.cached or _NOT_CACHED
        queue_s, self.queue_s = self.queue_s, None
        prompt_tokens = self._prompt_tokens
        return Delta(
            self._index, "", token_ids, logprobs, finish_reason, prompt_tokens, cached, None, of_prompt, queue_s
        )

    def add_prompt_logprobs(self, start: int, logprobs: Iterable[TokenLogprob]) -> None:
        """Add those of one chunk of the prompt, which begins at position `start`. A request that was preempted computes
        its prompt again from position 0.
        """
        if not start:  # rule: preempted-request-drops-log-probabilities-of-its-prompt
            self._prompt_logprobs = ()
        self._prompt_logprobs = (*self._prompt_logprobs, *logprobs)

    def send_token(self, token_id: int) -> bool:
        """Give the client a single token, which is not its first one and not its last. False if its sink raised."""
        if self._columns is None:
            cached = self.request.cached or _NOT_CACHED
            return self.send(Delta(self._index, "", (token_id,), (), None, self._prompt_tokens, cached))
        self._columns.streams.append(self._columns.first + self._index)
        self._columns.tokens.append(token_id)
        return True

    def send(self, delta: Delta) -> bool:
        """Give the delta to the client. False if its sink raised."""
        try:
            self._sink(delta)
        except BaseException:  # no error of a client may end the engine
            logger.exception("request %d: its sink raised: the request is aborted", self.request.id)
            return False
        return True

    def end(self, reason: str, error: str | None = None) -> None:
        """Send the last delta, without tokens, of a sample that ends for another reason than a token."""
        cached = self.request.cached or _NOT_CACHED
        self.send(Delta(self._index, "", (), (), reason, self._prompt_tokens, cached, error))


@dataclass(frozen=True, slots=True)
class Ending:
    """A sample that ends with the commit of a step.

    last   the sample's last delta, if a token ended the sample; else None
    sent   False: the sample's sink raised
    """

    stream: OutputStream
    last: Delta | None
    sent: bool


class OutputStreams:
    """The output streams of all unfinished samples.

    Invariants:
    - A sample's stream, its request in the scheduler and its place in the count of unfinished samples begin and end
      together.
    - The scheduler has released a request before its client gets the last delta. So when a client sees the end, the
      request uses no resources any more (hazard H24).
    """

    def __init__(self, parts: Parts, serving: ServingState, *, on_end: Callable[[OutputStream, float], None]) -> None:
        """`on_end`: called with each sample that ends, and the time."""
        self._scheduler, self._metrics, self._clock = parts.scheduler, parts.metrics, parts.device.now
        self._serving = serving
        self._on_end = on_end
        self._by_id: dict[RequestId, OutputStream] = {}
        self._deliveries: tuple[Callable[[], None], ...] = ()

    def __len__(self) -> int:
        """Unfinished samples."""
        return len(self._by_id)

    def unfinished(self) -> list[OutputStream]:
        """The streams. Callable from any thread."""
        return list(self._by_id.values())

    def on_outputs(self, deliver: Callable[[], None]) -> None:
        """Register a function that `deliver_outputs` calls after each step. A sink that collects deltas sends them
        then.
        """
        self._deliveries = (*self._deliveries, deliver)

    def deliver_outputs(self) -> None:
        """Call the registered functions, so that collected deltas are sent."""
        for deliver in self._deliveries:
            deliver()

    def start(self, streams: Iterable[OutputStream]) -> None:
        """Submit new requests to the scheduler."""
        for stream in streams:
            self._by_id[stream.request.id] = stream
            self._scheduler.submit(stream.request)
            self._metrics.inc("prompt_tokens_total", len(stream.request.prompt))

    def count_begun(self, batch: BatchPlan) -> None:
        """Measure how long the samples that begin with this batch have waited for their first step."""
        columns = batch.columns
        if not any(columns.begin):  # nearly always
            return
        now_s = self._clock()
        for request_id, begin in zip(columns.request_id, columns.begin, strict=True):
            stream = None if begin is None else self._by_id.get(request_id)
            if stream is not None and stream.began_s is None:  # else it resumes after a preemption
                stream.began_s, stream.queue_s = now_s, now_s - stream.arrival_s
                self._metrics.observe("queue_seconds", stream.queue_s)

    # ------------------------------------------------------------------ tokens of a commit

    def add_prompt_logprobs(self, request_id: RequestId, start: int, logprobs: Iterable[TokenLogprob]) -> None:
        """See `OutputStream.add_prompt_logprobs`. Does nothing for a sample that has ended."""
        if (stream := self._by_id.get(request_id)) is not None:
            stream.add_prompt_logprobs(start, logprobs)

    def send(
        self, outputs: Sequence[RowOutput], going: Sequence[Request] = (), tokens: Sequence[int] = ()
    ) -> list[Ending]:
        """Send tokens to the clients of samples that continue, and measure how long each client waited for its tokens:
        `tokens` are those of `going`, one for each. Returns the samples that end, for `finish`. Hot code: it handles
        every row of every step.
        """
        streams, now_s = self._by_id, self._clock()
        endings: list[Ending] = []
        firsts: dict[float, int] = {}
        others: dict[float, int] = {}  # few different times: nearly all clients have waited since the same commit
        continuing = [streams[request.id] for request in going]
        lasts = [stream.last_s for stream in continuing]
        for last_s in set(lasts):
            others[now_s - last_s] = lasts.count(last_s)
        for stream, token in zip(continuing, tokens, strict=True):
            stream.last_s = now_s
            if not stream.send_token(token):
                endings.append(Ending(stream, None, sent=False))
        for request, result, count, finish_reason in outputs:
            stream, last, sent = streams[request.id], None, True
            if count:
                wait_s, waits = (now_s - stream.last_s) / count, firsts if stream.is_new else others
                waits[wait_s], stream.last_s = waits.get(wait_s, 0) + count, now_s
                is_single = count == 1 and finish_reason is None and not result.logprobs
                if is_single and not stream.is_new:  # rule: first-output-of-a-stream-has-the-prompts-counts
                    sent = stream.send_token(result.token_ids[0])
                else:
                    stream.is_new, delta = False, stream.delta_of(result, count, finish_reason)
                    if finish_reason is None:
                        sent = stream.send(delta)
                    else:
                        last = delta
            if finish_reason is not None or not sent or not result.finite:  # rule: non-finite-logits-end-their-request
                endings.append(Ending(stream, last, sent))
        self._metrics.inc("output_tokens_total", sum(firsts.values()) + sum(others.values()))
        self._metrics.observe_all("ttft_seconds", firsts)
        self._metrics.observe_all("itl_seconds", others)
        return endings

    def finish(self, endings: Iterable[Ending]) -> None:
        """End these samples, and send their last deltas."""
        for ending in endings:
            stream, last = ending.stream, ending.last
            if last is not None and last.finish_reason is not None:
                self._close(stream.request, last.finish_reason)  # rule: request-ends-before-its-client-is-notified
                stream.send(last)
            elif ending.sent:
                grammar = stream.request.grammar
                known = None if grammar is None else grammar.failure
                error = known or "the model's logits are not finite, or every token was forbidden"
                self.end_sample(stream.request.id, "error", error)
            else:
                self._close(stream.request, "abort")

    # ------------------------------------------------------------------ other ends

    def end_sample(self, request_id: RequestId, reason: str, error: str | None = None) -> None:
        """End a sample for another reason than a token. Does nothing if the sample has ended already."""
        stream = self._by_id.get(request_id)
        if stream is not None:
            self._close(stream.request, reason)  # rule: aborted-request-ends-before-its-client-is-notified
            stream.end(reason, error)

    def abort(self, handle: Handle, reason: str) -> None:
        """End the samples of a handle that have not ended."""
        for request_id in handle.request_ids:
            self.end_sample(request_id, reason)  # rule: aborted-request-ends

    def cancel(self, name: str) -> int:
        """End the samples of all requests with this name, or with this name and a number behind a space. Returns their
        number.
        """
        ids = [stream.request.id for stream in self._by_id.values() if stream.request.name.partition(" ")[0] == name]
        for request_id in ids:
            self.end_sample(request_id, "abort", CANCELLED)
        return len(ids)

    def abort_all(self) -> None:
        """End every sample."""
        for request_id in list(self._by_id):
            self.end_sample(request_id, "abort")  # rule: requests-end-with-the-engine

    def fail_all(self, error: BaseException) -> None:
        """End every sample with the engine's error. Does not use the scheduler, which may be broken."""
        for stream in self._by_id.values():
            stream.end("error", f"the engine failed: {error}")
            self._metrics.inc("requests_total", 1, "error")
        self._by_id.clear()
        self._serving.release_all()

    def _close(self, request: Request, reason: str) -> None:
        self._scheduler.finish(request, reason)
        stream, now_s = self._by_id.pop(request.id), self._clock()
        self._on_end(stream, now_s)
        self._serving.release()
        if reason in ("stop", "length"):
            self._metrics.observe("e2e_seconds", now_s - stream.arrival_s)
        self._metrics.inc("requests_total", 1, reason)
        if request.cached is not None:
            for tier, count in request.cached.by_tier.items():
                self._metrics.inc("cached_tokens_total", count, tier)
