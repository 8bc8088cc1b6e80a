"""Whether a load is worth its time: measured latency and bandwidth against tokens over the measured prefill rate."""

import pytest
from transfer_rig import DEADLINE_S, LAYOUT, Clock, Rig, keys

from sidestream_kv.kv.layout import KVLayout
from sidestream_kv.metrics import Metrics
from sidestream_kv.offload.loads import _STALE_S as STALE_S
from sidestream_kv.offload.loads import CostModel, TierBalance
from sidestream_kv.offload.tickets import Promoted

BLOCK = LAYOUT.block_bytes
LONG_S = 1e6  # in this time, every tier of these tests moves so many bytes that they tell the bandwidth
LARGE = 64 << 20  # bytes of a transfer that tells the bandwidth


def measured(*, host: float, disk: float, prefill: float) -> CostModel:
    """A model that saw these rates (bytes/s, bytes/s, tokens/s) often enough to believe them."""
    costs = CostModel(LAYOUT)
    for _ in range(200):
        costs.saw_transfer("host", round(host * LONG_S), LONG_S)
        costs.saw_transfer("disk", round(disk * LONG_S), LONG_S)
        costs.saw_prefill(round(prefill), 1.0)
    return costs


def test_every_load_is_accepted_until_a_prefill_was_measured() -> None:
    costs = CostModel(LAYOUT)
    assert costs.compute_seconds(1) == float("inf")
    assert costs.load_seconds({"host": 1, "disk": 1}, num_loaded=2) < 1


def test_load_time_includes_the_disk_queue_and_the_copy_from_the_host() -> None:
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


STALL_S = 0.5
"""Time of a transfer of one block from a tier that hardly answers."""


def after_a_stall(tier: str) -> tuple[CostModel, Clock]:
    clock = Clock()
    costs = CostModel(LAYOUT, clock=clock)
    for _ in range(100):
        costs.saw_transfer(tier, BLOCK, STALL_S)
    return costs, clock


def seconds_for_a_block(costs: CostModel, tier: str) -> float:
    return costs.load_seconds({tier: 1}, num_loaded=1)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_an_old_stall_of_a_tier_is_forgotten(tier: str) -> None:
    costs, clock = after_a_stall(tier)
    clock.now_s += STALE_S - 1
    assert seconds_for_a_block(costs, tier) == pytest.approx(STALL_S, rel=1e-3)
    clock.now_s += 2
    assert seconds_for_a_block(costs, tier) < 1e-6


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("num_bytes", [BLOCK, LARGE])
def test_one_transfer_after_an_old_stall_decides_whether_it_counts_again(tier: str, num_bytes: int) -> None:
    for trial_s in (STALL_S, 1e-9):
        clock = Clock()
        costs = CostModel(LAYOUT, clock=clock)
        for _ in range(100):
            costs.saw_transfer(tier, num_bytes, STALL_S)
        clock.now_s += STALE_S + 1
        costs.saw_transfer(tier, num_bytes, trial_s)
        count = num_bytes // BLOCK
        seconds = costs.load_seconds({tier: count}, num_loaded=count)
        assert (seconds > 0.9 * STALL_S) == (trial_s == STALL_S)


@pytest.mark.parametrize(("stalled", "other"), [("host", "disk"), ("disk", "host")])
def test_a_transfer_of_one_tier_does_not_change_the_estimate_of_the_other(stalled: str, other: str) -> None:
    costs, clock = after_a_stall(stalled)
    clock.now_s += STALE_S + 1
    costs.saw_transfer(other, 10**12, 1.0)
    assert seconds_for_a_block(costs, stalled) < 1e-6


def test_a_fast_measurement_of_a_tier_never_expires() -> None:
    clock = Clock()
    costs = CostModel(LAYOUT, clock=clock)
    for _ in range(100):
        costs.saw_transfer("host", 10**12, 1.0)
    before = seconds_for_a_block(costs, "host")
    clock.now_s += 1e6
    assert seconds_for_a_block(costs, "host") == before == pytest.approx(BLOCK / 1e12, rel=1e-3)


def test_unmeasured_host_memory_is_loaded_from_even_if_prefill_is_fast() -> None:
    """A GPU that computes 37,000 tokens a second would find 2 GB/s too slow: it loaded nothing, so it measured nothing,
    for 30 s.
    """
    costs = CostModel(QWEN3_8B, clock=Clock())
    costs.saw_prefill(8192, 0.22)
    assert costs.load_seconds({"host": 512}, num_loaded=512) < costs.compute_seconds(512)


QWEN3_8B = KVLayout(num_layers=36, num_kv_heads=8, head_dim=128, block_tokens=16, dtype="bfloat16")


