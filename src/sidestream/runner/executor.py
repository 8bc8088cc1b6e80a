"""The executor: runs batch plans on the device. One submission to the compute stream runs the whole step, eagerly or by
CUDA graphs that were captured for its size.

`launch` returns at once: the last token of a decode row is on the device, and the host need not know it yet. On a GPU,
`launch` never waits for the device: kernels read a step's inputs from mapped host memory (`runner/upload.py`). Called
from the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, NamedTuple

import torch

from sidestream.attention.interface import AttentionBackend
from sidestream.attention.states import DraftInputs, StatePool
from sidestream.config import SamplingParams
from sidestream.device.base import Device, Memory, Stream
from sidestream.device.group import Group
from sidestream.device.kinds import on_host
from sidestream.kv.layout import KVLayout
from sidestream.kv.state_layout import StateRegion
from sidestream.ops import Ops, TorchOps
from sidestream.runner.forward import Forward, ForwardModel, ForwardOutput
from sidestream.runner.graphs import CapturedStep, Graphs
from sidestream.runner.mailbox import Delivered, Mailbox, MailboxEntry
from sidestream.runner.sampler import Sampler, SamplingMode
from sidestream.runner.state import DecodeState
from sidestream.runner.step_inputs import (
    BlockTableMirror,
    GraphKey,
    InputSizes,
    Numbers,
    StepInputs,
    TableChanges,
    demand_of,
    pack,
)
from sidestream.runner.upload import Uploads
from sidestream.speculate import Proposer
from sidestream.types import Access, BatchPlan, Fence, LayerGates, RowPlan, RowStart, SamplingSpec, StateIds

MAX_STEPS = 3
"""Steps whose memory is in use: one runs, the next one is launched, the results of the previous one are being read."""


def _asking(**params: Any) -> SamplingSpec:
    """The options of a request with these parameters; greedy if no temperature is given."""
    return SamplingParams(**{"temperature": 0.0, **params}).spec(seed=0, eos_ids=())


# Sampling options that need additional kernels.
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
# Options that are warmed up in steps of one row each. A row with a logit bias promotes the logits of all rows of its
# step to float32. So the first two options run the kernels for logits in the model's dtype, and the last option runs
# the penalties' kernel for float32 logits.
_ALONE = (
    _asking(temperature=1.0),
    _asking(repetition_penalty=1.1),
    _asking(repetition_penalty=1.1, logit_bias={0: 1.0}),
)

_NO_CHANGES = TableChanges([], [])


class PreparedStep(NamedTuple):
    """The host's part of a step, complete when the step is enqueued.

    numbers    content of the input buffer, in the order of `StepInputs`
    changes    changes of the block tables that have no place in `numbers`
    captured   the step's graphs; None: the step runs eagerly
    """

    sizes: InputSizes
    numbers: Numbers
    changes: TableChanges
    captured: CapturedStep | None
    mode: SamplingMode
    gates: LayerGates
    entry: MailboxEntry


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A launched batch; its fence covers the forward pass, the sampling, and the delivery of the results.

    gated          whether the step waits for loads
    top_logprobs   for each sampling row, see `Sampler.top_logprobs_of`
    launched_s     time of the launch, by the device's clock
    on_all_ranks   fence of this step on all ranks; None: there is one rank
    """

    batch: BatchPlan
    fence: Fence
    entry: MailboxEntry
    gated: bool
    top_logprobs: tuple[int, ...]
    launched_s: float
    mailbox: Mailbox
    on_all_ranks: Fence | None = None

    @property
    def last_use(self) -> Fence:
        """The fence after which the step uses no block or slot, on any rank."""
        return self.fence if self.on_all_ranks is None else self.on_all_ranks

    @property
    def drafts(self) -> Sequence[int]:
        """Number of drafts of each sampling row."""
        return tuple(compress(self.batch.columns.drafts, self.batch.columns.samples))

    def drop(self) -> None:
        """Release the step's mailbox entry without reading it: the step failed, was a warm-up, or is read by another
        rank.
        """
        self.entry.lease.release(after=(self.fence,))  # rule: mailbox-entry-of-a-failed-step-is-released

    def results(self) -> Delivered:
        """The results of the sampling rows, in row order. Call it once, after the step's fence."""
        return self.mailbox.read(self.entry, self.drafts, self.top_logprobs, self.fence)


