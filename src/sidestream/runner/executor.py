"""How a plan becomes device work: one submission to the compute stream runs the whole step, by a captured graph where
there is one for it.

`launch` returns at once; the token that a decode row continues from is on the device and need not be known to the host.
On a GPU nothing in it waits for the device either: what a step needs of the host is read from mapped memory
(`runner/upload.py`). Called from the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import compress, repeat
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from sidestream.attention.interface import AttentionBackend, AttentionBatch, BatchRows, HostLengths
from sidestream.config import SamplingParams
from sidestream.device.base import Device, Memory, Stream
from sidestream.device.kinds import on_host
from sidestream.runner.drafts import Drafts
from sidestream.runner.draws import SamplingMode
from sidestream.runner.forward import Computed, Forward
from sidestream.runner.frame import SHORT_TOKENS, BlockTableMirror, GraphKey, TableChanges, pack, shape_of
from sidestream.runner.graphs import Captured, Graphs
from sidestream.runner.hidden_states import PackedRows, origin_of
from sidestream.runner.inputs import Packer, StepInputs, kv_accesses
from sidestream.runner.mailbox import Delivered, Mailbox, MailboxEntry
from sidestream.runner.model import ForwardModel
from sidestream.runner.sample import sample
from sidestream.runner.state import DecodeState
from sidestream.runner.upload import Uploads
from sidestream.speculate import Proposer
from sidestream.types import Access, BatchPlan, Fence, LayerGates, RowColumns, RowPlan, RowStart, SamplingSpec

# One step runs, one is launched behind it, one is being read.
_STEPS = 3


def _asking(**params: Any) -> SamplingSpec:
    """What a request asks for that gives these parameters; without a temperature it is greedy."""
    return SamplingParams(**{"temperature": 0.0, **params}).spec(seed=0, eos_ids=())


# What requests may ask of sampling: each takes kernels of its own.
_GREEDY = _asking()
_VARIANTS = (
    _GREEDY,
    _asking(temperature=1.0),
    _asking(temperature=1.0, top_k=2),
    _asking(temperature=1.0, top_p=0.5),
    _asking(temperature=1.0, top_k=2, top_p=0.5, min_p=0.1),
    _asking(repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1),
    _asking(logit_bias={0: 1.0}, min_tokens=4, stop_token_ids=(0,)),
    _asking(logprobs=1),
)
# Warmed up one by one: in a batch, another row or the logit bias itself would already have promoted the logits to
# float32.
_ALONE = (_asking(repetition_penalty=1.1), _asking(repetition_penalty=1.1, logit_bias={0: 1.0}))

_NO_CHANGES = TableChanges([], [])


class Work(NamedTuple):
    """A step's forward pass.

    run     it; the rows that sample are told to it where something drafts
    draws   it draws and delivers as well, and leaves nothing to be done
    """

    run: Callable[[Drafts | None], Computed | None]
    draws: bool


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A launched batch; its fence covers the forward pass, the draws and their delivery.

    gated          it waits for loads
    top_logprobs   of each row that samples; empty: nobody asked for any
    launched_s     on the device's clock
    """

    batch: BatchPlan
    fence: Fence
    entry: MailboxEntry
    gated: bool
    top_logprobs: tuple[int, ...]
    launched_s: float
    mailbox: Mailbox

    @property
    def drafts(self) -> Sequence[int]:
        """Of each row that samples."""
        return tuple(compress(self.batch.columns.drafts, self.batch.columns.samples))

    def drop(self) -> None:
        """End the step without reading it, because it failed; behind the fence."""
        self.entry.lease.release(after=(self.fence,))

    def results(self) -> Delivered:
        """What the sampling rows drew, in order; once, behind the fence."""
        return self.mailbox.read(self.entry, self.drafts, self.top_logprobs, self.fence)


