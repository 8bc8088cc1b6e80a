"""The query heads of a layer with latent attention (MLA, DeepSeek-V2), as matrices between heads and latents.

A token has one latent for all heads. A head's key is a product of the latent, joined with a rotated key that all heads
share; its value is another product of the latent. `expand` computes keys and values. `absorb` instead multiplies the
queries by the matrix of the keys, and `project` the sums of latents by the matrix of the values: the results are equal
up to rounding, and no latent of the context is expanded. This module knows nothing of pools and batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import linear


@dataclass(frozen=True, slots=True, eq=False)
class LatentHeads:
    """The matrices of one layer.

    weight     [heads, key_dim + value_dim, latent_dim]: from a latent to a head's key without its rotated part, and to
               its value
    key_dim    elements of a head's key without its rotated part
    """

    weight: torch.Tensor
    key_dim: int

    @property
    def latent_dim(self) -> int:
        """Elements of a latent."""
        return self.weight.shape[2]

    def absorb(self, query: torch.Tensor, *, copies: bool = True) -> torch.Tensor:
        """Queries `[T, heads, key_dim + rotated_dim]` to queries of latents, `[T, heads, latent_dim + rotated_dim]`. If
        not `copies`, the rotated parts are left to be written.
        """
        tokens, heads, width = query.shape
        absorbed = query.new_empty(tokens, heads, self.latent_dim + width - self.key_dim)
        unrotated, products = query[..., : self.key_dim], absorbed[..., : self.latent_dim]
        torch.bmm(unrotated.transpose(0, 1), self.weight[:, : self.key_dim], out=products.transpose(0, 1))
        if copies:
            absorbed[..., self.latent_dim :] = query[..., self.key_dim :]
        return absorbed

    def project(self, attended: torch.Tensor) -> torch.Tensor:
        """Weighted sums of latents, the first elements of `[T, heads, latent_dim or more]`, to those of the heads'
        values, `[T, heads, value_dim]`.
        """
        matrix = self.weight[:, self.key_dim :]
        values = attended.new_empty(*attended.shape[:2], matrix.shape[1])
        sums = attended[..., : self.latent_dim].transpose(0, 1)
        torch.bmm(sums, matrix.transpose(1, 2), out=values.transpose(0, 1))
        return values

    def expand(self, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens' keys `[heads, n, key_dim + rotated_dim]` and values `[heads, n, value_dim]`.

        latents   [n, latent_dim + rotated_dim]: each token's latent and rotated key
        """
        latent, rotated = latents.tensor_split([self.latent_dim], dim=-1)
        expanded = linear(latent, self.weight.flatten(0, 1)).view(len(latents), *self.weight.shape[:2]).transpose(0, 1)
        keys, values = expanded.tensor_split([self.key_dim], dim=-1)
        return torch.cat((keys, rotated.expand(len(keys), -1, -1)), dim=-1), values

    def expands(self, query: torch.Tensor, num_tokens: int) -> bool:
        """Whether `expand` takes fewer multiplications than `absorb` and `project`, for a row's queries `[n, heads,
        key_dim + rotated_dim]` over `num_tokens` tokens. Values count as wide as keys, because
        `scaled_dot_product_attention` needs equal widths on a CPU.
        """
        width, saved = self.weight.shape[1], 2 * len(query) * num_tokens * (self.latent_dim - self.key_dim)
        return width - self.key_dim <= query.shape[2] and saved > (num_tokens - len(query)) * width * self.latent_dim
