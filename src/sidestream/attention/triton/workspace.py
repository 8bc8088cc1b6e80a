"""The memory and the tile shapes of kernel launches: workspace of the splits, contiguous KV of a long chunk.

Holds tensors and launches nothing. Made when an engine is built; used on the stream that owns the forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from sidestream.attention.interface import KVShape
from sidestream.device.kinds import on_host
from sidestream.errors import ConfigError, InvariantError

LONG_TOKENS = 512
"""In steps of at least this many tokens, a row with more than half of them is computed over contiguous KV."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Shape of one program's work.

    queries   query tokens times query heads of a group, a power of two of at least 16
    keys      KV tokens per iteration, a power of two of at least 16
    warps     warps of the program
    stages    iterations whose KV loads are in flight at once
    """

    queries: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tile shapes for rows in one pass, for rows in splits, and for short chunks in splits. The exact bits of results
    depend on them, so an engine chooses them once.
    """

    whole: Tile
    split: Tile
    short: Tile

    @classmethod
    def default(cls, head_dim: int, dtype: torch.dtype) -> Tiles:
        """Tiles for an H100's shared memory and registers; small tiles for float32, which does not use tensor cores."""
        if dtype == torch.float32:
            side, warps = (32, 4) if head_dim <= 64 else (32, 8) if head_dim <= 128 else (16, 8)
            return cls(Tile(side, side, warps, 1), Tile(16, side, warps, 1), Tile(side, side, warps, 1))
        if head_dim > 128:
            return cls(Tile(128, 64, 8, 2), Tile(16, 32, 4, 3), Tile(64, 32, 4, 2))
        return cls(Tile(128, 64, 8, 3), Tile(16, 32, 2, 3), Tile(64, 32, 4, 3))


@dataclass(frozen=True, slots=True, eq=False)
class SplitKVWorkspace:
    """Split-KV workspace: the partial results of rows whose KV is reduced in splits. Allocated once, shared by all
    layers and steps of a stream.

    tokens        KV tokens per split: splits begin at multiples of it
    narrow, wide  in a short chunk, all splits after the first `narrow` ones have `wide` KV tokens, because each query
    writes partial sums for every split
    sums          float32 [T, splits, heads, head_dim]; T: largest number of packed query tokens. There are enough
                  splits for the longest row
    tops, totals  float32 [T, splits, heads]
    """

    tokens: int
    narrow: int
    wide: int
    sums: torch.Tensor
    tops: torch.Tensor
    totals: torch.Tensor

    @classmethod
    def allocate(
        cls,
        *,
        query_tokens: int,
        kv_tokens: int,
        heads: int,
        head_dim: int,
        device: torch.device | str,
        tokens: int = 256,
        narrow: int = 16,
        also: KVShape | None = None,
    ) -> SplitKVWorkspace:
        """Buffers for `query_tokens` packed tokens over rows of at most `kv_tokens`; 4 * (head_dim + 2) bytes per
        token, head and split.

        `also`: make the buffers large enough for these heads, too; a launch uses them for one of both. Raises
        ConfigError if `tokens` is not a power of two of at least 64.
        """
        if tokens < 64 or tokens & (tokens - 1):
            raise ConfigError(f"a split of {tokens} KV tokens: give a power of two of 64 or more, such as 256")
        places = query_tokens * -(-kv_tokens // tokens)
        most = max(heads, also.heads if also else 0)
        width = max(heads * head_dim, also.heads * also.head_dim if also else 0)
        room = (torch.empty(places * count, dtype=torch.float32, device=device) for count in (width, most, most))
        return cls(tokens, narrow, 2 * tokens, *_cut(room, (query_tokens, -(-kv_tokens // tokens), heads), head_dim))

    @staticmethod
    def token_bytes(query_tokens: int, *, heads: int, head_dim: int, tokens: int = 256) -> int:
        """Bytes that `allocate` takes per token of the longest row."""
        return -(-4 * query_tokens * heads * (head_dim + 2) // tokens)

    @property
    def kv_tokens(self) -> int:
        """Largest number of KV tokens of a row."""
        return self.tops.shape[1] * self.tokens

    def over(self, shape: KVShape) -> SplitKVWorkspace:
        """The same memory for other heads, with room for as many tokens and splits. Raises InvariantError if it is too
        small.
        """
        rows, splits, heads = self.tops.shape
        room = [part.new_empty(0).set_(part.untyped_storage()) for part in (self.sums, self.tops, self.totals)]
        places = rows * splits * shape.heads
        if places * shape.head_dim > room[0].numel() or places > room[1].numel():
            raise InvariantError(
                f"{shape.heads} heads of {shape.head_dim}: the workspace was made for {heads} of {self.sums.shape[-1]}"
            )
        return SplitKVWorkspace(
            self.tokens, self.narrow, self.wide, *_cut(room, (rows, splits, shape.heads), shape.head_dim)
        )


@dataclass(frozen=True, slots=True, eq=False)
class ContiguousKV:
    """A contiguous copy of one row's KV, for a long chunk. From it, the hardware (TMA) copies whole tiles; copies by
    threads take a third longer. Allocated once, shared by all layers and steps of a stream.

    keys, values   [kv_heads, room, head_dim]
    tile           has as many keys as `Tiles.whole`, so that the contiguous copy changes no bit of the result
    """

    keys: torch.Tensor
    values: torch.Tensor
    tile: Tile

    @classmethod
    def allocate(
        cls, *, kv_heads: int, head_dim: int, kv_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> ContiguousKV | None:
        """Memory for a row of `kv_tokens`. None if no tile fits the heads, and on GPUs other than Hopper: older GPUs
        lack TMA, and on newer GPUs bit equality was not verified.
        """
        on = on_host(device) or torch.cuda.get_device_capability(device)[0] == 9  # a CPU runs Triton's interpreter
        if not on or dtype == torch.float32 or head_dim not in (64, 128):
            return None
        tile = Tile(64, Tiles.default(head_dim, dtype).whole.keys, 4, 3)
        room = -(-kv_tokens // tile.keys) * tile.keys
        keys, values = (torch.zeros(kv_heads, room, head_dim, dtype=dtype, device=device) for _ in range(2))
        return cls(keys, values, tile)


def _cut(
    room: Iterable[torch.Tensor], shape: tuple[int, int, int], head_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of `sums`, `tops` and `totals` with that shape, at the start of each buffer."""
    sums, tops, totals = room
    count = math.prod(shape)
    return sums[: count * head_dim].view(*shape, head_dim), tops[:count].view(shape), totals[:count].view(shape)
