"""Host memory of the CUDA device: its first chunk is pinned at once, others in the background; failed pinning."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from mmap import mmap
from pathlib import Path

import pytest
from cuda_rig import PATIENCE_S, FakeGpu

from sidestream.errors import ConfigError, DeviceError
from sidestream_kv.device.cuda import CudaDevice, pinned
from sidestream_kv.device.cuda.pinned import CHUNK_BYTES, FIRST_CHUNK_BYTES, READY_AT_ONCE_BYTES, Slab, chunk_borders

PAGE = 4096
MIB = 1 << 20
GIB = 1 << 30


class Pins:
    """Pins chunks; holds up those behind `let_through`, and refuses those behind `allowed`."""

    def __init__(self, *, let_through: int = 1 << 30, allowed: int = 1 << 30) -> None:
        self.pinned: list[tuple[int, int]] = []
        self.released: list[int] = []
        self.threads: list[int] = []
        self.held = threading.Event()
        self.let_go = threading.Event()
        self._let_through, self._allowed = let_through, allowed

    def register(self, address: int, num_bytes: int) -> None:
        if len(self.pinned) >= self._allowed:
            raise DeviceError("cuMemHostRegister failed: CUDA_ERROR_OUT_OF_MEMORY (2), out of memory")
        if len(self.pinned) >= self._let_through:
            self.held.set()
            assert self.let_go.wait(PATIENCE_S)
        self.pinned.append((address, num_bytes))
        self.threads.append(threading.get_ident())

    def unregister(self, address: int) -> None:
        self.released.append(address)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    make_chunks_small(monkeypatch)


def make_chunks_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page at once, two pages first, four pages behind."""
    monkeypatch.setattr(pinned, "READY_AT_ONCE_BYTES", PAGE)
    monkeypatch.setattr(pinned, "FIRST_CHUNK_BYTES", 2 * PAGE)
    monkeypatch.setattr(pinned, "CHUNK_BYTES", 4 * PAGE)


def finish(slab: Slab) -> None:
    assert slab._thread is not None
    slab._thread.join(PATIENCE_S)
    assert not slab._thread.is_alive()


# ---------------------------------------------------------------------- borders


def test_small_memory_is_one_chunk_and_large_memory_has_a_small_first_chunk() -> None:
    assert chunk_borders(READY_AT_ONCE_BYTES, 1) == [READY_AT_ONCE_BYTES]
    assert chunk_borders(3 * GIB, 1) == [
        FIRST_CHUNK_BYTES,
        FIRST_CHUNK_BYTES + CHUNK_BYTES,
        FIRST_CHUNK_BYTES + 2 * CHUNK_BYTES,
        3 * GIB,
    ]
    assert chunk_borders(12345, 7) == [12345]


def test_chunk_borders_split_no_item_or_page_and_cover_the_memory() -> None:
    for item_bytes in [1, 4096, 3000, 36 * 65536, 36 * 65536 + 512, 5 * MIB + 3]:
        for num_bytes in [READY_AT_ONCE_BYTES + 1, 5 * GIB + 12345]:
            borders = chunk_borders(num_bytes, item_bytes)
            assert borders == sorted(set(borders))
            assert borders[-1] == num_bytes
            assert not any(border % item_bytes or border % PAGE for border in borders[:-1])


# ---------------------------------------------------------------------- from front to back


def test_the_first_chunk_is_pinned_at_once_and_others_in_the_background(small_chunks: None) -> None:
    pins = Pins(let_through=1)
    slab = Slab("host", 11 * PAGE + 5, item_bytes=1, pins=pins)
    start = slab.memory.data.data_ptr()
    assert pins.held.wait(PATIENCE_S)
    assert (slab.ready_bytes, pins.pinned) == (2 * PAGE, [(start, 2 * PAGE)])
    slab.memory.data[: 2 * PAGE].fill_(7)
    pins.let_go.set()
    finish(slab)
    assert slab.ready_bytes == slab.mapped_bytes == slab.memory.num_bytes == 11 * PAGE + 5
    assert pins.pinned == [
        (start, 2 * PAGE),
        (start + 2 * PAGE, 4 * PAGE),
        (start + 6 * PAGE, 4 * PAGE),
        (start + 10 * PAGE, PAGE + 5),
    ]
    assert pins.threads[0] == threading.get_ident() not in pins.threads[1:]
    assert (slab.memory.data[: 2 * PAGE] == 7).all()
    assert not slab.memory.data[2 * PAGE :].any()
    slab.close()
    slab.close()
    assert sorted(pins.released) == [address for address, _ in pins.pinned]