def loaded(costs: CostModel, num_blocks: int, *, latency_s: float, bytes_per_s: float) -> None:
    num_bytes = num_blocks * QWEN3_8B.block_bytes
    costs.saw_transfer("host", num_bytes, latency_s + num_bytes / bytes_per_s)


def from_host(costs: CostModel, num_blocks: int) -> float:
    return costs.load_seconds({"host": num_blocks}, num_loaded=num_blocks)


@pytest.mark.parametrize("small_loads", [1, 2, 10])
def test_slow_loads_of_one_block_do_not_prevent_long_loads(small_loads: int) -> None:
    """Their time is latency. As a rate, it would be 24 MB/s, and 2 GB would take 100 s."""
    costs = CostModel(QWEN3_8B, clock=Clock())
    costs.saw_prefill(8192, 0.22)
    for _ in range(small_loads):
        loaded(costs, 1, latency_s=0.1, bytes_per_s=2e10)
    assert from_host(costs, 800) < 0.2 < costs.compute_seconds(800)


def test_latency_and_bandwidth_are_estimated_separately() -> None:
    costs = CostModel(QWEN3_8B, clock=Clock())
    for num_blocks in (1, 100, 2, 400, 1, 200, 3, 1000, 2, 50):
        loaded(costs, num_blocks, latency_s=1e-3, bytes_per_s=2e10)
    for num_blocks in (1, 5, 40, 300, 1000):
        expected = 1e-3 + num_blocks * QWEN3_8B.block_bytes / 2e10
        assert from_host(costs, num_blocks) == pytest.approx(expected, rel=0.1)


def test_one_slow_load_changes_the_estimate_by_less_than_three_times() -> None:
    for num_before in [0, 1, 2, 3, 10]:
        for num_blocks in [1, 500]:
            costs = CostModel(QWEN3_8B, clock=Clock())
            for _ in range(num_before):
                loaded(costs, num_blocks, latency_s=0.0, bytes_per_s=2e10)
            before = from_host(costs, 100)
            loaded(costs, num_blocks, latency_s=5.0, bytes_per_s=2e10)
            assert from_host(costs, 100) < 3 * before


def test_three_slow_loads_change_the_estimate_of_a_tier() -> None:
    costs = CostModel(QWEN3_8B, clock=Clock())
    for bytes_per_s in (2e10,) * 10 + (1e9,) * 3:
        loaded(costs, 500, latency_s=0.0, bytes_per_s=bytes_per_s)
    assert from_host(costs, 500) == pytest.approx(500 * QWEN3_8B.block_bytes / 1e9, rel=1e-3)


def test_disk_latency_is_counted_for_each_block() -> None:
    costs = CostModel(LAYOUT, clock=Clock())
    for _ in range(5):
        costs.saw_transfer("disk", BLOCK, 0.25)
    assert costs.load_seconds({"disk": 8}, num_loaded=0) == pytest.approx(2.0, rel=1e-3)


def test_a_measured_disk_rate_replaces_the_assumed_one() -> None:
    costs = CostModel(QWEN3_8B, clock=Clock())
    for _ in range(3):
        costs.saw_transfer("disk", QWEN3_8B.block_bytes, QWEN3_8B.block_bytes / 8e9)
    assert costs.load_seconds({"disk": 8}, num_loaded=0) == pytest.approx(8 * QWEN3_8B.block_bytes / 8e9, rel=1e-3)


def test_measured_rates_decide_whether_to_load(disk_rig: Rig) -> None:
    disk_rig.transfers._choice._costs = measured(host=1000 * BLOCK, disk=10 * BLOCK, prefill=100 * LAYOUT.block_tokens)
    assert disk_rig.transfers.worth_loading(["host", "host"])
    assert not disk_rig.transfers.worth_loading(["host", "disk"])
    disk_rig.transfers._choice._costs = measured(host=1000 * BLOCK, disk=10 * BLOCK, prefill=2 * LAYOUT.block_tokens)
    assert disk_rig.transfers.worth_loading(["host", "disk"])


def test_a_load_that_would_miss_the_deadline_is_declined(disk_rig: Rig) -> None:
    disk_rig.transfers._choice._costs = measured(host=1000 * BLOCK, disk=BLOCK, prefill=0.01)
    assert disk_rig.transfers.worth_loading(["disk"] * int(DEADLINE_S - 1))
    assert not disk_rig.transfers.worth_loading(["disk"] * int(DEADLINE_S + 1))


def head(rig: Rig, **blocks: int) -> int:
    """How many blocks of a prefix to load that is in these tiers, one after another."""
    return rig.transfers.head([tier for tier, count in blocks.items() for _ in range(count)])


