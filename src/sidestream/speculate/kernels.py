"""Kernels of drafting: each does at once what torch would launch tens of kernels for, which is what small steps are
made of. Need triton.

Launched on the current stream; nothing is read back, so they may be captured. What they compute is what the torch code
beside their callers computes, to the bit: that runs on a CPU, and is what tests hold them against.
"""

import triton
import triton.language as tl

LANES = tl.constexpr(4096)
_FEW = tl.constexpr(128)


@triton.jit(do_not_specialize=["parts"])
def largest_of_parts(logits, tops, places, width, stride, parts):
    """The largest of `LANES` logits of a row, and the first place that has it; infinity if one is no number. Grid
    (rows, parts).
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = part * LANES + tl.arange(0, LANES)
    value = tl.load(logits + row * stride + at, mask=at < width, other=float("-inf")).to(tl.float32)
    value = tl.where(value != value, float("inf"), value)
    top = tl.max(value, 0)
    tl.store(tops + row * parts + part, top)
    tl.store(places + row * parts + part, tl.min(tl.where((value == top) & (at < width), at, 2147483647), 0))


@triton.jit(do_not_specialize=["parts"])
def largest(tops, places, tokens, finite, parts):
    """The first place of the largest of all parts, 0 where that is no finite number. Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    top, place = tl.program_id(0) * 0.0 + float("-inf"), tl.program_id(0) * 0
    for begin in range(0, parts, _FEW):
        at = begin + tl.arange(0, _FEW)
        value = tl.load(tops + row * parts + at, mask=at < parts, other=float("-inf"))
        here = tl.max(value, 0)
        first = tl.min(tl.where((value == here) & (at < parts), at, 2147483647), 0)
        if here > top:
            place = tl.load(places + row * parts + first)
            top = here
    is_finite = (top < float("inf")) & (top > float("-inf"))
    tl.store(tokens + row, tl.where(is_finite, place, 0).to(tl.int64))
    tl.store(finite + row, is_finite.to(finite.dtype.element_ty))


@triton.jit(do_not_specialize=["width", "stride", "longest", "shortest", "count"])
def look_up(history, rows, lengths, drafts, width, stride, longest, shortest, count):
    """What followed the longest run of the row's last tokens that came before, the latest of equals. Grid (rows,)."""
    at = tl.program_id(0).to(tl.int64)
    own = history + tl.load(rows + at) * stride
    last = tl.maximum(tl.load(lengths + at) - 1, 0)
    best = last * 0 - 1
    for begin in range(0, last, 1024):
        place = begin + tl.arange(0, 1024)
        run = tl.zeros([1024], tl.int64)
        going_on = place < last
        for back in range(longest):
            wanted = tl.load(own + tl.maximum(last - back, 0))
            there = tl.load(own + tl.maximum(place - back, 0), mask=going_on, other=0)
            going_on = going_on & (there == wanted) & (place >= back)
            run += going_on.to(tl.int64)
        best = tl.maximum(best, tl.max(tl.where(run >= shortest, run * width + place, -1), 0))
    found = tl.where(best >= 0, best % width, last - 1)
    for number in range(count):
        place = found + 1 + number % (last - found)
        tl.store(drafts + at * count + number, tl.load(own + place).to(tl.int64))