def test_host_memory_is_zeroed_and_has_the_requested_size() -> None:
    slab = Slab("mailbox", 12345, item_bytes=1, pins=Pins())
    assert (slab.memory.num_bytes, slab.ready_bytes, int(slab.memory.data.sum())) == (12345, 12345, 0)
    slab.close()


def test_pages_are_touched_by_several_threads_before_they_are_pinned(
    small_chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    touched: list[tuple[int, int]] = []
    monkeypatch.setattr(pinned, "_TOUCH_BYTES", PAGE)
    monkeypatch.setattr(pinned, "map_pages", lambda address, size: touched.append((address, size)) or True)
    pins = Pins()
    slab = Slab("host", 4 * PAGE + 1, item_bytes=1, pins=pins)
    finish(slab)
    start = slab.memory.data.data_ptr()
    assert sorted(touched) == [(start + page * PAGE, PAGE) for page in range(4)] + [(start + 4 * PAGE, 1)]
    slab.close()


def test_pages_are_pinned_even_if_they_cannot_be_touched_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "map_pages", lambda address, size: False)
    slab = Slab("host", PAGE, item_bytes=1, pins=Pins())
    assert slab.ready_bytes == PAGE
    slab.close()


@pytest.mark.parametrize("old_kernel", [False, True])
def test_pages_of_other_processes_keep_their_bytes(old_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if old_kernel:
        monkeypatch.setattr(pinned, "map_pages", lambda address, size: False)
    pages, pins = mmap(-1, 2 * PAGE), Pins()
    pages[:] = b"7" * len(pages)
    slab = Slab("host", len(pages), item_bytes=1, pins=pins, shared=pages)
    slab.close()
    assert pins.pinned == [(slab.memory.data.data_ptr(), 2 * PAGE)]
    assert pages[:] == b"7" * len(pages)


def test_pages_are_touched_while_an_earlier_chunk_is_being_pinned(
    small_chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Touching is several times slower than pinning: the one must not wait for the other."""
    pins, all_touched, touched = Pins(let_through=1), threading.Event(), list[int]()

    def touch(address: int, size: int) -> bool:
        touched.append(address)
        if len(touched) == 20:
            all_touched.set()
        return True

    monkeypatch.setattr(pinned, "_TOUCH_BYTES", PAGE)
    monkeypatch.setattr(pinned, "map_pages", touch)
    slab = Slab("host", 20 * PAGE, item_bytes=1, pins=pins)
    assert pins.held.wait(PATIENCE_S)
    assert all_touched.wait(PATIENCE_S)
    assert slab.ready_bytes == 2 * PAGE
    assert slab.growing
    pins.let_go.set()
    finish(slab)
    assert not slab.growing
    slab.close()


def test_one_log_line_reports_that_all_host_memory_is_pinned(
    small_chunks: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        slab = Slab("host", 20 * PAGE, item_bytes=1, pins=Pins())
        finish(slab)
    assert [record.getMessage() for record in caplog.records] == ["host memory: all 0.00 GiB are pinned after 0.0 s"]
    slab.close()


# ---------------------------------------------------------------------- when no more can be pinned


def test_a_limit_of_locked_memory_stops_growth_with_one_warning(
    small_chunks: None, caplog: pytest.LogCaptureFixture
) -> None:
    pins = Pins(allowed=2)
    with caplog.at_level(logging.WARNING):
        slab = Slab("host", 20 * PAGE, item_bytes=1, pins=pins)
        finish(slab)
    assert slab.ready_bytes == 6 * PAGE
    assert not slab.growing
    (record,) = caplog.records
    assert "host memory: 0.00 of 0.00 GiB are pinned, the rest stays unused" in record.getMessage()
    assert "ulimit -l" in record.getMessage()
    slab.close()
    assert len(pins.released) == 2


def test_host_memory_that_cannot_be_pinned_at_all_raises_a_clear_error(small_chunks: None) -> None:
    with pytest.raises(
        ConfigError,
        match=r"^host memory: not even the first 0 MiB of 0\.00 GiB can be pinned .*ulimit -l.*ask for less$",
    ):
        Slab("host", 20 * PAGE, item_bytes=1, pins=Pins(allowed=0))


def test_host_memory_of_an_impossible_size_raises_a_clear_error() -> None:
    with pytest.raises(ConfigError, match="cannot be allocated on this machine: ask for less"):
        Slab("host", 1 << 60, item_bytes=1, pins=Pins())


def test_close_stops_pinning_and_unpins_all_chunks(small_chunks: None) -> None:
    pins = Pins(let_through=2)
    slab = Slab("host", 100 * PAGE, item_bytes=1, pins=pins)
    assert pins.held.wait(PATIENCE_S)
    closer = threading.Thread(target=slab.close)
    closer.start()
    while not slab._closing:
        pass
    pins.let_go.set()
    closer.join(PATIENCE_S)
    assert not closer.is_alive()
    assert len(pins.released) == len(pins.pinned) == 3


def test_close_returns_the_pages_to_the_system() -> None:
    slab = Slab("host", 64 * PAGE, item_bytes=1, pins=Pins())
    slab.memory.data.fill_(7)
    slab.close()
    slab.close()
    assert not slab.memory.data.any()


def test_close_unpins_the_other_chunks_if_one_cannot_be_unpinned(small_chunks: None) -> None:
    pins = Pins()
    slab = Slab("host", 10 * PAGE, item_bytes=1, pins=pins)
    finish(slab)
    tried: list[int] = []

    def lost(address: int) -> None:
        tried.append(address)
        raise DeviceError("lost")

    pins.unregister = lost  # type: ignore[method-assign]
    slab.close()
    assert len(tried) == 3


# ---------------------------------------------------------------------- on a device


def device_with(monkeypatch: pytest.MonkeyPatch, available: Callable[[], int | None]) -> CudaDevice:
    device = CudaDevice(driver=FakeGpu(memory_bytes=1 << 20))  # type: ignore[arg-type]
    monkeypatch.setattr("sidestream_kv.device.machine.available_bytes", available)
    return device


def test_ready_bytes_tells_how_much_memory_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    device = device_with(monkeypatch, lambda: None)
    host, kv = device.allocate_host("host", 3 * PAGE), device.allocate("kv", 64)
    assert (device.ready_bytes(host), device.ready_bytes(kv)) == (3 * PAGE, 64)
    device.close()


def test_host_memory_that_does_not_fit_is_refused_counting_earlier_allocations(monkeypatch: pytest.MonkeyPatch) -> None:
    device = device_with(monkeypatch, lambda: 100 * PAGE)
    make_chunks_small(monkeypatch)
    pins = Pins(let_through=1)
    device.driver.register = pins.register  # type: ignore[method-assign]
    device.driver.unregister = pins.unregister  # type: ignore[method-assign]
    touched: list[int] = []

    def touch_six_pages(address: int, size: int) -> bool:
        touched.append(address)
        return len(touched) <= 6 or pins.let_go.wait(PATIENCE_S)

    monkeypatch.setattr(pinned, "map_pages", touch_six_pages)
    monkeypatch.setattr(pinned, "_TOUCH_BYTES", PAGE)
    device.allocate_host("host", 50 * PAGE)
    assert pins.held.wait(PATIENCE_S)  # two pages are pinned, four more are mapped
    with pytest.raises(
        ConfigError,
        match=r"^more memory of 0\.00 GiB does not fit: this machine has 0\.00 GiB available; ask for less$",
    ):
        device.allocate_host("more", 57 * PAGE)
    pins.let_go.set()
    device.close()


def test_device_memory_that_does_not_fit_raises_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    device = device_with(monkeypatch, lambda: None)
    with pytest.raises(
        ConfigError, match=r"^kv memory of 1\.00 GiB does not fit: 0\.00 of the GPU's 0\.00 GiB are free; ask for less"
    ):
        device.allocate("kv", GIB)
    device.close()


def test_device_memory_fits_if_torch_only_caches_the_space(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(memory_bytes=1 << 20)
    gpu.cached_bytes = 1 << 19
    device = CudaDevice(driver=gpu)  # type: ignore[arg-type]
    assert device.allocate("kv", 3 << 18).num_bytes == 3 << 18
    device.close()


def test_copies_respect_the_borders_of_pinned_chunks(small_chunks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    device = device_with(monkeypatch, lambda: None)
    host = device.allocate_host("host", 10 * PAGE, item_bytes=PAGE)
    assert device.addresses_of(host).borders.tolist() == [2 * PAGE, 6 * PAGE]
    device.close()


def test_host_memory_has_huge_pages_and_is_not_copied_by_fork() -> None:
    """After a fork, a private page that is written to moves away from what the GPU reads; shared ones are
    seldom huge.
    """
    slab = Slab("host", 16 * MIB, item_bytes=1, pins=Pins())
    said = smaps(slab.memory.data.data_ptr() + 8 * MIB)
    assert "dc" in said["VmFlags"].split()
    allowed = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if allowed.exists() and "[never]" not in allowed.read_text():
        assert "hg" in said["VmFlags"].split()
        assert int(said["AnonHugePages"].split()[0]) >= 8 << 10
    slab.close()


def smaps(address: int) -> dict[str, str]:
    """What the kernel says of the pages around an address."""
    said: dict[str, str] = {}
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            first, _, last = name.partition("-")
            found = int(first, 16) <= address < int(last, 16)
        elif found:
            said[name[:-1]] = rest
    return said
