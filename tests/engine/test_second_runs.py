"""The self-check of steps: both runs of a correct step are equal; a difference is counted and logged; without the
option, no step runs twice.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_rig import Rig, passed, prompts, serving

from proof.mutations import applied, find
from proof.toy import StatefulToyModel, ToyDraftHead, ToyModel, ToyProposer
from sidestream.attention.paged import PagedBatch
from sidestream.config import EngineConfig, SpeculativeConfig
from sidestream.engine.warm_up import WarmUpSteps
from sidestream.errors import ConfigError
from sidestream.runner.second_run import SecondRun, _digest
from sidestream.runner.step_inputs import GraphKey

SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 20.0, "top_p": 0.9, "seed": 3},
    {"temperature": 20.0, "repetition_penalty": 1.5, "frequency_penalty": 2.0, "seed": 4},
    {"temperature": 20.0, "seed": 5, "logit_bias": {5: 50.0}, "logprobs": 2},
]


def drafting() -> dict[str, Any]:
    model = ToyModel(leaves_hidden=True)
    head = ToyDraftHead(model, width=3)
    return {
        "model": model,
        "proposer": ToyProposer(head, model=model),
        "speculative": SpeculativeConfig(max_drafts=3, adaptive=False),
    }


def captured(rig: Rig) -> None:
    executor = rig.engine.parts.executor
    drafts = rig.engine.parts.max_drafts
    keys = [GraphKey(1, 0, drafts), GraphKey(4, 0, drafts), GraphKey(4, 24, drafts)]
    rig.engine.call(lambda: executor.capture(keys))


WAYS: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[Rig], None]]] = {
    "async": (dict, lambda rig: None),
    "sync": (lambda: {"asynchronous": False}, lambda rig: None),
    "preempted": (lambda: {"blocks": 18}, lambda rig: None),
    "drafts": (drafting, lambda rig: None),
    "captured": (dict, captured),
    "captured drafts": (drafting, captured),
}


def answers(rig: Rig, *, tokens: int) -> list[tuple[list[int], list[Any]]]:
    """Prompts of one to three chunks, sampled in every way; then all again, partly from blocks in the cache."""
    asked = prompts(7, 5, longest=32, shared=6)
    found = []
    for _ in range(2):
        replies = [rig.submit(prompt, tokens, **SAMPLING[at % len(SAMPLING)]) for at, prompt in enumerate(asked)]
        found += [(reply.wait().token_ids(), reply.logprobs()) for reply in replies]
        rig.settle()
        rig.forget_device()
    return found


@pytest.mark.parametrize("way", WAYS)
def test_second_runs_equal_first_runs_and_change_no_token(way: str) -> None:
    options, prepare = WAYS[way]
    tokens = 30 if way == "preempted" else 6
    with serving(**{"slots": 64, "self_check": 1.0, **options()}) as rig:
        prepare(rig)
        checked = answers(rig, tokens=tokens)
        rig.turn()
        assert rig.counted("self_check_steps_total") == rig.counted("steps_total") > 0
        assert rig.counted("self_check_disagreements_total") == 0
        assert rig.counted("self_check_blocks_total", "match") > 0
        assert rig.counted("self_check_blocks_total", "mismatch") == 0
        assert rig.counted("self_check_tokens_total") >= 2 * 5 * 5
        assert rig.engine.parts.metrics.value("self_check_seconds_total", "steps") > 0
        if way == "preempted":
            assert rig.engine.parts.scheduler.num_preemptions > 0
    with serving(**{"slots": 64, **options()}) as rig:
        prepare(rig)
        assert answers(rig, tokens=tokens) == checked


def test_without_the_self_check_no_step_runs_twice_or_delivers_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SecondRun, "compare", lambda *_: pytest.fail("a step ran twice"))
    with serving(slots=64) as rig:
        forwards = counted_calls(rig.model, "forward")
        delivered: list[int] = []
        stream = rig.engine.parts.executor._stream
        deliver = stream.deliver
        stream.deliver = lambda values, memory, start, **more: (  # type: ignore[method-assign]
            delivered.append(more["further"]),
            deliver(values, memory, start, **more),
        )
        rig.ask(prompts(3, 1)[0], 6)
        rig.turn()
        fields = rig.engine.parts.executor._mailbox._fields
        assert len(forwards) == rig.counted("steps_total")
        assert set(delivered) == {fields["tokens"].start, fields["finite"].start}
        assert rig.counted("self_check_steps_total") == rig.counted("self_check_tokens_total") == 0


def test_the_configured_share_of_steps_runs_twice() -> None:
    with serving(self_check=0.25) as rig:
        for prompt in prompts(5, 8):
            rig.ask(prompt, 20)
        rig.turn()
        steps, twice = rig.counted("steps_total"), rig.counted("self_check_steps_total")
        assert 0.1 * steps < twice < 0.5 * steps


def test_the_warm_up_runs_steps_twice_if_steps_of_requests_may() -> None:
    assert all(batch.self_check for batch in WarmUpSteps(2, 4, 8, max_drafts=2, self_check=True).on((0, 1)))
    assert not any(batch.self_check for batch in WarmUpSteps(2, 4, 8, max_drafts=2).on((0, 1)))


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_durations_of_steps_that_ran_twice_are_not_used_for_planning(share: float) -> None:
    sizes = {"blocks": 48, "slots": 48, "chunk_tokens": 80, "token_budget": 100}
    with serving(self_check=share, **sizes) as rig:
        assert rig.engine.parts.costs is not None
        prefills = counted_calls(rig.engine.parts.costs, "saw_prefill")
        decodes = counted_calls(rig.engine.parts.scheduler, "measured")
        rig.ask([5] * 81, 8)
        rig.turn()
        assert bool(prefills) == bool(decodes) == (share == 0.0)
        assert (rig.engine.loop.times.last_s > 0) == (share == 0.0)


def counted_calls(model: Any, name: str) -> list[int]:
    calls: list[int] = []
    call = getattr(model, name)

    def counting(*given: Any, **more: Any) -> Any:
        calls.append(len(calls))
        return call(*given, **more)

    setattr(model, name, counting)
    return calls


class Erring(ToyModel):
    """A model that makes one error in the first run of its step number `step`: in the logits, or in the KV that it
    writes for the last token.
    """

    def __init__(self, step: int, *, in_kv: bool) -> None:
        super().__init__()
        self._first_run, self._in_kv, self._runs = 2 * step, in_kv, 0

    def forward(self, tokens: Any, positions: Any, batch: Any, logit_rows: Any, **more: Any) -> torch.Tensor:
        logits = super().forward(tokens, positions, batch, logit_rows, **more)
        if self._runs == self._first_run and self._in_kv:
            assert isinstance(batch, PagedBatch)
            slot, size = int(batch.slot_mapping[-1]), self.layout.block_tokens
            batch.kv[slot // size, 1, 0, slot % size] += 1
        elif self._runs == self._first_run:
            logits[0, 3] += 0.25
        self._runs += 1
        return logits


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            Erring(1, in_kv=False),
            r"two runs of step 2 \(1 rows, no loads\) differ: request 0 at tokens \[10, 11\): logits",
        ),
        (Erring(0, in_kv=True), r"two runs of step 1 \(1 rows, no loads\) differ: request 0 at tokens \[0, 10\): KV"),
    ],
)
def test_a_difference_is_counted_and_logged_and_the_second_run_is_served(
    model: ToyModel, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = list(range(1, 11))
    with serving(model=model, self_check=1.0, separate_tail_chunk=False) as rig, caplog.at_level(logging.ERROR):
        assert rig.submit(prompt, 4).wait().token_ids() == ToyModel().expected(prompt, 4)
        rig.turn()
        assert rig.counted("self_check_disagreements_total") == 1
    (record,) = [record for record in caplog.records if "self-check" in record.message]
    assert re.search(message, record.getMessage()), record.getMessage()


def test_an_error_in_a_chunk_without_sampling_is_found_in_its_kv(caplog: pytest.LogCaptureFixture) -> None:
    prompt = prompts(9, 1, longest=1)[0] * 40
    with serving(model=Erring(0, in_kv=True), self_check=1.0) as rig, caplog.at_level(logging.ERROR):
        rig.submit(prompt, 2).wait()
        rig.turn()
        assert rig.counted("self_check_disagreements_total") == 1
    assert "at tokens [0, 16): KV" in caplog.text


def test_log_lines_about_differences_are_limited_but_all_are_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sums: list[torch.Tensor] = []

    def never_equal(values: torch.Tensor) -> torch.Tensor:
        sums.append(_digest(values) + len(sums))
        return sums[-1]

    monkeypatch.setattr("sidestream.runner.second_run._digest", never_equal)
    monkeypatch.setattr("sidestream.engine.stats._WARNING_PERIOD_S", 1e9)
    with serving(self_check=1.0) as rig, caplog.at_level(logging.ERROR):
        rig.submit(list(range(1, 9)), 12).wait()
        rig.turn()
        assert rig.counted("self_check_disagreements_total") == rig.counted("steps_total") >= 12
    assert sum("self-check: two runs" in record.message for record in caplog.records) == 1


def test_a_step_that_reads_blocks_before_their_load_is_reported() -> None:
    """The load ends between the two runs of the step that did not wait for it."""
    prompt = prompts(11, 1, longest=1)[0] * 21
    with applied(find("layer-waits-for-its-load")), serving(slots=64, self_check=1.0) as rig:
        rig.ask(prompt, 2)
        rig.settle()
        rig.forget_device()
        assert rig.counted("self_check_disagreements_total") == 0
        held = rig.hold("load")
        second_run: Any = rig.engine.parts.executor._work._second_run
        declare = second_run._declare

        def declare_after_the_load(batch: Any) -> None:
            held.release()
            for name in [name for name in rig.device._streams if name.startswith("load")]:
                passed(rig, name)
            declare(batch)

        second_run._declare = declare_after_the_load
        reply = rig.submit(prompt, 2)
        rig.expect(reply, prompt, 2)
        assert reply.cached.host > 0
        rig.turn()
        assert rig.counted("self_check_disagreements_total") == 1


def test_blocks_that_changed_in_host_memory_are_computed_again() -> None:
    prompt = prompts(13, 1, longest=1)[0] * 21
    with serving(slots=64, self_check=1.0) as rig:
        rig.ask(prompt, 2)
        rig.settle()
        rig.forget_device()
        assert rig.engine.parts.tiers is not None
        rig.engine.parts.tiers.host.memory.data.add_(1)
        assert rig.ask(prompt, 2).cached.host == 0
        rig.turn()
        assert rig.counted("self_check_blocks_total", "mismatch") > 0
        assert rig.counted("load_fallbacks_total", "load_failed") == 1


def test_any_changed_bit_of_a_row_changes_its_digest() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        values = torch.randn(3, 7).to(dtype)
        changed = values.clone()
        changed[1].view(torch.uint8)[3] ^= 1
        assert (_digest(values) != _digest(changed)).tolist() == [False, True, False]
        assert torch.equal(_digest(values), _digest(values.clone()))
    nan = torch.full((1, 4), torch.nan)
    assert torch.equal(_digest(nan), _digest(nan))  # bits are compared, not numbers
    assert _digest(torch.zeros(0, 4)).shape == (0,)


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan"), True, "1"])
def test_a_share_outside_of_0_to_1_is_refused(share: Any) -> None:
    with pytest.raises(ConfigError, match=r"self_check is .*: give the share of steps to check, from 0 \(off\) to 1"):
        EngineConfig(self_check=share)


def test_a_model_with_recurrent_states_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"self_check is 0.5, but the model has recurrent states: .* leave self_check"
    ):
        Rig(model=StatefulToyModel(), self_check=0.5)
