"""Layers with a sliding window in blocks of their own: where a layer lies, and how much a sequence holds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sidestream_kv.kv.layout import AttentionChunk, KVLayout
from sidestream_kv.kv.window_layout import WindowedLayers

LAYOUT = KVLayout(8, 2, 8, 4, "float32", windows=(6, 6, 0, 6, 6, 6, 0))


def divided(layout: KVLayout = LAYOUT) -> WindowedLayers:
    windows = WindowedLayers.of(layout)
    assert windows is not None
    return windows


def test_layers_without_a_window_share_blocks_and_the_others_share_pages() -> None:
    windows = divided()
    assert windows.blocks == replace(LAYOUT, num_layers=3, windows=())
    assert (windows.layers, windows.window, windows.parts) == ((0, 1, 3, 4, 5), 6, 2)
    # layers 2, 6 and 7 have no window; the page's second block holds layers 4 and 5
    assert windows.places(8) == [(0, 0), (0, 1), (-1, 0), (0, 2), (1, 0), (1, 1), (-1, 1), (-1, 2)]


@pytest.mark.parametrize("windows", [(), (6,) * 8, (6,)], ids=["no window", "all windows", "page mostly unused"])
def test_layers_stay_together_where_pages_save_nothing(windows: tuple[int, ...]) -> None:
    assert WindowedLayers.of(replace(LAYOUT, windows=windows)) is None


@pytest.mark.parametrize("window", [6, AttentionChunk(6), AttentionChunk(9)])
def test_a_sequence_never_holds_more_pages_than_its_bound(window: int) -> None:
    windows = replace(divided(), window=window)
    for new in (1, 3, 9, 40):
        for start in range(200):
            held = -(-(start + new) // 4) - windows.behind(start // 4 * 4)  # released when a block was complete
            assert held <= windows.most_pages(start + new, new)


def test_the_longest_sequence_fits_with_its_pages() -> None:
    windows = divided()
    for num_blocks in range(3, 120):
        blocks = windows.longest(num_blocks, 9) // 4
        assert blocks + 2 * windows.most_pages(blocks * 4, 9) <= num_blocks
        assert (blocks + 1) * 3 > num_blocks or blocks + 1 + 2 * windows.most_pages(num_blocks * 4, 9) > num_blocks
