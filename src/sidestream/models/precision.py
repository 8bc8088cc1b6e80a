"""Chooses the dtype for `dtype="auto"`: the checkpoint's dtype, or float32 if the CPU is too slow with that dtype.

Knows sizes and measured times, not models. Called by `sidestream doctor` and while a model loads. Measures once per
process.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from sidestream_kv.device.machine import memory_bytes
from sidestream_kv.kv.layout import DTYPE_BYTES

# Largest accepted time relative to float32. On CPUs with native instructions, bfloat16 is about twice as fast as
# float32; on other CPUs, it is slower by a factor of 2.5 to 5. No measured CPU was in between.
_TOO_SLOW = 1.5
# Share of the machine's total memory that float32 weights may take. The choice must not depend on free memory, which
# differs between starts: KV that was written to disk in one dtype cannot be read in another.
_SHARE = 0.5
# Sizes of the measured matrix product: a prompt chunk in a layer of a small model.
_ROWS, _IN, _OUT = 64, 512, 1024
_ROUNDS = 5
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Precision:
    """A dtype for loading a model.

    dtype    `"float32"`, `"float16"` or `"bfloat16"`
    reason   the reason, as the end of a sentence
    """

    dtype: str
    reason: str

    def __str__(self) -> str:
        return f"{self.dtype}, {self.reason}"


def choose_precision(asked: str, stored: str, *, weights_bytes: int, on_cpu: bool) -> Precision:
    """The dtype for serving a checkpoint. `asked` is the option `dtype`, and `stored` is the checkpoint's dtype."""
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
    """Time of a matrix product in `dtype` divided by its time in float32, on this CPU. Takes some milliseconds, once
    per process.

    The time is measured, because oneDNN reports dtypes as supported even if the processor has no instructions for them.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # with several threads, the time would depend on how well a small product scales
    try:
        products = {name: _product(getattr(torch, name)) for name in (dtype, "float32")}
        rounds = [{name: product() for name, product in products.items()} for _ in range(_ROUNDS)]
    finally:
        torch.set_num_threads(threads)
    return min(seconds[dtype] for seconds in rounds) / min(seconds["float32"] for seconds in rounds)


def _product(dtype: torch.dtype) -> Callable[[], float]:
    """A function that runs a matrix product of a layer and returns its time in seconds."""
    states, weight = torch.ones(_ROWS, _IN, dtype=dtype), torch.ones(_OUT, _IN, dtype=dtype)

    @torch.inference_mode()
    def run() -> float:
        begin_s = time.thread_time()  # CPU time, so that a busy machine or a quota does not affect the choice
        functional.linear(states, weight)
        return time.thread_time() - begin_s

    run()
    return run


def _comparison(dtype: str, ratio: float) -> str:
    if ratio < 1:
        return f"this CPU multiplies {dtype} {1 / ratio:.1f} times as fast as float32"
    return f"this CPU multiplies float32 {ratio:.1f} times as fast as {dtype}"
