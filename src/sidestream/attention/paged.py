"""Causal attention of a packed batch over the block pool, in torch: the backend for CPUs, and the reference for tests
of other backends.

Runs on the caller's thread, which also runs the forward pass. A row is one request's part of the batch. Every row is
computed separately, over its own keys only, so a row's result does not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Unpack

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from sidestream.attention.interface import Attending, AttentionSpec, BatchRows, KVShape, ungated
from sidestream.attention.latent import LatentHeads
from sidestream.attention.rotary import Rotation
from sidestream.errors import InvariantError
from sidestream_kv.device.kinds import on_host
from sidestream_kv.kv.layout import window_start

# If a row has at most this many queries, the query heads that share a KV head are stacked as more queries of one head.
# Measured on two cores: 16 queries of 9 heads over 2,000 keys of 3 KV heads take 0.88 times as long as unstacked
# queries; a chunk of 256 queries gains nothing.
_FEW_QUERIES = 16
_FP8 = torch.float8_e4m3fn

__all__ = ["PagedBatch", "TorchAttention", "paged_attention"]


@dataclass(frozen=True, slots=True)
class TorchAttention:
    """See `AttentionBackend`. This backend has no buffers, and needs the lengths of the rows on the host."""

    one_by_one: bool = False

    @classmethod
    def supports(cls, device: torch.device) -> bool:
        return on_host(device)

    @classmethod
    def token_bytes(cls, spec: AttentionSpec) -> int:
        return 0

    @classmethod
    def create(cls, spec: AttentionSpec, *, kv_tokens: int, chunk_tokens: int) -> TorchAttention:
        return cls(one_by_one=spec.batch_invariant)

    @property
    def table_dtype(self) -> torch.dtype:
        return torch.int64

    @property
    def max_kv_tokens(self) -> None:
        """See `AttentionBackend.max_kv_tokens`."""

    @property
    def reads_lengths_on_host(self) -> bool:
        return True

    def batch(self, kv: torch.Tensor, rows: BatchRows, before_layer: Callable[[int], None]) -> PagedBatch:
        starts = tuple(rows.cu_seqlens_q.tolist())
        return PagedBatch(
            kv=kv,
            slot_mapping=rows.slot_mapping,
            block_tables=rows.block_tables.to(torch.int64),
            cu_seqlens_q=starts,
            kv_lens=tuple(rows.kv_lens.tolist()),
            num_decode=sum(
                1 for _ in takewhile(lambda row: starts[row + 1] - starts[row] == 1, range(rows.decode_rows))
            ),
            before_layer=before_layer,
            one_by_one=self.one_by_one,
        )


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Location of a packed batch's KV in the block pool. Immutable; made once per step.

    kv             the pool `[blocks, layers, vectors, block_tokens, kv_heads, head_dim]`, each block contiguous; index
                   0 of the third dimension is keys, index 1 values, or latents are all. The stride between blocks is a
                   multiple of kv_heads * head_dim
    slot_mapping   int64 [T]: block_id * block_tokens + offset of each packed token, all different
    block_tables   int64 [B, max_blocks], padded with 0
    cu_seqlens_q   B + 1 offsets of the rows into the packed tokens
    kv_lens        B: length of each row's KV, including this step's tokens; a row's queries are its last tokens
    num_decode     the first num_decode rows have exactly one query token
    before_layer   called with i before layer i of the pool is written or read
    one_by_one     compute each query of a chunk as that of a decode row, so that its bits do not depend on the chunk
    """

    kv: torch.Tensor
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    cu_seqlens_q: tuple[int, ...]
    kv_lens: tuple[int, ...]
    num_decode: int
    before_layer: Callable[[int], None]
    one_by_one: bool = False
    _addresses: _Addresses = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.cu_seqlens_q[self.num_decode] != self.num_decode:
            raise InvariantError(
                f"{self.num_decode} decode rows hold {self.cu_seqlens_q[self.num_decode]} tokens: one each expected"
            )
        object.__setattr__(self, "_addresses", _Addresses(self))

    def layer(self, index: int) -> torch.Tensor:
        """One layer's part of the pool, `[blocks, vectors, block_tokens, kv_heads, head_dim]`."""
        return self.kv[:, index]

    def part(self, begin: int, stop: int) -> PagedBatch:
        """The batch of the packed tokens [begin, stop). The part that begins at 0 waits for loads, for all parts, so it
        must go through all layers first.
        """
        starts = self.cu_seqlens_q
        rows = [row for row in range(len(self.kv_lens)) if starts[row] < stop and starts[row + 1] > begin]
        first, last = rows[0], rows[-1] + 1
        return replace(
            self,
            slot_mapping=self.slot_mapping[begin:stop],
            block_tables=self.block_tables[first:last],
            cu_seqlens_q=tuple(min(max(start, begin), stop) - begin for start in starts[first : last + 1]),
            kv_lens=tuple(self.kv_lens[row] - max(0, starts[row + 1] - stop) for row in range(first, last)),
            num_decode=max(0, min(self.num_decode, last) - first),
            before_layer=ungated if begin else self.before_layer,
        )

    def with_kv_shape(self, shape: KVShape) -> PagedBatch:
        return replace(self, kv=shape.at_the_end_of(self.kv), before_layer=ungated)

    def write(self, key: torch.Tensor, value: torch.Tensor, layer: int, rotary: Rotation | None = None) -> None:
        if rotary is not None:
            _, key, value = rotary.apply(key[:, :0], key, value)
        self.before_layer(layer)
        pool = self._addresses.pool_from(layer)
        if self.kv.shape[2] == 1:
            pool.index_copy_(0, self._addresses.written_keys, torch.cat((key, value), dim=-1))
            return
        if pool.dtype == _FP8:
            pool, key, value = pool.view(torch.int8), _fp8_bytes(key), _fp8_bytes(value)
        pool.index_copy_(0, self._addresses.written_keys, key)
        pool.index_copy_(0, self._addresses.written_values, value)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, **how: Unpack[Attending]
    ) -> torch.Tensor:
        return paged_attention(query, key, value, layer, self, **how)


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
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    latent: LatentHeads | None = None,
    rotary: Rotation | None = None,
) -> torch.Tensor:
    """See `Attended.attend`. Runs on the calling thread; one call at a time per batch."""
    if rotary is not None:
        query, key, value = rotary.apply(query, key, value)
    batch.write(key, value, layer)
    addresses = batch._addresses
    vectors, _, kv_heads, width = batch.layer(layer).shape[1:]
    visible = addresses.visible(sliding_window, query.dtype, heads_per_kv_head=query.shape[1] // kv_heads)
    blocks = addresses.block_view_from(layer).index_select(0, visible.block_starts).to(query.dtype)
    parts = blocks.view(vectors, 1, -1, kv_heads, width).transpose(2, 3).unbind()
    row_keys, row_values = ([part[:, :, a:b] for a, b in visible.token_ranges] for part in (parts[0], parts[-1]))
    out = []
    if batch.num_decode:
        # The query heads that share a KV head become queries of one head, so no key is repeated. No mask is needed,
        # because the only query of a decode row sees all tokens of the row's range.
        q = query[: batch.num_decode] if latent is None else latent.absorb(query[: batch.num_decode])
        grouped = q.reshape(batch.num_decode, 1, kv_heads, -1, width).unbind()
        decoded = [
            _attend(q, k, v, None, scale, softcap, sinks, _distances(slopes, 1, k.shape[2]))
            for q, k, v in zip(grouped, row_keys, row_values, strict=False)
        ]
        attended = torch.cat(decoded).view(q.shape)
        out.append(attended if latent is None else latent.project(attended))
    for row, mask in enumerate(visible.masks, batch.num_decode):
        q, keys, values = query[batch.cu_seqlens_q[row] : batch.cu_seqlens_q[row + 1]], row_keys[row], row_values[row]
        if batch.one_by_one:
            out += _each_query(q, keys, values, sliding_window, batch.kv_lens[row], scale, softcap, sinks, slopes)
            continue
        if latent is not None and latent.expands(q, keys.shape[2]):
            out.append(_attend_expanded(q, keys[0, 0], mask[: len(q)], latent, scale, softcap, sinks))
            continue
        q = q if latent is None else latent.absorb(q)
        by_head = q.transpose(0, 1)
        stacked = by_head.reshape(keys.shape[1], -1, q.shape[-1]) if len(q) <= _FEW_QUERIES else by_head
        distances = _distances(slopes, len(q), keys.shape[2])
        row_output = _attend(stacked[None], keys, values, mask, scale, softcap, sinks, distances)
        attended = row_output.reshape(by_head.shape).transpose(0, 1).contiguous()
        out.append(attended if latent is None else latent.project(attended))
    return out[0] if len(out) == 1 else torch.cat(out)


@dataclass(frozen=True, slots=True)
class _VisibleKV:
    """The KV that a layer reads. One object serves all layers with the same sliding window.

    block_starts   where the keys of each block begin that a row sees, in the order of the rows; then the same for the
                   values. Indices into `_Addresses.block_view_from`
    token_ranges   for each row, the range of tokens that the row sees, among the tokens of all gathered blocks
    masks          for each row after the decode rows, an additive mask `[queries, visible tokens]`. If the row has at
                   most `_FEW_QUERIES` queries, the mask is repeated for each query head of a KV head
    """

    block_starts: torch.Tensor
    token_ranges: list[tuple[int, int]]
    masks: tuple[torch.Tensor, ...]


def _fp8_bytes(states: torch.Tensor) -> torch.Tensor:
    """The bytes of keys or values in float8, as int8. Numbers beyond float8's largest become that one; NaN stays."""
    most = torch.finfo(_FP8).max  # torch 2.11 turns larger numbers into NaN
    return states.clamp(-most, most).to(_FP8).view(torch.int8)


class _Addresses:
    """Location of one batch's tokens in the pool, shared by all layers.

    The pool is viewed as a list of entries. An entry is one token's keys, values or latent in one layer. In all layers,
    a token's entries have the same distance from the layer's first entry, so all layers use the same indices.
    """

    def __init__(self, batch: PagedBatch) -> None:
        blocks, layers, self._vectors, self._block_tokens, kv_heads, head_dim = batch.kv.shape
        width = kv_heads * head_dim
        self._block_entries, remainder = divmod(batch.kv.stride(0), width)
        if remainder:
            raise InvariantError(
                f"the block stride is {batch.kv.stride(0)} elements: not a multiple of the {width} elements of a token"
            )
        entries = (blocks - 1) * self._block_entries + layers * self._vectors * self._block_tokens
        self._pool = batch.kv.as_strided((entries, kv_heads, head_dim), (width, head_dim, 1))
        # A view whose items overlap: item i is the `block_tokens` pool entries from entry i on. If entry i is the first
        # key of a block, item i is all keys of the block. The same is true of values.
        view_shape = (entries - self._block_tokens + 1, self._block_tokens, kv_heads, head_dim)
        self._blocks = batch.kv.as_strided(view_shape, (width, width, head_dim, 1))
        self._block_tables = batch.block_tables
        self._query_lens = tuple(
            stop - start for start, stop in zip(batch.cu_seqlens_q, batch.cu_seqlens_q[1:], strict=False)
        )
        self._kv_lens = batch.kv_lens
        self._num_decode = batch.num_decode
        self._by_window: dict[tuple[type, int | None, int], _VisibleKV] = {}
        self.written_keys = (
            batch.slot_mapping // self._block_tokens * self._block_entries + batch.slot_mapping % self._block_tokens
        )
        self.written_values = self.written_keys + self._block_tokens

    def pool_from(self, layer: int) -> torch.Tensor:
        """The pool's entries from the layer's first entry on: `[entries, kv_heads, head_dim]`."""
        return self._pool[layer * self._vectors * self._block_tokens :]

    def block_view_from(self, layer: int) -> torch.Tensor:
        """A view `[entries, block_tokens, kv_heads, head_dim]` of the pool from the layer's first entry on. Item i is
        the `block_tokens` entries from entry i on.
        """
        return self._blocks[layer * self._vectors * self._block_tokens :]

    def visible(self, window: int | None, dtype: torch.dtype, *, heads_per_kv_head: int) -> _VisibleKV:
        """The KV that each row sees with the sliding window `window`. Results are cached, because most layers of a
        model have the same window; all have the same dtype.
        """
        key = (type(window), window, heads_per_kv_head)
        if key not in self._by_window:
            self._by_window[key] = self._find_visible(window, dtype, heads_per_kv_head)
        return self._by_window[key]

    def _find_visible(self, window: int | None, dtype: torch.dtype, heads_per_kv_head: int) -> _VisibleKV:
        size, gathered = self._block_tokens, 0
        block_starts, token_ranges, masks = [], [], []
        for row, (query_len, kv_len) in enumerate(zip(self._query_lens, self._kv_lens, strict=True)):
            first_query = kv_len - query_len
            first_visible = 0 if window is None else max(0, window_start(first_query, window))
            # Gather whole blocks, because a copy of few long segments is faster than a copy of many short segments.
            blocks = self._block_tables[row, first_visible // size : -(-kv_len // size)]
            start = gathered + first_visible % size
            gathered += len(blocks) * size
            block_starts.append(blocks * self._block_entries)
            token_ranges.append((start, start + kv_len - first_visible))
            if row >= self._num_decode:
                positions = torch.arange(first_visible, kv_len, device=self._pool.device)
                mask = _causal_mask(positions, query_len, window, dtype)
                masks.append(mask.repeat(heads_per_kv_head, 1) if query_len <= _FEW_QUERIES else mask)
        keys = torch.cat(block_starts)
        starts = torch.cat([keys + vector * size for vector in range(self._vectors)])
        return _VisibleKV(starts, token_ranges, tuple(masks))


def _causal_mask(positions: torch.Tensor, query_len: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    queries = positions[-query_len:, None]
    hidden = positions > queries
    if window is not None:
        hidden |= positions < window_start(queries, window)
    # Additive, not boolean: scaled_dot_product_attention would convert a boolean mask again in every layer.
    return torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill_(hidden, float("-inf"))


def _each_query(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    window: int | None,
    kv_len: int,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
) -> Iterator[torch.Tensor]:
    """Attention of each of a row's queries `[n, heads, head_dim]`, computed in the shapes of a decode row at its
    position. `keys`, `values`: those up to `kv_len`, from the first one that the first query sees.
    """
    first = kv_len - keys.shape[2]
    for position, one in enumerate(query, kv_len - len(query)):
        start = 0 if window is None else max(0, window_start(position, window)) - first
        k, v = (part[:, :, start : position + 1 - first] for part in (keys, values))
        grouped = one.reshape(1, keys.shape[1], -1, one.shape[-1])
        yield _attend(grouped, k, v, None, scale, softcap, sinks, _distances(slopes, 1, k.shape[2])).view(1, *one.shape)


def _attend_expanded(
    query: torch.Tensor,
    latents: torch.Tensor,
    mask: torch.Tensor,
    latent: LatentHeads,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of one row's queries `[n, heads, size]` over the keys and values of its latents `[m, width]`."""
    keys, values = latent.expand(latents)
    value_dim = values.shape[-1]
    wide = pad(values, (0, keys.shape[-1] - value_dim))
    attended = _attend(query.transpose(0, 1)[None], keys[None], wide[None], mask, scale, softcap, sinks)
    return attended[0, ..., :value_dim].transpose(0, 1)


def _distances(slopes: torch.Tensor | None, num_queries: int, num_keys: int) -> torch.Tensor | None:
    """What ALiBi adds to the scores of the last queries of `num_keys` tokens, `[heads, num_queries, num_keys]`."""
    if slopes is None:
        return None
    keys, queries = (torch.arange(-count, 0, device=slopes.device) for count in (num_keys, num_queries))
    return slopes[:, None, None] * (keys - queries[:, None])


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of queries `[1, heads, n, head_dim]` over keys and values `[1, kv_heads, m, head_dim]`. Or of queries
    `[1, kv_heads, n, head_dim]`, those of all heads of a KV head one after another. `bias` `[heads, n, m]` is added to
    the scores.
    """
    if softcap is None and sinks is None and bias is None:
        return scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale, enable_gqa=True)
    grouped = query.reshape(keys.shape[1], -1, query.shape[-1])
    scores = torch.matmul(grouped, keys[0].transpose(1, 2)).float()
    if softcap is None:
        scores.mul_(scale)
    else:
        scores.mul_(scale / softcap).tanh_().mul_(softcap)
    if bias is not None:
        scores.add_(bias.reshape(scores.shape))
    if mask is not None:
        scores.view(-1, *mask.shape).add_(mask)
    if sinks is not None:
        per_kv_head = sinks.float().view(len(grouped), -1)
        column = per_kv_head.repeat_interleave(grouped.shape[1] // per_kv_head.shape[1], dim=1)
        scores = torch.cat((scores, column[..., None]), dim=-1)
    weights = scores.softmax(-1)[..., : keys.shape[2]]
    return torch.matmul(weights.to(query.dtype), values[0]).view(query.shape)
