"""What a front end may rely on, of an engine in its own process and of one in another: the same tests for both
clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from border_rig import KINDS, ask, border, check_nothing_left, read_all, run, tokens_of
from engine_rig import PATIENCE_S, prompts

from proof.tokenizer import ToyTokenizer
from proof.toy import ToyModel
from sidestream.client import base
from sidestream.client.front_end import FrontEnd
from sidestream.config import SamplingParams
from sidestream.errors import ContextTooLong, EngineStopped, QueueFull, RequestError, RequestRejected
from sidestream.types import CachedTokens, Delta
from sidestream_kv.metrics import Timeline

PROMPT = prompts(51, 1, longest=12)[0]
OTHER = [5, 6, 7]
LONG = SamplingParams(max_tokens=60)

Make = Callable[..., contextlib.AbstractContextManager[Any]]


@pytest.fixture(params=KINDS)
def at(request: pytest.FixtureRequest) -> Make:
    """Makes a border of each kind: `with at(slots=8) as made`."""
    return lambda **options: border(request.param, **options)


# ------------------------------------------------------------------ answers


def test_clients_receive_the_engines_tokens(at: Make) -> None:
    asked = prompts(52, 7, longest=25, shared=8)
    with at() as made:
        client = made.connect()

        async def use() -> list[list[Delta]]:
            return await asyncio.gather(*(ask(client, prompt, 12) for prompt in asked))

        for prompt, news in zip(asked, run(use()), strict=True):
            assert tokens_of(news) == made.rig.model.expected(prompt, 12)
            assert [delta.finish_reason for delta in news[:-1]] == [None] * (len(news) - 1)
            assert news[-1].finish_reason == "length"
            assert {delta.prompt_tokens for delta in news} == {len(prompt)}
            assert {delta.text for delta in news} == {""}


def test_only_the_first_output_has_the_time_in_the_queue(at: Make) -> None:
    with at() as made:
        times = [delta.queue_s for delta in run(ask(made.connect(), PROMPT, 6))]
    assert times[0] is not None and 0 <= times[0] < PATIENCE_S
    assert times[1:] == [None] * (len(times) - 1)


def test_clients_receive_the_engines_samples_and_logprobs(at: Make) -> None:
    options: dict[str, Any] = {"n": 3, "seed": 7, "temperature": 90.0, "logprobs": 2}
    with at() as made:
        client = made.connect()
        news = run(ask(client, PROMPT, 6, **options))
        direct = made.rig.submit(PROMPT, 6, **options).wait()
        answers = [direct.token_ids(index) for index in range(3)]
        assert len(set(map(tuple, answers))) == 3
        assert [tokens_of(news, index) for index in range(3)] == answers
        for index in range(3):
            assert [one for delta in news if delta.index == index for one in delta.logprobs] == direct.logprobs(index)
            assert [delta.finish_reason for delta in news if delta.index == index][-1] == "length"


def test_cached_tokens_are_reported_by_tier_with_every_output(at: Make, tmp_path: Path) -> None:
    prompt = list(range(1, 22))
    with at(slots=16, disk=tmp_path) as made:
        client, rig = made.connect(), made.rig

        def cached() -> CachedTokens:
            (cached,) = {delta.cached for delta in run(ask(client, prompt, 4))}
            rig.settle()
            return cached

        assert cached() == CachedTokens()
        assert cached() == CachedTokens(device=20)
        rig.forget_device()
        assert cached() == CachedTokens(host=20)
        rig.forget_device()
        rig.forget_host()
        assert cached() == CachedTokens(disk=20)


def test_cached_tokens_are_reused_only_with_the_same_cache_salt(at: Make) -> None:
    """Any text is a salt, one with half of a surrogate pair too."""
    prompt = list(range(1, 14))
    with at() as made:
        client = made.connect()

        def cached(salt: str) -> int:
            async def use() -> list[Delta]:
                return await read_all(client.submit(prompt, SamplingParams(max_tokens=2), cache_salt=salt))

            return run(use())[-1].cached.total

        for salt in ("", "a", "\ud800", "\ud801"):
            assert (cached(salt), cached(salt)) == (0, 12)
        assert made.rig.submit(prompt, 2, cache_salt="\ud800").cached.total == 12


def test_a_stop_token_ends_the_answer(at: Make) -> None:
    expected = ToyModel().expected(PROMPT, 6)
    with at() as made:
        client = made.connect()
        news = run(ask(client, PROMPT, 20, stop_token_ids=(expected[3],)))
        assert (tokens_of(news), news[-1].finish_reason) == (expected[: expected.index(expected[3]) + 1], "stop")


def test_the_engine_ignores_stop_strings_of_clients(at: Make) -> None:
    """A stop string that cannot be encoded is accepted, too."""
    with at() as made:
        client = made.connect()
        news = run(ask(client, PROMPT, 8, stop=("\ud800", *map(chr, range(32, 47)))))
        assert tokens_of(news) == made.rig.model.expected(PROMPT, 8)


def test_a_lower_priority_runs_earlier(at: Make) -> None:
    with at(max_running=1) as made:
        client, rig = made.connect(), made.rig

        async def use() -> list[str]:
            hold, order = rig.hold("compute"), list[str]()

            async def wait_for(name: str, priority: int) -> None:
                await read_all(client.submit(PROMPT, SamplingParams(max_tokens=2), priority=priority))
                order.append(name)

            asking = [
                asyncio.ensure_future(wait_for(name, priority))
                for name, priority in (("first", 0), ("late", 5), ("soon", -5))
            ]
            await asyncio.sleep(0)
            await asyncio.to_thread(rig.turn_until, lambda: rig.engine.unfinished == 3)
            hold.release()
            await asyncio.gather(*asking)
            return order

        order = run(use())
        assert order.index("soon") < order.index("late")


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("prompt", "params", "options", "error", "words", "param"),
    [
        ([], {}, {}, RequestRejected, "the prompt is empty", "prompt"),
        ([1, 97], {}, {}, RequestRejected, "token id 97: the model knows 0 to 96", "prompt"),
        ([1, "a"], {}, {}, RequestRejected, "prompt has 'a', which is not a whole number", "prompt"),
        ([1], {"n": 100}, {}, RequestRejected, "n is 100: the engine takes 10 samples at a time", "n"),
        ([1], {"stop_token_ids": (97,)}, {}, RequestRejected, "stop_token_ids has token id 97", "stop_token_ids"),
        ([1], {}, {"cache_salt": "x" * 2000}, RequestRejected, "cache_salt is 2000 characters long", "cache_salt"),
        ([1], {}, {"priority": 1.5}, RequestRejected, "priority has 1.5, which is not a whole number", "priority"),
        ([1], {}, {"priority": 1 << 63}, RequestRejected, "priority is 9223372036854775808: give a num", "priority"),
        ([1] * 96, {}, {}, ContextTooLong, r"prompt has 96 tokens, the pool holds 96 \(24 blocks x 4\)", "prompt"),
    ],
)
def test_requests_that_cannot_be_served_are_refused_when_submitted(
    at: Make, prompt: Any, params: Any, options: Any, error: type[RequestError], words: str, param: str
) -> None:
    with at(max_waiting=6) as made:
        client = made.connect()
        assert client.max_model_len == 96

        async def use() -> None:
            with pytest.raises(error, match=words) as refusal:
                client.submit(prompt, SamplingParams(**params), **options)
            assert refusal.value.param == param

        run(use())
        check_nothing_left(made)
        assert tokens_of(run(ask(client, PROMPT))) == made.rig.model.expected(PROMPT, 8)


def test_a_full_queue_is_reported_and_accepted_requests_continue(at: Make) -> None:
    """In process when a request is submitted; by another process in place of its news."""
    with at(max_waiting=1, max_running=2) as made:
        client = made.connect()

        async def use() -> list[Delta]:
            hold = made.rig.hold("compute")
            taken = client.submit(PROMPT, SamplingParams(max_tokens=5, n=3))
            answer = None
            full = r"^3 requests are running or waiting, the bound is 3: try again later, or raise max_waiting$"
            with pytest.raises(QueueFull, match=full):
                answer = client.submit(OTHER, SamplingParams(max_tokens=5, n=2))
                await answer.read()
            assert (answer is None) == made.refuses_at_submit
            hold.release()
            return await read_all(taken, 3)

        news = run(use())
        assert [tokens_of(news, index) for index in range(3)] == [made.rig.model.expected(PROMPT, 5)] * 3


def test_a_closed_engine_refuses_requests(at: Make) -> None:
    with at(slots=8) as made:
        client = made.connect()
        run(ask(client, PROMPT))
        made.close()

        async def use() -> None:
            with pytest.raises(EngineStopped, match=r"^the engine is (draining|failed): "):
                for _ in range(2):  # the connection's end may be noticed by the first one
                    await client.submit(PROMPT, SamplingParams(max_tokens=1)).read()
            with pytest.raises(EngineStopped):
                await client.operate("flush", timeout_s=1.0)
            with pytest.raises(EngineStopped):
                await client.operate("reset_prefix_cache")

        run(use())
        assert client.health().status != "ok"
        client.count("connections_refused_total", 1, "idle")  # harmless


def test_requests_that_run_when_the_engine_closes_end_with_abort(at: Make) -> None:
    with at() as made:
        client = made.connect()

        async def use() -> list[Delta]:
            answer = client.submit(PROMPT, LONG)
            first = await answer.read()
            hold = made.rig.hold("compute")
            closing = asyncio.get_running_loop().run_in_executor(None, made.close)
            hold.release()
            news = [first, *await read_all(answer)]
            await closing
            return news

        news = run(use())
        assert news[-1].finish_reason in ("abort", "length")
        assert tokens_of(news) == made.rig.model.expected(PROMPT, 60)[: len(tokens_of(news))]


# ------------------------------------------------------------------ ends


def test_a_sample_ended_by_its_reader_is_counted_as_stopped_and_others_continue(at: Make) -> None:
    with at() as made:
        client = made.connect()

        async def use() -> list[Delta]:
            answer = client.submit(PROMPT, SamplingParams(max_tokens=40, n=3))
            seen = [await answer.read()]
            while {delta.index for delta in seen} != {0, 1, 2}:
                seen.append(await answer.read())
            client.abort(answer, "stop", index=1)
            client.abort(answer, "stop", index=1)  # twice does no harm
            waiting = len(answer._deltas)  # came before the end
            rest = await read_all(answer, 2)
            assert all(delta.index != 1 for delta in rest[waiting:])
            return seen + rest

        news = run(use())
        expected = made.rig.model.expected(PROMPT, 40)
        assert tokens_of(news, 0) == tokens_of(news, 2) == expected
        assert len(tokens_of(news, 1)) < 40
        assert {delta.finish_reason for delta in news if delta.index == 1} == {None}
        check_nothing_left(made)
        assert (made.rig.counted("requests_total", "stop"), made.rig.counted("requests_total", "length")) == (1, 2)


def test_the_end_of_an_answer_aborts_all_its_samples(at: Make) -> None:
    with at(max_running=2) as made:
        client = made.connect()

        async def use() -> None:
            hold = made.rig.hold("compute")
            answer = client.submit(PROMPT, SamplingParams(max_tokens=60, n=3))
            other = client.submit(OTHER, SamplingParams(max_tokens=3))
            client.abort(answer)
            hold.release()
            assert tokens_of(await read_all(other)) == made.rig.model.expected(OTHER, 3)

        run(use())
        check_nothing_left(made)
        assert made.rig.counted("requests_total", "abort") == 3


def test_ending_a_sample_that_has_just_finished_has_no_effect(at: Make) -> None:
    """The engine has finished the first sample when its reader ends it; its last news lie on their way."""
    with at() as made:
        client = made.connect()

        async def use() -> list[Delta]:
            answer = client.submit(PROMPT, SamplingParams(max_tokens=3))
            other = client.submit(OTHER, SamplingParams(max_tokens=30))
            # this loop reads nothing meanwhile
            made.rig.turn_until(lambda: made.rig.counted("requests_total", "length") >= 1)
            client.abort(answer, "stop", index=0)
            client.abort(answer)
            assert not answer._deltas
            news = await read_all(other)
            assert not answer._deltas  # none came later
            return news

        assert tokens_of(run(use())) == made.rig.model.expected(OTHER, 30)
        check_nothing_left(made)
        assert made.rig.counted("requests_total", "length") == 2
        assert made.rig.counted("requests_total", "stop") + made.rig.counted("requests_total", "abort") == 0


def test_ending_a_finished_answer_has_no_effect(at: Make) -> None:
    with at() as made:
        client = made.connect()

        async def use() -> None:
            answer = client.submit(PROMPT, SamplingParams(max_tokens=3, n=2))
            await read_all(answer, 2)
            assert not any(made.left()[name] for name in made.left() if "client" in name)  # before anybody ends it
            client.abort(answer)
            client.abort(answer, "stop", index=1)

        run(use())
        assert made.rig.counted("requests_total", "length") == 2


def test_two_front_ends_receive_outputs_of_their_own_requests_only(at: Make) -> None:
    with at(max_waiting=64) as made:
        clients = [made.connect() for _ in range(2)]
        asked = [prompts(seed, 5, longest=10) for seed in (61, 62)]

        async def use() -> list[list[Delta]]:
            return await asyncio.gather(*(ask(clients[one], prompt, 6) for one in range(2) for prompt in asked[one]))

        for news, prompt in zip(run(use()), asked[0] + asked[1], strict=True):
            assert tokens_of(news) == made.rig.model.expected(prompt, 6)
            assert len(tokens_of(news)) == 6


# ------------------------------------------------------------------ readers


def test_a_reader_that_does_not_read_is_aborted_and_others_continue(at: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "MAX_UNREAD", 48)  # the other answer has fewer deltas, so it may come at any speed
    with at() as made:
        client = made.connect()

        async def use() -> None:
            sleeping = client.submit(PROMPT, SamplingParams(max_tokens=80, n=2))
            assert tokens_of(await ask(client, OTHER, 40)) == made.rig.model.expected(OTHER, 40)
            for _ in range(48):
                await sleeping.read()
            unread = r"^the answer was not read: at most 48 deltas may be unread; read them as they arrive$"
            with pytest.raises(RequestError, match=unread):
                await sleeping.read()

        run(use())
        check_nothing_left(made)
        assert made.rig.counted("requests_total", "abort") == 2


def test_a_reader_that_is_cancelled_leaves_its_answer_to_be_read_or_ended(at: Make) -> None:
    with at() as made:
        client = made.connect()

        async def use() -> list[Delta]:
            hold = made.rig.hold("compute")
            answer = client.submit(PROMPT, SamplingParams(max_tokens=5))
            reading = asyncio.ensure_future(answer.read())
            await asyncio.sleep(0)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            hold.release()
            return await read_all(answer)

        assert tokens_of(run(use())) == made.rig.model.expected(PROMPT, 5)


# ------------------------------------------------------------------ text


def front_end(client: Any) -> FrontEnd:
    return FrontEnd(client, ToyTokenizer(), model_name="toy")  # type: ignore[arg-type]


def test_a_stop_string_ends_the_sample_in_the_engine(at: Make) -> None:
    expected = ToyTokenizer().decode(ToyModel().expected(PROMPT, 60))
    stop = expected[8:10]
    shown = expected[: expected.index(stop)]
    with at() as made:
        client = made.connect()

        async def use() -> list[Delta]:
            params = SamplingParams(max_tokens=80, n=2, stop=(stop,))
            return [delta async for delta in front_end(client).generate(PROMPT, params)]

        news = run(use())
        for index in range(2):
            assert "".join(delta.text for delta in news if delta.index == index) == shown
            assert [delta.finish_reason for delta in news if delta.index == index][-1] == "stop"
        check_nothing_left(made)
        assert (made.rig.counted("requests_total", "stop"), made.rig.counted("requests_total", "abort")) == (2, 0)


@pytest.mark.parametrize("how", ["closed", "cancelled"])
def test_a_stream_that_is_left_aborts_its_request(at: Make, how: str) -> None:
    with at() as made:
        client = made.connect()

        async def use() -> None:
            news = front_end(client).generate(PROMPT, SamplingParams(max_tokens=80, n=2))
            await anext(news)
            if how == "closed":
                await news.aclose()
                return

            async def drain() -> None:
                async for _ in news:
                    pass

            hold = made.rig.hold("compute")
            reading = asyncio.ensure_future(drain())
            await asyncio.sleep(0)
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reading
            hold.release()

        run(use())
        check_nothing_left(made)
        assert made.rig.counted("requests_total", "abort") == 2


# ------------------------------------------------------------------ the engine


def test_metrics_are_a_copy_of_the_engine_s(at: Make) -> None:
    with at() as made:
        client = made.connect()

        async def use() -> None:
            await ask(client, PROMPT, 5)
            client.count("connections_refused_total", 2, "idle")
            await asyncio.to_thread(
                made.rig.turn_until, lambda: made.rig.counted("connections_refused_total", "idle") == 2
            )
            await asyncio.to_thread(made.rig.turn)
            snapshot, direct = await client.metrics_snapshot(), made.rig.engine.parts.metrics.snapshot()
            assert snapshot.values["requests_total"] == {("length",): 1}
            assert snapshot.values["connections_refused_total"] == {("idle",): 2}
            assert snapshot.values.keys() == direct.values.keys()
            assert snapshot.histograms["ttft_seconds"] == direct.histograms["ttft_seconds"]
            (ttft,) = snapshot.histograms["ttft_seconds"].values()
            assert ttft.count == 1

        run(use())


def test_a_client_gets_the_explanation_of_a_request(at: Make) -> None:
    prompt = list(range(1, 22))
    with at() as made:
        client = made.connect()

        async def use() -> None:
            await ask(client, prompt, 4)
            await read_all(client.submit([*prompt[:9], 40, 41, 42, 43], SamplingParams(max_tokens=4), name="named"))
            found = await client.explain_cache("named")
            assert found is not None
            assert [one.reason for one in found.stretches] == ["reused", "not_seen", "last_block"]
            assert found.relative is not None
            assert (found.relative.shared_tokens, found.relative.other[9]) == (9, 10)
            assert await client.explain_cache("other") is None

        run(use())


def test_recent_spans_are_those_of_the_engines_timeline_after_a_position(at: Make) -> None:
    with at() as made:
        client, timeline, engine = made.connect(), Timeline(on_demand=True), made.rig.engine
        engine.parts = dataclasses.replace(engine.parts, timeline=timeline)

        async def use() -> None:
            assert (await client.recent_spans(0)).spans == ()
            now = time.perf_counter_ns()
            for name in ("decode 1", "decode 2"):
                timeline.record("compute", name, now - 5, now)
            recent = await client.recent_spans(1)
            assert (recent.number, recent.spans) == (2, (("compute", "decode 2", now - 5, now),))
            assert recent.now_ns >= now

        run(use())


def test_flush_reports_whether_everything_is_stored_and_reset_drops_it(at: Make) -> None:
    prompt = list(range(1, 22))
    with at(slots=16) as made:
        client = made.connect()

        async def use() -> None:
            hold = made.rig.hold("store")
            await ask(client, prompt, 4)
            assert await client.operate("flush", timeout_s=0.01)
            hold.release()
            assert not await client.operate("flush", timeout_s=PATIENCE_S)
            assert (await ask(client, prompt, 4))[-1].cached.total == 20
            await client.operate("reset_prefix_cache")
            assert (await ask(client, prompt, 4))[-1].cached.total == 0

        run(use())


def test_operations_of_one_front_end_reach_all_front_ends(at: Make) -> None:
    with at(slots=16) as made:
        client, other = made.connect(), made.connect()

        async def use() -> None:
            await client.operate("pause")
            for one in (other, made.connect()):  # also one that starts during the pause
                while not one.health().paused:
                    await asyncio.sleep(0.001)
            assert (await other.metrics_snapshot()).values["admission_paused"] == {(): 1.0}
            answer = other.submit(PROMPT, SamplingParams(max_tokens=4))
            await other.operate("resume")
            assert tokens_of(await read_all(answer)) == made.rig.model.expected(PROMPT, 4)
            while client.health().paused:
                await asyncio.sleep(0.001)
            with pytest.raises(RequestRejected, match="this engine has device, host"):
                await client.operate("reset_prefix_cache", name="disk")
            assert (await other.operate("reset_prefix_cache", name="host")).keys() == {"host"}

        run(use())


def test_a_request_is_cancelled_by_its_name_from_any_front_end(at: Make) -> None:
    with at() as made:
        client, other = made.connect(), made.connect()

        async def use() -> None:
            hold = made.rig.hold("compute")
            answers = [client.submit(PROMPT, LONG, name=name) for name in ("job 0", "job 1", "jobs")]
            cancelled = asyncio.ensure_future(other.operate("cancel", name="job"))
            hold.release()
            assert await cancelled == {"cancelled": 2}
            assert await other.operate("cancel", name="job") == {"cancelled": 0}
            assert await client.operate("cancel", name="jobs") == {"cancelled": 1}
            for answer in answers:
                last = (await read_all(answer))[-1]
                assert (last.finish_reason, last.error) == ("abort", "the request was cancelled")

        run(use())


def test_a_resume_does_not_wait_for_flushes(at: Make) -> None:
    with at(slots=16) as made:
        client = made.connect()

        async def use() -> None:
            await client.operate("pause")
            hold = made.rig.hold("store")
            made.rig.submit(list(range(1, 22)), 4)
            flushes = [asyncio.ensure_future(client.operate("flush", timeout_s=PATIENCE_S)) for _ in range(6)]
            await client.operate("resume")
            hold.release()
            assert await asyncio.gather(*flushes) == [{}] * 6

        run(use())


def test_waiting_calls_delay_no_other_call(at: Make) -> None:
    """More of them than a server has threads for; another front end is served meanwhile."""
    with at(slots=16) as made:
        client, other = made.connect(), made.connect()

        async def use() -> None:
            hold = made.rig.hold("store")
            await ask(client, list(range(1, 22)), 4)
            flushes = [asyncio.ensure_future(client.operate("flush", timeout_s=PATIENCE_S)) for _ in range(6)]
            await asyncio.sleep(0)
            assert (await other.metrics_snapshot()).values["requests_total"] == {("length",): 1}
            assert tokens_of(await ask(other, OTHER)) == made.rig.model.expected(OTHER, 8)
            hold.release()
            assert await asyncio.gather(*flushes) == [{}] * 6

        run(use())


def test_a_failure_of_the_engine_is_the_last_output_of_every_request(at: Make) -> None:
    with at(max_running=2) as made:
        clients = [made.connect() for _ in range(2)]

        def fail(*_: object, **__: object) -> Any:
            raise RuntimeError("injected: a bug")

        async def use() -> None:
            hold = made.rig.hold("compute")
            answers = [client.submit(prompt, LONG) for client in clients for prompt in prompts(63, 3)]
            await asyncio.to_thread(made.rig.turn_until, lambda: made.rig.engine.unfinished == 6)
            made.rig.engine.parts.scheduler.commit = fail
            hold.release()
            for answer in answers:
                last = (await read_all(answer))[-1]
                assert (last.finish_reason, last.error) == ("error", "the engine failed: injected: a bug")
            for client in clients:
                while client.health().status == "ok":
                    await asyncio.sleep(0)
                assert client.health().status == "failed"
                assert "RuntimeError: injected: a bug" in client.health().detail
                with pytest.raises(EngineStopped, match="the engine is failed: RuntimeError: injected: a bug"):
                    client.submit(PROMPT, LONG)

        run(use())
        made.rig.check_idle = lambda: None  # nothing is given back by an engine that failed


# ------------------------------------------------------------------ event loops


def test_event_loops_may_use_a_client_one_after_another(at: Make) -> None:
    with at() as made:
        client = made.connect()
        for prompt in prompts(64, 3):
            assert tokens_of(run(ask(client, prompt))) == made.rig.model.expected(prompt, 8)


def test_requests_of_a_closed_event_loop_are_aborted_by_the_next_one(at: Make) -> None:
    with at() as made:
        client, hold = made.connect(), made.rig.hold("compute")

        async def leave() -> Any:
            return client.submit(PROMPT, LONG)

        loop = asyncio.new_event_loop()
        answer = loop.run_until_complete(leave())
        waiting = loop.create_task(answer.read())
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()  # a reader still waits on it

        async def use() -> list[Delta]:
            other = client.submit(OTHER, SamplingParams(max_tokens=5))
            hold.release()
            return await read_all(other)

        assert tokens_of(run(use())) == made.rig.model.expected(OTHER, 5)
        check_nothing_left(made)
        assert made.rig.counted("requests_total", "abort") == 1
        waiting._log_destroy_pending = False  # type: ignore[attr-defined]
        waiting.get_coro().close()  # type: ignore[union-attr]
        del waiting, answer
        gc.collect()


@pytest.fixture
def other_loop_error() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop that runs on another thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join(PATIENCE_S)
    loop.close()


def test_two_event_loops_cannot_use_a_client_at_the_same_time(
    at: Make, other_loop_error: asyncio.AbstractEventLoop
) -> None:
    with at() as made:
        client, hold = made.connect(), made.rig.hold("compute")

        async def submit() -> Any:
            return client.submit(PROMPT, SamplingParams(max_tokens=5))

        answer = asyncio.run_coroutine_threadsafe(submit(), other_loop_error).result(PATIENCE_S)
        with pytest.raises(
            RuntimeError,
            match="another event loop waits for answers of this engine: use one loop, or one AsyncLLM for each",
        ):
            run(submit())
        hold.release()
        news = asyncio.run_coroutine_threadsafe(read_all(answer), other_loop_error).result(PATIENCE_S)
        assert tokens_of(news) == made.rig.model.expected(PROMPT, 5)
        # The other loop waits for nothing any more.
        assert tokens_of(run(ask(client, OTHER))) == made.rig.model.expected(OTHER, 8)
