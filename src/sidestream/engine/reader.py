"""Text where news are read: the engine thread makes none that nobody has to look into for a stop string."""

from __future__ import annotations

import logging
from dataclasses import replace

from sidestream.config import SamplingParams
from sidestream.engine.session import TextSource, TokenSource
from sidestream.types import Delta

logger = logging.getLogger(__name__)


class Reader:
    """Makes the text of one request's news that were asked for without, in their order, on the thread that reads them."""

    def __init__(self, tokenizer: TokenSource, params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._made = bool(params.stop)
        self._include_stop = params.include_stop
        self._texts: dict[int, TextSource] = {}
        self._failed: set[int] = set()

    def read(self, delta: Delta) -> Delta | None:
        """The news with their text. Where the tokenizer fails they are the sample's last, an error; None for what comes behind that."""
        if delta.index in self._failed:
            return None
        if self._made or delta.finish_reason == "error":
            return delta
        source = self._texts.get(delta.index)
        if source is None:
            source = self._texts[delta.index] = self._tokenizer.detokenizer()
        try:
            text = "".join([source.push(token) for token in self.shown(delta.token_ids, delta.finish_reason)])
            if delta.finish_reason is not None:
                text += source.finish()
        except Exception as error:  # a tokenizer is foreign code
            logger.exception("the text of %d tokens could not be made", len(delta.token_ids))
            if delta.finish_reason == "abort":
                return delta
            self._failed.add(delta.index)
            return replace(delta, finish_reason="error", error=f"the tokenizer failed: {error}")
        return replace(delta, text=text)

    def shown(self, token_ids: tuple[int, ...], finish_reason: str | None) -> tuple[int, ...]:
        """The tokens that text is made of: it ends before the one that stopped it, unless that was asked for."""
        return token_ids[:-1] if finish_reason == "stop" and not self._include_stop else token_ids
