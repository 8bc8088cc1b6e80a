"""The cache outlives the device pool and the process, and its failures change no token."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_rig import PATIENCE_S, Reply, Rig, prompts, serving

from proof import faults
from proof.toy import StatefulToyModel, ToyModel
from sidestream.attention.paged import PagedBatch
from sidestream.engine.warm_up import warm_up_row
from sidestream.errors import RequestRejected
from sidestream.types import BatchPlan, CachedTokens, Health
from sidestream_kv.device.base import CopyBatch
from sidestream_kv.device.cpu import CpuDevice
from sidestream_kv.device.host import HostFence, HostStream
from sidestream_kv.offload import tier_io
from sidestream_kv.offload.loads import Loads
from sidestream_kv.types import LayerGates, LoadPlan

PROMPT = prompts(21, 1, longest=1)[0] + list(range(1, 30))  # 30 tokens: 7 blocks that a cache may supply
REUSABLE = 28


@pytest.fixture
def one_layer_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuDevice, "segment_bytes", 1)


def cold(rig: Rig) -> None:
    """PROMPT was answered; its blocks rest in the host tier (and on disk), and nowhere else."""
    rig.ask(PROMPT)
    rig.settle()
    rig.forget_device()


# ------------------------------------------------------------------ it works


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.usefixtures("one_layer_a_group")
def test_a_prefix_is_reused_from_device_host_and_disk(tmp_path: Path, asynchronous: bool) -> None:
    with serving(slots=24, disk=tmp_path, asynchronous=asynchronous) as rig:
        assert rig.ask(PROMPT).cached.total == 0
        assert rig.ask(PROMPT).cached.device == REUSABLE
        rig.settle()
        rig.forget_device()
        assert rig.ask(PROMPT).cached.host == REUSABLE
        rig.forget_device()
        rig.forget_host()
        assert rig.ask(PROMPT).cached.disk == REUSABLE


@pytest.mark.parametrize("asynchronous", [True, False])
def test_requests_with_different_cache_salts_share_no_kv_in_any_tier(tmp_path: Path, asynchronous: bool) -> None:
    with serving(slots=64, disk=tmp_path, asynchronous=asynchronous) as rig:

        def cached(salt: str) -> CachedTokens:
            return rig.ask(PROMPT, cache_salt=salt).cached

        assert cached("a").total == 0
        assert cached("a").device == REUSABLE
        assert (cached("b").total, cached("").total) == (0, 0)
        rig.settle()
        rig.forget_device()
        assert cached("c").total == 0
        assert cached("a").host == REUSABLE
        rig.settle()
        rig.forget_device()
        rig.forget_host()
        assert cached("d").total == 0
        assert cached("a").disk == REUSABLE
        assert cached("b").disk == REUSABLE


def test_blocks_of_an_answer_to_a_short_prompt_have_the_requests_cache_salt() -> None:
    """Its first key is made when its first block is complete, on the engine thread."""
    with serving() as rig:
        reply = rig.ask(PROMPT[:3], 12, cache_salt="a")
        whole = PROMPT[:3] + reply.token_ids()  # 15 tokens, of which 14 were computed: 3 blocks
        assert rig.ask([*whole, 1], cache_salt="b").cached.total == 0
        assert rig.ask([*whole, 1]).cached.total == 0
        assert rig.ask([*whole, 1], cache_salt="a").cached.device == 12


@pytest.mark.parametrize(
    ("salt", "said"),
    [
        (None, "cache_salt is a NoneType: give a text of at most 1024 characters"),
        ("x" * 1025, "cache_salt is 1025 characters long"),
    ],
)
def test_an_invalid_cache_salt_is_refused(salt: Any, said: str) -> None:
    with serving() as rig, pytest.raises(RequestRejected, match=said) as refusal:
        rig.submit(PROMPT, cache_salt=salt)
    assert refusal.value.param == "cache_salt"


def test_the_last_blocks_of_an_answer_are_stored_without_a_further_step(tmp_path: Path) -> None:
    with serving(slots=24, disk=tmp_path) as rig:
        reply = rig.ask(PROMPT, 12)
        rig.settle()
        rig.forget_device()
        rig.forget_host()
        whole = PROMPT + reply.token_ids()  # 42 tokens, of which 41 were computed: 10 blocks
        assert rig.ask([*whole, 1]).cached.disk == 40


def test_a_tail_on_a_slow_disk_is_computed_behind_the_head_from_host_memory(tmp_path: Path) -> None:
    with serving(slots=24, disk=tmp_path) as rig:
        rig.ask(PROMPT)
        rig.settle()
        rig.forget_device()
        transfers, costs = rig.engine.parts.transfers, rig.engine.parts.costs
        assert transfers is not None and costs is not None
        last = rig.engine.parts.scheduler.keys_of(PROMPT)[REUSABLE // 4 - 1]
        transfers.forget([last], ("host",))
        rig.turn_until(lambda: transfers.locate([last]) == ["disk"])
        costs.prefill_rate = 1000.0  # 4 ms for a block, and 20 ms to read it
        for _ in range(5):
            costs.saw_transfer("disk", rig.model.layout.block_bytes, 0.02)
        assert rig.ask(PROMPT).cached == CachedTokens(host=REUSABLE - 4)
        assert rig.counted("transfers_total", "disk-read", "done") == 0


def test_a_disk_gets_reused_blocks_while_serving_and_the_others_by_a_flush(tmp_path: Path) -> None:
    with serving(slots=48, disk=tmp_path, disk_blocks=16, write_policy="reused") as rig:
        transfers, (old, once, again) = rig.engine.parts.transfers, prompts(7, 3, longest=30)
        assert transfers is not None
        assert rig.disk is not None

        def on_disk(prompt: list[int]) -> int:
            rig.turn_until(lambda: not transfers.has_work)
            assert rig.disk is not None
            return rig.disk.index.lookup(rig.engine.parts.scheduler.keys_of(prompt))

        while len(rig.disk.index) < 16:
            rig.ask(old, 30)
            old = [old[0] + 1, *old]
            on_disk(old)
        for prompt in (once, again):
            rig.ask(prompt)
        assert (on_disk(once), on_disk(again)) == (0, 0)
        rig.ask([*again, 5, 6, 7, 8, 9])
        assert (on_disk(once), on_disk(again)) == (0, len(again) // 4)
        rig.settle()
        assert on_disk(once) == len(once) // 4


@pytest.mark.parametrize("write_policy", ["all", "reused"])
def test_an_engine_restarted_on_its_directory_reuses_blocks_on_disk(tmp_path: Path, write_policy: str) -> None:
    with serving(slots=24, disk=tmp_path, write_policy=write_policy) as rig:
        before = rig.ask(PROMPT).token_ids()
    with serving(slots=24, disk=tmp_path) as rig:
        reply = rig.ask(PROMPT)
        assert reply.token_ids() == before
        assert reply.cached.disk == REUSABLE


def test_deferred_blocks_are_stored_once_host_memory_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    slots, pinned = 24, [2]
    monkeypatch.setattr(CpuDevice, "grows", lambda device, memory: memory.name == "host" and pinned[0] < slots)
    monkeypatch.setattr(
        CpuDevice,
        "ready_bytes",
        lambda device, memory: memory.num_bytes * pinned[0] // slots if memory.name == "host" else memory.num_bytes,
    )
    with serving(slots=slots) as rig:
        rig.ask(PROMPT)
        rig.turn_until(lambda: rig.counted("transfers_total", "store", "deferred") > 0)
        assert rig.engine.parts.tiers is not None and rig.engine.parts.tiers.host.pool.size == 2
        pinned[0] = slots
        rig.settle()
        rig.forget_device()
        assert rig.ask(PROMPT).cached.host == REUSABLE
        layout = rig.model.layout
        rig.settle()
        rig.turn_until(lambda: rig.counted("tier_ready_bytes", "host") == slots * layout.block_bytes)


_VICTIM = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from engine_rig import Rig, prompts
rig = Rig(blocks=24, slots=48, disk=Path(sys.argv[1]))
for number, prompt in enumerate(prompts(0, 1000, longest=30)):
    rig.ask(prompt)
    if number % 4 == 3:
        rig.settle()
    print(number, flush=True)
"""


