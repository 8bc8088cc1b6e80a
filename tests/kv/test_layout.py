"""Where each byte of a block lies."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise

import pytest

from sidestream_kv.kv.layout import DTYPE_BYTES, AttentionChunk, KVLayout, blocks_before_window

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=8, block_tokens=4, dtype="bfloat16")


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_sizes_in_bytes_agree_with_the_shape(dtype: str) -> None:
    layout = dataclasses.replace(LAYOUT, dtype=dtype)
    assert layout.shape(7) == (7, 3, 2, 4, 2, 8)
    assert layout.block_bytes == math.prod(layout.shape(1)) * DTYPE_BYTES[dtype]
    assert layout.block_bytes == layout.token_bytes * layout.block_tokens == layout.layer_bytes * layout.num_layers


def test_a_latent_is_one_vector_for_each_token() -> None:
    latent = KVLayout(num_layers=3, num_kv_heads=1, head_dim=40, block_tokens=4, dtype="float32", latent_dim=32)
    assert latent.shape(7) == (7, 3, 1, 4, 1, 40)
    assert latent.token_bytes == 3 * 40 * 4
    assert (latent.layers_for(160), latent.layers_for(161)) == (1, 2)
    assert (latent.value_dim, LAYOUT.value_dim) == (32, 8)


def test_block_spans_cover_the_pool_without_gaps() -> None:
    spans = [LAYOUT.span(index) for index in range(5)]
    assert spans[0][0] == 0
    assert all(stop - start == LAYOUT.block_bytes for start, stop in spans)
    assert all(one[1] == two[0] for one, two in pairwise(spans))


def test_layer_spans_cover_their_block_in_order_without_gaps() -> None:
    layers = [LAYOUT.layer_span(2, layer, layer + 1) for layer in range(LAYOUT.num_layers)]
    assert (layers[0][0], layers[-1][1]) == LAYOUT.span(2) == LAYOUT.layer_span(2, 0, LAYOUT.num_layers)
    assert all(one[1] == two[0] for one, two in pairwise(layers))
    assert LAYOUT.layer_span(2, 1, 3) == (layers[1][0], layers[2][1])


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_a_partly_filled_block_counts_as_a_block(tokens: int, blocks: int) -> None:
    assert LAYOUT.num_blocks_for(tokens) == blocks


def test_a_token_attends_to_no_block_before_its_window() -> None:
    """In blocks of 4 tokens: the token at 99 attends to 95 to 99 with a window of 5, so not to blocks 0 to 22."""
    for position, window, blocks in [
        (0, 0, 0),
        (100, 0, 0),
        (100, 5, 24),
        (99, 5, 23),
        (98, 5, 23),
        (7, 4, 1),
        (6, 4, 0),
        (3, 100, 0),
        (8, 1, 1),
    ]:
        assert blocks_before_window(position, window, 4) == blocks
        if window > 1:
            assert blocks == sum((block + 1) * 4 <= position - window + 1 for block in range(position // 4 + 1))


def test_a_token_attends_to_no_block_before_its_chunk() -> None:
    """In blocks of 4 tokens and chunks of 10: the token at 25 attends to 20 to 25, so not to blocks 0 to 4."""
    found = [
        blocks_before_window(position, AttentionChunk(10), 4) for position in (9, 10, 11, 12, 19, 20, 21, 25, 29, 31)
    ]
    assert found == [0, 2, 2, 2, 2, 4, 5, 5, 5, 7]  # the block before the position always counts


def test_layers_beyond_the_list_of_windows_have_no_window() -> None:
    layout = dataclasses.replace(LAYOUT, windows=(0, 7))
    assert ([*layout.layers_without_window], layout.window) == ([0, 2], 7)
    assert ([*LAYOUT.layers_without_window], LAYOUT.window) == ([0, 1, 2], 0)


def test_describe_has_every_field_except_the_windows_and_the_dtype_of_reads() -> None:
    """They are no property of a block's bytes, and a model's fingerprint depends on them. Blocks of keys and values are
    described as they were before there were latents, so tiers keep their contents.
    """
    latent = dataclasses.replace(LAYOUT, num_kv_heads=1, latent_dim=6)
    fields = dataclasses.asdict(latent)
    del fields["windows"], fields["read_as"]
    assert latent.describe() == fields
    del fields["latent_dim"]
    assert LAYOUT.describe() == {**fields, "num_kv_heads": 2}
