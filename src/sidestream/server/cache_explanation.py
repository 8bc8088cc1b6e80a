"""Explanations of the prefix cache in replies: why tokens of a prompt were computed again, as JSON and in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sidestream.text import TokenizerLike
from sidestream.types import CacheExplanation, Relative

Json = dict[str, Any]
LEVELS = ("off", "blocks", "text")
"""How much an explanation tells of earlier requests of the same salt: nothing, whole blocks, or tokens and their text.
The last one also tells whether requests with another salt began alike.
"""

REASONS: Mapping[str, str] = {
    "reused": "reused",
    "evicted": "cached before, and evicted to make room",
    "not_seen": "no remembered request with this cache salt began with these tokens",
    "other_salt": "only seen with another cache_salt",
    "other_weights": "only computed with the weights before the last update",
    "reset": "cached before, and dropped by a reset of the cache",
    "after_missing": "seen before, but useless behind blocks that are missing",
    "unknown": "seen before, but in no tier, and the reason is not remembered",
    "load_failed": "a load from a tier failed, so they were computed",
    "load_late": "the read from the tier failed, or was not done within load_deadline_s",
    "request_limit": "in the tier, which the request does not let be read so far",
    "load_limit": "in the tier, but too many requests waited for it, or this one did so too often",
    "cost": "in the tier, but loading was expected to take longer than computing",
    "no_checkpoint": "cached, but no recurrent state is kept at their end",
    "window": "cached, but without the layers with a sliding window",
    "last_block": "the last tokens are always computed: they complete no block, or their logits are needed",
    "prefix_cache_off": "the server runs without a prefix cache",
}
"""Each reason of a `Stretch`, in words."""

FORGOTTEN: Json = {"remembered": None, "meaning": "the engine does not remember this request any more"}


def as_json(found: CacheExplanation | None, prompt: Sequence[int], tokenizer: TokenizerLike, *, text: bool) -> Json:
    """The field `cache_explanation` of a reply.

    text   whether tokens of earlier requests and requests with another salt may be told; else only whole blocks
    """
    if found is None:
        return FORGOTTEN
    stretches: list[Json] = []
    for one in found.stretches:
        reason = "not_seen" if one.reason == "other_salt" and not text else one.reason
        if stretches and stretches[-1]["reason"] == reason == "not_seen":
            stretches[-1]["stop"] = one.stop
            continue
        stretch: Json = {"start": one.start, "stop": one.stop, "reason": reason, "meaning": REASONS[reason]}
        stretch |= {"tier": one.tier} if one.tier else {}
        stretch |= {} if one.seconds_ago is None else {"seconds_ago": round(one.seconds_ago, 3)}
        stretches.append(stretch)
    return {
        "prompt_tokens": found.prompt_tokens,
        "block_tokens": found.block_tokens,
        "stretches": stretches,
        "nearest": None if found.relative is None else _nearest(found, found.relative, prompt, tokenizer, text=text),
        "remembered": {"requests": found.requests, "seconds": round(found.seconds, 1), "all": found.complete},
    }


def _nearest(
    found: CacheExplanation, near: Relative, prompt: Sequence[int], tokenizer: TokenizerLike, *, text: bool
) -> Json | None:
    """The nearest relative: where it differs and, if `text`, how."""

    def spell(tokens: Sequence[int]) -> str:
        return tokenizer.decode([one for one in tokens if one < tokenizer.vocab_size], skip_special_tokens=False)

    size = found.block_tokens
    block = near.shared_tokens // size
    if not text:
        if not block:
            return None
        own = prompt[block * size : (block + 1) * size]
        shown: Json = {"shared_tokens": block * size, "first_different_block": block, "text": spell(own)}
        return {"seconds_ago": round(near.seconds_ago, 3), **shown}
    at = near.shared_tokens - near.start
    sides: Json = {}
    for name, tokens in (("", near.own), ("other_", near.other)):
        sides[f"{name}token"] = tokens[at] if at < len(tokens) else None
        sides[f"{name}text"] = spell(tokens[at:])
    return {
        "seconds_ago": round(near.seconds_ago, 3),
        "shared_tokens": near.shared_tokens,
        "first_different_block": block,
        "position": near.shared_tokens if near.other and at < len(near.own) else None,
        "text_before": spell(near.own[:at]),
        **sides,
    }


def as_text(found: Json) -> list[str]:
    """The lines that `sidestream explain` prints for a reply's `cache_explanation`."""
    if not found.get("stretches"):
        return [str(found.get("meaning", "the reply has no explanation"))]
    lines = [f"prompt: {found['prompt_tokens']} tokens, in blocks of {found['block_tokens']}"]
    for one in found["stretches"]:
        ago = "" if one.get("seconds_ago") is None else f", {one['seconds_ago']:.1f} s ago"
        tier = f" ({one['tier']}{ago})" if one.get("tier") else ""
        lines.append(f"  tokens {one['start']} to {one['stop'] - 1}: {one['meaning']}{tier}")
    near, known = found["nearest"], found["remembered"]
    if near is None:
        lines.append("no earlier prompt that may be shown begins alike")
    else:
        whole = near["shared_tokens"] == found["prompt_tokens"]
        differs = "all" if whole else f"the first different block is number {near['first_different_block']}"
        lines.append(f"nearest earlier prompt: {near['shared_tokens']} leading tokens are the same, {differs}")
        if near.get("position") is not None:
            lines += [
                f"  first different token: number {near['position']}, behind {near['text_before']!r}",
                f"  here:  token {near['token']}, {near['text']!r}",
                f"  there: token {near['other_token']}, {near['other_text']!r}",
            ]
        elif near["text"]:
            lines.append(f"  from there, this prompt has {near['text']!r}")
    span = "since the engine's start" if known["all"] else f"of the last {known['seconds']:.0f} s"
    return [*lines, f"the engine remembers {known['requests']} earlier requests {span}"]
