"""CUDA graphs of forward passes and of sampling, captured once for each `GraphKey` (the sizes of a step). With a graph,
the host launches a forward pass by one call, for any number of layers.

Each key has two graphs of the forward pass: the plain graph, and a gated graph for batches whose KV is still being
loaded. In the gated graph, each group of layers first waits for its loads (hazard H5). Both read the key's inputs
(`StepInputs`) and write the same output tensors. Called from the engine thread.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from sidestream.attention.interface import ungated
from sidestream.errors import InvariantError, OutOfDeviceMemory
from sidestream.runner.accesses import StepAccesses
from sidestream.runner.forward import Forward, ForwardOutput
from sidestream.runner.mailbox import Mailbox
from sidestream.runner.sampler import Sampler, SamplingMode
from sidestream.runner.state import DecodeState, Uploads
from sidestream.runner.step_inputs import GraphKey, Numbers, StepInputs, keys_that_fit, pack
from sidestream.types import BatchPlan
from sidestream_kv.device.base import Device, Graph, GraphEvent, Stream
from sidestream_kv.types import Access, LayerGates

logger = logging.getLogger(__name__)

Tell = Callable[[GraphKey, int, int], None]
"""Progress callback: gets the key that is captured next, the number of captured keys, and the number of all keys."""


@dataclass(slots=True, eq=False)
class _Pass:
    """The graph of a forward pass, its output, and the graphs of sampling after the pass, by mode."""

    graph: Graph | None = None
    output: ForwardOutput | None = None
    draws: dict[SamplingMode, Graph] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class CapturedStep:
    """The graphs of one key. `fetches`: for each region of `Uploads`, the graph that copies the region to the inputs;
    empty if the copy of inputs is not captured.
    """

    key: GraphKey
    inputs: StepInputs
    plain: _Pass
    gated: _Pass
    fetches: list[Graph] = field(default_factory=list)

    def modes(self, *, gated: bool) -> Sequence[SamplingMode]:
        """The modes for which sampling is captured. With drafts, PENALISED is not captured: penalties then also count
        the drafts before each token, which the host must list. With loads, only ARGMAX is captured, because few steps
        have loads.
        """
        if gated:
            return (SamplingMode.ARGMAX,)
        if self.key.drafts:
            return (SamplingMode.ARGMAX, SamplingMode.RANDOM)
        return (SamplingMode.ARGMAX, SamplingMode.RANDOM, SamplingMode.PENALISED)


class Graphs:
    """Owner of the inputs and graphs of one executor.

    gates         the stream on which the events of the gates (waits in gated graphs) are recorded; nothing else runs on
                  it
    num_layers    number of layers of the pool
    gate_layers   number of layers in a group of the gated graphs; 0: there are no gated graphs, and batches with loads
                  run eagerly
    table_width   number of columns of the block tables
    shared        several ranks capture the same graphs: memory that runs out is an error, because ranks with different
                  graphs would call collectives of different sizes
    """

    def __init__(
        self,
        *,
        device: Device,
        stream: Stream,
        gates: Stream,
        forward: Forward,
        sampler: Sampler,
        state: DecodeState,
        mailbox: Mailbox,
        uploads: Uploads,
        num_layers: int,
        gate_layers: int,
        table_width: int,
        shared: bool = False,
    ) -> None:
        self._device = device
        self._stream = stream
        self._gates = gates
        self._forward = forward
        self._sampler = sampler
        self._state = state
        self._mailbox = mailbox
        self._uploads = uploads
        self._table_width = table_width
        self._shared = shared
        self._num_layers = num_layers
        self._captured: dict[GraphKey, CapturedStep] = {}
        self._graphs: list[Graph] = []  # all graphs, in the order of their capture
        self._fitting: dict[tuple[int, int, int, int], list[CapturedStep]] = {}
        self._traced = device.tracer is not None
        self._replayed: StepAccesses | None = None  # accesses of the step whose gated graph is being replayed
        self._groups: list[range] = []
        self._starts: list[int] = []  # first layer of each group
        self._events: list[GraphEvent] = []
        if gate_layers:
            self._groups = [
                range(first, min(first + gate_layers, num_layers)) for first in range(0, num_layers, gate_layers)
            ]
            self._starts = [group.start for group in self._groups]
            self._events = [device.event(f"gate {group.start}") for group in self._groups]
            for event in self._events:
                event.record(gates)  # because a wait for an event that was never recorded returns at once

    @property
    def keys(self) -> Sequence[GraphKey]:
        """The keys that were captured."""
        return list(self._captured)

    def capture(self, keys: Iterable[GraphKey], *, tell: Tell = lambda key, done, total: None) -> None:
        """Capture the graphs of the keys, in order, and replay each once, on padding. Blocks the caller; call it only
        before serving.

        If memory runs out, the graphs captured so far are kept, and a warning is logged; on several ranks,
        OutOfDeviceMemory is raised. Raises other errors of a forward pass. After an error, no graph is left. `tell` is
        called with each key before its capture, the number of captured keys and the number of all keys.
        """
        try:
            self._capture_all(list(keys), tell)
        except BaseException as error:
            _clear_frames(error)
            self.delete()
            raise

    def _capture_all(self, keys: Sequence[GraphKey], tell: Tell) -> None:
        for number, key in enumerate(keys):
            tell(key, number, len(keys))
            complete = len(self._graphs)
            try:
                self._captured[key] = self._capture(key)
            except OutOfDeviceMemory as error:
                if self._shared:
                    raise
                logger.warning(
                    "the GPU's memory holds %d of %d captured shapes (%s): larger batches run without a graph, slower",
                    number,
                    len(keys),
                    str(error),
                )
                _clear_frames(error)
                self._delete_from(complete)
                return

    def find(self, batch: BatchPlan, demand: tuple[int, int, int, int], *, gated: bool) -> CapturedStep | None:
        """The graphs of the key that fits the batch with the least padding; None if no key fits. `demand`: result of
        `demand_of(batch)`.
        """
        if gated and not self._groups:
            return None
        if demand not in self._fitting:
            self._fitting[demand] = [self._captured[key] for key in keys_that_fit(self.keys, *demand)]
        drafts = sum(batch.columns.drafts) if demand[3] else 0
        return next((captured for captured in self._fitting[demand] if drafts <= captured.key.all_drafts), None)

    def close_gates(self, gates: LayerGates) -> None:
        """Make the next replay of a gated graph wait for these loads: each group of layers waits for the loads of its
        layers.
        """
        for group, event in zip(self._groups, self._events, strict=True):
            for fence in dict.fromkeys(fence for layer in group for fence in gates.by_layer[layer]):
                self._gates.wait(fence)  # rule: gate-is-recorded-behind-its-loads
            event.record(self._gates)  # rule: gate-is-recorded-for-each-step

    def fill(self, captured: CapturedStep, numbers: Numbers) -> None:
        """Overwrite a key's inputs. Called inside work of the compute stream."""
        if captured.fetches:
            self._stream.enqueue(captured.fetches[self._uploads.write(numbers)])
        else:
            self._uploads.into(captured.inputs.buffer, numbers)

    def replay(self, captured: CapturedStep, *, gated: bool, accesses: StepAccesses | None = None) -> ForwardOutput:
        """Enqueue the graph of a pass whose inputs were filled. Called inside work of the compute stream.

        A gated graph declares the step's `accesses` layer by layer, each layer behind its gate.
        """
        chosen = captured.gated if gated else captured.plain  # rule: batch-with-loads-replays-the-gated-graph
        self._replayed = accesses
        self._stream.enqueue(chosen.graph)
        self._replayed = None
        if chosen.output is None:
            raise InvariantError(f"the graph of {captured.key} was never captured")
        return chosen.output

    def draw(self, captured: CapturedStep, mode: SamplingMode, *, gated: bool) -> None:
        """Enqueue sampling after the pass that was just replayed, and the delivery of its results to the host."""
        self._stream.enqueue((captured.gated if gated else captured.plain).draws[mode])

    def delete(self) -> None:
        """Delete all graphs. Dropping the references is not enough: others may refer to a graph, and a group of ranks
        cannot close while any graph holds its collectives.
        """
        self._captured.clear()
        self._fitting.clear()
        self._delete_from(0)

    def _delete_from(self, first: int) -> None:
        """Delete all graphs but the `first` ones."""
        for graph in self._graphs[first:]:
            graph.delete()
        del self._graphs[first:]

    def _capture(self, key: GraphKey) -> CapturedStep:
        state = self._state
        inputs = StepInputs.allocate(
            key, state.block_tables.device, padding_slot=state.padding_slot, table_width=self._table_width
        )
        captured = CapturedStep(key, inputs, _Pass(), _Pass())

        def run(into: _Pass, before_layer: Callable[[int], None]) -> None:
            gated = into is captured.gated

            def before_states() -> None:
                if gated:  # a load copies states before the KV of all layers
                    self._stream.wait_external(self._events[0])  # rule: captured-states-wait-for-their-load
                    self._touch(lambda accesses: accesses.states())  # rule: captured-states-are-declared

            with torch.inference_mode():
                into.output = self._forward.step(inputs, before_layer, gated=gated, before_states=before_states)

        def wait(layer: int) -> None:
            # A load copies pages before all layers of blocks: the first layer in pages waits for the gate of layer 0.
            first = 0 if layer == self._num_layers else layer  # rule: captured-pages-wait-for-their-load
            if first in self._starts:  # rule: captured-layer-waits-for-its-load
                self._stream.wait_external(self._events[self._starts.index(first)])
            self._touch(lambda accesses: accesses.layers(range(layer, layer + 1)))  # rule: captured-layer-is-declared

        self._finish(lambda: run(captured.plain, ungated))  # compiles kernels and allocates, before the capture
        for mode in captured.modes(gated=False):
            self._finish(lambda mode=mode: self._draw(captured.inputs, captured.plain, mode))  # type: ignore[misc]
        beside = next((other.plain.graph for other in self._captured.values()), None)
        captured.plain.graph = self._graph_of(lambda: run(captured.plain, ungated), beside=beside)
        if self._starts:
            captured.gated.graph = self._graph_of(lambda: run(captured.gated, wait), beside=captured.plain.graph)
        for into in (captured.plain, captured.gated)[: 1 + bool(self._starts)]:
            for mode in captured.modes(gated=into is captured.gated):
                into.draws[mode] = self._graph_of(
                    lambda into=into, mode=mode: self._draw(captured.inputs, into, mode),  # type: ignore[misc]
                    beside=captured.plain.graph,
                )
        for fetch in self._uploads.fetches(inputs.buffer):
            self._finish(fetch)
            captured.fetches.append(self._graph_of(fetch, beside=captured.plain.graph))
        if captured.fetches:
            padding = pack(BatchPlan(()), key.sizes, padding_slot=state.padding_slot, block_tokens=1)
            self._finish(lambda: self.fill(captured, padding))
        for gated in (False, True)[: 1 + bool(self._starts)]:  # a graph's first replay takes longer
            self._finish(lambda gated=gated: self._replay(captured, gated=gated))  # type: ignore[misc]
        return captured

    def _touch(self, part: Callable[[StepAccesses], Sequence[Access]]) -> None:
        """Declare accesses at this point of a captured graph: each replay declares those of the replayed step."""

        def accesses() -> Sequence[Access]:
            return () if self._replayed is None else part(self._replayed)

        if self._traced:
            self._stream.touch(accesses)

    def _replay(self, captured: CapturedStep, *, gated: bool) -> None:
        self.replay(captured, gated=gated)
        for mode in captured.modes(gated=gated):
            self.draw(captured, mode, gated=gated)

    def _draw(self, inputs: StepInputs, after: _Pass, mode: SamplingMode) -> None:
        """Sample from a pass's output, and deliver to the mailbox entry at the offset in the inputs."""
        output = after.output
        if output is None or not len(output.logits):  # the batch was empty, and the torch backend computes no padding
            return
        with torch.inference_mode():
            drawn, accepted = self._sampler.sample(inputs, output, mode)
            times = None if output.proposed is None else output.proposed.times
            self._mailbox.write(inputs.mailbox_offset, drawn, self._stream, counts=accepted, times=times)

    def _graph_of(self, work: Callable[[], None], *, beside: Graph | None) -> Graph:
        """Capture the work."""

        def submit() -> None:
            self._stream.submit(work, label="capture")

        graph = self._stream.capture(submit, beside=beside)
        self._graphs.append(graph)
        return graph

    def _finish(self, work: Callable[[], None]) -> None:
        fence = self._stream.submit(work, label="capture")
        self._device.wait_host(fence, reason="step")
        if fence.failure is not None:
            raise fence.failure


def _clear_frames(error: BaseException) -> None:
    """Free the memory that the frames of an error and of its cause hold. Not part of `capture`, because that would
    clear the local variables of `capture`, too.
    """
    for raised in (error, error.__cause__):
        if raised is not None:
            traceback.clear_frames(raised.__traceback__)
