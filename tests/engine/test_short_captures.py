"""Out of memory while forward passes are captured: earlier graphs are used, larger batches run without a graph; on
several ranks it is an error. Graphs are deleted with the engine.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_rig import Rig, prompts, serving

from sidestream.errors import OutOfDeviceMemory
from sidestream.runner.step_inputs import GraphKey, StepInputs
from sidestream_kv.device.base import Graph

ACTIVATIONS: list[weakref.ref[torch.Tensor]] = []
"""What a pass held when memory ended."""

SHAPES = [GraphKey(1), GraphKey(0, 16), GraphKey(4), GraphKey(4, 24)]


def runs_out_in_a_run(rig: Rig, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the passes and draws for nothing, four of each shape before it is captured, and one behind."""
    stream = rig.engine.parts.executor._stream
    submit, numbers = stream.submit, itertools.count()

    def out_of_memory() -> None:
        raise OutOfDeviceMemory("out of device memory: injected")

    def short(work: Callable[[], None], *given: Any, label: str = "") -> Any:
        counts = label == "capture" and stream._capture is None  # type: ignore[attr-defined]
        return submit(out_of_memory if counts and next(numbers) == 5 * at + 1 else work, *given, label=label)

    monkeypatch.setattr(stream, "submit", short)


def runs_out_in_a_graph(rig: Rig, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the four of each shape; in its first, as what a host captured holds itself."""
    stream = rig.engine.parts.executor._stream
    capture, numbers = stream.capture, itertools.count()

    def short(build: Callable[[], None], *, beside: Graph | None = None) -> Graph:
        def failing() -> None:
            build()
            if next(numbers) == 4 * at:
                states = torch.zeros(1)
                ACTIVATIONS.append(weakref.ref(states))
                error = torch.OutOfMemoryError("injected")
                raise error  # which this frame knows: it is collected late

        try:
            return capture(failing, beside=beside)
        except torch.OutOfMemoryError as error:
            raise OutOfDeviceMemory("out of device memory: injected") from error

    monkeypatch.setattr(stream, "capture", short)


@pytest.mark.parametrize("kept", range(len(SHAPES)))
@pytest.mark.parametrize("run_out", [runs_out_in_a_run, runs_out_in_a_graph])
def test_out_of_memory_at_capture_drops_shapes_and_changes_no_token(
    run_out: Callable[[Rig, int, pytest.MonkeyPatch], None],
    kept: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    buffers: list[weakref.ref[torch.Tensor]] = []
    allocate = StepInputs.allocate

    def allocated(*given: Any, **how: Any) -> StepInputs:
        inputs = allocate(*given, **how)
        buffers.append(weakref.ref(inputs.buffer))
        return inputs

    monkeypatch.setattr(StepInputs, "allocate", allocated)
    with serving() as rig:
        executor = rig.engine.parts.executor
        run_out(rig, kept, monkeypatch)
        gc.disable()
        try:
            rig.engine.call(lambda: executor.capture(SHAPES))
            assert [buffer() is not None for buffer in buffers] == [True] * kept + [
                False
            ]  # at once: others need the memory now
            assert all(activation() is None for activation in ACTIVATIONS)
        finally:
            gc.enable()
        assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
            f"the GPU's memory holds {kept} of 4 captured shapes (out of device memory: injected): larger batches run "
            "without a graph, slower"
        ]
        graphs, replayed = executor._graphs, set[GraphKey]()
        assert graphs is not None
        assert graphs.keys == SHAPES[:kept]
        replay = graphs.replay

        def seen(captured: Any, **how: Any) -> Any:
            replayed.add(captured.key)
            return replay(captured, **how)

        graphs.replay = seen
        alone, *others = prompts(41, 4, longest=5)
        rig.ask(alone, 6)
        hold = rig.hold("compute")
        replies = [rig.submit(prompt, 6) for prompt in others]
        hold.release()
        for reply, prompt in zip(replies, others, strict=True):
            rig.expect(reply, prompt, 6)
        assert replayed == set(SHAPES[:kept])


@pytest.mark.parametrize("run_out", [runs_out_in_a_run, runs_out_in_a_graph])
def test_out_of_memory_at_capture_on_one_of_several_ranks_is_an_error(
    run_out: Callable[[Rig, int, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fewer graphs, the rank would call collectives of other sizes than the other ranks."""
    with serving() as rig:
        executor = rig.engine.parts.executor
        graphs = captured_graphs(executor._stream, monkeypatch)
        run_out(rig, 2, monkeypatch)
        with pytest.raises(OutOfDeviceMemory, match="injected"):
            rig.engine.call(lambda: executor.capture(SHAPES, shared=True))
        assert executor._graphs is None
        assert len(graphs) >= 8 and all(graph.deleted for graph in graphs)


def test_graphs_are_deleted_with_the_engine_despite_other_references(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as rig:
        executor = rig.engine.parts.executor
        graphs = captured_graphs(executor._stream, monkeypatch)
        rig.engine.call(lambda: executor.capture(SHAPES))
        first = list(graphs)
        rig.engine.call(lambda: executor.capture(SHAPES[:2]))
        assert first and all(graph.deleted for graph in first)
        rest = graphs[len(first) :]
        assert rest and not any(graph.deleted for graph in rest)
    assert all(graph.deleted for graph in graphs)


def captured_graphs(stream: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The list that all further graphs of the stream are added to."""
    graphs: list[Any] = []
    capture = stream.capture

    def kept(build: Callable[[], None], *, beside: Graph | None = None) -> Graph:
        graph = capture(build, beside=beside)
        graphs.append(graph)
        return graph

    monkeypatch.setattr(stream, "capture", kept)
    return graphs
