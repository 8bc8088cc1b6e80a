"""Copies of the CUDA device: exact bytes, few calls, and no segment across two allocations or two pinned chunks."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from cuda_rig import FakeGpu

from sidestream.errors import InvariantError
from sidestream_kv.device.base import CopyBatch, Memory
from sidestream_kv.device.cuda import CudaDevice, copies
from sidestream_kv.device.cuda.copies import GRID_BELOW, KERNEL_BELOW, Grid, Segments, addresses_of, plan
from sidestream_kv.device.cuda.stream import CudaFence, CudaStream
from sidestream_kv.device.eight_bit import pack, unpack
from sidestream_kv.kv.eight_bit import EightBitLayout
from sidestream_kv.kv.layout import KVLayout
from sidestream_kv.types import Vectors

KIB = 1 << 10
ANY_PITCH = 2**31 - 1


def memory(name: str, num_bytes: int, *, parts: int = 1, stripe: int = 0, gap: int = 0, apart: bool = False) -> Memory:
    """Random bytes; in several parts they lie `gap` bytes apart inside one allocation, or in one allocation each."""
    size = num_bytes // parts
    if apart:
        return Memory(
            name, tuple(torch.randint(0, 256, (size,), dtype=torch.uint8) for _ in range(parts)), (stripe,) * parts
        )
    whole = torch.randint(0, 256, (parts * (size + gap),), dtype=torch.uint8)
    return Memory(name, tuple(whole[index * (size + gap) :][:size] for index in range(parts)), (stripe,) * parts)


def unequal(num_rows: int, *stripes: int) -> Memory:
    """Random bytes in parts of different sizes, in one allocation each."""
    parts = tuple(torch.randint(0, 256, (num_rows * size,), dtype=torch.uint8) for size in stripes)
    return Memory("kv", parts, stripes)


def read(memory: Memory, start: int, size: int) -> bytes:
    """Byte by byte, as the base says that offsets run."""
    parts, offsets = memory.locate(np.arange(start, start + size, dtype=np.int64))
    return bytes(int(memory.parts[part][offset]) for part, offset in zip(parts, offsets, strict=True))


def batch(source: Memory, sources: list[int], target: Memory, targets: list[int], size: int) -> CopyBatch:
    return CopyBatch(source, target, np.array(sources, dtype=np.int64), np.array(targets, dtype=np.int64), size)


def planned(copy: CopyBatch, *, max_pitch: int = ANY_PITCH, borders: tuple[int, ...] = ()) -> Segments | Grid:
    """`borders` are those of the target."""
    return plan(copy, addresses_of(copy.source), addresses_of(copy.target, borders), max_pitch=max_pitch)


def segments(copy: CopyBatch, **kwargs: Any) -> list[list[int]]:
    """Target offset, source offset and bytes of each call's piece, of memories in one part."""
    calls = planned(copy, **kwargs)
    assert isinstance(calls, Segments)
    table = calls.table.copy()
    table[0] -= copy.target.data.data_ptr()
    table[1] -= copy.source.data.data_ptr()
    return table.T.tolist()


# ---------------------------------------------------------------------- what becomes one piece


def test_segments_adjacent_in_source_and_target_are_merged() -> None:
    kv, host = memory("kv", 100), memory("host", 100)
    assert segments(batch(kv, [0, 10, 20, 40, 50], host, [50, 60, 70, 80, 0], 10)) == [
        [50, 0, 30],
        [80, 40, 10],
        [0, 50, 10],
    ]


def test_segments_adjacent_on_one_side_only_are_not_merged() -> None:
    kv, host = memory("kv", 100), memory("host", 100)
    assert len(segments(batch(kv, [0, 10, 20], host, [0, 20, 40], 10))) == 3
    assert len(segments(batch(kv, [0, 20, 40], host, [0, 10, 20], 10))) == 3


def test_no_merged_segment_crosses_a_border_of_pinned_chunks() -> None:
    kv, host = memory("kv", 100), memory("host", 100)
    copy = batch(kv, [0, 10, 20, 30], host, [0, 10, 20, 30], 10)
    assert segments(copy, borders=(20, 100)) == [[0, 0, 20], [20, 20, 20]]
    assert segments(copy) == [[0, 0, 40]]


def test_segments_in_two_adjacent_allocations_are_not_merged() -> None:
    kv, host = memory("kv", 64, parts=2, stripe=32), memory("host", 64)
    calls = planned(batch(kv, [0, 32], host, [0, 32], 32))
    assert isinstance(calls, Segments)
    assert calls.table[2].tolist() == [32, 32]


