"""Mixtures of experts on a GPU: the products of the experts that tokens choose, and the choice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from sidestream.ops import experts as ops
from sidestream_kv.device.kinds import on_gpu

EXPERTS = "sidestream"
"""Name under which transformers finds `experts_forward`."""


def experts_forward(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What a module of experts in transformers computes, `[T, hidden]`; see `grouped_mm_experts_forward` there."""
    if not on_gpu(hidden_states.device):
        elsewhere: Tensor = grouped_mm_experts_forward(experts, hidden_states, top_k_index, top_k_weights)
        return elsewhere
    top_k = top_k_index.shape[1]
    by = (chosen := top_k_index.reshape(-1), *sort_by_expert(chosen, experts.num_experts))

    def multiplied(states: Tensor, name: str, divisor: int) -> Tensor:
        weight, bias = getattr(experts, name), getattr(experts, f"{name}_bias") if experts.has_bias else None
        product: Tensor = multiply_by_expert(states.to(weight.dtype), weight, bias, by, divisor, experts.is_transposed)
        return product

    if experts.has_gate:
        inner = experts._apply_gate(multiplied(hidden_states, "gate_up_proj", top_k))
    else:
        inner = experts.act_fn(multiplied(hidden_states, "up_proj", top_k))
    added: Tensor = add_by_token(multiplied(inner, "down_proj", 0), top_k_weights, by)
    return added.to(hidden_states.dtype)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, experts_forward)


@torch.library.custom_op("sidestream::sort_by_expert", mutates_args=())
def sort_by_expert(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `sidestream.ops.experts.sort_by_expert`. Returns the fields after `chosen`."""
    _, order, position, ends, tiles = ops.sort_by_expert(chosen, experts)
    return order, position, ends, tiles


@sort_by_expert.register_fake
def _(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    pairs = chosen.shape[0]
    order, position, ends = (chosen.new_empty(size, dtype=torch.int32) for size in (pairs, pairs, experts))
    return order, position, ends, chosen.new_empty(pairs, 3, dtype=torch.int32)


@torch.library.custom_op("sidestream::multiply_by_expert", mutates_args=())
def multiply_by_expert(
    states: Tensor, weight: Tensor, bias: Tensor | None, by: Sequence[Tensor], divisor: int, transposed: bool
) -> Tensor:
    """See `sidestream.ops.experts.multiply_by_expert`. `weight` is `[experts, outputs, inputs]`, or if it is
    transposed `[experts, inputs, outputs]`.
    """
    of_inputs = weight if transposed else weight.transpose(1, 2)
    return ops.multiply_by_expert(states, of_inputs, bias, ops.Sorted(*by), divisor)


@multiply_by_expert.register_fake
def _(
    states: Tensor, weight: Tensor, bias: Tensor | None, by: Sequence[Tensor], divisor: int, transposed: bool
) -> Tensor:
    return states.new_empty(by[0].shape[0], weight.shape[2 if transposed else 1])


@torch.library.custom_op("sidestream::add_by_token", mutates_args=())
def add_by_token(products: Tensor, weights: Tensor, by: Sequence[Tensor]) -> Tensor:
    """See `sidestream.ops.experts.add_by_token`."""
    return ops.add_by_token(products, weights, ops.Sorted(*by))


@add_by_token.register_fake
def _(products: Tensor, weights: Tensor, by: Sequence[Tensor]) -> Tensor:
    return products.new_empty(weights.shape[0], products.shape[1])


@torch.library.custom_op("sidestream::largest_of_rows", mutates_args=())
def largest_of_rows(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """See `sidestream.ops.experts.largest_of_rows`."""
    return ops.largest_of_rows(scores, count)


@largest_of_rows.register_fake
def _(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    shape = (*scores.shape[:-1], count)
    return scores.new_empty(shape), scores.new_empty(shape, dtype=torch.int64)
