"""Steps are sampled by the simplest graph that supports all rows, and by the host only while an option needs it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from engine_rig import Rig, prompts, serving

from proof.toy import ToyModel
from proof.toy_grammar import ToyGrammars
from sidestream.config import StructuredOutputs
from sidestream.runner.sampler import SamplingMode
from sidestream.runner.step_inputs import GraphKey

SHAPES = [GraphKey(1), GraphKey(4), GraphKey(0, 16), GraphKey(4, 24)]
OUTPUTS = 6
GRAMMAR = {"structured_outputs": StructuredOutputs(regex="2 1000"), "ignore_eos": True}


class Watched:
    """A rig whose captured passes say by which graph they were drawn; BY_HOST: by none."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.drawn: list[SamplingMode] = []
        executor = rig.engine.parts.executor
        rig.engine.call(lambda: executor.capture(SHAPES))
        graphs: Any = executor._graphs
        replay, draw = graphs.replay, graphs.draw

        def replayed(captured: Any, **how: Any) -> Any:
            self.drawn.append(SamplingMode.HOST)
            return replay(captured, **how)

        def drawn(captured: Any, draws: SamplingMode, **how: Any) -> None:
            self.drawn[-1] = draws
            draw(captured, draws, **how)

        graphs.replay, graphs.draw = replayed, drawn


def engine() -> Any:
    model = ToyModel()
    return serving(model=model, grammars=ToyGrammars(model.vocab_size))


@pytest.fixture
def watched() -> Iterator[Watched]:
    with engine() as rig:
        yield Watched(rig)


def alone(prompt: list[int], **params: Any) -> list[int]:
    """What an engine without graphs answers."""
    with engine() as rig:
        return rig.submit(prompt, OUTPUTS, **params).wait().token_ids()


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"temperature": 0.0}, SamplingMode.ARGMAX),
        ({"temperature": 20.0, "top_p": 0.9, "seed": 3}, SamplingMode.RANDOM),
        ({"temperature": 20.0, "top_k": 40, "min_p": 0.001, "seed": 4}, SamplingMode.RANDOM),
        ({"temperature": 20.0, "repetition_penalty": 1.5, "frequency_penalty": 2.0, "seed": 5}, SamplingMode.PENALISED),
        ({"temperature": 0.0, "presence_penalty": 1.0}, SamplingMode.PENALISED),
        ({"temperature": 0.0, **GRAMMAR}, SamplingMode.ARGMAX),
        ({"temperature": 20.0, "seed": 6, "presence_penalty": 1.0, **GRAMMAR}, SamplingMode.PENALISED),
        ({"temperature": 20.0, "seed": 6, "logit_bias": {5: 50.0}}, SamplingMode.HOST),
        ({"temperature": 20.0, "seed": 7, "logprobs": 1}, SamplingMode.HOST),
    ],
)
def test_the_simplest_sufficient_sampling_graph_gives_the_same_tokens(
    params: dict[str, Any], expected: SamplingMode, watched: Watched
) -> None:
    (prompt,) = prompts(3, 1, longest=3)  # one chunk: one that draws nothing is content with whatever there is
    assert watched.rig.submit(prompt, OUTPUTS, **params).wait().token_ids() == alone(prompt, **params)
    assert set(watched.drawn) == {expected}


def test_a_step_samples_in_the_mode_of_its_most_demanding_row(watched: Watched) -> None:
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 20.0, "top_p": 0.8, "seed": 8},
        {"temperature": 20.0, "presence_penalty": 2.0, "seed": 9},
    ]
    asked = list(zip(prompts(11, 3, longest=5), ways, strict=True))
    hold = watched.rig.hold("compute")
    replies = [watched.rig.submit(prompt, OUTPUTS, **params) for prompt, params in asked]
    hold.release()
    assert [reply.wait().token_ids() for reply in replies] == [alone(prompt, **params) for prompt, params in asked]
    assert SamplingMode.PENALISED in watched.drawn and SamplingMode.HOST not in watched.drawn


def test_a_graph_samples_again_once_min_tokens_is_reached(watched: Watched) -> None:
    (prompt,) = prompts(5, 1, longest=3)
    params = {"temperature": 20.0, "seed": 1, "min_tokens": 3, "stop_token_ids": (0,)}
    assert watched.rig.submit(prompt, OUTPUTS, **params).wait().token_ids() == alone(prompt, **params)
    first = watched.drawn.index(SamplingMode.RANDOM)
    assert set(watched.drawn[:first]) == {SamplingMode.HOST} and set(watched.drawn[first:]) == {SamplingMode.RANDOM}
    assert len(watched.drawn) - first == OUTPUTS - 3
