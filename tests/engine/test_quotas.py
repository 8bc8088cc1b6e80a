"""Shares of the cache: an owner beyond its quota evicts its own KV, not that of others."""

from __future__ import annotations

from engine_rig import Rig, serving

from sidestream.config import CacheOptions

PROMPT = list(range(1, 24))  # 23 tokens: 5 blocks of 4 that a cache may supply
REUSABLE, STORED = 20, 28


def ask(rig: Rig, number: int, owner: str = "", quota: int | None = None) -> int:
    """The reused tokens of a request with prompt `number` of this owner."""
    reply = rig.ask([30 + number, *PROMPT[1:]], cache=CacheOptions(owner=owner, quota_tokens=quota))
    rig.settle()
    return reply.cached.total


def test_an_owner_beyond_its_quota_evicts_its_own_oldest_kv() -> None:
    with serving(slots=24) as rig:
        ask(rig, 0, "b")
        for number in range(1, 9):
            ask(rig, number, "a", STORED)
        rig.forget_device()
        assert [ask(rig, number) for number in (0, 8, 6)] == [REUSABLE, REUSABLE, 0]


def test_without_need_for_room_kv_beyond_a_quota_stays() -> None:
    with serving(slots=24) as rig:
        for number in range(3):
            ask(rig, number, "a", 0)
        assert [ask(rig, number) for number in range(3)] == [REUSABLE] * 3


def test_kv_that_another_owner_used_is_spared() -> None:
    with serving(slots=24) as rig:
        ask(rig, 1)
        ask(rig, 0, "b", STORED)
        ask(rig, 0, "a", STORED)
        ask(rig, 2, "a", STORED)
        ask(rig, 3)
        rig.forget_device()
        assert ask(rig, 0) == REUSABLE
