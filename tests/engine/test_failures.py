"""An error of a request ends that request, one of a step ends its requests, and one of the engine ends all."""

import dataclasses
import logging
import random
import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_rig import Reply, Rig, prompts, serving

from proof.tokenizer import ToyTokenizer, text_bytes
from proof.toy import ToyModel
from sidestream.attention.paged import PagedBatch
from sidestream.config import EngineConfig, SamplingParams
from sidestream.engine import build_engine
from sidestream.errors import EngineStopped
from sidestream.text import Detokenizer
from sidestream.types import Delta
from sidestream_kv.config import OffloadConfig
from sidestream_kv.device.cpu import CpuDevice
from sidestream_kv.offload.connector import LoadFailed
from sidestream_order.sim import SimDevice, make_policy

POISON = 0  # the toy model never draws it
PROMPT = prompts(31, 1, longest=12)[0]
Forward = Callable[[torch.Tensor], torch.Tensor]


class PoisonedModel(ToyModel):
    """Does `when_poisoned` in a step that holds the token POISON: with its logits, and which of them belong to it."""

    def __init__(self, when_poisoned: Callable[[torch.Tensor, list[int]], None]) -> None:
        super().__init__()
        self.when_poisoned = when_poisoned

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, batch: PagedBatch, logit_rows: torch.Tensor, **more: Any
    ) -> torch.Tensor:
        logits = super().forward(tokens, positions, batch, logit_rows, **more)
        spans = zip(batch.cu_seqlens_q, batch.cu_seqlens_q[1:], strict=False)
        poisoned = [stop - 1 for start, stop in spans if POISON in tokens[start:stop].tolist()]
        if poisoned:
            self.when_poisoned(logits, [row for row, packed in enumerate(logit_rows.tolist()) if packed in poisoned])
        return logits


def explode(logits: torch.Tensor, rows: list[int]) -> None:
    raise RuntimeError("injected: the forward pass failed")


def not_a_number(logits: torch.Tensor, rows: list[int]) -> None:
    logits[rows] = float("nan")


# ------------------------------------------------------------------ a step


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_step_that_raises_ends_only_its_own_requests(asynchronous: bool, caplog: pytest.LogCaptureFixture) -> None:
    with serving(model=PoisonedModel(explode), slots=16, asynchronous=asynchronous, max_running=2) as rig:
        hold = rig.hold("compute")
        running = rig.submit(PROMPT, 6)
        doomed = rig.submit([POISON, 1, 2], 6)
        waiting = [rig.submit(prompt, 6) for prompt in prompts(32, 3)]
        hold.release()
        assert doomed.reason == "error"
        assert doomed.token_ids() == []
        assert "the forward pass failed: injected" in str(doomed.error)
        assert running.reason in ("length", "error")  # by whether it was in that step
        assert running.token_ids() == rig.model.expected(PROMPT, 6)[: len(running.token_ids())]
        for reply, prompt in zip(waiting, prompts(32, 3), strict=True):
            rig.expect(reply, prompt, 6)
        assert rig.engine.health().status == "ok"
        assert rig.counted("requests_total", "error") >= 1
    assert "a step of" in caplog.text


def test_a_request_preempted_while_a_failing_step_ran_is_computed_again() -> None:
    model, device = PoisonedModel(explode), CpuDevice(compute_threads=1)
    prompt = [POISON, 1, 2]
    config = EngineConfig(kv_memory=8 * model.layout.block_bytes, block_tokens=4, chunk_tokens=8, max_running=2)
    engine, received = build_engine(model, config, device=device, threaded=False), list[Delta]()
    engine.submit(prompt, SamplingParams(max_tokens=3, temperature=0.0), received.append)
    engine.step()
    step = engine.loop.in_flight
    assert step is not None
    assert device.wait_host(step.fence, reason="test", timeout_s=30.0)
    assert step.fence.failure is not None
    scheduler = engine.parts.scheduler
    scheduler.preempt(scheduler.requests()[0])
    model.when_poisoned = lambda logits, rows: None
    while engine.unfinished:
        engine.step()
    engine.close()
    device.close()
    assert [delta.finish_reason for delta in received][-1] == "length"
    assert [token for delta in received for token in delta.token_ids] == model.expected(prompt, 3)