def test_a_restart_after_kill_9_serves_complete_blocks_only(tmp_path: Path) -> None:
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", _VICTIM, str(tmp_path / "kv"), here]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    ) as victim:
        assert victim.stdout is not None
        answered = [line for _, line in zip(range(14), victim.stdout, strict=False)]  # in the middle of writing
        victim.send_signal(signal.SIGKILL)
    assert len(answered) == 14, "the process ended by itself"
    with serving(blocks=24, slots=48, disk=tmp_path / "kv") as rig:
        from_disk = 0
        for number, prompt in enumerate(prompts(0, 16, longest=30)):
            cached = rig.ask(prompt).cached
            assert cached.host == 0
            from_disk += cached.disk
            if number < 12:
                assert cached.disk == (len(prompt) - 1) // 4 * 4, "a block that was settled before the kill is missing"
        assert from_disk > 0


# ------------------------------------------------------------------ order


def test_a_step_does_not_read_blocks_before_their_load_ends() -> None:  # H5
    with serving(slots=24) as rig:
        cold(rig)
        rig.engine.parts.executor._kv.zero_()
        with rig.hold("load"):
            reply = rig.submit(PROMPT)
            assert reply.is_silent(), "the step ran ahead of its load"
        rig.expect(reply, PROMPT)
        assert reply.cached.host == REUSABLE


