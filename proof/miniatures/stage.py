"""Building blocks of the miniatures (small programs that show published bugs): small KV blocks, work that accesses
them, and outcomes. A block holds two layers of one number each, so that half-finished copies are visible. As in the
engine, all work declares its accesses, and every block is leased from a real pool.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sidestream_kv.device.base import CopyBatch, Memory, no_accesses
from sidestream_kv.kv.layout import KVLayout
from sidestream_kv.kv.pool import FencedPool
from sidestream_kv.types import Access, Accesses
from sidestream_order.sim import SimDevice, SimFence, SimStream

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=1, block_tokens=1, dtype="float32")
BOTH = range(2)
KEY = bytes(16)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The output of a miniature, and the expected output.

    output, expected                  numbers or tokens
    accept_lengths, expected_...      accept lengths of a speculative loop, by round
    leaked                            number of ids that are never released
    late                              sentences about events that happened too late, too often or never
    """

    output: tuple[int, ...] = ()
    expected: tuple[int, ...] = ()
    accept_lengths: tuple[int, ...] = ()
    expected_accept_lengths: tuple[int, ...] = ()
    leaked: int = 0
    late: tuple[str, ...] = ()

    @property
    def wrong(self) -> bool:
        """Whether the outcome differs from the expected one."""
        return bool(self.verdicts())

    def verdicts(self) -> list[tuple[str, str]]:
        """Oracle and detail of each difference."""
        found = []
        if self.output != self.expected:
            found.append(("tokens", f"got {self.output}, expected {self.expected}"))
        if self.accept_lengths != self.expected_accept_lengths:
            found.append(("accept length", f"got {self.accept_lengths}, expected {self.expected_accept_lengths}"))
        if self.leaked:
            found.append(("balance", f"{self.leaked} ids are still in use at the end"))
        if self.late:
            found.append(("order", "; ".join(self.late)))
        return found


@dataclass(frozen=True, slots=True)
class Miniature:
    """A published bug as a small program.

    hazard       one of `proof.mutations.HAZARDS`, or `"P1"` to `"P5"` for bugs that only cost time
    protection   one sentence that says how the protected version avoids the bug
    run          function that runs the program on a fresh device, with or without the protection
    """

    name: str
    hazard: str
    protection: str
    run: Callable[[SimDevice, bool], Outcome]


class Blocks:
    """`count` blocks of a named memory, and the pool that leases them."""

    def __init__(self, device: SimDevice, name: str, count: int, *, pageable: bool = False) -> None:
        allocate = device.allocate_pageable if pageable else device.allocate
        self.memory: Memory = allocate(name, count * LAYOUT.block_bytes)
        self.numbers: npt.NDArray[np.int64] = self.memory.data.numpy().view(np.int64).reshape(count, len(BOTH))
        self._tracer = device.tracer
        self.pool = self.another_pool(f"{name} blocks")

    def another_pool(self, name: str) -> FencedPool:
        """Another pool for the same blocks, with its own leases."""
        if self._tracer is not None:
            self._tracer.backed(name, self.memory.name, LAYOUT.block_bytes)
        return FencedPool(name, len(self.numbers), tracer=self._tracer)

    def reads(self, ids: Sequence[int], layers: range = BOTH) -> Accesses:
        """The accesses of work that reads these layers of these blocks."""
        return lambda: self._ranges(ids, layers, write=False)

    def writes(self, ids: Sequence[int], layers: range = BOTH) -> Accesses:
        """The accesses of work that writes (and may read) these layers of these blocks."""
        return lambda: self._ranges(ids, layers, write=True)

    def write(self, stream: SimStream, ids: Sequence[int], number: int, label: str) -> SimFence:
        """Submit work that writes the blocks layer by layer. Other work may run between two layers."""

        def work() -> None:
            for layer in BOTH:
                self.numbers[list(ids), layer] = number
                stream.touch(no_accesses)

        return stream.submit(work, self.writes(ids), label=label)

    def read(self, stream: SimStream, ids: Sequence[int], found: list[int], label: str) -> SimFence:
        """Submit work that reads the blocks layer by layer, and appends the values to `found`."""

        def work() -> None:
            for layer in BOTH:
                found.extend(self.numbers[list(ids), layer].tolist())
                stream.touch(no_accesses)

        return stream.submit(work, self.reads(ids), label=label)

    def put(self, ids: Sequence[int], number: int) -> None:
        """Write the blocks on the host."""
        if self._tracer is not None:
            self._tracer.host_touched(self.writes(ids), f"host writes {self.memory.name}")
        self.numbers[list(ids)] = number

    def seen(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Read the blocks on the host."""
        if self._tracer is not None:
            self._tracer.host_touched(self.reads(ids), f"host reads {self.memory.name}")
        return tuple(self.numbers[list(ids)].ravel().tolist())

    def _ranges(self, ids: Sequence[int], layers: range, *, write: bool) -> list[Access]:
        spans = (LAYOUT.layer_span(item, layers.start, layers.stop) for item in ids)
        return [Access(self.memory.name, start, stop, write) for start, stop in spans]


def copy(
    stream: SimStream,
    source: Blocks,
    source_ids: Sequence[int],
    target: Blocks,
    target_ids: Sequence[int],
    label: str,
    layers: range = BOTH,
) -> SimFence:
    """Submit work that copies layers of `source_ids` to `target_ids`. Other work may run between two layers."""
    ids, size = list(zip(source_ids, target_ids, strict=True)), LAYOUT.layer_bytes
    batch = CopyBatch(
        source.memory,
        target.memory,
        np.array([LAYOUT.layer_span(item, layer, layer + 1)[0] for item, _ in ids for layer in layers], np.int64),
        np.array([LAYOUT.layer_span(item, layer, layer + 1)[0] for _, item in ids for layer in layers], np.int64),
        size,
    )
    return stream.submit(lambda: stream.copy(batch), batch.accesses, label=label)


def finish(device: SimDevice, *fences: SimFence) -> None:
    """Wait on the host for results, as the engine does at the commit of a step, where a wait is allowed."""
    for fence in fences:
        device.wait_host(fence, reason="step")
