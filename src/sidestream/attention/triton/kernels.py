"""The Triton kernels of paged attention. They write keys and values, attend in one pass or in splits, and combine the
splits. For long chunks, they copy KV to contiguous memory and attend over the copy. Launched by `launch` only.

A row is one request's part of the batch. A split is a part of a row's KV that one program reduces, as in FlashDecoding.
The host does no planning. Each program finds its row and its query tokens from the batch's metadata on the device, so a
captured CUDA graph serves every batch within its launch bounds. Query heads that share a KV head share a program: with
`t = BLOCK_M // GROUP` tokens per tile, line m of a tile is query token `m // GROUP`, head `m % GROUP` of the group; the
remaining lines of BLOCK_M are masked.

Latent attention (ROTATED_DIM > 0): a token has one vector for all query heads, HEAD_DIM elements of a latent and then
ROTATED_DIM elements of a rotated key. Scores are products with the whole vector; values are latents, so a tile of
latents is loaded once for both. A "KV head" is then a group of query heads.

The order of every sum is fixed, so that results are reproducible bit by bit. KV is reduced in tiles at multiples of
BLOCK_N of the row's positions. Splits begin at multiples of SPLIT_TOKENS (in a short chunk, at multiples of WIDE_TOKENS
after the first NARROW_SPLITS splits) and are combined `_CHUNK` at a time, from the first split that the query sees. A
tile in which a query sees no key changes no bit of the query's sums. So a query token's result depends on its own
position and KV, and not on the other queries of its tile, launch or batch. For the same reason, masked and unmasked
tiles compute the same expressions.

OVERLAP: a kernel's programs start while the previous kernel still runs, find their work, and then wait for the end of
that kernel (programmatic dependent launch). Before the wait they read only data written before the step's first layer.
Every program waits, even without work, because the work enqueued after the last of these kernels waits only for that
kernel.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_CHUNK = tl.constexpr(16)
_MOST_FP8 = tl.constexpr(448.0)  # the largest number of float8_e4m3fn


@triton.jit
def _stored(values, pool):
    """Keys or values in the pool's dtype. Numbers beyond float8's largest become that one; NaN stays."""
    if pool.dtype.element_ty == tl.float8e4nv:
        wide = values.to(tl.float32)
        values = tl.clamp(wide, -_MOST_FP8, _MOST_FP8, propagate_nan=tl.PropagateNan.ALL)
    return values.to(pool.dtype.element_ty)


@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=["slot_mapping", "cu_seqlens_q"],
)
def write(
    key,
    value,
    pool,
    slot_mapping,
    out,
    cu_seqlens_q,
    num_rows,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    block_stride,
    half_stride,
    offset_stride,
    head_stride,
    KV_HEADS: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Writes one token's keys and values to its slot, unless the slot is negative. If the token is padding after the
    last row, sets its output to zero. A latent is written as a key, its rotated key as a value. Grid (tokens,).
    """
    if OVERLAP:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    lane = tl.arange(0, WIDTH)
    if slot >= 0:
        base = pool + slot // BLOCK_TOKENS * block_stride + slot % BLOCK_TOKENS * offset_stride
        head, dim = lane // HEAD_DIM, lane % HEAD_DIM
        mask = lane < KV_HEADS * HEAD_DIM
        keys = tl.load(key + token * key_token_stride + head * key_head_stride + dim, mask=mask)
        tl.store(base + head * head_stride + dim, _stored(keys, pool), mask=mask)
        head, dim = lane // VALUE_DIM, lane % VALUE_DIM
        mask = lane < KV_HEADS * VALUE_DIM
        values = tl.load(value + token * value_token_stride + head * value_head_stride + dim, mask=mask)
        tl.store(base + half_stride + head * head_stride + dim, _stored(values, pool), mask=mask)
    if token >= tl.load(cu_seqlens_q + num_rows):
        for begin in range(0, OUT_WIDTH, WIDTH):
            zeros = tl.zeros([WIDTH], out.dtype.element_ty)
            tl.store(out + token * OUT_WIDTH + begin + lane, zeros, mask=begin + lane < OUT_WIDTH)


