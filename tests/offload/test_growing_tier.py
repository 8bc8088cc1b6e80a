"""A host tier whose memory is pinned while the engine serves."""

from __future__ import annotations

from collections.abc import Sequence

from transfer_rig import Rig, key, keys

from sidestream_kv.offload.connector import TransferEvent
from sidestream_kv.offload.tickets import StoreAgain
from sidestream_kv.types import Key


def again(events: Sequence[TransferEvent]) -> list[Key]:
    """Keys of the blocks that the offload worker asks to have stored again."""
    return [key for event in events if isinstance(event, StoreAgain) for key in event.keys]


def test_the_host_tier_grows_while_it_is_in_use() -> None:
    """Its memory is pinned in the background (P7)."""
    rig = Rig(ready_slots=2)
    rig.stored(keys("a", "b"))
    assert rig.host.pool.size == 2
    assert rig.transfers.locate(keys("a", "b")) == ["host", "host"]
    rig.ready_slots = 5
    rig.clock.now_s += 1.0
    rig.stored(keys("c", "d", "e"))
    assert rig.host.pool.size == 5
    assert all(rig.host_holds(of) for of in keys("a", "b", "c", "d", "e"))
    rig.ready_slots = 8
    rig.clock.now_s += 1.0
    rig.poll()
    assert rig.host.pool.size == 8
    rig.close()
    rig.check_nothing_is_held()


def test_deferred_blocks_are_requested_again_oldest_first_as_the_tier_grows() -> None:
    rig = Rig(ready_slots=2)
    rig.stored(keys("a", "b", "c", "d"))
    rig.stored(keys("e"))
    assert [rig.host_holds(of) for of in keys("a", "b", "c", "d", "e")] == [True, True, False, False, False]
    assert rig.counted("store", "deferred") == 2
    assert rig.counted("store", "skipped") == 0
    assert rig.transfers.has_work  # a flush waits for them
    rig.ready_slots = 4
    rig.clock.now_s += 1.0
    assert again(rig.poll()) == [*keys("c", "d")]
    rig.ready_slots = 8
    rig.clock.now_s += 1.0
    assert again(rig.poll()) == [*keys("e")]
    assert not rig.transfers.has_work
    rig.close()
    rig.check_nothing_is_held()


def test_a_growing_tier_evicts_no_block_for_a_store() -> None:
    """With a third of the memory, LRU eviction would lose each conversation just before it comes back."""
    rig = Rig(ready_slots=2)
    rig.stored(keys("a", "b"))
    rig.stored(keys("c", "d"))
    assert rig.transfers.locate(keys("a", "b")) == ["host", "host"]
    rig.close()


def test_a_tier_whose_pinning_ended_early_evicts_as_usual() -> None:
    rig = Rig(ready_slots=2)
    rig.stored(keys("a", "b", "c"))
    rig.pins = False  # the limit of locked memory was reached
    rig.clock.now_s += 1.0
    assert again(rig.poll()) == [*keys("c")]
    rig.stored(keys("c"))
    assert rig.host_holds(key("c"))
    rig.stored(keys("d", "e", "f"))
    assert rig.counted("store", "skipped") == 1
    rig.close()
    rig.check_nothing_is_held()


def test_a_reset_forgets_deferred_stores() -> None:
    rig = Rig(ready_slots=2)
    rig.stored(keys("a", "b", "c"))
    rig.transfers.forget_all()
    rig.ready_slots = 8
    rig.clock.now_s += 1.0
    assert again(rig.poll()) == []
    assert not rig.transfers.has_work
    rig.close()


def test_deferred_blocks_are_bounded_by_the_final_number_of_slots() -> None:
    rig = Rig(ready_slots=1, num_blocks=16)
    rig.stored(keys(*"abcdefghijkl"))
    rig.ready_slots = 8
    rig.clock.now_s += 1.0
    assert again(rig.poll()) == [*keys(*"efghijkl")]
    rig.close()
