"""Memory in several allocations, and copies of it: offsets run through the stripes, whatever a copy is cut into."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sidestream_kv.device.base import CopyBatch, Memory
from sidestream_kv.device.cpu import CpuDevice
from sidestream_kv.errors import InvariantError


def striped(rng: np.random.Generator, name: str, rows: int, *stripes: int) -> Memory:
    return Memory(
        name, tuple(torch.from_numpy(rng.integers(0, 256, rows * size, dtype=np.uint8)) for size in stripes), stripes
    )


def image(memory: Memory) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """The memory's bytes in the order of their offsets, by the definition: stripe after stripe, from one part after
    another.
    """
    if len(memory.parts) == 1:
        return memory.data.numpy().copy()
    rows = [part.numpy().reshape(-1, size) for part, size in zip(memory.parts, memory.stripes, strict=True)]
    return np.concatenate(rows, axis=1).reshape(-1)


@st.composite
def copies(draw: st.DrawFn) -> tuple[CopyBatch, int]:
    segment = 4 * draw(st.integers(1, 12))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    count = draw(st.integers(1, 5))
    memories, starts = [], []
    for name in ("source", "target"):
        stripes = draw(st.sampled_from([(4,), (8, 8), (4, 4, 4), (4,) * 6, (4, 8), (12, 4, 4), (4, 16, 8)]))
        unit = stripes[0] if len(set(stripes)) == 1 else sum(stripes)
        apart = -(-segment // unit) * unit
        memories.append(striped(rng, name, 9 * apart // sum(stripes) + 1, *stripes))
        starts.append(rng.permutation(8)[:count] * apart + 4 * draw(st.integers(0, unit // 4 - 1)))
    return CopyBatch(*memories, *starts, segment), segment


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
    *starts, sizes = batch.pieces()
    whole = np.concatenate([source[start : start + batch.size] for start in batch.source_starts.tolist()])
    assert np.array_equal(np.concatenate([from_.numpy() for from_, _ in batch.segments()]), whole)
    assert sizes.sum() == batch.num_bytes
    for memory, places in zip((batch.source, batch.target), starts, strict=True):
        parts, offsets = memory.locate(places)
        assert all(
            offset + size <= memory.parts[part].numel()
            for part, offset, size in zip(parts.tolist(), offsets.tolist(), sizes.tolist(), strict=True)
        )


def test_segments_that_would_be_cut_differently_are_refused() -> None:
    rng = np.random.default_rng(0)
    source, target = striped(rng, "kv", 4, 4, 8), striped(rng, "host", 4, 12)
    with pytest.raises(InvariantError, match="kv: the segments of a copy begin at different places"):
        CopyBatch(source, target, np.array([0, 16]), np.array([0, 12]), 12).pieces()


def test_a_part_of_a_batch_declares_and_moves_its_own_segments_only() -> None:
    rng = np.random.default_rng(0)
    source, target = striped(rng, "source", 8, 4, 4, 4), striped(rng, "target", 24, 4)
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
