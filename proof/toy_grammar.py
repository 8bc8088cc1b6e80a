"""A grammar over the toy model's tokens, in which each token decides which tokens may follow: a mask that misses one
token of the answer is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sidestream.config import StructuredOutputs
from sidestream.errors import RequestRejected
from sidestream.grammar import TokenGrammar
from sidestream.grammar.token_grammar import Masks


class ToyGrammar:
    """One token in `period` is forbidden: those whose id, plus the sum of the answer, is a multiple of `period`. The
    answer is complete after `length` tokens.

    fails_at   number of tokens after which the grammar fails, as if a limit had been reached; None: never
    run        `run` tokens of the answer are free, the next `run` tokens are forced, and so on; 0: all are free
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        period: int,
        length: int,
        fails_at: int | None = None,
        run: int = 0,
        answer: Sequence[int] = (),
    ) -> None:
        self.failure: str | None = None
        self._vocab_size = vocab_size
        self._period, self.length, self._fails_at, self._run = period, length, fails_at, run
        self._answer = [*answer]

    def copy(self) -> ToyGrammar:
        """See `TokenGrammar`."""
        return ToyGrammar(
            self._vocab_size,
            period=self._period,
            length=self.length,
            fails_at=self._fails_at,
            run=self._run,
            answer=self._answer,
        )

    def fill(self, masks: Masks, drafts: Sequence[int]) -> None:
        """See `TokenGrammar`."""
        if self._fails_at is not None and len(self._answer) >= self._fails_at:
            self.failure = "a limit was reached"
        for number, mask in enumerate(masks):
            allowed = self.allowed([*self._answer, *drafts[:number]])
            mask[:] = np.packbits(allowed, bitorder="little").view(np.int32)
            if number < len(drafts) and not allowed[drafts[number]]:
                masks[number + 1 :] = -1
                return

    def forced(self, known: Sequence[int], most: int) -> tuple[int, ...]:
        """See `TokenGrammar`."""
        answer = [*self._answer, *known]
        while self._is_forced(answer) and len(answer) < min(self.length, len(self._answer) + most):
            answer.append(int(self.allowed(answer).argmax()))
        return tuple(answer[len(self._answer) :])

    def advance(self, token_ids: Sequence[int]) -> bool:
        """See `TokenGrammar`."""
        self._answer += token_ids
        return len(self._answer) >= self.length

    def allowed(self, answer: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Which tokens may follow an answer, bool `[vocab_size]`, padded with False to a multiple of 32."""
        ids = np.arange(-(-self._vocab_size // 32) * 32)
        allowed: npt.NDArray[np.bool_] = (ids < self._vocab_size) & ((ids + sum(answer)) % self._period != 0)
        return ids == 3 + sum(answer) % (self._vocab_size - 3) if self._is_forced(answer) else allowed

    def _is_forced(self, answer: Sequence[int]) -> bool:
        return self._run > 0 and len(answer) // self._run % 2 == 1


def toy_grammar(form: str, vocab_size: int) -> ToyGrammar:
    """The grammar of "period length", "period length fails_at" or "period length fails_at run". Raises ValueError."""
    period, length, fails_at, run = [*map(int, form.split()), 0, 0][:4]
    return ToyGrammar(vocab_size, period=period, length=length, fails_at=fails_at or None, run=run)


class ToyGrammars:
    """Compiles forms whose `regex` describes a toy grammar."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def compile(self, wanted: StructuredOutputs) -> TokenGrammar:
        """See `GrammarCompiler.compile`."""
        try:
            return toy_grammar(str(wanted.regex), self._vocab_size)
        except ValueError as fault:
            raise RequestRejected(f"structured_outputs.regex is {wanted.regex!r}", param="regex") from fault
