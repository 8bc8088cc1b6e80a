"""The work of steps on the compute stream: the forward pass and the sampling, eagerly or by captured graphs. On a GPU,
the engine thread enqueues it; on a CPU, it runs on the stream's thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from sidestream.attention.states import StatePool
from sidestream.errors import DeviceLost
from sidestream.ops import Ops
from sidestream.runner.accesses import StepAccesses
from sidestream.runner.forward import Forward, ForwardOutput
from sidestream.runner.graphs import CapturedStep, Graphs
from sidestream.runner.mailbox import Mailbox, MailboxEntry
from sidestream.runner.sampler import Sampler, SamplingMode, TokenMasks
from sidestream.runner.second_run import SecondRun
from sidestream.runner.state import DecodeState, Uploads
from sidestream.runner.step_inputs import BlockTableMirror, InputSizes, Numbers, StepInputs, TableChanges
from sidestream.types import BatchPlan, RowPlan
from sidestream_kv.device.base import Stream
from sidestream_kv.device.kinds import on_host
from sidestream_kv.kv.layout import KVLayout
from sidestream_kv.kv.state_layout import StateRegion
from sidestream_kv.types import Access, LayerGates


class PreparedStep(NamedTuple):
    """The inputs and choices of a step, which the host makes before it enqueues the step.

    numbers    content of the input buffer, in the order of `StepInputs`
    changes    changes of the block tables that do not fit into `numbers`
    captured   the step's graphs; None: the step runs eagerly
    """

    sizes: InputSizes
    numbers: Numbers
    changes: TableChanges
    captured: CapturedStep | None
    mode: SamplingMode
    gates: LayerGates
    entry: MailboxEntry


@dataclass(slots=True, eq=False)
class UnsampledPass:
    """A launched forward pass. Its step is complete after `Executor.sample`.

    inputs   the accesses of the step's inputs, for the tracer
    result   written when the pass has run; None: it has not, or it failed
    """

    step: PreparedStep
    inputs: Sequence[Access]
    result: tuple[StepInputs, ForwardOutput] | None = None


class StepTracing:
    """Declares to the device's tracer which memory each step reads and writes. Does nothing without a tracer.

    Each byte range is declared once, at the point of the compute stream from which the step may use it: at the launch;
    in a step with drafts, when the step begins, because its positions are known only then; in a step that waits for
    loads, behind the wait of each layer.

    scratch   id of the block where steps write hidden states that are not kept; None: there is none
    """

    def __init__(
        self,
        stream: Stream,
        memory: str,
        layout: KVLayout,
        *,
        scratch: int | None,
        region: StateRegion | None,
        state: DecodeState,
        state_pool: StatePool | None,
        on: bool,
    ) -> None:
        self._stream = stream
        self._memory = memory
        self._layout = layout
        self._scratch = scratch
        self._region = region
        self._state = state
        self._state_pool = state_pool
        self._on = on

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
        return StepAccesses(self._memory, self._scratch, rows, self._layout, self._region)

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


class StepWork:
    """The work that `Executor` submits to the compute stream.

    graphs   captured graphs; None: every step runs eagerly
    """

    def __init__(
        self,
        *,
        stream: Stream,
        state: DecodeState,
        tables: BlockTableMirror,
        table_width: int,
        uploads: Uploads,
        ops: Ops,
        forward: Forward,
        second_run: SecondRun,
        sampler: Sampler,
        mailbox: Mailbox,
        tracing: StepTracing,
        has_states: bool,
        is_rank: bool,
    ) -> None:
        """`is_rank`: several ranks share the model."""
        self.graphs: Graphs | None = None
        self._stream = stream
        self._state = state
        self._tables = tables
        self._table_width = table_width
        self._uploads = uploads
        self._ops = ops
        self._forward = forward
        self._second_run = second_run
        self._sampler = sampler
        self._mailbox = mailbox
        self._tracing = tracing
        self._has_states = has_states
        self._is_rank = is_rank
        self._failed: str | None = None

    def run(self, batch: BatchPlan, step: PreparedStep, unsampled: UnsampledPass | None) -> None:
        """Run the step, or only its forward pass: the work that `launch` submits to the compute stream."""
        with self.running(), torch.inference_mode():
            if len(step.changes.indices):
                indices, block_ids = self._uploads.together([torch.from_numpy(part) for part in step.changes])
                self._ops.update_block_tables(indices, block_ids, self._state.block_tables)
            if begins := batch.begins:
                self._state.begin(begins)  # rule: slot-begins-on-the-device
            # rule: second-run-is-part-of-its-step
            inputs, output = self._run_twice(batch, step) if batch.self_check else self._run_once(batch, step)
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
        if captured is not None and self.graphs is not None and step.mode in captured.modes(gated=gated):
            self.graphs.draw(captured, step.mode, gated=gated)
        elif any(batch.columns.samples):
            drawn, accepted = self._sampler.sample(inputs, output, step.mode, batch, masks)
            times = None if output.proposed is None else output.proposed.times
            self._mailbox.write(step.entry.start, drawn, self._stream, counts=accepted, times=times)

    def _run_eagerly(self, batch: BatchPlan, step: PreparedStep) -> tuple[StepInputs, ForwardOutput]:
        """Run the forward pass eagerly."""
        (buffer,) = self._uploads.together([torch.from_numpy(step.numbers)])
        chunks = batch.rows[batch.num_decodes :] if step.sizes.has_states else ()
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
            for fence in gates.by_layer[layer]:  # rule: layer-waits-for-its-load
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
