"""Memory of the CPU device: usable at once, pages mapped in the background, and counted as used before that."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sidestream.errors import ConfigError
from sidestream_kv.device.cpu import CpuDevice
from sidestream_kv.device.machine import map_pages, private_pages

PATIENCE_S = 10.0
# How long something that must not happen is given to happen. A pass never depends on it, a catch does.
SILENCE_S = 0.1
MIB = 1 << 20


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    device = CpuDevice(compute_threads=1)
    yield device
    device.close()


def test_allocated_memory_is_uint8_and_zero(device: CpuDevice) -> None:
    for memory in (device.allocate("kv", 4096), device.allocate_host("host", 4096)):
        assert (memory.data.dtype, memory.data.shape, int(memory.data.sum())) == (torch.uint8, (4096,), 0)


def test_allocating_more_than_fits_raises_a_clear_error(device: CpuDevice) -> None:
    with pytest.raises(ConfigError, match=r"^kv memory of 1073741824.00 GiB .* ask for less$"):
        device.allocate("kv", 1 << 60)


# ---------------------------------------------------------------------- pages


class Kernel:
    """Stands between the device and the kernel: counts the chunks whose pages are mapped, and holds up those behind
    `chunks_let_through`.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, chunks_let_through: int = 1 << 30) -> None:
        self.mapped = 0
        self.held = threading.Event()
        self._gate = threading.Event()

        def held_up(address: int, num_bytes: int) -> bool:
            if self.mapped >= chunks_let_through:
                self.held.set()
                assert self._gate.wait(PATIENCE_S)
            self.mapped += 1
            return map_pages(address, num_bytes)

        monkeypatch.setattr("sidestream_kv.device.cpu.map_pages", held_up)
        monkeypatch.setattr("sidestream_kv.device.cpu._TOUCH_BYTES", MIB)

    def let_go(self) -> None:
        self._gate.set()


def touched(device: CpuDevice) -> None:
    """Wait until every page was touched."""
    for toucher in device._touchers:
        toucher.join(PATIENCE_S)
        assert not toucher.is_alive()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def can_map_pages() -> bool:
    """Whether this kernel maps pages when told to, and says how many are mapped."""
    page = torch.frombuffer(private_pages("one", mmap.PAGESIZE), dtype=torch.uint8)
    return Path("/proc/self/statm").exists() and map_pages(page.data_ptr(), mmap.PAGESIZE)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="this system does not list its mappings")
def test_memory_is_private_and_may_have_huge_pages(device: CpuDevice) -> None:
    memory = device.allocate_host("host", 4 * MIB)
    address = memory.data.data_ptr()
    mappings = [line.split() for line in Path("/proc/self/maps").read_text(encoding="ascii").splitlines()]
    (permissions,) = (
        permissions
        for span, permissions, *_ in mappings
        if int(span.split("-")[0], 16) <= address < int(span.split("-")[1], 16)
    )

    assert permissions == "rw-p"


@pytest.mark.skipif(not can_map_pages(), reason="this kernel maps pages only when they are written")
@pytest.mark.parametrize("host", [True, False])
def test_pages_are_mapped_before_their_first_write(device: CpuDevice, host: bool) -> None:
    before = resident_bytes()
    memory = (device.allocate_host if host else device.allocate)("kv", 64 * MIB + 4096)
    if host:
        touched(device)
    assert resident_bytes() - before > 60 * MIB
    assert not memory.data.any()


@pytest.mark.skipif(not can_map_pages(), reason="this kernel maps pages only when they are written")
def test_other_threads_get_memory_while_pages_are_mapped() -> None:
    """Otherwise a thread that maps pages stalls the engine for 4 to 250 ms at a time."""
    data = torch.frombuffer(private_pages("kv", 256 * MIB), dtype=torch.uint8)
    span = list[float]()

    def map_all() -> None:
        span.append(time.perf_counter())
        assert map_pages(data.data_ptr(), data.numel())
        span.append(time.perf_counter())

    mapping = threading.Thread(target=map_all)
    mapping.start()
    got = list[float]()
    while mapping.is_alive():
        mmap.mmap(-1, MIB).close()
        got.append(time.perf_counter())
    begin, end = span
    assert any(begin + (end - begin) / 4 < now < end - (end - begin) / 4 for now in got)


