"""Ranks agree on the entries of a persistent tier when they open it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from proof.thread_group import thread_groups
from sidestream.ranks.shared_entries import keep_shared
from sidestream_kv.kv.layout import KVLayout
from sidestream_kv.offload.tiers.disk import DiskTier, entry_bytes
from sidestream_kv.offload.tiers.index import Entry, TierIndex, WriteGrant

HOST = torch.device("cpu")
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_tokens=4, dtype="float32")


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def agree(indices: list[TierIndex]) -> None:
    threads = [
        threading.Thread(target=keep_shared, args=(index, group, HOST))
        for index, group in zip(indices, thread_groups(len(indices)), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)


def index_of(*entries: tuple[int, int], next_serial: int) -> TierIndex:
    published = [Entry(key(number), serial) for number, serial in entries]
    return TierIndex(published, name="disk", max_entries=8, entry_bytes=1, next_serial=next_serial)


def test_only_entries_that_every_rank_holds_are_kept() -> None:
    # Of key 2 the ranks hold different writes.
    indices = [
        index_of((1, 0), (2, 3), (4, 5), next_serial=6),
        index_of((2, 2), (1, 0), (4, 5), (7, 9), next_serial=10),
        index_of((4, 5), (1, 0), next_serial=6),
    ]
    agree(indices)
    assert [set(index) for index in indices] == [{key(1), key(4)}] * 3
    assert [index.next_serial for index in indices] == [10] * 3
    leader = indices[0]
    grants = [leader.reserve(key(20 + number)) for number in range(4)]
    assert all(grant is not None and grant.entry.serial >= 10 for grant in grants)
    victims = {grant.victim for grant in grants if grant is not None}
    assert victims == {Entry(key(2), 2), Entry(key(2), 3), Entry(key(7), 9), None}


@pytest.mark.parametrize("counts", [(0, 0), (0, 2), (2, 0)])
def test_a_rank_without_entries_removes_those_of_all_ranks(counts: tuple[int, int]) -> None:
    indices = [index_of(*((number, number) for number in range(count)), next_serial=count) for count in counts]
    agree(indices)
    assert [len(index) for index in indices] == [0, 0]
    assert [index.next_serial for index in indices] == [max(counts)] * 2


def test_entries_that_only_one_rank_has_are_deleted_from_its_disk(tmp_path: Path) -> None:
    def opened() -> list[DiskTier]:
        return [
            DiskTier.open(tmp_path / name, layout=LAYOUT, fingerprint="f", capacity_bytes=4 * entry_bytes(LAYOUT))
            for name in ("rank 0", "rank 1")
        ]

    payload = memoryview(bytes(LAYOUT.block_bytes))
    tiers = opened()
    written = []
    for number in range(3):
        grant = tiers[0].index.reserve(key(number))
        assert grant is not None
        written.append(grant.entry)
        for rank, tier in enumerate(tiers):
            if number < 1 or rank == number % 2:  # keys 1 and 2 were written by one rank each before a crash
                tier.write(WriteGrant(grant.entry, grant.victim), payload)
    for tier in tiers:
        tier.close()
    tiers = opened()
    agree([tier.index for tier in tiers])
    grants = [tiers[0].index.reserve(key(5 + number)) for number in range(2)]
    for tier in tiers:
        for grant in grants:
            assert grant is not None
            tier.write(WriteGrant(grant.entry, grant.victim), payload)
    held = [written[0], *(grant.entry for grant in grants if grant is not None)]
    for tier in tiers:
        tier.close()
    assert [set(tier.index.entries) for tier in opened()] == [set(held)] * 2
