"""The Triton kernels of paged attention. They write keys and values, attend in one pass or in splits, and combine the
splits. For a long chunk, they copy its KV to contiguous memory and attend over the copy. Launched by `launch` only.

A row is one request's part of the batch. A split is a piece of a row's KV that one program reduces, as in
FlashDecoding. The host does no planning. Each program finds its row and its query tokens from the batch's metadata on
the device, so a captured CUDA graph serves every batch within its launch bounds. Query heads that share a KV head share
a program: with `t = BLOCK_M // GROUP` tokens per tile, line m of a tile is query token `m // GROUP`, head `m % GROUP`
of the group; the remaining lines of BLOCK_M are masked.

The order of every sum is fixed, so that results are reproducible bit by bit. KV is reduced in tiles at multiples of
BLOCK_N of the row's positions. Splits begin at multiples of SPLIT (in a short chunk, at multiples of WIDE after the
first NARROW splits) and are combined `_CHUNK` at a time, from the first split that the query sees. A tile in which a
query sees no key changes no bit of the query's sums. So a query token's result depends on its own position and KV, and
not on the other queries of its tile, launch or batch. For the same reason, masked and unmasked tiles compute the same
expressions.

OVERLAP: a kernel's programs start while the previous kernel still runs, find their work, and then wait for the end of
that kernel (programmatic dependent launch). Before the wait they read only data written before the step's first layer.
Every program waits, even without work, because the work enqueued after the last of these kernels waits only for that
kernel.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_CHUNK = tl.constexpr(16)


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
    BLOCK_TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Writes one token's keys and values to its slot, unless the slot is negative. If the token is padding after the
    last row, sets its output to zero. Grid (tokens,).
    """
    if OVERLAP:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    lane = tl.arange(0, WIDTH)
    if slot >= 0:
        head, dim = lane // HEAD_DIM, lane % HEAD_DIM
        real = lane < KV_HEADS * HEAD_DIM
        there = (
            pool + slot // BLOCK_TOKENS * block_stride + slot % BLOCK_TOKENS * offset_stride + head * head_stride + dim
        )
        tl.store(there, tl.load(key + token * key_token_stride + head * key_head_stride + dim, mask=real), mask=real)
        values = tl.load(value + token * value_token_stride + head * value_head_stride + dim, mask=real)
        tl.store(there + half_stride, values, mask=real)
    if token >= tl.load(cu_seqlens_q + num_rows):
        for begin in range(0, OUT_WIDTH, WIDTH):
            nothing = tl.zeros([WIDTH], out.dtype.element_ty)
            tl.store(out + token * OUT_WIDTH + begin + lane, nothing, mask=begin + lane < OUT_WIDTH)


