"""What the server needs from an engine. Structural: anything with these members can be served."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

from sidestream.config import SamplingParams
from sidestream.metrics import MetricsSnapshot
from sidestream.types import Delta, Health


class Detokenizer(Protocol):
    """Text of one sample, as its tokens come."""

    def push(self, token_id: int) -> str:
        """The text that became certain with this token."""
        ...


class Tokenizer(Protocol):
    """Text to token ids and back. Called from worker threads, several at once."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a plain prompt."""
        ...

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **options: Any,
    ) -> list[int]:
        """Token ids of a conversation, laid out by the model's chat template.

        messages                have a role and a content, and what else their template may read, such as a name
        add_generation_prompt   end with the start of the assistant's turn
        continue_final_message  leave the last message open, for the model to write on
        options                 variables of the template

        Raises RequestRejected, for an option with the option's name as its param.
        """
        ...

    def template_knows(self, option: str) -> bool:
        """Whether the chat template reads this variable."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; U+FFFD where bytes are only a part of a character."""
        ...

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Each token as the vocabulary spells it."""
        ...

    def detokenizer(self) -> Detokenizer:
        """A fresh incremental `decode`."""
        ...


class Backend(Protocol):
    """An engine that serves one model. All members are used from the event loop's thread, the tokenizer from others
    too.
    """

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

    async def metrics_snapshot(self) -> MetricsSnapshot:
        """What `/metrics` shows: of the engine and of all front ends. Raises EngineStopped."""
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
    ) -> AsyncGenerator[Delta, None]:
        """News of one prompt's `params.n` samples until all have finished; closing or cancelling it aborts them.

        KV is shared with requests of the same `cache_salt` only.

        Each sample ends with one delta that has a finish reason. A refusal (RequestError, EngineStopped) is raised
        before any delta.
        """
        ...

    def health(self) -> Health:
        """Whether the engine serves, and why not. Never blocks."""
        ...
