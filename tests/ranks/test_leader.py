"""Rank 0's side: what it sends, and in which order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import pytest

from proof.toy import ToyModel
from sidestream.config import EngineConfig, SamplingParams
from sidestream.engine import build_engine
from sidestream.errors import DeviceLost, InvariantError
from sidestream.ranks.fences import JointFence, Progress
from sidestream.ranks.leader import Ranks, joint_device
from sidestream.ranks.messages import Copy, End, Failed, Passed, Ready
from sidestream.types import Delta
from sidestream_kv.device.base import CopyBatch, WakeUp
from sidestream_kv.device.cpu import CpuDevice
from sidestream_kv.offload.tier_io import LocalWork


class Sent:
    """A transport that keeps what it is given."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.closed = self.killed = False

    def send(self, message: Any) -> None:
        self.messages.append(message)

    def close(self) -> None:
        self.closed = True

    def kill(self) -> None:
        self.killed = True


@pytest.fixture
def device() -> Any:
    device = CpuDevice(compute_threads=1)
    yield device
    device.close()


def rank_0(device: CpuDevice, size: int = 2) -> tuple[Any, Ranks, Sent]:
    sent = Sent()
    ranks = Ranks(size, sent, progress=Progress(size))
    return joint_device(device, ranks), ranks, sent


def a_copy(device: Any) -> CopyBatch:
    kv, host = device.allocate("kv", 64), device.allocate_host("host", 64, item_bytes=16)
    return CopyBatch(kv, host, np.array([16, 32]), np.array([0, 16]), 16)


def settle(fence: JointFence, device: CpuDevice) -> None:
    assert device.wait_host(fence.local, reason="test", timeout_s=5.0)


def test_a_copy_is_sent_at_once_and_done_after_all_ranks(device: CpuDevice) -> None:
    joint, ranks, sent = rank_0(device, 3)
    fence = joint.stream("store-0").submit_copy(a_copy(joint), 0, 2, label="store")
    (message,) = sent.messages
    assert isinstance(message, Copy)
    assert (message.stream, message.number, message.to_host, message.size) == ("store-0", 1, True, 16)
    assert np.frombuffer(message.sources, "<i8").tolist() == [16, 32]
    settle(fence, device)
    for rank in (1, 2):
        assert not fence.poll()
        ranks.take_in(rank, Passed((("store-0", 1),)))
    assert fence.poll()
    assert fence.failure is None


def test_a_copy_waits_for_the_same_fences_on_every_rank(device: CpuDevice) -> None:
    joint, _, sent = rank_0(device)
    batch = a_copy(joint)
    first = joint.stream("store-0").submit_copy(batch, 0, 1)
    second = joint.stream("store-1")
    second.wait(first)
    second.submit_copy(batch, 1, 2)
    second.submit_copy(batch, 1, 2)
    assert [message.after for message in sent.messages] == [(), (("store-0", 1),), ()]


def test_a_question_to_a_store_is_asked_by_rank_0_only(device: CpuDevice) -> None:
    joint, _, sent = rank_0(device)
    answers: list[str] = []
    fence = joint.worker("redis-find").submit(LocalWork(lambda: answers.append("found")), label="find blocks")
    device.wait_host(fence, reason="test")
    assert answers == ["found"]
    assert sent.messages == []


def test_work_that_other_ranks_cannot_run_is_refused(device: CpuDevice) -> None:
    joint, _, sent = rank_0(device)
    with pytest.raises(InvariantError, match="other ranks cannot run a closure"):
        joint.worker("disk-write").submit(lambda: None, label="a closure")
    assert sent.messages == []


def test_a_failure_on_another_rank_fails_the_copy(device: CpuDevice) -> None:
    joint, ranks, _ = rank_0(device)
    fence = joint.stream("load-0").submit_copy(a_copy(joint), 0, 2)
    settle(fence, device)
    ranks.take_in(1, Failed("load-0", 1, "TierError", "no such block"))
    ranks.take_in(1, Passed((("load-0", 1),)))
    assert fence.poll()
    assert "on rank 1: no such block" in str(fence.failure)


