"""Forward passes that were captured once, by shape, and are replayed: the host's part of a step is one call, however
many layers there are.

Each shape has two graphs: one for batches whose KV is all there, and one that waits for loads on their way, group of
layers by group of layers (H5). Both read the shape's frame (`runner/frame.py`) and leave what they computed where it
always is. Engine thread.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from sidestream.attention.interface import AttentionBackend, AttentionBatch, BatchRows, HostLengths, ungated
from sidestream.device.base import Device, Graph, Stream
from sidestream.errors import InvariantError, OutOfDeviceMemory
from sidestream.runner.draws import SamplingMode, draw_frame
from sidestream.runner.forward import Computed, Forward, Proposed
from sidestream.runner.frame import SHORT_TOKENS, GraphInputs, GraphKey, Numbers, keys_that_fit, pack
from sidestream.runner.hidden_states import PackedRows
from sidestream.runner.mailbox import Mailbox
from sidestream.runner.state import DecodeState
from sidestream.runner.upload import Uploads
from sidestream.speculate import Context, Proposer
from sidestream.types import BatchPlan, LayerGates

logger = logging.getLogger(__name__)

_NOBODY = BatchPlan(())


class GateEvent(Protocol):
    """What a captured wait waits for: its last record before the replay."""

    def record(self, stream: Any) -> object:
        """Make it stand for what the stream was given so far."""
        ...


@dataclass(slots=True, eq=False)
class _Pass:
    """One graph, and what it leaves behind; and the graphs of the draws behind it, by what those take."""

    graph: Graph | None = None
    computed: Computed | None = None
    draws: dict[SamplingMode, Graph] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Captured:
    """One shape's graphs. `fetches`: of each slot of the uploads, the one that fills the frame; none: that is not
    captured.
    """

    frame: GraphInputs
    plain: _Pass
    gated: _Pass
    fetches: list[Graph] = field(default_factory=list)

    def draws(self, *, gated: bool) -> Sequence[SamplingMode]:
        """Those that are captured. Behind drafts a penalty is reckoned with the drafts before, by the host; and few
        steps wait for loads.
        """
        if gated:
            return (SamplingMode.ARGMAX,)
        return (
            (SamplingMode.ARGMAX, SamplingMode.RANDOM)
            if self.frame.shape.drafts
            else (SamplingMode.ARGMAX, SamplingMode.RANDOM, SamplingMode.PENALISED)
        )


class Graphs:
    """Owner of the frames and graphs of one executor.

    kv           the pool by layer, as attention takes it
    attention    makes a batch of each pass. If it reads lengths on the host, a replay reads the frame there
    gates        a stream of its own, on which gates are recorded
    gate_layers  layers that wait together, in the gated graphs; 0: there are none, and nothing gated is replayed
    proposer     drafts for shapes with drafts
    mailbox      where draws that are captured are delivered
    uploads      where a step's numbers lie
    """

    def __init__(
        self,
        *,
        device: Device,
        stream: Stream,
        gates: Stream,
        forward: Forward,
        kv: Tensor,
        attention: AttentionBackend,
        state: DecodeState,
        gate_layers: int,
        mailbox: Mailbox,
        uploads: Uploads,
        proposer: Proposer | None = None,
    ) -> None:
        self._device = device
        self._stream = stream
        self._gates = gates
        self._forward = forward
        self._proposer = proposer
        self._mailbox = mailbox
        self._uploads = uploads
        self._kv = kv
        self._attention = attention
        self._state = state
        self._captured: dict[GraphKey, Captured] = {}
        self._fitting: dict[tuple[int, int, int, int], list[Captured]] = {}
        self._groups: list[range] = []
        self._events: list[GateEvent] = []
        if gate_layers:
            num_layers = kv.shape[1]
            self._groups = [
                range(first, min(first + gate_layers, num_layers)) for first in range(0, num_layers, gate_layers)
            ]
            self._events = [device.event(f"gate {group.start}") for group in self._groups]
            for event in self._events:
                event.record(gates)  # a wait for one that never was would be nothing

    @property
    def shapes(self) -> Sequence[GraphKey]:
        """What was captured."""
        return list(self._captured)

    def capture(
        self, shapes: Iterable[GraphKey], *, tell: Callable[[int, int], None] = lambda done, total: None
    ) -> None:
        """Capture the shapes in their order, and replay each once, on padding. Blocks; before serving only.

        When memory ends, what was captured by then stays and a warning says so. Raises what else a forward pass raises.
        `tell` is given how many are done, of how many.
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
                    str(error),
                )
                _let_go(error)
                return
        tell(len(shapes), len(shapes))

    def find(self, batch: BatchPlan, wanted: tuple[int, int, int, int], *, gated: bool) -> Captured | None:
        """The graphs of the shape with the least padding that the batch fits in, whose `shape_of` is `wanted`; None: it
        runs without one.
        """
        if gated and not self._groups:
            return None
        if wanted not in self._fitting:
            self._fitting[wanted] = [self._captured[shape] for shape in keys_that_fit(self.shapes, *wanted)]
        drafts = sum(batch.columns.drafts) if wanted[3] else 0
        return next((captured for captured in self._fitting[wanted] if drafts <= captured.frame.shape.all_drafts), None)

    def close_gates(self, gates: LayerGates) -> None:
        """Have the next replay of a gated graph wait for these loads, each group of layers for its own."""
        for group, event in zip(self._groups, self._events, strict=True):
            for fence in dict.fromkeys(fence for layer in group for fence in gates.by_layer[layer]):
                self._gates.wait(fence)
            event.record(self._gates)

    def fill(self, captured: Captured, numbers: Numbers) -> None:
        """Overwrite a shape's frame. Inside work of the compute stream."""
        if captured.fetches:
            self._stream.enqueue(captured.fetches[self._uploads.write(numbers)])
        else:
            self._uploads.into(captured.frame.buffer, numbers)

    def replay(self, captured: Captured, *, gated: bool) -> Computed:
        """Enqueue a shape's graph, whose frame was filled. Inside work of the compute stream."""
        chosen = captured.gated if gated else captured.plain
        self._stream.enqueue(chosen.graph)
        if chosen.computed is None:
            raise InvariantError(f"the graph of {captured.frame.shape} was never captured")
        return chosen.computed

    def draw(self, captured: Captured, draws: SamplingMode, *, gated: bool) -> None:
        """Enqueue the draws behind what was just replayed: each row takes its token, goes on, and the host is told."""
        self._stream.enqueue((captured.gated if gated else captured.plain).draws[draws])

    def _capture(self, shape: GraphKey) -> Captured:
        captured = Captured(
            GraphInputs.allocate(shape, self._state.tables.device, padding_slot=self._state.padding_slot),
            _Pass(),
            _Pass(),
        )
        events = dict(zip((group.start for group in self._groups), self._events, strict=True))

        def run(into: _Pass, before_layer: Callable[[int], None]) -> None:
            with torch.inference_mode():
                into.computed = self._run(captured.frame, before_layer, gated=into is captured.gated)

        def wait(layer: int) -> None:
            if layer in events:
                self._stream.wait_external(events[layer])

        self._finish(lambda: run(captured.plain, ungated))  # what compiles, tunes itself or allocates does so now
        for draws in captured.draws(gated=False):
            self._finish(lambda draws=draws: self._draw(captured.frame, captured.plain, draws))  # type: ignore[misc]
        beside = next((other.plain.graph for other in self._captured.values()), None)
        captured.plain.graph = self._stream.capture(
            lambda: self._submit(lambda: run(captured.plain, ungated)), beside=beside
        )
        if events:
            captured.gated.graph = self._stream.capture(
                lambda: self._submit(lambda: run(captured.gated, wait)), beside=captured.plain.graph
            )
        for into in (captured.plain, captured.gated)[: 1 + bool(events)]:
            for draws in captured.draws(gated=into is captured.gated):
                into.draws[draws] = self._stream.capture(
                    lambda into=into, draws=draws: self._submit(lambda: self._draw(captured.frame, into, draws)),  # type: ignore[misc]
                    beside=captured.plain.graph,
                )
        for fetch in self._uploads.fetches(captured.frame.buffer):
            self._finish(fetch)
            captured.fetches.append(
                self._stream.capture(lambda fetch=fetch: self._submit(fetch), beside=captured.plain.graph)  # type: ignore[misc]
            )
        if captured.fetches:
            self._finish(
                lambda: self.fill(captured, pack(_NOBODY, shape, padding_slot=self._state.padding_slot, block_tokens=1))
            )
        for gated in (False, True)[: 1 + bool(events)]:  # a graph's first replay takes longer
            self._finish(lambda gated=gated: self._replay(captured, gated=gated))  # type: ignore[misc]
        return captured

    def _replay(self, captured: Captured, *, gated: bool) -> None:
        self.replay(captured, gated=gated)
        for draws in captured.draws(gated=gated):
            self.draw(captured, draws, gated=gated)

    def _draw(self, frame: GraphInputs, behind: _Pass, draws: SamplingMode) -> None:
        """Of a frame of padding, for nobody, into a entry that nobody reads."""
        computed = behind.computed
        if computed is None or not len(computed.logits):  # on a host there are no places of padding
            return
        with torch.inference_mode():
            drawn, counts = draw_frame(frame, computed, self._state, draws)
            times = None if counts is None or computed.proposed is None else computed.proposed.times
            self._mailbox.write(frame.entry, drawn, self._stream, counts=counts, times=times)

    def _run(self, frame: GraphInputs, before_layer: Callable[[int], None], *, gated: bool) -> Computed:
        going_on = not gated and not frame.shape.chunks and not frame.shape.drafts
        if self._attention.reads_lengths_on_host:
            return self._run_on_host(frame, before_layer, going_on=going_on)
        self._state.place(frame.places, frame.blocks)
        proposed = self._propose(frame, frame.shape.decodes)
        tokens, positions, kv_lens, slots, tables = frame.inputs(
            self._state, self._kv.shape[3], self._by_row(frame, proposed)
        )
        rows = BatchRows(
            slot_mapping=slots,
            block_tables=tables,
            cu_seqlens_q=frame.cu_seqlens_q,
            kv_lens=kv_lens,
            decode_rows=frame.shape.decodes,
            decode_queries=1 + frame.shape.drafts,
            short_rows=frame.shape.short_rows,
            short_queries=SHORT_TOKENS,
        )
        batch = self._attention.batch(self._kv, rows, before_layer)
        places = frame.logit_rows.clamp(min=0)
        return self._forward.run(
            tokens,
            positions,
            batch,
            places=places,
            rows=PackedRows(frame.cu_seqlens_q, frame.rows, frame.origins) if self._forward.keeps_up else None,
            before_layer=before_layer,
            proposed=proposed,
            going_on=going_on,
        )

    def _run_on_host(self, frame: GraphInputs, before_layer: Callable[[int], None], *, going_on: bool) -> Computed:
        """The same for attention that reads the lengths on the host: without padding."""
        starts, shape = frame.cu_seqlens_q.tolist(), frame.shape
        rows = [row for row in range(shape.rows) if starts[row + 1] > starts[row]]
        self._state.place(frame.places, frame.blocks)
        proposed = self._propose(frame, sum(row < shape.decodes for row in rows))
        tokens, positions, kv_lens, slots, tables = frame.inputs(
            self._state, self._kv.shape[3], self._by_row(frame, proposed)
        )
        count = starts[-1]
        if not count:
            return Computed(torch.zeros(0), torch.zeros(0, dtype=torch.int64))
        host = HostLengths((0, *(starts[row + 1] for row in rows)), tuple(kv_lens[rows].tolist()))
        cu_seqlens_q = torch.tensor(host.cu_seqlens_q)
        packed = BatchRows(
            slot_mapping=slots[:count],
            block_tables=tables[rows],
            cu_seqlens_q=cu_seqlens_q,
            kv_lens=kv_lens[rows],
            decode_rows=sum(row < shape.decodes for row in rows),
            host=host,
        )
        batch = self._attention.batch(self._kv, packed, before_layer)
        of_rows = PackedRows(cu_seqlens_q, frame.rows[rows], frame.origins[rows])
        return self._forward.run(
            tokens[:count],
            positions[:count],
            batch,
            places=frame.logit_rows[frame.logit_rows >= 0],
            rows=of_rows if self._forward.keeps_up else None,
            before_layer=before_layer,
            proposed=proposed,
            going_on=going_on,
        )

    def _propose(self, frame: GraphInputs, count: int) -> Proposed | None:
        """Drafts for the first `count` rows of the frame, which decode; None: the shape has none."""
        proposer = self._proposer
        if proposer is None or not frame.shape.drafts or not count:
            return None
        state, rows = self._state, frame.standing(self._state, count)

        def attend(positions: Tensor) -> AttentionBatch:
            return self._forward.one_token_each(rows.tables, positions, rows.bounds, rows.nobody)

        context = Context(state.history[:, :-1], frame.rows[:count], rows.lengths, rows.tokens, rows.hidden, attend)
        return self._forward.draft(lambda: proposer.propose(context, frame.shape.drafts))

    def _by_row(self, frame: GraphInputs, proposed: Proposed | None) -> Tensor | None:
        """Drafts by row number, `[num_slots + 1, drafts]`."""
        if proposed is None:
            return None
        tokens = proposed.tokens
        drafts = torch.zeros(self._state.num_slots + 1, tokens.shape[1], dtype=torch.int64, device=tokens.device)
        return drafts.index_copy_(0, frame.rows[: len(tokens)], tokens)

    def _submit(self, work: Callable[[], None]) -> None:
        self._stream.submit(work, label="capture")

    def _finish(self, work: Callable[[], None]) -> None:
        fence = self._stream.submit(work, label="capture")
        self._device.wait_host(fence, reason="step")
        if fence.failure is not None:
            raise fence.failure


def _let_go(error: BaseException) -> None:
    """Of what was given to a shape so far, which the frames of an error and of its cause hold. Not in `capture`, whose
    names would be among them.
    """
    for raised in (error, error.__cause__):
        if raised is not None:
            traceback.clear_frames(raised.__traceback__)
