"""Triton kernels that copy small segments (byte ranges) in place of the copy engine. They also copy small results,
which must not queue behind bulk copies.

Triton does not specialise on the addresses, which are plain integers. So each kernel has only two variants: one moves
eight bytes at a time, the other one byte. Loading another variant during serving would wait until the GPU is idle.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from sidestream_kv.types import Vectors

# Number of Triton programs of a copy. It is small, because eight copying programs would halve the speed of decode.
PROGRAMS = 2
# Number of Triton programs that pack vectors: they read and write device memory only, and end soon.
_PACKING_PROGRAMS = 64
_LANES = 4096
_DELIVERY_LANES = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _span(target, source, num_bytes, ALIGNED: tl.constexpr, LANES: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Copy `num_bytes` from one address to another. ALIGNED: both addresses and the size are multiples of eight."""
    if ALIGNED:
        lane = tl.pointer_type(tl.int64)
        count = num_bytes // 8
    else:
        lane = tl.pointer_type(tl.uint8)
        count = num_bytes
    to = target.to(tl.int64).to(lane)  # Triton passes small integers as 32 bits
    from_ = source.to(tl.int64).to(lane)
    offset = count * 0
    while offset < count:
        at = offset + tl.arange(0, LANES)
        tl.store(to + at, tl.load(from_ + at, mask=at < count), mask=at < count)
        offset += LANES


@triton.jit(do_not_specialize=["target", "source", "num_bytes", "offset"])  # type: ignore[untyped-decorator]
def _deliver(target, source, num_bytes, offset, OFFSET: tl.constexpr, ALIGNED: tl.constexpr, LANES: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    start = target.to(tl.int64)
    if OFFSET:
        start += tl.load(offset.to(tl.int64).to(tl.pointer_type(tl.int64)))
    _span(start, source, num_bytes, ALIGNED, LANES)


@triton.jit(do_not_specialize=["table", "count"])  # type: ignore[untyped-decorator]
def _copy_segments(table, count, ALIGNED: tl.constexpr, LANES: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Program `i % programs` copies segment `i`. The table is in host memory, so a program prefetches its next row."""
    targets = table.to(tl.int64).to(tl.pointer_type(tl.int64))
    sources = targets + count
    sizes = sources + count
    index = tl.program_id(0)
    target = tl.load(targets + index, mask=index < count, other=0)
    source = tl.load(sources + index, mask=index < count, other=0)
    size = tl.load(sizes + index, mask=index < count, other=0)
    while index < count:
        index += tl.num_programs(0)
        next_target = tl.load(targets + index, mask=index < count, other=0)
        next_source = tl.load(sources + index, mask=index < count, other=0)
        next_size = tl.load(sizes + index, mask=index < count, other=0)
        _span(target, source, size, ALIGNED, LANES)
        target = next_target
        source = next_source
        size = next_size


@triton.jit(do_not_specialize=["segments", "stage", "count", "rows"])  # type: ignore[untyped-decorator]
def pack_vectors(  # type: ignore[no-untyped-def]
    segments,
    stage,
    count,
    rows,
    ELEMENTS: tl.constexpr,  # noqa: N803
    DTYPE: tl.constexpr,  # noqa: N803
    UNPACKS: tl.constexpr,  # noqa: N803
    TABLE: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    LANES: tl.constexpr,  # noqa: N803
):
    """Pack `rows` vectors of each of `count` plain segments into consecutive packed segments at `stage`; or UNPACK
    them. TABLE: `segments` is the address of a table of the segments' addresses; else, that of the only segment.
    `device/eight_bit.py` has the same arithmetic.
    """
    packed_bytes: tl.constexpr = ELEMENTS + 4
    lanes = tl.arange(0, LANES)[None, :]
    pieces = tl.cdiv(rows, ROWS)
    piece = tl.program_id(0)
    while piece < count * pieces:
        segment = piece // pieces
        start = segments.to(tl.int64)
        if TABLE:
            start = tl.load(start.to(tl.pointer_type(tl.int64)) + segment)
        row = (piece - segment * pieces) * ROWS + tl.arange(0, ROWS)
        kept = row < rows
        inside = kept[:, None] & (lanes < ELEMENTS)
        numbers = start.to(tl.pointer_type(DTYPE)) + row[:, None] * ELEMENTS + lanes
        packed = stage.to(tl.int64) + (segment.to(tl.int64) * rows + row) * packed_bytes
        codes = packed.to(tl.pointer_type(tl.int8))[:, None] + lanes
        scales = (packed + ELEMENTS).to(tl.pointer_type(tl.float32))
        if UNPACKS:
            scale = tl.load(scales, mask=kept, other=0.0)
            values = tl.load(codes, mask=inside, other=0).to(tl.float32) * scale[:, None]
            tl.store(numbers, values.to(DTYPE), mask=inside)
        else:
            values = tl.load(numbers, mask=inside, other=0.0).to(tl.float32)
            scale = tl.maximum(tl.max(tl.abs(values), 1) / 127, 1.1754943508222875e-38)
            scale += tl.sum(values * 0, 1)  # not a number, if an element is not finite: `tl.max` leaves NaN out
            tl.store(scales, scale, mask=kept)
            values = tl.floor(values / scale[:, None] + 0.5)
            tl.store(codes, tl.where(values == values, values, 0.0).to(tl.int8), mask=inside)
        piece += tl.num_programs(0)


@triton.jit(do_not_specialize=["target"])
def _stamp(target):  # type: ignore[no-untyped-def]
    tl.store(target.to(tl.int64).to(tl.pointer_type(tl.int64)), tl.extra.cuda.globaltimer())


def stamp(target: int) -> None:
    """Write the GPU's clock in ns to the address `target` (device or mapped host memory), on the current stream."""
    grid: Any = _stamp[(1,)]
    grid(target, num_warps=1)


def deliver(target: int, source: int, num_bytes: int, *, offset_address: int = 0) -> None:
    """Copy `num_bytes` from a device address to a mapped host address with one program, on the current stream.

    offset_address   device address of an int64 that is added to `target`, a multiple of eight; 0: nothing is added
    """
    aligned = not (target | source | num_bytes) % 8
    grid: Any = _deliver[(1,)]
    grid(target, source, num_bytes, offset_address, offset_address != 0, aligned, _DELIVERY_LANES, num_warps=4)


def copy_segments(table_address: int, count: int, *, aligned: bool, programs: int = PROGRAMS) -> None:
    """Copy the `count` segments of a `driver.Table` in mapped host memory, on the current stream.

    aligned   whether all addresses and sizes are multiples of eight
    """
    grid: Any = _copy_segments[(programs,)]
    grid(table_address, count, aligned, _LANES, num_warps=8)


def convert_segments(
    segments: int, stage: int, count: int, num_bytes: int, vectors: Vectors, *, unpacks: bool, table: bool = True
) -> None:
    """Pack `count` plain segments of device memory into packed segments of `num_bytes` at the address `stage`, one
    after another, on the current stream; or unpack these.

    segments   address of the segments' addresses, int64, in mapped host memory; without a `table`, that of one segment
    """
    lanes = triton.next_power_of_2(vectors.elements)
    rows = num_bytes // vectors.packed_bytes
    grid: Any = pack_vectors[(_PACKING_PROGRAMS,)]
    dtype = getattr(tl, vectors.dtype)
    grid(segments, stage, count, rows, vectors.elements, dtype, unpacks, table, max(1, _LANES // lanes), lanes)