class Executor:
    """Owner of the compute stream, the device's decode state and the mailbox.

    memory      the block pool, `num_blocks * layout.block_bytes` bytes
    proposer    drafts up to `max_drafts` tokens for a row that holds up to `max_len`; None: nobody drafts. For one that
                reads hidden states, the pool has one block more than anybody holds, and its last layers are for those
    attention   makes a batch of each step; it was made for `num_slots` rows that decode and a short chunk
    """

    def __init__(
        self,
        *,
        device: Device,
        model: ForwardModel,
        memory: Memory,
        num_slots: int,
        attention: AttentionBackend,
        proposer: Proposer | None = None,
        max_drafts: int = 0,
        max_len: int = 0,
    ) -> None:
        """There are no graphs until `capture` makes some."""
        self._device = device
        self._model = model
        self._num_rows = num_slots
        self._attention = attention
        self._proposer = proposer
        self._max_drafts = max_drafts
        self._clock = device.now
        self._traced = device.tracer is not None
        self._stream = device.stream("compute")
        self._gates: Stream | None = None
        self._uploads = Uploads.of(device, num_slots=_STEPS)
        dtype = getattr(torch, model.layout.dtype)
        hidden_size = 0 if proposer is None else proposer.hidden_size
        self._state = DecodeState(
            num_slots,
            model.vocab_size,
            device=device.torch_device,
            uploads=self._uploads,
            max_len=0 if proposer is None else max_len,
            hidden_size=hidden_size,
            dtype=dtype,
        )
        self._tables = BlockTableMirror(num_slots, 0)
        self._graphs: Graphs | None = None
        self._mailbox = Mailbox(_STEPS, num_slots, model.vocab_size, device, max_drafts=max_drafts)
        layout = model.layout
        self._packer = Packer(num_slots, layout)
        num_blocks = memory.num_bytes // layout.block_bytes
        self._kv = memory.data[: num_blocks * layout.block_bytes].view(dtype).view(layout.shape(num_blocks))
        self._forward = Forward(
            model, self._kv, stream=self._stream, attention=attention, state=self._state, proposer=proposer
        )
        # Of rows as they last began: how many log-probabilities, if any, and what their draws take, if more than the
        # likeliest token.
        self._wanted_logprobs: dict[int, int] = {}
        self._draws: dict[int, SamplingMode] = {}
        self._bans: dict[int, SamplingSpec] = {}  # of rows whose draws take less once they have output enough

    def launch(self, batch: BatchPlan, *, after: tuple[Fence, ...], gates: LayerGates) -> LaunchedStep:
        """Enqueue one step behind `after`; layer by layer behind `gates`. Returns at once."""
        launched_s = self._clock()
        gated, columns = bool(gates.by_layer), batch.columns
        for row, begin in batch.begins:
            self._note(row, begin.sampling)
        wanted = decodes, chunks, tokens, _ = shape_of(batch)
        captured = None if self._graphs is None else self._graphs.find(batch, wanted, gated=gated)
        entry = self._mailbox.address()
        changes = _NO_CHANGES if captured is None else self._tables.changes(columns)
        if captured is None:
            work = self._eager_work(batch, gates)
        elif len(changes.places) <= captured.frame.shape.rows:
            work, changes = self._captured_work(batch, captured, gates, entry, changes), _NO_CHANGES
        else:
            work = self._captured_work(batch, captured, gates, entry, _NO_CHANGES)
        self._uploads.open(entry.lease.ids[0])
        for fence in after:
            self._stream.wait(fence)
        label = f"prefill {tokens}" if chunks else f"decode {decodes}"
        if chunks and decodes:
            label += f" + decode {decodes}"
        fence = self._stream.submit(
            lambda: self._run(batch, changes, work, entry),
            lambda: self._accesses(batch, entry, later=gated or batch.speculates),
            label=label,
        )
        top_logprobs: tuple[int, ...] = ()
        if self._wanted_logprobs:
            top_logprobs = tuple(self._wanted_logprobs.get(row, -1) for row in compress(columns.row, columns.samples))
        return LaunchedStep(batch, fence, entry, gated, top_logprobs, launched_s, self._mailbox)

    def _note(self, row: int, asked: SamplingSpec) -> None:
        """What the host has to know of how a row draws, from now on."""
        if asked.top_logprobs >= 0:
            self._wanted_logprobs[row] = asked.top_logprobs
        else:
            self._wanted_logprobs.pop(row, None)
        self._bans.pop(row, None)
        if asked.min_tokens and asked.forbidden_until_min:
            self._bans[row] = asked
        self._note_draws(row, SamplingMode.of(asked, outputs=0))

    def _note_draws(self, row: int, draws: SamplingMode) -> None:
        if draws:
            self._draws[row] = draws
        else:
            self._draws.pop(row, None)

    def warm_up(self, block_ids: Sequence[int], *, chunk_tokens: int) -> None:
        """Run small steps that mean nothing through everything that a real one can reach, and wait for them (P3).

        Before the first real step. `block_ids` are leased by the caller and get overwritten: one for each row of a
        step, all together for a chunk of up to `chunk_tokens`. Raises what a step raised.
        """
        size = self._model.layout.block_tokens
        count = min(self._num_rows, len(block_ids))
        for first in range(0, len(_VARIANTS), count):
            begun = [_row(row, (block_ids[row],), 1, _VARIANTS[(first + row) % len(_VARIANTS)]) for row in range(count)]
            going_on = [
                row._replace(min_start=1, stop=2, tokens=None, min_output_index=1, begin=None)
                for row in begun
                if size > 1
            ]
            for rows in (begun, going_on, going_on[:1], [*going_on[:1], *begun[1:]]):
                self._run_for_nothing(rows)
            if self._proposer is not None and size > 2:
                drafts = min(self._max_drafts, size - 2)
                drafting = [row._replace(stop=row.stop + drafts, drafts=drafts) for row in going_on]
                for rows in (drafting, begun, [*drafting[:1], *begun[1:]]):
                    self._run_for_nothing(rows)
        for spec in _ALONE:
            self._run_for_nothing([_row(0, (block_ids[0],), 1, spec)])
        tokens = min(chunk_tokens, len(block_ids) * size)
        self._run_for_nothing([_row(0, tuple(block_ids[: -(-tokens // size)]), tokens, _VARIANTS[0])])

    def capture(
        self,
        shapes: Sequence[GraphKey],
        *,
        gate_layers: int = 0,
        tell: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Capture the forward pass of each shape. Behind `warm_up`, before the first real step. Blocks; touches no KV.
        See `Graphs`.
        """
        self._graphs = None
        longest = self._kv.shape[0]  # blocks
        if (most := self._attention.max_kv_tokens) is not None:
            longest = min(longest, most // self._model.layout.block_tokens)
        self._state.hold_tables(longest)
        self._tables = BlockTableMirror(self._num_rows, longest)
        self._gates = self._gates or self._device.stream("gates")
        graphs = Graphs(
            device=self._device,
            stream=self._stream,
            gates=self._gates,
            forward=self._forward,
            kv=self._kv,
            attention=self._attention,
            state=self._state,
            gate_layers=gate_layers,
            mailbox=self._mailbox,
            uploads=self._uploads,
            proposer=self._proposer,
        )
        graphs.capture(shapes, tell=tell)
        self._graphs = graphs

    def _run_for_nothing(self, rows: Sequence[RowPlan]) -> None:
        if not rows:
            return
        step = self.launch(BatchPlan(tuple(rows), any(row.drafts for row in rows)), after=(), gates=LayerGates())
        self._device.wait_host(step.fence, reason="step")
        step.drop()
        if step.fence.failure is not None:
            raise step.fence.failure

    def _accesses(self, batch: BatchPlan, entry: MailboxEntry, *, later: bool) -> list[Access]:
        """What a step touches from its start: all its KV, unless it gets to that layer by layer, or knows only then
        which it is.
        """
        layout = self._model.layout
        return [
            entry.access(write=True),
            *([] if later else kv_accesses(batch.rows, layout, range(layout.num_layers))),
        ]

    def _rows_where_they_are(self, batch: BatchPlan, inputs: StepInputs) -> Sequence[RowPlan]:
        """The batch's rows as they turned out, where the host may look; else within their bounds."""
        if not batch.speculates or not on_host(inputs.positions.device):
            return batch.rows
        return [
            row._replace(min_start=length - row.num_tokens, stop=length)
            for row, length in zip(batch.rows, inputs.kv_lens, strict=True)
        ]

    def _rows_from_state(self, batch: BatchPlan) -> Sequence[RowPlan]:
        """The same before a captured pass: from where the device state says that rows are."""
        if not batch.speculates or not on_host(self._state.lengths.device):
            return batch.rows
        lengths = self._state.lengths.tolist()
        return [
            row
            if row.tokens is not None
            else row._replace(min_start=lengths[row.row], stop=lengths[row.row] + row.num_tokens)
            for row in batch.rows
        ]

    def _gate(self, gates: LayerGates, rows: Sequence[RowPlan]) -> Callable[[int], None]:
        """What the attention calls before it touches a layer's KV: waits, on the device, for that layer's loads
        (H5).
        """
        if not gates.by_layer:
            return lambda layer: None

        def before_layer(layer: int) -> None:
            for fence in gates.by_layer[layer]:
                self._stream.wait(fence)
            if self._traced:
                self._stream.touch(lambda: kv_accesses(rows, self._model.layout, range(layer, layer + 1)))

        return before_layer

    def _run(self, batch: BatchPlan, changes: TableChanges, work: Work, entry: MailboxEntry) -> None:
        """The step itself. On the compute stream.

        Whatever fails, the device's tables are made anew for the steps behind it: on a GPU this is the engine thread,
        before it packs another.
        """
        try:
            with torch.inference_mode():
                if changes.places:
                    self._state.place_numbers(changes.places, changes.blocks)
                if begins := batch.begins:
                    self._state.begin(begins)
                drafts = None if self._proposer is None or work.draws else Drafts.of(batch.rows, self._state)
                computed = work.run(drafts)
                sampling = () if computed is None else [row for row in batch.rows if row.samples]
                if computed is None or not sampling:
                    return
                if drafts is None:
                    rows = [row.row for row in sampling]
                    drawn = sample(computed.logits, rows, [row.min_output_index for row in sampling], self._state)
                    self._state.commit(rows, drawn.tokens)
                    self._mailbox.write(entry.start, drawn, self._stream)
                else:
                    drawn, counts = drafts.draw(computed, self._state)
                    times = None if computed.proposed is None else computed.proposed.times
                    self._mailbox.write(
                        entry.start, drawn, self._stream, counts=counts if drafts.most else None, times=times
                    )
        except BaseException:
            self._tables.forget()
            raise

    def _eager_work(self, batch: BatchPlan, gates: LayerGates) -> Work:
        """The batch's forward pass, launched kernel by kernel; what is drafted and verified is drafted here."""
        packed = self._packer.pack(batch)

        def forward(drafts: Drafts | None) -> Computed:
            inputs = packed.brought(self._uploads).anchored(self._state.lengths)
            inputs = replace(inputs, block_tables=inputs.block_tables.to(self._attention.table_dtype))
            rows = self._rows_where_they_are(batch, inputs)
            if batch.speculates and not gates.by_layer and self._traced:
                self._stream.touch(lambda: kv_accesses(rows, self._model.layout, range(self._model.layout.num_layers)))
            before_layer = self._gate(gates, rows)
            tokens, proposed = inputs.tokens, None
            if inputs.state_rows:
                tokens = tokens.index_copy(0, inputs.from_state, self._state.last_tokens(inputs.state_rows))
            proposer = self._proposer
            if proposer is not None and drafts is not None and drafts.most:

                def attend(which: torch.Tensor, at: torch.Tensor, last: torch.Tensor) -> AttentionBatch:
                    return self._forward.one_token_each(inputs.block_tables[which], at, last)

                proposed = self._forward.draft(lambda: drafts.propose(proposer, self._state, attend))
                tokens = drafts.put(tokens, inputs, proposed.tokens, self._state)
            of_rows = None
            if self._forward.keeps_up:
                of_rows = PackedRows(
                    inputs.cu_seqlens_q_dev,
                    self._state.index([row.row for row in batch.rows]),
                    self._state.index([origin_of(row, self._model.layout.block_tokens) for row in batch.rows]),
                )
            return self._forward.run(
                tokens,
                inputs.positions,
                self._paged(inputs, before_layer),
                places=inputs.logit_rows,
                rows=of_rows,
                before_layer=before_layer,
                proposed=proposed,
            )

        return Work(forward, draws=False)

    def _captured_work(
        self, batch: BatchPlan, captured: Captured, gates: LayerGates, entry: MailboxEntry, changes: TableChanges
    ) -> Work:
        """The batch's forward pass, by a graph, which changes the tables first; its draws by another one, where that is
        captured.
        """
        assert self._graphs is not None
        graphs, gated = self._graphs, bool(gates.by_layer)
        layout, columns = self._model.layout, batch.columns
        nobody, shape = self._state.padding_slot, captured.frame.shape
        numbers = pack(
            batch, shape, padding_slot=nobody, block_tokens=layout.block_tokens, entry=entry.start, changes=changes
        )
        draws = self._draws_of(columns)
        by_graph = draws in captured.draws(gated=gated)
        if gated:
            graphs.close_gates(gates)

        def forward(drafts: Drafts | None) -> Computed | None:
            graphs.fill(captured, numbers)
            rows = self._rows_from_state(batch)
            computed = graphs.replay(captured, gated=gated)
            if (gated or batch.speculates) and self._traced:
                self._stream.touch(lambda: kv_accesses(rows, layout, range(layout.num_layers)))
            if by_graph:
                graphs.draw(captured, draws, gated=gated)
                return None
            drafted = None
            if drafts is not None and drafts.most and computed.proposed is not None:
                count = batch.num_decodes  # they come first, and all of them sample
                drafted = pad(computed.proposed.tokens[:count, : drafts.most], (0, 0, 0, len(drafts.rows) - count))
            return computed.first(sum(columns.samples) + sum(columns.drafts), drafted)

        return Work(forward, by_graph)

    def _draws_of(self, columns: RowColumns) -> SamplingMode:
        """What the draws of a step take."""
        for row, outputs in zip(columns.row, columns.min_output_index, strict=True) if self._bans else ():
            if (spec := self._bans.get(row)) is not None and outputs >= spec.min_tokens:
                del self._bans[row]
                self._note_draws(row, SamplingMode.of(spec, outputs=outputs))
        if not self._draws:
            return SamplingMode.ARGMAX
        asked = map(self._draws.get, compress(columns.row, columns.samples), repeat(SamplingMode.ARGMAX))
        return max(asked, default=SamplingMode.ARGMAX)

    def _paged(self, inputs: StepInputs, before_layer: Callable[[int], None]) -> AttentionBatch:
        """The step as its layers' attention sees it."""
        decode_rows, longest = inputs.num_decode, 1
        if len(inputs.drafted):
            decode_rows, longest = len(inputs.state_rows), 1 + self._max_drafts
        key = GraphKey(decode_rows, len(inputs.tokens) - inputs.cu_seqlens_q[decode_rows])
        rows = BatchRows(
            slot_mapping=inputs.slots,
            block_tables=inputs.block_tables,
            cu_seqlens_q=inputs.cu_seqlens_q_dev,
            kv_lens=inputs.kv_lens_dev,
            decode_rows=decode_rows,
            decode_queries=longest,
            short_rows=min(key.short_rows, len(inputs.kv_lens) - decode_rows),
            short_queries=SHORT_TOKENS,
            host=HostLengths(inputs.cu_seqlens_q, inputs.kv_lens),
        )
        return self._attention.batch(self._kv, rows, before_layer)


def _row(row: int, block_ids: tuple[int, ...], num_tokens: int, spec: SamplingSpec) -> RowPlan:
    """A row that computes tokens of no request, and samples."""
    return RowPlan(
        request_id=-1 - row,
        row=row,
        epoch=0,
        min_start=0,
        stop=num_tokens,
        tokens=(0,) * num_tokens,
        block_ids=block_ids,
        samples=True,
        min_output_index=0,
        begin=RowStart(sampling=spec, prompt=(0,) * num_tokens, outputs=(0,)),
    )