@triton.jit
def _rounded(values, like):
    """Float32 values, rounded to the dtype of `like`."""
    return values.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def _rotated(
    heads, cosines, sines, norm, eps, dims, mask, NORMED: tl.constexpr, HALF: tl.constexpr, HIGH: tl.constexpr
):  # fmt: skip
    """Both halves of heads `[LINES, PADDED_HALF]`, normalised and rotated, in float32. The second half lies HIGH behind
    the first one.
    """
    # All loads come first, so that none waits for a sum.
    low = tl.load(heads, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(heads + HIGH, mask=mask, other=0.0).to(tl.float32)
    cosine = tl.load(cosines, mask=mask, other=0.0).to(tl.float32)
    sine = tl.load(sines, mask=mask, other=0.0).to(tl.float32)
    if NORMED:
        low_weight = tl.load(norm + dims, mask=dims < HALF, other=0.0).to(tl.float32)
        high_weight = tl.load(norm + HALF + dims, mask=dims < HALF, other=0.0).to(tl.float32)
        squares = tl.sum(low * low, 1) + tl.sum(high * high, 1)
        scale = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
        low = _rounded(low_weight[None, :] * _rounded(low * scale, norm), norm)
        high = _rounded(high_weight[None, :] * _rounded(high * scale, norm), norm)
    return (
        _rounded(low * cosine, norm) - _rounded(high * sine, norm),
        _rounded(high * cosine, norm) + _rounded(low * sine, norm),
    )


@triton.jit(
    do_not_specialize=["num_rows", "tokens"],
    do_not_specialize_on_alignment=["slot_mapping", "cu_seqlens_q"],
)
def rotate_and_write(
    query,
    key,
    value,
    cos,
    sin,
    query_norm,
    key_norm,
    pool,
    slot_mapping,
    rotated,
    out,
    cu_seqlens_q,
    num_rows,
    tokens,
    eps,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    cos_stride,
    sin_stride,
    block_stride,
    half_stride,
    offset_stride,
    head_stride,
    NORMED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    LINES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Normalises and rotates queries and keys; writes the queries to `rotated`, and keys and values to the slots of
    their tokens, unless a slot is negative. For padding after the last row, sets the output to zero.

    A line is one head of one token. Grid (tiles of the lines of KV_HEADS heads, GROUP parts of the query heads, then
    keys, then values).
    """
    if OVERLAP:
        gdc_launch_dependents()
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    token, head = line // KV_HEADS, line % KV_HEADS
    dims = tl.arange(0, PADDED_HALF)
    mask = (token < tokens)[:, None] & (dims < HALF)[None, :]
    part = tl.program_id(1)
    cosines = cos + (token * cos_stride)[:, None] + dims[None, :]
    sines = sin + (token * sin_stride)[:, None] + dims[None, :]
    if part < GROUP:
        end = tl.load(cu_seqlens_q + num_rows)
        head += part * KV_HEADS
        heads = query + (token * query_token_stride + head * query_head_stride)[:, None] + dims[None, :]
        low, high = _rotated(heads, cosines, sines, query_norm, eps, dims, mask, NORMED, HALF, HALF)
        offsets = ((token * (GROUP * KV_HEADS) + head) * (2 * HALF))[:, None] + dims[None, :]
        tl.store(rotated + offsets, low.to(rotated.dtype.element_ty), mask=mask)
        tl.store(rotated + offsets + HALF, high.to(rotated.dtype.element_ty), mask=mask)
        padding = mask & (token >= end)[:, None]
        zeros = tl.zeros([LINES, PADDED_HALF], out.dtype.element_ty)
        tl.store(out + offsets, zeros, mask=padding)
        tl.store(out + offsets + HALF, zeros, mask=padding)
    else:
        slot = tl.load(slot_mapping + token, mask=token < tokens, other=-1).to(tl.int64)
        # Only stores depend on the slot, so loads do not wait for it.
        written = mask & (slot >= 0)[:, None]
        place = slot // BLOCK_TOKENS * block_stride + slot % BLOCK_TOKENS * offset_stride + head * head_stride
        places = pool + place[:, None] + dims[None, :]
        if part == GROUP:
            heads = key + (token * key_token_stride + head * key_head_stride)[:, None] + dims[None, :]
            low, high = _rotated(heads, cosines, sines, key_norm, eps, dims, mask, NORMED, HALF, HALF)
            tl.store(places, _stored(_rounded(low, value), pool), mask=written)
            tl.store(places + HALF, _stored(_rounded(high, value), pool), mask=written)
        else:
            heads = value + (token * value_token_stride + head * value_head_stride)[:, None] + dims[None, :]
            first, second = tl.load(heads, mask=mask), tl.load(heads + HALF, mask=mask)
            tl.store(places + half_stride, _stored(first, pool), mask=written)
            tl.store(places + half_stride + HALF, _stored(second, pool), mask=written)


@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=["slot_mapping", "cu_seqlens_q"],
)
def write_latents(
    unrotated, rotated, latent, key, cos, sin, norm, pool, slot_mapping, out, cu_seqlens_q, num_rows, eps,
    unrotated_token_stride, unrotated_head_stride, rotated_token_stride, rotated_head_stride, latent_stride, key_stride,
    cos_stride, sin_stride, block_stride, offset_stride,
    HEADS: tl.constexpr, PADDED_HEADS: tl.constexpr, LATENT_DIM: tl.constexpr, PADDED_LATENT: tl.constexpr,
    HALF: tl.constexpr, PADDED_HALF: tl.constexpr, STEP: tl.constexpr, HIGH: tl.constexpr, OUT_WIDTH: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Normalises a token's latent and rotates its key, and writes both to its slot, unless the slot is negative. Also
    rotates parts of its HEADS queries. If the token is padding after the last row, sets its output to zero. The pairs
    that are rotated begin STEP apart, and their elements lie HIGH apart. Grid (tokens,).
    """
    if OVERLAP:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    end = tl.load(cu_seqlens_q + num_rows)
    dims = tl.arange(0, PADDED_HALF)
    one = (dims < HALF)[None, :]
    cosines = cos + token * cos_stride + dims[None, :]
    sines = sin + token * sin_stride + dims[None, :]
    keys = key + token * key_stride + dims[None, :] * STEP
    low, high = _rotated(keys, cosines, sines, norm, eps, dims, one, False, HALF, HIGH)
    lane = tl.arange(0, PADDED_LATENT)
    inside = lane < LATENT_DIM
    weight = tl.load(norm + lane, mask=inside, other=0.0).to(tl.float32)
    values = tl.load(latent + token * latent_stride + lane, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / LATENT_DIM + eps)
    values = _rounded(weight * _rounded(values * scale, norm), norm)
    # Only stores depend on the slot, so loads do not wait for it.
    place = pool + slot // BLOCK_TOKENS * block_stride + slot % BLOCK_TOKENS * offset_stride
    tl.store(place + lane, _stored(values, pool), mask=inside & (slot >= 0))
    tl.store(place + LATENT_DIM + dims[None, :], _stored(_rounded(low, norm), pool), mask=one & (slot >= 0))
    tl.store(place + LATENT_DIM + HALF + dims[None, :], _stored(_rounded(high, norm), pool), mask=one & (slot >= 0))
    if HEADS > 0:
        head = tl.arange(0, PADDED_HEADS)[:, None]
        mask = (head < HEADS) & one
        heads = unrotated + token * unrotated_token_stride + head * unrotated_head_stride + dims[None, :] * STEP
        low, high = _rotated(heads, cosines, sines, norm, eps, dims, mask, False, HALF, HIGH)
        heads = rotated + token * rotated_token_stride + head * rotated_head_stride + dims[None, :]
        tl.store(heads, low.to(rotated.dtype.element_ty), mask=mask)
        tl.store(heads + HALF, high.to(rotated.dtype.element_ty), mask=mask)
    if token >= end:
        for begin in range(0, OUT_WIDTH, PADDED_LATENT):
            zeros = tl.zeros([PADDED_LATENT], out.dtype.element_ty)
            tl.store(out + token * OUT_WIDTH + begin + lane, zeros, mask=begin + lane < OUT_WIDTH)


@triton.jit
def _row_of_tile(tile, cu_seqlens_q, first_row, num_rows, TILE_TOKENS: tl.constexpr):
    """The row of a tile of queries, and the tile's number in the row.

    Row numbers r count from `first_row`. If row r begins s tokens after the start of the first row, it owns the tiles
    from `s // TILE_TOKENS + r` on. These are always enough tiles for the row, and at most one too many.
    """
    base = tl.load(cu_seqlens_q + first_row)
    rows_before = 0
    for begin in range(0, num_rows - first_row, 128):
        index = begin + tl.arange(0, 128)
        start = tl.load(cu_seqlens_q + first_row + index, mask=first_row + index < num_rows, other=0)
        begins_before = ((start - base) // TILE_TOKENS + index <= tile) & (first_row + index < num_rows)
        rows_before += tl.sum(begins_before.to(tl.int32))
    index = rows_before - 1
    start = tl.load(cu_seqlens_q + first_row + index)
    return first_row + index, (tile - ((start - base) // TILE_TOKENS + index)).to(tl.int32)


@triton.jit
def _split_of(position, wide_tokens, SPLIT_TOKENS: tl.constexpr, NARROW_SPLITS: tl.constexpr):
    """The split that contains a position."""
    return tl.where(
        position < NARROW_SPLITS * SPLIT_TOKENS,
        position // SPLIT_TOKENS,
        NARROW_SPLITS + (position - NARROW_SPLITS * SPLIT_TOKENS) // wide_tokens,
    )


@triton.jit
def _start_of(split, wide_tokens, SPLIT_TOKENS: tl.constexpr, NARROW_SPLITS: tl.constexpr):
    """The first position of a split."""
    return tl.where(
        split < NARROW_SPLITS,
        split * SPLIT_TOKENS,
        NARROW_SPLITS * SPLIT_TOKENS + (split - NARROW_SPLITS) * wide_tokens,
    )


@triton.jit
def _window_start(position, window, WINDOW: tl.constexpr):
    """See `sidestream_kv.kv.layout.window_start`; never negative. WINDOW: 1 for a sliding window, 2 for chunks."""
    if WINDOW == 2:
        return tl.maximum(0, position) // window * window
    return tl.maximum(0, position - window + 1)


@triton.jit
def _splits(
    query_len, kv_len, window, SPLIT_TOKENS: tl.constexpr, NARROW_SPLITS: tl.constexpr, WIDE_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr, TILE_TOKENS: tl.constexpr,
):  # fmt: skip
    """For a row: the number of query tiles, the first split that any tile sees, and the number of splits from that one
    on.
    """
    first_split = query_len * 0
    if WINDOW:
        first_split = _split_of(
            _window_start(kv_len - query_len, window, WINDOW), WIDE_TOKENS, SPLIT_TOKENS, NARROW_SPLITS
        )
    stop_split = tl.where(kv_len > 0, _split_of(kv_len - 1, WIDE_TOKENS, SPLIT_TOKENS, NARROW_SPLITS) + 1, 0)
    return tl.cdiv(query_len, TILE_TOKENS), first_split, stop_split - first_split


@triton.jit
def _splits_of_program(
    cu_seqlens_q, kv_lens, first_row, num_rows, window, SPLIT_TOKENS: tl.constexpr, NARROW_SPLITS: tl.constexpr,
    WIDE_TOKENS: tl.constexpr, WINDOW: tl.constexpr, TILE_TOKENS: tl.constexpr,
):  # fmt: skip
    """The range of splits that this program reduces, counted over all tiles of rows [first_row, num_rows): its begin,
    its end, the row of its first split, and the number of splits in earlier rows.

    The shares of two programs differ by at most one split, for any lengths of rows: all programs share a long row.
    """
    count = 0
    for begin in range(first_row, num_rows, 128):
        row_tiles, _, splits = _splits_of_rows(
            begin, cu_seqlens_q, kv_lens, num_rows, window, SPLIT_TOKENS, NARROW_SPLITS, WIDE_TOKENS, WINDOW,
            TILE_TOKENS,
        )  # fmt: skip
        count += tl.sum(row_tiles * splits)
    program, programs = tl.program_id(1), tl.num_programs(1)
    first_item = (program.to(tl.int64) * count // programs).to(tl.int32)
    stop = ((program.to(tl.int64) + 1) * count // programs).to(tl.int32)
    row, items_before, end = first_row + first_item * 0, first_item * 0, first_item * 0
    for begin in range(first_row, num_rows, 128):
        row_tiles, _, splits = _splits_of_rows(
            begin, cu_seqlens_q, kv_lens, num_rows, window, SPLIT_TOKENS, NARROW_SPLITS, WIDE_TOKENS, WINDOW,
            TILE_TOKENS,
        )  # fmt: skip
        counts = row_tiles * splits
        passed = (end + tl.cumsum(counts, 0) <= first_item) & (begin + tl.arange(0, 128) < num_rows)
        row += tl.sum(passed.to(tl.int32))
        items_before += tl.sum(tl.where(passed, counts, 0))
        end += tl.sum(counts)
    return first_item, stop, row, items_before


@triton.jit
def _splits_of_rows(
    begin, cu_seqlens_q, kv_lens, num_rows, window, SPLIT_TOKENS: tl.constexpr, NARROW_SPLITS: tl.constexpr,
    WIDE_TOKENS: tl.constexpr, WINDOW: tl.constexpr, TILE_TOKENS: tl.constexpr,
):  # fmt: skip
    """The results of `_splits` for the 128 rows from `begin` on; zeros after the last row."""
    rows = begin + tl.arange(0, 128)
    start = tl.load(cu_seqlens_q + rows, mask=rows < num_rows, other=0)
    stop = tl.load(cu_seqlens_q + rows + 1, mask=rows < num_rows, other=0)
    kv_len = tl.load(kv_lens + rows, mask=rows < num_rows, other=0)
    return _splits(
        (stop - start).to(tl.int32), kv_len.to(tl.int32), window, SPLIT_TOKENS, NARROW_SPLITS, WIDE_TOKENS, WINDOW,
        TILE_TOKENS,
    )  # fmt: skip


@triton.jit
def _blocks(table, tile, low_key, high_key, BLOCK_N: tl.constexpr, BLOCK_TOKENS: tl.constexpr):
    """The block id of each position of a KV tile, or one id if the tile is in one block; 0 for positions outside [low,
    high).
    """
    if BLOCK_TOKENS % BLOCK_N == 0:
        blocks = tl.load(table + tile // BLOCK_TOKENS, mask=tile < high_key, other=0)
    else:
        positions = tile + tl.arange(0, BLOCK_N)
        blocks = tl.load(
            table + positions // BLOCK_TOKENS, mask=(positions >= low_key) & (positions < high_key), other=0
        )
    return blocks.to(tl.int64)


@triton.jit
def _load(base, lines, dims, in_range, MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr):
    """Load a tile of keys or values, with zeros for absent tokens and for padded dimensions."""
    pointers = base + lines[:, None] + dims[None, :]
    if MASKED:
        tile = tl.load(pointers, mask=in_range[:, None] & (dims[None, :] < HEAD_DIM), other=0.0)
    elif HEAD_DIM < PADDED_DIM:
        tile = tl.load(pointers, mask=dims[None, :] < HEAD_DIM, other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def _softmax_weights(scores, max_score, weight_sum, acc, exponent):
    """Turn a tile's scores into weights, and rescale the running softmax: the highest score, the sum of weights, the
    weighted values so far.
    """
    new_max = tl.maximum(max_score, tl.max(scores, 1))
    base = tl.where(new_max == float("-inf"), 0.0, new_max)  # avoids inf - inf for a line that has seen no key yet
    weights = tl.exp2(scores * exponent - (base * exponent)[:, None])
    # Subtract before multiplying: then the result is exactly 1 if the highest score has not changed. A difference of
    # products would be fused, and the result would be 1 plus a rounding error.
    rescale = tl.exp2((max_score - base) * exponent)
    return new_max, weight_sum * rescale + tl.sum(weights, 1), acc * rescale[:, None], weights


@triton.jit
def _sink_weight(sinks, heads, max_score):
    """The weight of the heads' sinks in a running softmax, whose highest score is given in the exponent of 2."""
    return tl.exp2(tl.load(sinks + heads).to(tl.float32) * 1.4426950408889634 - max_score)


@triton.jit
def _attend_kv_tiles(
    query,
    rotated,
    max_score,
    weight_sum,
    acc,
    keys,
    values,
    table,
    begin,
    stop,
    low_key,
    high_key,
    positions,
    slope,
    window,
    cap_scale,
    exponent,
    block_stride,
    offset_stride,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    ALIBI: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROTATED_DIM: tl.constexpr,
    PADDED_ROTATED: tl.constexpr,
):
    """Add the KV tiles [begin, stop) to a running softmax: the highest score, the sum of weights, the weighted values.

    MASKED: only keys in [low, high) are read, and a query sees no key after its own position or before its window.
    Unmasked: all keys of the tiles exist, and every query sees all of them.
    """
    offsets = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, PADDED_DIM)
    # Block ids are carried from tile to tile. A lookup inside the loop would be a load that the KV loads depend on;
    # Triton would give it half of the stages, and keys and values would not be prefetched.
    blocks = _blocks(table, begin, low_key, high_key, BLOCK_N, BLOCK_TOKENS)
    for tile in range(begin, stop, BLOCK_N):
        if BLOCK_TOKENS % BLOCK_N == 0:
            lines = blocks * block_stride + (tile % BLOCK_TOKENS + offsets) * offset_stride
        else:
            lines = blocks * block_stride + (tile + offsets) % BLOCK_TOKENS * offset_stride
        blocks = _blocks(table, tile + BLOCK_N, low_key, high_key, BLOCK_N, BLOCK_TOKENS)
        in_range = (tile + offsets >= low_key) & (tile + offsets < high_key)
        k = _load(keys, lines, dims, in_range, MASKED, HEAD_DIM, PADDED_DIM).to(query.dtype)
        scores = tl.dot(query, tl.trans(k), input_precision="ieee")
        if ROTATED_DIM > 0:
            r = _load(values, lines, tl.arange(0, PADDED_ROTATED), in_range, MASKED, ROTATED_DIM, PADDED_ROTATED)
            scores = tl.dot(rotated, tl.trans(r), scores, input_precision="ieee")
        if CAPPED:  # tanh, computed with exp2; `exponent` contains the factor softcap
            scores = 1.0 - 2.0 / (1.0 + tl.exp2(scores * cap_scale))
        if ALIBI:
            scores += slope[:, None] * ((tile + offsets)[None, :] - positions[:, None]).to(tl.float32)
        if MASKED:
            key_positions = tile + offsets
            is_visible = key_positions[None, :] <= positions[:, None]
            if WINDOW:
                is_visible &= key_positions[None, :] >= _window_start(positions, window, WINDOW)[:, None]
            # Mask the raw scores, before they are multiplied: otherwise the compiler would fuse other operations than
            # in an unmasked tile, and the bits would differ.
            scores = tl.where(is_visible, scores, float("-inf"))
        max_score, weight_sum, acc, weights = _softmax_weights(scores, max_score, weight_sum, acc, exponent)
        v = k
        if ROTATED_DIM == 0:
            v = _load(values, lines, dims, in_range, MASKED, HEAD_DIM, PADDED_DIM).to(query.dtype)
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    return max_score, weight_sum, acc


@triton.jit
def _lengths(cu_seqlens_q, kv_lens, row):
    """For a row: the start of its queries in the packed tokens, their number, and the length of its KV."""
    query_start = tl.load(cu_seqlens_q + row).to(tl.int64)
    query_len = (tl.load(cu_seqlens_q + row + 1) - query_start).to(tl.int32)
    return query_start, query_len, tl.load(kv_lens + row).to(tl.int32)


@triton.jit
def _queries(
    query, query_start, query_len, kv_len, begin, line, heads, dims, window, token_stride, head_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, TILE_TOKENS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """A tile of queries of one row, from the row's query `begin` on.

    Returns, for each line of the tile: the query, its packed token, whether the line has a query, and its position.
    Then the KV range of the tile: the first query sees the keys [low, first], the last query the keys before `high`.
    """
    tokens = begin + line // GROUP
    is_query = (line < TILE_TOKENS * GROUP) & (tokens < query_len)
    at = (query_start + tokens) * token_stride + heads * head_stride
    q = tl.load(query + at[:, None] + dims[None, :], mask=is_query[:, None] & (dims[None, :] < HEAD_DIM), other=0.0)
    first = kv_len - query_len + begin
    low_key = 0
    if WINDOW:
        low_key = _window_start(first, window, WINDOW)
    return (
        q,
        query_start + tokens,
        is_query,
        kv_len - query_len + tokens,
        low_key,
        first,
        tl.minimum(first + TILE_TOKENS, kv_len),
    )


@triton.jit
def _rotated_queries(
    query, q, packed, is_query, heads, token_stride, head_stride, HEAD_DIM: tl.constexpr, ROTATED_DIM: tl.constexpr,
    PADDED_ROTATED: tl.constexpr,
):  # fmt: skip
    """The rotated parts of a tile of queries, which follow the first HEAD_DIM elements; `q` if there are none."""
    rotated = q
    if ROTATED_DIM > 0:
        dims = tl.arange(0, PADDED_ROTATED)
        at = packed * token_stride + heads * head_stride + HEAD_DIM
        mask = is_query[:, None] & (dims[None, :] < ROTATED_DIM)
        rotated = tl.load(query + at[:, None] + dims[None, :], mask=mask, other=0.0)
    return rotated


@triton.jit(
    do_not_specialize=["first_row", "num_rows", "long_above", "capacity", "table_stride"],
    do_not_specialize_on_alignment=["block_tables", "cu_seqlens_q", "kv_lens"],
)
def gather_contiguous(
    pool,
    keys,
    values,
    plan,
    block_tables,
    cu_seqlens_q,
    kv_lens,
    first_row,
    num_rows,
    long_above,
    capacity,
    table_stride,
    block_stride,
    half_stride,
    offset_stride,
    head_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROW_MULTIPLE: tl.constexpr,
):
    """Copies the KV of rows with more than `long_above` tokens, in token order, one row after another. Each row is
    padded with zeros to a multiple of ROW_MULTIPLE tokens. A row that does not fit is not copied.

    Writes to `plan`, [4, num_rows + 1], from `first_row` on: the first query of each row, the first key of its copy,
    and the numbers of its queries and keys, both 0 for a row without copy.

    Each program copies some of the tiles of one head. Grid (kv_heads, programs).
    """
    head, program, programs = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    dims = tl.arange(0, HEAD_DIM)
    copied = program * 0  # tiles of earlier rows
    for begin in range(first_row, num_rows + 1, 128):
        rows = begin + tl.arange(0, 128)
        is_row = rows < num_rows
        query_start = tl.load(cu_seqlens_q + rows, mask=rows <= num_rows, other=0).to(tl.int32)
        query_stop = tl.load(cu_seqlens_q + rows + 1, mask=is_row, other=0).to(tl.int32)
        kv_len = tl.load(kv_lens + rows, mask=is_row, other=0).to(tl.int32)
        is_long = is_row & (query_stop - query_start > long_above)
        tiles = tl.where(is_long, tl.cdiv(kv_len, ROW_MULTIPLE) * (ROW_MULTIPLE // BLOCK_N), 0)
        ends = copied + tl.cumsum(tiles, 0)
        fits = is_long & (ends * BLOCK_N <= capacity)
        if (head == 0) & (program == 0):
            column, width = plan + rows, num_rows + 1
            tl.store(column, query_start, mask=rows <= num_rows)
            tl.store(column + width, tl.minimum((ends - tiles) * BLOCK_N, capacity), mask=rows <= num_rows)
            tl.store(column + 2 * width, tl.where(fits, query_stop - query_start, 0), mask=rows <= num_rows)
            tl.store(column + 3 * width, tl.where(fits, kv_len, 0), mask=rows <= num_rows)
        stop = tl.maximum(copied, tl.max(tl.where(fits, ends, 0)))
        for item in range(copied + (program + programs - copied % programs) % programs, stop, programs):
            row = begin + tl.sum((ends <= item).to(tl.int32))
            positions = (item - tl.max(tl.where(ends <= item, ends, copied))) * BLOCK_N + tl.arange(0, BLOCK_N)
            in_range = positions < tl.load(kv_lens + row)
            table = block_tables + row.to(tl.int64) * table_stride
            blocks = tl.load(table + positions // BLOCK_TOKENS, mask=in_range, other=0).to(tl.int64)
            lines = blocks * block_stride + head * head_stride + positions % BLOCK_TOKENS * offset_stride
            pointers = pool + lines[:, None] + dims[None, :]
            out_lines = head * capacity + item * BLOCK_N + tl.arange(0, BLOCK_N)
            out_offsets = out_lines[:, None] * HEAD_DIM + dims[None, :]
            tl.store(keys + out_offsets, tl.load(pointers, mask=in_range[:, None], other=0.0))
            tl.store(values + out_offsets, tl.load(pointers + half_stride, mask=in_range[:, None], other=0.0))
        copied = stop


@triton.jit(
    do_not_specialize=["first_row", "num_rows", "capacity"],
    do_not_specialize_on_alignment=["done", "cu_seqlens_q", "kv_lens"],
)
def attend_contiguous(
    query,
    keys,
    values,
    out,
    sinks,
    done,
    cu_seqlens_q,
    kv_lens,
    first_row,
    num_rows,
    capacity,
    exponent,
    query_token_stride,
    query_head_stride,
    SINKS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Computes a tile of queries of the row of which `done` counts queries, in one pass over the contiguous KV from
    `gather_contiguous`. There is at most one such row. TMA loads whole tiles. Sums have the same terms in the same
    order as in `attend`. Grid (kv_heads, tiles).
    """
    TILE_TOKENS: tl.constexpr = BLOCK_M // GROUP
    row = -1
    for start in range(first_row, num_rows, 128):
        rows = start + tl.arange(0, 128)
        row = tl.maximum(row, tl.max(tl.where(tl.load(done + rows, mask=rows < num_rows, other=0) > 0, rows, -1)))
    if row < 0:
        return
    query_start, query_len, kv_len = _lengths(cu_seqlens_q, kv_lens, row)
    begin = (tl.num_programs(1) - 1 - tl.program_id(1)) * TILE_TOKENS  # the last tiles see the most keys: see `attend`
    if begin >= query_len:
        return
    kv_head = tl.program_id(0)
    line, dims, offsets = tl.arange(0, BLOCK_M), tl.arange(0, HEAD_DIM), tl.arange(0, BLOCK_N)
    heads = kv_head * GROUP + line % GROUP
    q, packed, is_query, positions, _, first, high_key = _queries(
        query, query_start, query_len, kv_len, begin, line, heads, dims, 0, query_token_stride, query_head_stride,
        GROUP, HEAD_DIM, TILE_TOKENS, False,
    )  # fmt: skip
    max_score = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    base = kv_head * capacity
    diagonal = (first + 1) // BLOCK_N * BLOCK_N
    for tile in range(0, diagonal, BLOCK_N):
        scores = tl.dot(q, keys.load([base + tile, 0]).T)
        max_score, weight_sum, acc, weights = _softmax_weights(scores, max_score, weight_sum, acc, exponent)
        acc = tl.dot(weights.to(q.dtype), values.load([base + tile, 0]), acc)
    for tile in range(diagonal, high_key, BLOCK_N):
        scores = tl.dot(q, keys.load([base + tile, 0]).T)
        scores = tl.where((tile + offsets)[None, :] <= positions[:, None], scores, float("-inf"))
        max_score, weight_sum, acc, weights = _softmax_weights(scores, max_score, weight_sum, acc, exponent)
        acc = tl.dot(weights.to(q.dtype), values.load([base + tile, 0]), acc)
    if SINKS:
        weight_sum += _sink_weight(sinks, heads, max_score * exponent)
    acc = acc / tl.where(weight_sum == 0.0, 1.0, weight_sum)[:, None]
    out_offsets = packed * (KV_HEADS * GROUP * HEAD_DIM) + heads * HEAD_DIM
    tl.store(out + out_offsets[:, None] + dims[None, :], acc.to(out.dtype.element_ty), mask=is_query[:, None])


@triton.jit(
    do_not_specialize=["first_row", "num_rows", "has_done", "max_splits", "window", "table_stride"],
    do_not_specialize_on_alignment=["block_tables", "cu_seqlens_q", "kv_lens", "done"],
)
def attend(
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
    done,
    first_row,
    num_rows,
    has_done,
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
    NARROW_SPLITS: tl.constexpr,
    WIDE_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    ALIBI: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROTATED_DIM: tl.constexpr,
    PADDED_ROTATED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Computes tiles of queries of the rows [first_row, num_rows), for all query heads of one KV head.

    SPLIT_TOKENS = 0   computes one tile in one pass over its KV; writes `out`. Skips a row of which `done` counts
                       queries, if `has_done`. Grid (kv_heads, tiles)
    SPLIT_TOKENS > 0   computes a share of the splits of all tiles, one split after another; writes `value_sums`,
                       `max_scores` and `weight_sums`. Grid (kv_heads, shares)
    """
    TILE_TOKENS: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(0)
    line = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, PADDED_DIM)
    heads = kv_head * GROUP + line % GROUP
    keys = pool + kv_head.to(tl.int64) * head_stride
    values = keys + half_stride
    slope = line.to(tl.float32)
    if ALIBI:  # in the units of the raw scores, of which `exponent` makes exponents of 2
        slope = tl.load(slopes + heads).to(tl.float32) * (1.4426950408889634 / exponent)
    if OVERLAP:
        gdc_launch_dependents()

    if SPLIT_TOKENS == 0:
        # The last tiles of a row see the most keys. They start first, so that no long tile runs alone at the end.
        row, row_tile = _row_of_tile(
            tl.num_programs(1) - 1 - tl.program_id(1), cu_seqlens_q, first_row, num_rows, TILE_TOKENS
        )
        query_start, query_len, kv_len = _lengths(cu_seqlens_q, kv_lens, row)
        begin = row_tile * TILE_TOKENS
        if OVERLAP:
            gdc_wait()
        if (begin >= query_len) | (tl.load(done + row, mask=has_done > 0, other=0) > 0):
            return
        q, packed, is_query, positions, low_key, first, high_key = _queries(
            query, query_start, query_len, kv_len, begin, line, heads, dims, window, query_token_stride,
            query_head_stride,
            GROUP, HEAD_DIM, TILE_TOKENS, WINDOW,
        )  # fmt: skip
        rotated = _rotated_queries(
            query, q, packed, is_query, heads, query_token_stride, query_head_stride,
            HEAD_DIM, ROTATED_DIM, PADDED_ROTATED,
        )  # fmt: skip
        table = block_tables + row.to(tl.int64) * table_stride
        max_score = tl.full([BLOCK_M], float("-inf"), tl.float32)
        weight_sum = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
        # [edge, full)       KV tiles where some query's window begins
        # [full, diagonal)   KV tiles that all queries see
        # [diagonal, high)   KV tiles with the positions of the queries
        edge = low_key // BLOCK_N * BLOCK_N
        diagonal = (first + 1) // BLOCK_N * BLOCK_N
        full = edge
        if WINDOW:
            full = tl.cdiv(_window_start(high_key - 1, window, WINDOW), BLOCK_N) * BLOCK_N
            max_score, weight_sum, acc = _attend_kv_tiles(
                q, rotated, max_score, weight_sum, acc, keys, values, table, edge, full, low_key, high_key,
                positions, slope, window, cap_scale, exponent, block_stride, offset_stride,
                True, WINDOW, CAPPED, ALIBI, BLOCK_N, BLOCK_TOKENS, HEAD_DIM, PADDED_DIM,
                ROTATED_DIM, PADDED_ROTATED,
            )  # fmt: skip
        max_score, weight_sum, acc = _attend_kv_tiles(
            q, rotated, max_score, weight_sum, acc, keys, values, table, full, diagonal, low_key, high_key,
            positions, slope, window, cap_scale, exponent, block_stride, offset_stride,
            False, WINDOW, CAPPED, ALIBI, BLOCK_N, BLOCK_TOKENS, HEAD_DIM, PADDED_DIM,
            ROTATED_DIM, PADDED_ROTATED,
        )  # fmt: skip
        max_score, weight_sum, acc = _attend_kv_tiles(
            q, rotated, max_score, weight_sum, acc, keys, values, table, tl.maximum(full, diagonal), high_key,
            low_key, high_key, positions, slope, window, cap_scale, exponent, block_stride, offset_stride,
            True, WINDOW, CAPPED, ALIBI, BLOCK_N, BLOCK_TOKENS, HEAD_DIM, PADDED_DIM,
            ROTATED_DIM, PADDED_ROTATED,
        )  # fmt: skip
        if SINKS:
            weight_sum += _sink_weight(sinks, heads, max_score * exponent)
        acc = acc / tl.where(weight_sum == 0.0, 1.0, weight_sum)[:, None]
        out_offsets = packed * (KV_HEADS * GROUP * HEAD_DIM) + heads * HEAD_DIM
        store_mask = is_query[:, None] & (dims[None, :] < HEAD_DIM)
        tl.store(out + out_offsets[:, None] + dims[None, :], acc.to(out.dtype.element_ty), mask=store_mask)
    else:
        first_item, stop, row, items_before = _splits_of_program(
            cu_seqlens_q, kv_lens, first_row, num_rows, window, SPLIT_TOKENS, NARROW_SPLITS, WIDE_TOKENS, WINDOW,
            TILE_TOKENS,
        )  # fmt: skip
        if OVERLAP:
            gdc_wait()
        for item in range(first_item, stop):
            query_start, query_len, kv_len = _lengths(cu_seqlens_q, kv_lens, row)
            row_tiles, first_split, splits = _splits(
                query_len, kv_len, window, SPLIT_TOKENS, NARROW_SPLITS, WIDE_TOKENS, WINDOW, TILE_TOKENS
            )
            while item >= items_before + row_tiles * splits:
                items_before += row_tiles * splits
                row += 1
                query_start, query_len, kv_len = _lengths(cu_seqlens_q, kv_lens, row)
                row_tiles, first_split, splits = _splits(
                    query_len, kv_len, window, SPLIT_TOKENS, NARROW_SPLITS, WIDE_TOKENS, WINDOW, TILE_TOKENS
                )
            # The tiles of a split run one after another, so the second tile finds the split's KV in the cache.
            split = first_split + (item - items_before) // row_tiles
            begin = (item - items_before) % row_tiles * TILE_TOKENS

            q, packed, is_query, positions, low_key, _, high_key = _queries(
                query, query_start, query_len, kv_len, begin, line, heads, dims, window, query_token_stride,
                query_head_stride,
                GROUP, HEAD_DIM, TILE_TOKENS, WINDOW,
            )  # fmt: skip
            rotated = _rotated_queries(
                query, q, packed, is_query, heads, query_token_stride, query_head_stride,
                HEAD_DIM, ROTATED_DIM, PADDED_ROTATED,
            )  # fmt: skip
            table = block_tables + row.to(tl.int64) * table_stride
            max_score = tl.full([BLOCK_M], float("-inf"), tl.float32)
            weight_sum = tl.zeros([BLOCK_M], tl.float32)
            acc = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
            # All KV tiles are computed as masked tiles. Masks cost nothing here, because the loop waits for memory; and
            # one loop keeps more loads in flight than three short loops.
            start = tl.maximum(_start_of(split, WIDE_TOKENS, SPLIT_TOKENS, NARROW_SPLITS), low_key // BLOCK_N * BLOCK_N)
            end = tl.minimum(_start_of(split + 1, WIDE_TOKENS, SPLIT_TOKENS, NARROW_SPLITS), high_key)
            max_score, weight_sum, acc = _attend_kv_tiles(
                q, rotated, max_score, weight_sum, acc, keys, values, table, start, end, low_key, high_key,
                positions, slope, window, cap_scale, exponent, block_stride, offset_stride,
                True, WINDOW, CAPPED, ALIBI, BLOCK_N, BLOCK_TOKENS, HEAD_DIM, PADDED_DIM,
                ROTATED_DIM, PADDED_ROTATED,
            )  # fmt: skip
            part = (packed * max_splits + split) * (KV_HEADS * GROUP) + heads
            store_mask = is_query[:, None] & (dims[None, :] < HEAD_DIM)
            tl.store(max_scores + part, max_score * exponent, mask=is_query)
            tl.store(weight_sums + part, weight_sum, mask=is_query)
            tl.store(value_sums + part[:, None] * HEAD_DIM + dims[None, :], acc, mask=store_mask)


@triton.jit(
    do_not_specialize=["num_rows", "split_rows", "max_splits", "window"],
    do_not_specialize_on_alignment=["cu_seqlens_q", "kv_lens"],
)
def combine(
    value_sums,
    max_scores,
    weight_sums,
    out,
    sinks,
    cu_seqlens_q,
    kv_lens,
    num_rows,
    split_rows,
    max_splits,
    window,
    SPLIT_TOKENS: tl.constexpr,
    NARROW_SPLITS: tl.constexpr,
    WIDE_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Combines the splits of one head of one token, from first to last. Rows from `split_rows` on have wide splits.
    Skips rows from `num_rows` on, because their KV is reduced in one pass. Grid (tokens, heads).
    """
    packed = tl.program_id(0)
    head = tl.program_id(1)
    row = packed * 0
    for begin in range(0, num_rows, 128):
        rows = begin + tl.arange(0, 128)
        stops = tl.load(cu_seqlens_q + rows + 1, mask=rows < num_rows, other=0)
        row += tl.sum(((stops <= packed) & (rows < num_rows)).to(tl.int32))
    if OVERLAP:
        gdc_wait()
    if row >= num_rows:
        return
    query_start, query_len, kv_len = _lengths(cu_seqlens_q, kv_lens, row)
    token = (packed - query_start).to(tl.int32)
    position = kv_len - query_len + token
    wide_tokens = tl.where(row < split_rows, SPLIT_TOKENS, WIDE_TOKENS)
    first, last = 0, _split_of(position, wide_tokens, SPLIT_TOKENS, NARROW_SPLITS)
    if WINDOW:
        first = _split_of(_window_start(position, window, WINDOW), wide_tokens, SPLIT_TOKENS, NARROW_SPLITS)
    dims = tl.arange(0, PADDED_DIM)
    max_score = float("-inf")
    weight_sum = 0.0
    acc = tl.zeros([PADDED_DIM], tl.float32)
    for begin in range(first, last + 1, _CHUNK):
        splits = begin + tl.arange(0, _CHUNK)
        in_range = splits <= last
        part = ((query_start + token) * max_splits + splits) * HEADS + head
        split_maxima = tl.load(max_scores + part, mask=in_range, other=float("-inf"))
        split_sums = tl.load(weight_sums + part, mask=in_range, other=0.0)
        load_mask = in_range[:, None] & (dims[None, :] < HEAD_DIM)
        values = tl.load(value_sums + part[:, None] * HEAD_DIM + dims[None, :], mask=load_mask, other=0.0)
        new_max = tl.maximum(max_score, tl.max(split_maxima, 0))
        weights = tl.exp2(split_maxima - new_max)
        rescale = tl.exp2(max_score - new_max)
        weight_sum = weight_sum * rescale + tl.sum(weights * split_sums, 0)
        acc = acc * rescale + tl.sum(weights[:, None] * values, 0)
        max_score = new_max
    if SINKS:
        weight_sum += _sink_weight(sinks, head, max_score)
    combined = (acc / tl.where(weight_sum == 0.0, 1.0, weight_sum)).to(out.dtype.element_ty)
    tl.store(out + (query_start + token) * (HEADS * HEAD_DIM) + head * HEAD_DIM + dims, combined, mask=dims < HEAD_DIM)
