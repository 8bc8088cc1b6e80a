"""The interface of attention backends: their construction, their batch for each step, and the calls of a layer.

A row is one request's part of a batch. A load is a copy of KV from host memory into the pool. This module knows nothing
of requests or streams. Only the thread that runs the forward pass uses a batch, on the stream of that pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Required, TypedDict, Unpack

import torch

from sidestream.attention.latent import LatentHeads
from sidestream.attention.rotary import Rotation


def ungated(layer: int) -> None:
    """A `before_layer` callback that does nothing: for a batch that waits for no load."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """Shape of a draft model's KV, and the number of the draft model's attention heads.

    The draft model's layers may have other sizes than the target model's layers, and use the same blocks.
    `latent_dim`: see `KVLayout.latent_dim`.
    """

    num_layers: int
    kv_heads: int
    head_dim: int
    heads: int
    latent_dim: int = 0

    @property
    def vectors(self) -> int:
        """See `KVLayout.vectors`."""
        return 1 if self.latent_dim else 2

    @property
    def value_dim(self) -> int:
        """See `KVLayout.value_dim`."""
        return self.latent_dim or self.head_dim

    def values(self, block_tokens: int) -> int:
        """Number of elements that the draft model's layers take in a block."""
        return self.num_layers * self.vectors * block_tokens * self.kv_heads * self.head_dim

    def at_the_end_of(self, kv: torch.Tensor) -> torch.Tensor:
        """The draft model's KV, which lies at the end of each block of the pool `kv`: a view `[blocks, num_layers,
        vectors, block_tokens, kv_heads, head_dim]`.
        """
        blocks, block_tokens = kv.shape[0], kv.shape[3]
        shape = (self.num_layers, self.vectors, block_tokens, self.kv_heads, self.head_dim)
        return kv.view(blocks, -1)[:, -self.values(block_tokens) :].view(blocks, *shape)


class Attending(TypedDict, total=False):
    """How a layer attends.

    scale            factor of the scores
    sliding_window   a query at position p sees positions `(p - sliding_window, p]`, or if this is an `AttentionChunk`,
                     those of its chunk up to p
    softcap          bounds the scores: softcap * tanh(score / softcap)
    sinks            [heads]: for each query head, the score of one more key, whose value is zero, and which every query
                     sees
    slopes           [heads], float32: ALiBi; slope * (position of the key - position of the query) is added to the
                     scaled score
    latent           matrices of a layer with latent attention
    rotary           what is applied to `query`, `key` and `value` first; None: they are normalised and rotated
    """

    scale: Required[float]
    sliding_window: int | None
    softcap: float | None
    sinks: torch.Tensor | None
    slopes: torch.Tensor | None
    latent: LatentHeads | None
    rotary: Rotation | None


class Attended(Protocol):
    """The methods of a batch that an attention layer uses."""

    @property
    def slot_mapping(self) -> torch.Tensor:
        """int64 [T]: destination slot of each packed token's keys and values."""
        ...

    def layer(self, index: int) -> torch.Tensor:
        """One layer's part of the pool, `[blocks, vectors, block_tokens, kv_heads, head_dim]`."""
        ...

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, **how: Unpack[Attending]
    ) -> torch.Tensor:
        """Write the batch's keys and values into the pool, then attend; returns `[T, heads, head_dim]`.

        query [T, heads, head_dim] · key, value [T, kv_heads, head_dim], in the pool's dtype; or a pool in float8 gets
        the nearest numbers that float8 has, at most +-448, and is read in the query's dtype. heads is a multiple of
        kv_heads; query head h reads kv head h // (heads / kv_heads). If the layer has latent
        attention, `key` is each token's latent [T, 1, latent_dim] and `value` the rotated part of its key [T, 1,
        rotated_dim]; the result is `[T, heads, value_dim]`.
        """
        ...


class AttentionBatch(Attended, Protocol):
    """A packed batch: the tokens of all rows, one row after another, without padding between rows."""

    def with_kv_shape(self, shape: KVShape) -> AttentionBatch:
        """A batch of the same rows for a draft model. The draft model's KV lies at the end of the same blocks. The
        returned batch waits for no load.
        """
        ...

    def write(self, key: torch.Tensor, value: torch.Tensor, layer: int, rotary: Rotation | None = None) -> None:
        """Write keys and values into the pool, as the first part of `attend` does."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class BatchRows:
    """Location of a packed batch's KV in the pool. The batch has T tokens in B rows.

    slot_mapping     int64 [T]: block_id * block_tokens + offset of each packed token; negative: padding
    block_tables     integers [B, max_blocks]
    cu_seqlens_q     integers [B + 1]: start of each row's queries in the packed tokens, and the end of the last row
    kv_lens          integers [B]: length of each row's KV, including this step's tokens; the row's queries are its last
                     tokens
    decode_rows      number of decode rows; they come first and have at most `decode_queries` tokens each
    short_rows       number of short prefill chunks; they follow the decode rows and have at most `short_queries` tokens
                     each
    """

    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    cu_seqlens_q: torch.Tensor
    kv_lens: torch.Tensor
    decode_rows: int
    decode_queries: int = 1
    short_rows: int = 0
    short_queries: int = 1


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The sizes that an engine's attention backend must support.

    heads, kv_heads, head_dim, dtype   sizes and dtype of the model's attention
    latent_dim     see `KVLayout.latent_dim`
    query_tokens   largest number of tokens that decode rows and short rows have together in one step
    draft          KV shape of a draft model that uses the same backend; None: no draft model
    batch_invariant  whether the bits of a query's result must depend on its position and its row's KV alone
    """

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    query_tokens: int
    draft: KVShape | None = None
    latent_dim: int = 0
    batch_invariant: bool = False

    @property
    def value_dim(self) -> int:
        """See `KVLayout.value_dim`."""
        return self.latent_dim or self.head_dim


class AttentionBackend(Protocol):
    """One implementation of attention on one device, with the buffers that all steps share. Made once per engine."""

    @classmethod
    def supports(cls, device: torch.device) -> bool:
        """Whether the backend runs on the device."""
        ...

    @classmethod
    def token_bytes(cls, spec: AttentionSpec) -> int:
        """Bytes of device memory that `create` takes for each token of the longest row."""
        ...

    @classmethod
    def create(cls, spec: AttentionSpec, *, kv_tokens: int, chunk_tokens: int) -> AttentionBackend:
        """Allocate the buffers for rows of up to `kv_tokens` and chunks of up to `chunk_tokens` tokens.

        Raises torch.OutOfMemoryError.
        """
        ...

    @property
    def table_dtype(self) -> torch.dtype:
        """Integer type of the block tables. Kernels are compiled for one type."""
        ...

    @property
    def max_kv_tokens(self) -> int | None:
        """Tokens that the longest row may have; None: any number."""
        ...

    @property
    def reads_lengths_on_host(self) -> bool:
        """Whether `batch` reads the lengths of the rows on the host. If so, batches have no padding."""
        ...

    def batch(self, kv: torch.Tensor, rows: BatchRows, before_layer: Callable[[int], None]) -> AttentionBatch:
        """The batch of one step over the pool `[blocks, layers, vectors, block_tokens, kv_heads, head_dim]`.

        before_layer   is called with i before layer i of the pool is written or read
        """
        ...
