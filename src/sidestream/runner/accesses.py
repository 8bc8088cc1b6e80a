"""Computes the byte ranges of the KV pool and of the recurrent states that a step reads and writes. Steps declare them
to the order checker. Knows ids and sizes, never a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from sidestream.types import RowPlan
from sidestream_kv.kv.layout import KVLayout, blocks_before_window
from sidestream_kv.kv.state_layout import StateRegion
from sidestream_kv.kv.window_layout import WindowedLayers
from sidestream_kv.types import Access


class StepAccesses(NamedTuple):
    """The accesses of one step, as a whole or layer by layer.

    memory    name of the memory that holds the blocks and the states
    scratch   id of the block where steps write hidden states that are not kept; None: there is none
    rows      the rows of the step
    layout    layout of the blocks
    region    location of the recurrent states; None: the model has no recurrent state
    windows   the layers with blocks of their own; None: there are none
    """

    memory: str
    scratch: int | None
    rows: Sequence[RowPlan]
    layout: KVLayout
    region: StateRegion | None
    windows: WindowedLayers | None = None

    def layers(self, layers: range) -> Sequence[Access]:
        """Accesses of these layers to the KV of the rows. The layers in pages come after those in blocks, see
        `grouped_batch`.
        """
        if self.windows is not None and layers.start >= self.layout.num_layers:
            part, layer = divmod(layers.start - self.layout.num_layers, self.layout.num_layers)
            return page_accesses(self.memory, self.rows, self.windows, part, range(layer, layer + len(layers)))
        accesses = kv_accesses(self.memory, self.rows, self.layout, layers)
        if self.scratch is not None:
            span = self.layout.layer_span(self.scratch, layers.start, layers.stop)
            accesses.append(Access(self.memory, *span, write=True))  # rule: step-declares-its-scratch-block
        return accesses

    def all(self) -> Sequence[Access]:
        """Accesses of all layers, and to the recurrent states."""
        return [*self.layers(range(self.layout.num_layers)), *self._pages(), *self.states()]

    def of_drafting_rows(self) -> Sequence[Access]:
        """Accesses of all layers, only for the rows with drafts."""
        drafting = self._replace(rows=[row for row in self.rows if row.drafts])
        return drafting.layers(range(self.layout.num_layers))

    def _pages(self) -> Sequence[Access]:
        if (windows := self.windows) is None:
            return ()
        size, last = self.layout.num_layers, len(windows.layers)
        return [
            access
            for part in range(windows.parts)
            for access in page_accesses(self.memory, self.rows, windows, part, range(min(size, last - part * size)))
        ]

    def states(self) -> Sequence[Access]:
        """Accesses to the recurrent states."""
        return () if self.region is None else state_accesses(self.memory, self.rows, self.region)


def kv_accesses(memory: str, rows: Sequence[RowPlan], layout: KVLayout, layers: range) -> list[Access]:
    """The byte ranges of the pool that some layers of a step read (blocks before the chunk) and write (blocks of the
    chunk). Layers with a sliding window do not read blocks before it.
    """
    size = layout.block_tokens
    accesses = []
    for row in rows:
        for run, window in _runs(layout, layers):
            # rule: windowed-layer-declares-what-it-reads
            first = blocks_before_window(row.min_start, window, size)
            for index, block in enumerate(row.block_table[first:], first):
                start, stop = layout.layer_span(block, run.start, run.stop)
                # rule: step-declares-what-it-reads, each-row-declares-what-it-reads, step-declares-all-that-it-writes
                accesses.append(Access(memory, start, stop, write=(index + 1) * size > row.min_start))
    return accesses


def page_accesses(
    memory: str, rows: Sequence[RowPlan], windows: WindowedLayers, part: int, layers: range
) -> list[Access]:
    """The byte ranges that some layers in one part of the pages read and write. The unused end of a page counts as a
    part of its last layer.
    """
    layout, size = windows.blocks, windows.blocks.block_tokens
    last = part * layout.num_layers + layers.stop == len(windows.layers)
    end = layout.num_layers if last else layers.stop
    accesses = []
    for row in rows:
        table = row.window_table[part :: windows.parts]
        # rule: step-declares-its-pages
        first = windows.behind(row.min_start)
        for index, block in enumerate(table[first:], first):
            start, stop = layout.layer_span(block, layers.start, end)
            accesses.append(Access(memory, start, stop, write=(index + 1) * size > row.min_start))
    return accesses


def _runs(layout: KVLayout, layers: range) -> Iterator[tuple[range, int]]:
    """The layers in runs of neighbours with the same sliding window (0: none)."""
    for window, run in groupby(layers, key=layout.window_of):
        numbers = list(run)
        yield range(numbers[0], numbers[-1] + 1), window


def state_accesses(memory: str, rows: Sequence[RowPlan], region: StateRegion) -> list[Access]:
    """The byte ranges of the recurrent states that a step reads and writes. Two states are reserved: sequences begin
    with the zero state, and padding and rows without a checkpoint write the scratch state.
    """
    # rule: step-declares-the-reserved-states
    accesses = [
        Access(memory, *region.span(region.zero), write=False),
        Access(memory, *region.span(region.scratch), write=True),
    ]
    for ids in (row.states for row in rows):
        if ids is None:
            continue
        if ids.read >= 0:
            # rule: step-declares-the-state-that-it-reads
            accesses.append(Access(memory, *region.span(ids.read), write=False))
        for state_id in (ids.write, ids.checkpoint):
            if state_id >= 0:
                # rule: step-declares-the-states-that-it-writes
                accesses.append(Access(memory, *region.span(state_id), write=True))
    return accesses
