"""Triton kernels for argmax, prompt lookup and forced tokens. Each of them replaces tens of small torch kernels. CUDA
graphs may capture them.

Their results are bit-equal to those of `ops/torch_ops.py`; tests compare both.
"""

import triton
import triton.language as tl

LANES = tl.constexpr(4096)
_MAXIMA = tl.constexpr(128)


@triton.jit(do_not_specialize=["parts"])
def argmax_of_parts(logits, maxima, indices, width, stride, parts):
    """First pass of argmax: the largest of `LANES` logits of a row, and its first index. The largest is infinity if a
    logit is NaN. Grid (rows, parts).
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index = part * LANES + tl.arange(0, LANES)
    value = tl.load(logits + row * stride + index, mask=index < width, other=float("-inf")).to(tl.float32)
    value = tl.where(value != value, float("inf"), value)
    largest = tl.max(value, 0)
    tl.store(maxima + row * parts + part, largest)
    tl.store(indices + row * parts + part, tl.min(tl.where((value == largest) & (index < width), index, 2147483647), 0))


@triton.jit(do_not_specialize=["parts"])
def argmax_of_maxima(maxima, indices, tokens, finite, parts):
    """Second pass of argmax: the first index of the largest logit of all parts of a row; 0 if that logit is not finite.
    Grid (rows,).
    """
    row = tl.program_id(0).to(tl.int64)
    largest, token = tl.program_id(0) * 0.0 + float("-inf"), tl.program_id(0) * 0
    for begin in range(0, parts, _MAXIMA):
        part = begin + tl.arange(0, _MAXIMA)
        value = tl.load(maxima + row * parts + part, mask=part < parts, other=float("-inf"))
        here = tl.max(value, 0)
        first = tl.min(tl.where((value == here) & (part < parts), part, 2147483647), 0)
        if here > largest:
            token = tl.load(indices + row * parts + first)
            largest = here
    is_finite = (largest < float("inf")) & (largest > float("-inf"))
    tl.store(tokens + row, tl.where(is_finite, token, 0).to(tl.int64))
    tl.store(finite + row, is_finite.to(finite.dtype.element_ty))


@triton.jit(do_not_specialize=["width", "stride", "longest", "shortest", "count"])
def match_ngram(history, rows, lengths, drafts, width, stride, longest, shortest, count):
    """Drafts by prompt lookup. Finds the longest suffix of a row's tokens that also occurs earlier, at its latest
    occurrence, and drafts the tokens that follow there. Grid (rows,).
    """
    row = tl.program_id(0).to(tl.int64)
    own = history + tl.load(rows + row) * stride
    last = tl.maximum(tl.load(lengths + row) - 1, 0)
    best = last * 0 - 1
    for begin in range(0, last, 1024):
        position = begin + tl.arange(0, 1024)
        matched = tl.zeros([1024], tl.int64)
        matches = position < last
        for back in range(longest):
            wanted = tl.load(own + tl.maximum(last - back, 0))
            there = tl.load(own + tl.maximum(position - back, 0), mask=matches, other=0)
            matches = matches & (there == wanted) & (position >= back)
            matched += matches.to(tl.int64)
        best = tl.maximum(best, tl.max(tl.where(matched >= shortest, matched * width + position, -1), 0))
    found = tl.where(best >= 0, best % width, last - 1)
    for number in range(count):
        position = found + 1 + number % (last - found)
        tl.store(drafts + row * count + number, tl.load(own + position).to(tl.int64))


@triton.jit(do_not_specialize=["drafts_stride", "forced_stride", "history_stride", "width"])
def take_forced(drafts, forced, history, slots, lengths, drafts_stride, forced_stride, history_stride, width):
    """Replace drafts by the tokens that follow in a row's table of forced tokens, if the row's last tokens are those
    before them in the table. Grid (rows,).
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    table = forced + slot * forced_stride
    start, count = tl.load(table), tl.load(table + 1)
    drawn = tl.load(lengths + row) - start
    holds = (drawn >= 0) & (drawn < count)
    for number in range(tl.where(holds, drawn, 0)):
        there = tl.load(history + slot * history_stride + start + number).to(tl.int64)
        holds = holds & (there == tl.load(table + 2 + number))
    for number in range(tl.where(holds, tl.minimum(count - drawn, width), 0)):
        tl.store(drafts + row * drafts_stride + number, tl.load(table + 2 + drawn + number))
