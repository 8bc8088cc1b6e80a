"""The executor: runs batch plans on the device. Each step is one submission to the compute stream. It runs eagerly, or
by CUDA graphs that were captured for its size.

`launch` returns at once. It needs no results of the step before: a decode row takes its last token from device memory.
On a GPU, `launch` never waits for the device: kernels read a step's inputs from mapped host memory
(`runner/state.py`). Called from the engine thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from types import MappingProxyType
from typing import NamedTuple

import torch

from sidestream.attention.interface import AttentionBackend
from sidestream.attention.states import DraftInputs, StatePool
from sidestream.config import most_prompt_logits
from sidestream.errors import DeviceLost, InvariantError
from sidestream.grammar.token_grammar import Masks
from sidestream.ops import Ops
from sidestream.runner.accesses import StepAccesses
from sidestream.runner.forward import Forward, ForwardModel, ForwardOutput
from sidestream.runner.graphs import CapturedStep, Graphs, Tell
from sidestream.runner.mailbox import Delivered, Mailbox, MailboxEntry
from sidestream.runner.masks import MaskMemory
from sidestream.runner.sampler import Sampler, SamplingMode, TokenMasks, prompt_logprobs
from sidestream.runner.second_run import SecondRun
from sidestream.runner.state import DecodeState, Uploads
from sidestream.runner.step_inputs import (
    NO_CHANGES,
    BlockTableMirror,
    GraphKey,
    InputSizes,
    Numbers,
    PromptLogits,
    PromptPart,
    PromptSlots,
    StepInputs,
    TableChanges,
    demand_of,
    pack,
)
from sidestream.speculate import Proposer
from sidestream.types import BatchPlan, Forced, RowPlan, TokenLogprob
from sidestream_kv.device.base import Device, Memory, Stream
from sidestream_kv.device.group import Group
from sidestream_kv.device.kinds import on_host
from sidestream_kv.kv.layout import KVLayout
from sidestream_kv.kv.state_layout import StateRegion
from sidestream_kv.kv.window_layout import WindowedLayers
from sidestream_kv.types import Access, Fence, LayerGates, RequestId

MAX_STEPS = 3
"""Largest number of steps whose host memory is in use: one step runs, the next one is being launched, and the host
reads the results of the one before.
"""


class PreparedStep(NamedTuple):
    """The inputs and choices of a step, which the host makes before it enqueues the step.

    numbers    content of the input buffer, in the order of `StepInputs`
    changes    changes of the block tables that do not fit into `numbers`
    captured   the step's graphs; None: the step runs eagerly
    prompt     positions whose logits give log-probabilities of prompts
    """

    sizes: InputSizes
    numbers: Numbers
    changes: TableChanges
    captured: CapturedStep | None
    mode: SamplingMode
    gates: LayerGates
    entry: MailboxEntry
    prompt: PromptLogits | None = None


@dataclass(slots=True, eq=False)
class UnsampledPass:
    """A launched forward pass. Its step is complete after `Executor.sample`.

    inputs   the accesses of the step's inputs, for the tracer
    result   written when the pass has run; None: it has not, or it failed
    """

    step: PreparedStep
    inputs: Sequence[Access]
    result: tuple[StepInputs, ForwardOutput] | None = None


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A launched batch; its fence covers the forward pass, the sampling, and the delivery of the results.

    unsampled      the step's rows need token masks, so only its forward pass was launched, and the fence covers no more
    masked         whether rows needed token masks
    forced         requests whose drafts were planned as forced by their grammars, or are: whether they are
    prompt         positions whose logits give log-probabilities of prompts
    gated          whether the step waits for loads
    top_logprobs   requested numbers of log-probabilities, see `Sampler.top_logprobs_of`
    launched_s     time of the launch, by the device's clock
    on_all_ranks   fence that is done when all ranks have run the step; None: there is one rank
    """

    batch: BatchPlan
    fence: Fence
    entry: MailboxEntry
    gated: bool
    top_logprobs: tuple[int, ...]
    launched_s: float
    mailbox: Mailbox
    unsampled: UnsampledPass | None = None
    masked: bool = False
    forced: Mapping[RequestId, bool] = field(default_factory=dict)
    prompt: PromptLogits | None = None
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
        """Release the step's mailbox entry without reading it, because the step failed, was a warm-up, or is read by
        another rank.
        """
        self.entry.lease.release(after=(self.fence,))  # rule: mailbox-entry-of-a-failed-step-is-released

    def prompt_logprobs(self) -> list[tuple[PromptPart, list[TokenLogprob]]]:
        """Log-probabilities of parts of prompts. Call it after the step's fence and before `results`."""
        return [] if self.prompt is None else [*self.mailbox.read_prompt(self.entry, self.prompt.parts, self.fence)]

    def results(self) -> Delivered:
        """The results of the sampling rows, in row order. Call it once, after the step's fence."""
        return self.mailbox.read(
            self.entry,
            self.drafts,
            self.top_logprobs,
            self.fence,
            compared_rows=self.batch.num_rows if self.batch.self_check else 0,
            whole=self.masked,
        )


