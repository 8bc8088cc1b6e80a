"""The dtype that `dtype="auto"` means: a checkpoint's own, or float32 where the CPU computes too slowly in that.

Knows sizes and measured times, never a model. Called while a model loads and by `doctor`; the measurement is made once
per process.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from sidestream.device.machine import memory_bytes
from sidestream.kv.layout import DTYPE_BYTES

# bfloat16 is about twice as fast as float32 with native instructions, and 2.5 to 5 times as slow without: no measured
# CPU lay between.
_TOO_SLOW = 1.5
# Share of the machine's memory that float32 weights may take. Total memory, because free memory changes from start to
# start, and a disk tier that was written in one dtype cannot be read in another.
_SHARE = 0.5
# A chunk of a prompt through a small model's layer.
_ROWS, _IN, _OUT = 64, 512, 1024
_ROUNDS = 5
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Precision:
    """A dtype to load a model in.

    dtype    `"float32"`, `"float16"` or `"bfloat16"`
    reason   why, as the end of a sentence
    """

    dtype: str
    reason: str

    def __str__(self) -> str:
        return f"{self.dtype}, {self.reason}"


def choose_precision(asked: str, stored: str, *, weights_bytes: int, on_cpu: bool) -> Precision:
    """The dtype to serve a checkpoint in. asked: the option `dtype` · stored: the checkpoint's dtype."""
    if asked != "auto":
        return Precision(asked, "as asked")
    if stored == "float32" or stored not in DTYPE_BYTES or not on_cpu:
        return Precision(stored, "as stored")
    ratio = time_over_float32(stored)
    if ratio < _TOO_SLOW:
        return Precision(stored, f"as stored: {_comparison(stored, ratio)}")
    total, _ = memory_bytes()
    wanted = weights_bytes * DTYPE_BYTES["float32"] // DTYPE_BYTES[stored]
    if total is not None and wanted > _SHARE * total:
        return Precision(
            stored,
            f"as stored, though {_comparison(stored, ratio)}: in float32 the weights take {wanted / _GIB:.1f} GiB, "
            f"more than half of the {total / _GIB:.1f} GiB of memory",
        )
    return Precision("float32", f"not {stored} as stored: {_comparison(stored, ratio)}")


@functools.cache
def time_over_float32(dtype: str) -> float:
    """Time of a matrix product in `dtype` over that in float32, on this CPU. Takes some milliseconds, once per process.

    Measured, because oneDNN also reports dtypes as supported for which the processor has no instructions.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # how well threads share a small product is another question
    try:
        products = {name: _product(getattr(torch, name)) for name in (dtype, "float32")}
        rounds = [{name: product() for name, product in products.items()} for _ in range(_ROUNDS)]
    finally:
        torch.set_num_threads(threads)
    return min(seconds[dtype] for seconds in rounds) / min(seconds["float32"] for seconds in rounds)


def _product(dtype: torch.dtype) -> Callable[[], float]:
    """A layer's product of matrices, to be timed: seconds."""
    states, weight = torch.ones(_ROWS, _IN, dtype=dtype), torch.ones(_OUT, _IN, dtype=dtype)

    @torch.inference_mode()
    def run() -> float:
        begin_s = time.thread_time()  # a busy machine or a quota changes no choice
        functional.linear(states, weight)
        return time.thread_time() - begin_s

    run()
    return run


def _comparison(dtype: str, ratio: float) -> str:
    if ratio < 1:
        return f"this CPU multiplies {dtype} {1 / ratio:.1f} times as fast as float32"
    return f"this CPU multiplies float32 {ratio:.1f} times as fast as {dtype}"