def test_touching_pages_in_the_background_keeps_written_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch, chunks_let_through=1)
    device = CpuDevice(compute_threads=1)
    memory = device.allocate_host("host", 4 * MIB + 5)  # neither a whole chunk nor a whole page at the end
    assert kernel.held.wait(PATIENCE_S)
    memory.data.fill_(7)
    kernel.let_go()
    touched(device)
    assert kernel.mapped == 5
    assert (memory.data == 7).all()
    device.close()


# ---------------------------------------------------------------------- what is counted as taken


def available(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """What the system says, whatever is allocated: as if the kernel were behind with its own counting."""
    monkeypatch.setattr("sidestream_kv.device.machine.available_bytes", lambda: num_bytes)


def test_memory_whose_pages_are_not_mapped_yet_counts_as_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    available(monkeypatch, 10 * MIB)
    kernel = Kernel(monkeypatch, chunks_let_through=0)
    device = CpuDevice(compute_threads=1)
    device.allocate_host("host", 8 * MIB)
    with pytest.raises(
        ConfigError,
        match=r"^more memory of 0\.00 GiB does not fit: this machine has 0\.00 GiB available; ask for less$",
    ):
        device.allocate_host("more", 2 * MIB + 1)
    device.allocate_host("host", 2 * MIB)
    kernel.let_go()
    device.close()


def test_memory_is_not_counted_twice_once_its_pages_are_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """From then on, the system counts them itself."""
    available(monkeypatch, 10 * MIB)
    kernel = Kernel(monkeypatch)
    device = CpuDevice(compute_threads=1)
    device.allocate_host("host", 8 * MIB + 1)
    touched(device)
    assert kernel.mapped == 9
    with pytest.raises(ConfigError, match="does not fit"):
        device.allocate_host("host", 10 * MIB + 1)
    device.allocate_host("host", 10 * MIB)
    device.close()


def test_each_chunk_counts_as_allocated_until_it_is_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    available(monkeypatch, 10 * MIB)
    kernel = Kernel(monkeypatch, chunks_let_through=3)
    device = CpuDevice(compute_threads=1)
    device.allocate_host("host", 8 * MIB)
    assert kernel.held.wait(PATIENCE_S)
    with pytest.raises(ConfigError, match="does not fit"):  # three chunks are mapped, five are not
        device.allocate_host("host", 5 * MIB + 1)
    device.allocate_host("host", 5 * MIB)
    kernel.let_go()
    device.close()


def test_a_refused_allocation_uses_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    available(monkeypatch, 10 * MIB)
    kernel = Kernel(monkeypatch)
    device = CpuDevice(compute_threads=1)
    for _ in range(3):
        with pytest.raises(ConfigError, match="does not fit"):
            device.allocate_host("host", 11 * MIB)
    assert (device._touchers, kernel.mapped) == ([], 0)
    device.allocate_host("host", 10 * MIB)
    device.close()


def test_allocation_works_if_the_available_memory_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sidestream_kv.device.machine.available_bytes", lambda: None)
    device = CpuDevice(compute_threads=1)
    assert int(device.allocate_host("host", 4096).data.sum()) == 0
    device.close()


# ---------------------------------------------------------------------- the end


def closing(device: CpuDevice) -> threading.Thread:
    """A thread that closes the device, and has begun to."""
    closer = threading.Thread(target=device.close)
    closer.start()
    until = time.monotonic() + PATIENCE_S
    while not device._closing:
        assert time.monotonic() < until
    return closer


def test_close_skips_the_remaining_pages_and_joins_the_touching_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch, chunks_let_through=2)
    device = CpuDevice(compute_threads=1)
    memory = device.allocate_host("host", 8 * MIB)
    assert kernel.held.wait(PATIENCE_S)
    closer = closing(device)
    closer.join(SILENCE_S)
    assert closer.is_alive()
    kernel.let_go()
    closer.join(PATIENCE_S)
    assert not closer.is_alive() and not device._touchers[0].is_alive()
    assert kernel.mapped == 3  # the one that was held up, and none of the five behind it
    assert not memory.data.any()  # still there


def test_pages_are_mapped_at_first_write_by_an_older_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sidestream_kv.device.machine.advise", lambda *_: False)
    device = CpuDevice(compute_threads=1)
    memory = device.allocate_host("host", 4096)
    touched(device)
    memory.data.fill_(3)
    assert torch.equal(memory.data, torch.full((4096,), 3, dtype=torch.uint8))
    device.close()
