"""Layers with a gated delta rule (Qwen3-Next, Qwen3.5) on a GPU. transformers' modules compute the projections, and our
kernels compute everything else.

Without these kernels, transformers computes such a layer by about sixty torch operations per token, on copies of the
states. The kernels read and write the states in the pool.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from sidestream.attention.states import StateBatch
from sidestream.attention.triton.gated_delta import GatedDeltaShape, Projected, gated_delta, gated_norm
from sidestream.models.joined import join_projections, joined_product

_CLASSES = frozenset({"Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"})
# Matrix products need at least 16 columns. The operands of a chunk with larger keys do not fit into shared memory.
_HEAD_SIZES = (16, 32, 64, 128)
PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
"""The projections of Qwen3.5, in the order in which their outputs are joined."""


class GatedDelta:
    """One layer, computed by our kernels. A `Kernels` function of `sidestream.attention.states`."""

    def __init__(self, module: Any, layer: int) -> None:
        """`module`: a module of transformers for which `fits` is True. Joins the module's projections into one."""
        with torch.no_grad():
            join_projections(module, PROJECTIONS)
        self._module = module
        self._layer = layer
        self._shape = GatedDeltaShape(module.num_k_heads, module.num_v_heads, module.head_k_dim, module.head_v_dim)

    @staticmethod
    def fits(module: nn.Module) -> bool:
        """Whether the kernels can compute this module."""
        part: Any = module
        if type(module).__name__ not in _CLASSES:
            return False
        sizes = (part.head_k_dim, part.head_v_dim)
        return (
            part.conv1d.bias is None
            and part.conv_kernel_size == 4
            and part.activation == "silu"
            and all(size in _HEAD_SIZES for size in sizes)
        )

    def __call__(self, inputs: torch.Tensor, batch: StateBatch) -> torch.Tensor:
        """The outputs `[T, hidden_size]` for the packed inputs of the batch."""
        module, layer = self._module, self._layer
        kept = batch.kept_inputs(layer)
        projected, gates = self._project(torch.cat([inputs, kept]) if len(kept) else inputs)
        count = len(inputs)
        new, again = (
            Projected(projected.mixed[part], projected.beta[part], projected.alpha[part])
            for part in (slice(count), slice(count, None))
        )
        states = batch.pool.layer(layer)
        values = gated_delta(
            new,
            again,
            batch,
            self._shape,
            conv_states=states["conv", 0],
            recurrent_states=states["recurrent", 0],
            conv_weight=module.conv1d.weight,
            a_log=module.A_log,
            dt_bias=module.dt_bias,
        )
        normed = gated_norm(values, gates[:count], module.norm.weight, module.norm.variance_epsilon)
        output: torch.Tensor = module.out_proj(normed.flatten(1))
        return output

    def _project(self, inputs: torch.Tensor) -> tuple[Projected, torch.Tensor]:
        """The projected inputs, and the gates `[T, value heads * value_size]`."""
        module, shape = self._module, self._shape
        if hasattr(module, "in_proj_qkv"):
            whole = joined_product(inputs, [getattr(module, name) for name in PROJECTIONS])
            mixed, gates, beta, alpha = torch.split(
                whole,
                [shape.channels, shape.value_heads * shape.value_size, shape.value_heads, shape.value_heads],
                dim=1,
            )
            return Projected(mixed, beta, alpha), gates
        parts = module.fix_query_key_value_ordering(module.in_proj_qkvz(inputs[None]), module.in_proj_ba(inputs[None]))
        query, key, value, gates, beta, alpha = (part[0].flatten(1) for part in parts)
        whole = torch.cat([query, key, value, beta, alpha], dim=1)
        mixed, beta, alpha = torch.split(whole, [shape.channels, shape.value_heads, shape.value_heads], dim=1)
        return Projected(mixed, beta, alpha), gates
