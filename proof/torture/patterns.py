"""Writes test patterns to blocks, and compares blocks with them, on the device. Each 8-byte word of a pattern holds the
key of its block and the offset of the word, so a misplaced word is recognised. Called by the thread that acts as the
engine thread. It waits for the device in two cases only: before pinned memory is reused, and in `take_results`.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from proof.rig import busy
from sidestream.errors import ConfigError
from sidestream_kv.device.base import Device, Memory, Stream, no_accesses
from sidestream_kv.kv.layout import LayeredLayout
from sidestream_kv.kv.pool import merge_fences
from sidestream_kv.offload.tiers.stack import BlockMemory, HostTier
from sidestream_kv.types import Access, Fence, Key

Words = npt.NDArray[np.int64]

WORD_BYTES = 8
# Fields of a word, from the high bits: generation of the key (number of cache resets), number of the key, offset in the
# block in words.
_PLACE_BITS = 20
_NUMBER_BITS = 31
# Limit of concurrent `write` and `look` calls. Each needs a row of pinned memory for its inputs: by block, its id, the
# number of its key, and whether it is partial.
_STEPS = 32
_INPUTS = 3
# Slots that are compared together; limits the size of temporary arrays.
_SLOTS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Found:
    """Wrong content in a block.

    row      index of the block in the `block_ids` of the `look` call
    place    byte in the block
    word     the wrong word
    num_bad  number of blocks of the `look` call that are wrong in this layer, including this block; 1 in results of
             `wrong_slots`
    """

    row: int
    place: int
    word: int
    num_bad: int


def stamp_of(number: int, generation: int) -> int:
    """The part that all words of a key's pattern share: generation and number of the key."""
    return generation << _NUMBER_BITS | number


def describe(word: int) -> str:
    """The key, generation and offset that a word encodes, as text."""
    stamp, place = word >> _PLACE_BITS, word & (1 << _PLACE_BITS) - 1
    number, generation = stamp & (1 << _NUMBER_BITS) - 1, stamp >> _NUMBER_BITS
    return f"{word & (1 << 64) - 1:#018x} (key {number} of generation {generation}, byte {place * WORD_BYTES})"


