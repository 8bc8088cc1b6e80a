"""Enqueues copies on one CUDA stream. The copy engine executes them or, if segments are small, a kernel does.

A batch of segments (byte ranges of one size) is copied together. A segment table lists the segments for a kernel.
"""

from __future__ import annotations

from functools import partial
from typing import Literal, Protocol

import numpy as np
import torch

from sidestream_kv.device.base import CopyBatch, Memory
from sidestream_kv.device.cuda.copies import Grid, MemoryAddresses, Staged, plan, segments
from sidestream_kv.device.cuda.driver import Driver, PreparedTable, Table
from sidestream_kv.errors import InvariantError
from sidestream_kv.types import Vectors

# Programs of the kernel that distributes the stripes of staged segments: 18 MiB take an H200 20 us.
_STAGED_PROGRAMS = 64


class CopyDevice(Protocol):
    """The members of a device that `Copier` uses."""

    driver: Driver

    def take_table(self) -> Table | None:
        """Memory for the segment table of a copy by kernel, in mapped host memory, int64 `[3 * n]` for n segments;
        None if all tables are in use.
        """
        ...

    def take_stage(self) -> torch.Tensor | None:
        """A buffer for `Staged` copies, for the use of one stream for ever; None if all are in use."""
        ...

    def addresses_of(self, memory: Memory) -> MemoryAddresses: ...


