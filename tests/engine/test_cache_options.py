"""What one request lets tiers do, and sessions: the KV of a conversation stays until its next turn or its end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from engine_rig import Rig, serving

from sidestream.config import CacheOptions
from sidestream.engine.explain import explain_last
from sidestream.engine.sessions import FIRST_TTL_S, LEAST_TTL_S
from sidestream.errors import RequestRejected
from sidestream.types import CachedPrefix, PrefixQuery
from sidestream_kv.types import HOST

PROMPT = list(range(1, 24))  # 23 tokens: 5 blocks of 4 that a cache may supply
REUSABLE = 20


def ask(rig: Rig, tokens: Sequence[int] = PROMPT, **cache: Any) -> dict[str, int]:
    """The reused tokens of a request with these options, by tier."""
    reply = rig.ask(tokens, cache=CacheOptions(**cache))
    rig.settle()
    return {tier: count for tier, count in reply.cached.by_tier.items() if count}


def churn(rig: Rig) -> None:
    """Send other prompts, of more blocks than every tier has."""
    for number in range(12):
        rig.ask([30 + number, *range(40, 62)])
    rig.settle()


def held(rig: Rig) -> CachedPrefix | None:
    """The prefix that is pinned."""
    found = rig.engine.prefixes.run("cached_prefixes", PrefixQuery(limit=9), timeout_s=20.0)
    return next((one for one in found if one.ttl_s is not None), None)


# ------------------------------------------------------------------ bounds


@pytest.mark.parametrize(("limit", "loaded"), [(0, 0), (7, 4), (12, 12), (1000, REUSABLE)])
def test_a_request_loads_no_more_tokens_than_it_allows(limit: int, loaded: int) -> None:
    with serving(slots=24) as rig:
        ask(rig)
        rig.forget_device()
        assert ask(rig, max_load_tokens=limit) == ({HOST: loaded} if loaded else {})


def test_tokens_on_the_device_do_not_count_as_loaded() -> None:
    with serving(slots=24) as rig:
        ask(rig)
        assert ask(rig, max_load_tokens=0) == {"device": REUSABLE}


def test_a_request_with_a_bound_joins_another_that_computes_the_same() -> None:
    with serving() as rig:
        with rig.hold("compute"):
            first = rig.submit(PROMPT)
            second = rig.submit(PROMPT, cache=CacheOptions(max_load_tokens=0))
        rig.expect(first, PROMPT)
        rig.expect(second, PROMPT)
        assert second.cached.device == REUSABLE


def test_only_named_tiers_and_host_memory_are_read(tmp_path: Path) -> None:
    with serving(slots=24, disk=tmp_path) as rig:
        ask(rig)
        rig.forget_device()
        rig.forget_host()
        assert ask(rig, load_tiers=()) == {}
        rig.forget_device()
        assert ask(rig, load_tiers=()) == {HOST: REUSABLE}
        rig.forget_device()
        rig.forget_host()
        assert ask(rig, load_tiers=("disk",)) == {"disk": REUSABLE}


@pytest.mark.parametrize(("limit", "stored"), [(0, 0), (9, 8), (1000, 28)])
def test_a_request_stores_no_more_of_its_first_tokens_than_it_allows(limit: int, stored: int) -> None:
    with serving(slots=24) as rig:
        ask(rig, max_offload_tokens=limit)
        tiers = rig.engine.parts.tiers
        assert tiers is not None and tiers.host.pool.num_keys * 4 == stored


def test_the_explanation_says_that_the_request_itself_allowed_no_more() -> None:
    with serving(slots=24) as rig:
        ask(rig)
        rig.forget_device()
        rig.ask(PROMPT, name="bounded", cache=CacheOptions(max_load_tokens=8))
        engine = rig.engine
        found = explain_last(
            "bounded", engine.streams, engine.history, engine.parts.scheduler.limits, now_s=rig.device.now()
        )
        assert found is not None
        assert ("request_limit", HOST) in [(stretch.reason, stretch.tier) for stretch in found.stretches]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_load_tokens": -1}, r"max_load_tokens is -1: it must be a whole number in \[0"),
        ({"max_offload_tokens": 1.5}, "max_offload_tokens is 1.5: it must be a whole number"),
        ({"load_tiers": (1,)}, r"load_tiers is \(1,\): give names of tiers"),
        ({"session": "x" * 1025}, "give a text of at most 1024 characters"),
        ({"session_ttl_s": -1.0}, "session_ttl_s is -1.0: it must be a number in"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestRejected, match=message):
        CacheOptions(**options)


# ------------------------------------------------------------------ sessions


def test_a_session_keeps_its_kv_while_others_are_evicted() -> None:
    with serving(slots=24) as rig:
        ask(rig, session="a")
        churn(rig)
        assert ask(rig) == {HOST: REUSABLE}


def test_the_next_turn_of_a_session_takes_the_place_of_the_one_before() -> None:
    with serving(slots=32) as rig:
        ask(rig, session="a")
        first = held(rig)
        ask(rig, [*PROMPT, *range(30, 38)], session="a")
        found = rig.engine.prefixes.run("cached_prefixes", PrefixQuery(limit=9), timeout_s=20.0)
        (second,) = [one for one in found if one.ttl_s is not None]
        assert first is not None and second.hint and second.tokens > first.tokens


def test_sessions_of_different_salts_are_different() -> None:
    with serving(slots=48) as rig:
        for salt in ("a", "b"):
            rig.submit(PROMPT, cache_salt=salt, cache=CacheOptions(session="s")).wait()
        rig.settle()
        assert len(rig.engine.prefixes.sessions) == 2
        query = PrefixQuery(name="s", cache_salt=b"c")
        assert not rig.engine.prefixes.run("close_session", query, timeout_s=20.0)


@pytest.mark.parametrize(
    ("pause_s", "options", "ttl_s"),
    [
        (None, {}, FIRST_TTL_S),
        (None, {"max_ttl_s": 20.0}, 20.0),
        (None, {"session_ttl_s": 7.0}, 7.0),
        (1.0, {}, LEAST_TTL_S),
        (100.0, {}, 200.0),
        (4000.0, {}, 3600.0),
    ],
)
def test_the_time_is_learned_from_the_pauses_of_the_session(
    pause_s: float | None, options: dict[str, float], ttl_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(slots=32) as rig:
        if pause_s is not None:
            ask(rig, session="a")
            session = rig.engine.prefixes.sessions._sessions["", "a"]
            session.ended_s -= pause_s
        ask(rig, session="a", **options)
        found = held(rig)
        assert found is not None and found.ttl_s == pytest.approx(ttl_s, abs=5.0, rel=0.05)


@pytest.mark.parametrize(("tier", "slots"), [("device", 0), (HOST, 24)])
def test_the_kv_of_a_closed_session_is_evicted_first(tier: str, slots: int) -> None:
    def forget_device() -> None:
        if slots:
            rig.forget_device()

    with serving(slots=slots) as rig:
        ask(rig, session="a")
        other = [60, *PROMPT[1:]]
        ask(rig, other)
        forget_device()
        assert ask(rig) == {tier: REUSABLE}  # used later than the other, but the session is closed
        (closed,) = rig.engine.prefixes.run("close_session", PrefixQuery(name="a"), timeout_s=20.0)
        assert closed.tiers[tier] == 7 and held(rig) is None
        rig.settle()
        for number in range(3):  # needs more than the free blocks, but not those of the other prompt
            rig.ask([70 + number, *range(40, 52)])
        rig.settle()
        forget_device()
        assert ask(rig, other) == {tier: REUSABLE}
        assert ask(rig, PROMPT).get(tier, 0) < REUSABLE


def test_a_closed_session_leaves_the_blocks_of_another_session_alone() -> None:
    with serving(slots=48) as rig:
        ask(rig, session="a")
        ask(rig, [*PROMPT, 90, 91], session="b")
        rig.engine.prefixes.run("close_session", PrefixQuery(name="a"), timeout_s=20.0)
        churn(rig)
        assert ask(rig) == {HOST: REUSABLE}


def test_a_session_that_was_closed_is_unknown() -> None:
    with serving(slots=24) as rig:
        ask(rig, session="a")
        assert rig.engine.prefixes.run("close_session", PrefixQuery(name="a"), timeout_s=20.0)
        assert not rig.engine.prefixes.run("close_session", PrefixQuery(name="a"), timeout_s=20.0)
