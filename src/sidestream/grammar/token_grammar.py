"""What an engine needs of a grammar, and its implementation by llguidance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from sidestream.config import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLMatcher

Masks = npt.NDArray[np.int32]
"""`[rows, words]`: bit i of word w is set if the token 32 w + i is allowed."""

_COMPLETE = ("NoExtension", "NoExtensionBias", "EndOfSentence")


class TokenGrammar(Protocol):
    """The position of one answer in its grammar. Engine thread only, after `copy`.

    failure   why the grammar cannot be followed any further, such as a limit that was reached; None: it can
    """

    failure: str | None

    def copy(self) -> TokenGrammar:
        """Another answer at the same position. Callable from any thread."""
        ...

    def fill(self, masks: Masks, drafts: Sequence[int]) -> None:
        """Write which tokens may come next, and after each of the drafts, to `1 + len(drafts)` rows of masks. Behind a
        draft that is not allowed, every token is: the draft is rejected. The position does not change.
        """
        ...

    def forced(self, known: Sequence[int], most: int) -> tuple[int, ...]:
        """Up to `most` tokens that come next because no other is allowed. The position does not change. `known`: the
        first of them, from an earlier call.
        """
        ...

    def advance(self, token_ids: Sequence[int]) -> bool:
        """Follow tokens of the answer. Returns whether the answer is complete, so that nothing can come after it."""
        ...


class Grammars(Protocol):
    """Makes grammars for one model. Any thread may use it; it is never used on the engine thread."""

    def compile(self, wanted: StructuredOutputs) -> TokenGrammar:
        """A grammar at the beginning of an answer. Blocks while it compiles. Raises RequestRejected."""
        ...


class GuidedAnswer:
    """A TokenGrammar of llguidance. Where one text must follow, llguidance allows only the tokens into which the
    tokenizer cuts it. `forced` finds them by masks, because `compute_ff_tokens` has no bound: it takes half a second
    for a text of 100,000 bytes.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self.failure: str | None = None
        self._matcher = matcher
        self._look()

    def copy(self) -> GuidedAnswer:
        return GuidedAnswer(self._matcher.deep_copy())

    def fill(self, masks: Masks, drafts: Sequence[int]) -> None:
        followed = 0
        for number, mask in enumerate(masks):
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if number < len(drafts):
                if not self._matcher.try_consume_tokens([drafts[number]]):
                    masks[number + 1 :] = -1
                    break
                followed += 1  # rule: grammar-returns-from-its-drafts
        self._look()  # before the rollback, which an error makes impossible
        if followed and self.failure is None:
            self._matcher.rollback(followed)

    def forced(self, known: Sequence[int], most: int) -> tuple[int, ...]:
        found = [*known[: self._matcher.try_consume_tokens([*known])]]
        while len(found) < most and self.failure is None and not self._matcher.is_stopped():
            if (token := self._only_token()) is None or not self._matcher.try_consume_tokens([token]):
                break
            found.append(token)
        self._look()
        if found and self.failure is None:
            self._matcher.rollback(len(found))  # rule: grammar-returns-from-its-look-ahead
        return tuple(found)

    def _only_token(self) -> int | None:
        """The only token that may come next; None: there are several."""
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        octets = np.flatnonzero(mask)
        bits = np.flatnonzero(np.unpackbits(mask[octets[:1]], bitorder="little"))
        return 8 * int(octets[0]) + int(bits[0]) if len(octets) == len(bits) == 1 else None

    def advance(self, token_ids: Sequence[int]) -> bool:
        if self.failure is None and not self._matcher.consume_tokens([*token_ids]):
            self._look()
        return self.failure is None and self._matcher.is_stopped() and self._ended_well()

    def _ended_well(self) -> bool:
        if (reason := self._matcher.stop_reason()) not in _COMPLETE:
            self.failure = f"the grammar cannot be followed any further ({reason})"
        return self.failure is None

    def _look(self) -> None:
        if self._matcher.is_error():
            self.failure = first_line(self._matcher.get_error())


def first_line(error: str) -> str:
    """An error of llguidance, which has many lines, in short."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    return lines[0][:300] if lines else "no reason given"
