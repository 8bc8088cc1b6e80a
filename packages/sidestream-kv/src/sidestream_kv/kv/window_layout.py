"""Where KV lies if layers with a sliding window have blocks of their own: these are freed as soon as they are behind
the window.

Knows sizes only, never a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from sidestream_kv.kv.layout import KVLayout, blocks_before_window

# Largest share of a token's bytes that pages may leave unused: with more, short sequences would take too much memory.
_MOST_UNUSED = 1 / 5


@dataclass(frozen=True, slots=True)
class WindowedLayers:
    """The layers of a model in two groups. All blocks of the pool have one size: the layers without a window. A block
    holds these layers for `block_tokens` tokens of a sequence. The layers with a window take `parts` further blocks for
    the same tokens, which together are a *page*. The end of a page's last block may be unused.

    blocks   layout of one block
    layers   numbers of the model's layers with a window, in order
    window   tokens of the largest window
    """

    blocks: KVLayout
    layers: tuple[int, ...]
    window: int

    @classmethod
    def of(cls, layout: KVLayout) -> Self | None:
        """Divide the layers of `layout`. None: they stay together, because all layers have a window or none has, or
        because pages would leave too much unused.
        """
        layers = tuple(layer for layer in range(layout.num_layers) if layout.window_of(layer))
        count = layout.num_layers - len(layers)
        if not layers or not count:
            return None
        divided = cls(replace(layout, num_layers=count, windows=()), layers, layout.window)
        unused = divided.parts * count - len(layers)
        return divided if unused <= _MOST_UNUSED * layout.num_layers else None

    @property
    def parts(self) -> int:
        """Number of blocks of a page."""
        return -(-len(self.layers) // self.blocks.num_layers)

    def places(self, num_layers: int) -> list[tuple[int, int]]:
        """For each of the model's layers, the part of a page that holds it (-1: it has no window), and its index among
        the layers of that part's block.
        """
        places, of_pages = [(-1, 0)] * num_layers, {layer: index for index, layer in enumerate(self.layers)}
        for layer in range(num_layers):
            if layer in of_pages:
                places[layer] = divmod(of_pages[layer], self.blocks.num_layers)
            else:
                places[layer] = -1, layer - sum(other < layer for other in self.layers)
        return places

    def behind(self, num_tokens: int) -> int:
        """Number of leading blocks whose pages no token after the first `num_tokens` reads."""
        return blocks_before_window(num_tokens, self.window, self.blocks.block_tokens)

    def most_pages(self, num_tokens: int, new_tokens: int) -> int:
        """Largest number of pages that a sequence of up to `num_tokens` tokens holds, with `new_tokens` tokens in steps
        in flight, if pages are released whenever a block is complete.
        """
        size = self.blocks.block_tokens
        return min(-(-num_tokens // size), -(-(self.window + new_tokens) // size) + 3)

    def longest(self, num_blocks: int, new_tokens: int) -> int:
        """Largest number of tokens of a sequence that fits into `num_blocks` blocks, with its pages."""
        size, bounded = self.blocks.block_tokens, self.most_pages(num_blocks * self.blocks.block_tokens, new_tokens)
        return max(num_blocks // (1 + self.parts), num_blocks - self.parts * bounded) * size
