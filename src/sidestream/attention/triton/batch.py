"""The input of a kernel launch: the location of a batch's KV in the pool.

The engine thread makes it; the stream of the forward pass reads it. A row is one request's part of the batch. A split
is a part of a row's KV that one program reduces, as in FlashDecoding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch

from sidestream.attention.interface import KVShape, ungated
from sidestream.attention.triton.workspace import ContiguousKV, SplitKVWorkspace, Tiles
from sidestream.errors import ConfigError, InvariantError

_MULTIPLE = 16  # divides block_tokens, because a tile of 16 or more KV tokens is whole blocks or a part of one block


@dataclass(frozen=True, slots=True, eq=False)
class BatchLocation:
    """Location of a packed batch's KV in the pool. The batch has T tokens in B rows. Numbers that differ between steps
    are on the device.

    kv              the pool `[blocks, layers, vectors, block_tokens, kv_heads, head_dim]`, or a tensor `[blocks,
                    vectors, block_tokens, kv_heads, head_dim]` for each layer. There are two vectors, keys and values,
                    or one, latents. block_tokens is a multiple of 16, and the last dimension is dense
    slot_mapping    int64 [T]: block_id * block_tokens + offset of each packed token, all different; negative: the token
                    writes nothing
    block_tables    integers [B, max_blocks]; entries beyond a row's KV are never read
    cu_seqlens_q    integers [B + 1]: start of each row's queries in the packed tokens, and the end of the last row; a
                    row may be empty. Tokens from that end to T are padding
    kv_lens         integers [B]: length of each row's KV, including this step's tokens; the row's queries are its last
                    tokens
    split_rows      number of decode rows, with or without drafts; they come first, and their KV is reduced in splits
    split_queries   largest number of query tokens in one of the first split_rows rows
    short_rows      number of short prefill chunks. They follow the decode rows, and their KV is also reduced in splits,
                    with more queries at a time. The KV of all later rows is reduced in one pass
    short_queries   largest number of query tokens in one of the short chunks
    workspace       memory for the partial results of splits; required if rows are reduced in splits
    contiguous      memory for a contiguous copy of chunks' KV; None: every row's KV is read from its blocks
    tiles           tile shapes of the kernels; None: Tiles.default
    before_layer    called with i before layer i of the pool is written or read
    invariant       whether the bits of a query must be the same in a chunk and in a decode row. The KV of every row is
                    then reduced in equal splits, those of short chunks included, and nothing is contiguous

    T, B, max_blocks and the numbers of rows and queries in splits are the launch bounds. A captured CUDA graph fixes
    the launch bounds and the addresses of the tensors.
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
    invariant: bool = False

    def __post_init__(self) -> None:
        rows, max_blocks = self.block_tables.shape
        if len(self.cu_seqlens_q) != rows + 1 or len(self.kv_lens) != rows:
            raise InvariantError(
                f"{rows} block tables, {len(self.cu_seqlens_q)} query starts, {len(self.kv_lens)} lengths: "
                "B, B + 1 and B expected"
            )
        for name in ("slot_mapping", "block_tables", "cu_seqlens_q", "kv_lens"):
            part: torch.Tensor = getattr(self, name)
            # The stride of a dimension of one element is arbitrary.
            if part.dtype not in (torch.int32, torch.int64) or (part.stride(-1) != 1 and part.shape[-1] > 1):
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
                raise InvariantError(f"{self.rows_in_splits} rows in splits need buffers: give workspace")
            tokens = self.tokens_in_splits
            max_tokens, max_kv_tokens = self.workspace.max_scores.shape[0], self.workspace.kv_tokens
            if tokens > max_tokens or kv_tokens > max_kv_tokens:
                raise InvariantError(
                    f"{tokens} query tokens over rows of up to {kv_tokens} tokens: "
                    f"the workspace has room for {max_tokens} over {max_kv_tokens}"
                )

    @property
    def rows_in_splits(self) -> int:
        """Number of rows whose KV is reduced in splits; these rows come first."""
        return self.split_rows + self.short_rows

    @property
    def tokens_in_splits(self) -> int:
        """Largest number of query tokens that the rows in splits have together."""
        return min(len(self.slot_mapping), self.split_rows * self.split_queries + self.short_rows * self.short_queries)

    def layer(self, index: int) -> torch.Tensor:
        """One layer's part of the pool, `[blocks, vectors, block_tokens, kv_heads, head_dim]`."""
        return self.kv[:, index] if isinstance(self.kv, torch.Tensor) else self.kv[index]

    def with_kv_shape(self, shape: KVShape) -> Self:
        """See `AttentionBatch.with_kv_shape`. The pool must be one tensor."""
        if not isinstance(self.kv, torch.Tensor):
            raise InvariantError("a draft model needs a pool that is one tensor: this pool has a tensor for each layer")
        workspace = None if self.workspace is None else self.workspace.with_kv_shape(shape)
        return replace(
            self,
            kv=shape.at_the_end_of(self.kv),
            workspace=workspace,
            contiguous=None,
            tiles=None,
            before_layer=ungated,
        )
