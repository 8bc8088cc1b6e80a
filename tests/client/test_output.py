"""Deltas of tokens become deltas with text; stop strings and tokenizers that fail end a sample, and that sample
alone.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Collection, Sequence

import pytest

from proof.tokenizer import ToyTokenizer, text_bytes
from sidestream.client.front_end import OutputProcessor
from sidestream.config import SamplingParams
from sidestream.text import Detokenizer
from sidestream.types import CachedTokens, Delta, TokenLogprob

CACHED = CachedTokens(device=2)
TOKENIZER = ToyTokenizer()


def told(
    tokens: tuple[int, ...], reason: str | None = None, *, index: int = 0, text: str = "", error: str | None = None
) -> Delta:
    """A delta as the engine sends it, unless it has text."""
    return Delta(
        index, text, tokens, tuple(TokenLogprob(token, -0.5, ()) for token in tokens), reason, 3, CACHED, error
    )


def ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text))


class Failing(ToyTokenizer):
    """Fails at a token, or where a text ends."""

    def __init__(self, *, at: int | None) -> None:
        self._at = at

    def detokenizer(self, after: Sequence[int] = (), shown: Collection[str] = ()) -> Detokenizer:
        at = self._at

        class Brittle(Detokenizer):
            def push(self, token_id: int) -> str:
                if token_id == at:
                    raise UnicodeError("injected: no such character")
                return super().push(token_id)

            def finish(self) -> str:
                if at is None:
                    raise UnicodeError("injected: half a character is left")
                return super().finish()

        return Brittle(text_bytes)


def expected(text: str, reason: str, params: SamplingParams) -> tuple[str, int, str]:
    """Text, number of tokens and finish reason of an answer of one character a token, from its whole text."""
    shown = text[:-1] if reason == "stop" and not params.include_stop else text
    first = max(params.min_tokens - 1, 0)
    for end in range(first, len(shown) + 1):
        found = [stop for stop in params.stop if shown[first:end].endswith(stop)]
        if found:
            return shown[: end if params.include_stop else end - max(map(len, found))], end, "stop"
    return shown, len(text), reason


@pytest.mark.parametrize("include_stop", [False, True])
@pytest.mark.parametrize("reason", ["stop", "length", "abort"])
def test_text_tokens_and_reason_do_not_depend_on_how_an_answer_is_split(reason: str, include_stop: bool) -> None:
    rng = random.Random(7)
    reasons: set[str] = set()
    for _ in range(400):
        text = "".join(rng.choices("ab", k=rng.randint(1, 12)))
        stops = tuple({"".join(rng.choices("ab", k=rng.randint(1, 4))) for _ in range(rng.randint(0, 2))})
        params = SamplingParams(stop=stops, include_stop=include_stop, min_tokens=rng.randint(0, 6), max_tokens=12)
        output, left, read = OutputProcessor(TOKENIZER, params), list(ids(text)), list[Delta]()
        while left:
            count = rng.randint(1, 3)
            delta = told(tuple(left[:count]), reason if count >= len(left) and reason != "abort" else None)
            del left[:count]
            if (with_text := output.read(delta)) is not None:
                read.append(with_text)
        if reason == "abort" and (last := output.read(told((), "abort"))) is not None:
            read.append(last)
        shown, num_tokens, end = expected(text, reason, params)
        assert "".join(delta.text for delta in read) == shown, (text, params)
        tokens = [token for delta in read for token in delta.token_ids]
        assert tokens == list(ids(text)[:num_tokens])
        assert [one.token_id for delta in read for one in delta.logprobs] == tokens
        assert [delta.finish_reason for delta in read if delta.finish_reason is not None] == [end]
        assert {(delta.prompt_tokens, delta.cached) for delta in read} == {(3, CACHED)}
        reasons.add(end)
    assert reasons == {reason, "stop"}


def test_text_that_may_begin_a_stop_string_is_held_back_until_it_is_certain() -> None:
    output = OutputProcessor(TOKENIZER, SamplingParams(stop=("abc",)))
    read = [
        output.read(told(ids(text), reason))
        for text, reason in (("x", None), ("a", None), ("b", None), ("xa", None), ("b", "length"))
    ]
    assert [delta.text for delta in read if delta is not None] == ["x", "", "", "abx", "ab"]


def test_tokens_behind_a_stop_string_are_dropped_and_later_deltas_too() -> None:
    output = OutputProcessor(TOKENIZER, SamplingParams(stop=("bc",), n=2))
    assert output.read(told(ids("ab"))) == told(ids("ab"), text="a")
    assert output.read(told(ids("cde"), "length")) == told(ids("c"), "stop")
    assert output.read(told(ids("f"))) is None
    assert output.read(told((), "stop")) is None
    assert output.read(told(ids("ab"), index=1)) == told(ids("ab"), index=1, text="a")  # the other sample goes on


def test_tokenizer_that_fails_ends_that_sample_alone_with_an_error() -> None:
    output = OutputProcessor(Failing(at=7), SamplingParams(n=2))
    assert output.read(told((5,))) == told((5,), text=TOKENIZER.decode([5]))
    failed = told(
        (6, 7), "error", text=TOKENIZER.decode([6]), error="the tokenizer failed: injected: no such character"
    )
    assert output.read(told((6, 7, 8))) == failed
    assert output.read(told((), "abort")) is None
    assert output.read(told((5,), "length", index=1)) == told((5,), "length", index=1, text=TOKENIZER.decode([5]))


def test_sample_whose_last_text_cannot_be_made_ends_with_an_error_and_all_its_tokens() -> None:
    read = OutputProcessor(Failing(at=None), SamplingParams()).read(told((5, 6, 0), "stop"))
    assert read is not None
    assert (read.token_ids, read.finish_reason) == ((5, 6, 0), "error")
    assert read.error == "the tokenizer failed: injected: half a character is left"


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_a_failed_sample_keeps_its_finish_reason_if_its_tokenizer_fails_too(reason: str) -> None:
    assert OutputProcessor(Failing(at=None), SamplingParams()).read(told((), reason)) == told((), reason)


def test_imports_of_an_api_process_load_neither_torch_nor_an_engine() -> None:
    imported = "[name for name in ('torch', 'transformers', 'sidestream.engine') if name in sys.modules]"
    program = f"import sys, sidestream.client.front_end; print({imported})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"
