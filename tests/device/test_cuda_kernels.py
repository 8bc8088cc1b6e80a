"""The CUDA device's kernels, in Triton's interpreter: it runs in a process of its own, because whether to interpret is
decided at import.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

PROGRAM = """
import numpy as np, torch
from sidestream_kv.device.cuda import kernels

rng = np.random.default_rng(0)

def bytes_of(count): return torch.from_numpy(rng.integers(0, 256, count, dtype=np.uint8))

def aligned(count):
    whole = bytes_of(count + 16)
    return whole[-whole.data_ptr() % 16:][:count]

for count, shift in ((8, 0), (8, 3), (13, 0), (40_000, 0), (70_001, 1)):
    source, target = aligned(count + 64), aligned(count + 64)
    before = target.clone()
    kernels.deliver(target.data_ptr() + shift, source.data_ptr() + shift, count)
    before[shift:shift + count] = source[shift:shift + count]
    assert torch.equal(target, before), ("deliver", count, shift)
    behind = torch.tensor([16])
    kernels.deliver(target.data_ptr() + shift, source.data_ptr() + shift, count, offset_address=behind.data_ptr())
    before[shift + 16:shift + 16 + count] = source[shift:shift + count]
    assert torch.equal(target, before), ("deliver behind", count, shift)

for by_words, count in ((True, 1), (True, 5), (False, 6), (False, 2)):
    unit = 8 if by_words else 1
    source, target = aligned(600_000), aligned(600_000)
    before = target.clone()
    sizes = rng.integers(1, 5_000, count) * unit
    sizes[0] = 40_000 if by_words else 9_001
    starts = np.concatenate(([0], np.cumsum(sizes)[:-1])) + unit * np.arange(count)
    rows = (target.data_ptr() + starts, source.data_ptr() + starts[::-1] * 0 + starts, sizes)
    table = np.ascontiguousarray(np.stack(rows).astype(np.int64))
    kernels.copy_segments(table.ctypes.data, count, aligned=by_words)
    for start, size in zip(starts.tolist(), sizes.tolist()):
        before[start:start + size] = source[start:start + size]
    assert torch.equal(target, before), ("copy", by_words, count)
print("right")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_kernels_write_only_their_target_bytes() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=False, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "right\n", done.stderr[-3000:]