def test_an_empty_copy_makes_no_call() -> None:
    kv, host = memory("kv", 100), memory("host", 100)
    assert segments(batch(kv, [], host, [], 10)) == []


# ---------------------------------------------------------------------- which kind of call


@pytest.mark.parametrize(("size", "by_kernel"), [(KERNEL_BELOW - 8, True), (KERNEL_BELOW, False)])
def test_small_segments_are_copied_by_a_kernel(size: int, by_kernel: bool) -> None:
    kv, host = memory("kv", 4 * size), memory("host", 4 * size)
    calls = planned(batch(kv, [0, 2 * size], host, [2 * size, 0], size))
    assert isinstance(calls, Segments)
    assert calls.by_kernel is by_kernel


def test_small_segments_merged_into_large_ones_are_not_copied_by_a_kernel() -> None:
    size, count = 4 * KIB, 64
    kv, host = memory("kv", size * count), memory("host", size * count)
    starts = [index * size for index in range(count)]
    calls = planned(batch(kv, starts, host, starts, size))
    assert isinstance(calls, Segments)
    assert (calls.by_kernel, calls.table[2].tolist()) == (False, [size * count])


STRIPE, LAYERS, ROWS = 64 * KIB, 4, 3


def striped(**kwargs: Any) -> Memory:
    return memory("kv", STRIPE * LAYERS * ROWS, parts=LAYERS, stripe=STRIPE, **kwargs)


def host() -> Memory:
    return memory("host", STRIPE * LAYERS * ROWS)


def block(*numbers: int, layer: int = 0) -> list[int]:
    return [number * STRIPE * LAYERS + layer * STRIPE for number in numbers]


def test_a_block_of_evenly_spaced_layers_is_one_two_dimensional_copy() -> None:
    kv, slots = striped(gap=4096), host()
    calls = planned(batch(kv, block(2, 0), slots, block(0, 1), STRIPE * LAYERS))
    pitch = STRIPE * ROWS + 4096
    base, to = kv.parts[0].data_ptr(), slots.data.data_ptr()
    assert calls == Grid(
        [to, to + STRIPE * LAYERS],
        [base + 2 * STRIPE, base],
        STRIPE,
        pitch,
        STRIPE,
        LAYERS,
        from_device=False,
        to_device=False,
    )
    back = planned(batch(slots, block(0), kv, block(1, layer=1), STRIPE * 3))
    assert back == Grid([base + pitch + STRIPE], [to], pitch, STRIPE, STRIPE, 3, from_device=False, to_device=False)


@pytest.mark.parametrize(
    ("kv", "start", "size", "max_pitch"),
    [
        pytest.param(striped(apart=True), 0, STRIPE * LAYERS, ANY_PITCH, id="layers in allocations of their own"),
        pytest.param(striped(), 0, STRIPE * LAYERS, STRIPE * ROWS - 1, id="layers too far apart for the driver"),
        pytest.param(striped(), 0, STRIPE, ANY_PITCH, id="one layer"),
        pytest.param(striped(), STRIPE, STRIPE * LAYERS, ANY_PITCH, id="goes on in the next row"),
        pytest.param(striped(), KIB, STRIPE * 2, ANY_PITCH, id="begins inside a stripe"),
        pytest.param(
            memory("kv", 8 * GRID_BELOW, parts=2, stripe=GRID_BELOW), 0, 2 * GRID_BELOW, ANY_PITCH, id="large stripes"
        ),
        pytest.param(memory("kv", 64 * KIB, parts=2, stripe=4 * KIB), 0, 8 * KIB, ANY_PITCH, id="tiny stripes"),
    ],
)
def test_blocks_that_fit_no_two_dimensional_copy_are_copied_as_a_batch(
    kv: Memory, start: int, size: int, max_pitch: int
) -> None:
    slots = memory("host", kv.num_bytes)
    calls = planned(batch(kv, [start], slots, [0], size), max_pitch=max_pitch)
    assert isinstance(calls, Segments)


def test_layers_with_uneven_distances_are_copied_as_a_batch() -> None:
    whole = torch.zeros(STRIPE * 8, dtype=torch.uint8)
    kv = Memory("kv", (whole[:STRIPE], whole[STRIPE : 2 * STRIPE], whole[4 * STRIPE : 5 * STRIPE]), (STRIPE,) * 3)
    assert isinstance(planned(batch(kv, [0], memory("host", 3 * STRIPE), [0], 3 * STRIPE)), Segments)


