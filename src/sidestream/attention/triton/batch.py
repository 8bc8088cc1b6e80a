"""The input of a kernel launch: how a batch lies in the pool, the workspace of its splits, the shapes of its tiles.

Holds tensors and launches nothing. Made on the engine thread; read on the stream that owns the forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from sidestream.attention.interface import KVShape, ungated
from sidestream.device.kinds import on_host
from sidestream.errors import ConfigError, InvariantError

__all__ = ["LONG_TOKENS", "ContiguousKV", "DeviceBatch", "SplitKVWorkspace", "Tile", "Tiles"]

_MULTIPLE = 16  # a KV tile is made of blocks of at least so many tokens

LONG_TOKENS = 512
"""From this many tokens of a step on, a row that has more than half of them is computed over contiguous KV."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Shape of one program's work.

    queries   query tokens times the heads of a group, a power of two of 16 or more
    keys      KV tokens a step, a power of two of 16 or more
    warps     warps of the program
    stages    steps whose KV is in flight at once
    """

    queries: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of rows in one pass, of rows in splits, and of short chunks in splits. A row's bits depend on them, so an
    engine makes one choice.
    """

    whole: Tile
    split: Tile
    short: Tile

    @classmethod
    def default(cls, head_dim: int, dtype: torch.dtype) -> Tiles:
        """Tiles that suit an H100's shared memory and registers; small ones for float32, which has no tensor cores."""
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

    tokens        KV tokens a split has: splits begin at multiples of it
    narrow, wide  of a short chunk all splits behind the first `narrow` have `wide` KV tokens: each of its queries
                  leaves sums of every split
    sums          float32 [T, splits, heads, head_dim], T the packed query tokens that fit, splits that cover the
                  longest row
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
        """Buffers for `query_tokens` packed tokens over rows of at most `kv_tokens`; 4 * (head_dim + 2) bytes a token,
        head and split.

        `also`: have room for those heads too, one or the other at a time. Raises ConfigError if `tokens` is not a power
        of two of 64 or more.
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
        """Bytes that `allocate` takes for each token of the longest row."""
        return -(-4 * query_tokens * heads * (head_dim + 2) // tokens)

    @property
    def kv_tokens(self) -> int:
        """KV tokens that the longest row may have."""
        return self.tops.shape[1] * self.tokens

    def over(self, shape: KVShape) -> SplitKVWorkspace:
        """The same memory for other heads, of which it has room for as many tokens and splits. Raises InvariantError if
        it has not.
        """
        rows, splits, heads = self.tops.shape
        room = [part.new_empty(0).set_(part.untyped_storage()) for part in (self.sums, self.tops, self.totals)]
        places = rows * splits * shape.heads
        if places * shape.head_dim > room[0].numel() or places > room[1].numel():
            raise InvariantError(
                f"{shape.heads} heads of {shape.head_dim}: workspace were made for {heads} of {self.sums.shape[-1]}"
            )
        return SplitKVWorkspace(
            self.tokens, self.narrow, self.wide, *_cut(room, (rows, splits, shape.heads), shape.head_dim)
        )


@dataclass(frozen=True, slots=True, eq=False)
class ContiguousKV:
    """A copy of one row's KV without blocks, for a long chunk: the hardware copies whole tiles of it. Copies
    thread by thread take a third longer. Allocated once, shared by all layers and steps of a stream.

    keys, values   [kv_heads, room, head_dim]
    tile           with as many keys as `Tiles.whole`, so that the copy changes no bit of the result
    """

    keys: torch.Tensor
    values: torch.Tensor
    tile: Tile

    @classmethod
    def allocate(
        cls, *, kv_heads: int, head_dim: int, kv_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> ContiguousKV | None:
        """Memory for a row of `kv_tokens`; None for heads that the kernels have no tiles for, and on GPUs other than
        Hopper: older ones lack such copies, and on newer ones equal bits have not been shown.
        """
        on = on_host(device) or torch.cuda.get_device_capability(device)[0] == 9  # on a CPU: Triton's interpreter
        if not on or dtype == torch.float32 or head_dim not in (64, 128):
            return None
        tile = Tile(64, Tiles.default(head_dim, dtype).whole.keys, 4, 3)
        room = -(-kv_tokens // tile.keys) * tile.keys
        keys, values = (torch.zeros(kv_heads, room, head_dim, dtype=dtype, device=device) for _ in range(2))
        return cls(keys, values, tile)


def _cut(
    room: Iterable[torch.Tensor], shape: tuple[int, int, int], head_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of `sums`, `tops` and `totals` of that shape, at the start of each buffer."""
    sums, tops, totals = room
    count = math.prod(shape)
    return sums[: count * head_dim].view(*shape, head_dim), tops[:count].view(shape), totals[:count].view(shape)


