"""Which blocks a persistent tier writes, and when: see `sidestream_kv.offload.stores`."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from transfer_rig import Rig, key, keys

from sidestream_kv.config import OffloadConfig
from sidestream_kv.errors import ConfigError
from sidestream_kv.offload.stores import SeenKeys
from sidestream_kv.offload.tiers.stack import write_policies
from sidestream_kv.types import Key

REUSED = {"disk": "reused"}


OLD = keys(*range(4))


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """The disk is full of OLD."""
    rig = Rig(tmp_path, disk_blocks=len(OLD), write_policies=REUSED)
    rig.stored(OLD)
    rig.host.pool.forget_all()
    yield rig
    rig.close()
    rig.check_nothing_is_held()


def on_disk(rig: Rig) -> set[Key]:
    assert rig.disk is not None
    return set(rig.disk.index).difference(OLD)


def test_a_full_disk_does_not_get_a_block_that_nothing_reuses(rig: Rig) -> None:
    assert rig.disk is not None
    assert len(rig.disk.index) == 4  # a disk with free space gets every block
    rig.stored(keys("a", "b"))
    assert on_disk(rig) == set()
    assert rig.counted("disk-write", "not_reused") == 2


def test_a_block_that_is_stored_again_after_its_eviction_is_written(rig: Rig) -> None:
    rig.stored(keys("a", "b"))
    rig.host.pool.forget_all()
    rig.stored(keys("a", "c"))
    assert on_disk(rig) == {key("a")}


def test_blocks_of_a_returning_request_are_written_with_those_that_it_found(rig: Rig) -> None:
    rig.stored(keys("a", "b"), prefix=keys("a", "b"))
    rig.stored(keys("c"), prefix=keys("a", "b", "c"), returning=keys("a", "c"))
    assert on_disk(rig) == {*keys("a", "c")}


def test_a_loaded_block_is_written_unless_a_preempted_request_loads_its_own(rig: Rig) -> None:
    rig.stored(keys("a", "b"))
    for epoch, written in ((1, set[Key]()), (0, {key("a")})):
        lease = rig.blocks.take(1)
        rig.load(keys("a"), lease.ids, epoch=epoch)
        rig.finish("load", "disk-write-0")
        rig.let_go(lease)
        assert on_disk(rig) == written


def test_a_flush_writes_the_other_blocks_the_last_used_first(tmp_path: Path) -> None:
    rig = Rig(tmp_path, disk_blocks=2, write_policies=REUSED)
    for name in "abc":
        rig.stored(keys(name))
    assert on_disk(rig) == {*keys("a", "b")}
    rig.host.pool.touch(keys("a"))
    assert rig.transfers.flush(timeout_s=10)
    assert on_disk(rig) == {*keys("a", "c")}  # as many as the disk can hold
    rig.close()


def test_a_flush_writes_blocks_whose_store_has_not_ended(rig: Rig) -> None:
    with rig.hold("store"):
        rig.store(keys("a"), [0])
        rig.transfers.write_rest()
        rig.finish("compute")
        assert on_disk(rig) == set()
        assert rig.transfers.has_work
    rig.finish("store", "disk-write-0")
    assert on_disk(rig) == {key("a")}


def test_a_flush_writes_more_blocks_than_may_be_in_flight(tmp_path: Path) -> None:
    rig = Rig(tmp_path, write_policies=REUSED)
    with rig.hold("disk-write-0"):
        rig.store(keys(*"abcdefgh"), range(8))
        rig.finish("compute", "store")
    assert rig.counted("disk-write", "skipped") == 4
    assert rig.transfers.flush(timeout_s=10)
    assert on_disk(rig) == {*keys(*"abcdefgh")}
    rig.close()


def test_a_flush_ends_at_its_timeout_and_with_a_host_tier_of_one_slot(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "small", num_slots=1, write_policies=REUSED)
    rig.stored(keys("a"))
    assert rig.transfers.flush(timeout_s=10)
    rig.close()
    rig = Rig(tmp_path / "slow", disk_blocks=4, write_policies=REUSED)
    rig.stored(keys(*"stuvwxyz"))
    rig.stored(keys(*"abcdefgh"))
    with rig.hold("disk-write-0"):
        rig.clock.step_s = 1.0
        assert not rig.transfers.flush(timeout_s=10)
        rig.settle()
        assert rig.transfers.sizes()["blocks to write"] == 0
    rig.close()
    assert on_disk(rig).isdisjoint(keys(*"abcdefgh"))  # neither waiting blocks nor writes that had not begun


def test_a_reset_stops_the_writes_of_a_flush(rig: Rig) -> None:
    rig.stored(keys(*"abcdefgh"))
    with rig.hold("disk-write-0"):
        rig.transfers.write_rest()
        rig.settle()
        assert rig.transfers.sizes()["disk writes"] == 4
        rig.transfers.forget_all()
    rig.finish("disk-write-0")
    assert on_disk(rig) == set()


def test_a_tier_has_its_own_policy_the_disks_is_reused() -> None:
    stores = {"redis": "all", "mooncake": "all", "s3": "all"}
    assert write_policies(OffloadConfig()) == {"disk": "reused", **stores}
    assert write_policies(OffloadConfig(write_policy="all")) == {"disk": "all", **stores}
    assert write_policies(OffloadConfig(write_policy={"disk": "all"})) == {"disk": "all", **stores}
    with pytest.raises(ConfigError, match=r"no tier dusk; did you mean disk\?"):
        write_policies(OffloadConfig(write_policy={"dusk": "all"}))
    with pytest.raises(ConfigError, match="write_policy is 'most': give all or reused"):
        OffloadConfig(write_policy={"disk": "most"})


def test_seen_keys_forget_keys_but_do_not_mistake_them() -> None:
    seen, numbers = SeenKeys(64), range(1, 4000)
    made = [(number * 0x9E3779B97F4A7C15F39CC0605CEDC835 % 2**128).to_bytes(16, "little") for number in numbers]
    assert not any(map(seen.add, made))
    assert seen.add(made[-1])
    assert sum(map(seen.add, made)) < 10
