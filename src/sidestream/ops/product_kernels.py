"""Triton kernels for matrix products: of one row, and of rows whose number changes no bit. CUDA graphs may capture
them.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _load_weights(at, mask, WHOLE: tl.constexpr):
    """They are read once: other data of the step is worth more in the cache."""
    if WHOLE:
        return tl.load(at, eviction_policy="evict_first")
    return tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def multiply_row(
    state, weight, bias, result, outputs, weight_stride,
    BIAS: tl.constexpr, WHOLE: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """OUTPUTS outputs of the product of one row with INPUTS inputs, plus the bias; CHUNK inputs a time. WHOLE: both
    numbers are multiples of OUTPUTS and of CHUNK. OVERLAP: the program may start before the previous kernel has ended.
    Before it waits, it reads only weights, which no kernel of the same step writes. Grid (tiles of outputs).
    """
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, CHUNK)
    inside = output < outputs
    weight_at = weight + output.to(tl.int64)[:, None] * weight_stride + column[None, :]
    part = _load_weights(weight_at, inside[:, None] & (column < INPUTS)[None, :], WHOLE)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    value = tl.load(state + column, mask=column < INPUTS, other=0.0)
    total = part.to(tl.float32) * value.to(tl.float32)[None, :]
    for begin in tl.range(CHUNK, INPUTS, CHUNK, num_stages=STAGES):
        there = begin + column < INPUTS
        part = _load_weights(weight_at + begin, inside[:, None] & there[None, :], WHOLE)
        value = tl.load(state + begin + column, mask=there, other=0.0)
        total += part.to(tl.float32) * value.to(tl.float32)[None, :]
    product = tl.sum(total, 1)
    if BIAS:
        product += tl.load(bias + output, mask=inside, other=0.0).to(tl.float32)
    tl.store(result + output, product.to(result.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def multiply(
    states, weight, bias, result, rows, outputs, inputs, state_stride, weight_stride,
    BIAS: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Products of ROWS rows with OUTPUTS outputs of the weight, plus the bias. One accumulator adds all inputs, from
    first to last. WHOLE: their number is a multiple of INPUTS. Grid (tiles); GROUP tiles of rows share parts of the
    weight, one after another.
    """
    row_tiles, output_tiles = tl.cdiv(rows, ROWS), tl.cdiv(outputs, OUTPUTS)
    in_group = GROUP * output_tiles
    first = tl.program_id(0) // in_group * GROUP
    size = tl.minimum(row_tiles - first, GROUP)
    row = (first + tl.program_id(0) % in_group % size) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(0) % in_group // size * OUTPUTS + tl.arange(0, OUTPUTS)
    here, inside = row < rows, output < outputs
    column = tl.arange(0, INPUTS)
    state_at = states + row.to(tl.int64)[:, None] * state_stride + column[None, :]
    weight_at = weight + output.to(tl.int64)[None, :] * weight_stride + column[:, None]
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for begin in range(0, inputs, INPUTS):
        if WHOLE:
            value = tl.load(state_at + begin, mask=here[:, None], other=0.0)
            part = tl.load(weight_at + begin, mask=inside[None, :], other=0.0)
        else:
            there = begin + column < inputs
            value = tl.load(state_at + begin, mask=here[:, None] & there[None, :], other=0.0)
            part = tl.load(weight_at + begin, mask=inside[None, :] & there[:, None], other=0.0)
        total = tl.dot(value, part, total, input_precision=PRECISION)
    if BIAS:
        total += tl.load(bias + output, mask=inside, other=0.0).to(tl.float32)[None, :]
    at = result + row.to(tl.int64)[:, None] * outputs + output[None, :]
    tl.store(at, total.to(result.dtype.element_ty), mask=here[:, None] & inside[None, :])
