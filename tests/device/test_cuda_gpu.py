"""The CUDA device on a GPU: properties that only hardware shows."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from mmap import mmap
from typing import Any

import numpy as np
import pytest
import torch

from sidestream.errors import ConfigError, InvariantError, OutOfDeviceMemory
from sidestream_kv.device.base import CopyBatch, Memory
from sidestream_kv.device.cuda import CudaDevice, CudaStream
from sidestream_kv.types import Access, Fence
from sidestream_order.checker import Checker

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

PATIENCE_S = 20.0
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
# About a millisecond of a GPU at 2 GHz.
MILLISECOND = 2_000_000


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    device = CudaDevice()
    yield device
    device.close()


def delay(milliseconds: float) -> None:
    """Keep the current stream busy."""
    torch.cuda._sleep(int(milliseconds * MILLISECOND))


def finish(device: CudaDevice, *fences: Fence) -> None:
    for fence in fences:
        assert device.wait_host(fence, reason="test", timeout_s=PATIENCE_S)
        if fence.failure is not None:
            raise fence.failure


def filled(device: CudaDevice, name: str, num_bytes: int) -> Memory:
    memory = device.allocate(name, num_bytes)
    memory.data.random_(0, 256)
    return memory


# ---------------------------------------------------------------------- streams and fences


def test_all_of_1500_streams_are_distinct_and_run_work(device: CudaDevice) -> None:
    streams = [device.stream(f"load {index}") for index in range(1500)]
    assert len({stream.handle for stream in streams}) == 1500
    counts = torch.zeros(1500, dtype=torch.int64, device=device.torch_device)
    torch.cuda.default_stream().synchronize()
    finish(
        device, *[stream.submit(lambda index=index: counts[index].add_(index)) for index, stream in enumerate(streams)]
    )  # type: ignore[misc]
    assert counts.tolist() == list(range(1500))


def test_a_fence_is_not_done_before_its_work_and_polling_does_not_block(device: CudaDevice) -> None:
    stream = device.stream("compute")
    finish(device, stream.submit(lambda: delay(0.1)))
    fence = stream.submit(lambda: delay(100))
    start = time.perf_counter()
    assert not fence.poll()
    assert time.perf_counter() - start < 0.05
    finish(device, fence)
    assert time.perf_counter() - start > 0.02


def test_work_on_many_streams_runs_in_the_order_of_its_waits(device: CudaDevice) -> None:
    rng = np.random.default_rng(0)
    streams = [device.stream(f"store {index}") for index in range(16)]
    value = torch.zeros(1, dtype=torch.int64, device=device.torch_device)
    seen = torch.zeros(400, dtype=torch.int64, device=device.torch_device)
    torch.cuda.default_stream().synchronize()
    previous: Fence | None = None
    for step in range(400):
        stream = streams[int(rng.integers(16))]
        if previous is not None:
            stream.wait(previous)

        def work(step: int = step, milliseconds: float = float(rng.random() * 0.2)) -> None:
            delay(milliseconds)
            seen[step].copy_(value[0])
            value.add_(1)

        previous = stream.submit(work)
        if step % 7 == 0:
            previous.poll()
    assert previous is not None
    finish(device, previous)
    assert seen.tolist() == list(range(400))


def test_two_threads_may_poll_fences_while_a_third_submits(device: CudaDevice) -> None:
    stream, fences, stop, errors = device.stream("compute"), [], threading.Event(), []
    fences.append(stream.submit(lambda: None))

    def ask() -> None:
        try:
            while not stop.is_set():
                done = [fence.poll() for fence in reversed(fences[-50:])]
                assert done == sorted(done)  # the newest first: once one is done, all behind are
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for step in range(500):
        fences.append(stream.submit(lambda: delay(0.005)))
        if step % 100 == 0:
            finish(device, fences[-1])
    finish(device, fences[-1])
    stop.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert errors == []
    assert all(fence.poll() for fence in fences)


def test_a_long_run_creates_few_events(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    make = device.driver.event
    monkeypatch.setattr(device.driver, "event", lambda **kwargs: made.append(None) or make(**kwargs))
    compute, store = device.stream("compute"), device.stream("store")
    for _ in range(2000):
        fence = compute.submit(lambda: None)
        store.wait(fence)
        finish(device, store.submit(lambda: None))
        fence.poll()
    assert len(made) <= 4


def test_host_waits_are_counted(device: CudaDevice) -> None:
    stream = device.stream("compute")
    fence = stream.submit(lambda: delay(50))
    assert not device.wait_host(fence, reason="drain", timeout_s=0.001)
    assert device.wait_host(fence, reason="step")
    assert device.wait_host(fence, reason="step")
    assert device.host_waits() == {"drain": 1, "step": 1}


# ---------------------------------------------------------------------- copies

BLOCK = 36 * 64 * KIB


def host_of(device: CudaDevice, num_bytes: int) -> Memory:
    memory = device.allocate_host(f"host {len(device._slabs)}", num_bytes)
    until = time.monotonic() + PATIENCE_S
    while device.ready_bytes(memory) < num_bytes:
        assert time.monotonic() < until
        time.sleep(0.001)
    return memory


def split(memory: Memory, parts: int, stripe: int) -> Memory:
    """The same bytes as evenly spaced layers."""
    return Memory(f"{memory.name} split", tuple(memory.data.chunk(parts)), (stripe,) * parts)


def flat(memory: Memory) -> torch.Tensor:
    """Its bytes in the order of its offsets, on the host."""
    if len(memory.parts) == 1:
        return memory.data.cpu()
    rows = [part.cpu().view(-1, stripe) for part, stripe in zip(memory.parts, memory.stripes, strict=True)]
    return torch.cat(rows, 1).reshape(-1)


@pytest.mark.parametrize("layout", ["flat", "evenly spaced layers", "layers apart", "unequal layers"])
@pytest.mark.parametrize("size", [BLOCK, 64 * KIB, 32 * KIB, 4 * KIB, 4099])
@pytest.mark.parametrize("has_batch", [True, False])
def test_segments_are_copied_exactly_in_both_directions(
    device: CudaDevice, layout: str, size: int, has_batch: bool
) -> None:
    if not has_batch:
        device.driver.has_batch = False
    count = max(6, min(64, 8 * MIB // size))
    unit = size if layout in ("flat", "unequal layers") else max(size // 36, 1) if size == BLOCK else size
    parts = BLOCK // unit if size == BLOCK else 4
    num_bytes = 2 * count * size * (1 if size == BLOCK or layout == "unequal layers" else parts)
    kv = filled(device, "kv", num_bytes)
    if layout == "evenly spaced layers":
        kv = split(kv, parts, unit)
    elif layout == "layers apart":
        kv = Memory("kv apart", tuple(part.clone() for part in kv.data.chunk(parts)), (unit,) * parts)
    elif layout == "unequal layers":
        stripes = (size // 2, size // 4, size // 8, size - size // 2 - size // 4 - size // 8)
        layers = kv.data.split([2 * count * stripe for stripe in stripes])
        kv = Memory("kv unequal", tuple(layer.clone() for layer in layers), stripes)
    host = host_of(device, num_bytes)
    torch.cuda.default_stream().synchronize()
    order = np.random.default_rng(0).permutation(num_bytes // size)
    kv_starts, host_starts = order[:count] * size, order[::-1][:count] * size
    stream = device.stream("copy")
    before = flat(kv)
    finish(device, stream.submit(lambda: stream.copy(CopyBatch(kv, host, kv_starts, host_starts, size))))
    expected = torch.zeros(num_bytes, dtype=torch.uint8)
    for here, there in zip(kv_starts.tolist(), host_starts.tolist(), strict=True):
        expected[there : there + size] = before[here : here + size]
    assert torch.equal(host.data, expected)
    host.data.random_(0, 256)
    finish(device, stream.submit(lambda: stream.copy(CopyBatch(host, kv, host_starts, kv_starts, size))))
    for here, there in zip(kv_starts.tolist(), host_starts.tolist(), strict=True):
        before[here : here + size] = host.data[there : there + size]
    assert torch.equal(flat(kv), before)


def test_copies_across_pinned_chunks_are_correct(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces are merged up to where one pinned chunk ends."""
    monkeypatch.setattr("sidestream_kv.device.cuda.pinned.READY_AT_ONCE_BYTES", 0)
    monkeypatch.setattr("sidestream_kv.device.cuda.pinned.FIRST_CHUNK_BYTES", MIB)
    monkeypatch.setattr("sidestream_kv.device.cuda.pinned.CHUNK_BYTES", MIB)
    kv, host = filled(device, "kv", 16 * MIB), host_of(device, 16 * MIB)
    starts = np.arange(0, 16 * MIB, 64 * KIB)
    stream = device.stream("store")
    torch.cuda.default_stream().synchronize()
    finish(device, stream.submit(lambda: stream.copy(CopyBatch(kv, host, starts, starts, 64 * KIB))))
    assert torch.equal(kv.data.cpu(), host.data)


