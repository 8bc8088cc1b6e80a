"""Layers that differ in their heads, in a pool of equal layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from batch_rig import one_row
from transformers import Gemma3nTextConfig, Gemma4TextConfig, MiMoV2FlashConfig, PreTrainedConfig

from proof.tiny_models import tiny_model_dir
from sidestream.errors import ModelError
from sidestream.models.config_checks import check_servable, layer_heads, layout_of
from sidestream.models.layer_heads import DividedBatch, HeadSizes, divided_heads
from sidestream.models.loader import cache_parts

# One layer after another: a layer of the pool; two; heads side by side; smaller values; all of these.
SIZES = [HeadSizes(2, 32, 32), HeadSizes(4, 32, 32), HeadSizes(4, 16, 16), HeadSizes(2, 32, 24), HeadSizes(12, 9, 7)]


def plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    group, count = query.shape[1] // key.shape[1], len(query)
    key, value = (states.repeat_interleave(group, dim=1).transpose(0, 1) for states in (key, value))
    scores = query.transpose(0, 1) @ key.transpose(1, 2) * 0.3
    scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), -torch.inf)
    weights = torch.cat((scores, sinks[:, None, None].expand(-1, count, 1)), dim=-1).softmax(-1)[..., :-1]
    return (weights @ value).transpose(0, 1)


@pytest.mark.parametrize("layer", range(len(SIZES)))
def test_divided_attention_equals_the_formula(layer: int) -> None:
    places = divided_heads(SIZES, range(len(SIZES)))
    kv_heads, key_dim, value_dim = SIZES[layer]
    pool = torch.full((3, places[-1].layers.stop, 2, 4, places[0].kv_heads, places[0].head_dim), torch.nan)
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(9, heads, size) for heads, size in ((12, key_dim), (kv_heads, key_dim), (kv_heads, value_dim))
    )
    sinks = torch.linspace(-3, 3, 12)
    batch = DividedBatch(one_row(pool, 9), places)
    attended = batch.attend(query, key, value, layer, scale=0.3, sinks=sinks)
    torch.testing.assert_close(attended, plain(query, key, value, sinks), atol=1e-5, rtol=0)
    assert not pool[:2, [*places[layer].layers]].isnan().any()


def test_a_layer_takes_as_many_layers_of_the_pool_as_its_heads_need() -> None:
    places = divided_heads(SIZES, range(len(SIZES)))
    assert [(place.first, place.count, place.side_by_side) for place in places] == [
        *((0, 1, 1), (1, 2, 1), (3, 1, 2), (4, 1, 1), (5, 2, 3))
    ]
    assert {(place.kv_heads, place.head_dim) for place in places} == {(2, 32)}


@pytest.mark.parametrize(
    ("config", "elements"),
    [
        # 40 layers of 16 keys and values of 256 elements; 8 layers with 4 of 512
        (
            Gemma4TextConfig(
                num_hidden_layers=48, num_key_value_heads=16, num_global_key_value_heads=4, attention_k_eq_v=True
            ),
            2 * (40 * 16 * 256 + 8 * 4 * 512),
        ),
        # 39 layers with 8 heads and 9 with 4: values of 128 elements take the place of 192
        (MiMoV2FlashConfig(), 2 * 192 * (39 * 8 + 9 * 4)),
        # 15 of 35 layers have no KV
        (Gemma3nTextConfig(), 2 * 20 * 2 * 256),
    ],
    ids=lambda one: getattr(one, "model_type", ""),
)
def test_published_models_take_no_more_memory_than_their_heads(config: PreTrainedConfig, elements: int) -> None:
    layout = layout_of(check_servable(config), dtype="bfloat16", block_tokens=16)
    assert layout.token_bytes == 2 * elements


def test_a_layer_without_kv_reads_that_of_the_last_one_of_its_type() -> None:
    places = layer_heads(Gemma3nTextConfig())
    assert places[19].first == 19 and places[18].first == 18
    assert {place.first for place in places[20:]} == {18, 19}


def test_models_whose_layers_differ_are_refused_with_several_ranks(tmp_path: Path) -> None:
    directory = str(tiny_model_dir("mimo_v2_flash", tmp_path, 0))
    with pytest.raises(ModelError, match="layers that differ in their heads"):
        cache_parts(directory, block_tokens=16, ranks=2)