def test_a_request_that_ended_while_a_failing_step_ran_gets_no_second_end() -> None:
    model, device = PoisonedModel(explode), CpuDevice(compute_threads=1)
    config = EngineConfig(kv_memory=8 * model.layout.block_bytes, block_tokens=4, chunk_tokens=8, max_running=2)
    engine, received = build_engine(model, config, device=device, threaded=False), list[Delta]()
    handle = engine.submit([POISON, 1, 2], SamplingParams(max_tokens=3, temperature=0.0), received.append)
    engine.step()
    step = engine.loop.in_flight
    assert step is not None
    assert device.wait_host(step.fence, reason="test", timeout_s=30.0)
    assert step.fence.failure is not None
    engine.abort(handle)
    answer = list[Delta]()
    engine.submit(PROMPT, SamplingParams(max_tokens=3, temperature=0.0), answer.append)
    while engine.unfinished:
        engine.step()
    engine.close()
    device.close()
    assert [delta.finish_reason for delta in received] == ["abort"]
    assert [token for delta in answer for token in delta.token_ids] == model.expected(PROMPT, 3)


def test_blocks_of_a_failed_step_are_neither_reused_nor_stored() -> None:
    model = PoisonedModel(explode)
    with serving(model=model, slots=16) as rig:
        prompt = [POISON, *range(1, 12)]
        assert rig.submit(prompt).reason == "error"
        model.when_poisoned = lambda logits, rows: None
        reply = rig.ask(prompt)
        assert reply.cached.total == 0


@pytest.mark.parametrize("asynchronous", [True, False])
def test_non_finite_logits_end_their_own_request_only(asynchronous: bool) -> None:
    model = PoisonedModel(not_a_number)
    with serving(model=model, slots=16, asynchronous=asynchronous) as rig:
        prompt = [*range(1, 12), POISON]
        hold = rig.hold("compute")
        others = [rig.submit(PROMPT, 6), rig.submit(prompt), rig.submit([5, 6, 7], 6)]
        hold.release()
        assert others[1].reason == "error"
        assert "not finite" in str(others[1].error)
        assert others[1].token_ids() == []
        rig.expect(others[0], PROMPT, 6)
        rig.expect(others[2], [5, 6, 7], 6)
        model.when_poisoned = lambda logits, rows: None
        assert rig.ask([*prompt, 1]).cached.total == 0  # nothing that it computed was kept for others


def test_blocks_of_a_request_with_non_finite_logits_are_never_reused(tmp_path: Path) -> None:
    """Its first chunks have no logits: if their KV is broken, the last one's show it."""
    model = PoisonedModel(not_a_number)
    with serving(model=model, slots=32, blocks=40, disk=tmp_path) as rig:
        known, prompt = list(range(1, 21)), [*range(1, 60), POISON]
        host = rig.engine.parts.tiers.host.pool
        rig.ask(known)
        assert rig.engine.flush(timeout_s=10)
        before = host.num_keys
        assert rig.submit(prompt).reason == "error"
        assert rig.engine.flush(timeout_s=10)
        assert host.num_keys == before
        model.when_poisoned = lambda logits, rows: None
        assert rig.ask(prompt).cached.total == 20  # what others had computed before stays


def test_non_finite_logits_during_decode_end_the_answer_there() -> None:
    poisoned: list[int] = []

    class LaterNan(ToyModel):
        def forward(
            self,
            tokens: torch.Tensor,
            positions: torch.Tensor,
            batch: PagedBatch,
            logit_rows: torch.Tensor,
            **more: Any,
        ) -> torch.Tensor:
            logits = super().forward(tokens, positions, batch, logit_rows, **more)
            if int(positions[-1]) == len(PROMPT) + 2:
                poisoned.append(1)
                logits.fill_(float("nan"))
            return logits

    with serving(model=LaterNan()) as rig:
        reply = rig.submit(PROMPT, 8)
        assert reply.reason == "error"
        assert reply.token_ids() == rig.model.expected(PROMPT, 3)
        assert poisoned


# ------------------------------------------------------------------ a client


