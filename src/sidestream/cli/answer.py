"""Streams one answer to the terminal, and records its tokens and times. Used by `sidestream chat` and `generate`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from sidestream.config import SamplingParams
from sidestream.types import CachedTokens, Delta

if TYPE_CHECKING:
    from sidestream.llm import LLM

# Control characters in a model's text could move the cursor or reprogram the terminal: they are not printed.
_HIDDEN = {code: None for code in [*range(0x20), *range(0x7F, 0xA0)] if chr(code) not in "\n\t"}


class Answer:
    """The output of one request so far; complete when `finish_reason` is set. Only `follow` changes it."""

    def __init__(self) -> None:
        self.text = ""
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.prompt_tokens = 0
        self.cached = CachedTokens()
        self.ttft_s: float | None = None
        self.seconds = 0.0

    def follow(
        self,
        llm: LLM,
        prompt: Sequence[int],
        params: SamplingParams,
        show: Callable[[str], None],
        *,
        continues: bool = False,
    ) -> None:
        """Generate the answer and pass each piece of text to `show`; blocks until the answer ends.

        An exception from `show`, or KeyboardInterrupt, aborts the request; the answer keeps the text so far. Raises
        RequestError or EngineStopped.
        """
        started_s = time.monotonic()
        with closing(llm.stream(prompt, params, continues=continues)) as deltas:
            for delta in deltas:
                self._add(delta, time.monotonic() - started_s)
                show(delta.text)

    def _add(self, delta: Delta, seconds: float) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.finish_reason = delta.finish_reason
        self.prompt_tokens, self.cached = delta.prompt_tokens, delta.cached
        self.seconds = seconds
        if self.ttft_s is None and delta.token_ids:
            self.ttft_s = seconds

    def summary(self) -> str:
        """One line: number of tokens, the tiers that the prompt's KV came from, TTFT, tokens per second."""
        parts = [f"{len(self.token_ids)} tokens", f"prompt {self.prompt_tokens}, {_sources(self.cached)}"]
        if self.ttft_s is not None:
            parts.append(f"first token {self.ttft_s * 1000:.0f} ms")
            if (later := len(self.token_ids) - 1) > 0 and self.seconds > self.ttft_s:
                parts.append(f"{later / (self.seconds - self.ttft_s):.1f} tokens/s")
        return " · ".join([*parts, *_ENDINGS.get(self.finish_reason, ())])


_ENDINGS: dict[str | None, tuple[str]] = {None: ("interrupted",), "length": ("cut at the limit",)}


def _sources(cached: CachedTokens) -> str:
    tiers = [f"{count} {tier}" for tier, count in cached.by_tier.items()]
    return f"{cached.total} cached ({', '.join(tiers)})" if tiers else "0 cached"


def show_text(piece: str) -> None:
    """Print a piece of an answer at once; on a terminal, print only its printable characters."""
    print(printable(piece) if sys.stdout.isatty() else piece, end="", flush=True)


def printable(text: str) -> str:
    """`text` without control characters other than newline and tab."""
    return text.translate(_HIDDEN)