@dataclass(frozen=True, slots=True, eq=False)
class DeviceBatch:
    """How a packed batch of T tokens in B rows lies in the pool. Numbers that change from step to step are on the
    device.

    kv              the pool `[blocks, layers, 2, block_tokens, kv_heads, head_dim]`, or a tensor `[blocks, 2,
                    block_tokens, kv_heads, head_dim]` for each layer; keys are 0, values 1; block_tokens is a multiple
                    of 16, the last dimension is dense
    slot_mapping    int64 [T]: block_id * block_tokens + offset of each packed token, no two equal; a negative one
                    writes nothing
    block_tables    integers [B, max_blocks]; entries beyond a row's KV are never read
    cu_seqlens_q    integers [B + 1]: where each row's queries begin in the packed tokens, and where the last row's end;
                    a row may be empty. Tokens from there to T are padding
    kv_lens         integers [B]: length of each row's KV, this step's tokens included; a row's queries are the last
    split_rows      the first split_rows rows are reduced in splits (decode, verification)
    split_queries   query tokens of one of these rows, at most
    short_rows      this many rows after them are reduced in splits, too, with more queries at a time (short chunks);
                    the others in one pass (prefill)
    short_queries   query tokens of one of the short rows, at most
    workspace       partial results of the splits; needed if there are such rows
    contiguous      memory for a long chunk's KV; None: every row is read from its blocks
    tiles           shapes of the programs' work; None: Tiles.default
    before_layer    called with i before layer i of the pool is written or read

    T, B, max_blocks and the numbers of rows and queries in splits bound the launch: a captured graph keeps them and
    the tensors' addresses.
    """

    kv: torch.Tensor | tuple[torch.Tensor, ...]
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    cu_seqlens_q: torch.Tensor
    kv_lens: torch.Tensor
    split_rows: int = 0
    split_queries: int = 1
    short_rows: int = 0
    short_queries: int = 1
    workspace: SplitKVWorkspace | None = None
    contiguous: ContiguousKV | None = None
    tiles: Tiles | None = None
    before_layer: Callable[[int], None] = ungated

    def __post_init__(self) -> None:
        rows, max_blocks = self.block_tables.shape
        if len(self.cu_seqlens_q) != rows + 1 or len(self.kv_lens) != rows:
            raise InvariantError(
                f"{rows} block tables, {len(self.cu_seqlens_q)} query starts, {len(self.kv_lens)} lengths: "
                "B, B + 1 and B expected"
            )
        for name in ("slot_mapping", "block_tables", "cu_seqlens_q", "kv_lens"):
            part: torch.Tensor = getattr(self, name)
            if part.dtype not in (torch.int32, torch.int64) or part.stride(-1) != 1:
                raise InvariantError(
                    f"{name} is {part.dtype} with stride {part.stride(-1)}: dense int32 or int64 expected"
                )
        layer = self.layer(0)
        if layer.shape[2] % _MULTIPLE:
            raise ConfigError(f"block_tokens is {layer.shape[2]}: these kernels need a multiple of {_MULTIPLE}")
        if layer.stride(-1) != 1:
            raise InvariantError(f"the pool's last dimension has stride {layer.stride(-1)}: 1 expected")
        if self.split_rows < 0 or self.short_rows < 0 or self.rows_in_splits > rows:
            raise InvariantError(
                f"split_rows is {self.split_rows}, short_rows {self.short_rows}: the batch has {rows} rows"
            )
        kv_tokens = max_blocks * int(layer.shape[2])
        if self.contiguous is not None and kv_tokens > self.contiguous.keys.shape[1]:
            raise InvariantError(
                f"rows of up to {kv_tokens} tokens, laid out contiguously: "
                f"there is room for {self.contiguous.keys.shape[1]}"
            )
        if self.rows_in_splits:
            if self.workspace is None:
                raise InvariantError(f"{self.rows_in_splits} rows in splits, and no buffers for them: give workspace")
            tokens = self.tokens_in_splits
            held, most = self.workspace.tops.shape[0], self.workspace.kv_tokens
            if tokens > held or kv_tokens > most:
                raise InvariantError(
                    f"{tokens} query tokens over rows of up to {kv_tokens} tokens: workspace hold {held} over {most}"
                )

    @property
    def rows_in_splits(self) -> int:
        """The first so many rows are reduced in splits."""
        return self.split_rows + self.short_rows

    @property
    def tokens_in_splits(self) -> int:
        """The most query tokens that these rows have."""
        return min(len(self.slot_mapping), self.split_rows * self.split_queries + self.short_rows * self.short_queries)

    def layer(self, index: int) -> torch.Tensor:
        """One layer's pool `[blocks, 2, block_tokens, kv_heads, head_dim]`."""
        return self.kv[:, index] if isinstance(self.kv, torch.Tensor) else self.kv[index]

    def over(self, shape: KVShape) -> DeviceBatch:
        """See `AttentionBatch.over`. Of a pool that is one tensor."""
        if not isinstance(self.kv, torch.Tensor):
            raise InvariantError("layers of separate tensors have no end of a block in common")
        workspace = None if self.workspace is None else self.workspace.over(shape)
        return replace(
            self,
            kv=shape.at_the_end_of(self.kv),
            workspace=workspace,
            contiguous=None,
            tiles=None,
            before_layer=ungated,
        )

    def write(self, key: torch.Tensor, value: torch.Tensor, layer: int) -> None:
        """See `AttentionBatch.write`."""
        from sidestream.attention.triton import launch

        launch.write(key, value, layer, self, out=torch.empty_like(key))

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
    ) -> torch.Tensor:
        """Launch it: see `sidestream.attention.triton.paged_attention`."""
        from sidestream.attention.triton import launch  # which is made for batches, and imports this module

        return launch.paged_attention(
            query, key, value, layer, self, scale=scale, sliding_window=sliding_window, softcap=softcap
        )
