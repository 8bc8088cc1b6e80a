"""The Triton kernels of attention whose bits are the same for decode rows and for chunks (docs/decisions/0074).
Launched by `launch` only.

KV of every row is reduced in splits at multiples of SPLIT_TOKENS positions, and the splits are merged one after
another, from the first one that a query sees. Decode rows share their splits among programs, and `merge` merges them; a
program of a chunk merges them itself. One compiled kernel computes the splits of both, and both merge by `_merged`,
whose additions are fused with multiplications explicitly, so that no compiler can choose to fuse others.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sidestream.attention.triton.kernels import _attend_kv_tiles, _lengths, _queries, _row_of_tile, _window_start


@triton.jit
def _merged(max_score, weight_sum, acc, split_max, split_sum, split_acc, IN_TILE: tl.constexpr):
    """The running softmax after one more split; unchanged by a split without visible keys. Highest scores are in
    exponents of 2. IN_TILE: of all lines of a tile, else of one.
    """
    new_max = tl.maximum(max_score, split_max)
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    rescale = tl.exp2(max_score - base)
    weight = tl.exp2(split_max - base)
    seen = split_max > float("-inf")
    weight_sum = tl.where(seen, tl.fma(weight, split_sum, weight_sum * rescale), weight_sum)
    if IN_TILE:
        acc = tl.where(seen[:, None], tl.fma(weight[:, None], split_acc, acc * rescale[:, None]), acc)
    else:
        acc = tl.where(seen, tl.fma(weight, split_acc, acc * rescale), acc)
    return new_max, weight_sum, acc


@triton.jit
def _divided(acc, weight_sum):
    """The weighted values of a finished softmax."""
    return tl.div_rn(acc, tl.where(weight_sum == 0.0, 1.0, weight_sum) + acc * 0.0)


@triton.jit
def _with_sink(weight_sum, sinks, heads, max_score):
    """The sum of weights with that of the heads' sinks."""
    sink = tl.load(sinks + heads).to(tl.float32)
    return weight_sum + tl.exp2(tl.fma(sink, 1.4426950408889634, -max_score))


