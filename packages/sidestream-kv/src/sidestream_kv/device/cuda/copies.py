"""Chooses how to copy a batch of segments: computes addresses, merges neighbouring segments, and plans the calls of the
CUDA driver. Does not call the driver itself.

A segment is one byte range to copy. Striped memory has several parts, for example one for each layer: consecutive
stripes of bytes lie in consecutive parts (see `Memory`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sidestream_kv.device.base import CopyBatch, Memory, Starts
from sidestream_kv.device.cuda.driver import Table

# If segments are smaller than this on average, a kernel copies them, because the copy engine needs more time for each
# segment than for its bytes. On an H100 whose link has 55 GB/s, batch copies of the copy engine reach 29 GB/s in each
# direction with segments of 32 KiB; with 16 KiB they reach 19 GB/s to the host and 6 GB/s to the device.
KERNEL_BELOW = 32 << 10
# If stripes are smaller than this, each block in striped memory is copied by one two-dimensional copy. With stripes of
# 64 KiB these copies reach 0.93 of the link's rate, and a batch copy 0.895.
GRID_BELOW = 256 << 10


@dataclass(frozen=True, slots=True)
class MemoryAddresses:
    """Where a memory lies.

    bases       int64 address of each part
    borders     offsets at which a chunk ends that was pinned by one call; no segment may cross such a border
    pitch       bytes from each part to the next part, if they are equally spaced in one allocation; else 0
    on_device   whether this is device memory; otherwise it is host memory
    """

    bases: Starts
    borders: Starts
    pitch: int
    on_device: bool


@dataclass(frozen=True, slots=True)
class Segments:
    """Segments to copy with one kernel launch if `by_kernel`, else with the copy engine."""

    table: Table
    by_kernel: bool


@dataclass(frozen=True, slots=True)
class Grid:
    """Blocks, each of which is copied by one two-dimensional copy of `height` rows of `width` bytes. A pitch is the
    distance between rows.
    """

    targets: list[int]
    sources: list[int]
    target_pitch: int
    source_pitch: int
    width: int
    height: int
    from_device: bool
    to_device: bool


@dataclass(frozen=True, slots=True)
class Staged:
    """Segments to copy to a buffer on the device, whole, from where a kernel distributes their stripes: the copy engine
    and the host need more time for many stripes than for few segments.

    table    the stripes from host memory to their places, `height` columns for each segment
    """

    table: Table
    height: int

    @property
    def segment_bytes(self) -> int:
        """Bytes of each segment."""
        return int(self.table[2, : self.height].sum())


def addresses_of(memory: Memory, borders: Sequence[int] = ()) -> MemoryAddresses:
    """The addresses of `memory`. `borders`: see `MemoryAddresses`."""
    parts = memory.parts
    bases = np.array([part.data_ptr() for part in parts], dtype=np.int64)
    gaps = set(np.diff(bases).tolist())
    together = len({part.untyped_storage().data_ptr() for part in parts}) == 1
    pitch = gaps.pop() if together and len(gaps) == 1 else 0
    return MemoryAddresses(bases, np.array(borders, dtype=np.int64), max(0, pitch), parts[0].is_cuda)


def plan(
    batch: CopyBatch, source: MemoryAddresses, target: MemoryAddresses, *, max_pitch: int, merged: bool = True
) -> Segments | Grid:
    """The calls that copy `batch` between memories at `source` and `target`. `max_pitch` is the driver's limit.

    merged   whether to merge segments that are neighbours on both sides. If False, each segment keeps its own columns
             of the table, and all segments have the same number of columns
    """
    grid = _grid(batch, source, target, max_pitch)
    if grid is not None:
        return grid
    table = None if merged else _whole_stripes(batch, source, target)
    if table is None:
        table = segments(batch, source, target, merged=merged)
    return Segments(table, batch.num_bytes < KERNEL_BELOW * table.shape[1])


def staged(batch: CopyBatch, source: MemoryAddresses, target: MemoryAddresses) -> Staged | None:
    """The batch as `Staged`; None if it does not copy stripes between `KERNEL_BELOW` and `GRID_BELOW` from host memory
    with one part to a device.
    """
    if not len(source.bases) == 1 < len(target.bases):
        return None
    width = sum(batch.target.stripes) / len(target.bases)
    if not (KERNEL_BELOW <= width < GRID_BELOW and batch.size > width):
        return None
    table = _whole_stripes(batch, source, target)
    return None if table is None else Staged(table, table.shape[1] // len(batch.source_starts))


def _grid(batch: CopyBatch, source: MemoryAddresses, target: MemoryAddresses, max_pitch: int) -> Grid | None:
    """The batch as two-dimensional copies, or None. They need one side that is evenly striped, another side with one
    part, and stripes between `KERNEL_BELOW` and `GRID_BELOW`.
    """
    if (striped := _striped_side(batch, source, target)) is None:
        return None
    striped_source, memory, addresses, starts = striped
    width = memory.stripes[0]
    height = batch.size // width
    if not (
        KERNEL_BELOW <= width < GRID_BELOW
        and len(set(memory.stripes)) == 1
        and height > 1
        and height * width == batch.size
        and width <= addresses.pitch <= max_pitch
    ):
        return None
    stripes, inside = np.divmod(starts, width)
    if inside.any() or (stripes % len(memory.parts) + height > len(memory.parts)).any():
        return None  # a segment begins inside a stripe, or continues in the next row of stripes
    sources = _addresses_at(batch.source, source, batch.source_starts).tolist()
    targets = _addresses_at(batch.target, target, batch.target_starts).tolist()
    source_pitch, target_pitch = (addresses.pitch, width) if striped_source else (width, addresses.pitch)
    return Grid(targets, sources, target_pitch, source_pitch, width, height, source.on_device, target.on_device)


def _striped_side(
    batch: CopyBatch, source: MemoryAddresses, target: MemoryAddresses
) -> tuple[bool, Memory, MemoryAddresses, Starts] | None:
    """If exactly one side is striped: whether that is the source, and the side's memory, addresses and starts. Else
    None.
    """
    striped_source = len(source.bases) > 1
    if striped_source == (len(target.bases) > 1):
        return None
    return (
        (True, batch.source, source, batch.source_starts)
        if striped_source
        else (False, batch.target, target, batch.target_starts)
    )


def _whole_stripes(batch: CopyBatch, source: MemoryAddresses, target: MemoryAddresses) -> Table | None:
    """The table of a batch of whole stripes between striped memory and memory with one part; None for other batches.

    This is a fast path: it computes the addresses of a segment together, not stripe by stripe.
    """
    if (striped := _striped_side(batch, source, target)) is None:
        return None
    striped_source, memory, addresses, starts = striped
    other, other_starts = (target, batch.target_starts) if striped_source else (source, batch.source_starts)
    borders = memory.borders
    rows, inside = np.divmod(starts, borders[-1])
    first, stop = borders.searchsorted((inside[0], inside[0] + batch.size)).tolist()
    if stop == len(borders) or borders[stop] - borders[first] != batch.size or (inside != borders[first]).any():
        return None
    stripes = _steps(borders[first : stop + 1])
    table = np.empty((3, len(starts), stop - first), dtype=np.int64)
    table[int(striped_source)] = rows[:, None] * stripes + addresses.bases[first:stop]
    table[int(not striped_source)] = (other_starts + other.bases - borders[first])[:, None] + borders[first:stop]
    table[2] = stripes
    return table.reshape(3, -1)


def segments(batch: CopyBatch, source: MemoryAddresses, target: MemoryAddresses, *, merged: bool = True) -> Table:
    """The batch as a table of contiguous segments. `merged`: see `plan`."""
    source_starts, target_starts, sizes = batch.pieces()
    sources = _addresses_at(batch.source, source, source_starts)
    targets = _addresses_at(batch.target, target, target_starts)
    follows = (_steps(targets) == sizes[:-1]) & merged
    if follows.any():
        follows &= _steps(sources) == sizes[:-1]
    if follows.any():  # neighbours are rare, and merging them doubles the time
        follows &= _stays(batch.source, source, source_starts) & _stays(batch.target, target, target_starts)
        firsts = np.flatnonzero(np.concatenate(([True], ~follows)))
        return np.stack((targets[firsts], sources[firsts], np.add.reduceat(sizes, firsts)))
    return np.array((targets, sources, sizes))


def _addresses_at(memory: Memory, addresses: MemoryAddresses, starts: Starts) -> Starts:
    """The address of each offset in `starts`."""
    if len(addresses.bases) == 1:
        return starts + addresses.bases
    parts, offsets = memory.locate(starts)
    return addresses.bases[parts] + offsets


def _stays(memory: Memory, addresses: MemoryAddresses, starts: Starts) -> npt.NDArray[np.bool_]:
    """Whether each segment is in the same allocation as the segment before it, because separate allocations may be
    adjacent.
    """
    parts, _ = memory.locate(starts)
    same: npt.NDArray[np.bool_] = _steps(parts) == 0
    if len(addresses.borders):
        same &= _steps(np.searchsorted(addresses.borders, starts, side="right")) == 0
    return same


def _steps(values: Starts) -> Starts:
    """Differences between neighbours. Several times faster than `np.diff`."""
    return values[1:] - values[:-1]
