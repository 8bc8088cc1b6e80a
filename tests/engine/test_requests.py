"""Options of requests, their outputs, and refusals."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from engine_rig import Reply, prompts, serving

from proof.toy import ToyModel
from sidestream.config import SamplingParams
from sidestream.errors import ContextTooLong, QueueFull, RequestError, RequestRejected
from sidestream.types import Delta

PROMPT = prompts(1, 1, longest=12)[0]


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("prompt", "params", "kind", "words", "param"),
    [
        ([], {}, RequestRejected, "empty", "prompt"),
        ([1, -1], {}, RequestRejected, "token id -1", "prompt"),
        ([1, 97], {}, RequestRejected, "token id 97: the model knows 0 to 96", "prompt"),
        ([1, 2**70], {}, RequestRejected, f"token id {2**70}: the model knows 0 to 96", "prompt"),
        ([-(2**70), 1], {}, RequestRejected, f"token id {-(2**70)}", "prompt"),
        ([1] * 96, {}, ContextTooLong, r"96 tokens, the pool holds 96 \(24 blocks x 4\)", "prompt"),
        ([1] * 5, {"stop_token_ids": (97,)}, RequestRejected, "token id 97", "stop_token_ids"),
        ([1] * 5, {"logit_bias": {200: 1.0}}, RequestRejected, "token id 200", "logit_bias"),
        (
            [1] * 90,
            {"min_tokens": 7, "max_tokens": None},
            RequestRejected,
            "min_tokens is 7: .* the limit is 6",
            "min_tokens",
        ),
        ([1] * 5, {"n": 9}, RequestRejected, "n is 9: the engine takes 8", "n"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_at_submission(
    prompt: list[int], params: dict[str, Any], kind: type[RequestError], words: str, param: str
) -> None:
    with serving(max_waiting=4) as rig:
        with pytest.raises(kind, match=words) as refusal:
            rig.submit(prompt, **{"max_tokens": 1, **params})
        assert refusal.value.param == param
        assert rig.engine.unfinished == 0
        rig.ask(PROMPT)


@pytest.mark.parametrize(
    "wrong", [2.0, float("nan"), "2", None, True, np.float32(2), np.bool_(True), [2], 1j], ids=repr
)
def test_token_ids_and_priorities_must_be_whole_numbers(wrong: Any) -> None:
    with serving() as rig:
        for prompt, priority, param in (([1, wrong, 3], 0, "prompt"), ([1, 2], wrong, "priority")):
            with pytest.raises(RequestRejected, match=rf"^{param} has .+, which is not a whole number$") as refusal:
                rig.submit(prompt, priority=priority)
            assert refusal.value.param == param
        with pytest.raises(RequestRejected, match="not a whole number"):
            rig.engine.check([1, wrong, 3], SamplingParams())
        assert rig.engine.unfinished == 0
        rig.ask(PROMPT)


@pytest.mark.parametrize("prompt", ["12", None, 12], ids=repr)
def test_a_prompt_that_is_no_list_of_token_ids_is_refused(prompt: Any) -> None:
    with (
        serving() as rig,
        pytest.raises(
            RequestRejected, match=r"^prompt (has '1', which is not a|is (None|12): give a list of) whole number"
        ),
    ):
        rig.submit(prompt)


@pytest.mark.parametrize("kind", [np.int64, np.uint8, torch.tensor], ids=["int64", "uint8", "tensor"])
def test_whole_numbers_of_other_types_are_converted_to_int(kind: Callable[[int], Any]) -> None:
    with serving(slots=16) as rig:
        plain, asked = rig.ask([*PROMPT, *PROMPT]), [kind(token_id) for token_id in (*PROMPT, *PROMPT)]
        kinds: set[type] = set()

        def look(_: Delta) -> None:
            (request,) = rig.engine.parts.scheduler.requests()
            kinds.update(type(number) for number in (*request.prompt, request.priority))

        reply = rig.submit(asked, priority=kind(1), on_delta=look)
        assert (reply.wait().token_ids(), reply.cached.device > 0) == (plain.token_ids(), True)
        assert kinds == {int}


def test_changing_a_prompt_list_after_submission_has_no_effect() -> None:
    with serving() as rig:
        hold = rig.hold("compute")
        prompt = list(PROMPT)
        reply = rig.submit(prompt)
        prompt[:] = ["changed"] * len(prompt)
        hold.release()
        rig.expect(reply, PROMPT)


def test_a_prompt_beyond_the_models_limit_is_refused() -> None:
    with serving(model=ToyModel(max_model_len=20)) as rig:
        with pytest.raises(ContextTooLong, match="20 tokens, the model takes 20"):
            rig.submit([1] * 20)
        reply = rig.submit([1] * 19, None)
        rig.expect(reply, [1] * 19, 1)


@pytest.mark.parametrize(("model_len", "room"), [(512, 96), (40, 40)])
def test_max_tokens_is_clipped_to_the_limits_of_model_and_pool(model_len: int, room: int) -> None:
    with serving(model=ToyModel(max_model_len=model_len)) as rig:
        for wanted in (1 << 30, None):
            reply = rig.submit(PROMPT, wanted)
            rig.expect(reply, PROMPT, room - len(PROMPT))


def test_a_prompt_that_leaves_one_token_in_the_pool_is_served() -> None:
    with serving(blocks=4, slots=4) as rig:
        for _ in range(2):
            rig.expect(rig.submit([1] * 15, None), [1] * 15, 1)


def test_a_request_refused_by_a_full_queue_is_accepted_later() -> None:
    with serving(max_running=2, max_waiting=3) as rig:
        hold = rig.hold("compute")
        accepted = [rig.submit(PROMPT) for _ in range(4)]
        with pytest.raises(QueueFull, match="4 requests are running or waiting, the bound is 5"):
            rig.submit(PROMPT, n=2)
        accepted.append(rig.submit(PROMPT))
        with pytest.raises(QueueFull, match="the bound is 5: try again later"):
            rig.submit(PROMPT)
        hold.release()
        for reply in accepted:
            rig.expect(reply, PROMPT)
        rig.ask(PROMPT)


# ------------------------------------------------------------------ ends


def test_max_tokens_1_returns_one_token() -> None:
    with serving() as rig:
        reply = rig.ask(PROMPT, 1)
        assert len(reply.deltas) == 1
        assert reply.deltas[0].prompt_tokens == len(PROMPT)


def test_a_stop_token_is_in_the_answers_tokens_but_not_in_its_text() -> None:
    with serving() as rig:
        expected = rig.model.expected(PROMPT, 8)
        upto = expected[: expected.index(expected[4]) + 1]
        reply = rig.submit(PROMPT, 8, stop_token_ids=(expected[4],)).wait()
        assert (reply.token_ids(), reply.reason) == (upto, "stop")
        assert reply.text() == rig.tokenizer.decode(upto[:-1])
        reply = rig.submit(PROMPT, 8, stop_token_ids=(expected[4],), include_stop=True)
        assert reply.wait().text() == rig.tokenizer.decode(upto)


@pytest.mark.parametrize("include", [True, False])
def test_stop_string_that_spans_tokens_ends_an_answer(include: bool) -> None:
    with serving() as rig:
        text = rig.tokenizer.decode(rig.model.expected(PROMPT, 12))
        stop = text[4:7]
        end = text.index(stop) + 3
        reply = rig.submit(PROMPT, 12, stop=("never", stop), include_stop=include).wait()
        assert reply.text() == text[: end if include else end - 3]
        assert (len(reply.token_ids()), reply.reason) == (end, "stop")


def test_text_that_begins_an_unfinished_stop_string_is_sent_at_the_end() -> None:
    with serving() as rig:
        text = rig.tokenizer.decode(rig.model.expected(PROMPT, 8))
        reply = rig.submit(PROMPT, 8, stop=(text[5:] + "!",)).wait()
        assert (reply.text(), reply.reason) == (text, "length")
        assert [delta.text for delta in reply.deltas][5:] == ["", "", text[5:]]


def test_stop_strings_are_ignored_before_min_tokens() -> None:
    with serving() as rig:
        text = rig.tokenizer.decode(rig.model.expected(PROMPT, 12))
        reply = rig.submit(PROMPT, 12, stop=(text[2:4], text[8:10]), min_tokens=6).wait()
        assert (reply.text(), reply.reason) == (text[:8], "stop")


def test_min_tokens_bans_the_eos_token_and_ignore_eos_does_not_stop_at_it() -> None:
    model = ToyModel(eos_every=2)
    prompt = next(p for p in prompts(4, 100) if model.expected(p, 1) == [0])
    with serving(model=model) as rig:
        assert (rig.submit(prompt).wait().token_ids(), rig.submit(prompt).reason) == ([0], "stop")
        forced = rig.submit(prompt, 8, min_tokens=3).wait()
        assert 0 not in forced.token_ids()[:3]
        assert len(forced.token_ids()) >= 3
        ignoring = rig.submit(prompt, 6, ignore_eos=True).wait()
        assert (ignoring.token_ids()[0], len(ignoring.token_ids()), ignoring.reason) == (0, 6, "length")


# ------------------------------------------------------------------ samples


def test_samples_differ_and_repeat_with_the_same_seed() -> None:
    with serving(max_running=8) as rig:
        runs = []
        for _ in range(2):
            reply = rig.submit(PROMPT, 6, n=3, seed=5, temperature=50.0).wait()
            assert [reply.reasons(index) for index in range(3)] == [["length"]] * 3
            runs.append([reply.token_ids(index) for index in range(3)])
        assert runs[0] == runs[1]
        assert len({tuple(tokens) for tokens in runs[0]}) == 3
        alone = rig.submit(PROMPT, 6, seed=6, temperature=50.0).wait()  # the second sample's seed
        assert alone.token_ids() == runs[0][1]


def test_logprobs_are_returned_for_each_token_only_if_requested() -> None:
    with serving() as rig:
        plain, asked, none = rig.submit(PROMPT, 4), rig.submit(PROMPT, 4, logprobs=3), rig.submit(PROMPT, 4, logprobs=0)
        assert plain.wait().logprobs() == []
        logprobs = asked.wait().logprobs()
        assert [one.token_id for one in logprobs] == asked.token_ids()
        assert all(
            len(one.top) == 3 and one.top[0] == (one.token_id, one.logprob) and one.logprob > -1e-3 for one in logprobs
        )
        assert [one.top for one in none.wait().logprobs()] == [()] * 4


def test_a_late_request_with_better_priority_runs_first() -> None:
    with serving(max_running=1) as rig:
        order: list[str] = []
        hold = rig.hold("compute")

        def told(name: str) -> Any:
            return lambda delta: order.append(name) if delta.finish_reason else None

        first = rig.submit(PROMPT, 2, on_delta=told("first"))
        late = [rig.submit(PROMPT, 2, priority=priority, on_delta=told(str(priority))) for priority in (5, 0)]
        hold.release()
        for reply in (first, *late):
            rig.expect(reply, PROMPT, 2)
        assert order.index("0") < order.index("5")


# ------------------------------------------------------------------ abort


def test_a_waiting_request_can_be_aborted() -> None:
    with serving(max_running=1) as rig:
        hold = rig.hold("compute")
        running, waiting = rig.submit(PROMPT), rig.submit(PROMPT)
        rig.abort(waiting)
        hold.release()
        assert waiting.reason == "abort"
        assert waiting.token_ids() == []
        rig.expect(running, PROMPT)


def test_blocks_of_a_request_aborted_while_running_are_safe_to_reuse() -> None:
    with serving(blocks=8) as rig:
        reply = rig.submit(PROMPT, 16).wait_for_tokens(2)
        rig.abort(reply)
        other = [1] * 20
        rig.ask(other)
        assert reply.reason in ("abort", "length")
        assert reply.token_ids() == rig.model.expected(PROMPT, 16)[: len(reply.token_ids())]


def test_repeated_aborts_and_aborts_after_the_end_have_no_effect() -> None:
    with serving() as rig:
        done = rig.ask(PROMPT)
        rig.abort(done)
        rig.abort(done)
        running = rig.submit([1] * 30, 60)
        rig.abort(running)
        rig.abort(running)
        assert running.wait().reasons() == ["abort"]
        rig.turn()
        assert done.reasons() == ["length"]
        assert rig.engine.unfinished == 0


def test_abort_ends_all_samples_of_a_request() -> None:
    with serving(max_running=2) as rig:
        reply = rig.submit(PROMPT, 60, n=3)
        rig.abort(reply)
        reply.wait()
        assert [reply.reasons(index) for index in range(3)] == [["abort"]] * 3


def test_a_sink_may_abort_and_submit_requests() -> None:
    with serving() as rig:
        second: list[Reply] = []
        submitted = threading.Event()

        def on_delta(delta: Delta) -> None:
            if not second:
                second.append(rig.submit(PROMPT, 3))
                rig.abort(first)
                submitted.set()

        ready = threading.Event()
        rig.engine.parts.inbox.put(lambda: ready.wait(10) and None)
        first = rig.submit(PROMPT, 60, on_delta=on_delta)
        ready.set()
        assert submitted.wait(10)
        assert first.wait().reasons() == ["abort"]
        rig.expect(second[0], PROMPT, 3)


def test_handles_are_unique_even_if_many_threads_submit() -> None:
    with serving(max_waiting=200) as rig:
        replies: list[Reply] = []

        def client() -> None:
            replies.extend([rig.submit(PROMPT, 2) for _ in range(8)])

        threads = [threading.Thread(target=client) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for reply in replies:
            rig.expect(reply, PROMPT, 2)
        ids = [request_id for reply in replies if reply.handle for request_id in reply.handle.request_ids]
        assert len(set(ids)) == len(ids) == 48
