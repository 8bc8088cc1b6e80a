"""Rules about single tokens and sequences of tokens, which need no grammar: `allowed_token_ids`, `bad_words`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sidestream.grammar.token_grammar import Masks, TokenGrammar

_WORD_BITS = 32


class RuledAnswer:
    """A TokenGrammar that allows fewer tokens than another one.

    inner      what else decides; None: nothing
    allowed    the only token ids that are allowed; empty: all
    forbidden  sequences of token ids that the answer may not contain
    """

    def __init__(
        self,
        inner: TokenGrammar | None,
        allowed: Sequence[int],
        forbidden: Sequence[Sequence[int]],
        *,
        answer: Sequence[int] = (),
    ) -> None:
        self.failure = None if inner is None else inner.failure
        self._inner = inner
        self._allowed = allowed
        self._forbidden = forbidden
        self._kept = max(map(len, forbidden), default=1) - 1  # tokens of the answer that decide about the next one
        self._answer = [*answer]

    def copy(self) -> RuledAnswer:
        """See `TokenGrammar`."""
        inner = None if self._inner is None else self._inner.copy()
        return RuledAnswer(inner, self._allowed, self._forbidden, answer=self._answer)

    def fill(self, masks: Masks, drafts: Sequence[int]) -> None:
        """See `TokenGrammar`."""
        if self._inner is None:
            masks[:] = -1
        else:
            self._inner.fill(masks, drafts)
            self.failure = self._inner.failure
        if self._allowed:
            masks &= _mask_of(self._allowed, masks.shape[1])
        for number in range(len(masks)):
            before = [*self._answer, *drafts[:number]]
            ended = [ids[-1] for ids in self._forbidden if before[len(before) - len(ids) + 1 :] == list(ids[:-1])]
            masks[number] &= ~_mask_of(ended, masks.shape[1])

    def advance(self, token_ids: Sequence[int]) -> bool:
        """See `TokenGrammar`."""
        self._answer = [*self._answer, *token_ids][-self._kept :] if self._kept else []
        if self._inner is None:
            return False
        complete = self._inner.advance(token_ids)
        self.failure = self._inner.failure
        return complete


def _mask_of(token_ids: Sequence[int], words: int) -> Masks:
    """A mask that allows only these tokens."""
    bits = np.zeros(words * _WORD_BITS, np.bool_)
    bits[[*token_ids]] = True
    return np.packbits(bits, bitorder="little").view(np.int32)
