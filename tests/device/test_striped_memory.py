"""Memory in several allocations, and copies of it: offsets run through the stripes, whatever a copy is cut into."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sidestream_kv.device.base import CopyBatch, Memory
from sidestream_kv.device.cpu import CpuDevice


def striped(rng: np.random.Generator, name: str, parts: int, rows: int, stripe: int) -> Memory:
    size = rows * stripe
    tensors = tuple(torch.from_numpy(rng.integers(0, 256, size, dtype=np.uint8)) for _ in range(parts))
    return Memory(name, tensors, stripe=stripe if parts > 1 else 0)


def image(memory: Memory) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """The memory's bytes in the order of their offsets, by the definition: stripe after stripe, from one part after
    another.
    """
    if len(memory.parts) == 1:
        return memory.data.numpy().copy()
    rows = [part.numpy().reshape(-1, memory.stripe) for part in memory.parts]
    return np.stack(rows, axis=1).reshape(-1).copy()


@st.composite
def copies(draw: st.DrawFn) -> tuple[CopyBatch, int]:
    stripe = draw(st.sampled_from([4, 8]))
    segment = stripe * draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    memories = []
    for name in ("source", "target"):
        parts = draw(st.sampled_from([1, 2, 3, 6]))
        rows = -(-8 * segment // (parts * stripe)) + 1
        memories.append(striped(rng, name, parts, rows * (1 if parts > 1 else 6), stripe))
    count = draw(st.integers(1, 5))
    starts = [
        rng.permutation(min(memory.num_bytes for memory in memories) // segment)[:count] * segment
        for memory in memories
    ]
    count = min(map(len, starts))
    return CopyBatch(
        memories[0], memories[1], starts[0][:count].astype(np.int64), starts[1][:count].astype(np.int64), segment
    ), segment


@settings(max_examples=150, deadline=None)
@given(copies())
def test_a_copy_moves_the_bytes_of_its_segments_and_no_others(drawn: tuple[CopyBatch, int]) -> None:
    batch, segment = drawn
    source, expected = image(batch.source), image(batch.target)
    for start, there in zip(batch.source_starts.tolist(), batch.target_starts.tolist(), strict=True):
        expected[there : there + segment] = source[start : start + segment]
    for from_, to in batch.runs():
        to.copy_(from_)
    assert np.array_equal(image(batch.target), expected)
    assert np.array_equal(image(batch.source), source)


@settings(max_examples=100, deadline=None)
@given(copies())
def test_contiguous_pieces_keep_the_bytes_in_order_and_cross_no_allocation(drawn: tuple[CopyBatch, int]) -> None:
    batch, _ = drawn
    source = image(batch.source)
    pieces = batch.contiguous()
    whole = np.concatenate([source[start : start + batch.size] for start in batch.source_starts.tolist()])
    assert np.array_equal(np.concatenate([from_.numpy() for from_, _ in pieces.segments()]), whole)
    assert pieces.num_bytes == batch.num_bytes
    for memory, starts in ((pieces.source, pieces.source_starts), (pieces.target, pieces.target_starts)):
        parts, offsets = memory.locate(starts)
        assert all(
            offset + pieces.size <= memory.parts[part].numel()
            for part, offset in zip(parts.tolist(), offsets.tolist(), strict=True)
        )


def test_a_part_of_a_batch_declares_and_moves_its_own_segments_only() -> None:
    rng = np.random.default_rng(0)
    source, target = striped(rng, "source", 3, 8, 4), striped(rng, "target", 1, 24, 4)
    starts = np.array([0, 12, 24, 36], dtype=np.int64)
    device = CpuDevice(compute_threads=1)
    stream, before = device.stream("s"), image(target)
    batch = device.prepare(CopyBatch(source, target, starts, starts[::-1].copy(), 12))
    fence = stream.submit_copy(batch, 1, 3)
    device.wait_host(fence, reason="test")
    device.close()
    assert fence.failure is None
    expected = before
    expected[24:36], expected[12:24] = image(source)[12:24], image(source)[24:36]
    assert np.array_equal(image(target), expected)
    assert [(access.memory, access.start, access.write) for access in batch.part(1, 3).accesses()] == [
        ("source", 12, False),
        ("source", 24, False),
        ("target", 24, True),
        ("target", 12, True),
    ]
