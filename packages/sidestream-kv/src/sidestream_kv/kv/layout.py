"""Byte layout of KV blocks: `[blocks, layers, vectors, block_tokens, kv_heads, head_dim]`, one span for each block.

Knows sizes only, never a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
FP8 = "float8_e4m3fn"
"""A dtype in which KV may lie, but which nothing computes in."""
_KV_BYTES = DTYPE_BYTES | {FP8: 1}


class AttentionChunk(int):
    """The window of a layer with chunked attention, in tokens: sequences are divided into chunks of so many tokens, and
    a token attends to its own chunk. So the window begins at the chunk's border, and is at most as long as a chunk.
    """


class BlockLayout(Protocol):
    """All that a tier knows of the blocks that it holds; `KVLayout` is one. `block_tokens` is only for messages."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        ...

    @property
    def block_tokens(self) -> int:
        """Tokens of one block."""
        ...

    def describe(self) -> dict[str, int | str]:
        """Plain values on which the bytes of a block depend. A tier serves no block of another description."""
        ...


@runtime_checkable
class LayeredLayout(BlockLayout, Protocol):
    """All that copies between a device and host memory know of a block: its layers, one after another. `KVLayout` is
    one."""

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        ...

    @property
    def layer_borders(self) -> Sequence[int]:
        """Where each layer begins in a block, and where the last one ends. Each layer is contiguous."""
        ...

    @property
    def layers_without_window(self) -> Sequence[int]:
        """The layers that a load always copies."""
        ...

    @property
    def partial_bytes(self) -> int:
        """Bytes of the layers without a sliding window, in one block."""
        ...

    def span(self, block_id: int) -> tuple[int, int]:
        """Byte range of a block in its memory, on the device and on the host alike."""
        ...


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of one model's KV blocks.

    block_tokens   tokens in a block
    dtype          `"float32"`, `"float16"` or `"bfloat16"`; or `FP8`, with `read_as`
    windows        for each layer from the first on, the number of tokens of its sliding window, or its
                   `AttentionChunk`; 0, and layers after the last entry: the layer attends to all tokens. No property of
                   the bytes, so not part of `describe`
    latent_dim     0: a token has a key and a value in each layer. Otherwise it has one vector, which all query heads
                   share: `latent_dim` elements of a latent, which is key and value, then the rotated part of the key
    read_as        the dtype in which attention computes with the KV; empty: `dtype`. Not part of `describe`,
                   because the model's fingerprint depends on it
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: str
    windows: tuple[int, ...] = ()
    latent_dim: int = 0
    read_as: str = ""

    @property
    def compute_dtype(self) -> str:
        """The dtype in which attention computes with the KV."""
        return self.read_as or self.dtype

    @property
    def value_bytes(self) -> int:
        """Bytes of one element of a key or value."""
        return _KV_BYTES[self.dtype]

    @property
    def vectors(self) -> int:
        """Vectors of a token in each layer and head: key and value, or one latent with its rotated key."""
        return 1 if self.latent_dim else 2

    @property
    def value_dim(self) -> int:
        """Elements that attention sums up for each query head."""
        return self.latent_dim or self.head_dim

    @property
    def window(self) -> int:
        """Tokens of the largest sliding window; 0: all layers attend to all tokens."""
        return max(self.windows, default=0)

    @property
    def layers_without_window(self) -> Sequence[int]:
        """The layers that attend to all tokens."""
        if not self.windows:
            return range(self.num_layers)
        return [layer for layer in range(self.num_layers) if not self.window_of(layer)]

    def window_of(self, layer: int) -> int:
        """Tokens of the layer's sliding window; 0: it attends to all tokens."""
        return self.windows[layer] if layer < len(self.windows) else 0

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's KV, all layers."""
        return self.num_layers * self.vectors * self.num_kv_heads * self.head_dim * self.value_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers."""
        return self.token_bytes * self.block_tokens

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer in one block. Each layer is contiguous."""
        return self.block_bytes // self.num_layers

    @property
    def layer_borders(self) -> Sequence[int]:
        """Where each layer begins in a block, and where the last one ends."""
        return range(0, self.block_bytes + 1, self.layer_bytes)

    @property
    def partial_bytes(self) -> int:
        """Bytes of the layers without a sliding window, in one block."""
        return len(self.layers_without_window) * self.layer_bytes

    def shape(self, num_blocks: int) -> tuple[int, int, int, int, int, int]:
        """Shape of a pool of `num_blocks` blocks."""
        return (num_blocks, self.num_layers, self.vectors, self.block_tokens, self.num_kv_heads, self.head_dim)

    def layers_for(self, num_values: int) -> int:
        """Number of layers that are needed to hold `num_values` values of the layout's dtype in each block."""
        return -(-num_values // (self.vectors * self.block_tokens * self.num_kv_heads * self.head_dim))

    def num_blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_tokens)

    def span(self, block_id: int) -> tuple[int, int]:
        """Byte range of a block in its memory, on the device and on the host alike."""
        return block_id * self.block_bytes, (block_id + 1) * self.block_bytes

    def layer_span(self, block_id: int, first_layer: int, stop_layer: int) -> tuple[int, int]:
        """Byte range of layers `[first_layer, stop_layer)` of a block."""
        base = block_id * self.block_bytes
        return base + first_layer * self.layer_bytes, base + stop_layer * self.layer_bytes

    def describe(self) -> dict[str, int | str]:
        """The layout as plain values, for keys, directories and messages."""
        return {
            "num_layers": self.num_layers,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "block_tokens": self.block_tokens,
            "dtype": self.dtype,
            # Only latents have this entry, so descriptions of all other models stay as they were.
            **({"latent_dim": self.latent_dim} if self.latent_dim else {}),
        }


def blocks_before_window(position: int, window: int, block_tokens: int) -> int:
    """Number of leading blocks to which a token at `position`, and all later tokens, do not attend in a layer with a
    sliding window of `window` tokens. Such a layer attends to the positions `(position - window, position]`; 0: to all.
    Of the blocks before `position`, the last one always counts as attended to.
    """
    if not window:
        return 0
    first: int = min(window_start(position, window), position - 1)
    return max(0, first) // block_tokens


def window_start(position: Any, window: int) -> Any:
    """The first position to which a token at `position` attends, an int or a tensor of ints, in a layer with a window
    of `window` tokens or in chunks. May be negative.
    """
    # rule: attention-chunk-reaches-back-to-its-border
    return position // window * window if isinstance(window, AttentionChunk) else position + 1 - window
