"""The protocol of an engine that the server can serve."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Sequence
from typing import Protocol

from sidestream.client.base import AdapterCalls
from sidestream.config import SamplingParams
from sidestream.text import TokenizerLike
from sidestream.types import CachedPrefix, CacheExplanation, Delta, Flushed, Health
from sidestream_kv.metrics import MetricsSnapshot, Recent


class Backend(Protocol):
    """An engine that serves one model. Only the event loop's thread uses it, except for the tokenizer, which other
    threads use too.
    """

    @property
    def model_name(self) -> str:
        """The model's name in requests, unless `ServerOptions.served_model_name` replaces it."""
        ...

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of prompt and output together."""
        ...

    @property
    def block_tokens(self) -> int:
        """Tokens of a block of the KV cache."""
        ...

    @property
    def room(self) -> int:
        """Number of samples that the engine may still take from this front end; see `max_waiting`."""
        ...

    @property
    def tokenizer(self) -> TokenizerLike:
        """The model's tokenizer."""
        ...

    async def metrics_snapshot(self) -> MetricsSnapshot:
        """The metrics of the engine and of all front ends. Raises EngineStopped."""
        ...

    async def recent_spans(self, since: int) -> Recent:
        """The newest spans of the streams after position `since`; see `Timeline.read`. Raises EngineStopped."""
        ...

    def count(self, name: str, value: float, *labels: str) -> None:
        """Add to a counter of the metrics. Never blocks."""
        ...

    def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        request_name: str = "",
        cache_salt: str = "",
        continues: bool = True,
        shown_tokens: Collection[str] = (),
    ) -> AsyncGenerator[Delta, None]:
        """The deltas (new text and tokens) of one prompt's `params.n` samples. Closing or cancelling the generator
        aborts the samples.

        Each sample's last delta has a finish reason. Requests of the same `cache_salt` share KV. With `continues`, the
        text continues the prompt's text; otherwise, it begins one. The names of the special tokens `shown_tokens` are
        part of the text. Raises RequestError or EngineStopped before the first delta.
        """
        ...

    async def explain_cache(self, request_name: str) -> CacheExplanation | None:
        """Why tokens of the last request with this name were reused or computed; None: it is not remembered."""
        ...

    async def flush(self, *, timeout_s: float) -> Flushed:
        """Wait until the tiers hold all complete blocks, at most `timeout_s`. Raises EngineStopped or CallTimeout, as
        all operations do.
        """
        ...

    async def reset_prefix_cache(self, tier: str | None = None, *, timeout_s: float) -> dict[str, int]:
        """Drop the KV of a tier, or of all tiers. Returns the number of dropped blocks by tier. Raises RequestRejected
        for an unknown tier.
        """
        ...

    async def pin_prefix(
        self, prompt: Sequence[int], *, ttl_s: float, cache_salt: str = "", hint: bool = False
    ) -> CachedPrefix:
        """Let the tiers evict the KV of a prefix last; see `FrontEnd.pin_prefix`."""
        ...

    async def unpin_prefix(self, prompt: Sequence[int] = (), *, name: str = "", cache_salt: str = "") -> int:
        """End a pin. Returns the number of ended pins."""
        ...

    async def prefetch_prefix(self, prompt: Sequence[int], *, cache_salt: str = "") -> CachedPrefix:
        """Begin to read a prefix from the persistent tiers into host memory; see `FrontEnd.prefetch_prefix`."""
        ...

    async def cached_prefixes(self, *, limit: int) -> Sequence[CachedPrefix]:
        """The pinned and the most used prefixes, at most `limit` of each."""
        ...

    async def drop_prefix(
        self, prompt: Sequence[int], *, tier: str | None = None, cache_salt: str = ""
    ) -> dict[str, int]:
        """Drop a prefix from a tier, or from all tiers. Returns the number of dropped blocks by tier."""
        ...

    async def close_session(self, session: str, *, cache_salt: str = "") -> CachedPrefix | None:
        """Forget a session; see `FrontEnd.close_session`."""
        ...

    async def hand_over_prefix(self, prompt: Sequence[int], *, cache_salt: str = "") -> int:
        """Wait until a shared store holds the prompt's KV; see `FrontEnd.hand_over_prefix`."""
        ...

    async def update_weights(self, path: str, *, timeout_s: float) -> None:
        """Replace the weights; see `FrontEnd.update_weights`."""
        ...

    @property
    def adapters(self) -> AdapterCalls:
        """The LoRA adapters of the engine."""
        ...

    async def pause(self) -> None:
        """Let new requests wait until `resume`."""
        ...

    async def resume(self) -> None:
        """End a pause."""
        ...

    async def cancel(self, request_name: str) -> int:
        """End the requests with this name, or with this name and a number behind a space. Returns the number of ended
        samples.
        """
        ...

    def health(self) -> Health:
        """Whether the engine serves, and the reason if not. Never blocks."""
        ...