def test_blocks_behind_those_in_host_memory_are_computed_if_their_tier_is_slower(disk_rig: Rig) -> None:
    disk_rig.transfers._choice._costs = measured(host=1000 * BLOCK, disk=10 * BLOCK, prefill=20 * LAYOUT.block_tokens)
    assert disk_rig.transfers.worth_loading(["host"] * 30 + ["disk"] * 10)  # the host's blocks pay for the others
    assert head(disk_rig, host=30, disk=10) == 30
    assert head(disk_rig, disk=10) == 0
    disk_rig.transfers._choice._costs = measured(host=1000 * BLOCK, disk=40 * BLOCK, prefill=20 * LAYOUT.block_tokens)
    assert head(disk_rig, host=30, disk=10) == 40
    disk_rig.transfers._choice._costs.prefill_rate = None
    assert head(disk_rig, host=30, disk=10) == 40


def test_a_load_longer_than_the_deadline_is_cut_where_the_deadline_ends(disk_rig: Rig) -> None:
    disk_rig.transfers._choice._costs = measured(host=1e9 * BLOCK, disk=2 * BLOCK, prefill=LAYOUT.block_tokens)
    in_time = 2 * int(DEADLINE_S) - 1
    assert head(disk_rig, disk=in_time) == in_time
    assert head(disk_rig, disk=100) == in_time
    assert head(disk_rig, host=5, disk=100) == 5 + in_time


def test_a_head_ends_before_a_tier_that_is_turned_down(disk_rig: Rig) -> None:
    disk_rig.transfers._choice._costs = measured(host=1000 * BLOCK, disk=40 * BLOCK, prefill=LAYOUT.block_tokens)
    disk_rig.transfers._waits._balances["disk"].allows = lambda now_s: False  # type: ignore[method-assign]
    assert head(disk_rig, host=3, disk=10) == 3


def test_queued_disk_reads_add_to_the_load_time(disk_rig: Rig) -> None:
    disk_rig.transfers._choice._costs = measured(host=1e6 * BLOCK, disk=BLOCK, prefill=LAYOUT.block_tokens / 2)
    disk_rig.on_disk_only(keys("a", "b"))
    assert disk_rig.transfers.worth_loading(["disk"])
    with disk_rig.hold("disk-read-0"), disk_rig.hold("disk-read-1"):
        disk_rig.promote(keys("a", "b"))
        assert not disk_rig.transfers.worth_loading(["disk"])
    disk_rig.finish("disk-read-0", "disk-read-1")


def test_a_slow_load_of_one_block_does_not_prevent_a_long_load(disk_rig: Rig) -> None:
    costs, names = disk_rig.transfers._costs, [str(number) for number in range(8)]
    disk_rig.stored(keys(*names))
    costs.saw_prefill(LAYOUT.block_tokens, 0.5)
    lease = disk_rig.blocks.take(1)
    with disk_rig.hold("load") as hold:
        disk_rig.load(keys("0"), lease.ids)
        disk_rig.clock.now_s += 2.0
        hold.release()
    disk_rig.finish("load")
    lease.release()
    assert disk_rig.transfers.worth_loading(["host"] * len(names))


def test_transfers_update_the_cost_model(disk_rig: Rig) -> None:
    costs = disk_rig.transfers._costs
    before = (costs.load_seconds({"host": 1}, num_loaded=1), costs.load_seconds({"disk": 1}, num_loaded=1))
    disk_rig.clock.step_s = 1e-6
    for name in ("a", "b", "c"):
        disk_rig.on_disk_only(keys(name))
        disk_rig.promote(keys(name))
        disk_rig.finish("disk-read-0", "disk-read-1")
        lease = disk_rig.blocks.take(1)
        disk_rig.load(keys(name), lease.ids)
        disk_rig.finish("load")
        lease.release()
    after = (costs.load_seconds({"host": 1}, num_loaded=1), costs.load_seconds({"disk": 1}, num_loaded=1))
    assert all(one != other for one, other in zip(before, after, strict=True))


# ------------------------------------------------------------------ tiers that lose


def after(balance: TierBalance, *taken: float, begun_s: float = 0.0, good: bool = True) -> None:
    """Loads that took so long; computing would have taken 1 s each."""
    for seconds in taken:
        balance.began()
        balance.ended(begun_s, begun_s + seconds, expected_s=0.1, compute_s=1.0, good=good)


