"""Triton kernels for products with the weights of experts. CUDA graphs may capture them."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["pairs", "most_tiles"])  # they differ between steps, and compiling takes long
def sort_by_expert(
    chosen, order, position, ends, tiles, pairs, most_tiles,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, PART: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A stable sort of the pairs `chosen` by expert, as a small step needs it: see `sidestream.ops.experts.Sorted`.

    Each program counts the pairs of all experts, places PART pairs and writes PART tiles. Grid (parts).
    """
    experts = tl.arange(0, PADDED)
    first = tl.program_id(0) * PART
    own = first + tl.arange(0, PART)
    mine = tl.load(chosen + own, mask=own < pairs, other=EXPERTS).to(tl.int32)
    counts = tl.zeros((PADDED,), tl.int32)
    rank = tl.zeros((PART,), tl.int32)
    for begin in range(0, pairs, CHUNK):
        other = begin + tl.arange(0, CHUNK)
        theirs = tl.load(chosen + other, mask=other < pairs, other=0).to(tl.int32)
        counts += tl.histogram(theirs, PADDED, mask=other < pairs)
        before = (theirs[None, :] == mine[:, None]) & (other[None, :] < own[:, None])
        rank += tl.sum(before.to(tl.int32), 1)
    end = tl.cumsum(counts, 0)
    start = tl.gather(end - counts, tl.minimum(mine, EXPERTS - 1), 0) + rank
    tl.store(position + own, start, mask=own < pairs)
    tl.store(order + start, own, mask=own < pairs)
    if first == 0:
        tl.store(ends + experts, end, mask=experts < EXPERTS)
    # Tile t belongs to the first expert whose tiles end behind t.
    own_tiles = (counts + ROWS - 1) // ROWS
    last_tile = tl.cumsum(own_tiles, 0)
    expert = tl.sum((last_tile[None, :] <= own[:, None]).to(tl.int32), 1)
    known = tl.minimum(expert, EXPERTS - 1)
    begin_row = tl.gather(end - counts, known, 0) + (own - tl.gather(last_tile - own_tiles, known, 0)) * ROWS
    tl.store(tiles + 3 * own, expert, mask=own < most_tiles)
    tl.store(tiles + 3 * own + 1, begin_row, mask=own < most_tiles)
    tl.store(tiles + 3 * own + 2, tl.minimum(tl.gather(end, known, 0), begin_row + ROWS), mask=own < most_tiles)


@triton.jit
def multiply_by_expert(
    states, weight, bias, order, tiles, result, divisor, inputs, outputs, state_stride, expert_stride, output_stride,
    input_stride,
    EXPERTS: tl.constexpr, SORTED: tl.constexpr, GATHER: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Products of up to ROWS sorted pairs of one expert with OUTPUTS outputs of its weight. If GATHER, the states of
    pair i are those of row `order[i] // divisor`, else those of row i. If not SORTED, each pair is a tile, and `tiles`
    has its expert. Grid (parts of the outputs, tiles).
    """
    tile = tl.program_id(1)
    begin = tile
    stop = tile + 1
    if SORTED:
        expert = tl.load(tiles + 3 * tile)
        if expert >= EXPERTS:
            return
        begin = tl.load(tiles + 3 * tile + 1)
        stop = tl.load(tiles + 3 * tile + 2)
    else:
        expert = tl.load(tiles + tile)
    pair = begin + tl.arange(0, ROWS)
    here = pair < stop
    row = pair
    if GATHER:
        if SORTED:
            row = tl.load(order + pair, mask=here, other=0)
        row = row // divisor
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = output < outputs
    column = tl.arange(0, INPUTS)
    state_at = states + row.to(tl.int64)[:, None] * state_stride
    weight_at = weight + expert.to(tl.int64) * expert_stride + output.to(tl.int64)[None, :] * output_stride
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for first in range(0, inputs, INPUTS):
        at = first + column
        there = at < inputs
        value = tl.load(state_at + at[None, :], mask=here[:, None] & there[None, :], other=0.0)
        part = tl.load(
            weight_at + at.to(tl.int64)[:, None] * input_stride, mask=inside[None, :] & there[:, None], other=0.0
        )
        total = tl.dot(value, part, total, input_precision=PRECISION)
    if BIAS:
        added = tl.load(bias + expert.to(tl.int64) * outputs + output, mask=inside, other=0.0)
        total += added.to(tl.float32)[None, :]
    tl.store(
        result + pair.to(tl.int64)[:, None] * outputs + output[None, :],
        total.to(result.dtype.element_ty), mask=here[:, None] & inside[None, :],
    )  # fmt: skip


@triton.jit
def largest_of_rows(
    scores, values, indices, width, stride, COUNT: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """The COUNT largest scores of each row in falling order, the first of equal ones first; NaN counts as infinity.
    Grid (rows).
    """
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, WIDTH)
    left = lane < width
    score = tl.load(scores + row * stride + lane, mask=left, other=float("-inf")).to(tl.float32)
    score = tl.where(score == score, score, float("inf"))
    for place in tl.static_range(COUNT):
        best = tl.max(tl.where(left, score, float("-inf")), 0)
        index = tl.min(tl.where(left & (score == best), lane, WIDTH), 0)
        tl.store(values + row * COUNT + place, best.to(values.dtype.element_ty))
        tl.store(indices + row * COUNT + place, index.to(tl.int64))
        left = left & (lane != index)


@triton.jit
def add_by_token(
    products, weights, position, result, width, weight_stride,
    SORTED: tl.constexpr, TOP: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The sum of a token's TOP products, each times its weight, for LANES outputs. Grid (tokens, parts of outputs)."""
    token = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    inside = lane < width
    total = tl.zeros((LANES,), tl.float32)
    for place in tl.static_range(TOP):
        row = token * TOP + place
        if SORTED:
            row = tl.load(position + row).to(tl.int64)
        weight = tl.load(weights + token * weight_stride + place).to(tl.float32)
        total += tl.load(products + row * width + lane, mask=inside, other=0.0).to(tl.float32) * weight
    tl.store(result + token * width + lane, total.to(result.dtype.element_ty), mask=inside)
