"""The torture test of the transfer engine on a real device: on a CPU, where streams are threads, and on a GPU if there
is one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from proof.mutations import MUTATIONS
from proof.rig import Rig
from proof.torture import ON_HARDWARE, hunt_device, torture_device
from proof.torture.hardware import NOT_ON_HARDWARE, WORLDS
from proof.torture.patterns import Found, Patterns, describe, stamp_of, wrong_slots
from sidestream.errors import ConfigError
from sidestream_kv.device.base import Memory
from sidestream_kv.device.cpu import CpuDevice
from sidestream_kv.kv.layout import KVLayout

pytestmark = pytest.mark.slow

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]
BLOCKS = {"cpu": 5_000, "cuda": 60_000}

KINDS = {"stored", "loaded", "partial", "hits", "aborted", "reused"}

# What a copy waits for, when it counts, and what a reset forgets.
KILLED = ["store-waits-for-step", "slice-counts-after-its-fence", "reset-begins-a-generation"]


@pytest.mark.parametrize("device", DEVICES)
def test_every_block_holds_what_its_key_stands_for_in_every_layout(device: str) -> None:
    seen: Counter[str] = Counter()
    for seed in range(
        1, 6
    ):  # a machine that is busy elsewhere may end every use before the next begins: then once more
        tally = torture_device(device, blocks=BLOCKS[device], seed=seed).tally
        assert tally.findings == []
        assert tally.wrong == 0
        assert tally.blocks >= BLOCKS[device]
        seen += Counter({name: getattr(tally, name) for name in KINDS})
        if len(seen) == len(KINDS):  # a counter keeps what is above 0
            break
    assert seen.keys() == KINDS


@pytest.mark.parametrize("device", DEVICES)
def test_copies_that_fail_are_misses_and_no_wrong_byte(device: str) -> None:
    world = WORLDS[-1]
    often = replace(world, habits=replace(world.habits, faults=0.3))

    report = torture_device(device, blocks=1_000, seed=2, worlds=[often])

    assert report.tally.findings == []
    assert report.tally.failed_slices > 0
    assert report.tally.missed > 0


@pytest.mark.parametrize("device", DEVICES)
def test_the_checker_has_no_finding_in_the_traffic(device: str) -> None:
    report = torture_device(device, blocks=4_000, seed=3, check_order=True)

    assert report.objections == ()
    assert report.tally.findings == []


@pytest.mark.parametrize("device", DEVICES)
def test_a_rule_that_is_missing_shows_in_the_bytes(device: str) -> None:
    rows = hunt_device(device, KILLED)

    assert [row.name for row in rows] == KILLED
    assert [row.name for row in rows if row.after is None] == []
    assert all("expected" in row.said for row in rows), rows


@pytest.mark.parametrize("device", DEVICES)
def test_a_load_that_leaves_out_too_much_is_noticed(device: str) -> None:
    (row,) = hunt_device(device, ["load-is-whole-in-the-window"])

    assert row.after is not None
    assert "expected" in row.said, row


def test_every_rule_of_transfers_is_hunted_or_said_not_to_be() -> None:
    names = {mutation.name for mutation in MUTATIONS}

    assert set(ON_HARDWARE) <= names
    assert not [beginning for beginning in NOT_ON_HARDWARE if not any(name.startswith(beginning) for name in names)]
    assert not [name for name in ON_HARDWARE if name.startswith(tuple(NOT_ON_HARDWARE))]


def test_invalid_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="no device gpu"):
        torture_device("gpu", blocks=1)
    with pytest.raises(ConfigError, match="blocks is 0: give a whole number from 1"):
        torture_device("cpu", blocks=0)
    with pytest.raises(ConfigError, match="no mutation for a device finish-releases"):
        hunt_device("cpu", ["finish-releases"])


# ---------------------------------------------------------------------- patterns

LAYOUT = KVLayout(num_layers=3, num_kv_heads=1, head_dim=8, block_tokens=2, dtype="float32", windows=(4,))


@pytest.fixture(params=[False, True], ids=["one tensor", "layer by layer"])
def rig(request: pytest.FixtureRequest) -> Rig:
    rig = Rig(CpuDevice(compute_threads=1), LAYOUT, num_blocks=8, num_slots=8, layered=request.param)
    request.addfinalizer(rig.close)
    return rig


def flat(memory: Memory) -> np.ndarray:
    """Words of each block, layer by layer."""
    parts = [part.numpy().view(np.int64).reshape(8, -1) for part in memory.parts]
    return np.concatenate(parts, axis=1)


def spoil(memory: Memory, block: int, place: int) -> None:
    """Flip one bit."""
    start = block * LAYOUT.block_bytes + place
    part, offset = memory.locate(np.array([start]))
    memory.parts[int(part[0])][int(offset[0])] ^= 1


def looked_at(
    rig: Rig, patterns: Patterns, blocks: list[int], stamps: list[int], partial: Sequence[bool] = ()
) -> list[tuple[int, Found]]:
    stream = rig.device.stream("look")
    patterns.look(stream, blocks, np.array(stamps, dtype=np.int64), partial=partial, delay_s=0)
    found: list[tuple[int, Found]] = []
    patterns.take_results(stream, lambda number, what: found.append((number, what)))
    return found


def test_every_word_names_its_key_and_its_place(rig: Rig) -> None:
    patterns = Patterns(rig.device, rig.memory, max_blocks=4, max_looks=4)
    stamps = [stamp_of(7, 2), stamp_of(9, 0)]
    fence = patterns.write(rig.device.stream("write"), [5, 1], np.array(stamps), after=(), delay_s=0)
    assert rig.device.wait_host(fence, reason="test")

    words = flat(rig.memory.memory)
    assert words[5].tolist() == [patterns.expected(stamps[0], 8 * index) for index in range(LAYOUT.block_bytes // 8)]
    assert words[1].tolist() == [patterns.expected(stamps[1], 8 * index) for index in range(LAYOUT.block_bytes // 8)]
    assert not words[[0, 2, 3, 4, 6, 7]].any()
    assert "key 7 of generation 2, byte 16" in describe(int(words[5][2]))
    assert looked_at(rig, patterns, [1, 5], [stamps[1], stamps[0]]) == []


@pytest.mark.parametrize("place", [0, LAYOUT.layer_bytes + 8, LAYOUT.block_bytes - 1])
def test_one_wrong_bit_is_found_where_it_is(rig: Rig, place: int) -> None:
    patterns = Patterns(rig.device, rig.memory, max_blocks=4, max_looks=4)
    stamps = [stamp_of(3, 0), stamp_of(4, 0), stamp_of(5, 0)]
    fence = patterns.write(rig.device.stream("write"), [5, 1, 2], np.array(stamps), after=(), delay_s=0)
    assert rig.device.wait_host(fence, reason="test")
    spoil(rig.memory.memory, 1, place)

    ((number, found),) = looked_at(rig, patterns, [5, 1, 2], stamps)

    assert (number, found.row, found.place, found.num_bad) == (0, 1, place // 8 * 8, 1)
    assert bin(found.word ^ patterns.expected(stamps[1], found.place)).count("1") == 1


@pytest.mark.parametrize(("layer", "rows"), [(0, [1]), (1, [0, 1]), (2, [0, 1])])
def test_a_layer_with_a_window_is_compared_in_whole_blocks_only(rig: Rig, layer: int, rows: list[int]) -> None:
    patterns = Patterns(rig.device, rig.memory, max_blocks=4, max_looks=4)
    stamps = [stamp_of(3, 0), stamp_of(4, 0), stamp_of(5, 0)]
    fence = patterns.write(rig.device.stream("write"), [5, 1, 2], np.array(stamps), after=(), delay_s=0)
    assert rig.device.wait_host(fence, reason="test")
    for block in (5, 1):
        spoil(rig.memory.memory, block, layer * LAYOUT.layer_bytes)

    ((_, found),) = looked_at(rig, patterns, [5, 1, 2], stamps, (True, False, False))

    assert (found.row, found.num_bad) == (rows[0], len(rows))


def test_blocks_of_another_key_are_all_counted(rig: Rig) -> None:
    patterns = Patterns(rig.device, rig.memory, max_blocks=4, max_looks=4)
    fence = patterns.write(rig.device.stream("write"), [0, 1], np.array([stamp_of(3, 0)] * 2), after=(), delay_s=0)
    assert rig.device.wait_host(fence, reason="test")

    found = looked_at(rig, patterns, [0, 1], [stamp_of(3, 1)] * 2)

    assert [what.num_bad for _, what in found] == [2] * LAYOUT.num_layers


def test_a_wrong_bit_in_a_slot_is_found_and_slots_of_other_keys_are_not_looked_at(rig: Rig) -> None:
    words = flat(rig.host.memory)
    lease = rig.host.pool.take(3)
    keys = rig.new_keys(3)
    for number, (slot, key) in enumerate(zip(lease.ids, keys, strict=True)):
        words[slot] = (stamp_of(number, 0) << 20) | np.arange(words.shape[1])
        rig.host.pool.publish(slot, key)
    rig.host.memory.data.numpy().view(np.int64).reshape(8, -1)[:] = words
    stamps = {key: stamp_of(number, 0) for number, key in enumerate(keys[:2])}
    assert wrong_slots(rig.host, stamps) == []
    spoil(rig.host.memory, lease.ids[1], 24)
    spoil(rig.host.memory, lease.ids[2], 24)

    ((key, found),) = wrong_slots(rig.host, stamps)

    assert (key, found.row, found.place) == (keys[1], lease.ids[1], 24)
    lease.release()


def test_blocks_that_cannot_hold_a_pattern_are_refused() -> None:
    device = CpuDevice(compute_threads=1)
    rig = Rig(
        device,
        KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_tokens=1, dtype="bfloat16"),
        num_blocks=2,
        num_slots=2,
    )
    with pytest.raises(ConfigError, match="must be a multiple of 8 bytes"):
        Patterns(device, rig.memory, max_blocks=1, max_looks=1)
    rig.close()
