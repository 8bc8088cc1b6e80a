"""Latent attention on both backends against the plain formula over expanded keys and values."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from paged_rig import (
    DEVICE,
    LAYER,
    TOLERANCE,
    Launch,
    Options,
    Row,
    Shape,
    make_batch,
    make_rows,
    pool_for,
    random_step,
)

from sidestream.attention.interface import AttentionSpec, BatchRows, ungated
from sidestream.attention.latent import LatentHeads
from sidestream.attention.paged import TorchAttention
from sidestream.attention.triton import SplitKVWorkspace, TritonAttention, launch
from sidestream.errors import ConfigError


@dataclass(frozen=True)
class Sizes:
    latent: int = 32
    rotated: int = 8
    key: int = 12
    value: int = 16

    @property
    def width(self) -> int:
        return self.latent + self.rotated

    @property
    def scale(self) -> float:
        return float((self.key + self.rotated) ** -0.5)


SMALL = Sizes()
REAL = Sizes(512, 64, 128, 128)
# Decode, verification of 3, first token; a whole prompt, a continued chunk, and longer ones of both.
MIXED = [(1, 30), (3, 150), (1, 1), (9, 9), (6, 21), (40, 40), (18, 200)]


def heads_of(count: int, dtype: torch.dtype = torch.float32, sizes: Sizes = SMALL) -> LatentHeads:
    draws = torch.Generator().manual_seed(5)
    weight = torch.randn(count, sizes.key + sizes.value, sizes.latent, generator=draws) * sizes.latent**-0.5
    return LatentHeads(weight.to(DEVICE, dtype), sizes.key)


def latent_rows(
    lens: Sequence[tuple[int, int]], heads: int, dtype: torch.dtype = torch.float32, sizes: Sizes = SMALL
) -> list[Row]:
    """Rows whose keys are latents and rotated keys; of their queries only the first elements are used."""
    return make_rows(lens, Shape(heads, 1, sizes.width, dtype=dtype))


def latent_pool(rows: Sequence[Row]) -> torch.Tensor:
    """Not a number wherever nothing may be read."""
    shape = Shape(1, 1, rows[0].key.shape[2], dtype=rows[0].key.dtype)
    return pool_for(rows, shape, Options())[:, :, :1].contiguous()


def inputs(
    rows: Sequence[Row], padded_tokens: int = 0, sizes: Sizes = SMALL
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, latents and rotated keys of a step; those of padding are not a number."""
    query = torch.cat([row.query[..., : sizes.key + sizes.rotated] for row in rows])
    new = torch.cat([row.key[row.start :] for row in rows])
    parts = (query, new[..., : sizes.latent], new[..., sizes.latent :])
    padded = [torch.cat((part, part.new_full((padded_tokens, *part.shape[1:]), math.nan))) for part in parts]
    return padded[0], padded[1], padded[2]


def plain(row: Row, heads: LatentHeads, sizes: Sizes = SMALL) -> torch.Tensor:
    """The formula, in float64."""
    weight, latents = heads.weight.double(), row.key[:, 0].double()
    expanded = torch.einsum("hdr,nr->hnd", weight, latents[:, : sizes.latent])
    rotated = latents[:, sizes.latent :].expand(len(weight), -1, -1)
    keys, values = torch.cat((expanded[..., : sizes.key], rotated), -1), expanded[..., sizes.key :]
    query = row.query[..., : sizes.key + sizes.rotated].double()
    scores = query.transpose(0, 1) @ keys.transpose(1, 2) * sizes.scale
    positions = torch.arange(len(row.key), device=scores.device)
    scores = scores.masked_fill(positions > positions[row.start :, None], -math.inf)
    return (scores.softmax(-1) @ values).transpose(0, 1)


def assert_right(rows: Sequence[Row], out: torch.Tensor, heads: LatentHeads, sizes: Sizes = SMALL) -> None:
    outputs = out.split([*(len(row.query) for row in rows), len(out) - sum(len(row.query) for row in rows)])
    for row, output in zip(rows, outputs, strict=False):
        # Twice the kernels' tolerance: the products with the heads' matrices round as well.
        torch.testing.assert_close(output.double(), plain(row, heads, sizes), atol=2 * TOLERANCE[out.dtype], rtol=0)
    assert not outputs[-1].any()  # padding


def in_kernels(rows: Sequence[Row], count: int, how: Launch, sizes: Sizes = SMALL) -> torch.Tensor:
    dtype, width = rows[0].key.dtype, max(len(row.blocks) for row in rows) + how.wider
    tokens = sum(len(row.query) for row in rows) + how.padded_tokens
    workspace = SplitKVWorkspace.allocate(
        query_tokens=tokens, kv_tokens=width * 16, heads=count, head_dim=sizes.latent, device=DEVICE,
        tokens=how.split_tokens, narrow_splits=how.narrow,
    )  # fmt: skip
    batch = make_batch(latent_pool(rows), rows, Shape(count, 1, sizes.width), how, workspace)
    new, heads = inputs(rows, how.padded_tokens, sizes), heads_of(count, dtype, sizes)
    return batch.attend(*new, LAYER, scale=sizes.scale, latent=heads)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("count", [2, 6, 20])
