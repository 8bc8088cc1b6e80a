"""Whether a load is worth its time: bytes over measured bandwidth against tokens over the measured prefill rate."""

import pytest
from transfer_rig import DEADLINE_S, LAYOUT, Clock, Rig, keys

from sidestream.kv.layout import KVLayout
from sidestream.offload.costs import _STALE_S as STALE_S
from sidestream.offload.costs import CostModel

BLOCK = LAYOUT.block_bytes


def measured(*, host: float, disk: float, prefill: float) -> CostModel:
    """A model that saw these rates (bytes/s, bytes/s, tokens/s) often enough to believe them."""
    costs = CostModel(LAYOUT)
    for _ in range(200):
        costs.saw_transfer("host", round(host), 1.0)
        costs.saw_transfer("disk", round(disk), 1.0)
        costs.saw_prefill(round(prefill), 1.0)
    return costs


def test_loading_is_always_worth_it_until_a_prefill_was_measured() -> None:
    costs = CostModel(LAYOUT)
    assert costs.compute_seconds(1) == float("inf")
    assert costs.load_seconds({"host": 1, "disk": 1}, num_loaded=2) < 1


def test_time_to_load_counts_disk_queue_and_the_way_through_the_host() -> None:
    costs = measured(host=4 * BLOCK, disk=2 * BLOCK, prefill=8)
    assert costs.load_seconds({"host": 4}, num_loaded=4) == pytest.approx(1.0, rel=1e-6)
    assert costs.load_seconds({"disk": 4}, num_loaded=4) == pytest.approx(2.0 + 1.0, rel=1e-6)
    assert costs.load_seconds({"disk": 2}, num_loaded=0) == pytest.approx(1.0, rel=1e-6)
    assert costs.compute_seconds(4) == pytest.approx(4 * LAYOUT.block_tokens / 8, rel=1e-6)


def test_a_measurement_without_time_changes_nothing() -> None:
    costs = CostModel(LAYOUT)
    before = costs.load_seconds({"host": 1, "disk": 1}, num_loaded=2)
    costs.saw_transfer("disk", BLOCK, 0.0)
    costs.saw_prefill(10, 0.0)
    assert (costs.load_seconds({"host": 1, "disk": 1}, num_loaded=2), costs.prefill_rate) == (before, None)


STALLED = 1000.0
"""Bytes a second of a tier that hardly answers."""


def after_a_stall(tier: str) -> tuple[CostModel, Clock]:
    clock = Clock()
    costs = CostModel(LAYOUT, clock=clock)
    for _ in range(100):
        costs.saw_transfer(tier, round(STALLED), 1.0)
    return costs, clock


def seconds_for_a_block(costs: CostModel, tier: str) -> float:
    return costs.load_seconds({tier: 1}, num_loaded=1)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_tier_that_once_stalled_is_tried_again_after_a_while_without_a_transfer(tier: str) -> None:
    costs, clock = after_a_stall(tier)
    clock.now_s += STALE_S - 1
    assert seconds_for_a_block(costs, tier) == pytest.approx(BLOCK / STALLED, rel=1e-3)
    clock.now_s += 2
    assert seconds_for_a_block(costs, tier) < 1e-6


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_stall_counts_again_once_the_trial_was_slow_too(tier: str) -> None:
    costs, clock = after_a_stall(tier)
    clock.now_s += STALE_S + 1
    costs.saw_transfer(tier, round(STALLED), 1.0)
    assert seconds_for_a_block(costs, tier) == pytest.approx(BLOCK / STALLED, rel=1e-3)


@pytest.mark.parametrize(("stalled", "other"), [("host", "disk"), ("disk", "host")])
def test_a_transfer_of_one_tier_says_nothing_new_about_the_other(stalled: str, other: str) -> None:
    costs, clock = after_a_stall(stalled)
    clock.now_s += STALE_S + 1
    costs.saw_transfer(other, 10**12, 1.0)
    assert seconds_for_a_block(costs, stalled) < 1e-6


