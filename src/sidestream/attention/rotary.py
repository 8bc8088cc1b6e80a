"""Norms and rotary embedding of a batch's heads, for attention that applies them itself.

On a GPU, the kernel that writes keys and values also normalises and rotates. This module has the same in torch, as
transformers computes it. It knows nothing of pools and batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class Rotary:
    """What a layer does to its queries and keys between projection and attention. All tensors have their dtype.

    cos, sin   [T, head_dim], and both halves of the last dimension are equal; or [T, head_dim / 2]: for each token
    norms      [head_dim] each: weights of the RMSNorms of query heads and of key heads; None: there are no norms
    eps        what the norms add to the mean square
    """

    cos: torch.Tensor
    sin: torch.Tensor
    norms: tuple[torch.Tensor, torch.Tensor] | None = None
    eps: float = 0.0

    def apply(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries `[T, heads, head_dim]` and keys `[T, kv_heads, head_dim]`, normalised and then rotated, and the
        values. Each operation rounds to their dtype; only the norm is float32 inside.
        """
        query_norm, key_norm = self.norms or (None, None)
        return self._turned(query, query_norm), self._turned(key, key_norm), value

    def _turned(self, states: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        states = states if norm is None else _normed(states, norm, self.eps)
        return _turned(states.chunk(2, -1), self.cos, self.sin)


@dataclass(frozen=True, slots=True, eq=False)
class LatentRotary:
    """What a layer with latent attention does to its latents, to the rotated parts of its queries, and to the key that
    all heads share. All tensors have their dtype.

    cos, sin      [T, rotated_dim]: for each token. Both halves of the last dimension are equal
    norm          [latent_dim]: weight of the RMSNorm of latents
    eps           what the norm adds to the mean square
    interleaved   pairs of neighbours are rotated, and the first ones of all pairs come first in the result; else pairs
                  of both halves
    """

    cos: torch.Tensor
    sin: torch.Tensor
    norm: torch.Tensor
    eps: float
    interleaved: bool

    def apply(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries `[T, heads, key_dim + rotated_dim]`, latents `[T, 1, latent_dim]` and shared keys `[T, 1,
        rotated_dim]`. Each operation rounds to their dtype; only the norm is float32 inside.
        """
        unrotated, rotated = query.tensor_split([query.shape[-1] - value.shape[-1]], -1)
        turned = torch.cat((unrotated, self._turned(rotated)), -1)
        return turned, _normed(key, self.norm, self.eps), self._turned(value)

    def _turned(self, states: torch.Tensor) -> torch.Tensor:
        halves = (states[..., ::2], states[..., 1::2]) if self.interleaved else states.chunk(2, -1)
        return _turned(halves, self.cos, self.sin)


Rotation = Rotary | LatentRotary


def _turned(halves: Sequence[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = halves
    cos, sin = (values[:, None, : first.shape[-1]] for values in (cos, sin))
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _normed(states: torch.Tensor, norm: torch.Tensor, eps: float) -> torch.Tensor:
    wide = states.float()
    return norm * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(states.dtype)
