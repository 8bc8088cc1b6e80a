"""What benchmarks of a whole engine ask it for: prompts of random tokens, answers with the host's clock, and no
text.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sidestream.config import SamplingParams
from sidestream.engine import Engine
from sidestream.errors import SidestreamError
from sidestream.types import CachedTokens, Delta

_PATIENCE_S = 300.0


@dataclass(slots=True, eq=False)
class Answer:
    """One request's news, with the host's clock."""

    started_s: float
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cached: CachedTokens = field(default_factory=CachedTokens)
    error: str | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    def take(self, delta: Delta) -> None:
        """The engine's sink."""
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
        """Until it has ended. Raises SidestreamError if it ended badly, or not in time."""
        if not self.ended.wait(_PATIENCE_S):
            raise SidestreamError(f"a request of the benchmark did not end within {_PATIENCE_S:g} s")
        if self.error is not None:
            raise SidestreamError(f"a request of the benchmark failed: {self.error}")
        return self

    @property
    def ttft_s(self) -> float:
        """From the question to the first token."""
        return self.times[0] - self.started_s


def ask(engine: Engine, prompt: Sequence[int], outputs: int, **more: Any) -> Answer:
    """Greedy, to the last of so many tokens; `more` of what a request may ask for."""
    answer = Answer(time.perf_counter())
    engine.submit(
        prompt, SamplingParams(**{"temperature": 0, "max_tokens": outputs, "ignore_eos": True, **more}), answer.take
    )
    return answer


def ask_at_once(engine: Engine, prompts: Sequence[Sequence[int]], outputs: int, **more: Any) -> list[Answer]:
    """Between two steps, so that all come to the same one: batches are the same each time."""
    answers: list[Answer] = []
    engine.call(lambda: answers.extend(ask(engine, prompt, outputs, **more) for prompt in prompts))
    return answers
