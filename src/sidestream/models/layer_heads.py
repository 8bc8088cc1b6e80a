"""Models whose layers differ in their attention, in a pool whose layers are all alike.

A layer of the model takes one or more layers of the pool, each for an equal share of its KV heads, and smaller heads
lie side by side in one head of the pool. A query is zero outside of its own head's place, so it gives the same scores,
and of the attended values, only those of its own place are read. Layers that read the KV of an earlier layer use that
layer's place, and write the same values again. Called on the thread of the forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple, Unpack

import torch
from torch.nn.functional import pad

from sidestream.attention.interface import Attended, Attending
from sidestream.errors import InvariantError


class HeadSizes(NamedTuple):
    """KV heads of one layer, and the elements of their keys and values."""

    kv_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class LayerHeads:
    """Where a layer's KV heads lie: in `count` layers of the pool from `first` on, each with `kv_heads` heads of
    `head_dim` elements, and `side_by_side` heads of the layer in each of them.
    """

    sizes: HeadSizes
    first: int
    count: int
    kv_heads: int
    head_dim: int
    side_by_side: int

    @property
    def layers(self) -> range:
        """The layers of the pool."""
        return range(self.first, self.first + self.count)

    @property
    def _place(self) -> int:
        """Elements of each head's place."""
        return self.head_dim // self.side_by_side

    def keys(self, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Keys or values `[T, layer's KV heads, size]`, as `[T, kv_heads, head_dim]` for each layer of the pool."""
        placed = pad(states, (0, self._place - states.shape[-1]))
        return self._widened(placed.reshape(len(states), self.count, self.kv_heads, -1))

    def queries(self, query: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries `[T, heads, key_dim]`, as `[T, heads / count, head_dim]` for each layer of the pool."""
        placed = query.new_zeros(self._shape(*query.shape[:2]))
        own = query.reshape(*placed.shape[:5], -1).permute(0, 1, 2, 4, 5, 3)
        placed.diagonal(dim1=3, dim2=5)[..., : self.sizes.key_dim, :] = own
        return self._widened(placed.view(len(query), self.count, query.shape[1] // self.count, -1))

    def attended(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """What the layers of the pool attended, each `[T, heads / count, head_dim]`, as `[T, heads, value_dim]`."""
        tokens, heads = len(parts[0]), self.count * parts[0].shape[1]
        together = torch.stack(tuple(parts), dim=1)[..., : self.side_by_side * self._place]
        own = together.reshape(self._shape(tokens, heads)).diagonal(dim1=3, dim2=5).permute(0, 1, 2, 5, 3, 4)
        return own.reshape(tokens, heads, -1)[..., : self.sizes.value_dim]

    def _shape(self, tokens: int, heads: int) -> tuple[int, ...]:
        """Dimensions: token, layer of the pool, its head, place of the KV head, query head, place of the elements,
        element.
        """
        group = heads // self.sizes.kv_heads
        return (tokens, self.count, self.kv_heads, self.side_by_side, group, self.side_by_side, self._place)

    def _widened(self, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return pad(states, (0, self.head_dim - states.shape[-1])).unbind(1)


def divided_heads(sizes: Sequence[HeadSizes], sources: Sequence[int]) -> tuple[LayerHeads, ...]:
    """The place of each layer's heads. `sources`: for each layer, the layer whose KV it reads, mostly its own number.

    Heads of the pool are as wide as the widest key or value, and each of its layers has as many heads as divide the
    heads of all layers.
    """
    head_dim = max(max(one.key_dim, one.value_dim) for one in sizes)
    most = [head_dim // max(one.key_dim, one.value_dim) for one in sizes]
    side_by_side = [
        max(count for count in range(1, limit + 1) if one.kv_heads % count == 0)
        for one, limit in zip(sizes, most, strict=True)
    ]
    kv_heads = gcd(*(one.kv_heads // beside for one, beside in zip(sizes, side_by_side, strict=True)))
    places, stop = list[LayerHeads](), 0
    for layer, (one, beside, source) in enumerate(zip(sizes, side_by_side, sources, strict=True)):
        if source < layer:
            places.append(places[source])
            continue
        count = one.kv_heads // beside // kv_heads
        places.append(LayerHeads(one, stop, count, kv_heads, head_dim, beside))
        stop += count
    return tuple(places)


@dataclass(frozen=True, slots=True)
class DividedBatch:
    """A batch of a model whose layers differ: see `Attended`. `layer` of the pool counts the model's layers."""

    batch: Attended
    places: tuple[LayerHeads, ...]

    @property
    def slot_mapping(self) -> torch.Tensor:
        return self.batch.slot_mapping

    def layer(self, index: int) -> torch.Tensor:
        """The first of the layers of the pool."""
        return self.batch.layer(self.places[index].first)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, **how: Unpack[Attending]
    ) -> torch.Tensor:
        place = self.places[layer]
        if how.get("latent") is not None or how.get("rotary") is not None:
            raise InvariantError(
                f"layer {layer} has latents or heads before their rotary embedding: not for divided heads"
            )
        shares = [
            (None,) * place.count if of_heads is None else of_heads.view(place.count, -1).unbind()
            for of_heads in (how.get("sinks"), how.get("slopes"))
        ]
        parts = zip(place.queries(query), place.keys(key), place.keys(value), place.layers, *shares, strict=True)
        return place.attended(
            [
                self.batch.attend(q, k, v, pool_layer, **{**how, "sinks": own_sinks, "slopes": own_slopes})
                for q, k, v, pool_layer, own_sinks, own_slopes in parts
            ]
        )
