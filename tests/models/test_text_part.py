"""The text of models that also take images: the same logits as the whole model, for every kind that is served."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from batch_rig import one_row
from checkpoint_rig import refusal
from transformers import CONFIG_MAPPING, PreTrainedConfig

from proof.tiny_kinds import WHOLE, tiny_kind
from sidestream.models import load_model
from sidestream.models.text_part import _SERVED, TEXT_ALONE, whole_class

_SIZES = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16},
    **{"num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.2},
    **{"depth": 1, "embed_dim": 32, "num_heads": 2, "out_hidden_size": 64, "image_size": 28, "patch_size": 14},
    **{"projection_dim": 32, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
    **{"kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16},
    **{"n_routed_experts": 16, "n_group": 1, "topk_group": 1, "projection_hidden_size": 64},
    **{"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "moe_num_experts": 4, "moe_topk": 2},
}
_OF_TEXT = {"vocab_size": 300, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def tiny(kind: str) -> PreTrainedConfig:
    """A small config of a kind, with the defaults of its class otherwise. The kind of its text may follow."""
    if kind in {*WHOLE, *TEXT_ALONE}:
        return tiny_kind(kind)
    kind, _, text = kind.partition("/")
    usual = CONFIG_MAPPING[kind](**({"text_config": CONFIG_MAPPING[text]()} if text else {}))
    parts = {name: getattr(usual, name, None) for name in type(usual).sub_configs}
    return type(usual)(
        **{
            name: small(part, is_text=part is usual.get_text_config())
            for name, part in parts.items()
            if isinstance(part, PreTrainedConfig)
        }
    )


def small(part: PreTrainedConfig, *, is_text: bool) -> dict[str, Any]:
    part = copy.deepcopy(part)
    for name, size in {**_SIZES, **(_OF_TEXT if is_text else {})}.items():
        if isinstance(usual := getattr(part, name, part), int | float | None) and not isinstance(usual, bool):
            setattr(part, name, size)
    fields: dict[str, Any] = part.to_dict()
    if is_text and fields.get("layer_types"):
        fields["layer_types"] = [fields["layer_types"][0], fields["layer_types"][-1]]
    rope = fields.get("rope_parameters") or {}
    if "kv_lora_rank" in fields:
        fields |= {"num_key_value_heads": 4, "head_dim": fields["qk_rope_head_dim"], "first_k_dense_replace": 1}
        rope["partial_rotary_factor"] = 1.0
    if "mrope_section" in rope or (is_text and fields["model_type"] in ("qwen2_vl_text", "qwen2_5_vl_text")):
        rope["mrope_section"] = [4, 2, 2]
    return fields


_QUICK = {"llava", "mistral3", "qwen2_5_vl"}


@pytest.mark.parametrize(
    "kind",
    [
        kind if kind in _QUICK else pytest.param(kind, marks=pytest.mark.slow)
        for kind in sorted({*_SERVED, *TEXT_ALONE, "mistral3/mistral4"})
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_the_text_part_gives_the_logits_of_the_whole_model(kind: str, tmp_path: Path) -> None:
    config = tiny(kind)
    torch.manual_seed(0)
    whole = whole_class(config)._from_config(config, attn_implementation="eager").eval()
    for parameter in whole.parameters():
        if not parameter.any():  # a checkpoint with a matrix of zeros is refused
            torch.nn.init.normal_(parameter)
    whole.save_pretrained(tmp_path)
    tokens = torch.randint(3, 120, (40,))
    with torch.inference_mode():
        expected = whole(input_ids=tokens[None]).logits[0]

    model = load_model(str(tmp_path), block_tokens=4, dtype="float32")

    if model.state_layout is None:  # the self-check compares recurrent layers
        batch = one_row(torch.zeros(model.layout.shape(10)), 40)
        found = model.forward(tokens, torch.arange(40), batch, torch.arange(40))
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert not any("vision" in name or "visual" in name for name, _ in model.module.named_parameters())


def test_a_kind_whose_text_was_not_compared_is_refused(tmp_path: Path) -> None:
    CONFIG_MAPPING["paligemma"]().save_pretrained(tmp_path)
    assert "takes more than text" in refusal(tmp_path)
