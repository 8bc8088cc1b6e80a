"""Requests for benchmarks of a whole engine. An answer holds token ids and their arrival times, but no text."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sidestream.config import SamplingParams
from sidestream.engine import Engine
from sidestream.errors import SidestreamError
from sidestream.types import CachedTokens, Delta

_PATIENCE_S = 300.0


@dataclass(slots=True, eq=False)
class Answer:
    """The tokens of one request and their arrival times by the host's clock."""

    started_s: float
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cached: CachedTokens = field(default_factory=CachedTokens)
    error: str | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    def take(self, delta: Delta) -> None:
        """Called by the engine for each delta."""
        if delta.token_ids:
            self.times.append(time.perf_counter())
            self.tokens.extend(delta.token_ids)
            if delta.logprobs:
                self.logprobs.extend(entry.logprob for entry in delta.logprobs)
        self.cached = delta.cached
        if delta.finish_reason is not None:
            self.error = delta.error
            self.ended.set()

    def wait(self) -> Answer:
        """Wait until the request has ended. Raises SidestreamError if it failed or did not end in time."""
        if not self.ended.wait(_PATIENCE_S):
            raise SidestreamError(f"a request of the benchmark did not end within {_PATIENCE_S:g} s")
        if self.error is not None:
            raise SidestreamError(f"a request of the benchmark failed: {self.error}")
        return self

    def wait_for(self, count: int) -> None:
        """Wait until `count` tokens have arrived. Raises SidestreamError if the request fails or ends before, or after
        `_PATIENCE_S`.
        """
        until_s = time.monotonic() + _PATIENCE_S
        while len(self.times) < count:
            if self.ended.wait(0.001):
                self.wait()
                if len(self.times) < count:
                    raise SidestreamError(f"a request of the benchmark ended after {len(self.times)} of {count} tokens")
            elif time.monotonic() > until_s:
                raise SidestreamError(f"a request of the benchmark has {len(self.times)} of {count} tokens")

    @property
    def ttft_s(self) -> float:
        """Time from the submission to the first token."""
        return self.times[0] - self.started_s


def random_prompts(random: np.random.Generator, vocab_size: int, *, count: int, tokens: int) -> list[list[int]]:
    """Prompts of random token ids below `vocab_size`; none is in a cache."""
    return [[int(token) for token in random.integers(1, vocab_size, tokens)] for _ in range(count)]


def ask(engine: Engine, prompt: Sequence[int], outputs: int, **more: Any) -> Answer:
    """Submit a greedy request for exactly `outputs` tokens; `more`: further fields of SamplingParams."""
    answer = Answer(time.perf_counter())
    engine.submit(
        prompt, SamplingParams(**{"temperature": 0, "max_tokens": outputs, "ignore_eos": True, **more}), answer.take
    )
    return answer


def ask_at_once(engine: Engine, prompts: Sequence[Sequence[int]], outputs: int, **more: Any) -> list[Answer]:
    """Submit all requests between two steps, so that the scheduler sees them together and forms the same batches in
    each run.
    """
    answers: list[Answer] = []
    engine.call(lambda: answers.extend(ask(engine, prompt, outputs, **more) for prompt in prompts))
    return answers
