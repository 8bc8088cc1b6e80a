"""`FrontEnd`: an engine's client together with a tokenizer. API processes and `AsyncLLM` use it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

from sidestream.client.base import EngineClient
from sidestream.client.output import OutputProcessor
from sidestream.client.prompts import Prompt, checked_params, ids_of, with_special_stops
from sidestream.config import SamplingDefaults, SamplingParams
from sidestream.tokenizer import Tokenizer
from sidestream.types import Delta, Health
from sidestream_kv.metrics import MetricsSnapshot


class FrontEnd:
    """Takes prompts as text or token ids, sends token ids to the engine, and returns text with the engine's tokens.

    Belongs to one event loop; tokenizes on worker threads.
    """

    def __init__(self, client: EngineClient, tokenizer: Tokenizer, *, model_name: str) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.model_name = model_name

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of prompt and output together."""
        return self.client.max_model_len

    @property
    def room(self) -> int:
        """Number of samples that the engine may still take from this front end."""
        return self.client.room

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """The model's sampling defaults."""
        return self.client.sampling_defaults

    def health(self) -> Health:
        """Whether the engine serves. Never blocks."""
        return self.client.health()

    def count(self, name: str, value: float, *labels: str) -> None:
        """Add to a counter of the engine's metrics."""
        self.client.count(name, value, *labels)

    async def metrics_snapshot(self) -> MetricsSnapshot:
        """A copy of all metrics. Raises EngineStopped."""
        return await self.client.metrics_snapshot()

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        request_name: str = "",
        cache_salt: str = "",
        continues: bool = True,
    ) -> AsyncGenerator[Delta, None]:
        """Yield the output of one prompt's samples as it is generated. Closing or cancelling the generator aborts the
        samples.

        priority      requests with a lower number run earlier
        request_name  accepted for callers that name their requests; not used
        cache_salt    only requests with the same salt share KV, in all tiers
        continues     the output continues the prompt's text. False: it begins a text, as the answer in a chat does;
                      some tokenizers omit the space in front of a text's first word

        Raises RequestError or EngineStopped before the first delta.
        """
        return self._answer(
            lambda: ids_of(prompt, self.tokenizer),
            params,
            priority,
            cache_salt,
            continues=continues,
            in_thread=isinstance(prompt, str),
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
        """Yield the output of a conversation's samples, like `generate`.

        messages   each has a `role` and a `content`; a worker thread formats them with the model's chat template
        """
        return self._answer(
            lambda: self.tokenizer.chat(messages), params, priority, cache_salt, continues=False, in_thread=True
        )

    def _check_open(self) -> None:
        pass

    async def _answer(
        self,
        encode: Callable[[], list[int]],
        params: SamplingParams | None,
        priority: int,
        cache_salt: str,
        *,
        continues: bool,
        in_thread: bool,
    ) -> AsyncGenerator[Delta, None]:
        """Submit the token ids that `encode` returns, and yield the deltas of the samples with their text.

        in_thread   run `encode` on a worker thread, because tokenizing a long text takes milliseconds
        """
        self._check_open()
        chosen = with_special_stops(checked_params(params), self.tokenizer)
        ids = await asyncio.to_thread(encode) if in_thread else encode()
        processor = OutputProcessor(self.tokenizer, chosen, after=ids if continues else ())
        outputs = self.client.submit(ids, chosen, priority=priority, cache_salt=cache_salt)
        left = chosen.n
        try:
            while left:
                raw = await outputs.read()
                delta = processor.read(raw)
                if delta is None:
                    continue
                if delta.finish_reason is not None:
                    left -= 1
                    if raw.finish_reason is None:  # the text ended at a stop string, or the tokenizer failed
                        self.client.abort(outputs, delta.finish_reason, index=delta.index)
                yield delta
        finally:
            if left:
                self.client.abort(outputs)
