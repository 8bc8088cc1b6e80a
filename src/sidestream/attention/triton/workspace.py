"""The memory and the tile shapes of attention kernels.

A split is a part of a row's KV that one program reduces, as in FlashDecoding; a row is one request's part of a batch.
This module holds tensors and launches nothing. The memory is allocated when an engine is built, and used on the stream
of the forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from sidestream.attention.interface import KVShape
from sidestream.attention.triton.flash import Forward
from sidestream.errors import ConfigError, InvariantError
from sidestream_kv.device.kinds import on_host

LONG_TOKENS = 512
"""In a step of at least this many tokens, a row with more than half of the step's tokens is a long chunk: its attention
reads a contiguous copy of its KV. With FlashAttention-3, all rows that are not in splits do, if they fit.
"""

ROW_MULTIPLE = 128
"""In the contiguous copy, rows begin at multiples of this many tokens, the KV tile of FlashAttention-3 for these head
sizes. So it reads zeros after a row's last key, never another row's values: it multiplies them by 0, and not a number
times 0 would spread.
"""


@dataclass(frozen=True, slots=True)
class Tile:
    """The part of the attention that one program (thread block) computes at a time.

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
    """Tile shapes for three kinds of rows. The exact bits of results depend on the shapes, so an engine chooses them
    once.

    whole   for rows whose KV is reduced in one pass
    split   for decode rows, whose KV is reduced in splits
    short   for short prefill chunks, whose KV is reduced in splits
    """

    whole: Tile
    split: Tile
    short: Tile

    @classmethod
    def default(cls, head_dim: int, dtype: torch.dtype, *, latent: bool = False) -> Tiles:
        """Tiles for an H100's shared memory and registers; small tiles for float32, which does not use tensor cores.

        latent   a token has one vector of `head_dim` elements, for keys and values
        """
        if dtype == torch.float32:
            side, warps = (32, 4) if head_dim <= 64 else (32, 8) if head_dim <= 128 else (16, 8)
            return cls(Tile(side, side, warps, 1), Tile(16, side, warps, 1), Tile(side, side, warps, 1))
        if head_dim > 256:
            if latent:
                return cls(Tile(64, 32, 8, 2), Tile(16, 64, 4, 2), Tile(64, 32, 8, 2))
            return cls(Tile(32, 32, 8, 2), Tile(16, 32, 8, 2), Tile(32, 32, 8, 2))
        if head_dim > 128:
            return cls(Tile(128, 64, 8, 2), Tile(16, 32, 4, 3), Tile(64, 32, 4, 2))
        return cls(Tile(128, 64, 8, 3), Tile(16, 32, 2, 3), Tile(64, 32, 4, 3))


