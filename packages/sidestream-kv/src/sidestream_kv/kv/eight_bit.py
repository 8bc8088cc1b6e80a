"""KV in 8 bits, for host memory and the tiers below it: each vector of a token (its key or its value in one head) as
signed bytes, followed by their scale. Knows sizes only, never a tensor; `device/eight_bit.py` has the arithmetic.

docs/decisions/0062-tiers-may-hold-kv-in-eight-bits.md has the reasons.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sidestream_kv.errors import ConfigError
from sidestream_kv.kv.layout import DTYPE_BYTES, KVLayout
from sidestream_kv.types import Vectors

SCALE_BYTES = 4
"""Bytes of a vector's scale, a float32."""

_PAGE_BYTES = 4096
# Smaller blocks do not end at a page: what is left of their last page would be a large part of them.
_WHOLE_PAGES_FROM = 16 * _PAGE_BYTES


@dataclass(frozen=True, slots=True)
class EightBitLayout:
    """Blocks of a layout `plain` whose vectors are packed. It has the same layers, in the same order."""

    plain: KVLayout

    @property
    def packed(self) -> Vectors:
        """The vectors of which a block consists."""
        elements, dtype = self.plain.head_dim, self.plain.dtype
        return Vectors(elements, dtype, elements * DTYPE_BYTES[dtype], elements + SCALE_BYTES)

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return self.plain.num_layers

    @property
    def block_tokens(self) -> int:
        """Tokens of one block."""
        return self.plain.block_tokens

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of a block."""
        vectors = self.packed
        return self.plain.layer_bytes // vectors.plain_bytes * vectors.packed_bytes

    @property
    def layer_borders(self) -> Sequence[int]:
        """Where each layer begins in a block, and where the last one ends."""
        return range(0, self.num_layers * self.layer_bytes + 1, self.layer_bytes)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: its layers and, so that a disk can read it past the page cache, the rest of a page."""
        num_bytes = self.num_layers * self.layer_bytes
        return num_bytes if num_bytes < _WHOLE_PAGES_FROM else -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES

    @property
    def layers_without_window(self) -> Sequence[int]:
        """The layers that attend to all tokens."""
        return self.plain.layers_without_window

    @property
    def partial_bytes(self) -> int:
        """Bytes of the layers without a sliding window, in one block."""
        return len(self.layers_without_window) * self.layer_bytes

    def span(self, block_id: int) -> tuple[int, int]:
        """Byte range of a block in its memory."""
        return block_id * self.block_bytes, (block_id + 1) * self.block_bytes

    def describe(self) -> dict[str, int | str]:
        """The layout as plain values: those of `plain`, and the form of the vectors."""
        return self.plain.describe() | {"stored_as": "int8 with a float32 scale for each vector"}


def layout_in_tiers(layout: KVLayout, kv_dtype: str) -> KVLayout | EightBitLayout:
    """The layout of blocks in host memory and the tiers below it. `kv_dtype`: see `OffloadConfig`. Raises ConfigError
    for vectors that cannot be packed.
    """
    if kv_dtype == "auto":
        return layout
    if layout.head_dim % SCALE_BYTES:
        raise ConfigError(
            f"kv_dtype is {kv_dtype}, but the vectors of the model's KV have {layout.head_dim} elements, no multiple "
            f"of {SCALE_BYTES}: leave kv_dtype out"
        )
    return EightBitLayout(layout)
