"""Rules about single tokens and sequences of tokens, which need no grammar: `allowed_token_ids`, `bad_words`,
`thinking_token_budget`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sidestream.config import ReasoningMarks, SamplingParams
from sidestream.errors import RequestRejected
from sidestream.grammar.token_grammar import Grammars, Masks, TokenGrammar

_WORD_BITS = 32


def grammar_of(params: SamplingParams, grammars: Grammars | None) -> TokenGrammar | None:
    """What decides which tokens an answer may have; None: all. Compiles a grammar on the calling thread. Raises
    RequestRejected.

    grammars   compiles grammars; None: the engine has no tokenizer
    """
    wanted = params.structured_outputs
    if wanted is not None and grammars is None:
        reason = "this engine has no tokenizer, so it cannot enforce the form of an answer; leave it out"
        raise RequestRejected(f"structured_outputs is set: {reason}", param="structured_outputs")
    grammar = None if wanted is None or grammars is None else grammars.compile(wanted)
    if params.allowed_token_ids or params.bad_word_ids:
        grammar = RuledAnswer(grammar, params.allowed_token_ids, params.bad_word_ids)
    budget, marks = params.thinking_token_budget, params.reasoning
    if budget is None:
        return grammar
    if marks is None or (params.allowed_token_ids and not {*marks.end} <= {*params.allowed_token_ids}):
        reason = "the marker of the reasoning's end is unknown" if marks is None else "its end marker is not allowed"
        raise RequestRejected(f"thinking_token_budget is {budget}: {reason}", param="thinking_token_budget")
    return BudgetedAnswer(grammar, marks, budget, 0 if marks.inside else -1)


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
        self.failure = _fill_from(self._inner, masks, drafts)
        if self._allowed:
            masks &= _mask_of(self._allowed, masks.shape[1])
        for number in range(len(masks)):
            before = [*self._answer, *drafts[:number]]
            ended = [ids[-1] for ids in self._forbidden if before[len(before) - len(ids) + 1 :] == list(ids[:-1])]
            masks[number] &= ~_mask_of(ended, masks.shape[1])

    def forced(self, known: Sequence[int], most: int) -> tuple[int, ...]:
        """See `TokenGrammar`."""
        return () if self._inner is None else self._inner.forced(known, most)

    def advance(self, token_ids: Sequence[int]) -> bool:
        """See `TokenGrammar`."""
        self._answer = [*self._answer, *token_ids][-self._kept :] if self._kept else []
        if self._inner is None:
            return False
        complete = self._inner.advance(token_ids)
        self.failure = self._inner.failure
        return complete


class BudgetedAnswer:
    """A TokenGrammar that bounds the reasoning of an answer: after `budget` tokens of it, only its end marker is
    allowed. Then the answer goes on as `inner` says (None: freely).

    used   tokens of reasoning so far; negative: it has not begun; None: it has ended, or there is none any more
    tail   last tokens, among which a marker may begin
    """

    def __init__(
        self,
        inner: TokenGrammar | None,
        marks: ReasoningMarks,
        budget: int,
        used: int | None = -1,
        tail: tuple[int, ...] = (),
    ) -> None:
        self.failure = None if inner is None else inner.failure
        self._inner = inner
        self._marks = marks
        self._budget = budget
        self._used = used
        self._tail = tail

    def copy(self) -> BudgetedAnswer:
        """See `TokenGrammar`."""
        inner = None if self._inner is None else self._inner.copy()
        return BudgetedAnswer(inner, self._marks, self._budget, self._used, self._tail)

    def fill(self, masks: Masks, drafts: Sequence[int]) -> None:
        """See `TokenGrammar`."""
        self.failure = _fill_from(self._inner, masks, drafts)
        used, tail = self._used, self._tail
        for number in range(len(masks)):
            if used is not None and used >= self._budget:
                forced = masks[number] & _mask_of([self._next_of_end(tail)], masks.shape[1])
                if forced.any():  # else the grammar wants more first, such as the rest of a character
                    masks[number] = forced
            if number < len(drafts):
                used, tail = self._followed(used, tail, drafts[number])

    def forced(self, known: Sequence[int], most: int) -> tuple[int, ...]:
        """See `TokenGrammar`."""
        return () if self._inner is None else self._inner.forced(known, most)

    def advance(self, token_ids: Sequence[int]) -> bool:
        """See `TokenGrammar`."""
        for token in token_ids:
            self._used, self._tail = self._followed(self._used, self._tail, token)
        if self._inner is None:
            return False
        complete = self._inner.advance(token_ids)
        self.failure = self._inner.failure
        return complete

    def _followed(self, used: int | None, tail: tuple[int, ...], token: int) -> tuple[int | None, tuple[int, ...]]:
        """`used` and `tail` behind one more token."""
        if used is None:
            return None, ()
        marker, tail = self._marks.start if used < 0 else self._marks.end, (*tail, token)
        if tail[-len(marker) :] == marker:
            return (0 if used < 0 else None), ()
        return used + (used >= 0), tail[1 - len(marker) :] if len(marker) > 1 else ()

    def _next_of_end(self, tail: tuple[int, ...]) -> int:
        """The token that continues the end marker, of which the last tokens may be the beginning."""
        end = self._marks.end
        return end[max(size for size in range(len(end)) if tail[len(tail) - size :] == end[:size])]


def _fill_from(inner: TokenGrammar | None, masks: Masks, drafts: Sequence[int]) -> str | None:
    """Fill `masks` with what `inner` allows, or with all tokens. Returns the failure of `inner`."""
    if inner is None:
        masks[:] = -1
        return None
    inner.fill(masks, drafts)
    return inner.failure


def _mask_of(token_ids: Sequence[int], words: int) -> Masks:
    """A mask that allows only these tokens."""
    bits = np.zeros(words * _WORD_BITS, np.bool_)
    bits[[*token_ids]] = True
    return np.packbits(bits, bitorder="little").view(np.int32)
