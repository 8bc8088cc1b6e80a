"""Operations on prefixes: pinned ones stay in a tier, until their time, a reset or a drop; lists tell of them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from engine_rig import Rig, serving

from sidestream.errors import RequestRejected
from sidestream.types import CachedPrefix, PrefixQuery

PROMPT = list(range(1, 24))


def operate(rig: Rig, operation: str, tokens: Sequence[int] = (), salt: str = "", **query: Any) -> list[CachedPrefix]:
    asked = PrefixQuery(**query) if "limit" in query or "name" in query else PrefixQuery.of(tokens, salt, **query)
    return list(rig.engine.prefixes.run(operation, asked, timeout_s=20.0))


def pin(rig: Rig, tokens: Sequence[int], **query: Any) -> CachedPrefix:
    (pinned,) = operate(rig, "pin_prefix", tokens, **{"ttl_s": 60.0, **query})
    return pinned


def churn(rig: Rig, requests: int = 12) -> None:
    """Send other prompts, of more blocks than every tier has."""
    for number in range(requests):
        rig.ask([30 + number, *range(40, 62)])
    rig.settle()


def test_a_pinned_prefix_stays_in_host_memory_and_on_disk_while_others_are_evicted(tmp_path: Path) -> None:
    with serving(slots=24, disk=tmp_path, disk_blocks=32) as rig:
        rig.ask(PROMPT)
        rig.settle()
        pinned = pin(rig, PROMPT)
        churn(rig)
        num_blocks = pinned.tokens // rig.engine.parts.layout.block_tokens
        (listed,) = [one for one in operate(rig, "cached_prefixes", limit=9) if one.ttl_s is not None]
        assert (listed.tiers["host"], listed.tiers["disk"]) == (num_blocks, num_blocks) and 0 < (
            listed.ttl_s or 0
        ) <= 60
        assert rig.ask(PROMPT).cached.host == pinned.tokens


def test_without_a_pin_the_same_prefix_is_evicted(tmp_path: Path) -> None:
    with serving(slots=24, disk=tmp_path, disk_blocks=32) as rig:
        rig.ask(PROMPT)
        churn(rig)
        assert rig.ask(PROMPT).cached.total == 0


def test_without_other_tiers_a_pin_holds_on_the_device_and_gives_way_to_requests() -> None:
    with serving(blocks=24) as rig:
        rig.ask(PROMPT)
        assert pin(rig, PROMPT).tiers.keys() == {"device"}
        churn(rig)
        assert rig.ask(PROMPT).cached.device > 0
        long = [rig.submit([number, *range(40, 70)], 30) for number in range(1, 4)]
        for number, reply in enumerate(long, 1):
            rig.expect(reply, [number, *range(40, 70)], 30)


def test_a_pool_full_of_pins_serves_and_closes() -> None:
    with serving(blocks=24, slots=8) as rig:
        for number in range(1, 4):
            rig.ask([number, *range(40, 50)])
            rig.settle()
            pin(rig, [number, *range(40, 50)], hint=True)
        churn(rig)


def test_a_pin_beyond_half_of_a_tier_is_refused_and_a_hint_is_left_out() -> None:
    with serving(slots=8) as rig:
        rig.ask(PROMPT)
        rig.settle()
        with pytest.raises(RequestRejected, match=r"pins hold 0 of at most 4 blocks \(50% of the tier\)"):
            pin(rig, PROMPT)
        assert pin(rig, PROMPT, hint=True).ttl_s is None
        assert not [one for one in operate(rig, "cached_prefixes", limit=9) if one.ttl_s is not None]


@pytest.mark.parametrize("tier", [None, "host", "disk"])
def test_a_reset_ends_pins_in_the_tiers_that_it_drops(tier: str | None, tmp_path: Path) -> None:
    with serving(slots=24, disk=tmp_path) as rig:
        rig.ask(PROMPT)
        rig.settle()
        pin(rig, PROMPT)
        parts = rig.engine.parts
        assert parts.tiers is not None
        rig.engine.reset_prefix_cache(tier)
        owners = (parts.tiers.host.pool.pins, parts.tiers.persistent["disk"].index.prefix_pins)
        held = [bool(pins and pins.held) for pins in owners]
        assert held == [tier == "disk", tier == "host"]


def test_new_weights_end_all_pins() -> None:
    with serving(slots=24) as rig:
        rig.ask(PROMPT)
        rig.settle()
        pin(rig, PROMPT)
        done = rig.engine.update_weights(lambda: None, fingerprint="other")
        assert done.wait(20)
        rig.ask(PROMPT)
        assert not [one for one in operate(rig, "cached_prefixes", limit=9) if one.ttl_s is not None]


def test_a_pin_ends_by_prompt_or_by_name_and_holds_within_its_salt_only() -> None:
    with serving(slots=32) as rig:
        rig.submit(PROMPT, cache_salt="a").wait()
        rig.settle()
        with pytest.raises(RequestRejected, match="none of the 20 tokens"):
            pin(rig, PROMPT)
        pinned = pin(rig, PROMPT, salt="a")
        assert not operate(rig, "unpin_prefix", PROMPT)
        assert [one.name for one in operate(rig, "unpin_prefix", PROMPT, "a")] == [pinned.name]
        pin(rig, PROMPT, salt="a")
        assert len(operate(rig, "unpin_prefix", name=pinned.name)) == 1
        assert not operate(rig, "unpin_prefix", name=pinned.name)


def test_a_dropped_prefix_is_computed_again_and_the_counts_are_true(tmp_path: Path) -> None:
    with serving(slots=24, disk=tmp_path) as rig:
        rig.ask(PROMPT)
        rig.settle()
        pinned = pin(rig, PROMPT)
        num_blocks = pinned.tokens // rig.engine.parts.layout.block_tokens
        assert operate(rig, "drop_prefix", PROMPT, tier="host")[0].tiers == {"host": num_blocks}
        assert operate(rig, "drop_prefix", PROMPT, tier="host")[0].tiers == {"host": 0}
        (left,) = operate(rig, "cached_prefixes", limit=9)
        assert left.ttl_s is not None and left.tiers == {"device": num_blocks, "host": 0, "disk": num_blocks}
        assert operate(rig, "drop_prefix", PROMPT)[0].tiers == {"device": num_blocks, "host": 0, "disk": num_blocks}
        assert rig.ask(PROMPT).cached.total == 0
        assert not [one for one in operate(rig, "cached_prefixes", limit=9) if one.ttl_s is not None]
        with pytest.raises(RequestRejected, match="this engine has device, host, disk"):
            operate(rig, "drop_prefix", PROMPT, tier="tape")


def test_a_prefetched_prefix_comes_from_host_memory(tmp_path: Path) -> None:
    with serving(slots=24, disk=tmp_path) as rig:
        rig.ask(PROMPT)
        rig.settle()
        rig.forget_device()
        rig.forget_host()
        (cached,) = operate(rig, "prefetch_prefix", PROMPT)
        num_blocks = len(PROMPT) // rig.engine.parts.layout.block_tokens
        assert cached.tiers == {"device": 0, "host": 0, "disk": num_blocks}
        rig.settle()
        reply = rig.ask(PROMPT)
        assert reply.cached.host > 0 and reply.cached.disk == 0
        assert operate(rig, "prefetch_prefix", [1, *PROMPT])[0].tokens == 0


def test_a_prefetch_reads_no_more_blocks_than_half_of_host_memory_holds(tmp_path: Path) -> None:
    with serving(slots=8, disk=tmp_path) as rig:
        rig.ask(PROMPT)
        rig.settle()
        rig.forget_host()
        operate(rig, "prefetch_prefix", PROMPT)
        rig.settle()
        assert rig.counted("transfers_total", "disk-read", "done") == 4


def test_blocks_that_only_the_device_holds_are_stored_when_they_are_pinned() -> None:
    with serving(slots=24) as rig:
        rig.ask(PROMPT)
        rig.settle()
        rig.forget_host()
        pin(rig, PROMPT)
        rig.settle()
        rig.forget_device()
        assert rig.ask(PROMPT).cached.host > 0


def test_the_list_names_the_prefixes_that_requests_share_the_most_used_first() -> None:
    with serving(blocks=48) as rig:
        size = rig.engine.parts.layout.block_tokens
        shared = list(range(1, 2 * size + 1))
        for number in range(3):
            rig.ask([*shared, *[50 + number] * (2 * size)])
        for _ in range(2):
            rig.ask([*shared, *[50] * (2 * size)])
        first, second, *others = operate(rig, "cached_prefixes", limit=5)
        assert (first.tokens, first.hits, first.token_ids) == (2 * size, 5, tuple(shared))
        assert (second.tokens, second.hits, second.ttl_s) == (4 * size, 3, None) and not others
        assert first.tiers == {"device": 2} and first.age_s is not None and first.age_s >= 0
        assert len(operate(rig, "cached_prefixes", limit=1)) == 1


@pytest.mark.parametrize(
    ("tokens", "ttl_s", "said"),
    [
        ([1], 60.0, "prompt has 1 tokens, a block has"),
        (PROMPT, 0.0, "ttl_s is 0"),
        (PROMPT, 1e9, "give seconds above 0, up to 604800"),
        (PROMPT, float("nan"), "ttl_s is nan"),
        ([1 << 31], 60.0, "whole numbers"),
    ],
)
def test_a_bad_pin_is_refused_with_the_bound(tokens: list[int], ttl_s: float, said: str) -> None:
    with serving(slots=24) as rig, pytest.raises(RequestRejected, match=said):
        pin(rig, tokens, ttl_s=ttl_s)


def test_a_request_from_before_a_reset_pins_nothing_after_it() -> None:
    with serving(slots=24) as rig:
        reply = rig.submit(PROMPT, max_tokens=40)
        reply.wait_for_tokens(3)
        rig.engine.reset_prefix_cache()
        assert pin(rig, PROMPT, hint=True).tokens == 0
        reply.wait()


def test_pins_from_several_threads_and_requests_at_once_leave_the_engine_serving() -> None:
    with serving(slots=16) as rig:
        prompts = [[number, *range(40, 55)] for number in range(1, 9)]
        for prompt in prompts:
            rig.ask(prompt)

        def work(part: Sequence[Sequence[int]]) -> None:
            for prompt in part:
                pin(rig, prompt, hint=True)
                operate(rig, "unpin_prefix", prompt)

        threads = [threading.Thread(target=work, args=(prompts[at::2],)) for at in range(2)]
        for thread in threads:
            thread.start()
        replies = [rig.submit(prompt) for prompt in prompts]
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        for prompt, reply in zip(prompts, replies, strict=True):
            rig.expect(reply, prompt)