def test_a_step_does_not_write_blocks_before_their_store_ends() -> None:  # H2
    with serving(blocks=12, slots=24) as rig:
        with rig.hold("store"):
            rig.ask(PROMPT, 2)
            other = [7] * 40
            reply = rig.submit(other)
            assert reply.is_silent(), "the step overwrote blocks before they were stored"
        rig.expect(reply, other)
        rig.settle()
        rig.forget_device()
        assert rig.ask(PROMPT, 2).cached.host == REUSABLE


def test_a_load_does_not_write_blocks_that_a_step_still_uses() -> None:  # H3
    with serving(blocks=10, slots=24) as rig:
        cold(rig)
        hold = rig.hold("compute")
        replies: list[Reply] = []
        launch = rig.engine.parts.executor.launch

        def abort_behind_it(*args: Any, **options: Any) -> Any:  # on the engine thread: no step comes between
            rig.engine.parts.executor.launch = launch  # type: ignore[method-assign]
            step = launch(*args, **options)
            rig.abort(doomed)
            replies.append(rig.submit(PROMPT))
            return step

        ready = threading.Event()
        rig.engine.parts.inbox.put(lambda: ready.wait(PATIENCE_S) and None)
        rig.engine.parts.executor.launch = abort_behind_it  # type: ignore[method-assign]
        doomed = rig.submit([9] * 30, 2)
        ready.set()
        rig.turn_until(lambda: rig.sizes()["loads"] == 1)
        assert doomed.reason == "abort"
        assert replies[0].is_silent()
        hold.release()
        rig.expect(replies[0], PROMPT)
        assert replies[0].cached.host == REUSABLE


def test_blocks_of_an_aborted_load_are_not_reused_before_it_ends() -> None:  # H10
    with serving(blocks=16, slots=24) as rig:
        cold(rig)
        with rig.hold("load"):
            doomed = rig.submit(PROMPT)
            assert doomed.is_silent()
            # its step is gated by the load: nothing else can run, but what is taken meanwhile must not be what the load
            # writes
            rig.abort(doomed)
            other = [8] * 30
            reply = rig.submit(other)
        rig.expect(reply, other)
        assert doomed.reason in ("abort", "length")


# ------------------------------------------------------------------ failures


class FailingLoads:
    """Makes copies into the device fail while `armed`."""

    def __init__(self) -> None:
        self.armed = True
        self.failed = 0

    def __call__(self, stream: HostStream, batch: CopyBatch) -> None:
        if batch.target.name == "kv" and self.armed:
            self.failed += 1
            for _, target in batch.runs():
                target.fill_(0xEE)
            raise OSError("injected: the copy failed")
        _copy(stream, batch)


