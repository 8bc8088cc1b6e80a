"""Causal attention of a packed batch over the block pool; the torch reference, fast enough to serve from a CPU.

Knows nothing of models, requests or streams: whoever calls it is on the stream that owns the forward. Each row is attended
to by itself, over exactly its own keys, so a row's numbers do not depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.nn import functional

__all__ = ["PagedBatch", "paged_attention"]


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """How a packed batch maps onto the block pool. Complete at birth; made once a flight.

    kv             the pool `[blocks, layers, 2, block_tokens, kv_heads, head_dim]`, contiguous; keys are 0, values 1
    slots          int64 [T]: block_id * block_tokens + offset of each packed token, no two equal
    block_tables   int64 [B, max_blocks], padded with 0
    query_starts   B + 1 offsets of the rows into the packed tokens
    kv_lens        B: length of each row's KV, this flight's tokens included; a row's queries are the last of them
    num_decode     the first num_decode rows have exactly one query token
    before_layer   called with i before layer i of the pool is written or read
    """

    kv: torch.Tensor
    slots: torch.Tensor
    block_tables: torch.Tensor
    query_starts: tuple[int, ...]
    kv_lens: tuple[int, ...]
    num_decode: int
    before_layer: Callable[[int], None]
    _shared: _Shared = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_shared", _Shared(self))


def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    batch: PagedBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Write the batch's keys and values into the pool, then attend; returns `[T, heads, head_dim]`.

    query [T, heads, head_dim] · key, value [T, kv_heads, head_dim]; heads is a multiple of kv_heads, and query head h reads
    kv head h // (heads / kv_heads). A query at position p sees positions `(p - sliding_window, p]`. `softcap` bounds the
    scores: softcap * tanh(score / softcap). Runs on the calling thread; one call at a time per batch.
    """
    batch.before_layer(layer)
    keys, values = batch._shared.halves(layer)
    written = batch._shared.written
    keys.index_copy_(0, written, key)
    values.index_copy_(0, written, value)

    context = batch._shared.context(sliding_window, query.dtype)
    seen_keys = keys.index_select(0, context.index)
    seen_values = values.index_select(0, context.index)
    out = torch.empty_like(query)
    for row in context.rows:
        k, v = seen_keys[row.context], seen_values[row.context]
        if softcap is not None:
            out[row.queries] = _softcapped(query[row.queries], k, v, row.mask, scale, softcap)
        elif row.mask is None:
            out[row.queries] = _decode(query[row.queries], k, v, scale)
        else:
            out[row.queries] = _prefill(query[row.queries], k, v, row.mask, scale)
    return out


@dataclass(frozen=True, slots=True)
class _Row:
    """One row's queries among the packed tokens, its keys among the gathered ones, and its additive mask `[queries, keys]`.

    A row of one query sees all its keys and has no mask.
    """

    queries: slice
    context: slice
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Context:
    """What all layers of one window read: where every row's keys lie in a layer's half of the pool, row after row."""

    index: torch.Tensor
    rows: tuple[_Row, ...]


class _Shared:
    """Addresses and masks of one batch, made by the first layer that needs them and used by all that follow.

    A pool row is one token's keys or values of one layer. Counted from the first row of the half that a layer reads, the
    row of a token depends on its block and offset only, so one index serves all layers.
    """

    def __init__(self, batch: PagedBatch) -> None:
        blocks, layers, _, self._block_tokens, kv_heads, head_dim = batch.kv.shape
        self._block_rows = layers * 2 * self._block_tokens
        self._pool = batch.kv.view(blocks * self._block_rows, kv_heads, head_dim)
        self._block_tables = batch.block_tables
        self._query_starts = batch.query_starts
        self._kv_lens = batch.kv_lens
        self._contexts: dict[int | None, _Context] = {}
        self.written = self._pool_rows(batch.slots // self._block_tokens, batch.slots % self._block_tokens)

    def halves(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The pool from the first row of the layer's keys on, and from the first row of its values on."""
        first = layer * 2 * self._block_tokens
        return self._pool[first:], self._pool[first + self._block_tokens :]

    def context(self, window: int | None, dtype: torch.dtype) -> _Context:
        """What every row sees under `window`. Layers of one model share one dtype."""
        found = self._contexts.get(window)
        if found is None:
            found = self._contexts[window] = self._make_context(window, dtype)
        return found

    def _make_context(self, window: int | None, dtype: torch.dtype) -> _Context:
        indices: list[torch.Tensor] = []
        rows: list[_Row] = []
        end = 0
        for row, kv_len in enumerate(self._kv_lens):
            start, stop = self._query_starts[row : row + 2]
            first_query = kv_len - (stop - start)
            first_key = 0 if window is None else max(0, first_query + 1 - window)
            positions = torch.arange(first_key, kv_len, device=self._pool.device)
            blocks = self._block_tables[row].index_select(0, positions // self._block_tokens)
            indices.append(self._pool_rows(blocks, positions % self._block_tokens))
            mask = None if stop - start == 1 else _causal_mask(positions, first_query, window, dtype)
            begin, end = end, end + len(positions)
            rows.append(_Row(slice(start, stop), slice(begin, end), mask))
        return _Context(torch.cat(indices), tuple(rows))

    def _pool_rows(self, blocks: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return blocks * self._block_rows + offsets


def _causal_mask(positions: torch.Tensor, first_query: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    # Additive, not boolean: scaled_dot_product_attention would convert a boolean one anew in every layer.
    queries = positions[first_query - int(positions[0]) :, None]
    hidden = positions > queries
    if window is not None:
        hidden |= positions <= queries - window
    return torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill_(hidden, float("-inf"))


def _decode(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    # The heads of a group stand in as the queries of their kv head: no key is copied, no mask is needed.
    grouped = query.view(1, keys.shape[1], -1, query.shape[-1])
    seen = functional.scaled_dot_product_attention(grouped, keys.transpose(0, 1)[None], values.transpose(0, 1)[None], scale=scale)
    return seen.reshape(query.shape)


def _prefill(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    q, k, v = (packed.transpose(0, 1)[None] for packed in (query, keys, values))
    seen = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return seen[0].transpose(0, 1)


def _softcapped(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scale: float, softcap: float
) -> torch.Tensor:
    num_queries, heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    grouped = query.transpose(0, 1).reshape(kv_heads, -1, head_dim)
    scores = torch.matmul(grouped, keys.permute(1, 2, 0)).float().mul_(scale / softcap).tanh_().mul_(softcap)
    if mask is not None:
        scores.view(kv_heads, -1, num_queries, len(keys)).add_(mask)
    seen = torch.matmul(scores.softmax(-1).to(query.dtype), values.transpose(0, 1))
    return seen.view(heads, num_queries, head_dim).transpose(0, 1)