def test_a_threads_first_call_to_the_driver_works(device: CudaDevice) -> None:
    kv, host, stream = filled(device, "kv", MIB), host_of(device, MIB), device.stream("store")
    torch.cuda.default_stream().synchronize()
    fences: list[Fence] = []
    starts = np.array([0])
    thread = threading.Thread(
        target=lambda: fences.append(stream.submit(lambda: stream.copy(CopyBatch(kv, host, starts, starts, MIB))))
    )
    thread.start()
    thread.join(PATIENCE_S)
    finish(device, *fences)
    assert torch.equal(kv.data.cpu(), host.data)


def test_results_are_delivered_while_bulk_copies_run(device: CudaDevice) -> None:
    device.warm_up()
    kv, host, mailbox = filled(device, "kv", GIB), host_of(device, GIB), device.allocate_host("mailbox", 4096)
    store, compute = device.stream("store"), device.stream("compute")
    values = torch.arange(256, dtype=torch.int64, device=device.torch_device)
    odd = torch.arange(7, dtype=torch.uint8, device=device.torch_device)
    torch.cuda.default_stream().synchronize()
    starts = np.arange(0, GIB, 2 * MIB)
    order = np.random.default_rng(0).permutation(starts)
    bulk = store.submit(lambda: store.copy(CopyBatch(kv, host, starts, order, 2 * MIB)))
    small = compute.submit(lambda: compute.deliver(values, mailbox, 0))
    bytewise = compute.submit(lambda: compute.deliver(odd, mailbox, 2049))
    finish(device, small, bytewise)
    assert not bulk.poll()
    assert mailbox.data[:2048].view(torch.int64).tolist() == list(range(256))
    assert mailbox.data[2048:2060].tolist() == [0, 0, 1, 2, 3, 4, 5, 6, 0, 0, 0, 0]
    finish(device, bulk)