class Copier:
    """Copies on the stream with this `handle`. Called by the thread that enqueues the stream's work."""

    def __init__(self, device: CopyDevice, handle: int) -> None:
        self._device = device
        self._driver = device.driver
        self._handle = handle
        self._tables: list[Table] = []
        self._stage: torch.Tensor | None = None

    def take_tables(self) -> list[Table]:
        """Segment tables of all copies since the last call. They stay in use until the fence of the work is done."""
        tables, self._tables = self._tables, []
        return tables

    def copy(self, batch: CopyBatch, *, capturing: bool) -> None:
        """Enqueue the batch with as few calls as the driver allows. After a DeviceError, some of the copies may be
        enqueued.
        """
        if batch.source.pageable or batch.target.pageable:
            raise InvariantError(
                f"copy from {batch.source.name} to {batch.target.name}: "
                "pageable memory would block this thread; pin it first"
            )
        source, target = self._device.addresses_of(batch.source), self._device.addresses_of(batch.target)
        vectors = batch.packs or batch.unpacks
        if vectors is not None:
            self._copy_converted(batch, vectors)
            return
        planned = plan(batch, source, target, max_pitch=self._driver.max_pitch)
        if isinstance(planned, Grid):
            self._copy_grid(planned, planned.targets, planned.sources)
        elif not planned.table.shape[1]:
            return
        elif planned.by_kernel and not capturing:  # a replayed graph would read the table after another copy reused it
            self._copy_by_kernel(planned.table, source, target)
        else:
            self._copy_by_engine(planned.table, source, target)

    def copy_prepared(self, prepared: object, first: int, stop: int) -> None:
        """Enqueue segments `[first, stop)` of a prepared batch; `prepared` is `CopyBatch.prepared`."""
        if isinstance(prepared, PreparedTable):
            self._driver.copy_prepared(prepared, first, stop - first, self._handle)
        elif isinstance(prepared, Staged):
            self._copy_staged(prepared, first, stop)
        else:
            assert isinstance(prepared, Grid)
            self._copy_grid(prepared, prepared.targets[first:stop], prepared.sources[first:stop])

    def copy_as(self, batch: CopyBatch, way: Literal["call each", "kernel"], *, programs: int = 2) -> None:
        """Copy in another way, for benchmarks: one call for each segment, or a kernel with any number of programs."""
        source, target = self._device.addresses_of(batch.source), self._device.addresses_of(batch.target)
        table = segments(batch, source, target)
        if way == "kernel":
            self._copy_by_kernel(table, source, target, programs=programs)
        else:
            self._driver.copy_each(table, self._handle)

    def _copy_grid(self, grid: Grid, targets: list[int], sources: list[int]) -> None:
        self._driver.copy_grid(
            targets,
            sources,
            self._handle,
            from_device=grid.from_device,
            to_device=grid.to_device,
            target_pitch=grid.target_pitch,
            source_pitch=grid.source_pitch,
            width=grid.width,
            height=grid.height,
        )

    def _copy_by_engine(self, table: Table, source: MemoryAddresses, target: MemoryAddresses) -> None:
        self._engine(table, from_device=source.on_device, to_device=target.on_device)

    def _engine(self, table: Table, *, from_device: bool, to_device: bool) -> None:
        if self._driver.has_batch:
            self._driver.copy_batch(table, self._handle, from_device=from_device, to_device=to_device)
        else:
            self._driver.copy_each(table, self._handle)

    def _copy_staged(self, staged: Staged, first: int, stop: int) -> None:
        """Copy through the stream's own buffer. The stream runs in order, so the buffer is free when its next segments
        arrive. Copies by the copy engine alone if there is no buffer, or no table for the kernel.
        """
        from sidestream_kv.device.cuda.kernels import copy_segments

        self._take_stage()
        most = 0 if self._stage is None else self._stage.numel() // staged.segment_bytes
        while first < stop:
            count = min(stop - first, most)
            mapped_table = self._device.take_table() if count else None
            if mapped_table is not None:
                self._tables.append(mapped_table)
                count = min(count, len(mapped_table) // (3 * staged.height))
            if self._stage is None or mapped_table is None or not count:
                table = staged.table[:, first * staged.height : stop * staged.height].copy()
                self._engine(table, from_device=False, to_device=True)
                return
            stripes = staged.table[:, first * staged.height : (first + count) * staged.height].copy()
            arriving = np.empty((3, count), dtype=np.int64)
            arriving[0] = self._stage.data_ptr() + np.arange(count) * staged.segment_bytes
            arriving[1], arriving[2] = stripes[1, :: staged.height], staged.segment_bytes
            self._engine(arriving, from_device=False, to_device=True)
            stripes[1] = self._stage.data_ptr() + np.cumsum(stripes[2]) - stripes[2]
            mapped_table[: stripes.size] = stripes.ravel()
            copy_segments(
                mapped_table.ctypes.data,
                stripes.shape[1],
                aligned=not (stripes % 8).any(),
                programs=_STAGED_PROGRAMS,
            )
            first += count

    def _take_stage(self) -> None:
        if self._stage is None:
            self._stage = self._device.take_stage()

    def _copy_converted(self, batch: CopyBatch, vectors: Vectors) -> None:
        """Copy packed segments between host memory and the stream's own buffer, and let a kernel convert them between
        the buffer and the plain segments. The stream runs in order, so the buffer is free when its next segments come.
        """
        from sidestream_kv.device.cuda.kernels import convert_segments

        self._take_stage()
        if self._stage is None or self._stage.numel() < batch.size:
            raise InvariantError(
                f"copy from {batch.source.name} to {batch.target.name}: no buffer of {batch.size} bytes to convert KV "
                "in: call CudaDevice.make_stages first"
            )
        stage, unpacks, size = self._stage.data_ptr(), batch.unpacks is not None, batch.size
        sources = batch.source_starts + batch.source.data.data_ptr()
        targets = batch.target_starts + batch.target.data.data_ptr()
        plain, host = (targets, sources) if unpacks else (sources, targets)
        most, first = self._stage.numel() // size, 0
        while first < len(plain):
            table = self._device.take_table()
            stop = first + (1 if table is None else min(most, len(table)))
            staged = stage + np.arange(len(plain[first:stop])) * size
            moved = np.full((3, len(staged)), size, dtype=np.int64)
            moved[:2] = (staged, host[first:stop]) if unpacks else (host[first:stop], staged)
            segments = int(plain[first])
            if table is not None:
                self._tables.append(table)
                table[: len(staged)] = plain[first:stop]
                segments = table.ctypes.data
            move = partial(self._engine, moved, from_device=not unpacks, to_device=unpacks)
            convert = partial(
                convert_segments,
                segments,
                stage,
                len(staged),
                size,
                vectors,
                unpacks=unpacks,
                table=table is not None,
            )
            for each in (move, convert) if unpacks else (convert, move):  # rule: vectors-are-converted-on-the-device
                each()
            first = stop

    def _copy_by_kernel(
        self, table: Table, source: MemoryAddresses, target: MemoryAddresses, *, programs: int = 2
    ) -> None:
        """Write the segments to free segment tables, one after the other, and launch a kernel for each of them. If no
        table is free, the copy engine copies the remaining segments.
        """
        from sidestream_kv.device.cuda.kernels import copy_segments

        first, count = 0, table.shape[1]
        while first < count:
            mapped_table = self._device.take_table()
            if mapped_table is None:
                self._copy_by_engine(table[:, first:].copy(), source, target)
                return
            self._tables.append(mapped_table)
            part = table[:, first : first + len(mapped_table) // 3]
            num_segments = part.shape[1]
            mapped_table[: 3 * num_segments] = part.ravel()
            copy_segments(mapped_table.ctypes.data, num_segments, aligned=not (part % 8).any(), programs=programs)
            first += num_segments
