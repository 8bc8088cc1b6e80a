"""A Triton kernel for matrix products in which the number of rows changes no bit. CUDA graphs may capture it."""

import triton
import triton.language as tl


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
