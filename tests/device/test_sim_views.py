"""Accesses of the simulated device from tensors: the bytes of a view, and no others."""

from __future__ import annotations

import pytest
import torch

from sidestream.errors import InvariantError
from sidestream_kv.types import Access
from sidestream_order.sim import SimDevice, make_policy


@pytest.fixture
def device() -> SimDevice:
    import random

    return SimDevice(make_policy("random", random.Random(0)))


def touched(device: SimDevice, tensor: torch.Tensor) -> set[int]:
    """The declared bytes of a tensor."""
    return {byte for access in device.accesses(reads=[tensor])() for byte in range(access.start, access.stop)}


def written(memory: torch.Tensor, tensor: torch.Tensor) -> set[int]:
    """The bytes that writing the tensor changes."""
    memory.fill_(1)
    tensor.view(torch.uint8).fill_(2) if tensor.is_contiguous() else tensor.fill_(0)
    return set(torch.nonzero(memory != 1).ravel().tolist())


def test_a_slice_is_declared_as_one_range_with_memory_and_direction(device: SimDevice) -> None:
    kv, host = device.allocate("kv", 64), device.allocate_host("host", 32)
    assert list(device.accesses(reads=[kv.data[8:24]], writes=[host.data])()) == [
        Access("kv", 8, 24, False),
        Access("host", 0, 32, True),
    ]


@pytest.mark.parametrize(
    "view",
    [
        lambda data: data,
        lambda data: data[5:6],
        lambda data: data.view(torch.float32)[3:7],
        lambda data: data.view(torch.int64)[::2],
        lambda data: data.view(4, 4, 6)[:, 1],
        lambda data: data.view(4, 4, 6)[1:3, 2:, 4],
        lambda data: data.view(4, 4, 6).permute(2, 0, 1)[:, 1],
        lambda data: data.view(8, 12).t(),
        lambda data: data.view(torch.int32).view(4, 6)[:, ::3],
    ],
)
def test_the_declared_bytes_of_a_view_are_exactly_the_bytes_a_write_changes(device: SimDevice, view) -> None:  # type: ignore[no-untyped-def]
    data = device.allocate("kv", 96).data
    tensor = view(data)
    declared = touched(device, tensor)
    assert declared == written(data, tensor)
    assert declared


def test_a_view_of_consecutive_rows_is_one_access(device: SimDevice) -> None:
    rows = device.allocate("kv", 96).data.view(4, 4, 6)
    assert len(device.accesses(reads=[rows[1:3]])()) == 1
    assert len(device.accesses(reads=[rows[1:3, :2]])()) == 2


def test_an_expanded_view_declares_its_bytes_once_and_an_empty_one_none(device: SimDevice) -> None:
    data = device.allocate("kv", 16).data
    assert list(device.accesses(reads=[data[:4].expand(3, 4)])()) == [Access("kv", 0, 4, False)]
    assert list(device.accesses(reads=[data[:0]])()) == []


def test_a_tensor_outside_of_the_devices_memories_is_refused(device: SimDevice) -> None:
    kv = device.allocate("kv", 16).data
    with pytest.raises(InvariantError, match=r"a tensor of shape \(16,\) is not a view of a memory of this device"):
        device.accesses(writes=[kv.clone()])


def test_work_declares_tensors_or_accesses_but_not_both(device: SimDevice) -> None:
    kv, stream = device.allocate("kv", 16).data, device.stream("compute")
    with pytest.raises(InvariantError, match="step has both accesses and tensors"):
        stream.submit(lambda: None, device.accesses(writes=[kv]), reads=[kv], label="step")
    device.kill()