_copy = HostStream.copy


@pytest.fixture
def failing_loads(monkeypatch: pytest.MonkeyPatch) -> FailingLoads:
    fail = FailingLoads()

    def copy(stream: HostStream, batch: CopyBatch) -> None:
        fail(stream, batch)

    monkeypatch.setattr(HostStream, "copy", copy)
    return fail


def test_a_load_whose_blocks_were_evicted_from_host_memory_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(slots=24) as rig:
        cold(rig)
        host = rig.engine.parts.tiers.host
        assert host is not None
        load = Loads.submit

        def too_late(self: Loads, job_id: int, plan: LoadPlan) -> None:
            host.pool.forget_all()
            load(self, job_id, plan)

        monkeypatch.setattr(Loads, "submit", too_late)
        reply = rig.ask(PROMPT)
        assert reply.cached.total == 0
        assert (rig.counted("load_fallbacks_total", "gone"), rig.counted("load_fallbacks_total", "load_failed")) == (
            1,
            0,
        )


def test_a_recurrent_state_of_other_tokens_is_a_miss_and_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    model = StatefulToyModel()
    with serving(blocks=64, slots=64, model=model) as rig:
        cold(rig)
        assert rig.engine.parts.tiers is not None
        host, states, covers = rig.engine.parts.tiers.host, rig.engine.parts.states, []
        assert states is not None
        rig.engine.call(states.forget_all)
        load = Loads.submit

        def of_other_tokens(self: Loads, job_id: int, plan: LoadPlan) -> None:
            if plan.num_whole and not covers:
                assert model.state_layout is not None
                part, first = divmod(model.state_layout.covered_offset, model.layout.block_bytes)
                index = host.pool.get(plan.keys[part])
                assert index is not None
                number = host.slot(index)[first : first + 8]
                assert int.from_bytes(number, "little") == plan.covers
                covers.append(plan.covers)
                number[:] = (plan.covers - 4).to_bytes(8, "little")
            load(self, job_id, plan)

        monkeypatch.setattr(Loads, "submit", of_other_tokens)
        assert rig.ask(PROMPT).cached.total < covers[0]
        assert rig.counted("load_fallbacks_total", "coverage") == 1
        rig.settle()
        rig.forget_device()
        rig.engine.call(states.forget_all)
        assert rig.ask(PROMPT).cached.host == covers[0]  # the state of this second answer
        assert rig.counted("load_fallbacks_total", "coverage") == 1


@pytest.mark.parametrize("asynchronous", [True, False])
def test_blocks_of_a_load_that_fails_during_a_step_are_recomputed(
    failing_loads: FailingLoads, asynchronous: bool
) -> None:
    with serving(slots=24, asynchronous=asynchronous) as rig:
        cold(rig)
        bystander = rig.submit([3] * 10, 30)
        reply = rig.ask(PROMPT)
        assert failing_loads.failed == 1
        assert reply.cached.total == 0
        assert rig.counted("load_fallbacks_total", "load_failed") == 1
        rig.expect(bystander, [3] * 10, 30)
        failing_loads.armed = False
        rig.settle()
        assert rig.ask(PROMPT).cached.device == REUSABLE
        rig.forget_device()
        assert rig.ask(PROMPT).cached.host == REUSABLE


def test_a_failed_load_of_a_state_affects_no_other_request_of_its_step(failing_loads: FailingLoads) -> None:
    with serving(blocks=64, slots=64, model=StatefulToyModel()) as rig:
        cold(rig)
        assert rig.engine.parts.states is not None
        rig.engine.call(rig.engine.parts.states.forget_all)
        bystander, steps = rig.submit([3] * 10, 120), rig.engine.num_steps
        rig.turn_until(lambda: rig.engine.num_steps > steps)
        with rig.hold("load"):
            reply = rig.submit(PROMPT)
            rig.turn_until(lambda: 2 in {step.batch.num_rows for step in (rig.engine.loop.in_flight,) if step})
        rig.expect(reply, PROMPT)
        rig.expect(bystander, [3] * 10, 120)
        assert rig.counted("load_fallbacks_total", "load_failed") == 1


