"""Rows of random numbers over a poisoned pool, one step of them through the kernels, and the plain formula in
float64.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from sidestream.attention.rotary import Rotary
from sidestream.attention.triton import ContiguousKV, DeviceBatch, SplitKVWorkspace, Tile, Tiles, paged_attention
from sidestream_kv.kv.layout import AttentionChunk

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYERS = 2
LAYER = 1

# Small tiles: a short row crosses many of their borders.
TILES = Tiles(Tile(32, 16, 4, 2), Tile(16, 16, 4, 2), Tile(32, 16, 4, 2))


@dataclass(frozen=True)
class Shape:
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    block_tokens: int = 16
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Options:
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    alibi: bool = False

    def slopes_of(self, heads: int) -> torch.Tensor | None:
        """A slope for each head; None: no bias by distance."""
        return torch.linspace(0.01, 1, heads, device=DEVICE) if self.alibi else None

    def sinks_of(self, heads: int) -> torch.Tensor | None:
        """A score of each head from far below to far above those of the keys; None: no sinks."""
        return torch.linspace(-3, 9, heads, device=DEVICE) if self.sinks else None


@dataclass(frozen=True)
class Row:
    """The last `len(query)` of a row's keys and values `[kv_len, kv_heads, head_dim]` are this step's."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    blocks: tuple[int, ...]

    @property
    def start(self) -> int:
        return len(self.key) - len(self.query)

    def slots(self, positions: range, block_tokens: int) -> list[int]:
        return [
            self.blocks[position // block_tokens] * block_tokens + position % block_tokens for position in positions
        ]

    def last(self, queries: int) -> Row:
        """The same row in a later step, of which only its last queries are part."""
        return replace(self, query=self.query[-queries:])

    def cut(self, kv_len: int) -> Row:
        """The same row in a step that ends earlier."""
        gone = len(self.key) - kv_len
        return replace(
            self, query=self.query[: len(self.query) - gone], key=self.key[:kv_len], value=self.value[:kv_len]
        )


@dataclass(frozen=True)
class Launch:
    """How a step is launched: nothing in here but which rows are in splits, and which of them short, may change a
    result, and that within rounding; or if it is invariant, nothing.
    """

    split_rows: int = 0
    split_queries: int = 1
    short_rows: int = 0
    short_queries: int = 1
    padded_rows: int = 0
    padded_tokens: int = 0
    wider: int = 0
    separate: bool = False
    index_dtype: torch.dtype = torch.int32
    tiles: Tiles | None = field(default=TILES)
    split_tokens: int = 64
    narrow: int = 1
    invariant: bool = False


def make_rows(lens: Sequence[tuple[int, int]], shape: Shape, seed: int = 7) -> list[Row]:
    """Rows of (queries, kv_len), their blocks scattered over one pool in which block 0 is nobody's."""
    draws = torch.Generator().manual_seed(seed)
    need = [-(-kv_len // shape.block_tokens) for _, kv_len in lens]
    free = (torch.randperm(sum(need) + 2, generator=draws) + 1).tolist()
    rows = []
    for (queries, kv_len), count in zip(lens, need, strict=True):
        query = torch.randn(queries, shape.heads, shape.head_dim, generator=draws)
        key, value = torch.randn(2, kv_len, shape.kv_heads, shape.head_dim, generator=draws)
        parts = (part.to(DEVICE, shape.dtype) for part in (query, key, value))
        rows.append(Row(*parts, tuple(free.pop() for _ in range(count))))
    return rows


def pool_for(rows: Sequence[Row], shape: Shape, options: Options) -> torch.Tensor:
    """Not a number wherever nothing may be read: other layers, free slots, this step's own, and what lies before the
    window.
    """
    blocks = 1 + max((block for row in rows for block in row.blocks), default=1)
    pool_shape = (blocks, LAYERS, 2, shape.block_tokens, shape.kv_heads, shape.head_dim)
    pool = torch.full(pool_shape, math.nan, dtype=shape.dtype, device=DEVICE)
    layer = pool[:, LAYER]
    for row in rows:
        first = 0 if options.sliding_window is None else max(0, row.start + 1 - options.sliding_window)
        if isinstance(options.sliding_window, AttentionChunk):
            first = row.start - row.start % options.sliding_window
        seen = range(first, row.start)
        if len(seen):
            slot_mapping = torch.tensor(row.slots(seen, shape.block_tokens), device=DEVICE)
            block, offset = slot_mapping // shape.block_tokens, slot_mapping % shape.block_tokens
            layer[block, 0, offset] = row.key[first : row.start]
            layer[block, 1, offset] = row.value[first : row.start]
    return pool


def make_batch(
    pool: torch.Tensor | tuple[torch.Tensor, ...],
    rows: Sequence[Row],
    shape: Shape,
    launch: Launch,
    workspace: SplitKVWorkspace | None = None,
) -> DeviceBatch:
    width = max((len(row.blocks) for row in rows), default=1) + launch.wider
    tables = torch.zeros(len(rows) + launch.padded_rows, width, dtype=launch.index_dtype)
    starts, slot_mapping = [0], []
    for index, row in enumerate(rows):
        tables[index, : len(row.blocks)] = torch.tensor(row.blocks)
        starts.append(starts[-1] + len(row.query))
        slot_mapping += row.slots(range(row.start, len(row.key)), shape.block_tokens)
    starts += starts[-1:] * launch.padded_rows
    slot_mapping += [-1] * launch.padded_tokens
    lens = [len(row.key) for row in rows] + [0] * launch.padded_rows
    if launch.split_rows + launch.short_rows + launch.invariant and workspace is None:
        workspace = SplitKVWorkspace.allocate(
            query_tokens=len(slot_mapping),
            kv_tokens=width * shape.block_tokens,
            heads=shape.heads,
            head_dim=shape.head_dim,
            device=DEVICE,
            tokens=launch.split_tokens,
            narrow_splits=launch.narrow,
        )
        for part in (workspace.value_sums, workspace.max_scores, workspace.weight_sums):
            part.fill_(math.nan)
    return DeviceBatch(
        pool,
        torch.tensor(slot_mapping, dtype=torch.int64, device=DEVICE),
        tables.to(DEVICE),
        torch.tensor(starts, dtype=launch.index_dtype, device=DEVICE),
        torch.tensor(lens, dtype=launch.index_dtype, device=DEVICE),
        split_rows=launch.split_rows,
        split_queries=launch.split_queries,
        short_rows=launch.short_rows,
        short_queries=launch.short_queries,
        workspace=workspace,
        tiles=launch.tiles,
        invariant=launch.invariant,
    )


def packed(rows: Sequence[Row], padded_tokens: int, shape: Shape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value of a step; those of padding are not a number."""
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    parts = (
        [row.query for row in rows],
        [row.key[row.start :] for row in rows],
        [row.value[row.start :] for row in rows],
    )
    padding = (
        torch.full((padded_tokens, count, shape.head_dim), math.nan, dtype=shape.dtype, device=DEVICE)
        for count in heads
    )
    query, key, value = (torch.cat([*part, pad]) for part, pad in zip(parts, padding, strict=True))
    return query, key, value


def rotary_tolerance(dtype: torch.dtype, *, normed: bool) -> float:
    """0, unless squares are added in another order, or the interpreter cuts bfloat16 off instead of rounding."""
    if dtype == torch.bfloat16 and DEVICE == "cpu":
        return 6e-2
    return 8 * torch.finfo(dtype).eps if normed else 0.0


def rotary_for(tokens: int, shape: Shape, *, normed: bool) -> Rotary:
    draws = torch.Generator().manual_seed(3)
    angles = torch.rand(tokens, shape.head_dim // 2, generator=draws) * 6
    cos, sin = (turned.repeat(1, 2).to(DEVICE, shape.dtype) for turned in (angles.cos(), angles.sin()))
    if not normed:
        return Rotary(cos, sin)
    weights = torch.rand(2, shape.head_dim, generator=draws).to(DEVICE, shape.dtype) + 0.5
    return Rotary(cos, sin, (weights[0], weights[1]), 1e-2)


def joined(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> list[torch.Tensor]:
    """The same as views of one matrix, as the product with joined weights gives them."""
    parts = (query, key, value)
    matrix = torch.cat([part.flatten(1) for part in parts], 1)
    views = matrix.split([part[0].numel() for part in parts], 1)
    return [view.unflatten(1, part.shape[1:]) for view, part in zip(views, parts, strict=True)]


def attend(
    rows: Sequence[Row],
    shape: Shape,
    options: Options | None = None,
    launch: Launch | None = None,
    pool: torch.Tensor | None = None,
    contiguous: ContiguousKV | None = None,
) -> tuple[torch.Tensor, ...]:
    """Each row's output of one step of `rows`, and that of the padding."""
    options, launch = options or Options(), launch or Launch()
    pool = pool_for(rows, shape, options) if pool is None else pool
    layers = tuple(pool[:, layer].clone() for layer in range(LAYERS)) if launch.separate else pool
    batch = replace(make_batch(layers, rows, shape, launch), contiguous=contiguous)
    out = paged_attention(
        *packed(rows, launch.padded_tokens, shape),
        LAYER,
        batch,
        scale=shape.head_dim**-0.5,
        sliding_window=options.sliding_window,
        softcap=options.softcap,
        sinks=options.sinks_of(shape.heads),
        slopes=options.slopes_of(shape.heads),
    )
    return out.split([*(len(row.query) for row in rows), launch.padded_tokens])


def plain(row: Row, options: Options) -> torch.Tensor:
    """The formula, in float64: `[queries, heads, head_dim]`."""
    group = row.query.shape[1] // row.key.shape[1]
    query = row.query.double().transpose(0, 1)
    key, value = (part.double().repeat_interleave(group, 1).transpose(0, 1) for part in (row.key, row.value))
    scores = query @ key.transpose(1, 2) * row.query.shape[2] ** -0.5
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    keys = torch.arange(len(row.key), device=key.device)
    queries = keys[row.start :, None]
    if (slopes := options.slopes_of(row.query.shape[1])) is not None:
        scores = scores + slopes.double()[:, None, None] * (keys - queries)
    hidden = keys > queries
    if isinstance(options.sliding_window, AttentionChunk):
        hidden |= keys // options.sliding_window != queries // options.sliding_window
    elif options.sliding_window is not None:
        hidden |= keys <= queries - options.sliding_window
    scores = scores.masked_fill(hidden, -math.inf)
    if (sinks := options.sinks_of(row.query.shape[1])) is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, len(row.query), 1)), -1)
    return (scores.softmax(-1)[..., : len(keys)] @ value).transpose(0, 1)


# Float32: sums of values up to 4 with weights that add up to 1, each of a few hundred terms rounded to 2**-24. The
# others round the weights and the result: 2**-11 and 2**-8 of values up to 4. A cap multiplies the rounding of tanh,
# some 2**-22, into the scores.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
CAP_TOLERANCE = 1e-6


def assert_right(rows: Sequence[Row], outputs: Sequence[torch.Tensor], options: Options) -> None:
    for row, output in zip(rows, outputs, strict=False):
        atol = TOLERANCE[output.dtype] + CAP_TOLERANCE * (options.softcap or 0)
        torch.testing.assert_close(output.double(), plain(row, options), atol=atol, rtol=0)


def random_step(draws: random.Random, longest: int, rows: int) -> tuple[list[tuple[int, int]], Launch]:
    """(queries, kv_len) of decode and verify rows, of short chunks, then of chunks and continued chunks; and a launch
    with room to spare.
    """
    split = draws.randint(0, rows)
    short = draws.choice((0, rows - split, draws.randint(0, rows - split)))
    lens = []
    for index in range(rows):
        kv_len = draws.randint(1, longest)
        queries = (
            draws.choice((1, 1, draws.randint(2, 8)))
            if index < split
            else draws.randint(1, 20 if index < split + short else kv_len)
        )
        lens.append((min(queries, kv_len), kv_len))
    launch = Launch(
        split_rows=split,
        split_queries=max((queries for queries, _ in lens[:split]), default=1) + draws.randint(0, 2),
        short_rows=short,
        short_queries=max((queries for queries, _ in lens[split : split + short]), default=1) + draws.randint(0, 2),
        padded_rows=draws.choice((0, 1, 3)),
        padded_tokens=draws.choice((0, 1, 5)),
        wider=draws.randint(0, 3),
        separate=draws.random() < 0.3,
        index_dtype=draws.choice((torch.int32, torch.int64)),
        split_tokens=draws.choice((64, 128)),
        narrow=draws.choice((1, 2, 16)),
    )
    return lens, launch
