"""What the server needs from an engine. Structural: anything with these members can be served."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Protocol

from sidestream.config import SamplingParams
from sidestream.metrics import Metrics
from sidestream.types import Delta, Health


class Detokenizer(Protocol):
    """Text of one sample, as its tokens come."""

    def push(self, token_id: int) -> str:
        """The text that became certain with this token."""
        ...


class Tokenizer(Protocol):
    """Text to token ids and back. Called from worker threads, several at once."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt."""
        ...

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation (`role` and `content` each), ready for the assistant's turn. Raises RequestRejected."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids; U+FFFD where bytes are only a part of a character."""
        ...

    def detokenizer(self) -> Detokenizer:
        """A fresh incremental `decode`."""
        ...


class Backend(Protocol):
    """An engine that serves one model. All members are used from the event loop's thread, the tokenizer from others too."""

    @property
    def model_name(self) -> str:
        """The name that clients ask for, unless the options give another."""
        ...

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        ...

    @property
    def metrics(self) -> Metrics:
        """What `/metrics` shows."""
        ...

    def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, priority: int = 0, request_name: str = ""
    ) -> AsyncGenerator[Delta, None]:
        """News of one prompt's `params.n` samples until all have finished; closing or cancelling it aborts them.

        Each sample ends with one delta that has a finish reason. A refusal (RequestError, EngineStopped) is raised before any delta.
        """
        ...

    def health(self) -> Health:
        """Whether the engine serves, and why not. Never blocks."""
        ...