def test_a_step_error_caused_by_a_failed_load_does_not_end_the_request(failing_loads: FailingLoads) -> None:
    choked: list[int] = []

    class Choking(ToyModel):
        def forward(
            self,
            tokens: torch.Tensor,
            positions: torch.Tensor,
            batch: PagedBatch,
            logit_rows: torch.Tensor,
            **more: Any,
        ) -> torch.Tensor:
            logits = super().forward(tokens, positions, batch, logit_rows, **more)
            if failing_loads.failed == 1 and not choked:  # the first step behind the load
                choked.append(int(positions[0]))
                raise RuntimeError("injected: rubbish in the cache")
            return logits

    with serving(slots=24, model=Choking()) as rig:
        cold(rig)
        steps = rig.engine.num_steps
        with rig.hold("load"):
            reply = rig.submit(PROMPT)
            rig.turn_until(lambda: rig.engine.num_steps > steps)
        rig.expect(reply, PROMPT)
        assert choked == [REUSABLE]


def test_a_load_that_fails_under_two_launched_steps_discards_both_results(failing_loads: FailingLoads) -> None:
    with serving(slots=24) as rig:
        cold(rig)
        steps = rig.engine.num_steps
        hold = rig.hold("load")
        reply = rig.submit(PROMPT)
        rig.turn_until(lambda: rig.engine.num_steps >= steps + 2)
        hold.release()
        rig.expect(reply, PROMPT)
        assert failing_loads.failed == 1


def test_a_request_recomputes_if_the_disk_misses_the_deadline(tmp_path: Path) -> None:  # H6, H10
    gate = threading.Event()
    with serving(blocks=12, slots=24, disk=tmp_path, load_deadline_s=0.05) as rig:
        cold(rig)
        rig.forget_host()
        assert rig.disk is not None
        rig.disk.on_read = faults.slow(gate)
        reply = rig.ask(PROMPT)
        assert reply.cached.total == 0
        assert rig.counted("load_fallbacks_total", "deadline") == 1
        assert rig.sizes()["disk reads"] == REUSABLE // 4
        for prompt in prompts(3, 4):  # everything changes hands before the late blocks land
            rig.ask(prompt)
        gate.set()
        rig.settle()
        rig.forget_device()
        assert rig.ask(PROMPT).cached.total == REUSABLE


@pytest.mark.parametrize(
    "fault", [faults.broken, faults.torn, faults.flapping(faults.healthy, faults.healthy, faults.torn)]
)
def test_a_failed_disk_read_is_a_miss(tmp_path: Path, fault: faults.Fault) -> None:
    with serving(slots=24, disk=tmp_path) as rig:
        cold(rig)
        rig.forget_host()
        assert rig.disk is not None
        rig.disk.on_read = fault
        assert rig.ask(PROMPT).cached.disk < REUSABLE
        assert rig.counted("load_fallbacks_total", "failed") >= 1
        rig.disk.on_read = faults.healthy
        for _ in range(2):
            rig.settle()
            rig.forget_device()
            rig.forget_host()
            rig.ask(PROMPT)


@pytest.mark.parametrize("fault", [faults.full, faults.broken])
def test_failed_disk_writes_do_not_stop_serving(tmp_path: Path, fault: faults.Fault) -> None:
    with serving(slots=24, disk=tmp_path) as rig:
        assert rig.disk is not None
        rig.disk.on_write = fault
        cold(rig)
        assert rig.ask(PROMPT).cached.host == REUSABLE
        assert rig.counted("transfers_total", "disk-write", "failed") >= 1
        rig.forget_device()
        rig.forget_host()
        assert rig.ask(PROMPT).cached.total == 0
        assert rig.engine.health().status == "ok"


