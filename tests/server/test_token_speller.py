"""Joined texts and bytes of tokens in log-probabilities equal the text and bytes of the answer."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proof.fake_backend import FakeTokenizer
from proof.tiny_models import byte_tokenizer
from sidestream.client.front_end import OutputProcessor
from sidestream.config import SamplingParams
from sidestream.server.responses import TokenSpeller, spelled_prompt
from sidestream.tokenizer import Tokenizer
from sidestream.types import CachedTokens, Delta, TokenLogprob

TOKENIZER = FakeTokenizer()
any_bytes = st.one_of(
    st.text("aé€👍", max_size=8).map(str.encode), st.lists(st.sampled_from(b"a\xc3\xa9\xe2\x82\xac\xf0\xff"))
)


@settings(max_examples=500)
@given(
    tokens=any_bytes.map(list),
    sizes=st.lists(st.integers(0, 3), min_size=1),
    stop=st.lists(st.text("aé€\ufffd", min_size=1, max_size=3), max_size=2),
    reason=st.sampled_from(["stop", "length"]),
    include=st.booleans(),
)
def test_joined_texts_and_bytes_of_tokens_equal_the_answer(
    tokens: list[int], sizes: list[int], stop: list[str], reason: str, include: bool
) -> None:
    params = SamplingParams(stop=tuple(stop), include_stop=include, logprobs=0)
    if reason == "stop":
        tokens = [*tokens, ord("!")]  # the stop token, whose text is left out unless `include`
    output, speller = OutputProcessor(TOKENIZER, params), TokenSpeller(TOKENIZER.detokenizer())
    left, turn = list(tokens), 0
    text = spelled = ""
    data = b""
    num_tokens = num_spelled = 0
    ended = False
    while not ended:
        size = sizes[turn % len(sizes)] + (turn % len(sizes) == 0)
        turn += 1
        piece, left = left[:size], left[size:]
        logprobs = tuple(TokenLogprob(token, -0.5, ()) for token in piece)
        delta = output.read(Delta(0, "", tuple(piece), logprobs, None if left else reason, 1, CachedTokens()))
        assert delta is not None
        ended = delta.finish_reason is not None
        text += delta.text
        num_tokens += len(delta.token_ids)
        ready = speller.add(delta.logprobs, delta.text, ended=ended)
        assert all(token.start <= len(text) for token in ready)
        spelled += "".join(token.text for token in ready)
        data += b"".join(token.data for token in ready)
        num_spelled += len(ready)
        assert text.startswith(spelled)  # a token never comes before its text
    assert (spelled, num_spelled) == (text if tokens else "", num_tokens)
    if "\ufffd" not in TOKENIZER.decode(tokens):
        assert data == text.encode()
    elif not stop:
        assert data.decode("utf-8", "replace") == text


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("hi", ["", "h", "i"]),  # the tokenizer has put it in front
        ("<|im_start|>hi", ["<|im_start|>", "h", "i"]),
    ],
)
def test_special_tokens_of_an_echoed_prompt_have_a_text_if_the_client_sent_them(text: str, tokens: list[str]) -> None:
    tokenizer = Tokenizer(byte_tokenizer(), eos_ids=[])
    ids = tokenizer.encode("<|im_start|>hi")
    spelled = spelled_prompt(ids, [TokenLogprob(token, -0.5, ()) for token in ids[1:]], 0, text, tokenizer)
    assert [token.text for token in spelled] == tokens
    assert [token.start for token in spelled] == [0, len(tokens[0]), len(tokens[0]) + 1]
