"""Triton kernel for LoRA adapters behind joined products. CUDA graphs may capture it."""

import triton
import triton.language as tl


@triton.jit
def add_adapters(
    product, mask, up, result, num_tokens, outputs, width, first_end, second_end,
    COLUMNS: tl.constexpr, CHUNK: tl.constexpr, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The outputs in `product`, plus the product of `up` with the columns after them that `mask` keeps. See
    `sidestream.models.joined.add_adapters`. Projections end before outputs `first_end`, `second_end` and `outputs`, all
    multiples of OUTPUTS. Grid (parts of OUTPUTS outputs, parts of TOKENS tokens).
    """
    tokens = tl.program_id(1).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    first = tl.program_id(0) * OUTPUTS
    lines = first + tl.arange(0, OUTPUTS)
    here = (tokens < num_tokens)[:, None]
    projection = (first >= first_end).to(tl.int32) + (first >= second_end).to(tl.int32)
    total = tl.load(product + tokens[:, None] * width + lines[None, :], mask=here, other=0.0).to(tl.float32)
    for begin in tl.static_range(0, COLUMNS, CHUNK):
        column = begin + tl.arange(0, CHUNK)
        inside = column < COLUMNS
        matrix = tl.load(up + lines[:, None] * COLUMNS + column[None, :], mask=inside[None, :], other=0.0)
        kept = tl.load(mask + tokens[:, None] * COLUMNS + column[None, :], mask=here & inside[None, :], other=0.0)
        small = outputs + projection * COLUMNS + column[None, :]
        value = tl.load(product + tokens[:, None] * width + small, mask=here & inside[None, :], other=0.0)
        own = (value.to(tl.float32) * kept.to(tl.float32)).to(matrix.dtype)
        total = tl.dot(own, tl.trans(matrix), total, input_precision=PRECISION)
    tl.store(result + tokens[:, None] * outputs + lines[None, :], total.to(result.dtype.element_ty), mask=here)