# ---------------------------------------------------------------------- on a device, to the byte


@pytest.mark.parametrize("into_stripes", [True, False])
@pytest.mark.parametrize(
    ("stripes", "starts", "size", "at_once"),
    [
        pytest.param((64,) * 5, [0, 640, 320], 320, True, id="whole blocks"),
        pytest.param((64,) * 5, [64, 704, 384], 128, True, id="some layers"),
        pytest.param((64,) * 5, [256, 0], 64, False, id="not the same layers"),
        pytest.param((64,) * 5, [8, 328], 64, False, id="from inside a stripe"),
        pytest.param((64,) * 5, [256], 128, False, id="on into the next row"),
        pytest.param((64,) * 5, [0, 320], 96, False, id="half a stripe"),
        pytest.param((64, 96, 32, 128), [0, 640, 320], 320, True, id="whole unequal blocks"),
        pytest.param((64, 96, 32, 128), [64, 704, 384], 128, True, id="some unequal layers"),
        pytest.param((64, 96, 32, 128), [192], 192, False, id="unequal, on into the next row"),
        pytest.param((64, 96, 32, 128), [64, 384], 32, False, id="a part of an unequal stripe"),
    ],
)
def test_both_ways_to_split_segments_into_stripes_give_the_same_result(
    into_stripes: bool, stripes: tuple[int, ...], starts: list[int], size: int, at_once: bool
) -> None:
    kv, host = unequal(3, *stripes), memory("host", 960)
    offsets = [size * index for index in range(len(starts))]
    copy = batch(host, offsets, kv, starts, size) if into_stripes else batch(kv, starts, host, offsets, size)
    source, target = addresses_of(copy.source), addresses_of(copy.target)
    assert (copies._whole_stripes(copy, source, target) is not None) == at_once
    calls = plan(copy, source, target, max_pitch=ANY_PITCH, merged=False)
    assert isinstance(calls, Segments)
    assert calls.table.tolist() == copies.segments(copy, source, target, merged=False).tolist()


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """In the place of the kernels, which need Triton: what was launched. Runs at once."""
    import ctypes

    launched: list[str] = []

    def copy_segments(table_address: int, count: int, *, aligned: bool, programs: int = 1) -> None:
        launched.append(f"{count} segments{' aligned' if aligned else ''}")
        table = np.ctypeslib.as_array((ctypes.c_int64 * (3 * count)).from_address(table_address)).reshape(3, count)
        assert not aligned or not (table % 8).any()
        for target, source, size in table.T.tolist():
            ctypes.memmove(target, source, size)

    def deliver(target: int, source: int, num_bytes: int, *, offset_address: int = 0) -> None:
        launched.append(f"{num_bytes} bytes")
        ctypes.memmove(
            target + (ctypes.c_int64.from_address(offset_address).value if offset_address else 0), source, num_bytes
        )

    def convert_segments(
        segments: int, stage: int, count: int, num_bytes: int, form: Vectors, *, unpacks: bool, table: bool = True
    ) -> None:
        launched.append(f"{count} {'unpacked' if unpacks else 'packed'}{'' if table else ' without a table'}")
        if not count:
            return
        plain_bytes = num_bytes // form.packed_bytes * form.plain_bytes
        for index in range(count):
            start = ctypes.c_int64.from_address(segments + 8 * index).value if table else segments
            packed, plain = stage + index * num_bytes, start
            source, size = (packed, num_bytes) if unpacks else (plain, plain_bytes)
            taken = torch.frombuffer((ctypes.c_uint8 * size).from_address(source), dtype=torch.uint8)
            made = (unpack if unpacks else pack)(taken, form).contiguous()
            ctypes.memmove(plain if unpacks else packed, made.data_ptr(), made.numel())

    fake = types.ModuleType("sidestream_kv.device.cuda.kernels")
    fake.copy_segments, fake.deliver = copy_segments, deliver  # type: ignore[attr-defined]
    fake.convert_segments = convert_segments  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sidestream_kv.device.cuda.kernels", fake)
    monkeypatch.setattr("sidestream_kv.device.cuda.kernels", fake, raising=False)
    return launched


def parts(stream: CudaStream, copy: CopyBatch, first: int, count: int) -> Iterator[CudaFence]:
    """Submit a prepared copy in two parts."""
    for start, stop in ((0, first), (first, count)):
        if start < stop:
            yield stream.submit_copy(copy, start, stop)


