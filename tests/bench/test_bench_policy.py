"""Replays of traces on simulated tiers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bench.policy import EVICTIONS, Cache, _replayed, agents, measure
from sidestream.errors import ConfigError


@pytest.mark.parametrize("kind", EVICTIONS.values(), ids=EVICTIONS)
def test_every_policy_holds_what_was_added_last_and_no_more_than_its_capacity(kind: type[Cache]) -> None:
    drawn, cache = random.Random(0), kind(20)
    for _ in range(2000):
        key = drawn.randrange(60) if drawn.random() < 0.5 else drawn.randrange(10)
        if key in cache:
            cache.use([key])
        else:
            cache.add(key)
            assert key in cache
        assert sum(key in cache for key in range(60)) <= 20


@pytest.mark.parametrize(("evict", "kept"), [("lru", {1, 3}), ("fifo", {2, 3})])
def test_a_key_that_was_used_stays_where_the_policy_looks_at_uses(evict: str, kept: set[int]) -> None:
    cache = EVICTIONS[evict](2)
    cache.add(1)
    cache.add(2)
    cache.use([1])
    cache.add(3)
    assert {key for key in range(4) if key in cache} == kept


@pytest.mark.parametrize("evict", ["s3fifo", "arc"])
def test_a_scan_does_not_evict_what_was_used_again(evict: str) -> None:
    cache = EVICTIONS[evict](20)
    for key in range(5):
        cache.add(key)
    for _ in range(3):
        cache.use(range(5))
    for key in range(100, 200):
        cache.add(key)
    assert all(key in cache for key in range(5))


def test_only_leading_blocks_are_reused_and_reads_are_those_behind_host_memory() -> None:
    requests = [(1, 2, 3), (7, 8), (1, 2, 3), (1, 9, 3)]
    assert _replayed(requests, "lru", "through", 100, 2) == (4 / 11, 6, 4)


@pytest.mark.parametrize(
    ("write", "capacity", "written"),
    [("through", 100, 9), ("second", 100, 3), ("evicted", 100, 10), ("returning", 100, 3), ("reused", 4, 4)],
)
def test_each_way_to_write_writes_its_own_blocks(write: str, capacity: int, written: int) -> None:
    requests = [(1, 2, 3), (4, 5, 6), (1, 2, 3), (7, 8, 9), (10, 11), (12, 13)]
    if write == "through":
        requests = requests[:4]
    assert _replayed(requests, "lru", write, capacity, 3)[1] == written


def test_a_trace_that_is_none_is_refused_with_its_path(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    for text in ("", "{}", "[1]", "hash_ids"):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"trace\.jsonl is"):
            measure(traces=[path], share=0.2, host_share=0.1, on_progress=lambda _: None)


def test_made_up_agents_are_the_same_each_time_and_come_back() -> None:
    requests = [*agents(sessions=20)]
    assert requests == [*agents(sessions=20)]
    assert _replayed(requests, "lru", "through", 100_000, 2)[0] > 0.5
