"""The engine takes tokens and returns tokens: a front end finds stop strings, and tells the engine to end the
sample.
"""

from __future__ import annotations

from engine_rig import Reply, prompts, serving

from proof.toy import ToyModel
from sidestream.client.front_end import OutputProcessor
from sidestream.config import SamplingParams
from sidestream.types import Delta

PROMPT = prompts(1, 1, longest=12)[0]


def test_the_engine_returns_no_text_and_ignores_stop_strings() -> None:
    with serving() as rig:
        expected = rig.model.expected(PROMPT, 8)
        reply = Reply()
        rig.engine.submit(
            PROMPT, SamplingParams(temperature=0, max_tokens=8, stop=(rig.tokenizer.decode(expected[2:4]),)), reply
        )
        assert (reply.wait().token_ids(), reply.reason) == (expected, "length")
        assert [delta.text for delta in reply.deltas] == [""] * len(reply.deltas)


def test_a_stop_string_ends_its_own_sample_only() -> None:
    with serving() as rig:
        text = rig.tokenizer.decode(rig.model.expected(PROMPT, 60))
        doomed = rig.submit(PROMPT, 60, stop=(text[4:7],)).wait()
        rig.turn()
        assert (doomed.text(), doomed.reasons()) == (text[: text.index(text[4:7])], ["stop"])
        assert rig.engine.unfinished == 0  # without 53 more tokens
        assert (rig.counted("requests_total", "stop"), rig.counted("requests_total", "abort")) == (1, 0)
        assert rig.counted("output_tokens_total") < 20


def test_ending_one_sample_does_not_end_the_others() -> None:
    with serving() as rig:
        reply = Reply(2)
        reply.handle = rig.engine.submit(PROMPT, SamplingParams(temperature=0, max_tokens=60, n=2), reply)
        rig.engine.abort(reply.handle.sample(1), reason="stop")
        reply.wait()
        assert (reply.reasons(0), reply.reasons(1)) == (["length"], ["stop"])
        assert reply.token_ids(0) == rig.model.expected(PROMPT, 60)


def test_an_abort_that_meets_the_engines_own_end_is_counted_once() -> None:
    with serving() as rig:
        text = rig.tokenizer.decode(rig.model.expected(PROMPT, 8))
        reply = rig.submit(PROMPT, 8, stop=(text[6:],)).wait()  # the last token completes it
        rig.engine.abort(reply.handle, reason="stop")  # type: ignore[arg-type]
        rig.turn()
        assert (reply.text(), reply.reasons()) == (text[:6], ["stop"])
        assert rig.counted("requests_total", "length") + rig.counted("requests_total", "stop") == 1


def test_text_is_the_same_if_the_front_end_reads_late() -> None:
    with serving(model=ToyModel(eos_every=9)) as rig:
        for number, prompt in enumerate(prompts(3, 12)):
            text = rig.tokenizer.decode(rig.model.expected(prompt, 12))
            stop = text[2 : 2 + number % 3]
            params = {"stop": (stop,)} if stop else {}
            at_once, later = rig.submit(prompt, 12, **params).wait(), Reply()
            chosen = SamplingParams(temperature=0, max_tokens=12, **params)  # type: ignore[arg-type]
            rig.engine.submit(prompt, chosen, later)
            output = OutputProcessor(rig.tokenizer, chosen)
            read: list[Delta] = [delta for told in later.wait().deltas if (delta := output.read(told)) is not None]
            assert "".join(delta.text for delta in read) == at_once.text()
            assert [token for delta in read for token in delta.token_ids] == at_once.token_ids()
            assert [delta.finish_reason for delta in read if delta.finish_reason] == at_once.reasons()
