"""A device on a fake driver, whose work runs when a test says so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cuda_rig import FakeGpu

from sidestream_kv.device.cuda import CudaDevice


@pytest.fixture
def gpu() -> FakeGpu:
    return FakeGpu()


@pytest.fixture
def device(gpu: FakeGpu) -> Iterator[CudaDevice]:
    device = CudaDevice(driver=gpu)  # type: ignore[arg-type]
    yield device
    device.close()
