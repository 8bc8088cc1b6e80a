"""Finds prompts that break off from earlier prompts at the same early place each time, such as at a date or a counter
in a system prompt: the cache is useless for everything behind it. Used on the event loop only.

It compares the beginning of a prompt that reused little with the beginnings of the last few prompts. If both have the
same tokens again shortly after their first difference, only these tokens in between differ: an early break.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sidestream.text import TokenizerLike

log = logging.getLogger("sidestream.server")

LEAST_PROMPT = 256
"""Shorter prompts are not worth a warning."""
_MOST_COMPARED = 4096  # leading tokens of a prompt; a break behind them is not early
_LAST_PROMPTS = 16
_MOST_CHANGED = 32  # tokens between the first difference and the same text again
_SAME_AGAIN = 64  # tokens that must be equal there
_MOST_PLACES = 64
WARN_AT = 8
"""Breaks at a place, of prompts that mostly break there, before it is logged."""


@dataclass(slots=True)
class _Place:
    """A place at which prompts break, behind the tokens `prefix`."""

    salt: str
    prefix: tuple[int, ...]
    count: int = 0
    is_known: bool = False  # whether it was logged

    def fits(self, prompt: Sequence[int], salt: str) -> bool:
        return self.salt == salt and tuple(prompt[: len(self.prefix)]) == self.prefix


class EarlyBreaks:
    """Warns once for each place, and counts all prompts that break at places that were logged.

    count      adds to the metrics
    shows_text  whether the log may have the text that changes; else only positions and numbers of tokens
    """

    def __init__(
        self, *, count: Callable[[str, float], None], tokenizer: TokenizerLike, shows_text: bool = False
    ) -> None:
        self._count = count
        self._tokenizer = tokenizer
        self._shows_text = shows_text
        self._last: deque[tuple[str, tuple[int, ...]]] = deque(maxlen=_LAST_PROMPTS)
        self._places: deque[_Place] = deque(maxlen=_MOST_PLACES)

    def add(self, prompt: Sequence[int], salt: str, num_cached: int) -> None:
        """Compare a prompt, of which `num_cached` tokens were reused, with the last ones of the same salt."""
        head, early = tuple(prompt[:_MOST_COMPARED]), len(prompt) // 2
        shared, changed = num_cached, None
        other: tuple[int, ...] = ()
        if num_cached < early:
            last = [tokens for one, tokens in self._last if one == salt]
            shared, other = max(((_common(head, tokens), tokens) for tokens in last), default=(0, ()))
            if num_cached <= shared < early:
                changed = _changed(head[shared:], other[shared:])
        self._last.append((salt, head))
        if changed is None:
            for place in self._places:
                if place.fits(prompt, salt) and shared > len(place.prefix) + _MOST_CHANGED:
                    place.count = max(0, place.count - 1)
            return
        place = self._place(head, shared, salt)
        place.count += 1
        if place.count >= WARN_AT and not place.is_known:
            place.is_known = True
            self._warn(len(place.prefix), head[shared:], other[shared:], changed, len(prompt))
        if place.is_known:
            self._count("early_prefix_breaks_total", 1)

    def _place(self, head: tuple[int, ...], shared: int, salt: str) -> _Place:
        """The place with this break. A counter of several tokens breaks now at its last token, now further left."""
        for place in self._places:
            known = len(place.prefix)
            if abs(known - shared) <= _MOST_CHANGED and place.salt == salt:
                both = min(known, shared)
                if head[:both] == place.prefix[:both]:
                    place.prefix = head[:both]
                    return place
        self._places.append(place := _Place(salt, head[:shared]))
        return place

    def _warn(
        self, position: int, own: tuple[int, ...], other: tuple[int, ...], changed: tuple[int, int], num_tokens: int
    ) -> None:
        one, two = own[: changed[0]], other[: changed[1]]
        spell = self._tokenizer.decode
        shown = f": {spell(two)!r}, then {spell(one)!r}," if self._shows_text else ""
        log.warning(
            "prompts of about %d tokens differ each time at token %d%s in %d tokens, and have the same text behind "
            "them: the cache cannot reuse anything from there on; move what changes to the end of the prompt",
            num_tokens,
            position,
            shown,
            len(one),
        )


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Number of leading tokens that both have."""
    low, high, size = 0, min(len(one), len(other)), 16
    while low < high:  # a slice that is equal is followed by a longer one, and one that differs is halved
        stop = min(high, low + size)
        if one[low:stop] == other[low:stop]:
            low, size = stop, 2 * size
        elif stop - low == 1:
            break
        else:
            high, size = stop, (stop - low) // 2
    return low


def _changed(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, int] | None:
    """How many first tokens of each differ before both have the same `_SAME_AGAIN` tokens; None: they do not again."""
    most = min(len(one), len(other)) - _SAME_AGAIN
    for total in range(1, 2 * _MOST_CHANGED + 1):
        for skipped in range(max(0, total - _MOST_CHANGED), min(total, _MOST_CHANGED) + 1):
            at = total - skipped
            if max(skipped, at) > most or one[skipped] != other[at]:
                continue
            if one[skipped : skipped + _SAME_AGAIN] == other[at : at + _SAME_AGAIN]:
                return skipped, at
    return None
