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
def _activated(gate, up, GATE: tl.constexpr):
    """The activation GATE of products in float32, see `sidestream.ops.experts.GATES`."""
    if GATE == "relu2":
        positive = tl.maximum(gate, 0.0)
        result = positive * positive
    elif GATE == "silu":
        result = gate * tl.sigmoid(gate) * up
    elif GATE == "gelu":
        result = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
    else:
        tl.static_assert(GATE == "clamped")
        gate = tl.minimum(gate, 7.0)
        result = gate * tl.sigmoid(1.702 * gate) * (tl.clamp(up, -7.0, 7.0) + 1.0)
    return result


@triton.jit
def activate(products, result, width, step, up_offset, GATE: tl.constexpr, LANES: tl.constexpr):
    """The activation of rows of products. Factor i is `up_offset` behind its gate `step * i`. Grid (rows, parts)."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    inside = lane < width
    gates = products + row * width * (2 if GATE != "relu2" else 1) + lane * step
    gate = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gates + up_offset, mask=inside, other=0.0).to(tl.float32)
    tl.store(result + row * width + lane, _activated(gate, up, GATE).to(result.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["pairs", "tokens", "shared_tile"])
def multiply_by_expert(
    states, weight, bias, shared, order, tiles, result, pairs, tokens, shared_tile, divisor, inputs, outputs,
    state_stride, expert_stride, output_stride, input_stride,
    EXPERTS: tl.constexpr, SORTED: tl.constexpr, GATHER: tl.constexpr, BIAS: tl.constexpr,
    GATE: tl.constexpr, ALTERNATE: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Products of up to ROWS sorted pairs of one expert with OUTPUTS outputs of its weight, and their activation. If
    GATHER, the states of pair i are those of row `order[i] // divisor`, else those of row i. If not SORTED, each pair
    is a tile, and `tiles` has its expert. The tiles from `shared_tile` on are those of all tokens, behind the pairs,
    for the expert with the weight `shared`. If ALTERNATE, gates and factors alternate in the outputs of a weight, else
    all gates come first. Grid (parts of the outputs, tiles).
    """
    tile = tl.program_id(1)
    common = tile >= shared_tile
    begin = tile
    stop = tile + 1
    if SORTED:
        expert = tl.load(tiles + 3 * tile, mask=not common, other=0)
        if expert >= EXPERTS:
            return
        begin = tl.load(tiles + 3 * tile + 1, mask=not common, other=0)
        stop = tl.load(tiles + 3 * tile + 2, mask=not common, other=0)
    else:
        expert = tl.load(tiles + tile, mask=not common, other=0)
    weight_at = weight + expert.to(tl.int64) * expert_stride
    if common:
        begin = pairs + (tile - shared_tile) * ROWS
        stop = tl.minimum(begin + ROWS, pairs + tokens)
        weight_at = shared
    pair = begin + tl.arange(0, ROWS)
    here = pair < stop
    row = pair
    if GATHER:
        if SORTED:
            row = tl.load(order + pair, mask=here & (pair < pairs), other=0)
        row = tl.where(pair < pairs, row // divisor, pair - pairs)
    place = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = place < outputs
    output = place
    if GATE != "" and GATE != "relu2" and not ALTERNATE:
        output = place % 2 * (outputs // 2) + place // 2
    column = tl.arange(0, INPUTS)
    state_at = states + row.to(tl.int64)[:, None] * state_stride
    weights_at = weight_at + output.to(tl.int64)[None, :] * output_stride
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for first in range(0, inputs, INPUTS):
        at = first + column
        there = at < inputs
        value = tl.load(state_at + at[None, :], mask=here[:, None] & there[None, :], other=0.0)
        part = tl.load(
            weights_at + at.to(tl.int64)[:, None] * input_stride, mask=inside[None, :] & there[:, None], other=0.0
        )
        total = tl.dot(value, part, total, input_precision=PRECISION)
    if BIAS:
        added = tl.load(bias + expert.to(tl.int64) * outputs + output, mask=inside, other=0.0)
        total += added.to(tl.float32)[None, :]
    if GATE != "":  # of rounded products, as those of separate operations
        total = total.to(result.dtype.element_ty).to(tl.float32)
    if GATE == "relu2":
        total = _activated(total, total, GATE)
    elif GATE != "":
        gates, factors = tl.split(tl.reshape(total, (ROWS, OUTPUTS // 2, 2)))
        total = _activated(gates, factors, GATE)
    width = outputs * total.shape[1] // OUTPUTS
    lane = tl.program_id(0) * total.shape[1] + tl.arange(0, total.shape[1])
    tl.store(
        result + pair.to(tl.int64)[:, None] * width + lane[None, :],
        total.to(result.dtype.element_ty), mask=here[:, None] & (lane < width)[None, :],
    )  # fmt: skip


@triton.jit
def largest_of_rows(
    logits, correction, values, indices, width, stride, scale,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, PLACES: tl.constexpr, SCORE: tl.constexpr, CORRECTED: tl.constexpr,
    NORMALISED: tl.constexpr,
):  # fmt: skip
    """The COUNT largest scores of each row in falling order, the first of equal ones first; NaN counts as infinity. A
    score is the logit, or SCORE of the row. If CORRECTED, the order is that of scores plus `correction`. If NORMALISED,
    the values are divided by their sum. They are multiplied by `scale`. Grid (rows).
    """
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, WIDTH)
    left = lane < width
    score = tl.load(logits + row * stride + lane, mask=left, other=float("-inf")).to(tl.float32)
    if SCORE == "softmax":
        score = tl.exp(score - tl.max(score, 0))
        score = score / tl.sum(score, 0)
    elif SCORE == "sigmoid":
        score = tl.sigmoid(score)
    rank = score
    if CORRECTED:
        rank += tl.load(correction + lane, mask=left, other=0.0)
    rank = tl.where(rank == rank, rank, float("inf"))
    places = tl.arange(0, PLACES)
    value = tl.zeros((PLACES,), tl.float32)
    found = tl.zeros((PLACES,), tl.int64)
    for place in tl.static_range(COUNT):
        best = tl.max(tl.where(left, rank, float("-inf")), 0)
        index = tl.min(tl.where(left & (rank == best), lane, WIDTH), 0)
        left = left & (lane != index)
        if CORRECTED:
            best = tl.sum(tl.where(lane == index, score, 0.0), 0)
        value = tl.where(places == place, best, value)
        found = tl.where(places == place, index.to(tl.int64), found)
    if NORMALISED:
        value = value / tl.sum(value, 0)
    at = row * COUNT + places
    tl.store(values + at, (value * scale).to(values.dtype.element_ty), mask=places < COUNT)
    tl.store(indices + at, found, mask=places < COUNT)


@triton.jit(do_not_specialize=["pairs"])
def add_by_token(
    products, weights, position, added, result, pairs, width, weight_stride,
    SORTED: tl.constexpr, SHARED: tl.constexpr, ADDED: tl.constexpr, TOP: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The sum of a token's TOP products, each times its weight, for LANES outputs. If SHARED, plus the token's product
    behind those of the pairs. If ADDED, rounded and plus `added`. Grid (tokens, parts of outputs).
    """
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
    if SHARED:
        total += tl.load(products + (pairs + token) * width + lane, mask=inside, other=0.0).to(tl.float32)
    if ADDED:
        total = total.to(result.dtype.element_ty).to(tl.float32)
        total += tl.load(added + token * width + lane, mask=inside, other=0.0).to(tl.float32)
    tl.store(result + token * width + lane, total.to(result.dtype.element_ty), mask=inside)
