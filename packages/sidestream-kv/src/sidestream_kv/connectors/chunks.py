"""Keys and layout of opaque chunks of another engine's host memory. Knows no engine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sidestream_kv.types import Key

_KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """Opaque chunks of an engine's host memory.

    fields  what the bytes depend on besides the weights, by name
    """

    block_bytes: int
    block_tokens: int
    fields: Mapping[str, str] = field(default_factory=dict)

    def describe(self) -> dict[str, int | str]:
        """The layout as plain values, for directories and messages."""
        return {
            "block_bytes": self.block_bytes,
            "block_tokens": self.block_tokens,
            **self.fields,
        }  # rule: layout-has-all-fields


@dataclass(frozen=True, slots=True)
class RegionLayout(ChunkLayout):
    """Blocks of one worker, each of which has equally many bytes in several regions of memory: see `LayeredLayout`,
    where a region is a layer.
    """

    num_layers: int = 1

    @property
    def layer_bytes(self) -> int:
        """Bytes of a block in one region."""
        return self.block_bytes // self.num_layers

    @property
    def layers_without_window(self) -> range:
        """All regions: groups of layers with a sliding window have blocks of their own."""
        return range(self.num_layers)

    @property
    def partial_bytes(self) -> int:
        """Bytes of a block."""
        return self.block_bytes

    def span(self, block_id: int) -> tuple[int, int]:
        """Byte range of a block, as if its regions lay one after another."""
        return block_id * self.block_bytes, (block_id + 1) * self.block_bytes


def key_of(key: bytes) -> Key:
    """Our key of an engine's key: a hash of tokens, and of vLLM the index of a group of layers, of SGLang the part of
    a page.
    """
    return hashlib.blake2b(key, digest_size=_KEY_BYTES).digest()  # rule: key-of-a-chunk-has-its-group


def digest_of(value: Any) -> str:
    """A short digest of plain values, for a field of which only equality matters."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=8).hexdigest()