@dataclass(eq=False)
class StepTracing:
    """Declares to the device's tracer which memory each step reads and writes. Does nothing without a tracer.

    Each byte range is declared once, at the point of the compute stream from which the step may use it: at the launch;
    in a step with drafts, when the step begins, because its positions are known only then; in a step that waits for
    loads, behind the wait of each layer.

    _scratch   id of the block where steps write hidden states that are not kept; None: there is none
    """

    _stream: Stream
    _memory: str
    _layout: KVLayout
    _scratch: int | None
    _region: StateRegion | None
    _windows: WindowedLayers | None
    _state: DecodeState
    _state_pool: StatePool | None
    _on: bool

    def at_launch(self, batch: BatchPlan, entry: MailboxEntry, *, gated: bool) -> list[Access]:
        """The accesses to declare when a step is launched. Accesses to KV and states are declared later if the step
        waits for loads, or if only the device knows the positions of the step's rows.
        """
        accesses = [] if gated or batch.speculates else [*self._accesses(batch.rows).all()]
        accesses.append(entry.access(write=True))  # rule: step-declares-its-mailbox-entry
        return accesses

    def at_start(self, batch: BatchPlan, *, gated: bool) -> StepAccesses:
        """The accesses of a step that begins on the stream, with row positions as exact as the host knows them. Called
        inside work of the stream.

        Declares the accesses of a step with drafts: all of them; or, if its layers wait for loads, only the KV of the
        rows with drafts, which drafting reads before the first layer. These rows' blocks were loaded before.
        """
        accesses = self._accesses(self._rows_from_state(batch) if self._on else ())
        if batch.speculates:
            self.touch(accesses.of_drafting_rows if gated else accesses.all)  # rule: drafts-are-declared
        return accesses

    def at_second_run(self, batch: BatchPlan) -> None:
        """Declare the accesses of a second run of the forward pass. Called inside work of the stream."""
        self.touch(self._accesses(self._rows_from_state(batch) if self._on else ()).all)

    def touch(self, accesses: Callable[[], Sequence[Access]]) -> None:
        """Declare accesses at this point of the stream. Called inside work of the stream."""
        if self._on:
            self._stream.touch(accesses)

    def _accesses(self, rows: Sequence[RowPlan]) -> StepAccesses:
        return StepAccesses(self._memory, self._scratch, rows, self._layout, self._region, self._windows)

    def _rows_from_state(self, batch: BatchPlan) -> Sequence[RowPlan]:
        """The rows of the batch. On a CPU, the host can read the device state. There, rows get their exact positions,
        and lose checkpoints that they do not reach. On a GPU, their positions stay bounds, `[min_start, stop)`.
        """
        if not batch.speculates or not on_host(self._state.lengths.device):
            return batch.rows
        lengths, exact = self._state.lengths.tolist(), []
        for row in batch.rows:
            start = row.min_start if row.is_certain else lengths[row.slot]
            states = row.states
            if self._state_pool is not None and states is not None and states.checkpoint >= 0:
                size, covered = self._layout.block_tokens, int(self._state_pool.covered[states.read])
                if (start + 1) // size * size <= covered:
                    states = states._replace(checkpoint=-1)
            exact.append(row._replace(min_start=start, stop=start + row.num_tokens, states=states))
        return exact