class _StepAccesses(NamedTuple):
    """See `StepAccesses`. `rows` with positions as exact as the host knows. `scratch`: the block for hidden states
    that belong to no block; None: there is none.
    """

    memory: str
    scratch: int | None
    rows: Sequence[RowPlan]
    layout: KVLayout
    region: StateRegion | None

    def layers(self, layers: range) -> Sequence[Access]:
        """See `StepAccesses.layers`."""
        accesses = kv_accesses(self.memory, self.rows, self.layout, layers)
        if self.scratch is not None:
            span = self.layout.layer_span(self.scratch, layers.start, layers.stop)
            accesses.append(Access(self.memory, *span, write=True))  # rule: step-declares-its-scratch-block
        return accesses

    def all(self) -> Sequence[Access]:
        """Of all layers, and of the recurrent states."""
        return [*self.layers(range(self.layout.num_layers)), *self.states()]

    def of_drafting_rows(self) -> Sequence[Access]:
        """Of all layers, for the rows with drafts."""
        drafting = self._replace(rows=[row for row in self.rows if row.drafts])
        return drafting.layers(range(self.layout.num_layers))

    def states(self) -> Sequence[Access]:
        """See `StepAccesses.states`."""
        return () if self.region is None else state_accesses(self.memory, self.rows, self.region)


