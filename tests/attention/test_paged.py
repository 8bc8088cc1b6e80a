"""Paged attention against the plain formula in float64, row by row, and what a row may depend on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from sidestream.attention import paged
from sidestream.attention.paged import PagedBatch, paged_attention
from sidestream.errors import InvariantError
from sidestream_kv.kv.layout import AttentionChunk

BLOCK_TOKENS = 4
LAYERS = 3
HEAD_DIM = 16


@dataclass(frozen=True)
class Row:
    """A row's full keys and values `[kv_len, kv_heads, head_dim]`, of which the last `len(query)` are this step's."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    blocks: list[int]

    @property
    def start(self) -> int:
        return len(self.key) - len(self.query)


def make_rows(
    lens: Sequence[tuple[int, int]], heads: int, kv_heads: int, dtype: torch.dtype = torch.float32
) -> list[Row]:
    """Rows of (queries, kv_len) with random numbers, their blocks scattered over one pool."""
    draws = torch.Generator().manual_seed(7)
    need = [-(-kv_len // BLOCK_TOKENS) for _, kv_len in lens]
    free = torch.randperm(sum(need) + 3, generator=draws).tolist()
    rows = []
    for (queries, kv_len), count in zip(lens, need, strict=True):
        query = torch.randn(queries, heads, HEAD_DIM, generator=draws).to(dtype)
        key, value = torch.randn(2, kv_len, kv_heads, HEAD_DIM, generator=draws).to(dtype)
        rows.append(Row(query, key, value, [free.pop() for _ in range(count)]))
    return rows


def slots_of(row: Row, positions: range) -> list[int]:
    return [row.blocks[position // BLOCK_TOKENS] * BLOCK_TOKENS + position % BLOCK_TOKENS for position in positions]


def pool_for(rows: Sequence[Row]) -> torch.Tensor:
    """A pool that is not a number wherever nothing was written: what must not be read is not."""
    blocks = 1 + max(block for row in rows for block in row.blocks)
    _, kv_heads, head_dim = rows[0].key.shape
    return torch.full((blocks, LAYERS, 2, BLOCK_TOKENS, kv_heads, head_dim), math.nan, dtype=rows[0].key.dtype)


def put_context(pool: torch.Tensor, row: Row, layer: int) -> None:
    """What earlier steps, or a load, left of the row."""
    for position, slot in enumerate(slots_of(row, range(row.start))):
        pool[slot // BLOCK_TOKENS, layer, 0, slot % BLOCK_TOKENS] = row.key[position]
        pool[slot // BLOCK_TOKENS, layer, 1, slot % BLOCK_TOKENS] = row.value[position]


def make_batch(
    pool: torch.Tensor, rows: Sequence[Row], num_decode: int, before_layer: Callable[[int], None] = lambda layer: None
) -> PagedBatch:
    tables = torch.zeros(len(rows), max(len(row.blocks) for row in rows), dtype=torch.int64)
    for index, row in enumerate(rows):
        tables[index, : len(row.blocks)] = torch.tensor(row.blocks)
    starts = [0]
    for row in rows:
        starts.append(starts[-1] + len(row.query))
    slot_mapping = [slot for row in rows for slot in slots_of(row, range(row.start, len(row.key)))]
    return PagedBatch(
        pool,
        torch.tensor(slot_mapping),
        tables,
        tuple(starts),
        tuple(len(row.key) for row in rows),
        num_decode,
        before_layer,
    )


def attend(
    pool: torch.Tensor, rows: Sequence[Row], num_decode: int, layer: int = 1, **options: object
) -> tuple[torch.Tensor, ...]:
    """Each row's output of one step of `rows`."""
    for row in rows:
        put_context(pool, row, layer)
    batch = make_batch(pool, rows, num_decode)
    query = torch.cat([row.query for row in rows])
    key, value = (
        torch.cat([whole[row.start :] for row, whole in zip(rows, part, strict=True)])
        for part in ([r.key for r in rows], [r.value for r in rows])
    )
    out = paged_attention(query, key, value, layer, batch, scale=0.3, **options)  # type: ignore[arg-type]
    return out.split([len(row.query) for row in rows])


def plain(
    row: Row,
    *,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """The formula, in float64, one query and one head at a time."""
    heads, kv_heads = row.query.shape[1], row.key.shape[1]
    out = torch.empty(row.query.shape, dtype=torch.float64)
    for index, query in enumerate(row.query.double()):
        position = row.start + index
        first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
        if isinstance(sliding_window, AttentionChunk):
            first = position - position % sliding_window
        for head in range(heads):
            kv_head = head // (heads // kv_heads)
            scores = row.key[first : position + 1, kv_head].double() @ query[head] * 0.3
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if slopes is not None:
                scores += slopes[head].double() * (torch.arange(first, position + 1) - position)
            if sinks is not None:
                scores = torch.cat((scores, sinks[head : head + 1].double()))
            weights = scores.softmax(0)[: position + 1 - first]
            out[index, head] = weights @ row.value[first : position + 1, kv_head].double()
    return out


MIXED = [
    (1, 30),
    (1, 1),
    (1, 7),
    (9, 9),
    (6, 21),
    (1, 13),
    (18, 40),
]  # three decode rows, then prefills: one of a single token, one long


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sliding_window": 5},
        {"sliding_window": AttentionChunk(5)},
        {"sliding_window": AttentionChunk(8), "sinks": True},
        {"softcap": 1.5},
        {"sliding_window": 8, "softcap": 1.5, "sinks": True},
        {"sinks": True},
        {"slopes": True},
        {"sliding_window": 5, "softcap": 1.5, "slopes": True},
    ],
    ids=str,
)
def test_a_mixed_batch_over_scattered_blocks_equals_the_formula(options: dict[str, object]) -> None:
    for heads, kv_heads in [(4, 4), (6, 2), (4, 1)]:
        rows = make_rows(MIXED, heads, kv_heads)
        if "sinks" in options:
            options = {**options, "sinks": torch.linspace(-3, 9, heads)}
        if "slopes" in options:
            options = {**options, "slopes": torch.linspace(0.05, 1, heads)}

        outputs = attend(pool_for(rows), rows, 3, **options)

        for row, output in zip(rows, outputs, strict=True):
            # Float32 sums of at most 40 terms of size 1: 40 * 2**-24 is 2.4e-6.
            torch.testing.assert_close(output.double(), plain(row, **options), atol=1e-5, rtol=0)  # type: ignore[arg-type]


def test_bfloat16_errors_stay_within_rounding() -> None:
    rows = make_rows(MIXED, 6, 2, torch.bfloat16)

    for options in ({}, {"softcap": 1.5}):
        for row, output in zip(rows, attend(pool_for(rows), rows, 3, **options), strict=True):
            # Weights and results are rounded to 8 bits: 2**-8 each, of values up to 4.
            torch.testing.assert_close(output.double(), plain(row, **options), atol=0.03, rtol=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{}, {"sliding_window": 5}, {"softcap": 1.5}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_gives_the_same_bits_in_every_batch(dtype: torch.dtype, options: dict[str, object]) -> None:
    lens = [(1, 33), (1, 700), (1, 5), (1, 2), (17, 90), (5, 5), (40, 600)]
    rows = make_rows(lens, 6, 2, dtype)
    together = attend(pool_for(rows), rows, 4, **options)

    for row, beside_others in zip(rows, together, strict=True):
        (alone,) = attend(pool_for(rows), [row], int(len(row.query) == 1), **options)

        assert torch.equal(alone, beside_others)


def test_query_heads_of_a_kv_head_are_computed_together_for_few_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their matrix products are then of 48 rows and not of 16: the tail of a prompt is computed by this path."""
    shapes = []

    def record(query: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        shapes.append(tuple(query.shape[:3]))
        return scaled_dot_product_attention(query, *args, **named)

    monkeypatch.setattr(paged, "scaled_dot_product_attention", record)
    rows = make_rows([(1, 30), (16, 50), (17, 50)], 6, 2)
    attend(pool_for(rows), rows, 1)

    assert shapes == [(1, 2, 3), (1, 2, 48), (1, 6, 17)]


def test_keys_and_values_are_gathered_by_blocks_and_not_by_tokens() -> None:
    (row,) = make_rows([(4, 5 * BLOCK_TOKENS)], 6, 2)
    batch = make_batch(pool_for([row]), [row], 0)

    assert len(batch._addresses.visible(None, torch.float32, heads_per_kv_head=3).block_starts) == 2 * 5
    assert len(batch._addresses.visible(BLOCK_TOKENS, torch.float32, heads_per_kv_head=3).block_starts) == 2 * 2


def test_a_step_writes_only_its_own_slots_of_one_layer() -> None:
    rows = make_rows([(1, 10), (6, 14)], 4, 2)
    pool = pool_for(rows)
    attend(pool, rows, 1, layer=1)

    assert pool[:, 0].isnan().all()
    assert pool[:, 2].isnan().all()
    held = pool[:, 1].permute(0, 2, 1, 3, 4).reshape(-1, 2, 2, HEAD_DIM)  # by slot
    written = {
        slot: (row, position) for row in rows for position, slot in enumerate(slots_of(row, range(len(row.key))))
    }
    for slot, (key, value) in enumerate(held):
        if slot in written:
            row, position = written[slot]
            assert torch.equal(key, row.key[position])
            assert torch.equal(value, row.value[position])
        else:
            assert key.isnan().all()
            assert value.isnan().all()


def test_a_layer_is_not_read_or_written_before_its_load_h5() -> None:
    """The gate stands for a load that ends at the last moment: all that it brings is seen, and nothing was written
    before.
    """
    (row,) = make_rows([(3, 18)], 4, 2)
    pool = pool_for([row])
    opened = []

    def gate(layer: int) -> None:
        assert pool[:, layer].isnan().all()
        put_context(pool, row, layer)
        opened.append(layer)

    batch = make_batch(pool, [row], 0, gate)
    for layer in range(LAYERS):
        output = paged_attention(row.query, row.key[row.start :], row.value[row.start :], layer, batch, scale=0.3)
        torch.testing.assert_close(output.double(), plain(row), atol=1e-5, rtol=0)

    assert opened == [0, 1, 2]


def test_layers_with_different_windows_share_a_batch() -> None:
    rows = make_rows([(1, 20), (4, 19)], 4, 2)
    pool = pool_for(rows)
    for row in rows:
        for layer in range(LAYERS):
            put_context(pool, row, layer)
    batch = make_batch(pool, rows, 1)
    query = torch.cat([row.query for row in rows])
    key = torch.cat([row.key[row.start :] for row in rows])
    value = torch.cat([row.value[row.start :] for row in rows])

    for layer, window in enumerate((None, 6, AttentionChunk(6))):
        outputs = paged_attention(query, key, value, layer, batch, scale=0.3, sliding_window=window).split([1, 4])
        for row, output in zip(rows, outputs, strict=True):
            torch.testing.assert_close(output.double(), plain(row, sliding_window=window), atol=1e-5, rtol=0)


def test_decode_rows_with_more_than_one_token_raise() -> None:
    rows = make_rows([(1, 10), (6, 14)], 4, 2)

    with pytest.raises(InvariantError, match="2 decode rows hold 7 tokens"):
        make_batch(pool_for(rows), rows, 2)