def test_host_memory_has_the_size_that_every_rank_can_use(device: CpuDevice) -> None:
    joint, ranks, _ = rank_0(device, 3)
    memory = joint.allocate_host("host", 64, item_bytes=16)
    assert joint.ready_bytes(memory) == 16  # no rank has reported
    assert joint.grows(memory)
    ranks.take_in(1, Ready(64, True))
    assert joint.ready_bytes(memory) == 16  # rank 2 has not
    ranks.take_in(2, Ready(32, False))
    assert joint.ready_bytes(memory) == 32
    ranks.take_in(2, Ready(48, True))
    assert joint.ready_bytes(memory) == 48


@pytest.mark.parametrize("how", ["a step failed", "a rank has ended"])
def test_a_lost_rank_ends_everything_that_waits(device: CpuDevice, how: str) -> None:
    joint, ranks, sent = rank_0(device)
    errors: list[DeviceLost] = []
    ranks.on_loss(errors.append)
    fence = joint.stream("store-0").submit_copy(a_copy(joint), 0, 2)
    if how == "a step failed":
        ranks.take_in(1, Failed("compute", 1, "DeviceError", "out of memory"))
    else:
        ranks.lose(DeviceLost("rank 1 is lost"))
    assert sent.killed
    assert len(errors) == 1
    with pytest.raises(DeviceLost):
        fence.poll()


@pytest.mark.parametrize("lost", [False, True])
def test_work_is_awaited_until_every_rank_has_reported_it_or_is_lost(device: CpuDevice, lost: bool) -> None:
    joint, ranks, _ = rank_0(device, 3)
    fence = joint.stream("store-0").submit_copy(a_copy(joint), 0, 2)
    settle(fence, device)
    ends: SimpleQueue[DeviceLost | None] = SimpleQueue()

    def wait() -> None:
        try:
            ranks.wait_for(fence)
            ends.put(None)
        except DeviceLost as error:
            ends.put(error)

    threading.Thread(target=wait, daemon=True).start()
    ranks.take_in(1, Passed((("store-0", 1),)))
    with pytest.raises(Empty):
        ends.get(timeout=0.05)
    if lost:
        ranks.lose(DeviceLost("rank 2 is lost"))
        assert "rank 2 is lost" in str(ends.get(timeout=5.0))
    else:
        ranks.take_in(2, Passed((("store-0", 1),)))
        assert ends.get(timeout=5.0) is None


def test_a_step_that_ends_after_a_rank_is_lost_is_not_committed() -> None:
    """An aborted collective ends without an error, and with any content of its tensors."""
    ranks = Ranks(2, Sent(), progress=Progress(2))
    model = ToyModel()
    config = EngineConfig(device="cpu", kv_memory=16 * model.layout.block_bytes, compute_threads=1)
    engine = build_engine(model, config, ranks=ranks, threaded=False)
    deltas: list[Delta] = []
    engine.submit([1, 2, 3], SamplingParams(max_tokens=4, temperature=0), deltas.append)
    try:
        assert engine.loop.step()  # launched, and not committed
        ranks.progress.lose(DeviceLost("rank 1 is lost"))
        with pytest.raises(DeviceLost, match="rank 1 is lost"):
            engine.loop.step()
        assert not deltas
    finally:
        engine.close()


def test_a_report_during_a_turn_causes_another_turn(device: CpuDevice) -> None:
    joint, ranks, _ = rank_0(device)
    fence = joint.stream("store-0").submit_copy(a_copy(joint), 0, 2)
    settle(fence, device)
    wake_ups: list[WakeUp] = []
    turns: list[Callable[[], WakeUp]] = []

    class Device:
        """Keeps the turn instead of starting a thread."""

        now = staticmethod(device.now)

        def thread(self, name: str, turn: Callable[[], WakeUp]) -> Any:
            turns.append(turn)
            return None

    def turn() -> WakeUp:
        assert not fence.poll()
        ranks.take_in(1, Passed((("store-0", 1),)))  # all ranks have passed, but this turn has polled before
        return WakeUp((fence,))

    joint_device(Device(), ranks).thread("offload", turn)  # type: ignore[arg-type]
    wake_ups.append(turns[0]())
    assert wake_ups[0].until_s is not None


def test_the_end_is_the_last_message(device: CpuDevice) -> None:
    joint, ranks, sent = rank_0(device)
    joint.stream("store-0").submit_copy(a_copy(joint), 0, 2)
    ranks.close()
    ranks.close()
    assert sent.closed
    assert [type(message) for message in sent.messages] == [Copy, End]