@dataclass(frozen=True, slots=True, eq=False)
class SplitKVWorkspace:
    """Memory for the partial results of splits. Allocated once, shared by all layers and steps of a stream.

    tokens         number of KV tokens in a split of a decode row
    narrow_splits  number of leading splits of a short chunk that have `tokens` KV tokens each
    wide_tokens    number of KV tokens of each later split of a short chunk. Later splits are larger because each query
                   writes partial sums for every split
    value_sums     sums of weighted values: float32 [T, splits, heads, head_dim]. T is the largest number of packed
                   query tokens; `splits` is enough for the longest row
    max_scores     highest scores: float32 [T, splits, heads]
    weight_sums    sums of the softmax weights: float32 [T, splits, heads]
    """

    tokens: int
    narrow_splits: int
    wide_tokens: int
    value_sums: torch.Tensor
    max_scores: torch.Tensor
    weight_sums: torch.Tensor

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
        narrow_splits: int = 16,
        draft: KVShape | None = None,
    ) -> SplitKVWorkspace:
        """Buffers for `query_tokens` packed tokens over rows of at most `kv_tokens`; 4 * (head_dim + 2) bytes per
        token, head and split.

        draft   shape of a draft model's KV: the buffers are made large enough for the draft model, too

        Raises ConfigError if `tokens` is not a power of two of at least 64.
        """
        if tokens < 64 or tokens & (tokens - 1):
            raise ConfigError(f"a split of {tokens} KV tokens: give a power of two of 64 or more, such as 256")
        num_partials = query_tokens * -(-kv_tokens // tokens)
        max_heads = max(heads, draft.heads if draft else 0)
        width = max(heads * head_dim, draft.heads * draft.value_dim if draft else 0)
        buffers = (
            torch.empty(num_partials * count, dtype=torch.float32, device=device)
            for count in (width, max_heads, max_heads)
        )
        views = _views(buffers, (query_tokens, -(-kv_tokens // tokens), heads), head_dim)
        return cls(tokens, narrow_splits, 2 * tokens, *views)

    @staticmethod
    def token_bytes(query_tokens: int, *, heads: int, head_dim: int, tokens: int = 256) -> int:
        """Bytes that `allocate` takes per token of the longest row."""
        return -(-4 * query_tokens * heads * (head_dim + 2) // tokens)

    @property
    def kv_tokens(self) -> int:
        """Largest number of KV tokens of a row."""
        return self.max_scores.shape[1] * self.tokens

    def with_kv_shape(self, shape: KVShape) -> SplitKVWorkspace:
        """The same memory, divided for a draft model's heads, with the same numbers of tokens and splits. Raises
        InvariantError if the memory is too small.
        """
        rows, splits, heads = self.max_scores.shape
        buffers = [
            part.new_empty(0).set_(part.untyped_storage())
            for part in (self.value_sums, self.max_scores, self.weight_sums)
        ]
        num_partials = rows * splits * shape.heads
        if num_partials * shape.value_dim > buffers[0].numel() or num_partials > buffers[1].numel():
            raise InvariantError(
                f"{shape.heads} heads with head_dim {shape.value_dim}: the workspace was made for {heads} heads with "
                f"head_dim {self.value_sums.shape[-1]}"
            )
        views = _views(buffers, (rows, splits, shape.heads), shape.value_dim)
        return SplitKVWorkspace(self.tokens, self.narrow_splits, self.wide_tokens, *views)


@dataclass(frozen=True, slots=True, eq=False)
class ContiguousKV:
    """Memory for a contiguous copy of chunks' KV. TMA, the GPU's copy engine for tiles, can read whole tiles
    from the copy; loads by threads take a third longer. Allocated once, shared by all layers and steps of a stream.

    keys, values   [kv_heads, capacity, head_dim]; capacity: the largest number of tokens
    tile           tile shape with as many keys as `Tiles.whole`, so that the copy changes no bit of the result
    flash          FlashAttention-3, which then reads the copy; None: `attend_contiguous` does
    """

    keys: torch.Tensor
    values: torch.Tensor
    tile: Tile
    flash: Forward | None = None

    @classmethod
    def allocate(
        cls, *, kv_heads: int, head_dim: int, kv_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> ContiguousKV | None:
        """Memory for a row of `kv_tokens` tokens. None for float32, for head sizes other than 64 and 128, and on GPUs
        other than Hopper: older GPUs lack TMA, and on newer GPUs it was not verified that the results are bit-equal.
        """
        on = on_host(device) or torch.cuda.get_device_capability(device)[0] == 9  # a CPU runs Triton's interpreter
        if not on or dtype == torch.float32 or head_dim not in (64, 128):
            return None
        tile = Tile(64, Tiles.default(head_dim, dtype).whole.keys, 4, 3)
        capacity = -(-kv_tokens // ROW_MULTIPLE) * ROW_MULTIPLE
        keys, values = (torch.zeros(kv_heads, capacity, head_dim, dtype=dtype, device=device) for _ in range(2))
        return cls(keys, values, tile)


def _views(
    buffers: Iterable[torch.Tensor], shape: tuple[int, int, int], head_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views at the start of each buffer: `value_sums` with `(*shape, head_dim)`, the others with `shape`."""
    value_sums, max_scores, weight_sums = buffers
    count = math.prod(shape)
    return (
        value_sums[: count * head_dim].view(*shape, head_dim),
        max_scores[:count].view(shape),
        weight_sums[:count].view(shape),
    )
