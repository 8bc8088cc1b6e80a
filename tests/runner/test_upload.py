"""Uploads through host memory that kernels read; here, the mapped memory is the same memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from proof.toy import ToyModel
from sidestream.attention.paged import TorchAttention
from sidestream.config import SamplingParams
from sidestream.runner.executor import Executor
from sidestream.runner.state import Uploads
from sidestream.types import BatchPlan, RowPlan, RowStart
from sidestream_kv.device.cpu import CpuDevice
from sidestream_kv.types import LayerGates

SLOT = 256


@pytest.fixture
def staging() -> torch.Tensor:
    return torch.zeros(2, SLOT, dtype=torch.uint8)


@pytest.fixture
def uploads(staging: torch.Tensor) -> Uploads:
    return Uploads(staging=staging, mapped=staging.view(torch.uint8))


def test_numbers_of_a_step_are_consecutive_and_aligned(uploads: Uploads, staging: torch.Tensor) -> None:
    uploads.open(1)
    first = uploads.numbers([1.5], torch.float32)
    second = uploads.numbers([7, 8])
    assert (first.tolist(), first.dtype, second.tolist(), second.dtype) == ([1.5], torch.float32, [7, 8], torch.int64)
    assert staging[1, 16:32].view(torch.int64).tolist() == [7, 8]
    assert not staging[0].any()  # another step's


def test_fetched_numbers_stay_valid_when_their_slot_is_reused(uploads: Uploads) -> None:  # H17
    uploads.open(0)
    kept = uploads.numbers([1, 2, 3])
    parts = uploads.together([torch.tensor([[4, 5]]), torch.tensor([6])])
    uploads.open(0)
    uploads.numbers([9] * 20)
    assert kept.tolist() == [1, 2, 3]
    assert [part.tolist() for part in parts] == [[[4, 5]], [6]]


def test_an_upload_overwrites_its_whole_target(uploads: Uploads) -> None:
    target = torch.full((4,), -1)
    uploads.into(target, np.arange(4))
    assert target.tolist() == [0, 1, 2, 3]


def test_captured_inputs_are_fetched_from_the_steps_own_region(staging: torch.Tensor) -> None:  # H17
    uploads, target = Uploads(staging=staging, mapped=staging.view(torch.uint8), input_bytes=64), torch.full((4,), -1)
    fetches = uploads.fetches(target)
    for slot, first in ((1, 10), (0, 20)):
        uploads.open(slot)
        assert uploads.write(np.arange(first, first + 4)) == slot
        assert uploads.numbers([7, 8, 9]).tolist() == [7, 8, 9]
    for slot, first in ((0, 20), (1, 10)):
        fetches[slot]()
        assert target.tolist() == [*range(first, first + 4)]
    assert uploads.fetches(torch.zeros(9, dtype=torch.int64)) == []  # 72 bytes


def test_numbers_larger_than_a_slot_are_uploaded_too(uploads: Uploads, staging: torch.Tensor) -> None:
    uploads.open(0)
    assert uploads.numbers([1] * 30).tolist() == [1] * 30  # 240 bytes
    before = staging.clone()
    many, target = uploads.numbers(range(33)), torch.zeros(40, dtype=torch.int64)
    uploads.into(target, np.arange(40))
    assert (many.tolist(), target.tolist()) == ([*range(33)], [*range(40)])
    assert uploads.numbers([5, 6]).tolist() == [5, 6]  # 16 bytes: they just fit
    assert torch.equal(staging[0, :240], before[0, :240])
    assert staging[0, 240:].view(torch.int64).tolist() == [5, 6]


def test_on_a_cpu_uploads_return_the_same_tensor() -> None:
    uploads = Uploads.of(CpuDevice(compute_threads=1), num_regions=3)
    uploads.open(2)
    tensor, target = torch.arange(3), torch.zeros(3, dtype=torch.int64)
    uploads.into(target, np.arange(3))
    assert uploads.together([tensor])[0] is tensor
    assert (uploads.numbers([1]).tolist(), uploads.numbers([]).tolist(), target.tolist()) == ([1], [], [0, 1, 2])


def test_each_step_in_flight_has_its_own_upload_region(monkeypatch: pytest.MonkeyPatch) -> None:  # H17
    device, model, opened = CpuDevice(compute_threads=1), ToyModel(), list[int]()
    memory = device.allocate("kv", 4 * model.layout.block_bytes)
    executor = Executor(device=device, model=model, memory=memory, num_slots=2, attention=TorchAttention())
    monkeypatch.setattr(Uploads, "open", lambda self, region: opened.append(region))
    begin = RowStart(SamplingParams(temperature=0).spec(seed=0, eos_ids=()), (5,), ())
    batch = BatchPlan((RowPlan(1, 0, 0, 0, 1, (5,), (0,), True, 0, begin),))
    try:
        steps = [executor.launch(batch, after=(), gates=LayerGates()) for _ in range(3)]
        assert opened == [step.entry.lease.ids[0] for step in steps]
        assert len(set(opened)) == 3
        device.wait_host(steps[1].fence, reason="test")
        steps[1].results()
        again = executor.launch(batch, after=(), gates=LayerGates())
        assert opened[3:] == [steps[1].entry.lease.ids[0]]  # the only one that was read
        for step in (steps[0], steps[2], again):
            device.wait_host(step.fence, reason="test")
            step.results()
    finally:
        device.close()
