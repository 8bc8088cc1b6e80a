"""A captured pass waits for each group of layers just before it reads them, and says so to the tracer (H5)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch

from sidestream.runner.forward import ForwardOutput
from sidestream.runner.graphs import Graphs
from sidestream.runner.state import Uploads
from sidestream.runner.step_inputs import GraphKey
from sidestream_kv.types import Access, LayerGates
from sidestream_order.checker import Checker, simulated
from sidestream_order.sim import SimStream

LAYERS, GROUP, SIZE = 6, 2, 8


class Pass:
    """A forward pass of a model that only asks for its layers, and reads each of them."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.seen: list[int] = []

    def step(self, inputs: Any, before_layer: Callable[[int], None], **_: Any) -> ForwardOutput:
        self.seen.clear()
        for layer in range(LAYERS):
            before_layer(layer)
            self.seen.append(int(self.memory[layer * SIZE]))
        return ForwardOutput(torch.zeros(0), torch.zeros(0))


class Reads:
    """A step that reads every layer of one block."""

    def layers(self, layers: range) -> Sequence[Access]:
        return [Access("kv", layers.start * SIZE, layers.stop * SIZE, False)]

    def states(self) -> Sequence[Access]:
        return ()


class State:
    """The parts of a decode state that a capture needs."""

    block_tables = torch.zeros(2, 1)
    padding_slot = 1


def replayed(policy: str, seed: int, *, without: range = range(0)) -> tuple[list[int], Checker]:
    """Replay a gated graph while its load runs, group by group; `without`: layers whose gate is not recorded."""
    device, checker = simulated(policy, seed)
    kv = device.allocate("kv", LAYERS * SIZE)
    compute, load = device.stream("compute"), device.stream("load")
    forward = Pass(kv.data)
    graphs = Graphs(
        device=device,
        stream=compute,
        gates=device.stream("gates"),
        forward=cast(Any, forward),
        sampler=cast(Any, None),
        state=cast(Any, State()),
        mailbox=cast(Any, None),
        uploads=Uploads(),
        num_layers=LAYERS,
        gate_layers=GROUP,
        table_width=1,
    )
    wait = SimStream.wait_external
    key = GraphKey(1)
    compute.wait_external = lambda event: (  # type: ignore[method-assign]
        None if event.name in {f"gate {layer}" for layer in without} else wait(compute, event)
    )
    graphs.capture([key])
    (captured,) = graphs._captured.values()
    fences = []
    for first in range(0, LAYERS, GROUP):
        span = slice(first * SIZE, (first + GROUP) * SIZE)
        write = Access("kv", span.start, span.stop, True)
        fences.append(load.submit(lambda span=span: kv.data[span].fill_(1), lambda write=write: [write]))  # type: ignore[misc]
    graphs.close_gates(LayerGates(tuple((fences[layer // GROUP],) for layer in range(LAYERS))))
    compute.submit(lambda: cast(None, graphs.replay(captured, gated=True, accesses=Reads())), label="step")
    device.close()
    return forward.seen, checker


def test_each_layer_is_read_and_declared_after_the_wait_of_its_group() -> None:
    for seed in range(20):
        for policy in ("random", "starve:load", "late"):
            seen, checker = replayed(policy, seed)
            assert seen == [1] * LAYERS
            assert checker.findings == []


@pytest.mark.parametrize("group", range(LAYERS // GROUP))
def test_a_missing_layer_wait_gives_wrong_bytes_and_a_checker_finding_h5(group: int) -> None:
    missing = range(group * GROUP, (group + 1) * GROUP)
    seen, checker = replayed("starve:load", 0, without=missing)
    assert [layer for layer in range(LAYERS) if seen[layer] != 1] == [*missing]
    assert {(found.kind, found.start // SIZE // GROUP) for found in checker.findings} <= {
        ("race", group),
        ("unwritten", group),
    }
    assert checker.findings
