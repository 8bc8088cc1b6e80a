"""Text that is made where news are read is the text that the engine would have made."""

from __future__ import annotations

import dataclasses

import pytest
from engine_rig import Reply, prompts, serving

from sidestream.config import SamplingParams
from sidestream.engine import Reader
from sidestream.testing.tokenizer import ToyDetokenizer, ToyTokenizer
from sidestream.testing.toy import ToyModel
from sidestream.types import CachedTokens, Delta

NOTHING = CachedTokens()


def news(tokens: tuple[int, ...], reason: str | None = None, *, text: str = "", index: int = 0) -> Delta:
    return Delta(index, text, tokens, (), reason, 3, NOTHING)


class Failing(ToyTokenizer):
    """Fails at a token, or where a text ends."""

    def __init__(self, *, at: int | None) -> None:
        super().__init__()
        self._at = at

    def detokenizer(self) -> ToyDetokenizer:
        at = self._at

        class Brittle(ToyDetokenizer):
            def push(self, token_id: int) -> str:
                if token_id == at:
                    raise UnicodeError("injected: no such character")
                return super().push(token_id)

            def finish(self) -> str:
                if at is None:
                    raise UnicodeError("injected: half a character is left")
                return super().finish()

        return Brittle()


@pytest.mark.parametrize("include_stop", [False, True])
def test_the_text_is_that_which_the_engine_makes(include_stop: bool) -> None:
    model = ToyModel(eos_every=9)
    with serving(model=model) as rig:
        ended: set[str] = set()
        for prompt in prompts(3, 12):
            params = SamplingParams(temperature=0, max_tokens=12, include_stop=include_stop)
            made, quiet = rig.submit(prompt, 12, include_stop=include_stop).wait(), Reply()
            rig.engine.submit(prompt, params, quiet, text=False)
            told = quiet.wait().deltas
            assert not any(delta.text for delta in told)
            reader = Reader(rig.tokenizer, params)
            read = [reader.read(delta) for delta in told]
            assert "".join(delta.text for delta in read if delta is not None) == made.text()
            assert [dataclasses.replace(delta, text="") for delta in read if delta is not None] == told
            ended.add(str(told[-1].finish_reason))
        assert ended == {"stop", "length"}


def test_text_that_the_engine_made_to_find_a_stop_string_is_left_as_it_is() -> None:
    reader = Reader(ToyTokenizer(), SamplingParams(stop=("x",)))
    delta = news((5, 6), "stop", text="said")
    assert reader.read(delta) is delta


def test_engine_makes_text_unasked_if_it_looks_for_a_stop_string() -> None:
    with serving() as rig:
        (prompt,) = prompts(5, 1)
        text = rig.ask(prompt, 12).text()
        stop, reply = text[3:5], Reply()
        rig.engine.submit(prompt, SamplingParams(temperature=0, max_tokens=12, stop=(stop,)), reply, text=False)
        assert reply.reason == "stop"
        assert reply.text() == text[: text.index(stop)]


def test_a_tokenizer_that_fails_ends_that_sample_alone_with_an_error() -> None:
    reader = Reader(Failing(at=7), SamplingParams(n=2))
    assert reader.read(news((5,))) == news((5,), text=ToyTokenizer().decode([5]))
    failed = reader.read(news((6, 7)))
    assert failed is not None
    assert (failed.finish_reason, failed.error) == ("error", "the tokenizer failed: injected: no such character")
    assert reader.read(news((), "abort")) is None
    other = reader.read(news((5,), "length", index=1))
    assert other is not None
    assert other.finish_reason == "length"


def test_a_sample_that_was_aborted_is_told_so_though_the_rest_of_its_text_cannot_be_made() -> None:
    reader = Reader(Failing(at=None), SamplingParams())
    assert reader.read(news((), "abort")) == news((), "abort")
    assert Reader(Failing(at=None), SamplingParams()).read(news((), "error")) == news((), "error")