@triton.jit
def _row_of_tile(tile, cu_seqlens_q, first_row, num_rows, TILE_TOKENS: tl.constexpr):
    """The row of a tile of queries, and the tile's number in the row.

    Row numbers r count from `first_row`. If row r begins s tokens after the start of the first row, it owns the tiles
    from `s // TILE_TOKENS + r` on. These are always enough tiles for the row, and at most one too many.
    """
    base = tl.load(cu_seqlens_q + first_row)
    before = 0
    for begin in range(0, num_rows - first_row, 128):
        index = begin + tl.arange(0, 128)
        start = tl.load(cu_seqlens_q + first_row + index, mask=first_row + index < num_rows, other=0)
        begins_here_or_before = ((start - base) // TILE_TOKENS + index <= tile) & (first_row + index < num_rows)
        before += tl.sum(begins_here_or_before.to(tl.int32))
    index = before - 1
    start = tl.load(cu_seqlens_q + first_row + index)
    return first_row + index, (tile - ((start - base) // TILE_TOKENS + index)).to(tl.int32)


@triton.jit
def _split_of(position, wide, SPLIT: tl.constexpr, NARROW: tl.constexpr):
    """The split that contains a position."""
    return tl.where(position < NARROW * SPLIT, position // SPLIT, NARROW + (position - NARROW * SPLIT) // wide)


@triton.jit
def _start_of(split, wide, SPLIT: tl.constexpr, NARROW: tl.constexpr):
    """The first position of a split."""
    return tl.where(split < NARROW, split * SPLIT, NARROW * SPLIT + (split - NARROW) * wide)


@triton.jit
def _splits(
    query_len,
    kv_len,
    window,
    SPLIT: tl.constexpr,
    NARROW: tl.constexpr,
    WIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
):
    """For a row: the number of query tiles, the first split that any tile sees, and the number of splits from that one
    on.
    """
    first_split = query_len * 0
    if WINDOW:
        first_split = _split_of(tl.maximum(0, kv_len - query_len - window + 1), WIDE, SPLIT, NARROW)
    stop_split = tl.where(kv_len > 0, _split_of(kv_len - 1, WIDE, SPLIT, NARROW) + 1, 0)
    return tl.cdiv(query_len, TILE_TOKENS), first_split, stop_split - first_split


@triton.jit
def _share(
    cu_seqlens_q,
    kv_lens,
    first_row,
    num_rows,
    window,
    SPLIT: tl.constexpr,
    NARROW: tl.constexpr,
    WIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
):
    """The range of splits that this program reduces, counted over all tiles of rows [first_row, num_rows): its begin,
    its end, the row of its first split, and the number of splits in earlier rows.

    The shares of two programs differ by at most one split, for any lengths of rows: all programs share a long row.
    """
    count = 0
    for begin in range(first_row, num_rows, 128):
        row_tiles, _, splits = _splits_of_rows(
            begin, cu_seqlens_q, kv_lens, num_rows, window, SPLIT, NARROW, WIDE, WINDOW, TILE_TOKENS
        )
        count += tl.sum(row_tiles * splits)
    share, shares = tl.program_id(1), tl.num_programs(1)
    item = (share.to(tl.int64) * count // shares).to(tl.int32)
    stop = ((share.to(tl.int64) + 1) * count // shares).to(tl.int32)
    row, before, end = first_row + item * 0, item * 0, item * 0
    for begin in range(first_row, num_rows, 128):
        row_tiles, _, splits = _splits_of_rows(
            begin, cu_seqlens_q, kv_lens, num_rows, window, SPLIT, NARROW, WIDE, WINDOW, TILE_TOKENS
        )
        counts = row_tiles * splits
        passed = (end + tl.cumsum(counts, 0) <= item) & (begin + tl.arange(0, 128) < num_rows)
        row += tl.sum(passed.to(tl.int32))
        before += tl.sum(tl.where(passed, counts, 0))
        end += tl.sum(counts)
    return item, stop, row, before


@triton.jit
def _splits_of_rows(
    begin,
    cu_seqlens_q,
    kv_lens,
    num_rows,
    window,
    SPLIT: tl.constexpr,
    NARROW: tl.constexpr,
    WIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
):
    """The results of `_splits` for the 128 rows from `begin` on; zeros after the last row."""
    rows = begin + tl.arange(0, 128)
    start = tl.load(cu_seqlens_q + rows, mask=rows < num_rows, other=0)
    stop = tl.load(cu_seqlens_q + rows + 1, mask=rows < num_rows, other=0)
    kv_len = tl.load(kv_lens + rows, mask=rows < num_rows, other=0)
    return _splits((stop - start).to(tl.int32), kv_len.to(tl.int32), window, SPLIT, NARROW, WIDE, WINDOW, TILE_TOKENS)


@triton.jit
def _blocks(table, tile, low, high, BLOCK_N: tl.constexpr, BLOCK_TOKENS: tl.constexpr):
    """The block id of each position of a KV tile, or one id if the tile is in one block; 0 for positions outside [low,
    high).
    """
    if BLOCK_TOKENS % BLOCK_N == 0:
        blocks = tl.load(table + tile // BLOCK_TOKENS, mask=tile < high, other=0)
    else:
        positions = tile + tl.arange(0, BLOCK_N)
        blocks = tl.load(table + positions // BLOCK_TOKENS, mask=(positions >= low) & (positions < high), other=0)
    return blocks.to(tl.int64)


@triton.jit
def _load(base, lines, dims, held, MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr):
    """Load a tile of keys or values, with zeros for absent tokens and for padded dimensions."""
    there = base + lines[:, None] + dims[None, :]
    if MASKED:
        tile = tl.load(there, mask=held[:, None] & (dims[None, :] < HEAD_DIM), other=0.0)
    elif HEAD_DIM < PADDED_DIM:
        tile = tl.load(there, mask=dims[None, :] < HEAD_DIM, other=0.0)
    else:
        tile = tl.load(there)
    return tile


@triton.jit
def _weigh(scores, top, total, acc, exponent):
    """Turn a tile's scores into weights, and rescale the running softmax: the highest score, the sum of weights, the
    weighted values so far.
    """
    higher = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)  # avoids inf - inf for a line that has seen no key yet
    weights = tl.exp2(scores * exponent - (base * exponent)[:, None])
    # Subtract before multiplying: then the result is exactly 1 if the highest score has not changed. A difference of
    # products would be fused, and the result would be 1 plus a rounding error.
    shrink = tl.exp2((top - base) * exponent)
    return higher, total * shrink + tl.sum(weights, 1), acc * shrink[:, None], weights


@triton.jit
def _reduce(
    query,
    top,
    total,
    acc,
    keys,
    values,
    table,
    begin,
    stop,
    low,
    high,
    positions,
    window,
    cap_scale,
    exponent,
    block_stride,
    offset_stride,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """Add the KV tiles [begin, stop) to a running softmax: the highest score, the sum of weights, the weighted values.

    MASKED: only keys in [low, high) are read, and a query sees no key after its own position or before its window.
    Unmasked: all keys of the tiles exist, and every query sees all of them.
    """
    offsets = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, PADDED_DIM)
    # Block ids are carried from tile to tile. A lookup inside the loop would be a load that the KV loads depend on;
    # Triton would give it half of the stages, and keys and values would not be prefetched.
    blocks = _blocks(table, begin, low, high, BLOCK_N, BLOCK_TOKENS)
    for tile in range(begin, stop, BLOCK_N):
        if BLOCK_TOKENS % BLOCK_N == 0:
            lines = blocks * block_stride + (tile % BLOCK_TOKENS + offsets) * offset_stride
        else:
            lines = blocks * block_stride + (tile + offsets) % BLOCK_TOKENS * offset_stride
        blocks = _blocks(table, tile + BLOCK_N, low, high, BLOCK_N, BLOCK_TOKENS)
        held = (tile + offsets >= low) & (tile + offsets < high)
        k = _load(keys, lines, dims, held, MASKED, HEAD_DIM, PADDED_DIM)
        scores = tl.dot(query, tl.trans(k), input_precision="ieee")
        if CAPPED:  # tanh, computed with exp2; `exponent` contains the factor softcap
            scores = 1.0 - 2.0 / (1.0 + tl.exp2(scores * cap_scale))
        if MASKED:
            key_positions = tile + offsets
            sees = key_positions[None, :] <= positions[:, None]
            if WINDOW:
                sees &= key_positions[None, :] > positions[:, None] - window
            # Mask the raw scores, before they are multiplied: otherwise the compiler would fuse other operations than
            # in an unmasked tile, and the bits would differ.
            scores = tl.where(sees, scores, float("-inf"))
        top, total, acc, weights = _weigh(scores, top, total, acc, exponent)
        v = _load(values, lines, dims, held, MASKED, HEAD_DIM, PADDED_DIM)
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    return top, total, acc


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
    real = (line < TILE_TOKENS * GROUP) & (tokens < query_len)
    at = (query_start + tokens) * token_stride + heads * head_stride
    q = tl.load(query + at[:, None] + dims[None, :], mask=real[:, None] & (dims[None, :] < HEAD_DIM), other=0.0)
    first = kv_len - query_len + begin
    low = 0
    if WINDOW:
        low = tl.maximum(0, first - window + 1)
    return (
        q,
        query_start + tokens,
        real,
        kv_len - query_len + tokens,
        low,
        first,
        tl.minimum(first + TILE_TOKENS, kv_len),
    )


@triton.jit
def _long_row(cu_seqlens_q, first_row, num_rows, long_above):
    """The row with more than `long_above` tokens (half of the step's tokens); -1: no row has so many."""
    row = -1
    for begin in range(first_row, num_rows, 128):
        rows = begin + tl.arange(0, 128)
        start = tl.load(cu_seqlens_q + rows, mask=rows < num_rows, other=0)
        stop = tl.load(cu_seqlens_q + rows + 1, mask=rows < num_rows, other=0)
        row = tl.maximum(row, tl.max(tl.where(stop - start > long_above, rows, -1)))
    return row


@triton.jit(
    do_not_specialize=["first_row", "num_rows", "long_above", "room", "table_stride"],
    do_not_specialize_on_alignment=["block_tables", "cu_seqlens_q", "kv_lens"],
)
def gather_contiguous(
    pool,
    keys,
    values,
    block_tables,
    cu_seqlens_q,
    kv_lens,
    first_row,
    num_rows,
    long_above,
    room,
    table_stride,
    block_stride,
    half_stride,
    offset_stride,
    head_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Copies the KV of the row with more than half of all tokens, in token order, and pads the last tile with zeros.

    Each program copies some of the tiles of one head. Grid (kv_heads, programs).
    """
    row = _long_row(cu_seqlens_q, first_row, num_rows, long_above)
    if row < 0:
        return
    head = tl.program_id(0).to(tl.int64)
    kv_len = tl.load(kv_lens + row).to(tl.int32)
    table = block_tables + row.to(tl.int64) * table_stride
    dims = tl.arange(0, HEAD_DIM)
    for number in range(tl.program_id(1), tl.cdiv(kv_len, BLOCK_N), tl.num_programs(1)):
        positions = number * BLOCK_N + tl.arange(0, BLOCK_N)
        held = positions < kv_len
        blocks = tl.load(table + positions // BLOCK_TOKENS, mask=held, other=0).to(tl.int64)
        lines = blocks * block_stride + head * head_stride + positions % BLOCK_TOKENS * offset_stride
        there = pool + lines[:, None] + dims[None, :]
        to = (head * room + positions)[:, None] * HEAD_DIM + dims[None, :]
        tl.store(keys + to, tl.load(there, mask=held[:, None], other=0.0))
        tl.store(values + to, tl.load(there + half_stride, mask=held[:, None], other=0.0))


@triton.jit(
    do_not_specialize=["first_row", "num_rows", "long_above", "room"],
    do_not_specialize_on_alignment=["cu_seqlens_q", "kv_lens"],
)
def attend_contiguous(
    query,
    keys,
    values,
    out,
    cu_seqlens_q,
    kv_lens,
    first_row,
    num_rows,
    long_above,
    room,
    exponent,
    query_token_stride,
    query_head_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Computes a tile of queries of the row with more than half of all tokens, in one pass over the contiguous KV from
    `gather_contiguous`. TMA loads whole tiles. Sums have the same terms in the same order as in `attend`. Grid
    (kv_heads, tiles).
    """
    TILE_TOKENS: tl.constexpr = BLOCK_M // GROUP
    row = _long_row(cu_seqlens_q, first_row, num_rows, long_above)
    if row < 0:
        return
    query_start, query_len, kv_len = _lengths(cu_seqlens_q, kv_lens, row)
    begin = (tl.num_programs(1) - 1 - tl.program_id(1)) * TILE_TOKENS  # the last tiles see the most keys: see `attend`
    if begin >= query_len:
        return
    kv_head = tl.program_id(0)
    line, dims, offsets = tl.arange(0, BLOCK_M), tl.arange(0, HEAD_DIM), tl.arange(0, BLOCK_N)
    heads = kv_head * GROUP + line % GROUP
    q, packed, real, positions, _, first, high = _queries(
        query, query_start, query_len, kv_len, begin, line, heads, dims, 0, query_token_stride, query_head_stride,
        GROUP, HEAD_DIM, TILE_TOKENS, False,
    )  # fmt: skip
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    base = kv_head * room
    diagonal = (first + 1) // BLOCK_N * BLOCK_N
    for tile in range(0, diagonal, BLOCK_N):
        scores = tl.dot(q, keys.load([base + tile, 0]).T)
        top, total, acc, weights = _weigh(scores, top, total, acc, exponent)
        acc = tl.dot(weights.to(q.dtype), values.load([base + tile, 0]), acc)
    for tile in range(diagonal, high, BLOCK_N):
        scores = tl.dot(q, keys.load([base + tile, 0]).T)
        scores = tl.where((tile + offsets)[None, :] <= positions[:, None], scores, float("-inf"))
        top, total, acc, weights = _weigh(scores, top, total, acc, exponent)
        acc = tl.dot(weights.to(q.dtype), values.load([base + tile, 0]), acc)
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    to = packed * (KV_HEADS * GROUP * HEAD_DIM) + heads * HEAD_DIM
    tl.store(out + to[:, None] + dims[None, :], acc.to(out.dtype.element_ty), mask=real[:, None])


@triton.jit(
    do_not_specialize=["first_row", "num_rows", "long_above", "max_splits", "window", "table_stride"],
    do_not_specialize_on_alignment=["block_tables", "cu_seqlens_q", "kv_lens"],
)
def attend(
    query,
    pool,
    out,
    sums,
    tops,
    totals,
    block_tables,
    cu_seqlens_q,
    kv_lens,
    first_row,
    num_rows,
    long_above,
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
    SPLIT: tl.constexpr,
    NARROW: tl.constexpr,
    WIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Computes tiles of queries of the rows [first_row, num_rows), for all query heads of one KV head.

    SPLIT = 0   computes one tile in one pass over its KV; writes `out`. Skips a row with more than `long_above` tokens.
                Grid (kv_heads, tiles)
    SPLIT > 0   computes a share of the splits of all tiles, one split after another; writes `sums`, `tops` and
                `totals`. Grid (kv_heads, shares)
    """
    TILE_TOKENS: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(0)
    line = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, PADDED_DIM)
    heads = kv_head * GROUP + line % GROUP
    keys = pool + kv_head.to(tl.int64) * head_stride
    values = keys + half_stride
    if OVERLAP:
        gdc_launch_dependents()

    if SPLIT == 0:
        # The last tiles of a row see the most keys. They start first, so that no long tile runs alone at the end.
        row, row_tile = _row_of_tile(
            tl.num_programs(1) - 1 - tl.program_id(1), cu_seqlens_q, first_row, num_rows, TILE_TOKENS
        )
        query_start, query_len, kv_len = _lengths(cu_seqlens_q, kv_lens, row)
        begin = row_tile * TILE_TOKENS
        if OVERLAP:
            gdc_wait()
        if (begin >= query_len) | (query_len > long_above):
            return
        q, packed, real, positions, low, first, high = _queries(
            query, query_start, query_len, kv_len, begin, line, heads, dims, window, query_token_stride,
            query_head_stride,
            GROUP, HEAD_DIM, TILE_TOKENS, WINDOW,
        )  # fmt: skip
        table = block_tables + row.to(tl.int64) * table_stride
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
        # [edge, full)       KV tiles where some query's window begins
        # [full, diagonal)   KV tiles that all queries see
        # [diagonal, high)   KV tiles with the positions of the queries
        edge = low // BLOCK_N * BLOCK_N
        diagonal = (first + 1) // BLOCK_N * BLOCK_N
        full = edge
        if WINDOW:
            full = tl.cdiv(tl.maximum(high - window, 0), BLOCK_N) * BLOCK_N
            top, total, acc = _reduce(
                q, top, total, acc, keys, values, table, edge, full, low, high, positions, window, cap_scale,
                exponent, block_stride,
                offset_stride, True, WINDOW, CAPPED, BLOCK_N, BLOCK_TOKENS, HEAD_DIM, PADDED_DIM,
            )  # fmt: skip
        top, total, acc = _reduce(
            q, top, total, acc, keys, values, table, full, diagonal, low, high, positions, window, cap_scale,
            exponent, block_stride,
            offset_stride, False, WINDOW, CAPPED, BLOCK_N, BLOCK_TOKENS, HEAD_DIM, PADDED_DIM,
        )  # fmt: skip
        top, total, acc = _reduce(
            q, top, total, acc, keys, values, table, tl.maximum(full, diagonal), high, low, high, positions, window,
            cap_scale, exponent,
            block_stride, offset_stride, True, WINDOW, CAPPED, BLOCK_N, BLOCK_TOKENS, HEAD_DIM, PADDED_DIM,
        )  # fmt: skip
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        to = packed * (KV_HEADS * GROUP * HEAD_DIM) + heads * HEAD_DIM
        there = real[:, None] & (dims[None, :] < HEAD_DIM)
        tl.store(out + to[:, None] + dims[None, :], acc.to(out.dtype.element_ty), mask=there)
    else:
        item, stop, row, before = _share(
            cu_seqlens_q, kv_lens, first_row, num_rows, window, SPLIT, NARROW, WIDE, WINDOW, TILE_TOKENS
        )
        if OVERLAP:
            gdc_wait()
        for number in range(item, stop):
            query_start, query_len, kv_len = _lengths(cu_seqlens_q, kv_lens, row)
            row_tiles, first_split, splits = _splits(
                query_len, kv_len, window, SPLIT, NARROW, WIDE, WINDOW, TILE_TOKENS
            )
            while number >= before + row_tiles * splits:
                before += row_tiles * splits
                row += 1
                query_start, query_len, kv_len = _lengths(cu_seqlens_q, kv_lens, row)
                row_tiles, first_split, splits = _splits(
                    query_len, kv_len, window, SPLIT, NARROW, WIDE, WINDOW, TILE_TOKENS
                )
            # The tiles of a split run one after another, so the second tile finds the split's KV in the cache.
            split = first_split + (number - before) // row_tiles
            begin = (number - before) % row_tiles * TILE_TOKENS

            q, packed, real, positions, low, _, high = _queries(
                query, query_start, query_len, kv_len, begin, line, heads, dims, window, query_token_stride,
                query_head_stride,
                GROUP, HEAD_DIM, TILE_TOKENS, WINDOW,
            )  # fmt: skip
            table = block_tables + row.to(tl.int64) * table_stride
            top = tl.full([BLOCK_M], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            acc = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
            # All KV tiles are computed as masked tiles. Masks cost nothing here, because the loop waits for memory; and
            # one loop keeps more loads in flight than three short loops.
            top, total, acc = _reduce(
                q, top, total, acc, keys, values, table, tl.maximum(_start_of(split, WIDE, SPLIT, NARROW),
                low // BLOCK_N * BLOCK_N),
                tl.minimum(_start_of(split + 1, WIDE, SPLIT, NARROW), high), low, high, positions, window, cap_scale,
                exponent, block_stride, offset_stride,
                True, WINDOW, CAPPED, BLOCK_N, BLOCK_TOKENS, HEAD_DIM, PADDED_DIM,
            )  # fmt: skip
            part = (packed * max_splits + split) * (KV_HEADS * GROUP) + heads
            there = real[:, None] & (dims[None, :] < HEAD_DIM)
            tl.store(tops + part, top * exponent, mask=real)
            tl.store(totals + part, total, mask=real)
            tl.store(sums + part[:, None] * HEAD_DIM + dims[None, :], acc, mask=there)


@triton.jit(
    do_not_specialize=["num_rows", "split_rows", "max_splits", "window"],
    do_not_specialize_on_alignment=["cu_seqlens_q", "kv_lens"],
)
def combine(
    sums,
    tops,
    totals,
    out,
    cu_seqlens_q,
    kv_lens,
    num_rows,
    split_rows,
    max_splits,
    window,
    SPLIT: tl.constexpr,
    NARROW: tl.constexpr,
    WIDE: tl.constexpr,
    WINDOW: tl.constexpr,
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
    wide = tl.where(row < split_rows, SPLIT, WIDE)
    first, last = 0, _split_of(position, wide, SPLIT, NARROW)
    if WINDOW:
        first = _split_of(tl.maximum(0, position - window + 1), wide, SPLIT, NARROW)
    dims = tl.arange(0, PADDED_DIM)
    top = float("-inf")
    total = 0.0
    acc = tl.zeros([PADDED_DIM], tl.float32)
    for begin in range(first, last + 1, _CHUNK):
        splits = begin + tl.arange(0, _CHUNK)
        seen = splits <= last
        part = ((query_start + token) * max_splits + splits) * HEADS + head
        heights = tl.load(tops + part, mask=seen, other=float("-inf"))
        counts = tl.load(totals + part, mask=seen, other=0.0)
        there = seen[:, None] & (dims[None, :] < HEAD_DIM)
        values = tl.load(sums + part[:, None] * HEAD_DIM + dims[None, :], mask=there, other=0.0)
        higher = tl.maximum(top, tl.max(heights, 0))
        weights = tl.exp2(heights - higher)
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(weights * counts, 0)
        acc = acc * shrink + tl.sum(weights[:, None] * values, 0)
        top = higher
    to = out + (query_start + token) * (HEADS * HEAD_DIM) + head * HEAD_DIM + dims
    tl.store(to, (acc / tl.where(total == 0.0, 1.0, total)).to(out.dtype.element_ty), mask=dims < HEAD_DIM)
