"""How far two answers to the same request are apart, and what that means.

Two runs of one request on one server differ by rounding: kernels add in another order in another batch. Rounding moves
most log-probabilities a little and single ones a lot; a wrong block of KV moves them all. So the mean difference tells
the two apart, and the largest one does not (docs/verify.md). Up to the first different token, both answers have the
same context, so their log-probabilities must agree there; behind it, they cannot be compared. A different token alone
proves nothing: two tokens may be equally likely.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from sidestream.verify.endpoint import Answer

UNMEASURED_TOLERANCE = 0.12
"""In nats. Other batches and chunks of the prompt moved bfloat16 answers of the demo model by at most 0.09."""
_SMALLEST_TOLERANCE = 0.06
"""In nats, where uncached answers can be compared: the nearest of five was at most 0.01 away."""
_ABOVE_NOISE = 1.5


class Verdict(enum.Enum):
    """EQUAL: the same tokens; ROUNDING: other tokens, which rounding explains; WRONG: neither."""

    EQUAL = "equal"
    ROUNDING = "rounding"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two answers beside each other.

    distance    mean difference of the log-probabilities of the likely tokens up to the first different token, in nats;
                infinite if one answer is shorter than the other and equal so far, or a position has no common token
    differs_at  index of the first different token; None if there is none
    """

    distance: float
    differs_at: int | None

    def verdict(self, tolerance: float) -> Verdict:
        """What the distance means if rounding moves log-probabilities by up to `tolerance`."""
        if self.distance > tolerance:
            return Verdict.WRONG
        return Verdict.EQUAL if self.differs_at is None else Verdict.ROUNDING


def compare(first: Answer, second: Answer) -> Comparison:
    """Compare two answers to the same request."""
    apart: list[float] = []
    for index, pair in enumerate(zip(first.tokens, second.tokens, strict=False)):
        one, other = first.alternatives[index], second.alternatives[index]
        here = [abs(one[token] - other[token]) for token in one.keys() & other.keys() if _is_clear(token)]
        if pair[0] == pair[1] and _is_clear(pair[0]):
            here.append(abs(first.logprobs[index] - second.logprobs[index]))
        if not here and all(map(_is_clear, (*one, *other))):
            here.append(math.inf)  # not one common candidate: other contexts
        apart += here
        if pair[0] != pair[1] or not _is_clear(pair[0]):
            return Comparison(fmean(apart or [0.0]), index if pair[0] != pair[1] else None)
    if len(first.tokens) != len(second.tokens):
        return Comparison(math.inf, min(len(first.tokens), len(second.tokens)))
    return Comparison(fmean(apart or [0.0]), None)


def _is_clear(token: str) -> bool:
    """Whether no other token is spelled like this: parts of characters are all spelled as nothing or U+FFFD."""
    return token != "" and "\ufffd" not in token


def tolerance_of(noise: Sequence[float]) -> float:
    """The tolerance for a server whose uncached answers to equal requests were apart by these distances."""
    finite = [distance for distance in noise if math.isfinite(distance)]
    return max(_SMALLEST_TOLERANCE, _ABOVE_NOISE * max(finite, default=0.0))
