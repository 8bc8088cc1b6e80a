"""Triton kernels that copy small segments (byte ranges) in place of the copy engine. They also copy small results,
which must not queue behind bulk copies.

Triton does not specialise on the addresses, which are plain integers. So each kernel has only two variants: one moves
eight bytes at a time, the other one byte. Loading another variant during serving would wait until the GPU is idle.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

# Number of Triton programs of a copy. It is small, because eight copying programs would halve the speed of decode.
PROGRAMS = 2
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
