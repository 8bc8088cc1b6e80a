"""Speculation: the same tokens as without drafts in fewer steps, and the accept lengths of the reference.

Accept lengths are compared step by step: a stale read of device state would leave the text right (H19).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any

import pytest
from engine_rig import Reply, Rig, prompts, serving

from proof.toy import RecurrentToyModel, ToyDraftHead, ToyModel, ToyProposer
from sidestream.config import EngineConfig, SamplingParams, SpeculativeConfig
from sidestream.engine import stats
from sidestream.errors import ConfigError, RequestRejected
from sidestream.runner.executor import LaunchedStep
from sidestream.runner.mailbox import Delivered
from sidestream.schedule.spec_policy import Chosen, SpecPolicy

ALWAYS = SpeculativeConfig(max_drafts=3, adaptive=False)


def speculating(model: ToyModel | None = None, **options: Any) -> Any:
    model = model or ToyModel()
    head = ToyDraftHead(model, width=3)
    return serving(**{"model": model, "proposer": ToyProposer(head), "speculative": ALWAYS, **options})


def accept_lengths(rig: Rig) -> dict[int, list[int]]:
    """What the engine saw of each request's drafts from now on: tokens that each of its drafting steps went on by, less
    the last.
    """
    seen: dict[int, list[int]] = defaultdict(list)
    count = rig.engine.loop.spec_stats.count

    def count_and_keep(step: LaunchedStep, delivered: Delivered) -> None:
        sampling = [row for row in step.batch.rows if row.samples]
        for row, result in zip(sampling, delivered.rows, strict=True):
            if row.drafts == ALWAYS.max_drafts:
                seen[row.request_id].append(len(result.token_ids) - 1)
        count(step, delivered)

    rig.engine.loop.spec_stats.count = count_and_keep  # type: ignore[method-assign]
    return seen


def expected_lengths(rig: Rig, prompt: list[int], rounds: int) -> list[int]:
    """Of `rounds` steps behind the token that prefill draws."""
    head = ToyDraftHead(rig.model, width=3)
    first = rig.model.expected(prompt, 1)
    return list(head.expected([*prompt, *first], rounds).accept_lengths)


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("model", [ToyModel, RecurrentToyModel])
def test_tokens_and_accept_lengths_equal_the_references_step_by_step(model: type[ToyModel], asynchronous: bool) -> None:
    asked = prompts(5, 12, shared=12)
    with speculating(model(), asynchronous=asynchronous, blocks=96) as rig:
        seen = accept_lengths(rig)
        replies = [rig.submit(prompt, 40) for prompt in asked]
        for reply, prompt in zip(replies, asked, strict=True):
            rig.expect(reply, prompt, 40)
        for number, prompt in enumerate(asked):
            assert len(seen[number]) >= 8
            assert seen[number] == expected_lengths(rig, prompt, len(seen[number]))
        assert rig.counted("draft_tokens_total", "toy") > rig.counted("accepted_tokens_total", "toy") > 100


def test_drafts_make_fewer_steps_than_tokens() -> None:
    with speculating() as rig:
        rig.ask(prompts(1, 1)[0], 60)
        assert rig.counted("steps_total") < 40


def test_an_answer_ends_at_max_tokens_even_within_accepted_drafts() -> None:
    for max_tokens in range(1, 12):
        with speculating() as rig:
            for prompt in prompts(max_tokens, 6):
                rig.ask(prompt, max_tokens)


def test_accepted_drafts_after_a_stop_token_or_string_are_dropped() -> None:
    with speculating(blocks=96) as rig:
        for prompt in prompts(3, 12):
            full = rig.model.expected(prompt, 30)
            for end in (2, 3, 4, 7, 11):
                by_id = rig.submit(prompt, 30, stop_token_ids=(full[end],)).wait()
                first = full.index(full[end])
                assert (by_id.token_ids(), by_id.reason) == (full[: first + 1], "stop")
                text = rig.tokenizer.decode(full)
                by_string = rig.submit(prompt, 30, stop=(text[end : end + 2],)).wait()
                where = text.index(text[end : end + 2])
                assert (by_string.text(), by_string.reason) == (text[:where], "stop")
                assert by_string.token_ids() == full[: where + 2]


def test_min_tokens_bans_the_eos_token_within_accepted_drafts() -> None:
    with speculating(ToyModel(eos_every=6), blocks=96) as rig:
        for prompt in prompts(8, 8):
            plain = rig.submit(prompt, 24, temperature=0.0, min_tokens=9, max_drafts=0).wait()
            drafted = rig.submit(prompt, 24, temperature=0.0, min_tokens=9).wait()
            assert drafted.token_ids() == plain.token_ids()
            assert 0 not in drafted.token_ids()[:8]


OPTIONS: list[dict[str, Any]] = [
    {"temperature": 20.0},
    {"temperature": 20.0, "top_p": 0.5, "top_k": 40},
    {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 1.5, "frequency_penalty": 0.7},
    {"temperature": 20.0, "frequency_penalty": 2.0, "repetition_penalty": 2.0},
    {"temperature": 20.0, "logprobs": 3},
    {"temperature": 1.0, "logit_bias": {5: 90.0, 7: 95.0}},
    {"temperature": 20.0, "min_tokens": 12, "stop_token_ids": tuple(range(40))},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_drafts_change_no_result_of_any_sampling_option(options: dict[str, Any]) -> None:
    def told(reply: Reply) -> Any:
        reply.wait()
        return (
            reply.token_ids(),
            reply.text(),
            reply.reason,
            [(one.token_id, one.logprob, one.top) for one in reply.logprobs()],
        )

    with speculating(blocks=96) as rig:
        for seed, prompt in enumerate(prompts(11, 6)):
            pair = [rig.submit(prompt, 25, seed=seed, max_drafts=drafts, **options) for drafts in (0, 3)]
            assert told(pair[0]) == told(pair[1])


def test_preemption_changes_no_token_or_accept_length() -> None:
    asked = prompts(21, 10, longest=20)
    with speculating(blocks=18, slots=64) as rig:
        seen = accept_lengths(rig)
        replies = [rig.submit(prompt, 30) for prompt in asked]
        for reply, prompt in zip(replies, asked, strict=True):
            rig.expect(reply, prompt, 30)
        assert rig.engine.parts.scheduler.num_preemptions > 0  # what is counted lags by a moment
        # A step that was dropped is drafted again, so lengths may come twice; none may come that the reference has not.
        for number, prompt in enumerate(asked):
            assert set(seen[number]) <= {*expected_lengths(rig, prompt, 40)}


def test_a_conversation_continues_from_the_host_tier_with_drafts() -> None:
    with speculating(blocks=24, slots=64) as rig:
        prompt = prompts(31, 1, longest=20)[0]
        answer = rig.ask(prompt, 30).token_ids()
        rig.settle()
        rig.forget_device()
        reply = rig.ask([*prompt, *answer], 20)
        assert reply.cached.host > 0


def test_requests_with_and_without_drafts_share_steps() -> None:
    with speculating(blocks=96) as rig:
        asked = prompts(41, 12)
        replies = [rig.submit(prompt, 25, max_drafts=number % 3) for number, prompt in enumerate(asked)]
        for reply, prompt in zip(replies, asked, strict=True):
            rig.expect(reply, prompt, 25)


def test_a_row_of_an_aborted_request_serves_the_next_request() -> None:
    with speculating(blocks=96, max_running=2) as rig:
        for prompt in prompts(51, 10):
            reply = rig.submit(prompt, 60).wait_for_tokens(3)
            rig.abort(reply)
            assert reply.reason == "abort"
            rig.ask(prompt[::-1], 12)


def test_ngram_drafts_repeat_earlier_tokens() -> None:
    model = ToyModel(vocab_size=3, max_model_len=512)
    with serving(model=model, blocks=128, speculative=SpeculativeConfig(max_drafts=4, adaptive=False)) as rig:
        rig.ask([1, 2, 1, 2, 1, 2], 100)
        assert rig.counted("accepted_tokens_total", "ngram") > 20
        assert rig.counted("steps_total") < 95


def test_adapting_the_number_of_drafts_changes_no_token() -> None:
    with speculating(blocks=96, speculative=SpeculativeConfig(max_drafts=3)) as rig:
        asked = prompts(61, 8)
        replies = [rig.submit(prompt, 60) for prompt in asked]
        for reply, prompt in zip(replies, asked, strict=True):
            rig.expect(reply, prompt, 60)


def test_draft_and_verify_times_are_counted_for_each_step_with_drafts() -> None:
    with speculating() as rig:
        rig.ask(prompts(1, 1)[0], 30)
        histograms = rig.engine.parts.metrics.snapshot().histograms
        drafted, verified, steps = (
            histograms["draft_seconds"]["toy",],
            histograms["verify_seconds"]["toy",],
            histograms["step_seconds"][()],
        )
        assert 0 < drafted.count == verified.count < steps.count
        assert 0 < drafted.total + verified.total < steps.total
        assert min(drafted.total, verified.total) > 0


def test_host_time_spent_on_drafts_counts_for_their_own_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's launch lies between the commits of two others, and so does what is done with what came of it."""
    with speculating(speculative=SpeculativeConfig(max_drafts=3)) as rig:
        engine, took = rig.engine, list[tuple[int, float]]()
        scheduler, executor = engine.parts.scheduler, engine.parts.executor
        launch, commit, planned = executor.launch, scheduler.commit, [0]

        def choose(numbers: Sequence[int], room: Sequence[int], forced: Sequence[int]) -> Chosen:
            planned[0] += 1
            return Chosen([max(0, min(2, left)) if planned[0] % 6 == 0 else 0 for left in room], {})

        def slow_launch(batch: Any, **given: Any) -> LaunchedStep:
            time.sleep(0.02 if any(batch.columns.drafts) else 0.01)
            return launch(batch, **given)

        def slow_commit(batch: Any, *given: Any) -> Any:
            time.sleep(0.02 if any(batch.columns.drafts) else 0.01)
            return commit(batch, *given)

        monkeypatch.setattr(scheduler._policy, "reuse", lambda num_rows: None)
        monkeypatch.setattr(scheduler._policy, "choose", choose)
        monkeypatch.setattr(executor, "launch", slow_launch)
        monkeypatch.setattr(scheduler, "commit", slow_commit)
        monkeypatch.setattr(
            scheduler, "measured", lambda batch, seconds: took.append((max(batch.columns.drafts), seconds))
        )
        rig.ask(prompts(1, 1)[0], 60)
    drafting = [seconds for drafts, seconds in took if drafts]
    others = [seconds for drafts, seconds in took if not drafts]
    assert len(drafting) >= 3
    assert median(others) > 0.02
    assert median(drafting) - median(others) > 0.015