def test_a_removed_disk_directory_is_shown_in_health_and_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_io, "PAUSE_S", 0.0)
    with serving(slots=24, disk=tmp_path / "kv") as rig:
        cold(rig)
        assert rig.engine.health() == Health("ok", "")
        shutil.rmtree(tmp_path / "kv")
        (tmp_path / "kv").write_text("in the way")
        rig.forget_host()
        rig.ask(prompts(3, 1)[0])  # its writes find no directory
        rig.settle()
        health = rig.engine.health()
        assert health.status == "ok"
        assert f"disk directory {tmp_path / 'kv'} was removed or replaced while in use" in health.detail
        assert rig.counted("tier_works", "disk") == 0
        (tmp_path / "kv").unlink()
        for number in range(2):
            rig.ask([number] * len(PROMPT))  # the first write makes the directory anew
            rig.settle()
        assert rig.engine.health() == Health("ok", "")
        assert rig.counted("tier_works", "disk") == 1
        rig.forget_device()
        rig.forget_host()
        assert rig.ask([1] * len(PROMPT)).cached.disk == REUSABLE


def test_intermittent_disk_errors_change_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_io, "PAUSE_S", 0.0)
    with serving(blocks=20, slots=16, disk=tmp_path, disk_blocks=40) as rig:
        assert rig.disk is not None
        rig.disk.on_read = faults.flapping(*[faults.healthy] * 5, faults.broken, faults.torn)
        rig.disk.on_write = faults.flapping(*[faults.healthy] * 3, faults.full, faults.broken)
        for batch in range(6):
            asked = prompts(batch // 3, 6, shared=24)
            replies = [rig.submit(prompt, 8) for prompt in asked]
            for reply, prompt in zip(replies, asked, strict=True):
                rig.expect(reply, prompt, 8)
        rig.settle()
        for kind in ("disk-write", "disk-read"):
            assert rig.counted("transfers_total", kind, "done") > 0
            assert rig.counted("transfers_total", kind, "failed") > 0


def test_a_host_tier_full_of_slow_disk_writes_skips_stores_and_still_serves(tmp_path: Path) -> None:
    gate = threading.Event()
    with serving(slots=4, disk=tmp_path) as rig:
        assert rig.disk is not None
        rig.disk.on_write = faults.slow(gate)
        for prompt in prompts(8, 6, longest=30):
            rig.ask(prompt)
        assert rig.counted("transfers_total", "store", "skipped") > 0
        gate.set()


def test_a_request_that_waits_for_the_disk_can_be_aborted(tmp_path: Path) -> None:
    gate = threading.Event()
    with serving(slots=24, disk=tmp_path) as rig:
        cold(rig)
        rig.forget_host()
        assert rig.disk is not None
        rig.disk.on_read = faults.slow(gate)
        reply = rig.submit(PROMPT)
        rig.turn_until(lambda: rig.sizes()["waiters"] == 1)
        rig.abort(reply)
        assert reply.reason == "abort"
        rig.ask([4] * 20)  # others do not wait for it
        gate.set()
        rig.settle()
        assert rig.ask(PROMPT).cached.total == REUSABLE


def test_requests_that_need_the_same_blocks_read_them_from_disk_once(tmp_path: Path) -> None:
    gate = threading.Event()
    with serving(slots=24, disk=tmp_path) as rig:
        cold(rig)
        rig.forget_host()
        assert rig.disk is not None
        rig.disk.on_read = faults.slow(gate)
        replies = [rig.submit(PROMPT) for _ in range(3)]
        rig.turn_until(lambda: rig.sizes()["waiters"] == 3)
        gate.set()
        for reply in replies:
            rig.expect(reply, PROMPT)
        assert len(rig.disk.reads) == len(set(rig.disk.reads)) == REUSABLE // 4


def test_a_step_waits_for_the_fences_of_its_plan() -> None:
    with serving() as rig:
        rig.ask(PROMPT)
        parts, other = rig.engine.parts, rig.device.stream("other")
        lease = parts.blocks.take(1)
        with faults.Hold(other):
            row = warm_up_row(0, tuple(lease.ids), 1)
            step = parts.executor.launch(BatchPlan((row,)), after=(other.submit(lambda: None),), gates=LayerGates())
            assert isinstance(step.fence, HostFence)
            assert not step.fence.block(0.1), (
                "the step overtook what it waits for"
            )  # a pass does not depend on the 0.1 s, a catch does
        assert step.fence.block(PATIENCE_S)
        step.drop()
        lease.release()
