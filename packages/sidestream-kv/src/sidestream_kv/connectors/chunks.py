"""Keys and layout of opaque chunks of another engine's host memory. Knows no engine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby, pairwise
from typing import Any

from sidestream_kv.errors import ConfigError
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
    """Blocks of one worker, with bytes in several regions of memory: see `LayeredLayout`, where a region is a layer.

    parts  bytes of a block in each region, `block_bytes` together
    """

    parts: tuple[int, ...] = ()

    def describe(self) -> dict[str, int | str]:
        """See `ChunkLayout`. The number of regions, with their bytes if these differ."""
        return {**ChunkLayout.describe(self), "parts": _in_words(self.parts)}  # rule: layout-has-its-parts

    @property
    def num_layers(self) -> int:
        """Number of regions."""
        return len(self.parts)

    @property
    def layer_borders(self) -> tuple[int, ...]:
        """Where each region's bytes begin in a block, and where the last ones end."""
        return tuple(accumulate(self.parts, initial=0))

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


def _in_words(parts: Sequence[int]) -> str:
    runs = [(len([*run]), size) for size, run in groupby(parts)]
    return str(len(parts)) if len(runs) == 1 else " + ".join(f"{count} x {size}" for count, size in runs)


def check_apart(regions: Iterable[tuple[int, int]]) -> None:
    """Raises ConfigError if regions, given by their first address and the one after their last, overlap."""
    if any(start < stop for (_, stop), (start, _) in pairwise(sorted(regions))):  # rule: regions-are-apart
        raise ConfigError(
            "SidestreamConnector: groups of layers have blocks of different sizes in the same memory, so it is not "
            "known which bytes a block has: use the secondary tier (docs/vllm.md) instead"
        )


def key_of(key: bytes) -> Key:
    """Our key of an engine's key: a hash of tokens, and of vLLM the index of a group of layers, of SGLang the part of
    a page.
    """
    return hashlib.blake2b(key, digest_size=_KEY_BYTES).digest()  # rule: key-of-a-chunk-has-its-group


def digest_of(value: Any) -> str:
    """A short digest of plain values, for a field of which only equality matters."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=8).hexdigest()
