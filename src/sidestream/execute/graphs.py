"""Forward passes that were captured once, by shape, and are replayed: the host's part of a step is one call, however many layers there are.

Each shape has two graphs: one for batches whose KV is all there, and one that waits for loads on their way, group of layers by group of
layers (H5). Both read the shape's frame (`execute/frame.py`) and leave logits where they always are. Engine thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from sidestream.attention.paged import AttentionBatch, PagedBatch
from sidestream.attention.triton import DeviceBatch, Partials
from sidestream.attention.triton.batch import ungated
from sidestream.device.base import Device, Graph, Stream
from sidestream.errors import InvariantError, OutOfDeviceMemory
from sidestream.execute.frame import Frame, Shape, shape_of, smallest
from sidestream.execute.state import DecodeState
from sidestream.types import BatchPlan, LayerGates

logger = logging.getLogger(__name__)

Forward = Callable[[Tensor, Tensor, AttentionBatch, Tensor], Tensor]


class GateEvent(Protocol):
    """What a captured wait waits for: its last record before the replay."""

    def record(self, stream: Any) -> object:
        """Make it stand for what the stream was given so far."""
        ...


@dataclass(slots=True, eq=False)
class _Pass:
    """One graph, and where it leaves its logits."""

    graph: Graph | None = None
    logits: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Captured:
    """One shape's graphs."""

    frame: Frame
    plain: _Pass
    gated: _Pass


