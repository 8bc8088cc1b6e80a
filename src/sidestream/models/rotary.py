"""Moves head norms and rotary embedding from a model's layers into their attention, which on a GPU applies them in the
kernel that writes keys and values.

A layer is changed only if its own code was seen to do the same with a few tokens, bit by bit: project, normalise the
heads or not, rotate all of each head by halves, attend, project. Other layers run as they are. Called while an engine
is built, on every rank; knows nothing of batches.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sidestream.attention.rotary import LatentRotary, Rotary, Rotation
from sidestream.models.config_checks import layer_heads, max_positions
from sidestream.models.latent import latent_heads

logger = logging.getLogger(__name__)

_RECORDED = "sidestream_recorded"
_PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "head_dim", "layer_idx")
_TOKENS = 5
# So small that queries and keys are near the square root of a norm's epsilon, and another epsilon shows.
_SCALE = 1e-3


class RotatingAttention(nn.Module):
    """An attention module of transformers whose attention function gets queries and keys as they leave the projection,
    and the embeddings of their positions as `rotary`.

    options   further arguments of the attention function, the same in all calls
    """

    options: Mapping[str, Any]

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        past_key_values: None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """`[1, T, hidden_size]` to the same."""
        part: Any = self
        query, key, value = self.projected(hidden_states)
        attend = ALL_ATTENTION_FUNCTIONS[part.config._attn_implementation]
        attended, _ = attend(
            self, query, key, value, attention_mask, rotary=position_embeddings, **self.options, **others
        )
        # Without the dimension of size 1: the compiler does not know this size, and fuses less.
        return part.o_proj(attended.flatten(0, 1).flatten(1)).view(hidden_states.shape), None

    def projected(self, hidden_states: torch.Tensor) -> Sequence[torch.Tensor]:
        """Queries, keys and values, `[1, heads, T, head_dim]`."""
        part: Any = self
        return [
            project(hidden_states).view(*hidden_states.shape[:-1], -1, part.head_dim).transpose(1, 2)
            for project in (part.q_proj, part.k_proj, part.v_proj)
        ]


class RotatingLatentAttention(RotatingAttention):
    """The same for latent attention, whose attention function also normalises latents."""

    def projected(self, hidden_states: torch.Tensor) -> Sequence[torch.Tensor]:
        """Queries, latents and shared keys, `[1, heads or 1, T, size]`."""
        part: Any = self
        states = hidden_states.flatten(0, 1)  # as in `forward`
        if part.q_lora_rank is None:
            query = part.q_proj(states)
        else:
            query = part.q_b_proj(part.q_a_layernorm(part.q_a_proj(states)))
        query = query.view(1, len(states), -1, part.qk_head_dim).transpose(1, 2)
        latent, key = part.kv_a_proj_with_mqa(states).split([part.kv_lora_rank, part.qk_rope_head_dim], -1)
        return query, latent[None, None], key[None, None]


def rotary_of(part: Any, embeddings: tuple[torch.Tensor, torch.Tensor], num_tokens: int) -> Rotation:
    """What the attention module `part` does to the queries and keys of the first `num_tokens` tokens."""
    cos, sin = (values[0, :num_tokens] for values in embeddings)
    if isinstance(part, RotatingLatentAttention):
        norm: Any = part.kv_a_layernorm
        return LatentRotary(cos, sin, norm.weight, norm.variance_epsilon, _interleaved(part))
    norm = getattr(part, "q_norm", None)
    if norm is None:
        return Rotary(cos, sin)
    return Rotary(cos, sin, (norm.weight, part.k_norm.weight), norm.variance_epsilon)


@torch.inference_mode()
def rotate_in_attention(module: nn.Module, model: Any) -> None:
    """Change the attention modules in `module` of which this is possible, in place.

    module   the transformers model `model`, or a draft head (MTP) for it
    """
    embed = getattr(model.base_model, "rotary_emb", None)
    if embed is None or layer_heads(model.config):
        return
    # Up to the last position, because some layers scale late queries.
    positions = torch.linspace(0, max_positions(model.config) - 1, _TOKENS, device=model.device).long()[None]
    draws = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, _TOKENS, model.config.hidden_size, generator=draws) * _SCALE
    hidden = hidden.to(model.device, model.dtype)
    parts = [
        part
        for part in module.modules()
        if not isinstance(part, RotatingAttention)
        and (latent_heads(part) is not None or all(hasattr(part, name) for name in _PARTS))
    ]
    changed = sum(_change(part, embed, hidden, positions) for part in parts)
    logger.info("%d of %d attention layers leave the rotary embedding to their attention", changed, len(parts))


class _Call(NamedTuple):
    """One call of an attention function: queries and keys after norms and rotary embedding, `[T, heads, head_dim]`."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    options: Mapping[str, Any]


def _change(part: Any, embed: nn.Module, hidden: torch.Tensor, positions: torch.Tensor) -> bool:
    """Let `part` be a `RotatingAttention`, if that computes the same; returns whether it does."""
    own: Any = type(part)
    calls: list[_Call] = []
    implementation, part.config._attn_implementation = part.config._attn_implementation, _RECORDED
    try:
        embeddings = embed(hidden, positions)
        call = functools.partial(
            part, hidden_states=hidden, position_embeddings=embeddings, attention_mask=None, position_ids=positions,
            use_cache=False, paged_batch=calls,
        )  # fmt: skip
        latent = latent_heads(part) is not None
        width = part.qk_rope_head_dim if latent else part.head_dim
        same = _rotate_by_halves(embeddings, width)
        expected = call()[0]
        part.options = calls[0].options
        part.__class__ = _rotating(RotatingLatentAttention if latent else RotatingAttention, own)
        same = same and torch.equal(call()[0], expected) and calls[0].options == calls[1].options
        same = same and all(map(torch.equal, calls[0][:3], calls[1][:3]))
    except Exception:  # the code of a kind of layers may need anything else, and raise anything
        same = False
    finally:
        part.config._attn_implementation = implementation
    if not same:
        part.__class__ = own
    return same


def _rotate_by_halves(embeddings: Any, width: int) -> bool:
    half = (1, _TOKENS, width // 2)
    return all(
        values.shape == half or (values.shape == (*half[:2], width) and torch.equal(*values.chunk(2, -1)))
        for values in embeddings
    )


@functools.cache
def _rotating(new: type, own: type) -> type:
    return type(f"Rotating{own.__name__}", (new, own), {"__module__": own.__module__})


def _interleaved(part: Any) -> bool:
    return bool(getattr(part.config, "rope_interleave", False))


def _record(
    part: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    paged_batch: list[_Call],
    rotary: tuple[torch.Tensor, torch.Tensor] | None = None,
    position_ids: torch.Tensor,
    use_cache: bool,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Stands for attention: keeps its arguments, and returns the queries after norms and rotary embedding."""
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
    if rotary is not None:
        query, key, value = rotary_of(part, rotary, len(query)).apply(query, key, value)
    paged_batch.append(_Call(query, key, value, options))
    size = query.shape[-1]  # with latents, values may have another one
    return pad(query[None], (0, getattr(part, "v_head_dim", size) - size)), None


AttentionInterface.register(_RECORDED, _record)
