"""What outcomes are compared with: it comes from the model alone, and for requests with a temperature from an engine
that does one thing after another.
"""

from __future__ import annotations

import dataclasses

import pytest

from proof.torture import Asked, Event, Workload, draw_workload, reference_of
from proof.torture.contents import contents_of
from proof.torture.oracle import greedy_answer, run_alone, toy_of
from proof.torture.script import ScriptedModel
from proof.toy import ToyModel

PROMPT = tuple(range(1, 12))
PLAIN = Workload(
    0, (Asked(at=0, prompt=PROMPT, max_tokens=6, logprobs=0), Asked(at=9, prompt=(*PROMPT, 12), max_tokens=4, n=2))
)


def test_greedy_tokens_equal_those_of_the_model_alone() -> None:
    (samples,) = reference_of(PLAIN).samples
    assert samples[0, 0].tokens == ToyModel().expected(PROMPT, 6)
    assert samples[0, 0].reason == "length"
    assert len(samples[0, 0].tokens) == len(samples[0, 0].logprobs) == 6


@pytest.mark.parametrize("weights", [0, 1])
def test_a_synchronous_engine_gives_the_closed_form_answers(weights: int) -> None:
    """With penalties, biases, `min_tokens`, log-probabilities, ends of sequence and recurrent states."""
    compared = set[str]()
    for seed in range(weights, 24, 2):
        workload = draw_workload(seed)
        model = ScriptedModel(toy_of(workload))
        model.weights = weights
        numbers = [number for number, asked in enumerate(workload.requests) if not asked.hot]
        for (number, _), answer in run_alone(workload, model, numbers).items():
            asked = workload.requests[number]
            right = greedy_answer(model, asked)
            assert (answer.tokens, answer.text, answer.reason) == (right.tokens, right.text, right.reason), (
                seed,
                asked,
            )
            assert answer.logprobs == pytest.approx(right.logprobs, abs=1e-4)
            compared |= {
                *({"penalties"} if asked.penalties else ()),
                *({"bias"} if asked.bias else ()),
                *({"min_tokens"} if asked.min_tokens else ()),
                *({"logprobs"} if asked.logprobs is not None else ()),
                *({"states"} if workload.states else ()),
                str(answer.reason),
            }
    assert {"penalties", "bias", "min_tokens", "states", "length"} <= compared


def test_the_reference_covers_every_sample_and_version_of_the_weights() -> None:
    before, after = reference_of(dataclasses.replace(PLAIN, events=(Event(3, "weights"),))).samples
    assert before.keys() == after.keys() == {(0, 0), (1, 0), (1, 1)}
    assert before[0, 0].tokens != after[0, 0].tokens
    assert (before,) == reference_of(PLAIN).samples


def test_the_reference_holds_the_bytes_of_complete_and_shared_blocks() -> None:
    blocks = contents_of(PLAIN, reference_of(PLAIN)).blocks
    size = ToyModel().layout.block_bytes
    assert {len(block) for block in blocks.values()} == {size}
    # 11 + 6 tokens: 16 went through the model, 4 blocks; 12 + 4: 15 did, 3 blocks, the first two of them are the same;
    # both samples of the second request are greedy, hence the same.
    assert len(blocks) == 4 + 1


def test_pressure_aborts_faults_and_events_do_not_change_it() -> None:
    for seed in range(6):
        workload = draw_workload(seed)
        calm = Workload(
            seed=0,
            requests=tuple(dataclasses.replace(asked, at=0, abort_at=None, priority=0) for asked in workload.requests),
            events=tuple(event for event in workload.events if event.kind == "weights"),
            blocks=200,
            chunk_tokens=workload.chunk_tokens,
            eos_every=workload.eos_every,
            vocab=workload.vocab,
            states=workload.states,
            window=workload.window,
        )
        assert reference_of(workload) == reference_of(calm)
