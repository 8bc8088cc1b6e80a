"""A disk tier in several directories, one on each disk: a block is in one of them, and each directory fails alone."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from disk_fixtures import LAYOUT
from test_disk_transfers import DONE, READERS
from test_tier_conformance import ask
from transfer_rig import Rig, key, keys

from proof import faults
from proof.toy import ToyModel
from sidestream.config import EngineConfig
from sidestream.engine import build_engine
from sidestream_kv.config import OffloadConfig
from sidestream_kv.errors import ConfigError
from sidestream_kv.offload.tier_io import PAUSE_S
from sidestream_kv.offload.tiers.base import PersistentTier, TierContext, TierKind
from sidestream_kv.offload.tiers.stack import kind_of, open_tiers, register
from sidestream_kv.types import Key

BOTH = (*READERS, "disk-2-read-0", "disk-2-read-1")


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path / "one", second_disk=tmp_path / "two", disk_blocks=8)
    yield rig
    rig.close()
    rig.check_nothing_is_held()


def fill(rig: Rig) -> tuple[Key, ...]:
    """Eight blocks on the disks, two stored at a time; not in host memory."""
    for pair in ("ab", "cd", "ef", "gh"):
        rig.stored(keys(*pair))
    rig.host.pool.forget_all()
    return keys(*"abcdefgh")


def test_blocks_are_divided_and_each_is_in_one_directory(rig: Rig) -> None:
    wanted = fill(rig)
    held = [sorted(disk.index) for disk in rig.disks.values()]
    assert [len(each) for each in held] == [4, 4]
    assert sorted(held[0] + held[1]) == sorted(wanted)
    rig.stored(wanted[2:4])  # computed again: on disk already
    rig.stored(wanted[:2])
    assert [sorted(disk.index) for disk in rig.disks.values()] == held


def test_a_promotion_reads_from_both_directories_at_the_same_time(rig: Rig) -> None:
    wanted = fill(rig)
    with contextlib.ExitStack() as holds:
        for name in BOTH:
            holds.enter_context(rig.hold(name))
        rig.promote(wanted[:4])
        rig.poll()
        assert rig.transfers._worker.num_reads == {"disk": 2, "disk-2": 2}
    assert rig.finish(*BOTH) == [DONE]
    assert all(rig.host_holds(one) for one in wanted[:4])


def test_a_block_that_is_being_written_is_not_written_to_the_other_directory(rig: Rig) -> None:
    with rig.hold("disk-write-0"), rig.hold("disk-2-write-0"):
        rig.store(keys("a"), [0])
        rig.finish("compute", "store")
        rig.transfers._worker._writes._all[0].write([(key("a"), 0)], (), 0)
    rig.finish("disk-write-0", "disk-2-write-0")
    assert sum(key("a") in disk.index for disk in rig.disks.values()) == 1
    assert sum(len(disk.writes) for disk in rig.disks.values()) == 1


def test_a_lost_directory_costs_its_blocks_only(rig: Rig, tmp_path: Path) -> None:
    wanted = fill(rig)
    kept = [one for one in wanted if one in rig.disks["disk"].index]
    shutil.rmtree(tmp_path / "two")
    for name in ("x", "y"):  # one of them to each directory
        rig.stored(keys(name))
    assert rig.transfers.locate(kept) == ["disk"] * 4
    assert len(rig.disks["disk-2"].index) == 0
    rig.promote(kept)
    assert rig.finish(*BOTH) == [DONE]
    rig.clock.now_s += PAUSE_S * 1.1
    rig.stored(keys("z"))
    assert list(rig.disks["disk-2"].index) == [key("z")]  # it was made anew


@pytest.mark.parametrize("fault", [faults.full, faults.broken])
def test_a_directory_that_fails_is_passed_over(rig: Rig, fault: faults.Fault) -> None:
    rig.disks["disk-2"].on_write = fault
    rig.stored(keys("a"))
    rig.stored(keys("b"))
    failed = rig.disks["disk-2"].writes
    rig.stored(keys("c", "d"))
    rig.stored(keys("e"))
    assert len(failed) == 1  # and no other one for a while
    assert sorted([*rig.disks["disk"].index, *failed]) == sorted(keys(*"abcde"))
    assert rig.counted("disk-write", "skipped") == rig.counted("disk-2-write", "skipped") == 0


def test_full_directories_get_writes_in_turn(rig: Rig) -> None:
    for number in range(24):
        rig.stored(keys(number))
    held = {tuple(sorted(disk.index)) for disk in rig.disks.values()}
    assert held == {tuple(sorted(keys(*range(first, 24, 2)))) for first in (8, 9)}


def test_directories_share_the_host_slots_of_writes(rig: Rig) -> None:
    with rig.hold("disk-write-0"), rig.hold("disk-2-write-0"):
        for name in "abcdefgh":
            rig.store(keys(name), [0])
            rig.finish("compute", "store")
        assert sum(rig.transfers.sizes()[f"{name} writes"] for name in rig.disks) == 4  # half of eight slots
    rig.finish("disk-write-0", "disk-2-write-0")


def test_each_directory_is_a_tier_with_the_capacity_and_a_name(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "abc"]
    config = OffloadConfig(disk=paths, disk_capacity=1 << 20)
    tiers = open_tiers(config, TierContext(LAYOUT, "a model"))
    assert list(tiers) == ["disk", "disk-2", "disk-3"] == [tier.index.name for tier in tiers.values()]
    assert {tier.index.max_entries for tier in tiers.values()} == {(1 << 20) // 8192}
    for tier in tiers.values():
        tier.close()
    assert all((path / "sidestream-tier.json").exists() for path in paths)
    with pytest.raises(ConfigError, match="offload disk names a directory twice"):
        OffloadConfig(disk=[paths[0], tmp_path / "x" / ".." / "a"])


def test_the_directories_that_were_opened_are_closed_if_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="holds other files"):
        open_tiers(OffloadConfig(disk=(tmp_path / "a", tmp_path / "b")), TierContext(LAYOUT, "a model"))
    shutil.rmtree(tmp_path / "b")
    tiers = open_tiers(OffloadConfig(disk=(tmp_path / "a", tmp_path / "b")), TierContext(LAYOUT, "a model"))
    for tier in tiers.values():
        tier.close()


def test_a_name_with_a_number_is_of_its_kind() -> None:
    assert [kind_of(name) for name in ("disk", "disk-2", "disk-x", "own-2", "host")] == [
        *("disk", "disk", "disk-x", "own-2", "host")
    ]

    def refuse(config: OffloadConfig, context: TierContext) -> PersistentTier | None:
        raise AssertionError

    with pytest.raises(ConfigError, match="a tier disk-2 is known already"):
        register(TierKind("disk-2", refuse))


def test_an_engine_starts_with_the_blocks_of_the_directories_that_are_left(tmp_path: Path) -> None:
    prompts = [list(range(first, first + 32)) for first in (1, 51)]
    offload = OffloadConfig(host=1 << 20, disk=(tmp_path / "a", tmp_path / "b"), write_policy="all")
    found = []
    for lost in (None, None, "b"):
        if lost is not None:
            shutil.rmtree(tmp_path / lost)
        model = ToyModel()
        engine = build_engine(model, EngineConfig(kv_memory=1 << 20, offload=offload, compute_threads=1))
        assert engine.parts.costs is not None
        engine.parts.costs.saw_prefill = lambda *_: None  # type: ignore[method-assign]
        try:
            answers = [ask(engine, prompt) for prompt in prompts]
            assert engine.flush(timeout_s=30)
        finally:
            engine.close()
        assert [tokens for tokens, _ in answers] == [model.expected(prompt, 6) for prompt in prompts]
        found.append([cached for _, cached in answers])
    assert [cached.total for cached in found[0]] == [0, 0]
    assert sorted(map(list, (cached.by_tier for cached in found[1]))) == [["disk"], ["disk-2"]]
    assert found[1][0].disk == found[1][1].disk > 0
    assert [cached for cached in found[2] if cached.disk] == [cached for cached in found[1] if "disk" in cached.by_tier]
