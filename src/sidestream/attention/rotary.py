"""Norms and rotary embedding of a batch's heads, for attention that applies them itself.

On a GPU, the kernel that writes keys and values also normalises and rotates. This module has the same in torch, as
transformers computes it. It knows nothing of pools and batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class Rotary:
    """What a layer does to its queries and keys between projection and attention. All tensors have their dtype.

    cos, sin   [T, head_dim]: for each token. Both halves of the last dimension are equal
    norms      [head_dim] each: weights of the RMSNorms of query heads and of key heads; None: there are no norms
    eps        what the norms add to the mean square
    """

    cos: torch.Tensor
    sin: torch.Tensor
    norms: tuple[torch.Tensor, torch.Tensor] | None = None
    eps: float = 0.0

    def apply(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries `[T, heads, head_dim]` and keys `[T, kv_heads, head_dim]`, normalised and then rotated. Each
        operation rounds to their dtype; only the norm is float32 inside.
        """
        query_norm, key_norm = self.norms or (None, None)
        return self._turned(query, query_norm), self._turned(key, key_norm)

    def _turned(self, states: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        if norm is not None:
            wide = states.float()
            scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
            states = norm * (wide * scale).to(states.dtype)
        first, second = states.chunk(2, -1)
        return states * self.cos[:, None] + torch.cat((-second, first), -1) * self.sin[:, None]