@dataclass(eq=False)
class StepWork:
    """The work of steps on the compute stream: the forward pass and the sampling, eagerly or by captured graphs. On a
    GPU, the engine thread enqueues it; on a CPU, it runs on the stream's thread.

    is_rank   several ranks share the model
    graphs    captured graphs; None: every step runs eagerly
    """

    _stream: Stream
    _state: DecodeState
    _tables: BlockTableMirror
    _uploads: Uploads
    _ops: Ops
    _forward: Forward
    _second_run: SecondRun
    _sampler: Sampler
    _mailbox: Mailbox
    _tracing: StepTracing
    _has_states: bool
    _is_rank: bool
    graphs: Graphs | None = None
    _failed: str | None = None

    def run(self, batch: BatchPlan, step: PreparedStep, unsampled: UnsampledPass | None) -> None:
        """Run the step, or only its forward pass: the work that `launch` submits to the compute stream."""
        with self.running(), torch.inference_mode():
            if len(step.changes.indices):
                indices, block_ids = self._uploads.together([torch.from_numpy(part) for part in step.changes])
                self._ops.update_block_tables(indices, block_ids, self._state.tables)
            if begins := batch.begins:
                self._state.begin(begins)  # rule: slot-begins-on-the-device
            # rule: second-run-is-part-of-its-step
            inputs, output = self._run_twice(batch, step) if batch.self_check else self._run_once(batch, step)
            if step.prompt is not None:
                targets = self._state.index(step.prompt.targets)
                logprobs = prompt_logprobs(output.logits[-len(targets) :], targets)
                self._mailbox.write_prompt(step.entry.start, logprobs, self._stream)
            if unsampled is None:
                self.sample(batch, step, inputs, output)
                return
            unsampled.result = inputs, output
            if output.proposed is not None:
                drafts = output.proposed.tokens[: batch.num_decodes]
                self._mailbox.write_drafts(step.entry.start, drafts, self._stream)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Around work of a step on the compute stream.

        If it fails, `_tables` forgets which block tables are on the device, so that the next step writes them
        completely. That is in time: on a GPU, this method runs on the engine thread, before the next step is packed.

        If a step fails on one of several ranks, no later step runs there. Its collectives would meet those of the
        failed step on other ranks, whose steps would then end without an error and with wrong results.
        """
        if self._failed is not None:  # rule: no-step-of-a-rank-follows-a-failed-one
            raise DeviceLost(f"an earlier step failed on this rank: {self._failed}")
        try:
            yield
        except BaseException as error:
            self._tables.forget()
            if self._is_rank:
                self._failed = f"{type(error).__name__}: {error}"
            raise

    def _run_once(self, batch: BatchPlan, step: PreparedStep) -> tuple[StepInputs, ForwardOutput]:
        """Run the forward pass."""
        return self._run_eagerly(batch, step) if step.captured is None else self._replay(batch, step)

    def _run_twice(self, batch: BatchPlan, step: PreparedStep) -> tuple[StepInputs, ForwardOutput]:
        """Run the forward pass twice, and deliver the differences of both runs. Returns the second run."""
        inputs, output, differences = self._second_run.compare(lambda: self._run_once(batch, step), batch)
        self._mailbox.write_differences(step.entry.start, differences, self._stream)
        return inputs, output

    def sample(
        self,
        batch: BatchPlan,
        step: PreparedStep,
        inputs: StepInputs,
        output: ForwardOutput,
        masks: TokenMasks | None = None,
    ) -> None:
        """Sample the step's tokens, and deliver them: by a graph if sampling is captured for the step's mode."""
        captured, gated = step.captured, bool(step.gates.by_layer)
        if masks is not None and step.mode is not SamplingMode.HOST:
            self._ops.mask(output.logits, *masks)  # rule: masked-tokens-are-not-sampled
        if captured is not None and self.graphs is not None and step.mode in captured.modes(gated=gated):
            self.graphs.draw(captured, step.mode, gated=gated)
        elif any(batch.columns.samples):
            drawn, accepted = self._sampler.sample(inputs, output, step.mode, batch, masks)
            times = None if output.proposed is None else output.proposed.times
            self._mailbox.write(step.entry.start, drawn, self._stream, counts=accepted, times=times)

    def _run_eagerly(self, batch: BatchPlan, step: PreparedStep) -> tuple[StepInputs, ForwardOutput]:
        """Run the forward pass eagerly."""
        (buffer,) = self._uploads.together([torch.from_numpy(step.numbers)])
        chunks = batch.prefill_rows if step.sizes.has_states else ()
        inputs = StepInputs.of(
            buffer,
            step.sizes,
            table_width=max(map(len, batch.columns.block_table)),
            chunk_lens=tuple(row.num_tokens for row in chunks),
        )
        gated = bool(step.gates.by_layer)
        accesses = self._tracing.at_start(batch, gated=gated)
        before_layer = self._layer_hook(step.gates, accesses)
        before_states = self._states_hook(step.gates, accesses)
        return inputs, self._forward.step(inputs, before_layer, gated=gated, before_states=before_states)

    def _replay(self, batch: BatchPlan, step: PreparedStep) -> tuple[StepInputs, ForwardOutput]:
        """Replay the graph of the forward pass."""
        captured = step.captured
        assert self.graphs is not None and captured is not None
        gated = bool(step.gates.by_layer)
        self.graphs.fill(captured, step.numbers)  # rule: captured-inputs-are-filled-before-the-replay
        accesses = self._tracing.at_start(batch, gated=gated)
        return captured.inputs, self.graphs.replay(captured, gated=gated, accesses=accesses)

    def forget_failure(self) -> None:
        """Let steps of a rank run again after a failure that all ranks have in common, before they serve."""
        self._failed = None

    def _layer_hook(self, gates: LayerGates, accesses: StepAccesses) -> Callable[[int], None]:
        """Make the callback that attention calls before it reads or writes a layer's KV. The callback makes the stream
        wait for the loads of this layer (hazard H5).
        """
        if not gates.by_layer:
            return lambda layer: None

        def before_layer(layer: int) -> None:
            # A load copies pages before all layers of blocks: layers in pages wait for what the first layer waits for.
            # rule: layer-waits-for-its-load
            for fence in gates.by_layer[layer if layer < len(gates.by_layer) else 0]:
                self._stream.wait(fence)
            self._tracing.touch(lambda: accesses.layers(range(layer, layer + 1)))  # rule: gated-layer-is-declared

        return before_layer

    def _states_hook(self, gates: LayerGates, accesses: StepAccesses) -> Callable[[], None]:
        """Make the callback that is called once, before a step reads or writes recurrent states. A load copies states
        before the KV of all layers, so the stream waits for the fences of the first layer.
        """
        if not gates.by_layer or not self._has_states:
            return lambda: None

        def before_states() -> None:
            for fence in gates.by_layer[0]:  # rule: states-wait-for-their-load
                self._stream.wait(fence)
            self._tracing.touch(accesses.states)  # rule: gated-states-are-declared

        return before_states


class Executor:
    """Owner of the compute stream, of the decode state on the device, and of the mailbox (host memory for results).

    memory      the block pool, `num_blocks * block_bytes` bytes
    num_slots   largest number of requests that run at once
    attention   makes the attention metadata of each step; created for `num_slots` decode rows and a short chunk
    ops         the operations of a step besides the model; None: their implementation in torch, for a CPU
    states      the part of `memory` for recurrent states; None: the model has no recurrent state
    windows     the layers with blocks of their own; None: there are none
    group       the ranks that share the model, if there are several; all of them launch the same steps
    proposer    drafts up to `max_drafts` tokens for rows of up to `max_len` tokens; None: no drafts. If the proposer
                reads hidden states, the pool has one block more than requests can use, and the last layers of each
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
        windows: WindowedLayers | None = None,
        group: Group | None = None,
        proposer: Proposer | None = None,
        max_drafts: int = 0,
        max_len: int = 0,
    ) -> None:
        """Until `capture` is called, every step runs eagerly."""
        self._device, self._model = device, model
        ops = Ops() if ops is None else ops
        self._clock = device.now
        self._stream = device.stream("compute")
        self._gate_stream: Stream | None = None
        self._uploads = Uploads.of(device, num_regions=MAX_STEPS)
        self._layout = layout = model.layout if windows is None else windows.blocks
        page_blocks = 0 if windows is None else windows.parts
        num_blocks = memory.num_bytes // layout.block_bytes if states is None else states.num_blocks
        scratch = num_blocks - 1 if proposer is not None and proposer.hidden_size else None
        self._kv = _pool_of(memory, layout, num_blocks)
        self._state_pool = _make_state_pool(device, memory, states, layout.block_tokens, num_slots + 1, max_drafts)
        tokens = attention.max_kv_tokens
        self._table_width = num_blocks if tokens is None else min(num_blocks, tokens // layout.block_tokens)
        self._state = DecodeState(
            num_slots,
            model.vocab_size,
            device=device.torch_device,
            uploads=self._uploads,
            table_width=self._table_width,
            parts=page_blocks,
            max_len=0 if proposer is None else max_len,
            max_drafts=0 if proposer is None else max_drafts,
            hidden_size=0 if proposer is None else proposer.hidden_size,
            dtype=getattr(torch, layout.compute_dtype),
        )
        traced, on = (memory.name, layout, scratch, states, windows), device.tracer is not None
        self._tracing = StepTracing(self._stream, *traced, self._state, self._state_pool, on)
        self._tables = BlockTableMirror(num_slots, self._table_width, parts=page_blocks)
        self._sampler = Sampler(self._state, ops, group)
        self._prompts = PromptSlots()
        shape, logits = (MAX_STEPS, num_slots, model.vocab_size), most_prompt_logits(layout.block_tokens)
        self._mailbox = Mailbox(*shape, device, max_drafts=max_drafts, prompt_logits=logits)
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
            windows=windows,
            group=group,
        )
        layers, declare = self._forward.num_model_layers, self._tracing.at_second_run
        second_run = SecondRun(self._kv, self._state, self._stream, num_layers=layers, declare=declare)
        parts = self._state, self._tables, self._uploads, ops, self._forward, second_run, self._sampler, self._mailbox
        self._work = StepWork(self._stream, *parts, self._tracing, states is not None, group is not None)
        self._graphs: Graphs | None = None
        # Other ranks sample without masks, and then continue with the tokens of rank 0.
        rows = num_slots * (1 + max_drafts)
        self._masks = MaskMemory(device, rows, model.vocab_size) if group is None or group.rank == 0 else None

    def launch(self, batch: BatchPlan, *, after: tuple[Fence, ...], gates: LayerGates) -> LaunchedStep:
        """Enqueue one step. The step waits for the fences `after`, and before each layer for the fences of the layer in
        `gates` (its loads). Returns at once.

        If rows need token masks, enqueue only the forward pass: the step is complete after `sample`, which must follow
        before the next launch.
        """
        launched_s = self._clock()
        gated, columns = bool(gates.by_layer), batch.columns
        for slot, begin in batch.begins:
            self._sampler.begin(slot, begin.sampling)
            self._prompts.begin(slot, begin)
        step = self._prepare(batch, gates)
        self._uploads.open(step.entry.lease.ids[0])
        numbers, inputs = self._uploads.hold(step.numbers)
        step = step._replace(numbers=numbers)
        for fence in after:  # rule: step-waits-for-the-last-use
            self._stream.wait(fence)
        masked = self._masks is not None and self._sampler.needs_masks(columns)
        unsampled = UnsampledPass(step, inputs) if masked else None
        fence = self._stream.submit(
            lambda: self._work.run(batch, step, unsampled),
            lambda: [*self._tracing.at_launch(batch, step.entry, gated=gated), *inputs],
            label=_label_of(batch),
        )
        top_logprobs = self._sampler.top_logprobs_of(columns)
        parts = gated, top_logprobs, launched_s, self._mailbox, unsampled, masked
        return LaunchedStep(batch, fence, step.entry, *parts, prompt=step.prompt)

    def drafts_of(self, launched: LaunchedStep) -> list[list[int]]:
        """The drafts of the decode rows of an unsampled step, after its fence."""
        assert launched.unsampled is not None
        draft_len = launched.unsampled.step.sizes.draft_len
        return self._mailbox.read_drafts(launched.entry, launched.batch.num_decodes, draft_len, launched.fence)

    def open_masks(self, num_rows: int) -> Masks:
        """The memory for `num_rows` token masks of the step that is sampled next."""
        assert self._masks is not None
        return self._masks.open(num_rows)

    @property
    def mask_words(self) -> int:
        """Numbers of 32 bits of a token mask."""
        assert self._masks is not None
        return self._masks.words

    @property
    def most_forced(self) -> int:
        """Largest number of forced tokens of a slot; 0: steps have no drafts."""
        return self._state.most_forced

    def sample(
        self,
        launched: LaunchedStep,
        rows: Sequence[int],
        found: Mapping[int, Forced] = MappingProxyType({}),
        forced: Mapping[RequestId, bool] = MappingProxyType({}),
    ) -> LaunchedStep:
        """Enqueue the sampling of a step whose forward pass was launched. Returns at once, with the complete step.

        rows    the row of logits of each mask that was written to `open_masks`
        found   by request slot: what its grammar forces from now on
        forced  see `LaunchedStep`
        """
        masks, unsampled, batch = self._masks, launched.unsampled, launched.batch
        assert masks is not None and unsampled is not None

        def run() -> None:
            if unsampled.result is None:
                raise launched.fence.failure or InvariantError("a step was sampled whose forward pass did not run")
            with self._work.running(), torch.inference_mode():
                read = TokenMasks(self._state.index(rows), masks.rows(len(rows))) if rows else None
                self._work.sample(batch, unsampled.step, *unsampled.result, read)
                if found:
                    self._state.force(found)

        entry = launched.entry.access(write=True)
        fence = self._stream.submit(
            run, lambda: [entry, masks.access(len(rows), write=False), *unsampled.inputs], label="sample"
        )
        masks.used_until(fence)  # rule: masks-are-kept-until-they-were-read
        return replace(launched, fence=fence, unsampled=None, forced=forced)

    def enqueue(self, work: Callable[[], None], *, label: str) -> Fence:
        """Run `work` on the compute stream, between the steps before it and those after it. It uses no block."""
        return self._stream.submit(work, label=label)

    def _prepare(self, batch: BatchPlan, gates: LayerGates) -> PreparedStep:
        """Choose the step's graphs and pack its inputs. For a captured step that waits for loads, also record the
        events for which its graph waits.
        """
        captured, gated = None, bool(gates.by_layer)
        prompt = self._prompts.wanted(batch)
        if self._graphs is not None and prompt is None:
            captured = self._graphs.find(batch, demand_of(batch), gated=gated)
        entry = self._mailbox.take_entry()
        sizes = InputSizes.of(batch) if captured is None else captured.key.sizes
        if prompt is not None:
            sizes = replace(sizes, logits=sizes.logits + len(prompt.indices))
        changes, left_over = self._tables.changes(batch.columns), NO_CHANGES
        if len(changes.indices) > sizes.rows:
            changes, left_over = NO_CHANGES, changes
        numbers = pack(
            batch,
            sizes,
            padding_slot=self._state.padding_slot,
            block_tokens=self._layout.block_tokens,
            mailbox_offset=entry.start,
            changes=changes,
            further_logits=None if prompt is None else prompt.indices,
        )
        if captured is not None and gated and self._graphs is not None:
            self._graphs.close_gates(gates)
        mode = self._sampler.mode_of(batch.columns)
        return PreparedStep(sizes, numbers, left_over, captured, mode, gates, entry, prompt)

    def warm_up(self, steps: Iterable[BatchPlan]) -> None:
        """Run steps without requests, one after the other, and wait for each. Their results are dropped. Raises the
        error of a step. Called before the first step of a request.
        """
        for batch in steps:
            step = self.launch(batch, after=(), gates=LayerGates())
            if step.unsampled is not None:
                self.open_masks(1)[:] = -1
                step = self.sample(step, [0])
            self._device.wait_host(step.fence, reason="step")
            step.drop()
            if step.fence.failure is not None:
                raise step.fence.failure

    def capture(
        self,
        keys: Sequence[GraphKey],
        *,
        gate_layers: int = 0,
        shared: bool = False,
        tell: Tell = lambda key, done, total: None,
    ) -> None:
        """Capture the steps of each key. Call it after `warm_up`, before the first real step. Blocks the caller; reads
        and writes no KV. See `Graphs`.
        """
        self._delete_graphs()
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
            num_layers=self._layout.num_layers,
            gate_layers=gate_layers,
            table_width=self._table_width,
            shared=shared,
        )
        graphs.capture(keys, tell=tell)
        self._graphs = self._work.graphs = graphs

    def forget_failure(self) -> None:
        """Let steps of a rank run again after a failure that all ranks have in common, before they serve."""
        self._work.forget_failure()

    def close(self) -> None:
        """Delete the captured graphs, which hold device memory and collectives of the group, and let go of the model
        and the KV pool. Call it after the last step, and before the group closes. Idempotent.
        """
        self._delete_graphs()
        for held in ("_model", "_kv", "_state_pool", "_forward", "_work"):
            self.__dict__.pop(held, None)

    def _delete_graphs(self) -> None:
        graphs, self._graphs, self._work.graphs = self._graphs, None, None
        if graphs is not None:
            graphs.delete()


