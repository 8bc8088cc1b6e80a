"""Explains why a prompt was computed although the cache held such prompts before, from the record of its admission and
the history of requests and evictions (`CacheHistory`). Any thread may call it; the engine thread does not.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from sidestream.engine.output_stream import OutputStreams
from sidestream.engine.stats import Asked, CacheHistory
from sidestream.schedule.limits import Limits, reusable_tokens
from sidestream.schedule.request import Lookup
from sidestream.types import CacheExplanation, Relative, Stretch
from sidestream_kv.types import Key

# Tokens that an explanation has before and after the first difference.
_AROUND = 12
# Earlier requests, the newest ones, whose tokens are compared; of all others, only the keys of blocks.
_MOST_COMPARED = 64


def explain_last(
    name: str, streams: OutputStreams, history: CacheHistory, limits: Limits, *, now_s: float
) -> CacheExplanation | None:
    """Explain the last request with this name; None: it is not remembered."""
    known = [*history.requests(), *(history.asked(stream, now_s) for stream in streams.unfinished())]
    asked = next((one for one in reversed(known) if one.name == name and one.tokens), None)
    return None if asked is None else explain(asked, known, history, limits, now_s=now_s)


def explain(
    asked: Asked, others: Sequence[Asked], history: CacheHistory, limits: Limits, *, now_s: float
) -> CacheExplanation:
    """Explain the request `asked`. `others`: all remembered requests, from the oldest to the newest; those that began
    later than `asked` are ignored.
    """
    began_s = now_s if asked.began_s is None else asked.began_s
    earlier = [one for one in others if one.name != asked.name and one.began_s is not None and one.began_s < began_s]
    same = [one for one in earlier if one.cache == asked.cache]
    prompt, size = asked.tokens[: asked.num_prompt], limits.block_tokens
    shared, nearest = _nearest(asked, prompt, same, size)
    elsewhere = max(
        (
            (_common(prompt, one.tokens), "other_weights" if one.cache[0] == asked.cache[0] else "other_salt")
            for one in earlier[-_MOST_COMPARED:]
            if one.cache != asked.cache
        ),
        default=(0, ""),
    )
    oldest_s = min((one.ended_s for one in others), default=history.since_s)
    return CacheExplanation(
        asked.num_prompt,
        size,
        tuple(_stretches(asked, same, elsewhere, history, limits, began_s=began_s, now_s=now_s)),
        _relative(prompt, shared, nearest, now_s) if shared and nearest is not None else None,
        len(earlier),
        now_s - (history.since_s if history.is_complete else oldest_s),
        history.is_complete,
    )


def _relative(prompt: Sequence[int], shared: int, nearest: Asked, now_s: float) -> Relative:
    start = max(0, shared - _AROUND)
    around = slice(start, shared + _AROUND)
    return Relative(shared, now_s - nearest.ended_s, start, tuple(prompt[around]), tuple(nearest.tokens[around]))


def _nearest(asked: Asked, prompt: Sequence[int], same: Sequence[Asked], size: int) -> tuple[int, Asked | None]:
    """The request that shares the most leading tokens, as far as they are known, and their number."""
    blocks = [_shared_blocks(asked.keys, one.keys) for one in same]
    most = max(blocks, default=0)
    start, best, nearest = most * size, -1, None
    candidates = [one for one, count in zip(same, blocks, strict=True) if count == most]
    for one in reversed(candidates[-_MOST_COMPARED:]):
        shared = start + _common(prompt[start : start + size], one.tokens[start : start + size])
        if shared > best:
            best, nearest = shared, one
    return max(0, best), nearest


def _shared_blocks(one: Sequence[Key], other: Sequence[Key]) -> int:
    """Number of leading keys that are equal. Each key contains those before it, so a binary search finds it."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if one[middle] == other[middle] else (low, middle)
    return low


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Number of leading tokens that are equal."""
    most = min(len(one), len(other))
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), most)


def _stretches(
    asked: Asked,
    same: Sequence[Asked],
    elsewhere: tuple[int, str],
    history: CacheHistory,
    limits: Limits,
    *,
    began_s: float,
    now_s: float,
) -> Iterator[Stretch]:
    """The stretches of the prompt. Consecutive blocks of one reason are one stretch, of the latest eviction.

    elsewhere   number of leading tokens that a request with another salt or other weights shares, and which of both
    """
    size, end = limits.block_tokens, asked.num_prompt
    if not limits.prefix_cache:
        yield Stretch(0, end, "prefix_cache_off")
        return
    num_wanted = reusable_tokens(end, size) // size
    lookup = asked.lookup or Lookup(0, 0)
    if lookup.found:
        yield Stretch(0, lookup.found * size, "reused")
    if lookup.located > lookup.found:
        yield Stretch(lookup.found * size, lookup.located * size, lookup.reason, lookup.tier)
    absent = asked.keys[lookup.located : num_wanted]
    evictions = history.evictions(set(absent), until_s=began_s)
    computed_s = _computed_s(asked.keys[:num_wanted], same)
    reasons = [
        _reason(key, number, lookup.located, evictions, computed_s, history)
        for number, key in enumerate(absent, lookup.located)
    ]
    for number in range(lookup.located, min(num_wanted, elsewhere[0] // size)):
        if reasons[number - lookup.located][0] == "not_seen":
            reasons[number - lookup.located] = elsewhere[1], "", 0.0
    start = lookup.located
    for (reason, tier), group in itertools.groupby(reasons, key=lambda found: found[:2]):
        times = [at_s for _, _, at_s in group]
        ago_s = None if reason != "evicted" else now_s - max(times)
        yield Stretch(start * size, (start + len(times)) * size, reason, tier, ago_s)
        start += len(times)
    yield Stretch(num_wanted * size, end, "last_block")


def _computed_s(keys: Sequence[Key], same: Sequence[Asked]) -> list[float]:
    """For each block, when the last request that had computed it ended; shorter than `keys`: later blocks were never
    computed.
    """
    found: list[float] = []
    for one in same:
        count = min(_shared_blocks(keys, one.keys), one.num_computed)
        found += [-math.inf] * (count - len(found))
        found[:count] = [max(at_s, one.ended_s) for at_s in found[:count]]
    return found


def _reason(
    key: Key,
    number: int,
    located: int,
    evictions: dict[Key, tuple[float, str]],
    computed_s: Sequence[float],
    history: CacheHistory,
) -> tuple[str, str, float]:
    """Reason, tier and time of a block that no tier held, or that lies behind such a block."""
    ended_s = computed_s[number] if number < len(computed_s) else -math.inf
    at_s, tier = evictions.get(key, (-math.inf, ""))
    if tier:
        return "evicted", tier, at_s
    if number >= len(computed_s):
        return "not_seen", "", 0.0
    if ended_s < history.reset_s:
        return "reset", "", 0.0
    return ("after_missing" if number > located else "unknown"), "", 0.0
