"""How a plan becomes device work, without graphs: one submission to the compute stream runs the whole flight.

`launch` returns at once; the token that a decode row continues from is on the device and need not be known to the host.
Called from the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from sidestream.attention.paged import PagedBatch
from sidestream.device.base import Device, Memory
from sidestream.execute.inputs import StepInputs, kv_accesses, make_inputs
from sidestream.execute.mailbox import Letter, Mailbox
from sidestream.execute.sample import sample
from sidestream.execute.state import DecodeState
from sidestream.kv.layout import KVLayout
from sidestream.types import Access, BatchPlan, Fence, LayerGates, RowResult

# One flight runs, one is launched behind it, one is being read.
_FLIGHTS = 3


class ForwardModel(Protocol):
    """What the executor needs of a model."""

    @property
    def layout(self) -> KVLayout:
        """Where its KV lies."""
        ...

    @property
    def vocab_size(self) -> int:
        """Width of its logits."""
        ...

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, batch: PagedBatch, logit_rows: torch.Tensor) -> torch.Tensor:
        """Float32 logits `[R, vocab_size]` at the packed positions `logit_rows`; on the compute stream."""
        ...


@dataclass(frozen=True, slots=True)
class Flight:
    """A launched batch; its fence covers the forward pass, the draws and their delivery. `gated`: it waits for loads."""

    batch: BatchPlan
    fence: Fence
    letter: Letter
    gated: bool
    top_logprobs: tuple[int, ...]
    mailbox: Mailbox

    @property
    def seconds(self) -> float:
        """Time of the flight on the device; behind the fence."""
        return float(self.letter.slot.seconds[0])

    def drop(self) -> None:
        """End the flight without reading it, because it failed; behind the fence."""
        self.letter.lease.release(after=(self.fence,))

    def results(self) -> tuple[RowResult, ...]:
        """What the sampling rows drew, in order; once, behind the fence."""
        return self.mailbox.read(self.letter, self.batch.rows, self.top_logprobs, self.fence)


class EagerExecutor:
    """Owner of the compute stream, the device's decode state and the mailbox.

    memory   the block pool, `num_blocks * layout.block_bytes` bytes
    """

    def __init__(self, *, device: Device, model: ForwardModel, memory: Memory, num_rows: int) -> None:
        self._model = model
        self._clock = device.now
        self._witnessed = device.witness is not None
        self._stream = device.stream("compute")
        self._state = DecodeState(num_rows, model.vocab_size)
        self._mailbox = Mailbox(_FLIGHTS, num_rows, device)
        layout = model.layout
        num_blocks = memory.num_bytes // layout.block_bytes
        dtype = getattr(torch, layout.dtype)
        self._kv = memory.data[: num_blocks * layout.block_bytes].view(dtype).view(layout.shape(num_blocks))
        self._wanted_logprobs: dict[int, int] = {}

    def launch(self, batch: BatchPlan, *, after: tuple[Fence, ...], gates: LayerGates) -> Flight:
        """Enqueue one flight behind `after`; layer by layer behind `gates`. Returns at once."""
        inputs = make_inputs(batch, self._model.layout)
        for row in batch.rows:
            if row.begin is not None:
                self._wanted_logprobs[row.row] = row.begin.sampling.top_logprobs
        letter = self._mailbox.address()
        for fence in after:
            self._stream.wait(fence)
        decodes = inputs.num_decode
        label = f"decode {decodes}" if decodes == len(batch.rows) else f"prefill {batch.num_tokens - decodes}"
        if 0 < decodes < len(batch.rows):
            label += f" + decode {decodes}"
        gated = bool(gates.by_layer)
        fence = self._stream.submit(
            lambda: self._run(batch, inputs, letter, self._gate(gates, batch)),
            lambda: self._accesses(batch, letter, gated=gated),
            label=label,
        )
        wanted = tuple(self._wanted_logprobs[row.row] for row in batch.rows if row.samples)
        return Flight(batch, fence, letter, gated, wanted, self._mailbox)

    def _accesses(self, batch: BatchPlan, letter: Letter, *, gated: bool) -> list[Access]:
        """What a flight touches from its start: all its KV, unless it gets to that layer by layer."""
        layout = self._model.layout
        return [letter.access(write=True), *([] if gated else kv_accesses(batch.rows, layout, range(layout.num_layers)))]

    def _gate(self, gates: LayerGates, batch: BatchPlan) -> Callable[[int], None]:
        """What the attention calls before it touches a layer's KV: waits, on the device, for that layer's loads (H5)."""
        if not gates.by_layer:
            return lambda layer: None

        def before_layer(layer: int) -> None:
            for fence in gates.by_layer[layer]:
                self._stream.wait(fence)
            if self._witnessed:
                self._stream.touch(lambda: kv_accesses(batch.rows, self._model.layout, range(layer, layer + 1)))

        return before_layer

    def _run(self, batch: BatchPlan, inputs: StepInputs, letter: Letter, before_layer: Callable[[int], None]) -> None:
        """The flight itself. On the compute stream."""
        start = self._clock()
        with torch.inference_mode():
            for row in batch.rows:
                if row.begin is not None:
                    self._state.begin(row.row, row.begin)
            tokens = inputs.tokens
            if inputs.state_rows:
                tokens = tokens.index_copy(0, inputs.from_state, self._state.last_tokens(inputs.state_rows))
            paged = PagedBatch(
                kv=self._kv,
                slots=inputs.slots,
                block_tables=inputs.block_tables,
                query_starts=inputs.query_starts,
                kv_lens=inputs.kv_lens,
                num_decode=inputs.num_decode,
                before_layer=before_layer,
            )
            logits = self._model.forward(tokens, inputs.positions, paged, inputs.logit_rows)
            sampling = [row for row in batch.rows if row.samples]
            if sampling:
                rows = [row.row for row in sampling]
                drawn = sample(logits, rows, [row.output_index for row in sampling], self._state)
                self._state.commit(rows, drawn.tokens)
                self._mailbox.write(letter, drawn)
        letter.slot.seconds[0] = self._clock() - start
