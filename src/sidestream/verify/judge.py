"""How far two answers to the same request are apart, and what that means.

Two runs of one request on one server differ by rounding: kernels add in another order in another batch. Rounding moves
log-probabilities a little, everywhere; a wrong block of KV moves them a lot. Up to the first different token, both
answers have the same context, so their log-probabilities must agree there; behind it, they cannot be compared. A
different token alone proves nothing: two tokens may be equally likely.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

from sidestream.verify.endpoint import Answer

SMALLEST_TOLERANCE = 0.05
"""In nats. Half precision moves log-probabilities by less than a tenth of it at most positions."""
_ABOVE_NOISE = 4.0


class Verdict(enum.Enum):
    """EQUAL: the same tokens; ROUNDING: other tokens, which rounding explains; WRONG: neither."""

    EQUAL = "equal"
    ROUNDING = "rounding"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two answers beside each other.

    distance    largest difference of a log-probability up to the first different token, in nats; infinite if one
                answer is shorter than the other and equal so far
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
    distance = 0.0
    for index, pair in enumerate(zip(first.tokens, second.tokens, strict=False)):
        common = first.alternatives[index].keys() & second.alternatives[index].keys()
        apart = [abs(first.alternatives[index][token] - second.alternatives[index][token]) for token in common]
        if pair[0] == pair[1]:
            apart.append(abs(first.logprobs[index] - second.logprobs[index]))
        distance = max(distance, *apart) if apart else math.inf  # not one common candidate: other contexts
        if pair[0] != pair[1]:
            return Comparison(distance, index)
    if len(first.tokens) != len(second.tokens):
        return Comparison(math.inf, min(len(first.tokens), len(second.tokens)))
    return Comparison(distance, None)


def tolerance_of(noise: Sequence[float]) -> float:
    """The tolerance for a server whose uncached answers to equal requests were apart by these distances."""
    finite = [distance for distance in noise if math.isfinite(distance)]
    return max(SMALLEST_TOLERANCE, _ABOVE_NOISE * max(finite, default=0.0))