def test_tokens_and_inter_token_latencies_are_counted_one_by_one() -> None:
    with speculating(blocks=96) as rig:
        asked = prompts(71, 5)
        for reply in [rig.submit(prompt, 12) for prompt in asked]:
            assert reply.reason == "length"
        histograms = rig.engine.parts.metrics.snapshot().histograms
        assert rig.counted("output_tokens_total") == 12 * 5
        assert histograms["ttft_seconds"][()].count == 5
        waits = histograms["itl_seconds"][()]
        assert waits.count == sum(waits.counts) == 11 * 5
        lengths = histograms["accept_length"]["toy",]
        assert lengths.total - lengths.count == rig.counted("accepted_tokens_total", "toy") > 0


def test_steps_without_drafts_are_counted_and_logged_by_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stats, "_DRAFT_LOG_PERIOD_S", 0.0)
    monkeypatch.setattr(
        stats, "step_seconds", lambda *times, **seen: 1.0
    )  # of steps as short as these it cannot always be told
    caplog.set_level("INFO", logger="sidestream.engine.stats")
    saw = SpecPolicy.record_step
    for dear in (False, True):
        seconds = 10.0 if dear else 1.0
        monkeypatch.setattr(
            SpecPolicy,
            "record_step",
            lambda self, rows, drafts, _, context, seconds=seconds: saw(
                self, rows, drafts, seconds if drafts else 1.0, context
            ),
        )
        with speculating(speculative=SpeculativeConfig(max_drafts=3)) as rig:
            rig.ask(prompts(1, 1)[0], 31)
            assert rig.counted("draft_fallbacks_total", "measuring") > 0
            assert (
                rig.counted("draft_fallbacks_total", "end") > 0 or dear
            )  # where nobody drafts, why counts for a few steps
            assert (rig.counted("draft_fallbacks_total", "chance") > 0) == dear
            assert ("because too few drafts would have been accepted" in caplog.text) == dear


def test_invalid_speculative_options_are_refused_with_the_bound() -> None:
    with pytest.raises(ConfigError, match="max_drafts is 17: at most 16"):
        SpeculativeConfig(max_drafts=17)
    with pytest.raises(ConfigError, match="max_drafts is 0: it must be a whole number of 1 or more"):
        SpeculativeConfig(max_drafts=0)
    with pytest.raises(ConfigError, match="no proposer ngrams; did you mean ngram"):
        SpeculativeConfig(proposer="ngrams")
    with pytest.raises(RequestRejected, match="max_drafts is -1"):
        SamplingParams(max_drafts=-1)
    with pytest.raises(ConfigError, match="max_drafts is 16, the pool holds 16 tokens: at most 14"):
        Rig(blocks=4, speculative=SpeculativeConfig(max_drafts=16))
    assert EngineConfig().speculative is None
