"""The CUDA device's own kernels on a GPU, at their smallest and oddest: what a memory checker looks at (`make
sanitize`).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sidestream_kv.device.base import CopyBatch, Memory
from sidestream_kv.device.cuda import CudaDevice

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


def run(device: CudaDevice, name: str, batch: CopyBatch) -> None:
    stream = device.stream(name)
    fence = stream.submit(lambda: stream.copy_as(batch, "kernel"))
    assert device.wait_host(fence, reason="test", timeout_s=60)
    assert fence.failure is None


@pytest.mark.parametrize("size", [1, 7, 8, 4096, 32_768, 32_776, 5_001])
def test_segments_up_to_the_last_byte_of_both_memories_are_copied_by_a_kernel(size: int) -> None:
    device = CudaDevice()
    try:
        count = 5
        source = Memory(
            "source", (torch.randint(0, 256, (count * size,), dtype=torch.uint8, device=device.torch_device),)
        )
        there, back = device.allocate_host("there", count * size), Memory("back", (torch.zeros_like(source.data),))
        torch.cuda.default_stream().synchronize()
        starts = np.arange(count, dtype=np.int64) * size
        run(device, "out", CopyBatch(source, there, starts, starts[::-1].copy(), size))
        run(device, "in", CopyBatch(there, back, starts, starts, size))

        expected = source.data.cpu().view(count, size).flip(0)
        assert torch.equal(there.data.view(count, size), expected)
        assert torch.equal(back.data.cpu().view(count, size), expected)
    finally:
        device.close()


def test_stripes_in_allocations_of_their_own_are_filled_from_a_buffer() -> None:
    device = CudaDevice()
    try:
        stripe, layers, count = 64 << 10, 36, 40
        size = stripe * layers
        host = device.allocate_host("host", count * size, item_bytes=size)
        parts = tuple(torch.zeros(stripe * count, dtype=torch.uint8, device=device.torch_device) for _ in range(layers))
        host.data.random_(0, 256)
        device.make_stages(count=1, num_bytes=7 * size)
        torch.cuda.default_stream().synchronize()
        order = np.random.default_rng(0).permutation(count).astype(np.int64)
        starts = np.arange(count, dtype=np.int64) * size
        batch = device.prepare(CopyBatch(host, Memory("kv", parts, (stripe,) * layers), starts, order * size, size))
        stream = device.stream("load-0")
        fences = [stream.submit_copy(batch, 0, 17), stream.submit_copy(batch, 17, count)]
        assert device.wait_host(fences[1], reason="test", timeout_s=60)
        assert [fence.failure for fence in fences] == [None, None]

        expected = host.data.view(count, layers, stripe)
        for layer, part in enumerate(parts):
            assert torch.equal(part.view(count, stripe).cpu()[torch.from_numpy(order)], expected[:, layer])
    finally:
        device.close()


@pytest.mark.parametrize("size", [1, 7, 8, 1024, 8_200, 10_001])
def test_results_up_to_the_last_byte_of_host_memory_are_delivered(size: int) -> None:
    device = CudaDevice()
    try:
        values = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device.torch_device)
        torch.cuda.default_stream().synchronize()
        start = 8
        there = device.allocate_host("there", start + size)
        stream = device.stream("deliver")
        fence = stream.submit(lambda: stream.deliver(values, there, start))
        assert device.wait_host(fence, reason="test", timeout_s=60)
        assert fence.failure is None
        assert torch.equal(there.data[start:], values.cpu())
        assert not there.data[:start].any()
    finally:
        device.close()


def test_kernels_read_mapped_memory_beside_copies() -> None:
    device = CudaDevice()
    try:
        size = 256 << 20
        bulk, there = device.allocate_host("bulk", size), device.allocate("there", size)
        small = device.allocate_host("small", 4096)
        mapped = device.mapped(small).view(torch.int64)
        fetched = torch.zeros(512, dtype=torch.int64, device=device.torch_device)
        torch.add(mapped, 0, out=fetched)  # a first launch waits for running work
        torch.cuda.default_stream().synchronize()
        starts = np.arange(256, dtype=np.int64) << 20
        batch, copies, compute = (
            CopyBatch(bulk, there, starts, starts, 1 << 20),
            device.stream("load-0"),
            device.stream("compute"),
        )
        for round_ in range(3):
            small.data.view(torch.int64)[:] = torch.arange(512) + round_
            last = [copies.submit_copy(device.prepare(batch), 0, 256) for _ in range(4)][-1]
            fence = compute.submit(lambda: torch.add(mapped, 0, out=fetched))
            assert device.wait_host(fence, reason="test", timeout_s=60)
            assert fence.failure is None
            assert not last.poll(), "the copies were over before the kernel was: they prove nothing"
            assert device.wait_host(last, reason="test", timeout_s=60)
            assert fetched.cpu().tolist() == [number + round_ for number in range(512)]
        assert mapped.device == device.torch_device
    finally:
        device.close()