def test_a_tier_whose_last_loads_lost_time_is_turned_down_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics()
    balance = TierBalance("disk", metrics)
    after(balance, *[0.2] * 20, *[1.9] * 3)
    assert balance.allows(2.0)
    after(balance, 1.9, 1.9)  # 4 of the last 8 saved 0.8 s each, the others lost 0.9 s
    assert not balance.allows(2.0)
    assert [record.message for record in caplog.records] == [
        "the disk tier loses time: its last 8 loads took 0.40 s longer than computing their tokens; requests compute "
        "until an attempt, once in 1 to 60 s, is faster again"
    ]
    assert metrics.value("tier_turned_down", "disk") == 1
    assert metrics.value("tier_loads_total", "disk", "useful") == 20
    assert metrics.value("tier_loads_total", "disk", "wasted") == 5
    assert metrics.value("tier_saved_seconds_total", "disk") == pytest.approx(16.0)
    assert metrics.value("tier_lost_seconds_total", "disk") == pytest.approx(4.5)
    assert metrics.value("tier_wait_seconds_total", "disk") == pytest.approx(4 + 5 * 1.9)
    assert metrics.value("tier_expected_seconds_total", "disk") == pytest.approx(2.5)


def test_a_tier_that_is_turned_down_is_tried_by_one_request_at_a_time_and_rarely() -> None:
    balance = TierBalance("disk", Metrics())
    after(balance, *[0.3] * 4, begun_s=9.0, good=False)  # a failed load has lost its time
    assert not balance.allows(10.2)
    assert balance.allows(10.4)  # 1 s after the last of them
    balance.began()
    assert not balance.allows(10.5)
    balance.ended(10.4, 11.9, expected_s=0.1, compute_s=1.0, good=True)
    assert not balance.allows(13.8)
    assert balance.allows(14.0)  # 2 s after the failed attempt
    for _ in range(9):
        after(balance, 5.0, begun_s=100.0)
    assert not balance.allows(164.9)
    assert balance.allows(165.1)
    after(balance, 0.5, begun_s=170.0)
    assert balance.allows(170.5)


def test_loads_that_began_before_a_tier_was_turned_down_do_not_lengthen_the_pause() -> None:
    balance = TierBalance("disk", Metrics())
    for _ in range(12):
        balance.began()
    for _ in range(12):
        balance.ended(0.0, 2.0, expected_s=0.1, compute_s=1.0, good=True)
    assert balance.allows(3.1)


def test_a_load_counts_for_nothing_until_a_prefill_was_measured() -> None:
    balance = TierBalance("disk", Metrics())
    balance.began()
    balance.ended(0.0, 50.0, expected_s=0.1, compute_s=float("inf"), good=False)
    assert balance.allows(50.0)


@pytest.mark.parametrize(
    ("block_s", "read_s", "patience_s"),
    [(0.021, 1e-9, 0.042), (1.0, 1e-9, 0.1), (1.0, 0.05, 0.8), (1.0, 0.4, 2.0)],
    ids=["computing is soon done", "the least", "eight times as long as expected", "as long as computing"],
)
def test_a_request_waits_for_a_stalled_disk_no_longer_than_computing_takes(
    disk_rig: Rig, block_s: float, read_s: float, patience_s: float
) -> None:
    wanted = keys("a", "b")
    disk_rig.on_disk_only(wanted)
    for _ in range(5):
        disk_rig.costs.saw_transfer("disk", BLOCK, read_s)
    disk_rig.costs.saw_prefill(LAYOUT.block_tokens, block_s)
    assert disk_rig.transfers.worth_loading(["disk", "disk"])
    with disk_rig.hold("disk-read-0"), disk_rig.hold("disk-read-1"):
        for request_id in range(4):
            disk_rig.promote(wanted, request_id=request_id)
            disk_rig.clock.now_s += patience_s - 0.01
            assert disk_rig.poll() == []
            disk_rig.clock.now_s += 0.02
            assert disk_rig.poll() == [Promoted(request_id, 0, False, "deadline")]
    assert not disk_rig.transfers.worth_loading(["disk", "disk"])
    assert disk_rig.transfers.worth_loading(["host", "host"])
    assert disk_rig.transfers.tier_faults == ["disk: turned down, its loads lost time"]
    disk_rig.finish("disk-read-0", "disk-read-1")
    disk_rig.host.pool.forget_all()
    disk_rig.clock.now_s += 1.0
    assert disk_rig.transfers.worth_loading(["disk", "disk"])
    disk_rig.promote(wanted, request_id=9)
    assert not disk_rig.transfers.worth_loading(["disk", "disk"])  # one attempt at a time
    assert disk_rig.finish("disk-read-0", "disk-read-1") == [Promoted(9, 0, True, "done")]
    assert disk_rig.transfers.worth_loading(["disk", "disk"])
