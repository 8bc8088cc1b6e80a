"""Serve an architecture of your own: a Llama whose queries, keys and values are clipped, as in OLMo.

    python examples/own_model.py [DIRECTORY]

Sidestream serves models that transformers can load. So the architecture is written and registered as transformers asks,
and its attention calls transformers' `AttentionInterface`, where Sidestream puts paged attention. The weights here are
random, and so are the answers.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb, eager_attention_forward

from proof.tiny_models import tiny_model_dir
from sidestream import LLM, SamplingParams, SidestreamError


class ClippedConfig(LlamaConfig):
    """A Llama config and the largest magnitude that a query, key or value may have."""

    model_type = "clipped_llama"
    clip: float = 2.0


class ClippedAttention(LlamaAttention):
    """Llama's attention with clipped projections."""

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: Any, attention_mask: Any = None, **kwargs: Any
    ) -> tuple[torch.Tensor, Any]:
        """Keyword arguments reach the interface: paged attention finds its batch among them."""
        kwargs.pop("past_key_values", None)
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        limit = self.config.clip
        query, key, value = (
            projection(hidden_states).clamp(-limit, limit).view(shape).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        attended, weights = attend(self, query, key, value, attention_mask, scaling=self.scaling, **kwargs)
        return self.o_proj(attended.reshape(*shape[:-2], -1)), weights


class ClippedForCausalLM(LlamaForCausalLM):
    """A Llama with clipped attention in every layer."""

    config_class = ClippedConfig

    def __init__(self, config: ClippedConfig) -> None:
        super().__init__(config)
        for index, layer in enumerate(self.model.layers):
            layer.self_attn = ClippedAttention(config, index)


def register() -> None:
    """Tell transformers about the architecture. Every process that loads the model has to do so."""
    AutoConfig.register(ClippedConfig.model_type, ClippedConfig, exist_ok=True)
    AutoModelForCausalLM.register(ClippedConfig, ClippedForCausalLM, exist_ok=True)


def save(directory: Path) -> Path:
    """Save a tiny model of this architecture, with the tokenizer of a tiny Llama."""
    tiny_model_dir("llama", directory, seed=1)
    tiny = LlamaConfig.from_pretrained(directory).to_dict()
    config = ClippedConfig(**{name: value for name, value in tiny.items() if name != "model_type"})
    torch.manual_seed(1)
    ClippedForCausalLM(config).save_pretrained(directory)
    return directory


def main(directory: Path) -> None:
    """Save the model, serve it, and print an answer."""
    register()
    # LLM loads in this process, which knows the architecture. A server's engine process would not.
    with LLM(save(directory), kv_memory="8MiB") as llm:
        answer = llm.generate("Call me Ishmael.", SamplingParams(temperature=0, max_tokens=8))[0]
        print(f"{llm.model_name}: {answer.token_ids}")


if __name__ == "__main__":
    try:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(temporary) / "clipped")
    except (OSError, SidestreamError) as error:
        sys.exit(f"error: {error}")