def test_a_tier_that_is_faster_than_hoped_is_used_after_any_time() -> None:
    clock = Clock()
    costs = CostModel(LAYOUT, clock=clock)
    for _ in range(100):
        costs.saw_transfer("host", 10**12, 1.0)
    before = seconds_for_a_block(costs, "host")
    clock.now_s += 1e6
    assert seconds_for_a_block(costs, "host") == before == pytest.approx(BLOCK / 1e12, rel=1e-3)


def test_host_memory_that_was_never_measured_is_tried_however_fast_prefill_is() -> None:
    """A GPU that computes 37,000 tokens a second would find 2 GB/s too slow: it loaded nothing, so it measured nothing,
    for 30 s.
    """
    qwen3_8b = KVLayout(num_layers=36, num_kv_heads=8, head_dim=128, block_tokens=16, dtype="bfloat16")
    costs = CostModel(qwen3_8b, clock=Clock())
    costs.saw_prefill(8192, 0.22)
    assert costs.load_seconds({"host": 512}, num_loaded=512) < costs.compute_seconds(512)


def test_the_first_measurement_counts_at_once() -> None:
    costs = CostModel(LAYOUT, clock=Clock())
    costs.saw_transfer("host", round(STALLED), 1.0)
    assert seconds_for_a_block(costs, "host") == pytest.approx(BLOCK / STALLED)


def test_decision_goes_either_way_by_what_was_measured(disk_rig: Rig) -> None:
    disk_rig.transfers._costs = measured(host=1000 * BLOCK, disk=10 * BLOCK, prefill=100 * LAYOUT.block_tokens)
    assert disk_rig.transfers.worth_loading(["host", "host"])
    assert not disk_rig.transfers.worth_loading(["host", "disk"])
    disk_rig.transfers._costs = measured(host=1000 * BLOCK, disk=10 * BLOCK, prefill=2 * LAYOUT.block_tokens)
    assert disk_rig.transfers.worth_loading(["host", "disk"])


def test_load_that_would_miss_the_deadline_is_not_begun(disk_rig: Rig) -> None:
    disk_rig.transfers._costs = measured(host=1000 * BLOCK, disk=BLOCK, prefill=0.01)
    assert disk_rig.transfers.worth_loading(["disk"] * int(DEADLINE_S - 1))
    assert not disk_rig.transfers.worth_loading(["disk"] * int(DEADLINE_S + 1))


def test_reads_that_queue_at_the_disk_already_count(disk_rig: Rig) -> None:
    disk_rig.transfers._costs = measured(host=1e6 * BLOCK, disk=BLOCK, prefill=LAYOUT.block_tokens / 2)
    disk_rig.on_disk_only(keys("a", "b"))
    assert disk_rig.transfers.worth_loading(["disk"])
    with disk_rig.hold("disk-read-0"), disk_rig.hold("disk-read-1"):
        disk_rig.promote(keys("a", "b"))
        assert not disk_rig.transfers.worth_loading(["disk"])
    disk_rig.finish("disk-read-0", "disk-read-1")


def test_transfers_teach_the_model_what_they_cost(disk_rig: Rig) -> None:
    costs = disk_rig.transfers._costs
    before = (
        costs.load_seconds({"host": 1}, num_loaded=1),
        costs.load_seconds({"disk": 1}, num_loaded=1),
    )
    disk_rig.clock.step_s = 1e-6
    disk_rig.on_disk_only(keys("a"))
    disk_rig.promote(keys("a"))
    disk_rig.finish("disk-read-0", "disk-read-1")
    lease = disk_rig.blocks.take(1)
    disk_rig.load(keys("a"), lease.ids)
    disk_rig.finish("load")
    after = (
        costs.load_seconds({"host": 1}, num_loaded=1),
        costs.load_seconds({"disk": 1}, num_loaded=1),
    )
    assert all(one != other for one, other in zip(before, after, strict=True))
    lease.release()