class Graphs:
    """Owner of the frames and graphs of one executor.

    kv           the pool by layer, as attention takes it
    partials     buffers of attention's kernels on a GPU; None: attention by torch, which reads a frame on the host when it is replayed
    gates        a stream of its own, on which gates are recorded
    gate_layers  layers that wait together, in the gated graphs; 0: there are none, and nothing gated is replayed
    """

    def __init__(
        self,
        *,
        device: Device,
        stream: Stream,
        gates: Stream,
        forward: Forward,
        kv: Tensor,
        partials: Partials | None,
        state: DecodeState,
        gate_layers: int,
    ) -> None:
        self._device = device
        self._stream = stream
        self._gates = gates
        self._forward = forward
        self._kv = kv
        self._partials = partials
        self._state = state
        self._captured: dict[Shape, Captured] = {}
        self._groups: list[range] = []
        self._events: list[GateEvent] = []
        if gate_layers:
            num_layers = kv.shape[1]
            self._groups = [range(first, min(first + gate_layers, num_layers)) for first in range(0, num_layers, gate_layers)]
            self._events = [device.event(f"gate {group.start}") for group in self._groups]  # type: ignore[attr-defined]
            for event in self._events:
                event.record(gates)  # a wait for one that never was would be nothing

    @property
    def shapes(self) -> Sequence[Shape]:
        """What was captured."""
        return list(self._captured)

    def capture(self, shapes: Iterable[Shape], *, tell: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Capture the shapes in their order, and replay each once, on padding. Blocks; before serving only.

        When memory ends, what was captured by then stays and a warning says so. Raises what else a forward pass raises. `tell` is given how
        many are done, of how many.
        """
        shapes = list(shapes)
        for number, shape in enumerate(shapes):
            tell(number, len(shapes))
            try:
                self._captured[shape] = self._capture(shape)
            except OutOfDeviceMemory as error:
                logger.warning(
                    "the GPU's memory holds %d of %d captured shapes (%s): larger batches run without a graph, slower",
                    number,
                    len(shapes),
                    error,
                )
                return
        tell(len(shapes), len(shapes))

    def find(self, batch: BatchPlan, *, gated: bool) -> Captured | None:
        """The graphs of the shape with the least padding that the batch fits in; None: it runs without one."""
        if gated and not self._groups:
            return None
        shape = smallest(self.shapes, *shape_of(batch))
        return None if shape is None else self._captured[shape]

    def close_gates(self, gates: LayerGates) -> None:
        """Have the next replay of a gated graph wait for these loads, each group of layers for its own."""
        for group, event in zip(self._groups, self._events, strict=True):
            for fence in dict.fromkeys(fence for layer in group for fence in gates.by_layer[layer]):
                self._gates.wait(fence)
            event.record(self._gates)

    def replay(self, captured: Captured, *, gated: bool) -> Tensor:
        """Enqueue a shape's graph, whose frame was filled. Inside work of the compute stream.

        Returns its logits, float32 `[shape.rows, vocab]`: the first ones are those of the rows that sample, in their order.
        """
        chosen = captured.gated if gated else captured.plain
        self._stream.enqueue(chosen.graph)
        if chosen.logits is None:
            raise InvariantError(f"the graph of {captured.frame.shape} was never captured")
        return chosen.logits

    def _capture(self, shape: Shape) -> Captured:
        captured = Captured(Frame.allocate(shape, self._state.tables.device, nobody=self._state.nobody), _Pass(), _Pass())
        events = dict(zip((group.start for group in self._groups), self._events, strict=True))

        def run(into: _Pass, before_layer: Callable[[int], None]) -> None:
            with torch.inference_mode():
                into.logits = self._run(captured.frame, before_layer)

        def wait(layer: int) -> None:
            if layer in events:
                self._stream.wait_external(events[layer])  # type: ignore[attr-defined]

        self._finish(lambda: run(captured.plain, ungated))  # what compiles, tunes itself or allocates does so now
        beside = next((other.plain.graph for other in self._captured.values()), None)
        captured.plain.graph = self._stream.capture(lambda: self._submit(lambda: run(captured.plain, ungated)), beside=beside)
        if events:
            captured.gated.graph = self._stream.capture(
                lambda: self._submit(lambda: run(captured.gated, wait)), beside=captured.plain.graph
            )
        for gated in (False, True)[: 1 + bool(events)]:  # a graph's first replay takes longer
            self._finish(lambda gated=gated: self._replay(captured, gated=gated))  # type: ignore[misc]
        return captured

    def _replay(self, captured: Captured, *, gated: bool) -> None:
        self.replay(captured, gated=gated)

    def _run(self, frame: Frame, before_layer: Callable[[int], None]) -> Tensor:
        tokens, slots, tables = frame.inputs(self._state, self._kv.shape[3])
        if self._partials is None:
            return self._run_on_host(frame, tokens, slots, tables, before_layer)
        split_rows, split_queries = frame.shape.splits
        batch = DeviceBatch(
            kv=self._kv,
            slots=slots,
            block_tables=tables,
            query_starts=frame.query_starts,
            kv_lens=frame.kv_lens,
            split_rows=split_rows,
            split_queries=split_queries,
            partials=self._partials,
            before_layer=before_layer,
        )
        return self._forward(tokens, frame.positions, batch, frame.logit_rows.clamp(min=0))

    def _run_on_host(self, frame: Frame, tokens: Tensor, slots: Tensor, tables: Tensor, before_layer: Callable[[int], None]) -> Tensor:
        """The same without padding, which attention by torch does not know."""
        starts, lens = frame.query_starts.tolist(), frame.kv_lens.tolist()
        rows = [row for row in range(frame.shape.rows) if starts[row + 1] > starts[row]]
        sampling = frame.logit_rows[frame.logit_rows >= 0]
        count = starts[-1]
        if not count:
            return torch.zeros(0)
        batch = PagedBatch(
            kv=self._kv,
            slots=slots[:count],
            block_tables=tables[rows].to(torch.int64),
            query_starts=(0, *(starts[row + 1] for row in rows)),
            kv_lens=tuple(lens[row] for row in rows),
            num_decode=sum(row < frame.shape.decodes for row in rows),
            before_layer=before_layer,
        )
        return self._forward(tokens[:count], frame.positions[:count], batch, sampling)

    def _submit(self, work: Callable[[], None]) -> None:
        self._stream.submit(work, label="capture")

    def _finish(self, work: Callable[[], None]) -> None:
        fence = self._stream.submit(work, label="capture")
        self._device.wait_host(fence, reason="flight")
        if fence.failure is not None:
            raise fence.failure