# ---------------------------------------------------------------------- pages of other processes


def test_two_mappings_of_one_memory_are_pinned_and_copied_directly(device: CudaDevice) -> None:
    """As two engines map the memory of a cache process. Prints the rates beside those of memory of its own."""
    fd = os.memfd_create("shared")
    os.ftruncate(fd, 2 * GIB)
    memories = [device.adopt_host(f"mapping {number}", mmap(fd, 2 * GIB), item_bytes=BLOCK) for number in range(2)]
    memories.append(device.allocate_host("own", 2 * GIB, item_bytes=BLOCK))
    os.close(fd)
    until = time.monotonic() + 60
    while any(device.ready_bytes(memory) < memory.num_bytes for memory in memories):
        assert time.monotonic() < until
        time.sleep(0.01)
    one, other, own = memories
    kv, back = filled(device, "kv", GIB), device.allocate("back", GIB)
    torch.cuda.default_stream().synchronize()
    stream, starts = device.stream("copy"), np.arange(0, GIB // BLOCK * BLOCK, BLOCK)

    def copied(source: Memory, target: Memory) -> float:
        begun = time.perf_counter()
        batch = device.prepare(CopyBatch(source, target, starts, starts, BLOCK))
        fence = stream.submit_copy(batch, 0, len(starts))
        submitted_s = time.perf_counter() - begun
        finish(device, fence)
        seconds = time.perf_counter() - begun
        assert submitted_s < seconds / 2  # a copy of pages that are not pinned would block its caller
        return len(starts) * BLOCK / seconds / 1e9

    for _ in range(3):
        rates = [copied(kv, one), copied(other, back), copied(kv, own), copied(own, back)]
        print("GB/s: shared out {:.1f}, in {:.1f}; own out {:.1f}, in {:.1f}".format(*rates))
    assert torch.equal(back.data[: len(starts) * BLOCK], kv.data[: len(starts) * BLOCK])


# ---------------------------------------------------------------------- pinned in the background


def test_host_memory_is_usable_while_more_of_it_is_pinned(device: CudaDevice) -> None:
    kv = filled(device, "kv", 64 * MIB)
    torch.cuda.default_stream().synchronize()
    expected = kv.data.cpu()
    start = time.perf_counter()
    host = device.allocate_host("host", 4 * GIB, item_bytes=BLOCK)
    given_s = time.perf_counter() - start
    first = device.ready_bytes(host)
    assert 64 * MIB <= first < host.num_bytes
    stream, seen, rounds = device.stream("store"), [first], 0
    starts = np.arange(0, 64 * MIB, MIB)
    while (ready := device.ready_bytes(host)) < host.num_bytes:
        assert ready >= seen[-1]
        assert ready % BLOCK == 0
        seen.append(ready)
        to = starts + (ready - 64 * MIB)
        finish(device, stream.submit(lambda to=to: stream.copy(CopyBatch(kv, host, starts, to, MIB))))  # type: ignore[misc]
        assert torch.equal(host.data[int(to[0]) : int(to[0]) + 64 * MIB], expected)
        rounds += 1
        assert time.perf_counter() - start < 60
    print(
        f"given after {given_s:.2f} s with {first >> 20} MiB; all 4 GiB after {time.perf_counter() - start:.2f} s; "
        f"{rounds} copies meanwhile"
    )
    assert rounds > 0


# ---------------------------------------------------------------------- graphs


def gated(device: CudaDevice) -> tuple[CudaStream, CudaStream, Any, list[Any], torch.Tensor, torch.Tensor]:
    compute, load = device.stream("compute"), device.stream("load")
    gates = [device.event(f"gate {layer}") for layer in range(4)]
    loaded = torch.zeros(4, dtype=torch.int64, device=device.torch_device)
    read = torch.zeros(4, dtype=torch.int64, device=device.torch_device)
    torch.cuda.default_stream().synchronize()
    for gate in gates:
        gate.record(load)

    def build() -> None:
        for layer in range(4):
            compute.wait_external(gates[layer])
            compute.submit(lambda layer=layer: read[layer].copy_(loaded[layer]))  # type: ignore[misc]

    return compute, load, compute.capture(build), gates, loaded, read


def load_all(load: CudaStream, gates: list[Any], loaded: torch.Tensor, value: int) -> None:
    for layer, gate in enumerate(gates):

        def work(layer: int = layer) -> None:
            delay(0.5)
            loaded[layer].fill_(value)

        load.submit(work)
        gate.record(load)


def test_a_graph_waits_for_its_loads_in_all_20_replays(device: CudaDevice) -> None:
    compute, load, graph, gates, loaded, read = gated(device)
    for value in range(1, 21):
        load_all(load, gates, loaded, value)
        finish(device, compute.replay(graph, label="decode"))
        assert read.tolist() == [value] * 4


def test_queued_replays_never_read_before_their_own_loads(device: CudaDevice) -> None:
    """A gate may be recorded again while a replay still waits for it: that replay may wait longer, and never less."""
    compute, load, graph, gates, loaded, read = gated(device)
    copies = torch.zeros(10, 4, dtype=torch.int64, device=device.torch_device)
    torch.cuda.default_stream().synchronize()
    for value in range(1, 11):
        load_all(load, gates, loaded, value)
        compute.replay(graph)
        last = compute.submit(lambda value=value: copies[value - 1].copy_(read))  # type: ignore[misc]
    finish(device, last)
    assert (copies >= torch.arange(1, 11, device=device.torch_device)[:, None]).all()


def test_a_capture_that_waits_for_another_stream_raises(device: CudaDevice) -> None:
    compute, load = device.stream("compute"), device.stream("load")
    own, other = compute.submit(lambda: None), load.submit(lambda: None)
    value = torch.zeros(1, dtype=torch.int64, device=device.torch_device)

    def build(fence: Fence) -> None:
        compute.wait(fence)
        compute.submit(lambda: value.add_(1))

    with pytest.raises(InvariantError, match="during a capture"):
        compute.capture(partial(build, other))
    finish(device, compute.replay(compute.capture(partial(build, own))))
    assert int(value) == 1


def test_a_side_branch_of_a_graph_runs_after_earlier_work_and_is_waited_for(device: CudaDevice) -> None:
    compute = device.stream("compute")
    given, beside, between, seen = (torch.zeros(1, dtype=torch.int64, device=device.torch_device) for _ in range(4))
    torch.cuda.default_stream().synchronize()

    def on_the_side() -> None:
        delay(5)
        beside.copy_(given * 10)

    def work() -> None:
        delay(5)
        given.add_(1)
        compute.on_side_stream(on_the_side)
        between.copy_(given * 100)
        compute.join()
        seen.copy_(given + beside + between)

    finish(device, compute.submit(work))
    assert int(seen) == 111
    graph = compute.capture(lambda: compute.submit(work))
    for turn in range(2, 6):
        finish(device, compute.replay(graph))
        assert int(seen) == 111 * turn


# ---------------------------------------------------------------------- failures


def test_out_of_memory_inside_work_is_reported_and_the_device_continues(device: CudaDevice) -> None:
    stream = device.stream("compute")
    fence = stream.submit(lambda: torch.empty(1 << 50, dtype=torch.uint8, device=device.torch_device))
    assert isinstance(fence.failure, OutOfDeviceMemory)
    finish(device, stream.submit(lambda: None))
    with pytest.raises(ConfigError, match="does not fit"):
        device.allocate("kv", 1 << 50)


LOST = """
import torch
from sidestream_kv.device.cuda import CudaDevice, kernels
from sidestream.errors import DeviceLost

device = CudaDevice()
device.warm_up()
compute, store = device.stream("compute"), device.stream("store")
host = device.allocate_host("host", 4096)
value = torch.zeros(1, dtype=torch.int64, device="cuda")
torch.cuda.default_stream().synchronize()
other = store.submit(lambda: torch.cuda._sleep(200_000_000))
wrong = compute.submit(lambda: kernels.deliver(64, value.data_ptr(), 8))  # nothing is mapped at address 64
try:
    while not wrong.poll():
        pass
    print("not noticed")
except DeviceLost as error:
    print("lost:", "illegal memory access" in str(error))
submit, wait = lambda: store.submit(lambda: None), lambda: compute.wait(other)
for call in (other.poll, submit, wait, lambda: device.wait_host(other, reason="test")):
    try:
        call()
        print("went on")
    except DeviceLost:
        print("says so")
device.close()
print("closed")
"""


def test_after_an_illegal_address_every_call_raises_device_lost_and_close_works() -> None:
    done = subprocess.run([sys.executable, "-c", LOST], check=False, capture_output=True, text=True, timeout=120)
    assert done.stdout.split("\n")[:6] == ["lost: True", "says so", "says so", "says so", "says so", "closed"], (
        done.stdout + done.stderr[-3000:]
    )


# ---------------------------------------------------------------------- the checker


@pytest.mark.parametrize("forget", [False, True])
def test_the_checker_checks_work_enqueued_on_a_gpu(forget: bool) -> None:
    checker = Checker(allowed_waits=frozenset({"test"}))
    device = CudaDevice(tracer=checker)
    streams = [device.stream(f"store {index}") for index in range(4)]
    rng = np.random.default_rng(0)
    previous: Fence | None = None
    fences: list[Fence] = []
    writes: Callable[[], list[Access]] = lambda: [Access("kv", 0, 64, True)]  # noqa: E731
    for _ in range(200):
        stream = streams[int(rng.integers(4))]
        if previous is not None and not forget:
            stream.wait(previous)
        previous = stream.submit(lambda: delay(0.05), writes)
        fences.append(previous)
        fences[int(rng.integers(len(fences)))].poll()
    finish(device, *fences)
    device.close()
    assert bool(checker.findings) is forget