@triton.jit(
    do_not_specialize=["num_rows", "split_rows", "max_splits", "window", "table_stride"],
    do_not_specialize_on_alignment=["block_tables", "cu_seqlens_q", "kv_lens"],
)
def attend_in_splits(
    query,
    pool,
    out,
    sinks,
    slopes,
    value_sums,
    max_scores,
    weight_sums,
    block_tables,
    cu_seqlens_q,
    kv_lens,
    num_rows,
    split_rows,
    max_splits,
    window,
    cap_scale,
    exponent,
    table_stride,
    query_token_stride,
    query_head_stride,
    block_stride,
    half_stride,
    offset_stride,
    head_stride,
    SPLIT_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    ALIBI: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Computes a tile of queries of one row, for all query heads of one KV head. Of the first `split_rows` rows, every
    program of a tile computes a share of the splits, and writes `value_sums`, `max_scores` and `weight_sums`; of other
    rows, the first one computes all splits, and writes `out`. Grid (kv_heads, tiles, shares).
    """
    TILE_TOKENS: tl.constexpr = BLOCK_M // GROUP
    if OVERLAP:
        gdc_launch_dependents()
    kv_head, share, shares = tl.program_id(0), tl.program_id(2), tl.num_programs(2)
    # The last tiles of a row see the most keys. They start first, so that no long tile runs alone at the end.
    row, row_tile = _row_of_tile(tl.num_programs(1) - 1 - tl.program_id(1), cu_seqlens_q, 0, num_rows, TILE_TOKENS)
    query_start, query_len, kv_len = _lengths(cu_seqlens_q, kv_lens, row)
    begin = row_tile * TILE_TOKENS
    is_split = row < split_rows
    if OVERLAP:
        gdc_wait()
    if (begin >= query_len) | ((share > 0) & (row >= split_rows)):
        return
    line, dims = tl.arange(0, BLOCK_M), tl.arange(0, PADDED_DIM)
    heads = kv_head * GROUP + line % GROUP
    keys = pool + kv_head.to(tl.int64) * head_stride
    slope = line.to(tl.float32)
    if ALIBI:  # in the units of the raw scores, of which `exponent` makes exponents of 2
        slope = tl.load(slopes + heads).to(tl.float32) * (1.4426950408889634 / exponent)
    q, packed, is_query, positions, low_key, _, high_key = _queries(
        query, query_start, query_len, kv_len, begin, line, heads, dims, window, query_token_stride, query_head_stride,
        GROUP, HEAD_DIM, TILE_TOKENS, WINDOW,
    )  # fmt: skip
    table = block_tables + row.to(tl.int64) * table_stride
    max_score = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
    is_stored = is_query[:, None] & (dims[None, :] < HEAD_DIM)
    first_split = low_key // SPLIT_TOKENS + tl.where(is_split, share, 0)
    for split in range(first_split, tl.cdiv(high_key, SPLIT_TOKENS), tl.where(is_split, shares, 1)):
        split_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        split_sum = tl.zeros([BLOCK_M], tl.float32)
        split_acc = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
        start = tl.maximum(split * SPLIT_TOKENS, low_key // BLOCK_N * BLOCK_N)
        split_max, split_sum, split_acc = _attend_kv_tiles(
            q, q, split_max, split_sum, split_acc, keys, keys + half_stride, table, start,
            tl.minimum((split + 1) * SPLIT_TOKENS, high_key), low_key, high_key, positions, slope, window, cap_scale,
            exponent, block_stride, offset_stride,
            True, WINDOW, CAPPED, ALIBI, BLOCK_N, BLOCK_TOKENS, HEAD_DIM, PADDED_DIM, 0, 16,
        )  # fmt: skip
        split_max = split_max * exponent
        part = (packed * max_splits + split) * (KV_HEADS * GROUP) + heads
        tl.store(max_scores + part, split_max, mask=is_query & is_split)
        tl.store(weight_sums + part, split_sum, mask=is_query & is_split)
        tl.store(value_sums + part[:, None] * HEAD_DIM + dims[None, :], split_acc, mask=is_stored & is_split)
        max_score, weight_sum, acc = _merged(max_score, weight_sum, acc, split_max, split_sum, split_acc, True)
    if SINKS:
        weight_sum = _with_sink(weight_sum, sinks, heads, max_score)
    result = _divided(acc, weight_sum[:, None]).to(out.dtype.element_ty)
    offsets = packed * (KV_HEADS * GROUP * HEAD_DIM) + heads * HEAD_DIM
    tl.store(out + offsets[:, None] + dims[None, :], result, mask=is_stored & (row >= split_rows))


@triton.jit(
    do_not_specialize=["split_rows", "max_splits", "window"],
    do_not_specialize_on_alignment=["cu_seqlens_q", "kv_lens"],
)
def merge(
    value_sums,
    max_scores,
    weight_sums,
    out,
    sinks,
    cu_seqlens_q,
    kv_lens,
    split_rows,
    max_splits,
    window,
    SPLIT_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Merges the splits of one head of one token of the first `split_rows` rows. Grid (tokens, heads)."""
    packed, head = tl.program_id(0), tl.program_id(1)
    row = packed * 0
    for begin in range(0, split_rows, 128):
        rows = begin + tl.arange(0, 128)
        stops = tl.load(cu_seqlens_q + rows + 1, mask=rows < split_rows, other=0)
        row += tl.sum(((stops <= packed) & (rows < split_rows)).to(tl.int32))
    if OVERLAP:
        gdc_wait()
    if row >= split_rows:
        return
    query_start, query_len, kv_len = _lengths(cu_seqlens_q, kv_lens, row)
    position = kv_len - query_len + (packed - query_start).to(tl.int32)
    first = 0
    if WINDOW:
        first = _window_start(position, window, WINDOW) // SPLIT_TOKENS
    dims = tl.arange(0, PADDED_DIM)
    max_score, weight_sum = float("-inf"), 0.0
    acc = tl.zeros([PADDED_DIM], tl.float32)
    for split in range(first, position // SPLIT_TOKENS + 1):
        part = (packed.to(tl.int64) * max_splits + split) * HEADS + head
        values = tl.load(value_sums + part * HEAD_DIM + dims, mask=dims < HEAD_DIM, other=0.0)
        max_score, weight_sum, acc = _merged(
            max_score, weight_sum, acc, tl.load(max_scores + part), tl.load(weight_sums + part), values, False
        )
    if SINKS:
        weight_sum = _with_sink(weight_sum, sinks, head, max_score)
    result = _divided(acc, weight_sum).to(out.dtype.element_ty)
    tl.store(out + (packed.to(tl.int64) * HEADS + head) * HEAD_DIM + dims, result, mask=dims < HEAD_DIM)
