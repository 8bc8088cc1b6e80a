"""The jobs of BlockStore on the real disk tier: order, failures, bounds, and the process that is killed."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stores import LAYOUT, Bytes, Rig, block, empty, key, open_disk

from proof import faults
from proof.disk_slots import DiskSlots
from sidestream_kv.config import OffloadConfig
from sidestream_kv.connectors import block_store
from sidestream_kv.connectors.chunks import RegionLayout
from sidestream_kv.errors import InvariantError, TierTimeout
from sidestream_kv.offload.tiers.base import Block, TierContext
from sidestream_kv.offload.tiers.stack import TierStack


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Opened at the end, so that no thread is left."""
    made = threading.Event()
    yield made
    made.set()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path / "kv")
    yield made
    made.tier.on_read = made.tier.on_write = faults.healthy
    made.store.close()


def one_thread(tmp_path: Path, **options: int) -> Rig:
    return Rig(tmp_path / "kv", num_threads=1, **options)


def in_time(condition: threading.Event) -> None:
    assert condition.wait(30)


def begun(gate: threading.Event, started: threading.Event) -> faults.Fault:
    """The operation reports that it has begun, runs, and returns when `gate` is open."""

    def fault(proceed: faults.Callable[[], None], block: Block) -> None:
        started.set()
        faults.late(gate)(proceed, block)

    return fault


def test_stored_blocks_come_back_after_a_restart(tmp_path: Path) -> None:
    first = Rig(tmp_path / "kv")
    assert first.put(1, 2).success
    first.store.close()
    second = Rig(tmp_path / "kv")
    done, blocks = second.get(2, 1)
    assert (done.success, done.num_bytes) == (True, 2 * LAYOUT.block_bytes)
    assert [bytes(one) for one in blocks] == [bytes(block(2)), bytes(block(1))]
    second.store.close()


def test_a_key_is_found_only_after_its_whole_block_was_written(rig: Rig, gate: threading.Event) -> None:
    rig.tier.on_write = faults.slow(gate)
    rig.begin_store(1)
    assert rig.holds(1) == [False]
    assert rig.store.take_finished() == []
    assert rig.holds(1) == [False]
    gate.set()
    rig.finish()
    assert rig.holds(1) == [True]


@pytest.mark.parametrize("loads", [False, True])
def test_a_job_ends_after_its_last_copy(rig: Rig, gate: threading.Event, loads: bool) -> None:
    rig.put(1, 2)
    held: faults.Fault = faults.late(gate)
    quick = threading.Event()

    def one_waits(proceed: faults.Callable[[], None], memory: Block) -> None:
        if np.frombuffer(memory, np.uint8)[0] == 1:
            held(proceed, memory)
        else:
            proceed()
            quick.set()

    rig.tier.on_read = rig.tier.on_write = one_waits
    slow, fast = np.full(LAYOUT.block_bytes, 1, np.uint8), np.full(LAYOUT.block_bytes, 2, np.uint8)
    if loads:
        rig.store.load(7, [(key(1), slow), (key(2), fast)])
    else:
        rig.store.store(7, [(key(11), slow), (key(12), fast)])
    in_time(quick)
    assert rig.store.take_finished() == []
    gate.set()
    assert [done.job for done in rig.finish()] == [7]


def test_keys_that_are_there_or_being_written_are_not_written_again(rig: Rig, gate: threading.Event) -> None:
    rig.put(1)
    rig.tier.on_write = faults.slow(gate)
    rig.begin_store(2)
    job = rig.begin_store(1, 2)
    assert [(done.job, done.success) for done in rig.store.take_finished()] == [(job, True)]
    gate.set()
    rig.finish()
    assert sorted(rig.tier.writes) == sorted([key(1), key(2)])