class Executor:
    """Owner of the compute stream, the device's decode state and the mailbox.

    memory      the block pool, `num_blocks * layout.block_bytes` bytes
    num_slots   largest number of requests that run at once
    attention   backend that makes the attention metadata of each step, created for `num_slots` decode rows and a short
                chunk
    ops         device operations other than the model's; None: operations in torch, for a CPU
    states      the part of `memory` for recurrent states; None: the model has no recurrent state
    group       the ranks that share the model, if there are several; all of them launch the same steps
    proposer    drafts up to `max_drafts` tokens for rows of up to `max_len` tokens; None: no drafts. If the proposer
                reads hidden states, the pool has one block more than requests can hold, and the last layers of each
                block hold hidden states
    """

    def __init__(
        self,
        *,
        device: Device,
        model: ForwardModel,
        memory: Memory,
        num_slots: int,
        attention: AttentionBackend,
        ops: Ops | None = None,
        states: StateRegion | None = None,
        group: Group | None = None,
        proposer: Proposer | None = None,
        max_drafts: int = 0,
        max_len: int = 0,
    ) -> None:
        """Every step runs eagerly until `capture`."""
        self._device = device
        self._model = model
        self._memory = memory.name
        self._num_slots = num_slots
        self._ops = ops = TorchOps() if ops is None else ops
        self._proposer = proposer
        self._max_drafts = max_drafts
        self._clock = device.now
        self._traced = device.tracer is not None
        self._stream = device.stream("compute")
        self._gate_stream: Stream | None = None
        self._uploads = Uploads.of(device, num_regions=MAX_STEPS)
        layout, dtype = model.layout, getattr(torch, model.layout.dtype)
        num_blocks = memory.num_bytes // layout.block_bytes if states is None else states.num_blocks
        self._scratch = num_blocks - 1 if proposer is not None and proposer.hidden_size else None
        self._kv = memory.data[: num_blocks * layout.block_bytes].view(dtype).view(layout.shape(num_blocks))
        self._states = states
        self._state_pool: StatePool | None = None
        if states is not None:
            drafts = None
            if proposer is not None:
                drafts = DraftInputs(states.layout, num_slots + 1, max_drafts, device.torch_device)
            self._state_pool = StatePool(
                memory.data[states.first_byte : states.stop_byte],
                states.layout,
                block_tokens=layout.block_tokens,
                state_bytes=states.state_bytes,
                drafts=drafts,
            )
            if device.tracer is not None:
                zero = Access(memory.name, *states.span(states.zero), write=True)
                device.tracer.host_touched(lambda: [zero], "clear the state that sequences begin with")
        self._table_width = num_blocks
        if attention.max_kv_tokens is not None:
            self._table_width = min(num_blocks, attention.max_kv_tokens // layout.block_tokens)
        self._state = DecodeState(
            num_slots,
            model.vocab_size,
            device=device.torch_device,
            uploads=self._uploads,
            table_width=self._table_width,
            max_len=0 if proposer is None else max_len,
            hidden_size=0 if proposer is None else proposer.hidden_size,
            dtype=dtype,
        )
        self._tables = BlockTableMirror(num_slots, self._table_width)
        self._sampler = Sampler(self._state, ops, group)
        self._mailbox = Mailbox(MAX_STEPS, num_slots, model.vocab_size, device, max_drafts=max_drafts)
        self._forward = Forward(
            model,
            self._kv,
            stream=self._stream,
            ops=ops,
            attention=attention,
            state=self._state,
            proposer=proposer,
            max_drafts=max_drafts,
            states=self._state_pool,
            group=group,
        )
        self._graphs: Graphs | None = None

    def launch(self, batch: BatchPlan, *, after: tuple[Fence, ...], gates: LayerGates) -> LaunchedStep:
        """Enqueue one step. It waits for `after` and, before each layer, for the layer's `gates`. Returns at once."""
        launched_s = self._clock()
        gated, columns = bool(gates.by_layer), batch.columns
        for slot, begin in batch.begins:
            self._sampler.begin(slot, begin.sampling)
        step = self._prepare(batch, gates)
        self._uploads.open(step.entry.lease.ids[0])
        for fence in after:  # rule: step-waits-for-the-last-use
            self._stream.wait(fence)
        fence = self._stream.submit(
            lambda: self._run(batch, step),
            lambda: self._accesses(batch, step.entry, later=gated or batch.speculates),
            label=_label_of(batch),
        )
        top_logprobs = self._sampler.top_logprobs_of(columns)
        return LaunchedStep(batch, fence, step.entry, gated, top_logprobs, launched_s, self._mailbox)

    def _prepare(self, batch: BatchPlan, gates: LayerGates) -> PreparedStep:
        """Choose the step's graphs and pack its inputs. For a captured step that waits for loads, record the events
        that its graph waits for.
        """
        captured, gated = None, bool(gates.by_layer)
        if self._graphs is not None:
            captured = self._graphs.find(batch, demand_of(batch), gated=gated)
        entry = self._mailbox.take_entry()
        sizes = InputSizes.of(batch) if captured is None else captured.key.sizes
        changes, left_over = self._tables.changes(batch.columns), _NO_CHANGES
        if len(changes.indices) > sizes.rows:
            changes, left_over = _NO_CHANGES, changes
        numbers = pack(
            batch,
            sizes,
            padding_slot=self._state.padding_slot,
            block_tokens=self._model.layout.block_tokens,
            mailbox_offset=entry.start,
            changes=changes,
        )
        if captured is not None and gated and self._graphs is not None:
            self._graphs.close_gates(gates)
        return PreparedStep(sizes, numbers, left_over, captured, self._sampler.mode_of(batch.columns), gates, entry)

    def _run(self, batch: BatchPlan, step: PreparedStep) -> None:
        """Run the step: the work that `launch` submits to the compute stream.

        If it fails, `_tables` forgets the block tables on the device, so that the next step writes them again. On a GPU
        this method runs on the engine thread, before the next step is packed.
        """
        try:
            with torch.inference_mode():
                if step.changes.indices:
                    indices, block_ids = self._uploads.together([torch.tensor(part) for part in step.changes])
                    self._ops.update_block_tables(indices, block_ids, self._state.block_tables)
                if begins := batch.begins:
                    self._state.begin(begins)  # rule: slot-begins-on-the-device
                run = self._run_eagerly if step.captured is None else self._replay
                inputs, output = run(batch, step)
                if output is None or not any(batch.columns.samples):
                    return
                drawn, accepted = self._sampler.sample(inputs, output, step.mode, batch)
                times = None if output.proposed is None else output.proposed.times
                self._mailbox.write(step.entry.start, drawn, self._stream, counts=accepted, times=times)
        except BaseException:
            self._tables.forget()
            raise

    def _run_eagerly(self, batch: BatchPlan, step: PreparedStep) -> tuple[StepInputs, ForwardOutput | None]:
        """Run the forward pass eagerly."""
        (buffer,) = self._uploads.together([torch.from_numpy(step.numbers)])
        chunks = batch.rows[batch.num_decodes :] if step.sizes.has_states else ()
        inputs = StepInputs.of(
            buffer,
            step.sizes,
            table_width=max(map(len, batch.columns.block_ids)),
            chunk_lens=tuple(row.num_tokens for row in chunks),
        )
        accesses = self._accesses_of(self._rows_from_state(batch))
        gated = bool(step.gates.by_layer)
        self._touch_before_drafts(batch, accesses, gated=gated)
        before_layer = self._layer_hook(step.gates, accesses)
        before_states = self._states_hook(step.gates, accesses)
        return inputs, self._forward.step(inputs, before_layer, gated=gated, before_states=before_states)

    def _replay(self, batch: BatchPlan, step: PreparedStep) -> tuple[StepInputs, ForwardOutput | None]:
        """Replay the graph of the forward pass and, if sampling is captured for this mode, its graph. In the latter
        case the output is None, because nothing is left to sample.
        """
        captured = step.captured
        assert self._graphs is not None and captured is not None
        gated = bool(step.gates.by_layer)
        self._graphs.fill(captured, step.numbers)  # rule: captured-inputs-are-filled-before-the-replay
        accesses = self._accesses_of(self._rows_from_state(batch))
        self._touch_before_drafts(batch, accesses, gated=gated)
        output = self._graphs.replay(captured, gated=gated, accesses=accesses)
        if step.mode not in captured.modes(gated=gated):
            return captured.inputs, output
        self._graphs.draw(captured, step.mode, gated=gated)
        return captured.inputs, None

    def warm_up(self, block_ids: Sequence[int], *, chunk_tokens: int) -> None:
        """Run small steps without requests, which launch all kernels that a real step can launch, and wait for them.
        The first launch of a kernel waits for the device, and a step of a request must not wait.

        Call it before the first real step. The caller leases `block_ids`, whose content is overwritten: one block for
        each row of a step, or all blocks for a chunk of up to `chunk_tokens`. Raises the error of a step.
        """
        size = self._model.layout.block_tokens
        count = min(self._num_slots, len(block_ids))
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
                for rows in (drafting, drafting[:1], begun, [*drafting[:1], *begun[1:]]):
                    self._run_for_nothing(rows)
        for spec in _ALONE:
            self._run_for_nothing([_row(0, (block_ids[0],), 1, spec)])
        tokens = min(chunk_tokens, len(block_ids) * size)
        self._run_for_nothing([_row(0, tuple(block_ids[: -(-tokens // size)]), tokens, _VARIANTS[0])])

    def capture(
        self,
        keys: Sequence[GraphKey],
        *,
        gate_layers: int = 0,
        tell: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Capture the steps of each key. Call it after `warm_up`, before the first real step. Blocks; reads and writes
        no KV. See `Graphs`.
        """
        self._graphs = None
        self._gate_stream = self._gate_stream or self._device.stream("gates")
        graphs = Graphs(
            device=self._device,
            stream=self._stream,
            gates=self._gate_stream,
            forward=self._forward,
            sampler=self._sampler,
            state=self._state,
            mailbox=self._mailbox,
            uploads=self._uploads,
            num_layers=self._model.layout.num_layers,
            gate_layers=gate_layers,
            table_width=self._table_width,
        )
        graphs.capture(keys, tell=tell)
        self._graphs = graphs

    def close(self) -> None:
        """Delete the captured graphs. Call it after the last step: a group must not close while graphs hold its
        collectives.
        """
        self._graphs = None

    def _run_for_nothing(self, rows: Sequence[RowPlan]) -> None:
        if not rows:
            return
        if self._states is not None:
            rows = [row._replace(states=StateIds(-1, -1)) for row in rows]
        step = self.launch(BatchPlan(tuple(rows), any(row.drafts for row in rows)), after=(), gates=LayerGates())
        self._device.wait_host(step.fence, reason="step")
        step.drop()
        if step.fence.failure is not None:
            raise step.fence.failure

    def _accesses(self, batch: BatchPlan, entry: MailboxEntry, *, later: bool) -> list[Access]:
        """The memory that a step reads and writes, for the tracer. `later`: without the KV, whose accesses are reported
        later: layer by layer, or once the positions of the rows were read from the device state.
        """
        accesses = [] if later else [*self._accesses_of(batch.rows).all()]
        accesses.append(entry.access(write=True))  # rule: step-declares-its-mailbox-entry
        return accesses

    def _accesses_of(self, rows: Sequence[RowPlan]) -> _StepAccesses:
        return _StepAccesses(self._memory, self._scratch, rows, self._model.layout, self._states)

    def _touch_before_drafts(self, batch: BatchPlan, accesses: _StepAccesses, *, gated: bool) -> None:
        """Declare what a step with drafts reads and writes at its start: everything, or, if its layers wait for loads,
        the KV of the rows for which it drafts. Their blocks were loaded before.
        """
        if batch.speculates and self._traced:
            self._stream.touch(accesses.of_drafting_rows if gated else accesses.all)  # rule: drafts-are-declared

    def _rows_from_state(self, batch: BatchPlan) -> Sequence[RowPlan]:
        """The rows to declare; none without a tracer. On a CPU, where the host can read the device state: with exact
        positions, and without checkpoints that they do not reach. On a GPU: unchanged, their positions are bounds,
        `[min_start, stop)`.
        """
        if not self._traced:
            return ()
        if not batch.speculates or not on_host(self._state.lengths.device):
            return batch.rows
        lengths, exact = self._state.lengths.tolist(), []
        for row in batch.rows:
            start = row.min_start if row.is_certain else lengths[row.slot]
            states = row.states
            if self._state_pool is not None and states is not None and states.checkpoint >= 0:
                size, covered = self._model.layout.block_tokens, int(self._state_pool.covered[states.read])
                if (start + 1) // size * size <= covered:
                    states = states._replace(checkpoint=-1)
            exact.append(row._replace(min_start=start, stop=start + row.num_tokens, states=states))
        return exact

    def _layer_hook(self, gates: LayerGates, accesses: _StepAccesses) -> Callable[[int], None]:
        """The callback that attention calls before it reads or writes a layer's KV. It makes the stream wait for that
        layer's loads (hazard H5).
        """
        if not gates.by_layer:
            return lambda layer: None

        def before_layer(layer: int) -> None:
            for fence in gates.by_layer[layer]:  # rule: layer-waits-for-its-load
                self._stream.wait(fence)
            if self._traced:
                self._stream.touch(lambda: accesses.layers(range(layer, layer + 1)))  # rule: gated-layer-is-declared

        return before_layer

    def _states_hook(self, gates: LayerGates, accesses: _StepAccesses) -> Callable[[], None]:
        """The callback that is called once, before a step reads or writes recurrent states. A load copies states before
        all layers, so the stream waits for the same fences as the first layer.
        """
        if not gates.by_layer or self._states is None:
            return lambda: None

        def before_states() -> None:
            for fence in gates.by_layer[0]:  # rule: states-wait-for-their-load
                self._stream.wait(fence)
            if self._traced:
                self._stream.touch(accesses.states)  # rule: gated-states-are-declared

        return before_states


def kv_accesses(memory: str, rows: Sequence[RowPlan], layout: KVLayout, layers: range) -> list[Access]:
    """The byte ranges of the pool that some layers of a step read (blocks before the chunk) and write (blocks of the
    chunk).
    """
    size = layout.block_tokens
    accesses = []
    for row in rows:
        for index, block in enumerate(row.block_ids):
            start, stop = layout.layer_span(block, layers.start, layers.stop)
            # rule: step-declares-what-it-reads, each-row-declares-what-it-reads, step-declares-all-that-it-writes
            accesses.append(Access(memory, start, stop, write=(index + 1) * size > row.min_start))
    return accesses


def state_accesses(memory: str, rows: Sequence[RowPlan], region: StateRegion) -> list[Access]:
    """The byte ranges of the recurrent states that a step reads and writes. Sequences begin with the zero state.
    Padding and rows without a checkpoint write the scratch state.
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


def _label_of(batch: BatchPlan) -> str:
    decodes, tokens = batch.num_decodes, batch.num_prefill_tokens
    if decodes == batch.num_rows:
        return f"decode {decodes}"
    return f"prefill {tokens} + decode {decodes}" if decodes else f"prefill {tokens}"


def _row(slot: int, block_ids: tuple[int, ...], num_tokens: int, spec: SamplingSpec) -> RowPlan:
    """A sampling row of a warm-up step. It belongs to no request."""
    return RowPlan(
        request_id=-1 - slot,
        slot=slot,
        epoch=0,
        min_start=0,
        stop=num_tokens,
        tokens=(0,) * num_tokens,
        block_ids=block_ids,
        samples=True,
        min_output_index=0,
        begin=RowStart(sampling=spec, prompt=(0,) * num_tokens, outputs=(0,)),
    )
