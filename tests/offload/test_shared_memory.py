"""Several engines in the memory of one cache process: what one writes, others find, and no slot is written while it is
read or written elsewhere.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from shared_rig import LAYOUT, NUM_SLOTS, Engine, key, keys, running

from sidestream_kv.device.base import Memory
from sidestream_kv.device.cpu import CpuDevice
from sidestream_kv.errors import InvariantError
from sidestream_kv.kv.pool import PoolExhausted
from sidestream_kv.metrics import Metrics
from sidestream_kv.offload.tiers.stack import Checksums, HostTier
from sidestream_kv.types import Access
from sidestream_order.checker import Checker

New = Callable[..., Engine]


@pytest.fixture
def new(tmp_path: Path) -> Iterator[New]:
    """Makes engines in one memory; at the end, each of them must be in order."""
    engines: list[Engine] = []
    with running(tmp_path / "cache"):

        def make(**options: object) -> Engine:
            engines.append(Engine(tmp_path / "cache", **options))  # type: ignore[arg-type]
            return engines[-1]

        yield make
        for engine in engines:
            engine.close()


def test_an_engine_finds_what_another_has_written(new: New) -> None:
    one, other = new(), new()
    one.store(1, 2)
    assert other.found(1, 2, 3) == [1, 2]
    other.store(3)
    assert one.found(1, 2, 3) == [1, 2, 3]


def test_an_engine_that_starts_again_finds_everything_at_once(new: New) -> None:
    first = new()
    first.store(1, 2, 3)
    first.close()
    again = new()
    assert again.pool.match(keys(1, 2, 3)) != []
    assert again.found(1, 2, 3) == [1, 2, 3]


def test_a_slot_that_is_being_written_is_neither_found_nor_taken(new: New) -> None:
    one, other = new(slots=1), new(slots=1)
    one.store(1)
    assert other.found(1) == [1]
    writing = one.pool.take_some(1)
    assert other.pool.lease(keys(1)).ids == []  # it has not looked again
    assert other.pool.take_some(1).ids == []
    assert other.found(1) == []
    writing.release()
    assert other.found(1) == []
    other.store(2)
    assert one.found(1, 2) == [2]


def test_a_void_record_under_a_late_lease_is_not_read(new: New) -> None:
    one, other = new(slots=1), new(slots=1)
    one.store(1)
    assert other.found(1) == [1]
    one.store(2)
    assert other.pool.match(keys(1)) == [0]  # it has not looked again
    assert other.pool.lease(keys(1)).ids == []
    assert other.found(1, 2) == [2]


def test_a_slot_that_another_engine_reads_is_not_evicted(new: New) -> None:
    one, other = new(), new()
    slots = one.store(1, 2, 3, 4)
    assert other.found(1, 2, 3, 4) == [1, 2, 3, 4]
    reading = one.pool.lease(keys(2))
    taken = other.pool.take_some(NUM_SLOTS)
    assert set(taken.ids) == {*slots} - {*reading.ids}
    taken.release()
    with pytest.raises(PoolExhausted, match="4 asked for, 3 of 4 available"):
        other.pool.take(NUM_SLOTS)
    assert other.found(2) == [2]  # both read it
    reading.release()
    assert len(other.store(5, 6, 7, 8)) == NUM_SLOTS


def test_a_read_of_two_transfers_ends_with_the_second(new: New) -> None:
    one, other = new(slots=1), new(slots=1)
    one.store(1)
    assert other.found(1) == [1]
    first, second = one.pool.lease(keys(1)), one.pool.lease(keys(1))
    first.release()
    assert other.pool.take_some(1).ids == []
    second.release()
    other.pool.refresh()
    other.store(2)


def test_blocks_that_were_written_a_moment_ago_are_not_evicted_unseen(new: New) -> None:
    one, other = new(), new()
    one.store(1, 2)
    other.store(3, 4)  # to it, all slots are free
    assert one.found(1, 2, 3, 4) == [1, 2, 3, 4]


def test_a_published_block_is_read_by_others_while_it_is_still_in_use(new: New) -> None:
    one, other = new(), new()
    using = one.write(1)
    assert other.found(1) == [1]
    using.release()


def test_a_run_of_keys_ends_at_a_block_that_is_gone(new: New) -> None:
    one, other = new(), new()
    one.store(1, 2, 3, 4)
    assert other.found(1, 2, 3, 4) == [1, 2, 3, 4]
    one.pool.forget([one.pool.get(key(3)) or 0])
    lease = other.pool.lease(keys(1, 2, 3, 4))
    assert len(lease.ids) == 2
    assert len(other.pool.match(keys(1, 2, 3, 4))) == 2
    lease.release()
    other.store(5)  # no lease was left behind


def test_the_least_recently_used_block_of_all_engines_is_evicted(new: New) -> None:
    one, other = new(), new()
    one.store(1, 2, 3, 4)
    assert other.found(2, 1) == [2, 1]
    one.pool.refresh()
    one.pool.demote(keys(3))
    other.pool.refresh()
    other.store(5)
    assert one.found(1, 2, 3, 4, 5) == [1, 2, 4, 5]
    one.pool.touch(keys(4))
    other.pool.refresh()
    other.store(6)
    assert one.found(1, 2, 4, 5, 6) == [2, 4, 5, 6]


def test_a_block_written_twice_takes_one_place_in_the_index(new: New) -> None:
    one, other = new(), new()
    one.store(1)
    other.store(1)
    assert one.found(1) == other.found(1) == [1]
    one.store(2, 3, 4)  # one of the copies gives way
    assert other.found(1, 2, 3, 4) == [1, 2, 3, 4]


def test_a_reset_and_a_drop_reach_all_engines(new: New) -> None:
    one, other = new(), new()
    one.store(1, 2)
    assert other.found(1, 2) == [1, 2]
    other.pool.forget([other.pool.get(key(1)) or 0])
    assert one.found(1, 2) == other.found(1, 2) == [2]
    other.pool.forget_all()
    assert one.found(1, 2) == other.found(1, 2) == []


def test_a_block_that_is_read_during_a_reset_stays_in_place(new: New) -> None:
    one, other = new(slots=1), new(slots=1)
    one.store(1)
    assert other.found(1) == [1]
    reading = other.pool.lease(keys(1))
    one.pool.forget_all()
    assert one.pool.take_some(1).ids == []
    reading.release()
    one.store(2)


def test_blocks_beyond_the_ready_memory_are_found_as_it_grows(new: New) -> None:
    new().store(1, 2, 3, 4)
    late = new(ready=2)
    assert len(late.found(1, 2, 3, 4)) == 2
    late.pool.grow(NUM_SLOTS)
    assert late.found(1, 2, 3, 4) == [1, 2, 3, 4]


def test_other_engines_changes_are_reported_by_slot(new: New) -> None:
    one, other = new(), new()
    rewritten: list[int] = []
    other.pool.on_rewrite = rewritten.extend
    slots = one.store(1, 2)
    assert other.found(1, 2) == [1, 2]
    assert rewritten == slots
    other.store(3)
    other.pool.refresh()
    assert rewritten == slots


def test_the_order_checker_accepts_blocks_that_other_engines_have_written(new: New) -> None:
    one, other, checker = new(), new(), Checker()
    other.store(1)
    checker.allocated("host", len(one.memory.pages))
    memory = Memory("host", (torch.frombuffer(one.memory.pages, dtype=torch.uint8),))
    host = HostTier(memory, LAYOUT, shared=one.memory, tracer=checker)  # which finds block 1
    other.store(2)
    host.pool.refresh()
    lease = host.pool.lease(keys(1, 2))
    checker.host_touched(lambda: [Access("host", *LAYOUT.span(slot), False) for slot in lease.ids], "a read")
    lease.release()
    assert [str(finding) for finding in checker.findings] == []


def test_a_block_that_another_engine_wrote_has_no_checksum_of_an_earlier_one(new: New) -> None:
    one, other = new(slots=1), new(slots=1)
    memory = Memory("host", (torch.frombuffer(one.memory.pages, dtype=torch.uint8),))
    host, device = HostTier(memory, LAYOUT, shared=one.memory), CpuDevice(compute_threads=1)
    checksums = Checksums(host, share=1.0, device=device, metrics=Metrics())
    lease = host.pool.take_some(1)
    checksums.compute(lease.ids)
    host.pool.publish(lease.ids[0], key(1))
    lease.release()
    other.pool.refresh()
    other.store(2)
    host.pool.refresh()
    lease = host.pool.lease(keys(2))
    assert checksums.changed(lease.ids) == []
    lease.release()
    device.close()


def test_slots_that_are_not_in_use_are_leased_by_their_keys(new: New) -> None:
    engine = new()
    slots = engine.store(1)
    with pytest.raises(InvariantError, match="lease them by their keys"):
        engine.pool.share(slots)


def test_engines_go_on_after_the_cache_process_has_ended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with running(tmp_path / "cache"):
        one, other = Engine(tmp_path / "cache"), Engine(tmp_path / "cache")
        one.store(1)
    caplog.set_level(logging.WARNING)
    assert other.found(1) == [1]
    one.store(2)
    assert one.found(1, 2) == other.found(1, 2) == [1, 2]
    assert caplog.text.count("has ended: this engine keeps its memory") == 2
    one.close()
    other.close()
