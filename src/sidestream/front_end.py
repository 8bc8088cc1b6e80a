"""Text on one side, an engine's tokens on the other: what serves requests in an API process, and in `AsyncLLM`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

from sidestream.client.base import EngineClient
from sidestream.client.output import OutputProcessor
from sidestream.config import SamplingDefaults, SamplingParams
from sidestream.metrics import MetricsSnapshot
from sidestream.prompts import Prompt, checked_params, ids_of
from sidestream.tokenizer import Tokenizer
from sidestream.types import Delta, Health


class FrontEnd:
    """Text on one side, an engine's tokens on the other. Lives on one event loop; tokenizes long prompts on worker
    threads.
    """

    def __init__(self, client: EngineClient, tokenizer: Tokenizer, *, model_name: str) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.model_name = model_name

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together."""
        return self.client.max_model_len

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """Sampling options of requests that leave them out."""
        return self.client.sampling_defaults

    def health(self) -> Health:
        """Whether the engine serves. Never blocks."""
        return self.client.health()

    def count(self, name: str, value: float, *labels: str) -> None:
        """Add to a counter of the engine's metrics."""
        self.client.count(name, value, *labels)

    async def metrics_snapshot(self) -> MetricsSnapshot:
        """Counters of everything that happened. Raises EngineStopped."""
        return await self.client.metrics_snapshot()

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        request_name: str = "",
        cache_salt: str = "",
    ) -> AsyncGenerator[Delta, None]:
        """News of one prompt's samples until all have ended. Closing or cancelling the generator aborts them.

        priority      lower runs earlier
        request_name  for the log
        cache_salt    KV is shared with requests of the same salt only, in all tiers

        Raises RequestError or EngineStopped before any news.
        """
        return self._answer(
            lambda: ids_of(prompt, self.tokenizer), params, priority, cache_salt, in_thread=isinstance(prompt, str)
        )

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        request_name: str = "",
        cache_salt: str = "",
    ) -> AsyncGenerator[Delta, None]:
        """News of a conversation's samples, as from `generate`.

        messages   each has a `role` and a `content`; the model's chat template lays them out, on a worker thread
        """
        return self._answer(lambda: self.tokenizer.chat(messages), params, priority, cache_salt, in_thread=True)

    def _check_open(self) -> None:
        pass

    async def _answer(
        self,
        encode: Callable[[], list[int]],
        params: SamplingParams | None,
        priority: int,
        cache_salt: str,
        *,
        in_thread: bool,
    ) -> AsyncGenerator[Delta, None]:
        """Submit the token ids that `encode` returns, and yield the news of their samples, with their text.

        `in_thread` runs `encode` on a worker thread: tokenizing a long text takes milliseconds.
        """
        self._check_open()
        chosen = checked_params(params)
        ids = await asyncio.to_thread(encode) if in_thread else encode()
        output = OutputProcessor(self.tokenizer, chosen)
        answer = self.client.submit(ids, chosen, priority=priority, cache_salt=cache_salt)
        left = chosen.n
        try:
            while left:
                told = await answer.read()
                delta = output.read(told)
                if delta is None:
                    continue
                if delta.finish_reason is not None:
                    left -= 1
                    if told.finish_reason is None:  # a stop string was found, or the text cannot be made
                        self.client.end(answer, delta.finish_reason, index=delta.index)
                yield delta
        finally:
            if left:
                self.client.end(answer)