@pytest.mark.parametrize("failure", [ValueError("injected"), SystemExit(3), KeyboardInterrupt()])
def test_a_request_whose_sink_raises_is_aborted_and_the_sink_not_called_again(
    failure: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[Delta] = []

    def sink(delta: Delta) -> None:
        told.append(delta)
        raise failure

    with serving(blocks=40) as rig:
        other = rig.submit([2] * 10, 20)
        rig.engine.submit(PROMPT, SamplingParams(max_tokens=60), sink)
        rig.expect(other, [2] * 10, 20)
        rig.turn_until(lambda: rig.engine.unfinished == 0)
        assert len(told) == 1
        assert rig.counted("requests_total", "abort") == 1
        assert rig.engine.health().status == "ok"
        rig.ask(PROMPT)
    assert "its sink raised: the request is aborted" in caplog.text


def test_a_sink_that_raises_at_the_last_delta_does_not_change_the_finish_reason() -> None:
    def sink(delta: Delta) -> None:
        if delta.finish_reason:
            raise ValueError("injected")

    with serving() as rig:
        rig.engine.submit(PROMPT, SamplingParams(max_tokens=3), sink)
        rig.turn_until(lambda: rig.engine.unfinished == 0)
        rig.turn()
        assert rig.counted("requests_total", "length") == 1


class BrittleTokenizer(ToyTokenizer):
    """Cannot make text of one token."""

    def __init__(self, bad: int) -> None:
        self.bad = bad

    def detokenizer(self, after: Sequence[int] = (), shown: Collection[str] | None = ()) -> Detokenizer:
        bad = self.bad

        class Brittle(Detokenizer):
            def push(self, token_id: int) -> str:
                if token_id == bad:
                    raise UnicodeError("injected: no such character")
                return super().push(token_id)

        return Brittle(text_bytes)


def test_a_tokenizer_error_ends_its_own_request_only() -> None:
    bad = ToyModel().expected(PROMPT, 4)[3]
    with serving(tokenizer=BrittleTokenizer(bad)) as rig:
        other_prompt = next(p for p in prompts(33, 50) if bad not in ToyModel().expected(p, 8))
        other, doomed = rig.submit(other_prompt), rig.submit(PROMPT, 20)
        assert doomed.reason == "error"
        assert "the tokenizer failed: injected" in str(doomed.error)
        rig.expect(other, other_prompt)
        assert rig.engine.health().status == "ok"


class EndlessTokenizer(ToyTokenizer):
    """Makes text of every token, but not of what is left at the end."""

    def detokenizer(self, after: Sequence[int] = (), shown: Collection[str] = ()) -> Detokenizer:
        class Endless(Detokenizer):
            def finish(self) -> str:
                raise UnicodeError("injected: half a character is left")

        return Endless(text_bytes)


def test_an_aborted_sample_gets_its_end_even_if_the_tokenizer_fails(caplog: pytest.LogCaptureFixture) -> None:
    with serving(tokenizer=EndlessTokenizer()) as rig:
        aborted, other = rig.submit(PROMPT, 60), rig.submit(PROMPT, 60)
        aborted.wait_for_tokens(2)
        rig.abort(aborted)
        assert (aborted.reason, aborted.error, aborted.deltas[-1].text) == ("abort", None, "")
        rig.abort(other)
        assert other.reason == "abort"
        assert rig.engine.health().status == "ok"
    assert "sample 0: the tokenizer failed at token" in caplog.text


def test_close_ends_requests_even_if_the_tokenizer_fails() -> None:
    rig = Rig(tokenizer=EndlessTokenizer())
    replies = [rig.submit(prompt, 60) for prompt in prompts(34, 6)]
    replies[0].wait_for_tokens(1)
    rig.close()
    assert [reply.reason for reply in replies] == ["abort"] * 6
    rig.check_idle()


def test_a_sample_whose_last_text_cannot_be_decoded_ends_with_an_error() -> None:
    with serving(tokenizer=EndlessTokenizer()) as rig:
        reply = rig.submit(PROMPT, 4)
        assert (reply.reason, reply.error) == ("error", "the tokenizer failed: injected: half a character is left")
        assert reply.token_ids() == rig.model.expected(PROMPT, 4)
        assert rig.engine.health().status == "ok"


class NoTokenizer(ToyTokenizer):
    def detokenizer(self, after: Sequence[int] = (), shown: Collection[str] = ()) -> Detokenizer:
        raise MemoryError("injected")


def test_a_tokenizer_that_fails_at_submission_leaves_no_request() -> None:
    with serving(tokenizer=NoTokenizer()) as rig:
        with pytest.raises(MemoryError):
            rig.submit(PROMPT, n=3)
        assert rig.engine.unfinished == 0
        assert rig.engine.health().status == "ok"


# ------------------------------------------------------------------ the engine


def fail_on_the_engine_thread(rig: Rig) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise RuntimeError("injected: a bug")

    return fail


@pytest.mark.parametrize("where", ["plan", "commit"])
def test_exception_on_the_engine_thread_reaches_every_client(where: str, caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(max_running=2, slots=8)
    hold = rig.hold("compute")
    replies = [rig.submit(prompt, 20) for prompt in prompts(34, 5)]
    setattr(rig.engine.parts.scheduler, where, fail_on_the_engine_thread(rig))
    hold.release()
    for reply in replies:
        assert reply.reason == "error"
        assert "the engine failed: injected: a bug" in str(reply.error)
    assert rig.engine.health().status == "failed"
    assert "RuntimeError: injected: a bug" in rig.engine.health().detail
    assert rig.engine.unfinished == 0
    with pytest.raises(EngineStopped, match="the engine is failed: RuntimeError: injected"):
        rig.submit(PROMPT)
    rig.engine._thread.join(10)
    with pytest.raises(EngineStopped):
        rig.engine.call(lambda: None)
    rig.close()
    rig.close()
    assert rig.engine.health().status == "failed"
    assert "the engine failed and stops serving" in caplog.text


def test_a_queued_request_gets_an_error_if_the_engine_fails() -> None:
    rig = Rig()
    ready = threading.Event()

    def fail_once_ready() -> None:
        assert ready.wait(10)
        raise RuntimeError("injected: a bug")

    rig.engine.parts.inbox.put(fail_once_ready)
    reply = rig.submit(PROMPT, n=2)
    rig.abort(rig.submit(PROMPT))
    ready.set()
    reply.wait()
    assert [reply.reasons(index) for index in range(2)] == [["error"], ["error"]]
    assert rig.engine.unfinished == 0
    rig.close()


def test_a_failed_engine_notifies_all_clients_even_if_one_raises() -> None:
    def sink(delta: Delta) -> None:
        raise ValueError("injected: a client")

    rig = Rig(max_running=1)
    hold = rig.hold("compute")
    rig.engine.submit(PROMPT, SamplingParams(max_tokens=4), sink)
    rig.engine.submit(PROMPT, SamplingParams(max_tokens=4), sink)
    other = rig.submit(PROMPT)
    rig.engine.parts.scheduler.commit = fail_on_the_engine_thread(rig)  # type: ignore[method-assign]
    hold.release()
    assert other.reason == "error"
    rig.close()


def test_call_runs_on_the_engine_thread_and_raises_its_error_in_the_caller() -> None:
    with serving() as rig:
        where: list[str] = []
        rig.engine.call(lambda: where.append(threading.current_thread().name))
        assert where == ["sidestream-engine"]
        with pytest.raises(KeyError):
            rig.engine.call(lambda: {}["missing"])
        rig.ask(PROMPT)
        assert rig.engine.health().status == "ok"


def test_successful_requests_write_no_log_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sidestream")
    with serving(slots=8) as rig:
        caplog.clear()  # lines of the start
        for prompt in prompts(35, 4):
            rig.ask(prompt)
        assert isinstance(rig.submit(PROMPT), Reply)
        rig.turn()
    assert [record for record in caplog.records if record.name.startswith("sidestream")] == []


def test_failed_loads_are_checked_before_results_of_their_step_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step waited for a load that has failed, and the offload worker has not reported the failure yet."""
    model, told = ToyModel(), list[Delta]()
    size, offload = model.layout.block_bytes, OffloadConfig(host=8 * model.layout.block_bytes)
    device = SimDevice(make_policy("early", random.Random(0)))
    config = EngineConfig(kv_memory=16 * size, block_tokens=4, max_running=1, offload=offload)
    engine = build_engine(model, config, device=device, threaded=False)
    engine.submit(PROMPT, SamplingParams(max_tokens=2), told.append)
    while (step := engine.loop.in_flight) is None or not step.batch.rows[0].samples:
        engine.step()
    assert not told and engine.parts.transfers is not None
    engine.loop.in_flight = dataclasses.replace(step, gated=True)
    row = step.batch.rows[0]
    with monkeypatch.context() as patch:
        failed = LoadFailed(row.request_id, row.epoch, "load_failed")
        patch.setattr(engine.parts.transfers, "failed_loads", lambda: [failed])
        engine.step()
    assert not told
    while engine.unfinished:
        engine.step()
    engine.close()
    assert [token for delta in told for token in delta.token_ids] == model.expected(PROMPT, 2)
