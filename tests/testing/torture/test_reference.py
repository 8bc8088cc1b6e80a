"""What outcomes are compared with: it comes from an engine that does one thing after another, and from the
model alone.
"""

from __future__ import annotations

import dataclasses

from sidestream.testing.torture import Asked, Event, Workload, draw_workload, reference_of
from sidestream.testing.toy import ToyModel

PROMPT = tuple(range(1, 12))
PLAIN = Workload(
    0, (Asked(at=0, prompt=PROMPT, max_tokens=6, logprobs=0), Asked(at=9, prompt=(*PROMPT, 12), max_tokens=4, n=2))
)


def test_greedy_tokens_are_those_of_the_model_alone() -> None:
    (samples,) = reference_of(PLAIN).samples
    assert samples[0, 0].tokens == ToyModel().expected(PROMPT, 6)
    assert samples[0, 0].reason == "length"
    assert len(samples[0, 0].tokens) == len(samples[0, 0].logprobs) == 6


def test_it_knows_every_sample_and_every_version_of_the_weights() -> None:
    before, after = reference_of(dataclasses.replace(PLAIN, events=(Event(3, "weights"),))).samples
    assert before.keys() == after.keys() == {(0, 0), (1, 0), (1, 1)}
    assert before[0, 0].tokens != after[0, 0].tokens
    assert (before,) == reference_of(PLAIN).samples


def test_it_holds_the_bytes_of_each_complete_block_and_shares_those_of_a_shared_prefix() -> None:
    blocks = reference_of(PLAIN).blocks
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
            states=workload.states,
        )
        assert reference_of(workload) == reference_of(calm)