def copied(device: CudaDevice, gpu: FakeGpu, copy: CopyBatch, *, first: int | None = None) -> None:
    """Copy, and compare every byte with what the base says that it should be. `first`: prepared, so many segments by
    themselves.
    """
    expected = [read(copy.source, start, copy.size) for start in copy.source_starts.tolist()]
    stream = device.stream(f"copy {len(device._streams)}")
    count = len(copy.source_starts)
    fences = (
        [stream.submit(lambda: stream.copy(copy))]
        if first is None
        else [*parts(stream, device.prepare(copy), first, count)]
    )
    assert [fence.failure for fence in fences] == [None] * len(fences)
    gpu.run()
    assert fences[-1].poll()
    assert [read(copy.target, start, copy.size) for start in copy.target_starts.tolist()] == expected


ROW = 96 * 4
SHAPES: dict[str, Callable[[int], Memory]] = {
    "flat": lambda rows: memory("kv", rows * ROW),
    "striped": lambda rows: memory("kv", rows * ROW, parts=4, stripe=96),
    "striped with gaps": lambda rows: memory("kv", rows * ROW, parts=4, stripe=96, gap=32),
    "striped otherwise": lambda rows: memory("kv", rows * ROW, parts=3, stripe=32),
    "apart": lambda rows: memory("kv", rows * ROW, parts=4, stripe=96, apart=True),
    "unequal": lambda rows: unequal(rows, 96, 24, ROW - 120),
}


def scattered(source: str, target: str) -> CopyBatch:
    """Eight blocks from one shape of memory to places in random order of another."""
    order = np.random.default_rng(0).permutation(12)[:8]
    return batch(SHAPES[source](12), (np.arange(8) * ROW).tolist(), SHAPES[target](12), (order * ROW).tolist(), ROW)


@pytest.mark.parametrize("source", SHAPES)
def test_every_shape_of_memory_is_copied_to_every_other(
    device: CudaDevice, gpu: FakeGpu, kernels: list[str], source: str
) -> None:
    for target in SHAPES:
        copied(device, gpu, scattered(source, target))