class Patterns:
    """Writes patterns into blocks of `memory` and compares them.

    max_blocks   most blocks of one `write` or `look` call
    max_looks    most `look` calls between two calls of `take_results`
    """

    def __init__(self, device: Device, memory: BlockMemory, *, max_blocks: int, max_looks: int) -> None:
        layout = memory.layout
        if (
            any(border % WORD_BYTES for border in layout.layer_borders)
            or layout.block_bytes >> _PLACE_BITS >= WORD_BYTES
        ):
            raise ConfigError(
                f"a block with layers at {[*layout.layer_borders]} bytes cannot hold a pattern: "
                f"the size of a layer must be a multiple of {WORD_BYTES} bytes, and the block smaller than "
                f"{WORD_BYTES << _PLACE_BITS} bytes"
            )
        self._device = device
        self._memory = memory
        self._words = [slice(*ends) for ends in pairwise(border // WORD_BYTES for border in layout.layer_borders)]
        self._windowed = [layer not in layout.layers_without_window for layer in range(layout.num_layers)]
        self._layers = _layers(memory.memory, self._words)
        self._places, self._results = _constants(device, layout, max_looks)
        inputs = device.allocate_host("torture: inputs", _STEPS * _INPUTS * max_blocks * WORD_BYTES)
        results = device.allocate_host("torture: results", self._results.numel() * WORD_BYTES)
        self._inputs = inputs.data.view(torch.int64).view(_STEPS, _INPUTS, max_blocks)
        self._results_host = results.data.view(torch.int64).view(self._results.shape)
        self._free: deque[tuple[int, Fence | None]] = deque((row, None) for row in range(_STEPS))
        self._steps: list[Fence] = []
        self._num_looks = 0

    @property
    def looks_left(self) -> int:
        """Number of `look` calls before the results must be taken."""
        return len(self._results) - self._num_looks

    def write(
        self, stream: Stream, block_ids: Sequence[int], stamps: Words, *, after: Sequence[Fence], delay_s: float
    ) -> Fence:
        """Write the patterns into the blocks on `stream`, after the fences `after` and a delay."""
        row = self._upload(block_ids, stamps)
        count = len(block_ids)

        def work() -> None:
            busy(self._device, delay_s)
            ids, words, _ = self._read_inputs(row, count)
            for of_layer, blocks in zip(self._words, self._layers, strict=True):
                blocks.index_copy_(0, ids, words[:, of_layer])

        for fence in after:
            stream.wait(fence)
        fence = stream.submit(work, lambda: self._memory.accesses(block_ids, write=True), label=f"write {count} blocks")
        return self._sent(row, fence)

    def look(
        self,
        stream: Stream,
        block_ids: Sequence[int],
        stamps: Words,
        *,
        partial: Sequence[bool] = (),
        after: Sequence[Fence] = (),
        gates: Sequence[Sequence[Fence]] = (),
        delay_s: float,
    ) -> tuple[int, Fence]:
        """Compare the blocks with the patterns on `stream`. Returns the number of the look and its fence.

        partial   for each block, whether to compare only its layers without a sliding window; empty: compare all layers
        after     done before any access
        gates     for each layer, the fences to wait for before the layer is read; empty: none
        """
        row = self._upload(block_ids, stamps, partial)
        whole = [block for block, skips in zip(block_ids, partial, strict=True) if not skips] if partial else block_ids
        count = len(block_ids)
        number, self._num_looks = self._num_looks, self._num_looks + 1

        def work() -> None:
            busy(self._device, delay_s)
            ids, words, skipped = self._read_inputs(row, count)
            for layer, blocks in enumerate(self._layers):
                for gate in gates[layer] if gates else ():
                    stream.wait(gate)
                read = whole if self._windowed[layer] else block_ids
                stream.touch(functools.partial(_reads, self._memory, read, layer))
                found = blocks.index_select(0, ids)
                wrong = found != words[:, self._words[layer]]
                if self._windowed[layer]:
                    wrong &= ~skipped
                place = wrong.view(-1).to(torch.uint8).argmax().view(1)
                word = found.view(-1).index_select(0, place)
                torch.cat((wrong.any(dim=1).sum().view(1), place, word), out=self._results[number, layer])

        for fence in after:
            stream.wait(fence)
        fence = stream.submit(work, no_accesses, label=f"look at {count} blocks")
        return number, self._sent(row, fence)

    def take_results(self, stream: Stream, judge: Callable[[int, Found], None]) -> None:
        """Wait for all `write` and `look` calls so far. Then call `judge` once for each look and layer with wrong
        bytes. Blocks the calling thread.

        Raises the exception of a call's work.
        """

        def work() -> None:
            self._results_host.copy_(self._results, non_blocking=True)
            self._results.zero_()

        for fence in merge_fences(self._steps):
            stream.wait(fence)
        self._steps.append(stream.submit(work, label="results"))
        self._device.wait_host(self._steps[-1], reason="torture")
        _raise_failures(self._steps)
        self._steps.clear()
        results = self._results_host.numpy()
        for number, layer in np.argwhere(results[: self._num_looks, :, 0]).tolist():
            num_bad, position, word = results[number, layer].tolist()
            of_layer = self._words[layer]
            row, place = divmod(position, of_layer.stop - of_layer.start)
            judge(number, Found(row, (of_layer.start + place) * WORD_BYTES, word, num_bad))
        self._num_looks = 0

    def expected(self, stamp: int, place: int) -> int:
        """The word at byte `place` of the pattern with this stamp."""
        return stamp << _PLACE_BITS | place // WORD_BYTES

    # ------------------------------------------------------------------ private

    def _upload(self, block_ids: Sequence[int], stamps: Words, partial: Sequence[bool] = ()) -> int:
        """Copy the inputs of a `write` or `look` call to a free row of pinned memory."""
        row, fence = self._free.popleft()
        if fence is not None:
            self._device.wait_host(fence, reason="torture")
        inputs = self._inputs[row].numpy()
        inputs[0, : len(block_ids)] = block_ids
        inputs[1, : len(block_ids)] = stamps
        inputs[2, : len(block_ids)] = partial or 0
        return row

    def _sent(self, row: int, fence: Fence) -> Fence:
        self._free.append((row, fence))
        self._steps.append(fence)
        return fence

    def _read_inputs(self, row: int, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """On the device: block ids `[count]`, expected words `[count, words]`, and whether each block is partial, bool
        `[count, 1]`. Called inside work of a stream.
        """
        # Sliced after the copy, because a copy of a contiguous row needs no staging buffer.
        inputs = self._inputs[row].to(self._device.torch_device, non_blocking=True)[:, :count]
        words = (inputs[1] << _PLACE_BITS).view(-1, 1) | self._places
        return inputs[0], words, inputs[2].bool().view(-1, 1)


def wrong_slots(host: HostTier, stamps: Mapping[Key, int]) -> list[tuple[Key, Found]]:
    """Compare the host slots of these keys with their patterns. Keys that the host tier does not hold are skipped. No
    transfer may be running.

    `Found.row` is the slot.
    """
    keyed = [(slot, key) for key in stamps if (slot := host.pool.get(key)) is not None]
    slots = host.memory.data.numpy().view(np.int64).reshape(host.num_slots, -1)
    places = np.arange(slots.shape[1], dtype=np.int64)
    wrong = []
    for first in range(0, len(keyed), _SLOTS_AT_ONCE):
        part = keyed[first : first + _SLOTS_AT_ONCE]
        expected = np.array([[stamps[key]] for _, key in part], dtype=np.int64) << _PLACE_BITS | places
        found = slots[[slot for slot, _ in part]]
        differs = found != expected
        for index in np.flatnonzero(differs.any(axis=1)).tolist():
            place = int(differs[index].argmax())
            slot, key = part[index]
            wrong.append((key, Found(slot, place * WORD_BYTES, int(found[index, place]), 1)))
    return wrong


def _constants(device: Device, layout: LayeredLayout, max_looks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Offsets in a block, int64 `[words]`, and empty results, int64 `[max_looks, layers, 3]`. Waits until the device
    has filled them, so that every stream may use them.
    """
    made: list[torch.Tensor] = []

    def work() -> None:
        made.append(torch.arange(layout.block_bytes // WORD_BYTES, dtype=torch.int64, device=device.torch_device))
        made.append(torch.zeros(max_looks, layout.num_layers, 3, dtype=torch.int64, device=device.torch_device))

    fence = device.stream("torture: begin").submit(work)
    device.wait_host(fence, reason="torture")
    _raise_failures([fence])
    places, results = made
    return places, results


def _raise_failures(fences: Sequence[Fence]) -> None:
    for fence in fences:
        if fence.failure is not None:
            raise fence.failure


def _layers(memory: Memory, words: Sequence[slice]) -> list[torch.Tensor]:
    """A view of each layer of all blocks, int64 `[blocks, words]`."""
    if len(memory.parts) == 1:
        blocks = memory.data.view(torch.int64).view(-1, words[-1].stop)
        return [blocks[:, of_layer] for of_layer in words]
    return [
        part.view(torch.int64).view(-1, of_layer.stop - of_layer.start)
        for part, of_layer in zip(memory.parts, words, strict=True)
    ]


def _reads(memory: BlockMemory, block_ids: Sequence[int], layer: int) -> list[Access]:
    name, layout = memory.memory.name, memory.layout
    begins, ends = layout.layer_borders[layer : layer + 2]
    starts = [layout.span(block_id)[0] for block_id in block_ids]
    return [Access(name, start + begins, start + ends, False) for start in starts]
