"""Proposers that keep up with a step on a side stream: only if the step's tokens are known, and after its waits."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from proof.toy import ToyDraftHead, ToyModel, ToyProposer
from sidestream.attention.paged import TorchAttention
from sidestream.engine.warm_up import GREEDY
from sidestream.runner.executor import Executor
from sidestream.runner.step_inputs import GraphKey
from sidestream.speculate import StepTokens
from sidestream.types import BatchPlan, RowPlan, RowStart
from sidestream_kv.device.base import Stream
from sidestream_kv.types import LayerGates
from sidestream_order.sim import SimDevice, make_policy

PROMPT = (5, 6, 7)


class Rig:
    """An executor on a device without haste, which writes down what the model and what keeps up with it do."""

    def __init__(self) -> None:
        self.device = SimDevice(make_policy("starve:loads", random.Random(1)))
        self.model = ToyModel(leaves_hidden=True)
        self.proposer = ToyProposer(ToyDraftHead(self.model), model=self.model)
        self.happened: list[str] = []
        self.shown: list[list[float]] = []
        self.loads: Stream = self.device.stream("loads")
        forward, follow = self.model.forward, self.proposer.follow

        def computed(*given: Any, **more: Any) -> torch.Tensor:
            logits = forward(*given, **more)
            self.happened.append("model")
            return logits

        def followed(shown: StepTokens) -> None:
            assert shown.before is not None
            self.happened.append("keeps up")
            self.shown.append(shown.before[:, 0].tolist())
            follow(shown)

        self.model.forward = computed  # type: ignore[method-assign]
        self.proposer.follow = followed  # type: ignore[method-assign]
        self.executor = Executor(
            device=self.device,
            model=self.model,
            memory=self.device.allocate("kv", 9 * self.model.layout.block_bytes),
            num_slots=2,
            attention=TorchAttention(),
            proposer=self.proposer,
            max_drafts=3,
            max_len=64,
        )
        self.executor.capture([GraphKey(2, 0), GraphKey(2, 0, 3), GraphKey(2, 16)], gate_layers=1)

    def launch(self, *rows: RowPlan, behind_a_load: bool = False) -> None:
        self.happened.clear()
        self.shown.clear()
        gates = LayerGates()
        if behind_a_load:
            load = self.loads.submit(lambda: self.happened.append("loaded"))
            layers = self.model.layout.num_layers
            gates = LayerGates(tuple((load,) if layer >= layers - 2 else () for layer in range(layers)))
        step = self.executor.launch(BatchPlan(rows, any(row.drafts for row in rows)), after=(), gates=gates)
        self.device.wait_host(step.fence, reason="step")
        assert step.fence.failure is None, step.fence.failure
        step.drop()

    def expected(self, tokens: Sequence[int]) -> float:
        return float(self.model.hidden_after(tokens))


def row(number: int, tokens: Sequence[int], *, begins: bool = False, drafts: int = 0) -> RowPlan:
    return RowPlan(
        request_id=number,
        slot=number,
        epoch=0,
        min_start=0 if begins else len(tokens) - 1,
        stop=len(tokens) + drafts,
        tokens=tuple(tokens) if begins else None,
        block_table=(1 + 3 * number, 2 + 3 * number, 3 + 3 * number),
        samples=True,
        min_output_index=len(tokens) - len(PROMPT),
        begin=RowStart(sampling=GREEDY, prompt=tuple(tokens), outputs=()) if begins else None,
        drafts=drafts,
    )


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    rig.launch(row(0, PROMPT, begins=True), row(1, PROMPT, begins=True))
    assert rig.happened == ["model", "keeps up"]  # what is behind a prompt's first token the model has to say
    yield rig
    rig.device.close()


def at_once(work: Callable[[], None]) -> None:
    work()


@pytest.mark.parametrize("early", [False, True])
def test_plain_decode_rows_are_kept_up_with_on_a_side_stream(
    rig: Rig, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if early:
        monkeypatch.setattr(rig.executor._stream, "on_side_stream", at_once)
    tokens = [*PROMPT, *rig.model.expected(PROMPT, 2)]
    for known in (4, 5):
        rig.launch(row(0, tokens[:known]), row(1, tokens[:known]))
        assert rig.happened == (["keeps up", "model"] if early else ["model", "keeps up"])
        assert rig.shown == [[rig.expected(tokens[: known - 1])] * 2]


def test_rows_with_drafts_or_loads_are_kept_up_with_after_the_layers(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    through = rig.model._run_layers

    def layers(*given: Any) -> Any:
        mixed = through(*given)
        rig.happened.append("layers")
        return mixed

    monkeypatch.setattr(rig.executor._stream, "on_side_stream", at_once)
    monkeypatch.setattr(rig.model, "_run_layers", layers)
    tokens = [*PROMPT, *rig.model.expected(PROMPT, 4)]
    rig.launch(row(0, tokens[:4], drafts=2))
    assert rig.happened == ["layers", "keeps up", "model"]
    rig.launch(row(1, tokens[:4]), behind_a_load=True)
    assert rig.happened == ["layers", "loaded", "keeps up", "model"]


def test_a_step_that_does_not_join_its_side_stream_fails(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig.executor._stream, "join", lambda: None)
    with pytest.raises(AssertionError, match="ends with work on the side stream: join it first"):
        rig.launch(row(0, [*PROMPT, 8]))