def test_kernels_attend_over_latents(count: int, dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    rows = latent_rows(MIXED, count, dtype)
    how = Launch(split_rows=3, split_queries=3, short_rows=1, short_queries=9, padded_rows=1, padded_tokens=2)

    assert_right(rows, in_kernels(rows, count, how), heads_of(count, dtype))


@pytest.mark.slow
def test_more_heads_than_a_tile_has_lines_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(launch, "_LATENT_GROUP", 4)
    rows = latent_rows(MIXED, 6)

    assert_right(rows, in_kernels(rows, 6, Launch(split_rows=3, split_queries=3)), heads_of(6))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_random_steps_over_latents(seed: int) -> None:
    pytest.importorskip("triton")
    draws = random.Random(seed)
    lens, how = random_step(draws, longest=160, rows=draws.randint(1, 6))
    rows = latent_rows(lens, 3)

    assert_right(rows, in_kernels(rows, 3, how), heads_of(3))


def test_the_buffers_of_kernels_over_latents_take_the_bytes_that_are_counted() -> None:
    spec = AttentionSpec(
        heads=20, kv_heads=1, head_dim=576, dtype=torch.bfloat16, device=torch.device("cpu"), query_tokens=4,
        latent_dim=512,
    )  # fmt: skip
    made = TritonAttention.create(spec, kv_tokens=1024, chunk_tokens=8192)
    parts = (made.workspace.value_sums, made.workspace.max_scores, made.workspace.weight_sums)
    assert made.contiguous is None
    assert made.workspace.value_sums.shape == (4, 1024 // 128, 20, 512)
    counted = 1024 * TritonAttention.token_bytes(spec)
    assert counted - 1024 < sum(part.nbytes for part in parts) <= counted


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("count", [16, 20, 128])
def test_real_sizes_equal_the_formula(count: int, dtype: torch.dtype) -> None:
    rows = latent_rows([(1, 3000), (5, 900), (1, 17), (9, 400), (300, 300), (200, 1100)], count, dtype, REAL)
    how = Launch(
        split_rows=3, split_queries=5, short_rows=1, short_queries=9, padded_rows=2, padded_tokens=9, tiles=None,
        split_tokens=256,
    )  # fmt: skip

    assert_right(rows, in_kernels(rows, count, how, REAL), heads_of(count, dtype, REAL), REAL)


def in_torch(rows: Sequence[Row], count: int) -> torch.Tensor:
    tables = torch.zeros(len(rows), max(len(row.blocks) for row in rows), dtype=torch.int64)
    starts, slots = [0], []
    for index, row in enumerate(rows):
        tables[index, : len(row.blocks)] = torch.tensor(row.blocks)
        starts.append(starts[-1] + len(row.query))
        slots += row.slots(range(row.start, len(row.key)), 16)
    batch = TorchAttention().batch(
        latent_pool(rows),
        BatchRows(
            torch.tensor(slots), tables, torch.tensor(starts), torch.tensor([len(row.key) for row in rows]), len(rows)
        ),
        ungated,
    )
    return batch.attend(*inputs(rows), LAYER, scale=SMALL.scale, latent=heads_of(count, rows[0].key.dtype))


@pytest.mark.parametrize("count", [1, 6])
def test_torch_attends_over_latents_absorbed_and_expanded(count: int) -> None:
    if DEVICE != "cpu":
        pytest.skip("rows lie on the GPU")
    rows = latent_rows(MIXED, count)

    assert_right(rows, in_torch(rows, count), heads_of(count))


@pytest.mark.parametrize(
    ("queries", "tokens", "expands"), [(1, 1000, False), (9, 9, True), (18, 200, False), (40, 40, True), (64, 70, True)]
)
def test_a_row_expands_its_latents_if_that_takes_fewer_products(queries: int, tokens: int, expands: bool) -> None:
    assert heads_of(2).expands(torch.zeros(queries, 2, 20), tokens) is expands


def test_values_wider_than_keys_are_never_expanded() -> None:
    wide = LatentHeads(torch.zeros(2, 12 + 40, 32), 12)
    assert not wide.expands(torch.zeros(40, 2, 20), 40)


def test_too_large_latents_are_refused_by_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_MAX_HEAD_DIM", 16)
    rows = latent_rows([(1, 1)], 2)
    options: dict[str, Any] = {"scale": 1.0, "latent": heads_of(2)}
    batch = make_batch(latent_pool(rows), rows, Shape(2, 1, SMALL.width), Launch())
    with pytest.raises(ConfigError, match="head_dim is 32: these kernels take up to 16"):
        batch.attend(*inputs(rows), LAYER, **options)
