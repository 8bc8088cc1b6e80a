"""A step that fails on one of several ranks is the last one there: the collectives of a later step would meet those of
the failed step on the other ranks.
"""

from __future__ import annotations

import pytest

from proof.thread_group import thread_groups
from proof.toy import ToyModel
from sidestream.attention.paged import TorchAttention
from sidestream.config import SamplingParams
from sidestream.errors import DeviceLost
from sidestream.runner.executor import Executor
from sidestream.types import BatchPlan, RowPlan, RowStart
from sidestream_kv.device.cpu import CpuDevice
from sidestream_kv.device.group import Group
from sidestream_kv.types import LayerGates


@pytest.mark.parametrize("is_rank", [False, True])
def test_a_rank_runs_no_step_after_a_failed_one(is_rank: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    device, model, runs = CpuDevice(compute_threads=1), ToyModel(), list[int]()
    group: Group | None = thread_groups(1)[0] if is_rank else None
    memory = device.allocate("kv", 4 * model.layout.block_bytes)
    executor = Executor(device=device, model=model, memory=memory, num_slots=2, attention=TorchAttention(), group=group)
    forward = model.forward

    def failing(*args: object, **options: object) -> object:
        runs.append(len(runs))
        if len(runs) == 1:
            raise RuntimeError("injected")
        return forward(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(model, "forward", failing)
    begin = RowStart(SamplingParams(temperature=0).spec(seed=0, eos_ids=()), (5,), ())
    batch = BatchPlan((RowPlan(1, 0, 0, 0, 1, (5,), (0,), True, 0, begin),))
    try:
        first, second = (executor.launch(batch, after=(), gates=LayerGates()) for _ in range(2))  # both in flight
        for step in (first, second):
            device.wait_host(step.fence, reason="test")
            step.drop()
        assert isinstance(first.fence.failure, RuntimeError)
        assert len(runs) == (1 if is_rank else 2)
        if is_rank:
            assert isinstance(second.fence.failure, DeviceLost)
            assert str(second.fence.failure) == "an earlier step failed on this rank: RuntimeError: injected"
        else:
            assert second.fence.failure is None
    finally:
        device.close()