@pytest.mark.parametrize("source", SHAPES)
def test_a_prepared_copy_in_two_parts_copies_the_same_bytes(
    device: CudaDevice, gpu: FakeGpu, kernels: list[str], monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.setattr(copies, "KERNEL_BELOW", 16)  # else none of these is prepared
    for target in SHAPES:
        for first in (0, 3, 8):
            copy = scattered(source, target)
            assert device.prepare(copy).prepared is not None
            copied(device, gpu, copy, first=first)
    assert not kernels


@pytest.mark.parametrize("has_batch", [True, False])
def test_segments_are_copied_singly_if_the_driver_has_no_batches(has_batch: bool) -> None:
    gpu = FakeGpu(has_batch=has_batch)
    device = CudaDevice(driver=gpu)  # type: ignore[arg-type]
    kv, slots = memory("kv", 4 * KERNEL_BELOW), memory("host", 4 * KERNEL_BELOW)
    copied(device, gpu, batch(kv, [0, 2 * KERNEL_BELOW], slots, [KERNEL_BELOW, 0], KERNEL_BELOW))
    assert gpu.calls == ["batch of 2" if has_batch else "2 one by one"]
    device.close()


def test_striped_blocks_are_copied_by_two_dimensional_copies_both_ways(device: CudaDevice, gpu: FakeGpu) -> None:
    stripe = KERNEL_BELOW
    kv, slots = memory("kv", stripe * 6, parts=2, stripe=stripe, gap=512), memory("host", stripe * 6)
    copied(device, gpu, batch(kv, [4 * stripe, 0], slots, [0, 2 * stripe], 2 * stripe))
    copied(device, gpu, batch(slots, [4 * stripe], kv, [2 * stripe], 2 * stripe))
    assert gpu.calls == [f"2 grids of 2 x {stripe}", f"1 grids of 2 x {stripe}"]


@pytest.fixture
def in_order(kernels: list[str], gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that copy and convert segments run when their stream, the last one that was made, comes to them."""
    module = sys.modules["sidestream_kv.device.cuda.kernels"]

    def in_turn(at_once: Callable[..., None]) -> Callable[..., None]:
        return lambda *args, **kwargs: gpu.queues[max(gpu.queues)].append(lambda: at_once(*args, **kwargs))

    for name in ("copy_segments", "convert_segments"):
        monkeypatch.setattr(module, name, in_turn(getattr(module, name)))
    return kernels


@pytest.mark.parametrize("num_blocks", [2, 8])
@pytest.mark.parametrize("layers", [range(4), range(1, 3)], ids=["whole blocks", "some layers"])
@pytest.mark.parametrize("sizes", [(4, 4, 4, 4), (3, 2, 6, 5)], ids=["equal", "unequal"])
def test_layers_apart_are_distributed_from_a_buffer(
    device: CudaDevice, gpu: FakeGpu, in_order: list[str], sizes: tuple[int, ...], layers: range, num_blocks: int
) -> None:
    kv, slots = unequal(8, *(size * KERNEL_BELOW // 4 for size in sizes)), memory("host", KERNEL_BELOW * 32)
    order, row = np.random.default_rng(0).permutation(8)[:num_blocks], KERNEL_BELOW * 4
    first, size = sum(kv.stripes[: layers.start]), sum(kv.stripes[layers.start : layers.stop])
    copy = batch(slots, (np.arange(num_blocks) * row + first).tolist(), kv, (order * row + first).tolist(), size)
    device.make_stages(count=1, num_bytes=3 * size)
    copied(device, gpu, copy, first=0)
    whole = [3] * (num_blocks // 3) + [num_blocks % 3]
    assert gpu.calls == [f"batch of {count}" for count in whole]
    assert in_order == [f"{count * len(layers)} segments aligned" for count in whole]


@pytest.mark.parametrize("lacks", ["buffer", "large buffer", "table"])
def test_layers_apart_are_copied_one_by_one_without_a_buffer_or_a_table(
    device: CudaDevice, gpu: FakeGpu, kernels: list[str], lacks: str
) -> None:
    stripe = KERNEL_BELOW
    kv, slots = memory("kv", stripe * 8, parts=4, stripe=stripe, apart=True), memory("host", stripe * 8)
    device.make_stages(count=1, num_bytes=stripe if lacks == "large buffer" else 4 * stripe)
    if lacks == "buffer":
        device.take_stage()
    while lacks == "table" and device.take_table() is not None:
        pass
    copied(device, gpu, batch(slots, [0, 4 * stripe], kv, [4 * stripe, 0], 4 * stripe), first=1)
    assert (gpu.calls, kernels) == (["batch of 4", "batch of 4"], [])


FORM = EightBitLayout(KVLayout(1, 2, 16, 8, "float32")).packed


def converted(device: CudaDevice, gpu: FakeGpu, *, unpacks: bool, segments: int = 5, stage: int = 3) -> None:
    """Pack or unpack blocks, with a buffer for `stage` of them, and compare every byte."""
    plain_bytes, size = 32 * FORM.plain_bytes, 32 * FORM.packed_bytes
    kv, host = memory("kv", 8 * plain_bytes), memory("host", 8 * size)
    kv.data.view(torch.float32).copy_(torch.randn(8 * plain_bytes // 4))
    host.data.copy_(pack(kv.data.flip(0).view(torch.float32).nan_to_num(0).view(torch.uint8), FORM))
    order = np.random.default_rng(0).permutation(8)[:segments]
    blocks, slots = np.arange(segments) * plain_bytes, order * size
    if unpacks:
        copy, convert = CopyBatch(host, kv, slots, blocks, size, unpacks=FORM), unpack
    else:
        copy, convert = CopyBatch(kv, host, blocks, slots, size, packs=FORM), pack
    expected = [
        convert(copy.source.data[start : start + copy.source_size].clone(), FORM)
        for start in copy.source_starts.tolist()
    ]
    device.make_stages(count=1, num_bytes=stage * size)
    stream = device.stream("copy")
    fences = [*parts(stream, device.prepare(copy), 1, segments)]
    gpu.run()
    assert [fence.failure for fence in fences] == [None] * len(fences)
    for start, wanted in zip(copy.target_starts.tolist(), expected, strict=True):
        assert torch.equal(copy.target.data[start : start + copy.target_size], wanted)


def test_blocks_are_packed_before_they_leave_the_device(device: CudaDevice, gpu: FakeGpu, in_order: list[str]) -> None:
    converted(device, gpu, unpacks=False)
    assert (in_order, gpu.calls) == (["1 packed", "3 packed", "1 packed"], ["batch of 1", "batch of 3", "batch of 1"])


def test_blocks_are_unpacked_after_they_have_arrived_on_the_device(
    device: CudaDevice, gpu: FakeGpu, in_order: list[str]
) -> None:
    converted(device, gpu, unpacks=True)
    assert in_order == ["1 unpacked", "3 unpacked", "1 unpacked"]


def test_blocks_are_converted_one_by_one_when_no_table_is_free(
    device: CudaDevice, gpu: FakeGpu, in_order: list[str]
) -> None:
    device._tables = []
    converted(device, gpu, unpacks=True, segments=2)
    assert in_order == ["1 unpacked without a table"] * 2


def test_blocks_are_not_converted_without_a_buffer_for_one(device: CudaDevice, kernels: list[str]) -> None:
    kv, host = memory("kv", 32 * FORM.plain_bytes), memory("host", 32 * FORM.packed_bytes)
    stream = device.stream("copy")
    copy = CopyBatch(kv, host, np.array([0]), np.array([0]), host.num_bytes, packs=FORM)
    assert "no buffer of 640 bytes" in str(stream.submit_copy(device.prepare(copy), 0, 1).failure)


def test_a_kernels_table_is_not_reused_before_the_kernel_has_read_it(
    device: CudaDevice, gpu: FakeGpu, kernels: list[str]
) -> None:
    kv, slots, stream = memory("kv", 64), memory("host", 64), device.stream("store")
    free = len(device._tables)
    fence = stream.submit(lambda: stream.copy(batch(kv, [0, 16], slots, [16, 0], 8)))
    assert (kernels, len(device._tables)) == (["2 segments aligned"], free - 1)
    assert not fence.poll()
    gpu.run()
    assert fence.poll()
    assert len(device._tables) == free


def test_many_small_segments_need_several_launches_and_odd_ones_go_by_byte(
    device: CudaDevice, gpu: FakeGpu, kernels: list[str]
) -> None:
    count = 10_000
    kv, slots = memory("kv", 3 * count), memory("host", 3 * count)
    starts = np.arange(count) * 3
    copy = CopyBatch(kv, slots, starts, np.random.default_rng(1).permutation(starts), 3)
    copied(device, gpu, copy)
    assert kernels[:2] == ["4096 segments", "4096 segments"]
    assert len(kernels) == 3


def test_the_copy_engine_copies_when_no_segment_table_is_free(
    device: CudaDevice, gpu: FakeGpu, kernels: list[str]
) -> None:
    device._tables = []
    kv, slots = memory("kv", 64), memory("host", 64)
    copied(device, gpu, batch(kv, [0, 16], slots, [16, 0], 8))
    assert (kernels, gpu.calls) == ([], ["batch of 2"])


def test_pageable_memory_is_refused(device: CudaDevice) -> None:
    kv, slots = memory("kv", 64), Memory("host", (torch.zeros(64, dtype=torch.uint8),), pageable=True)
    stream = device.stream("store")
    fence = stream.submit(lambda: stream.copy(batch(kv, [0], slots, [0], 8)))
    assert isinstance(fence.failure, InvariantError)
    assert "pin it first" in str(fence.failure)


def test_values_of_any_dtype_are_delivered_byte_by_byte(device: CudaDevice, gpu: FakeGpu, kernels: list[str]) -> None:
    mailbox, stream = memory("mailbox", 64), device.stream("compute")
    values = torch.tensor([1, -2, 3], dtype=torch.int32)
    stream.submit(lambda: stream.deliver(values, mailbox, 20))
    assert mailbox.data[20:32].view(torch.int32).tolist() == [1, -2, 3]
    fence = stream.submit(lambda: stream.deliver(torch.zeros(4, 4)[:, 1], mailbox, 0))
    assert isinstance(fence.failure, InvariantError)
    stream.submit(lambda: stream.deliver(values[:0], mailbox, 0))
    stream.submit(lambda: stream.deliver(values, mailbox, torch.tensor([40]), further=8))
    assert mailbox.data[48:60].view(torch.int32).tolist() == [1, -2, 3]
    assert kernels == ["12 bytes", "12 bytes"]


def test_warm_up_launches_each_kernel_variant_and_releases_its_buffers(
    device: CudaDevice, gpu: FakeGpu, kernels: list[str]
) -> None:
    free, pinned = len(device._tables), dict(gpu.pinned)
    device.warm_up()
    assert kernels == ["8 bytes", "1 segments aligned", "1 bytes", "1 segments"]
    assert (len(device._tables), gpu.pinned) == (free, pinned)


def test_warm_up_launches_the_kernels_that_convert_blocks(device: CudaDevice, kernels: list[str]) -> None:
    device.warm_up(converts=FORM)
    ways = [f"0 {way}{how}" for way in ("packed", "unpacked") for how in (" without a table", "")]
    assert kernels[-4:] == ways