@pytest.mark.parametrize("damage", ["flipped", "missing"])
def test_a_damaged_or_missing_entry_is_not_good_and_is_forgotten(rig: Rig, damage: str) -> None:
    rig.put(1, 2)
    slots = DiskSlots(rig.directory)
    slots.flip(key(1)) if damage == "flipped" else slots.table.void(slots.slot_of(key(1)))
    done, (_, intact) = rig.get(1, 2)
    assert (done.success, done.good) == (False, {key(2)})
    assert bytes(intact) == bytes(block(2))
    assert rig.holds(1, 2) == [False, True]


def test_a_read_that_fails_is_not_good_and_its_key_is_not_found_again(rig: Rig) -> None:
    rig.put(1)
    rig.tier.on_read = faults.broken
    done, _ = rig.get(1)
    assert (done.success, done.good) == (False, frozenset())
    assert rig.holds(1) == [False]


def test_a_key_that_is_gone_is_not_good_and_its_job_ends_at_once(rig: Rig) -> None:
    job = rig.begin_load({1: empty()})
    (done,) = rig.store.take_finished()
    assert (done.job, done.success, done.good) == (job, False, frozenset())


def no_space(proceed: faults.Callable[[], None], memory: Block) -> None:
    """As the disk tier reports ENOSPC."""
    raise block_store.TierFull(os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("fault", [no_space, faults.broken])
def test_a_failed_write_leaves_no_entry_and_the_next_writes_wait(rig: Rig, fault: faults.Fault) -> None:
    rig.tier.on_write = fault
    assert not rig.put(1).success
    rig.tier.on_write = faults.healthy
    assert not rig.put(2).success
    assert rig.holds(1, 2) == [False, False]
    rig.clock.now_s += 10
    assert rig.put(1).success
    assert rig.holds(1) == [True]


def test_an_exception_that_no_tier_may_raise_ends_the_job(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    def bug(proceed: faults.Callable[[], None], memory: Block) -> None:
        raise ValueError("a bug")

    rig.put(1)
    rig.tier.on_read = bug
    done, _ = rig.get(1)
    assert not done.success
    assert "ValueError: a bug" in caplog.text


def test_blocks_of_a_removed_directory_are_forgotten(rig: Rig) -> None:
    rig.put(1, 2)
    shutil.rmtree(rig.directory)
    assert not rig.put(3).success
    assert rig.holds(1, 2, 3) == [False] * 3


def test_a_slow_medium_holds_a_bounded_number_of_blocks(tmp_path: Path, gate: threading.Event) -> None:
    rig = one_thread(tmp_path, max_pending_bytes=2 * LAYOUT.block_bytes)
    rig.tier.on_write = faults.slow(gate)
    rig.begin_store(1, 2, 3)
    assert rig.store.num_skipped == 1
    gate.set()
    (done,) = rig.finish()
    assert (done.success, done.good) == (False, {key(1), key(2)})
    assert rig.put(3).success, "what was written waits no more"
    rig.store.close()


def test_a_load_does_not_queue_behind_stores(tmp_path: Path, gate: threading.Event) -> None:
    rig = one_thread(tmp_path)
    rig.put(1)
    rig.tier.on_write = faults.slow(gate)
    rig.begin_store(2, 3)
    read = threading.Event()
    rig.tier.on_read = begun(gate=read, started=threading.Event())
    read.set()
    job, found = rig.begin_load({1: empty()}), list[int]()
    for _ in range(3000):
        found += [done.job for done in rig.store.take_finished()]
        if found:
            break
        threading.Event().wait(0.01)
    assert found == [job]
    gate.set()
    rig.store.close()


def test_an_entry_is_not_evicted_while_it_is_read_and_can_be_afterwards(tmp_path: Path, gate: threading.Event) -> None:
    rig = Rig(tmp_path / "kv", blocks=1)
    rig.put(1)
    rig.tier.on_read = faults.slow(gate)
    out = {1: empty()}
    rig.begin_load(out)
    rig.begin_store(2)
    assert [done.success for done in rig.store.take_finished()] == [False], "no room: the only entry is being read"
    gate.set()
    assert [done.success for done in rig.finish()] == [True]
    assert bytes(out[1]) == bytes(block(1))
    assert rig.put(2).success
    assert rig.holds(1, 2) == [False, True]
    rig.store.close()


class Stuck:
    """One thread reads block 1 and hangs; the read of block 2 waits behind it."""

    def __init__(self, tmp_path: Path, gate: threading.Event) -> None:
        self.rig = rig = one_thread(tmp_path)
        rig.put(1, 2)
        started = threading.Event()
        rig.tier.on_read = begun(gate, started)
        self.begun, self.queued = rig.begin_load({1: empty()}), rig.begin_load({2: empty()})
        in_time(started)


def test_a_load_that_has_not_begun_ends_at_its_deadline(tmp_path: Path, gate: threading.Event) -> None:
    stuck = Stuck(tmp_path, gate)
    assert stuck.rig.store.take_finished() == []
    stuck.rig.clock.now_s += 10
    (done,) = stuck.rig.store.take_finished()
    assert (done.job, done.good) == (stuck.queued, frozenset()), "the other read may still write into its block"
    gate.set()
    assert [done.job for done in stuck.rig.finish()] == [stuck.begun]
    stuck.rig.clock.now_s += 10
    assert stuck.rig.holds(1, 2) == [True, True], "a block that was not read is not lost"
    stuck.rig.store.close()


def test_nothing_is_found_while_a_read_is_overdue(tmp_path: Path, gate: threading.Event) -> None:
    stuck = Stuck(tmp_path, gate)
    assert stuck.rig.holds(1) == [True]
    stuck.rig.clock.now_s += 10
    stuck.rig.store.take_finished()
    assert stuck.rig.holds(1, 2) == [False, False]
    stuck.rig.clock.now_s += 4
    stuck.rig.store.take_finished()
    stuck.rig.clock.now_s += 4
    assert stuck.rig.holds(1, 2) == [False, False], "the read still hangs"
    gate.set()
    stuck.rig.store.close()


def test_a_stopped_store_finds_and_writes_nothing_and_keeps_its_entries(rig: Rig) -> None:
    rig.put(1)
    rig.store.stop("the weights changed")
    assert not rig.put(2).success
    assert rig.holds(1, 2) == [False, False]
    assert not rig.get(1)[0].success
    rig.store.close()
    after = Rig(rig.directory)
    assert after.holds(1, 2) == [True, False]
    after.store.close()


def test_drain_returns_when_no_copy_runs_and_the_log_says_for_what_it_waits(
    rig: Rig, gate: threading.Event, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(block_store, "_WAIT_S", 0.01)
    rig.tier.on_write = faults.slow(gate)
    rig.begin_store(1)
    logged, drained = threading.Event(), threading.Event()
    monkeypatch.setattr(logging.getLogger(block_store.__name__), "warning", lambda *line: logged.set())
    thread = threading.Thread(target=lambda: (rig.store.drain(), drained.set()))
    thread.start()
    in_time(logged)
    assert not drained.is_set()
    gate.set()
    in_time(drained)
    thread.join()
    assert [done.success for done in rig.store.take_finished()] == [True]


def test_close_gives_up_what_has_not_begun_and_refuses_to_end_before_what_has(
    tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_store, "_WAIT_S", 0.01)
    rig, started = one_thread(tmp_path), threading.Event()
    rig.tier.on_write = begun(gate, started)
    rig.begin_store(1)
    in_time(started)
    rig.begin_store(2)
    with pytest.raises(TierTimeout, match="1 copies of the disk tier have not ended"):
        rig.store.close(flush_s=0)
    assert DiskSlots(rig.directory).in_use
    gate.set()
    rig.store.close()
    assert not DiskSlots(rig.directory).in_use
    rig.store.close()
    tier = open_disk(rig.directory)
    assert [key(number) in tier.index for number in (1, 2)] == [True, False]
    tier.close()


def test_no_copy_runs_on_the_engines_thread(rig: Rig) -> None:
    threads = set[int]()

    def note(proceed: faults.Callable[[], None], memory: Block) -> None:
        threads.add(threading.get_ident())
        proceed()

    rig.tier.on_read = rig.tier.on_write = note
    rig.put(1)
    rig.get(1)
    assert threads and threading.get_ident() not in threads


def test_blocks_of_another_engine_on_the_directory_are_found(rig: Rig) -> None:
    other = open_disk(rig.directory)
    grant = other.index.reserve(key(7))
    assert grant is not None
    other.write(grant, block(7))
    other.index.publish(grant)
    rig.clock.now_s += 1
    rig.store.take_finished()
    assert key(7) in rig.store


def test_the_log_says_how_much_was_reused_first_then_each_minute_and_at_the_end(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    def reports() -> list[str]:
        return [line.split(" reused")[0].split()[-2] for line in caplog.messages if " reused" in line]

    rig.put(1)
    assert reports() == []
    rig.get(1)
    assert reports() == ["1"]
    rig.get(1)
    assert reports() == ["1"], "at most one line a minute"
    rig.clock.now_s += 60
    rig.store.take_finished()
    assert reports() == ["1", "2"]
    rig.clock.now_s += 60
    rig.store.take_finished()
    assert reports() == ["1", "2"], "nothing new"
    rig.store.close()
    assert reports() == ["1", "2", "2"]


def test_failures_are_logged_once_a_minute(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.tier.on_write = faults.broken
    for _ in range(3):
        rig.put(1)
        rig.clock.now_s += 10
    assert sum("the medium is gone" in line for line in caplog.messages) == 1
    rig.clock.now_s += 60
    rig.put(1)
    assert sum("the medium is gone" in line for line in caplog.messages) == 2


# Stores blocks until it is killed, and prints a block's number once its job has ended.
WRITER = """
import sys
from pathlib import Path
from stores import Rig

rig, first = Rig(Path(sys.argv[1]), blocks=1000), int(sys.argv[2])
while True:
    assert rig.put(*range(first, first + 8)).success
    print(first, flush=True)
    first += 8
"""


def test_every_reported_block_survives_kill_9(tmp_path: Path) -> None:
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    reported = list[int]()
    for kill in range(2):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path / "kv"), str(1000 * kill)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        ) as process:
            assert process.stdout is not None
            reported += [int(process.stdout.readline()) for _ in range(3)]
            process.send_signal(signal.SIGKILL)
    rig = Rig(tmp_path / "kv", blocks=1000)
    numbers = [number for first in reported for number in range(first, first + 8)]
    done, blocks = rig.get(*numbers)
    assert done.success
    assert [bytes(one) for one in blocks] == [bytes(block(number)) for number in numbers]
    rig.store.close()


def test_blocks_need_not_be_arrays(rig: Rig) -> None:
    """vLLM's memory is a memoryview."""
    memory = memoryview(bytearray(bytes(block(1)) + bytes(LAYOUT.block_bytes)))
    halves = memory[: LAYOUT.block_bytes], memory[LAYOUT.block_bytes :]
    rig.store.store(1, [(key(1), halves[0])])
    rig.finish()
    rig.store.load(2, [(key(1), halves[1])])
    assert [done.success for done in rig.finish()] == [True]
    same: Bytes = np.frombuffer(halves[1], np.uint8)
    assert bytes(same) == bytes(block(1))


def test_host_memory_beside_a_device_refuses_a_layout_of_persistent_tiers_only() -> None:
    device: Any = None
    with pytest.raises(InvariantError, match="needs a LayeredLayout"):
        TierStack.open(OffloadConfig(), device, TierContext(LAYOUT, "w"))


def test_layouts_with_other_parts_of_a_block_are_told_apart() -> None:
    parts = ((16,) * 6, (32,) * 3, (32, 64), (64, 32))
    assert len({str(RegionLayout(96, 16, parts=each).describe()) for each in parts}) == len(parts)
    assert RegionLayout(96, 16, parts=(32, 32, 16, 16)).describe()["parts"] == "2 x 32 + 2 x 16"
