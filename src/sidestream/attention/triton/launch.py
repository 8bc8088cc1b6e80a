"""Launches the attention kernels of a batch on the current stream, without waits.

Called on the thread that runs the forward pass. Tests run the same launches on a CPU, in Triton's interpreter. A row is
one request's part of the batch. A split is a part of a row's KV that one program reduces, as in FlashDecoding.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from sidestream.attention.latent import LatentHeads
from sidestream.attention.rotary import LatentRotary, Rotation
from sidestream.attention.triton import flash
from sidestream.attention.triton.batch import BatchLocation
from sidestream.attention.triton.workspace import (
    LONG_TOKENS,
    ROW_MULTIPLE,
    ContiguousKV,
    SplitKVWorkspace,
    Tile,
    Tiles,
)
from sidestream.errors import ConfigError, InvariantError
from sidestream.ops.products import starts_early
from sidestream_kv.kv.layout import AttentionChunk

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_FP8 = torch.float8_e4m3fn
_MAX_HEAD_DIM = 512  # of a head, or of a latent
# Query heads of one program over latents: as many as a tile has lines. The sums of more do not fit its registers.
_LATENT_GROUP = 64

# Number of programs that share the splits: four on each of an H100's 132 multiprocessors, the most that can run at
# once. The number does not change results.
_PROGRAMS = 528

# Elements of each half of the heads that one program rotates, or copies to the pool, and its warps.
_ROTATED, _ROTATING_WARPS = 1024, 4


@dataclass(frozen=True, slots=True, eq=False)
class DeviceBatch(BatchLocation):
    """See `AttentionBatch`. Each call launches the kernels of one layer."""

    def write(self, key: torch.Tensor, value: torch.Tensor, layer: int, rotary: Rotation | None = None) -> None:
        rotate_and_write(key[:, :0], key, value, rotary, layer, self, out=torch.empty_like(key))

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        *,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        slopes: torch.Tensor | None = None,
        latent: LatentHeads | None = None,
        rotary: Rotation | None = None,
    ) -> torch.Tensor:
        absorbed = query if latent is None else latent.absorb(query, copies=rotary is None)
        attended = paged_attention(
            absorbed, key, value, layer, self, scale=scale, sliding_window=sliding_window, softcap=softcap, sinks=sinks,
            slopes=slopes, rotary=rotary, unrotated=None if latent is None else query[..., latent.key_dim :],
        )  # fmt: skip
        return attended if latent is None else latent.project(attended)


def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    batch: BatchLocation,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    rotary: Rotation | None = None,
    unrotated: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write keys and values into the pool, then attend; returns `[T, heads, head_dim]`, dense, with zeros for padding.

    query [T, heads, head_dim] · key, value [T, kv_heads, head_dim], last dimension dense, in the pool's dtype unless
    that is float8. heads is a multiple of kv_heads; query head h reads kv head h // (heads / kv_heads). A query at
    position p sees positions `(p - sliding_window, p]`. For the other options, see `Attended.attend`. scale is
    positive. Enqueues two to eight kernels on the current stream and reads nothing back, so a CUDA graph may capture
    the call. Sums are float32; float32 inputs are multiplied in float32, never in TF32.

    The exact bits of a query token's result depend on: the query, its position, its row's KV, the options, the tiles,
    the tokens per split, and unless the batch is `invariant`, whether FlashAttention-3 computes its row (by T and the
    KV of earlier rows), whether its row is reduced in splits, and whether it then counts as short. They do not depend
    otherwise on the row's other queries, on other rows, on the order of rows, B, T, the width of the block tables, the
    location of blocks, or on eager or captured launch.

    If the pool holds latents: query [T, heads, latent_dim + rotated_dim] · key, the latents [T, 1, latent_dim] · value,
    the rotated keys [T, 1, rotated_dim]; returns sums of latents, `[T, heads, latent_dim]`. With a `rotary`, the last
    part of the queries is written here, from `unrotated` [T, heads, rotated_dim].

    Raises ConfigError without triton, and for heads or latents above 512 elements, InvariantError for other shapes.
    """
    pool = batch.layer(layer)
    _check(query, key, value, pool, batch, scale)
    tokens, heads, _ = query.shape
    (kv_heads, group, head_dim, rotated_dim), pool_strides = _head_layout(query, key, value, pool)
    whole = range(batch.rows_in_splits, len(batch.kv_lens))
    tiles = batch.tiles or Tiles.default(head_dim, query.dtype, latent=rotated_dim > 0)
    out = torch.empty(tokens, heads, head_dim, dtype=query.dtype, device=query.device)
    query = rotate_and_write(query, key, value, rotary, layer, batch, out=out, unrotated=unrotated)
    if batch.invariant:
        return _attend_invariant(query, pool, out, batch, tiles.short, scale, sliding_window, softcap, sinks, slopes)
    cap_scale, exponent = _factors(scale, softcap)
    plain = sliding_window is None and softcap is None and slopes is None
    contiguous = batch.contiguous if whole and tokens >= LONG_TOKENS and plain else None
    done = _attend_contiguous(query, out, pool, sinks, whole, batch, contiguous, scale) if contiguous else None

    def attend(
        tile: Tile, grid: tuple[int, ...], rows: range, workspace: SplitKVWorkspace | None, wide_tokens: int
    ) -> None:
        parts = (
            (workspace.value_sums, workspace.max_scores, workspace.weight_sums, workspace.max_scores.shape[1])
            if workspace
            else (out, out, out, 0)
        )
        _kernels().attend[grid](
            query, pool, out, out if sinks is None else sinks, out if slopes is None else slopes, *parts[:3],
            batch.block_tables, batch.cu_seqlens_q, batch.kv_lens, batch.block_tables if done is None else done,
            rows.start, rows.stop, int(done is not None), parts[3], sliding_window or 0, cap_scale, exponent,
            batch.block_tables.stride(0), *query.stride()[:2], *pool_strides,
            SPLIT_TOKENS=workspace.tokens if workspace else 0,
            NARROW_SPLITS=workspace.narrow_splits if workspace else 0, WIDE_TOKENS=wide_tokens,
            WINDOW=_window_kind(sliding_window), CAPPED=softcap is not None, SINKS=sinks is not None,
            ALIBI=slopes is not None, KV_HEADS=kv_heads, GROUP=group, HEAD_DIM=head_dim,
            PADDED_DIM=_power_of_two(head_dim), ROTATED_DIM=rotated_dim, PADDED_ROTATED=_power_of_two(rotated_dim),
            BLOCK_TOKENS=pool.shape[2], BLOCK_M=_lines(tile, group), BLOCK_N=tile.keys, num_warps=_warps(tile, group),
            num_stages=tile.stages, **_overlap(query.device).launch_options,
        )  # fmt: skip

    if whole:
        attend(tiles.whole, (kv_heads, tokens // (_lines(tiles.whole, group) // group) + len(whole)), whole, None, 0)
    if batch.rows_in_splits and (workspace := batch.workspace):
        for tile, programs, part, wide in _parts_in_splits(batch, tiles, workspace, group=group, kv_heads=kv_heads):
            attend(tile, (kv_heads, programs), part, workspace, wide)
        _combine(out, sinks, batch, workspace, sliding_window)
    return out


def _attend_invariant(
    query: torch.Tensor,
    pool: torch.Tensor,
    out: torch.Tensor,
    batch: BatchLocation,
    tile: Tile,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
) -> torch.Tensor:
    """Compute attention of all rows in one order of sums: see `invariant_kernels`. Returns `out`."""
    if batch.workspace is None or pool.shape[1] == 1:
        raise InvariantError("attention with equal bits in every batch needs a workspace, and keys and values")
    from sidestream.attention.triton import invariant_kernels as kernels

    (tokens, heads, head_dim), kv_heads, workspace = out.shape, pool.shape[3], batch.workspace
    group = heads // kv_heads
    lines, padded_dim, max_splits = _lines(tile, group), _power_of_two(head_dim), workspace.max_scores.shape[1]
    row_tiles = tokens // (lines // group) + len(batch.kv_lens)
    splits = -(-batch.block_tables.shape[1] * pool.shape[2] // workspace.tokens)
    shares = min(splits, -(-_PROGRAMS // (kv_heads * row_tiles))) if batch.split_rows else 1
    parts = (workspace.value_sums, workspace.max_scores, workspace.weight_sums)
    options = {"WINDOW": _window_kind(sliding_window), "SINKS": sinks is not None, "SPLIT_TOKENS": workspace.tokens}
    overlap = _overlap(out.device).launch_options
    kernels.attend_in_splits[kv_heads, row_tiles, shares](
        query, pool, out, out if sinks is None else sinks, out if slopes is None else slopes, *parts,
        batch.block_tables, batch.cu_seqlens_q, batch.kv_lens, len(batch.kv_lens), batch.split_rows, max_splits,
        sliding_window or 0, *_factors(scale, softcap), batch.block_tables.stride(0), *query.stride()[:2],
        *pool.stride()[:4],
        CAPPED=softcap is not None, ALIBI=slopes is not None, KV_HEADS=kv_heads, GROUP=group, HEAD_DIM=head_dim,
        PADDED_DIM=padded_dim, BLOCK_TOKENS=pool.shape[2], BLOCK_M=lines, BLOCK_N=tile.keys,
        num_warps=_warps(tile, group) * (2 if padded_dim > 128 else 1), num_stages=tile.stages, **options, **overlap,
    )  # fmt: skip
    if batch.split_rows:
        kernels.merge[min(tokens, batch.split_rows * batch.split_queries), heads](
            *parts, out, out if sinks is None else sinks, batch.cu_seqlens_q, batch.kv_lens, batch.split_rows,
            max_splits, sliding_window or 0,
            HEADS=heads, HEAD_DIM=head_dim, PADDED_DIM=padded_dim, num_warps=1, **options, **overlap,
        )  # fmt: skip
    return out


def _parts_in_splits(
    batch: BatchLocation, tiles: Tiles, workspace: SplitKVWorkspace, *, group: int, kv_heads: int
) -> Iterator[tuple[Tile, int, range, int]]:
    """Yields the arguments of each launch for rows in splits: tile, number of programs per KV head, range of rows, and
    number of tokens per wide split.
    """
    splits = -(-batch.block_tables.shape[1] * batch.layer(0).shape[2] // workspace.tokens)
    split, short = range(batch.split_rows), range(batch.split_rows, batch.rows_in_splits)
    for tile, rows, queries, wide_tokens in (
        (tiles.split, split, batch.split_queries, workspace.tokens),
        (tiles.short, short, batch.short_queries, workspace.wide_tokens),
    ):
        if rows:
            row_tiles = -(-queries // (_lines(tile, group) // group))
            yield tile, min(-(-_PROGRAMS // kv_heads), len(rows) * row_tiles * splits), rows, wide_tokens


def _combine(
    out: torch.Tensor,
    sinks: torch.Tensor | None,
    batch: BatchLocation,
    workspace: SplitKVWorkspace,
    sliding_window: int | None,
) -> None:
    """Combine the partial results of all rows in splits."""
    _, heads, head_dim = out.shape
    _kernels().combine[(batch.tokens_in_splits, heads)](
        workspace.value_sums, workspace.max_scores, workspace.weight_sums, out, out if sinks is None else sinks,
        batch.cu_seqlens_q, batch.kv_lens,
        batch.rows_in_splits, batch.split_rows, workspace.max_scores.shape[1], sliding_window or 0,
        SPLIT_TOKENS=workspace.tokens, NARROW_SPLITS=workspace.narrow_splits, WIDE_TOKENS=workspace.wide_tokens,
        WINDOW=_window_kind(sliding_window), SINKS=sinks is not None,
        HEADS=heads, HEAD_DIM=head_dim, PADDED_DIM=_power_of_two(head_dim),
        num_warps=1, **_overlap(out.device).launch_options,
    )  # fmt: skip


def _attend_contiguous(
    query: torch.Tensor,
    out: torch.Tensor,
    pool: torch.Tensor,
    sinks: torch.Tensor | None,
    rows: range,
    batch: BatchLocation,
    contiguous: ContiguousKV,
    scale: float,
) -> torch.Tensor:
    """Compute attention of some of `rows` over a contiguous copy of their KV: with FlashAttention-3 of all rows that
    fit, else of a row with more than half of the step's tokens, if any. Returns for each row of the batch the number of
    queries that were computed: all or none; for rows before `rows`, nothing.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    tokens, heads, head_dim = query.shape
    kv_heads, capacity, _ = contiguous.keys.shape
    group, tile, tables = heads // kv_heads, contiguous.tile, batch.block_tables
    forward = contiguous.flash if sinks is None else None
    plan = torch.empty(4, rows.stop + 1, dtype=torch.int32, device=out.device)
    lengths = (batch.cu_seqlens_q, batch.kv_lens, rows.start, rows.stop)
    _kernels().gather_contiguous[(kv_heads, -(-_PROGRAMS // kv_heads))](
        pool, contiguous.keys, contiguous.values, plan, tables, *lengths, tokens // 2 if forward is None else 0,
        capacity, tables.stride(0), *pool.stride()[:4],
        HEAD_DIM=head_dim, BLOCK_TOKENS=pool.shape[2], BLOCK_N=tile.keys, ROW_MULTIPLE=ROW_MULTIPLE, num_warps=4,
    )  # fmt: skip
    if forward is not None:
        flash.attend(forward, query, contiguous.keys, contiguous.values, out, plan[:, rows.start :], scale)
        return plan[2]
    keys, values = (
        TensorDescriptor.from_tensor(part.view(-1, head_dim), [tile.keys, head_dim])
        for part in (contiguous.keys, contiguous.values)
    )
    lines = _lines(tile, group)
    _kernels().attend_contiguous[(kv_heads, tokens // (lines // group) + 1)](
        query, keys, values, out, out if sinks is None else sinks, plan[2], *lengths, capacity,
        _factors(scale, None)[1], query.stride(0), query.stride(1),
        SINKS=sinks is not None, KV_HEADS=kv_heads, GROUP=group, HEAD_DIM=head_dim, BLOCK_M=lines, BLOCK_N=tile.keys,
        num_warps=_warps(tile, group), num_stages=tile.stages,
    )  # fmt: skip
    return plan[2]


def write(key: torch.Tensor, value: torch.Tensor, layer: int, batch: BatchLocation, *, out: torch.Tensor) -> None:
    """Write keys and values, `[T, kv_heads, head_dim]`, or latents and rotated keys, into the pool, and zeros into the
    padding rows of `out`, `[T, …]`.
    """
    pool, tokens = batch.layer(layer), len(key)
    _, vectors, block_tokens, kv_heads, _ = pool.shape
    block_stride, half_stride, offset_stride, head_stride, _ = pool.stride()
    head_dim, value_dim = key.shape[2], value.shape[2]
    if vectors == 1:
        half_stride = head_dim
    batch.before_layer(layer)
    _kernels().write[(tokens,)](
        key, value, pool, batch.slot_mapping, out, batch.cu_seqlens_q, len(batch.kv_lens),
        key.stride(0), key.stride(1), value.stride(0), value.stride(1), block_stride, half_stride, offset_stride,
        head_stride,
        KV_HEADS=kv_heads, OUT_WIDTH=out[0].numel(), HEAD_DIM=head_dim, VALUE_DIM=value_dim,
        BLOCK_TOKENS=block_tokens, WIDTH=_power_of_two(kv_heads * max(head_dim, value_dim)),
        OVERLAP=_overlap(out.device).on,
    )  # fmt: skip


def rotate_and_write(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rotary: Rotation | None,
    layer: int,
    batch: BatchLocation,
    *,
    out: torch.Tensor,
    unrotated: torch.Tensor | None = None,
) -> torch.Tensor:
    """Like `write`, after norms and rotary embedding; returns the queries after them. `query` has the shape of `out`,
    or no heads. If `rotary` is None, only writes. With latents, `unrotated` [T, heads, rotated_dim] becomes the last
    part of `query`.

    Rounds where transformers' separate operations round, so results differ from theirs only by the order in which a
    norm adds its squares. Hence no fused multiply-add, which would leave out a rounding.
    """
    if rotary is None:
        write(key, value, layer, batch, out=out)
        return query
    if isinstance(rotary, LatentRotary):
        parts = value[:, :0] if unrotated is None else unrotated
        _write_latents(parts, query[..., key.shape[2] :], key, value, rotary, layer, batch, out=out)
        return query
    pool, (tokens, heads, head_dim) = batch.layer(layer), query.shape
    _check_rotary(rotary, tokens, head_dim, query.dtype)
    kv_heads, half = pool.shape[3], head_dim // 2
    padded_half = _power_of_two(half)
    lines = _ROTATED // padded_half
    rotated = torch.empty(tokens, heads, head_dim, dtype=query.dtype, device=query.device)
    query_norm, key_norm = rotary.norms or (query, key)
    batch.before_layer(layer)
    _kernels().rotate_and_write[(-(-tokens * kv_heads // lines), heads // kv_heads + 2)](
        query, key, value, rotary.cos, rotary.sin, query_norm, key_norm, pool, batch.slot_mapping, rotated, out,
        batch.cu_seqlens_q, len(batch.kv_lens), tokens, rotary.eps,
        *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], rotary.cos.stride(0), rotary.sin.stride(0),
        *pool.stride()[:4],
        NORMED=rotary.norms is not None, KV_HEADS=kv_heads, GROUP=heads // kv_heads, HALF=half, PADDED_HALF=padded_half,
        BLOCK_TOKENS=pool.shape[2], LINES=lines, OVERLAP=_overlap(out.device).on, num_warps=_ROTATING_WARPS,
        enable_fp_fusion=False,
    )  # fmt: skip
    return rotated


def _write_latents(
    unrotated: torch.Tensor,
    rotated: torch.Tensor,
    latent: torch.Tensor,
    key: torch.Tensor,
    rotary: LatentRotary,
    layer: int,
    batch: BatchLocation,
    *,
    out: torch.Tensor,
) -> None:
    """`rotate_and_write` with latents: also rotates parts of the queries from `unrotated` to `rotated`."""
    pool, (tokens, heads, width) = batch.layer(layer), unrotated.shape
    _check_rotary(rotary, tokens, width, latent.dtype)
    block_stride, _, offset_stride, _, _ = pool.stride()
    half, size = width // 2, latent.shape[2]
    batch.before_layer(layer)
    _kernels().write_latents[(tokens,)](
        unrotated, rotated, latent, key, rotary.cos, rotary.sin, rotary.norm, pool, batch.slot_mapping, out,
        batch.cu_seqlens_q, len(batch.kv_lens), rotary.eps, *unrotated.stride()[:2], *rotated.stride()[:2],
        latent.stride(0), key.stride(0), rotary.cos.stride(0), rotary.sin.stride(0), block_stride, offset_stride,
        HEADS=heads, PADDED_HEADS=_power_of_two(heads), LATENT_DIM=size, PADDED_LATENT=_power_of_two(size), HALF=half,
        PADDED_HALF=_power_of_two(half), STEP=2 if rotary.interleaved else 1, HIGH=1 if rotary.interleaved else half,
        OUT_WIDTH=out[0].numel(), BLOCK_TOKENS=pool.shape[2], OVERLAP=_overlap(out.device).on,
        num_warps=_ROTATING_WARPS, enable_fp_fusion=False,
    )  # fmt: skip


class _Heads(NamedTuple):
    """Sizes of attention for the kernels. With latents, `kv_heads` is a number of groups of query heads, which all read
    the same latents, and `head_dim` the size of a latent.
    """

    kv_heads: int
    group: int
    head_dim: int
    rotated_dim: int


def _head_layout(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pool: torch.Tensor
) -> tuple[_Heads, tuple[int, ...]]:
    """The sizes, and the pool's strides from a block to the next one, from keys to values (or from latents to rotated
    keys), from token to token and from head to head.
    """
    heads, kv_heads, (block, half, offset, head, _) = query.shape[1], pool.shape[3], pool.stride()
    if pool.shape[1] == 2:
        return _Heads(kv_heads, heads // kv_heads, query.shape[2], 0), (block, half, offset, head)
    group = max(count for count in range(1, _LATENT_GROUP + 1) if heads % count == 0)
    return _Heads(heads // group, group, key.shape[2], value.shape[2]), (block, key.shape[2], offset, 0)


class _Overlap(NamedTuple):
    """Whether a kernel may start before the previous kernel has ended, and the launch options for such a start."""

    on: bool
    launch_options: dict[str, bool]


@functools.cache
def _overlap(device: torch.device) -> _Overlap:
    """On for Hopper and later GPUs; off for older GPUs and in Triton's interpreter."""
    on = starts_early(device)
    return _Overlap(on, {"OVERLAP": on, "launch_pdl": True} if on else {"OVERLAP": False})


def _window_kind(window: int | None) -> int:
    """See `_window_start` of the kernels; 0: there is no window."""
    return 0 if window is None else 2 if isinstance(window, AttentionChunk) else 1


def _factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """Two factors: the factor of a raw score inside tanh (computed as `1 - 2 / (1 + exp2(x))`), and the factor of a
    score in `exp2` of the softmax.
    """
    if softcap is None:
        return 0.0, scale * math.log2(math.e)
    return 2 * math.log2(math.e) * scale / softcap, softcap * math.log2(math.e)


def _lines(tile: Tile, group: int) -> int:
    """Number of lines of a tile. A line is one query token in one query head. A tile holds at least one token in all
    query heads of a KV head.
    """
    return max(tile.queries, _power_of_two(group))


def _warps(tile: Tile, group: int) -> int:
    """Number of warps of a program. If the tile has more lines than `tile.queries`, this is more than `tile.warps`,
    because the sums of a thread must fit in its registers.
    """
    return max(tile.warps, min(8, tile.warps * _lines(tile, group) // tile.queries))


def _power_of_two(count: int) -> int:
    """The smallest power of two that is at least `count` and at least 16, the minimum size for `tl.dot`."""
    return max(16, 1 << (count - 1).bit_length())


def _check(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pool: torch.Tensor, batch: BatchLocation, scale: float
) -> None:
    tokens, heads, head_dim = query.shape
    vectors, kv_heads = pool.shape[1], pool.shape[3]
    size = head_dim if vectors == 2 else key.shape[2]
    if size > _MAX_HEAD_DIM:
        raise ConfigError(f"head_dim is {size}: these kernels take up to {_MAX_HEAD_DIM}")
    if vectors == 2:
        fits = key.shape == value.shape == (tokens, kv_heads, head_dim)
    else:
        fits = key.shape[:2] == value.shape[:2] == (tokens, 1) and key.shape[2] + value.shape[2] == head_dim
    if not fits or pool.shape[-1] != head_dim or heads % kv_heads:
        raise InvariantError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)} do not fit a pool of "
            f"{kv_heads} heads of {pool.shape[-1]}"
        )
    if len(batch.slot_mapping) != tokens:
        raise InvariantError(f"{tokens} query tokens, {len(batch.slot_mapping)} slots: the numbers must be equal")
    if query.dtype not in _DTYPES or not query.dtype == key.dtype == value.dtype:
        raise InvariantError(
            f"query {query.dtype}, key {key.dtype}, value {value.dtype}: one dtype of {_DTYPES} expected"
        )
    if pool.dtype not in (query.dtype, _FP8) or (pool.dtype == _FP8 and vectors == 1):
        raise InvariantError(f"the pool holds {pool.dtype}: {query.dtype} expected, or for keys and values {_FP8}")
    if not query.stride(2) == key.stride(2) == value.stride(2) == 1:
        raise InvariantError("the last dimension of query, key and value must be dense")
    if not scale > 0:
        raise InvariantError(f"scale is {scale}: it must be positive")


def _check_rotary(rotary: Rotation, tokens: int, width: int, dtype: torch.dtype) -> None:
    shape = rotary.cos.shape
    if shape != rotary.sin.shape or shape not in ((tokens, width), (tokens, width // 2)) or rotary.cos.dtype != dtype:
        raise InvariantError(
            f"rotary embeddings {tuple(shape)} in {rotary.cos.dtype} for {tokens} tokens, heads of {width} in {dtype}: "
            "equal numbers and dtypes expected"
        )


@functools.cache
def _kernels() -> Any:
    try:
        return importlib.import_module("sidestream.attention.triton.kernels")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"attention on this device needs triton, which cannot be imported ({error}): "
            "install the triton that torch requires"
        ) from error
