"""Where each byte of a block lies."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise

import pytest

from sidestream.kv.layout import DTYPE_BYTES, KVLayout

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=8, block_tokens=4, dtype="bfloat16")


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_the_sizes_agree_with_the_shape(dtype: str) -> None:
    layout = dataclasses.replace(LAYOUT, dtype=dtype)
    assert layout.shape(7) == (7, 3, 2, 4, 2, 8)
    assert layout.block_bytes == math.prod(layout.shape(1)) * DTYPE_BYTES[dtype]
    assert layout.block_bytes == layout.token_bytes * layout.block_tokens == layout.layer_bytes * layout.num_layers


def test_spans_of_blocks_tile_the_pool() -> None:
    spans = [LAYOUT.span(index) for index in range(5)]
    assert spans[0][0] == 0
    assert all(stop - start == LAYOUT.block_bytes for start, stop in spans)
    assert all(one[1] == two[0] for one, two in pairwise(spans))


def test_spans_of_layers_tile_their_block_in_order() -> None:
    layers = [LAYOUT.layer_span(2, layer, layer + 1) for layer in range(LAYOUT.num_layers)]
    assert (layers[0][0], layers[-1][1]) == LAYOUT.span(2) == LAYOUT.layer_span(2, 0, LAYOUT.num_layers)
    assert all(one[1] == two[0] for one, two in pairwise(layers))
    assert LAYOUT.layer_span(2, 1, 3) == (layers[1][0], layers[2][1])


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_blocks_for_tokens_are_rounded_up(tokens: int, blocks: int) -> None:
    assert LAYOUT.num_blocks_for(tokens) == blocks


def test_describe_names_every_field() -> None:
    assert LAYOUT.describe() == dataclasses.asdict(LAYOUT)
