"""Models with attention code of their own: paged attention replaces it, or the model is refused with the reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoSelfAttention

from proof.tiny_kinds import tiny_kind
from sidestream.errors import InvariantError, ModelError
from sidestream.models import PagedModel, load_model
from sidestream.models.traced import TRACED


def loaded(kind: str, directory: Path, dtype: str = "float32") -> PagedModel:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny_kind(kind)).save_pretrained(directory)
    return load_model(str(directory), dtype=dtype, block_tokens=4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", sorted(TRACED))
def test_every_kind_passes_the_self_check_in_16_bits(tmp_path: Path, kind: str, dtype: str) -> None:
    assert loaded(kind, tmp_path, dtype).layout.dtype == dtype


@pytest.mark.parametrize(
    ("changes", "kv_heads"),
    [
        ({"multi_query": True}, 1),
        ({"multi_query": False, "num_kv_heads": 4}, 4),
        ({"new_decoder_architecture": True, "num_kv_heads": 2}, 2),
    ],
)
def test_a_falcon_keeps_each_kv_head_once(tmp_path: Path, changes: dict[str, Any], kv_heads: int) -> None:
    """Its code copies keys and values for each query head."""
    config = tiny_kind("falcon")
    config.update(changes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert load_model(str(tmp_path), block_tokens=4).layout.num_kv_heads == kv_heads


def biased(module: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return torch.matmul(query, key.transpose(-1, -2)) + torch.arange(key.shape[-2])


def cut(module: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return torch.matmul(query, key.transpose(-1, -2)).tanh()


def swapped(module: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return torch.matmul(torch.matmul(query, key.transpose(-1, -2)), key).matmul(key.transpose(-1, -2))


@pytest.mark.parametrize(
    ("scores", "reason"),
    [
        (biased, "its attention code computes something else than causal attention with the scale"),
        (cut, "its attention code uses tanh, which cannot be replaced"),
        (swapped, "multiplies something else than queries with keys"),
    ],
)
def test_other_attention_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    scores: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor],
    reason: str,
) -> None:
    def attend(self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any) -> Any:
        found = scores(self, query, key)
        weights = torch.softmax(found if mask is None else found + mask, dim=-1)
        return torch.matmul(weights, value), weights

    monkeypatch.setattr(GPTNeoSelfAttention, "_attn", attend)
    with pytest.raises(ModelError, match=reason):
        loaded("gpt_neo", tmp_path)


def test_a_call_without_a_batch_is_an_error(tmp_path: Path) -> None:
    model = loaded("gptj", tmp_path)
    with pytest.raises(InvariantError, match="attention was replaced and has no batch"):
        model.module(input_ids=torch.tensor([[1, 2, 3]]))