def _pool_of(memory: Memory, layout: KVLayout, num_blocks: int) -> torch.Tensor:
    """The block pool, at the start of `memory`."""
    pool = memory.data[: num_blocks * layout.block_bytes].view(getattr(torch, layout.dtype))
    return pool.view(layout.shape(num_blocks))


def _make_state_pool(
    device: Device, memory: Memory, region: StateRegion | None, block_tokens: int, num_slots: int, max_drafts: int
) -> StatePool | None:
    """Make the pool of recurrent states in `memory`. This clears the zero state, with which sequences begin."""
    if region is None:
        return None
    inputs = DraftInputs(region.layout, num_slots, max_drafts, device.torch_device) if max_drafts else None
    pool = StatePool(
        memory.data[region.first_byte : region.stop_byte],
        region.layout,
        block_tokens=block_tokens,
        state_bytes=region.state_bytes,
        drafts=inputs,
    )
    if device.tracer is not None:
        zero = Access(memory.name, *region.span(region.zero), write=True)
        device.tracer.host_touched(lambda: [zero], "clear the state that sequences begin with")
    return pool


def _label_of(batch: BatchPlan) -> str:
    decodes, tokens = batch.num_decodes, batch.num_prefill_tokens
    if decodes == batch.num_rows:
        return f"decode {decodes}"
    return f"prefill {tokens} + decode {decodes}" if decodes else f"prefill {tokens}"
